"""Reads and rewrites symbols in MXNet's JSON."""

from __future__ import annotations

import collections
import itertools
import json
import re
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, Optional, Tuple

import mxnet as mx
from mxnet.util import is_np_array

from .. import native
from ..layers.operator import Settings, is_numpy, is_true

# The operators of batch normalization, and whether they include a relu.
STOCK_OPERATORS = {
    "BatchNorm": False,
    "BatchNorm_v1": False,
    "_contrib_SyncBatchNorm": False,
    "_contrib_BatchNormWithReLU": True,
}
OUR_OPERATOR = {native.OP_TYPE: False}
# The inputs after the data.
ROLES = ("gamma", "beta", "running_mean", "running_var")
# The number of our operator's residual input, if it has one.
RESIDUAL = 3
# An output of a node: the node, and the output's number.
NodeEntry = Tuple["Node", int]
# {id of a node: [(node that uses it, number of the input)]}; a head is (None, number).
Users = Dict[int, List[Tuple[Optional["Node"], int]]]
_RANDOM = re.compile(
    "_(random|sample|shuffle|image_random|npx__image_random|npi_random|contrib_dgl_csr_neighbor)|"
    "_npi_(bernoulli|choice|exponential|gamma|gumbel|logistic|multinomial|normal|pareto|rayleigh|"
    "shuffle|uniform|weibull)"
)


class ExportError(RuntimeError):
    """A net that cannot be exported as requested. Nothing was written; the message says why."""


def variable(name: str) -> mx.sym.Symbol:
    """A symbol for an input, NumPy's after ``mx.npx.set_np()``."""
    symbol = mx.sym.var(name)
    return symbol.as_np_ndarray() if is_np_array() else symbol


def settings_of(node: Node) -> Settings:
    """The Settings of a node of batch normalization, MXNet's or ours."""
    if node.operator in OUR_OPERATOR:
        return Settings.read(node.attrs)
    defaults = {"fix_gamma": "True", "epsilon": node.attrs.get("eps", "1e-3")}
    return Settings.read({**defaults, **node.attrs})


def integers(text: str) -> tuple[int, ...]:
    """The numbers of an attribute such as ``(3, 3)``."""
    return tuple(int(part) for part in text.strip("()[] ").replace(" ", "").split(",") if part)


class Node:
    """A node; its inputs are a list of (node, output)."""

    def __init__(
        self,
        op: str,
        name: str,
        attrs: Mapping[str, str] | None = None,
        inputs: Iterable[NodeEntry] = (),
        more: dict[str, Any] | None = None,
    ) -> None:
        self.op = op
        self.name = name
        self.attrs = dict(attrs or {})
        self.inputs = list(inputs)
        self.more = more or {}

    @property
    def operator(self) -> str:
        """The operator; for ours its op_type. Other custom ones may be named as one of MXNet's."""
        is_ours = self.op == "Custom" and self.attrs["op_type"] == native.OP_TYPE
        return native.OP_TYPE if is_ours else self.op

    @property
    def is_layout_copy(self) -> bool:
        """Whether it is a layout copy of our operator: it swaps an axis with itself."""
        return self.op == "SwapAxis" and self.attrs.get("dim1") == self.attrs.get("dim2")

    def graphs(self) -> list[Graph]:
        """The graphs within a node, such as a loop's; changes to them are not written back."""
        return [Graph.of_json(part) for part in self.more.get("subgraphs", ())]


