"""Symbols as MXNet writes them in JSON: which nodes normalize, and how a graph is rewritten."""

import json

import mxnet as mx
from mxnet.util import is_np_array

from .. import native

# The operators of batch normalization in the graph of a SymbolBlock, and whether a relu is part of
# them.
STOCK_OPERATORS = {
    "BatchNorm": False,
    "_contrib_SyncBatchNorm": False,
    "_contrib_BatchNormWithReLU": True,
}
OUR_OPERATOR = {native.OP_TYPE: False}
# Of the inputs behind the data.
ROLES = ("gamma", "beta", "running_mean", "running_var")
_DEFAULT_MOMENTUM = 0.9


class ExportError(RuntimeError):
    """A net that cannot be exported as asked. Nothing was written; the text says why."""


def variable(name):
    """A symbol for an input, of the kind that blocks take: NumPy's after ``mx.npx.set_np()``."""
    symbol = mx.sym.var(name)
    return symbol.as_np_ndarray() if is_np_array() else symbol


def is_true(text):
    """The value of a flag among a node's attributes."""
    return text in ("True", "true", "1")


def settings_of(attributes):
    """The arguments of ``nn.BatchNorm`` that a node's attributes say. All others, which matter in
    training only, are left out."""
    try:
        momentum = float(attributes.get("momentum", _DEFAULT_MOMENTUM))
    except ValueError:
        momentum = _DEFAULT_MOMENTUM
    return {
        "axis": int(attributes.get("axis", 1)),
        "momentum": momentum,
        "epsilon": float(attributes.get("epsilon", attributes.get("eps", 1e-3))),
        "scale": not is_true(attributes.get("fix_gamma", "True")),
        "use_global_stats": is_true(attributes.get("use_global_stats", "False")),
    }


def integers(text):
    """The numbers of an attribute such as ``(3, 3)``."""
    return tuple(int(part) for part in text.strip("()[] ").replace(" ", "").split(",") if part)


class Node:
    """A node that knows its inputs: a list of (node, number of its output)."""

    def __init__(self, op, name, attrs=None, inputs=(), more=None):
        self.op = op
        self.name = name
        self.attrs = dict(attrs or {})
        self.inputs = list(inputs)
        self.more = more or {}

    @property
    def operator(self):
        """The operator; for a custom one its op_type."""
        return self.attrs["op_type"] if self.op == "Custom" else self.op

    @property
    def is_layout_copy(self):
        """Whether it is one of the copies around our operator: it swaps an axis with itself."""
        return self.op == "SwapAxis" and self.attrs.get("dim1") == self.attrs.get("dim2")


class Graph:
    """A symbol whose nodes can be rewritten in place. What no head needs any more is gone.

    ``heads`` are its outputs, (node, number of its output) each.
    """

    def __init__(self, symbol):
        self._read(json.loads(symbol.tojson()))
        # What comes in twice, as where a SymbolBlock is called twice, is one.
        first = {}
        for node in self.nodes():
            if node.op == "null":
                first.setdefault(node.name, node)
        self.redirect(lambda entry: (first[entry[0].name], 0) if entry[0].op == "null" else entry)

    def _read(self, graph):
        nodes = []
        for entry in graph["nodes"]:
            known = {"op", "name", "attrs", "inputs"}
            more = {key: value for key, value in entry.items() if key not in known}
            inputs = [(nodes[number], output) for number, output, *_ in entry["inputs"]]
            nodes.append(Node(entry["op"], entry["name"], entry.get("attrs"), inputs, more))
        self.heads = [(nodes[number], output) for number, output, *_ in graph["heads"]]
        self._attrs = graph.get("attrs", {})

    @classmethod
    def of_json(cls, graph):
        result = cls.__new__(cls)
        result._read(graph)
        return result

    def nodes(self):
        """All nodes, each behind those that it takes its inputs from."""
        done, result = set(), []
        stack = [(head, False) for head, _ in reversed(self.heads)]
        while stack:
            node, complete = stack.pop()
            if complete:
                result.append(node)
            elif id(node) not in done:
                done.add(id(node))
                stack.append((node, True))
                stack.extend((source, False) for source, _ in reversed(node.inputs))
        return result

    def variables(self):
        """The names of inputs and parameters."""
        return {node.name for node in self.nodes() if node.op == "null"}

    def users(self):
        """{id of a node: the (node, number of its input) that take from it}; a head is (None, its
        number)."""
        result = {}
        for node in self.nodes():
            result.setdefault(id(node), [])
            for number, (source, _) in enumerate(node.inputs):
                result.setdefault(id(source), []).append((node, number))
        for number, (source, _) in enumerate(self.heads):
            result[id(source)].append((None, number))
        return result

    def entry(self, user, number):
        """What a user of :meth:`users` takes: (node, number of its output)."""
        return self.heads[number] if user is None else user.inputs[number]

    def redirect(self, change):
        """Takes the input change(entry) in place of each entry, heads included."""
        for node in self.nodes():
            node.inputs = [change(entry) for entry in node.inputs]
        self.heads = [change(entry) for entry in self.heads]

    def free_name(self, name):
        """`name`, or with a number behind it where a node has it."""
        names = {node.name for node in self.nodes()}
        result, number = name, 0
        while result in names:
            number += 1
            result = f"{name}{number}"
        return result

    def _json(self):
        nodes = self.nodes()
        numbers = {id(node): number for number, node in enumerate(nodes)}

        def entries(pairs):
            return [[numbers[id(node)], output, 0] for node, output in pairs]

        written = [
            {
                "op": node.op,
                "name": node.name,
                **({"attrs": node.attrs} if node.attrs else {}),
                "inputs": entries(node.inputs),
                **node.more,
            }
            for node in nodes
        ]
        return {
            "nodes": written,
            "arg_nodes": [number for number, node in enumerate(nodes) if node.op == "null"],
            "heads": entries(self.heads),
            "attrs": self._attrs,
        }

    def symbol(self):
        # MXNet does not read what JSON makes of other letters.
        return mx.sym.load_json(json.dumps(self._json(), ensure_ascii=False))

    def name_apart(self):
        """Gives operators names of their own, where a block was called several times: ONNX tells
        values apart by them."""
        names = set()
        for node in self.nodes():
            name, number = node.name, 0
            while node.name in names:
                number += 1
                node.name = f"{name}_{number}"
            names.add(node.name)

    def all_nodes(self):
        """Those of graphs within nodes too, which can be read but not changed."""
        nodes = self.nodes()
        for _, inner in self.subgraphs():
            for part in inner:
                nodes += Graph.of_json(part).all_nodes()
        return nodes

    def subgraphs(self):
        """(node, its graphs) of each node that has graphs of its own, such as a loop."""
        return [(node, node.more["subgraphs"]) for node in self.nodes() if "subgraphs" in node.more]


