"""Synchronized layers in the graph of a SymbolBlock."""

import dataclasses
import functools

import mxnet as mx
from mxnet.gluon import SymbolBlock, nn
from mxnet.gluon.block import _flatten, _regroup
from mxnet.gluon.parameter import ParameterDict

from ..layers.operator import is_numpy
from .symbols import (
    OUR_OPERATOR,
    ROLES,
    Graph,
    before_layout_copies,
    is_true,
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
    graph = Graph(block._cached_graph[1])
    users = graph.users()
    layers, found, refused = {}, [], []
    for number, node in enumerate(graph.nodes()):
        names = tuple(source.name for source, _ in node.inputs[1:])
        inner = (Graph.of_json(part) for part in node.more.get("subgraphs", ()))
        why = None
        if any(part.operator in operators for each in inner for part in each.all_nodes()):
            why = (
                "it has batch normalization in a graph of its own, as optimize_for and "
                "quantization make it. Convert the net before that."
            )
        elif node.op == "null" or node.operator not in operators:
            continue
        elif len(names) > len(ROLES):
            why = _CUMULATIVE_GRAPH
        elif any(graph.entry(*user)[1] > 0 for user in users[id(node)]):
            why = "its mean or variance is used as an output."
        elif not all(name in block.params for name in names):
            why = "gamma, beta or a running statistic is no parameter of the SymbolBlock."
        if why:
            refused.append((node.name, node.operator, why))
            continue
        settings = settings_of(node.attrs)
        variance = "unbiased" if is_true(node.attrs.get("unbiased")) else "biased"
        is_virtual = node.attrs.get("virtual_devices", "0") != "0"
        key = (node.operator, names, variance, is_virtual, *settings.values())
        if key not in layers:
            kind = nn.BatchNormReLU if operators[node.operator] else nn.BatchNorm
            stem = node.name[: -len("_fwd")] if node.name.endswith("_fwd") else node.name
            layers[key] = layer = kind(prefix=f"{stem}_", **settings)
            layer._params = ParameterDict(layer.prefix)
            layer._params.update({name: block.params[name] for name in names})
            layer._reg_params = {role: block.params[n] for role, n in zip(ROLES, names)}
            vars(layer).update(layer._reg_params)
        found.append(Node(number, node.name, node.operator, layers[key], variance, is_virtual))
    return found, refused


def spliced(symbol, replaced):
    """The symbol with layers in place of nodes."""
    graph = Graph(symbol)
    nodes = graph.nodes()
    layers = {id(nodes[each.number]): each for each in replaced}
    # What takes the place of each node that is gone.
    new = {}

    def moved(entry):
        return new.get(id(entry[0]), entry)

    for node in nodes:
        each = layers.get(id(node))
        if each is None:
            # The layout copies of our operator go with it.
            source = layers.get(id(node.inputs[0][0])) if node.is_layout_copy else None
            if source is not None and source.operator in OUR_OPERATOR:
                new[id(node)] = new[id(node.inputs[0][0])]
            continue
        x, *parameters = node.inputs
        if each.operator in OUR_OPERATOR:
            x = before_layout_copies(x)
        inputs = dict(zip(("x", *ROLES), map(moved, (x, *parameters))))
        variables = {name: variable(name) for name in inputs}
        part = Graph(each.layer.hybrid_forward(mx.sym, **variables))
        for inner in part.nodes():
            if inner.op != "null":
                inner.name = f"{node.name}_{inner.name}"
                inner.inputs = [
                    inputs[entry[0].name] if entry[0].op == "null" else entry
                    for entry in inner.inputs
                ]
        new[id(node)] = part.heads[0]
        part.heads[0][0].name = node.name
    graph.redirect(moved)
    result = graph.symbol()
    return result.as_np_ndarray() if is_numpy(symbol) else result
