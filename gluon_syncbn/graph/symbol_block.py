"""Synchronized layers in the graph of a SymbolBlock."""

import dataclasses
import functools
import json

import mxnet as mx
from mxnet.gluon import SymbolBlock, nn
from mxnet.gluon.block import _flatten, _regroup
from mxnet.gluon.parameter import ParameterDict

from ..layers.operator import is_numpy
from .symbols import (
    OUR_OPERATOR,
    ROLES,
    has_operator,
    is_gate,
    is_true,
    operator_of,
    settings_of,
    variable,
)

_CUMULATIVE_GRAPH = (
    "it has momentum=None, which is not read from a graph: build the net and load its parameters."
)


@dataclasses.dataclass
class Node:
    """A node of batch normalization in a graph, and the layer that takes its place.

    Not a tuple: Gluon warns of blocks that are in tuples and not among the children.
    """

    number: int
    name: str
    operator: str
    layer: nn.BatchNorm
    running_variance: str = "biased"
    is_virtual: bool = False


class SyncGraph(SymbolBlock):
    """A SymbolBlock with our layers in its graph; each such class has the stock one for a base.

    ``_stock_graph`` is the graph without them, ``_nodes`` says where they are.
    """

    def _splice(self):
        inputs, graph = self._stock_graph
        self._cached_graph = inputs, spliced(graph, self._nodes)

    def _clear_cached_op(self):
        super()._clear_cached_op()
        # The parameters may have been moved from CPUs to GPUs.
        self._splice()

    def forward(self, x, *args):
        if isinstance(x, mx.sym.Symbol):
            # Each time in nodes of its own.
            self._splice()
            return composed(self, x, *args)
        return super().forward(x, *args)

    def __reduce_ex__(self, protocol):
        # What was compiled cannot be copied, and meets the devices of this net.
        fresh = {"_cached_graph": (), "_cached_op": None, "_cached_op_args": []}
        return _new_graph, (type(self)._stock_class,), {**vars(self), **fresh}

    def __setstate__(self, state):
        vars(self).update(state)
        self._splice()


def composed(block, x, *args):
    """What the graph of a SymbolBlock makes of symbols. MXNet's own forward cannot take NumPy's:
    it cannot list their outputs, and it composes nodes of the block itself."""
    inputs, form = _flatten([x, *args], "input")
    assert form == block._in_format, "the inputs are not those of the graph"
    graph = mx.sym.load_json(block._cached_graph[1].tojson())
    names = [known.name for known in block._cached_graph[0]]
    graph._compose(**dict(zip(names, (each.as_nd_ndarray() for each in inputs))))
    outputs = [output.as_np_ndarray() if is_numpy(x) else output for output in graph]
    return _regroup(outputs, block._out_format)


@functools.lru_cache(maxsize=None)
def _graph_class(stock):
    return type(stock.__name__, (SyncGraph, stock), {"_stock_class": stock})


def _new_graph(stock):
    return object.__new__(_graph_class(stock))


def put_in(block, nodes):
    """Makes the layers of these nodes part of the graph."""
    vars(block).update(_stock_graph=block._cached_graph, _nodes=nodes)
    block.__class__ = _graph_class(type(block))
    block._clear_cached_op()


def take_out(block):
    """Makes the graph again what it was."""
    if isinstance(block, SyncGraph):
        block.__class__ = type(block)._stock_class
        vars(block).pop("_nodes")
        block._cached_graph = vars(block).pop("_stock_graph")
        block._clear_cached_op()