def make_stock(graph, within=None):
    """Turns every kind of batch normalization in a Graph into the stock operator ``BatchNorm``.

    Raises an ExportError where one's mean or variance is an output of the graph or the input of
    another node, which ``BatchNorm`` would give in another form, and for momentum=None in a graph
    `within` a node, such as a loop.
    """
    for node, inner in graph.subgraphs():
        graphs = [Graph.of_json(entry) for entry in inner]
        for part in graphs:
            make_stock(part, node)
        node.more["subgraphs"] = [part._json() for part in graphs]
    graph.redirect(before_layout_copies)
    users = graph.users()
    behind = {}
    for node in graph.nodes():
        operator = node.operator
        if operator not in STOCK_OPERATORS and operator not in OUR_OPERATOR:
            continue
        if operator != "BatchNorm":
            _require_one_output(graph, node, users[id(node)])
            settings = settings_of(node.attrs)
            node.attrs = {
                "axis": str(settings["axis"]),
                "eps": repr(settings["epsilon"]),
                "fix_gamma": str(not settings["scale"]),
                "momentum": repr(settings["momentum"]),
                "use_global_stats": str(settings["use_global_stats"]),
            }
            node.op = "BatchNorm"
            if within and len(node.inputs) > 1 + len(ROLES):
                raise ExportError(
                    f"{node.name} has momentum=None and is called in {within.name} "
                    f"({within.operator}), which counts what its graph takes: set the layer's "
                    "momentum to a number for the export."
                )
            # With momentum=None there is num_batches_tracked behind them, for training.
            del node.inputs[1 + len(ROLES) :]
            if STOCK_OPERATORS.get(operator):
                relu = Node("Activation", node.name, {"act_type": "relu"}, [(node, 0)])
                behind[id(node)] = relu
    if behind:
        _put_behind(graph, behind)


def before_layout_copies(entry):
    while entry[0].is_layout_copy:
        entry = entry[0].inputs[0]
    return entry


def _require_one_output(graph, node, users):
    for user, number in users:
        if graph.entry(user, number)[1] > 0:
            where = "an output of the net" if user is None else f"an input of {user.name}"
            raise ExportError(
                f"The mean or variance of {node.name} ({node.operator}) is {where}, and the stock "
                "BatchNorm gives them in another form: use only its first output."
            )


def _put_behind(graph, behind):
    """Puts nodes behind others: {id of the node in front: the new one, which has it for input}."""
    graph.redirect(lambda entry: (behind[id(entry[0])], 0) if id(entry[0]) in behind else entry)
    for node in behind.values():
        source, _ = node.inputs[0]
        source.name = graph.free_name(f"{node.name}_bn")