class Graph:
    """A symbol whose nodes can be rewritten in place. Nodes that no head needs are dropped.

    ``heads`` are its outputs: a list of (node, output).
    """

    heads: list[NodeEntry]

    def __init__(self, symbol: mx.sym.Symbol) -> None:
        self._read(json.loads(symbol.tojson()))
        # A SymbolBlock that is called twice has two nodes for each variable.
        first: dict[str, Node] = {}
        self.rewrite(
            lambda node: (first.setdefault(node.name, node), 0) if node.op == "null" else None
        )

    def _read(self, graph: Mapping[str, Any]) -> None:
        nodes: list[Node] = []
        for entry in graph["nodes"]:
            known = {"op", "name", "attrs", "inputs"}
            more = {key: value for key, value in entry.items() if key not in known}
            inputs = [(nodes[number], output) for number, output, *_ in entry["inputs"]]
            nodes.append(Node(entry["op"], entry["name"], entry.get("attrs"), inputs, more))
        self.heads = [(nodes[number], output) for number, output, *_ in graph["heads"]]
        self._attrs = graph.get("attrs", {})

    @classmethod
    def of_json(cls, graph: Mapping[str, Any]) -> Graph:
        result = cls.__new__(cls)
        result._read(graph)
        return result

    def nodes(self) -> list[Node]:
        """All nodes, each after its inputs."""
        done: set[int] = set()
        result: list[Node] = []
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

    def variables(self) -> set[str]:
        """The names of inputs and parameters."""
        return {node.name for node in self.nodes() if node.op == "null"}

    def users(self) -> Users:
        """{id of a node: [(node that uses it, number of the input)]}; a head is (None, number)."""
        result: Users = {}
        for node in self.nodes():
            result.setdefault(id(node), [])
            for number, (source, _) in enumerate(node.inputs):
                result.setdefault(id(source), []).append((node, number))
        for number, (source, _) in enumerate(self.heads):
            result[id(source)].append((None, number))
        return result

    def entry(self, user: Node | None, number: int) -> NodeEntry:
        """The (node, output) that a user of :meth:`users` takes."""
        return self.heads[number] if user is None else user.inputs[number]

    def rewrite(self, change: Callable[[Node], NodeEntry | None]) -> None:
        """Replaces nodes in one pass from the inputs up.

        change(node) is called once for each node, in the order that :meth:`nodes` has before the
        first change, once the node's inputs have been replaced. It returns the entry that replaces
        the node's first output, or None.
        """
        new: dict[tuple[int, int], NodeEntry] = {}

        def moved(entry: NodeEntry) -> NodeEntry:
            return new.get((id(entry[0]), entry[1]), entry)

        nodes = self.nodes()
        for node in nodes:
            node.inputs = [moved(entry) for entry in node.inputs]
            replacement = change(node)
            if replacement:
                new[id(node), 0] = replacement
        self.heads = [moved(entry) for entry in self.heads]

    def free_name(self, name: str) -> str:
        """`name`, or `name` and a number if a node has that name."""
        return _free(name, {node.name for node in self.nodes()}, "")

    def _json(self) -> dict[str, Any]:
        nodes = self.nodes()
        numbers = {id(node): number for number, node in enumerate(nodes)}

        def entries(pairs: Iterable[NodeEntry]) -> list[list[int]]:
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

    def symbol(self) -> mx.sym.Symbol:
        # MXNet does not read escaped letters.
        return mx.sym.load_json(json.dumps(self._json(), ensure_ascii=False))

    def symbol_like(self, other: mx.sym.Symbol) -> mx.sym.Symbol:
        """The symbol, one of NumPy's if the other is."""
        symbol = self.symbol()
        return symbol.as_np_ndarray() if is_numpy(other) else symbol

    def name_apart(self) -> None:
        """Makes the names of nodes unique, even if a block was called several times: ONNX
        identifies values by name. Variables keep theirs, which parameters have."""
        names = self.variables()
        for node in self.nodes():
            if node.op != "null":
                node.name = _free(node.name, names, "_")
                names.add(node.name)

    def all_nodes(self) -> list[Node]:
        """All nodes, including those of graphs within nodes, which can be read but not changed."""
        nodes = self.nodes()
        inner = [graph for node in nodes for graph in node.graphs()]
        return nodes + [node for graph in inner for node in graph.all_nodes()]


def _free(name: str, taken: Collection[str], separator: str) -> str:
    names = itertools.chain([name], (f"{name}{separator}{n}" for n in itertools.count(1)))
    return next(name for name in names if name not in taken)


def is_fused(node: Node) -> bool:
    """Whether a node of ours computes more than the normalization."""
    return has_residual(node) or settings_of(node).activation is not None


def is_random(node: Node, training: bool = False) -> bool:
    """Whether a node draws random numbers."""
    if node.op == "Dropout":
        return training or node.attrs.get("mode") == "always"
    is_rrelu = node.op == "LeakyReLU" and node.attrs.get("act_type") == "rrelu"
    in_training = node.op == "RNN" or is_rrelu
    return training and in_training or bool(_RANDOM.match(node.op))


def has_residual(node: Node) -> bool:
    return is_true(node.attrs.get("residual", "False"))


def is_in_place(node: Node) -> bool:
    return node.operator in OUR_OPERATOR and settings_of(node).inplace


def taken_apart(node: Node) -> tuple[NodeEntry, NodeEntry | None, list[NodeEntry]]:
    """The entries (x, residual or None, parameters) of a node of batch normalization. x and the
    residual are those before their layout copies."""
    x, *parameters = node.inputs
    residual = parameters.pop(RESIDUAL - 1) if has_residual(node) else None
    return before_layout_copies(x), residual and before_layout_copies(residual), parameters