def read_graph(block, operators):
    """The nodes of batch normalization in a SymbolBlock, each with a stock layer of its parameters
    and settings, and those that cannot be replaced, as (name, operator, why)."""
    graph = json.loads(block._cached_graph[1].tojson())
    nodes = graph["nodes"]
    entries = [entry for node in nodes for entry in node["inputs"]] + graph["heads"]
    with_statistics = {number for number, output, *_ in entries if output > 0}
    layers, found, refused = {}, [], []
    for number, node in enumerate(nodes):
        name, operator = node["name"], operator_of(node)
        names = tuple(nodes[entry[0]]["name"] for entry in node["inputs"][1:])
        why = None
        if any(has_operator(subgraph, operators) for subgraph in node.get("subgraphs", ())):
            why = (
                "it has batch normalization in a graph of its own, as optimize_for and "
                "quantization make it. Convert the net before that."
            )
        elif operator not in operators:
            continue
        elif len(names) > len(ROLES):
            why = _CUMULATIVE_GRAPH
        elif number in with_statistics:
            why = "its mean or variance is used as an output."
        elif not all(name in block.params for name in names):
            why = "gamma, beta or a running statistic is no parameter of the SymbolBlock."
        if why:
            refused.append((name, operator, why))
            continue
        attributes = node.get("attrs", {})
        settings = settings_of(attributes)
        variance = "unbiased" if is_true(attributes.get("unbiased")) else "biased"
        is_virtual = attributes.get("virtual_devices", "0") != "0"
        key = (operator, names, variance, is_virtual, *settings.values())
        if key not in layers:
            kind = nn.BatchNormReLU if operators[operator] else nn.BatchNorm
            stem = name[: -len("_fwd")] if name.endswith("_fwd") else name
            layers[key] = layer = kind(prefix=f"{stem}_", **settings)
            layer._params = ParameterDict(layer.prefix)
            layer._params.update({name: block.params[name] for name in names})
            layer._reg_params = {role: block.params[n] for role, n in zip(ROLES, names)}
            vars(layer).update(layer._reg_params)
        found.append(Node(number, name, operator, layers[key], variance, is_virtual))
    return found, refused


def spliced(symbol, replaced):
    """The symbol with layers in place of nodes."""
    graph = json.loads(symbol.tojson())
    nodes = graph["nodes"]
    layers = {node.number: node.layer for node in replaced}
    ours = {node.number for node in replaced if node.operator in OUR_OPERATOR}
    # For each of `nodes`, its number in `placed`, and its output where that is another one now.
    placed, places = [], []

    def moved(entry):
        number, output = places[entry[0]]
        return [number, entry[1] if output is None else output, *entry[2:]]

    for number, node in enumerate(nodes):
        if number not in layers:
            if is_gate(node) and node["inputs"][0][0] in ours:
                # Our operator's gate goes with it.
                places.append(places[node["inputs"][0][0]])
                continue
            placed.append({**node, "inputs": [moved(entry) for entry in node["inputs"]]})
            places.append((len(placed) - 1, None))
            continue
        x, *parameters = node["inputs"]
        while number in ours and is_gate(nodes[x[0]]):
            x = nodes[x[0]]["inputs"][0]
        inputs = dict(zip(("x", *ROLES), map(moved, (x, *parameters))))
        variables = {name: variable(name) for name in inputs}
        part = json.loads(layers[number].hybrid_forward(mx.sym, **variables).tojson())
        within = []
        for inner in part["nodes"]:
            if inner["op"] == "null":
                within.append(inputs[inner["name"]])
                continue
            entries = [
                within[entry[0]]
                if part["nodes"][entry[0]]["op"] == "null"
                else [within[entry[0]], *entry[1:]]
                for entry in inner["inputs"]
            ]
            name = f"{node['name']}_{inner['name']}"
            within.append(len(placed))
            placed.append({**inner, "name": name, "inputs": entries})
        last, output, *_ = part["heads"][0]
        placed[within[last]]["name"] = node["name"]
        places.append((within[last], output))
    graph["nodes"] = placed
    graph["arg_nodes"] = [number for number, node in enumerate(placed) if node["op"] == "null"]
    graph["heads"] = [moved(entry) for entry in graph["heads"]]
    graph.pop("node_row_ptr", None)
    # MXNet does not read what JSON makes of other letters.
    result = mx.sym.load_json(json.dumps(graph, ensure_ascii=False))
    return result.as_np_ndarray() if is_numpy(symbol) else result