def unfused(node: Node, y: NodeEntry, residual: NodeEntry | None) -> NodeEntry:
    """The entry y of a normalization, followed by separate nodes for the residual and activation of
    our node."""
    if residual:
        y = Node("elemwise_add", f"{node.name}_add", inputs=[y, residual]), 0
    settings = settings_of(node)
    if settings.activation == "relu":
        y = Node("Activation", f"{node.name}_relu", {"act_type": "relu"}, [y]), 0
    elif settings.activation == "leaky_relu":
        attrs = {"act_type": "leaky", "slope": str(settings.slope)}
        y = Node("LeakyReLU", f"{node.name}_leaky_relu", attrs, [y]), 0
    return y


def with_node_ids(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """A symbol in which the nodes of a layer that has several are numbered, in the order of the
    graph. So the numbers depend on the graph alone, not on what else a process has traced."""
    if symbol.tojson().count(native.OP_TYPE) < 2:
        return symbol
    graph = Graph(symbol)
    nodes_of: dict[str, list[Node]] = collections.defaultdict(list)
    for node in graph.nodes():
        if node.operator in OUR_OPERATOR:
            nodes_of[node.attrs["layer"]].append(node)
    several = [nodes for nodes in nodes_of.values() if len(nodes) > 1]
    for nodes in several:
        for number, node in enumerate(nodes):
            node.attrs["node"] = str(number)
    return graph.symbol_like(symbol) if several else symbol


def make_stock(
    graph: Graph,
    within: Node | None = None,
    operators: Collection[str] = (*STOCK_OPERATORS, *OUR_OPERATOR),
) -> None:
    """Turns batch normalization of these kinds in a Graph into the stock operator ``BatchNorm``,
    followed by nodes for its residual and activation.

    Raises ExportError if a mean or variance is an output of the graph or the input of another node,
    because ``BatchNorm`` returns them in another form. Also raises it for momentum=None in a graph
    `within` a node, such as a loop.
    """
    for node in graph.nodes():
        graphs = node.graphs()
        for part in graphs:
            make_stock(part, node, operators)
        if graphs:
            node.more["subgraphs"] = [part._json() for part in graphs]
    users = graph.users()

    def change(node: Node) -> NodeEntry | None:
        if node.is_layout_copy:
            return node.inputs[0]
        operator = node.operator
        if operator not in operators:
            return None
        if is_in_place(node):
            raise ExportError(
                f"{node.name} works in place, where small gammas count as larger ones: export the "
                "net or the file with its parameters, which are changed accordingly."
            )
        if operator == "BatchNorm":
            return None
        _require_one_output(graph, node, users[id(node)])
        x, residual, parameters = taken_apart(node)
        if within and len(parameters) > len(ROLES):
            raise ExportError(
                f"{node.name} has momentum=None and is called in {within.name} "
                f"({within.operator}), which fixes the number of inputs: set the layer's "
                "momentum to a number for the export."
            )
        if STOCK_OPERATORS.get(operator):
            node.attrs["activation"] = "relu"
        settings = settings_of(node)
        values = {
            "axis": settings.axis,
            "eps": settings.epsilon,
            "fix_gamma": settings.fix_gamma,
            "momentum": 0.9 if settings.momentum is None else settings.momentum,
            "use_global_stats": settings.use_global_stats,
        }
        attrs = {name: str(value) for name, value in values.items()}
        # With momentum=None there is another input for training: num_batches_tracked.
        norm = Node("BatchNorm", node.name, attrs, [x, *parameters[: len(ROLES)]])
        return unfused(node, (norm, 0), residual)

    graph.rewrite(change)


def add_layout_copies(graph: Graph) -> Graph:
    """Lets the CPU run a graph that was traced for GPUs, which need no layout copies."""

    def copy(entry: NodeEntry) -> NodeEntry:
        return Node("SwapAxis", "layout_copy", {"dim1": "0", "dim2": "0"}, [entry]), 0

    def change(node: Node) -> NodeEntry | None:
        if node.operator not in OUR_OPERATOR or not is_true(node.attrs["gpu_only"]):
            return None
        node.attrs["gpu_only"] = "False"
        for number in (0, RESIDUAL) if has_residual(node) else (0,):
            node.inputs[number] = copy(node.inputs[number])
        return copy((node, 0))

    graph.rewrite(change)
    return graph


def before_layout_copies(entry: NodeEntry) -> NodeEntry:
    while entry[0].is_layout_copy:
        entry = entry[0].inputs[0]
    return entry


def _require_one_output(graph: Graph, node: Node, users: Iterable[tuple[Node | None, int]]) -> None:
    for user, number in users:
        if graph.entry(user, number)[1] > 0:
            where = "an output of the net" if user is None else f"an input of {user.name}"
            raise ExportError(
                f"The mean or variance of {node.name} ({node.operator}) is {where}, and the stock "
                "BatchNorm returns them in another form: use only its first output."
            )
