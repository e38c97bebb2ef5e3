"""Synchronized layers in the graph of a SymbolBlock."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any, Collection, Iterable, Mapping

import mxnet as mx
from mxnet.gluon import SymbolBlock, nn
from mxnet.gluon.block import _flatten, _regroup
from mxnet.gluon.parameter import ParameterDict

from ..layers.operator import ArrayOrSymbol, Settings, is_numpy
from .fusion import fused, is_fusing
from .symbols import (
    OUR_OPERATOR,
    ROLES,
    Graph,
    Node,
    NodeEntry,
    Users,
    is_in_place,
    settings_of,
    taken_apart,
    unfused,
    variable,
)


@dataclasses.dataclass
class LayerNode:
    """A node of batch normalization in a graph, and the layer that replaces it.

    Not a tuple: Gluon warns about blocks in tuples that are not children.
    """

    number: int
    name: str
    operator: str
    layer: nn.BatchNorm
    settings: Settings


class SyncGraph(SymbolBlock):
    """A SymbolBlock with our layers in its graph. Each subclass also derives from a stock class.

    ``_stock_graph`` is the graph without our layers, ``_nodes`` their places.
    """

    _stock_class: type
    _stock_graph: tuple[list[mx.sym.Symbol], mx.sym.Symbol]
    _nodes: list[LayerNode]

    def _splice(self) -> None:
        inputs, graph = self._stock_graph
        graph = spliced(graph, self._nodes)
        self._cached_graph = inputs, fused(graph) if is_fusing(self) else graph

    def _clear_cached_op(self) -> None:
        super()._clear_cached_op()
        # The parameters may have been moved from CPUs to GPUs.
        self._splice()

    def forward(self, x: ArrayOrSymbol, *args: Any) -> Any:
        if isinstance(x, mx.sym.Symbol):
            return composed(self, x, *args)
        return super().forward(x, *args)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Compiled graphs cannot be copied, and belong to the devices of this net.
        fresh: dict[str, Any] = {"_cached_graph": (), "_cached_op": None, "_cached_op_args": []}
        return _new_graph, (type(self)._stock_class,), {**vars(self), **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._splice()


def composed(block: SymbolBlock, x: ArrayOrSymbol, *args: Any) -> Any:
    """Applies the graph of a SymbolBlock to symbols. MXNet's own forward fails for NumPy's symbols,
    whose outputs it cannot list, and changes the block's nodes."""
    if not isinstance(x, mx.sym.Symbol):
        return type(block).forward(block, x, *args)
    inputs, form = _flatten([x, *args], "input")
    assert form == block._in_format, "the inputs do not match the graph"
    graph = mx.sym.load_json(block._cached_graph[1].tojson())
    names = [known.name for known in block._cached_graph[0]]
    graph._compose(**dict(zip(names, (each.as_nd_ndarray() for each in inputs))))
    outputs = [output.as_np_ndarray() if is_numpy(x) else output for output in graph]
    return _regroup(outputs, block._out_format)


@functools.lru_cache(maxsize=None)
def _graph_class(stock: type) -> type:
    return type(stock.__name__, (SyncGraph, stock), {"_stock_class": stock})


def _new_graph(stock: type) -> SyncGraph:
    return object.__new__(_graph_class(stock))


def put_in(block: SymbolBlock, nodes: list[LayerNode]) -> None:
    """Puts the layers of these nodes into the graph."""
    vars(block).update(_stock_graph=block._cached_graph, _nodes=nodes)
    block.__class__ = _graph_class(block.__class__)
    block._clear_cached_op()


def take_out(block: SymbolBlock) -> None:
    """Restores the stock graph."""
    if isinstance(block, SyncGraph):
        block.__class__ = type(block)._stock_class
        block.__dict__.pop("_nodes")
        block._cached_graph = block.__dict__.pop("_stock_graph")
        block._clear_cached_op()


# {block: the layers that were made for its nodes}
_layers_of: weakref.WeakKeyDictionary[SymbolBlock, dict[tuple[Any, ...], nn.BatchNorm]] = (
    weakref.WeakKeyDictionary()
)


def read_graph(
    block: SymbolBlock, operators: Mapping[str, bool]
) -> tuple[list[LayerNode], list[tuple[str, str, str]]]:
    """The nodes of batch normalization in a SymbolBlock, each with a stock layer that has its
    parameters and settings, and [(name, operator, reason)] for nodes that cannot be replaced."""
    graph = Graph(block._cached_graph[1])
    users = graph.users()
    # The same layers each time, as SyncedLayer.of tells.
    layers = _layers_of.setdefault(block, {})
    found: list[LayerNode] = []
    refused: list[tuple[str, str, str]] = []
    first: dict[tuple[Any, ...], bool] = {}
    for number, node in enumerate(graph.nodes()):
        why = why_not(graph, node, users, operators)
        if not why and node.operator not in operators:
            continue
        sources = () if why else [source for source, _ in taken_apart(node)[2]]
        names = [source.name for source in sources]
        if len(names) > len(ROLES):
            why = (
                "it has momentum=None, which a graph lacks: build the net and load its parameters."
            )
        elif not all(each.op == "null" and each.name in block.params for each in sources):
            why = "gamma, beta or a running statistic is not a parameter of the SymbolBlock."
        if why:
            refused.append((node.name, node.operator, why))
            continue
        settings = settings_of(node)
        parameters = tuple(block.params[name] for name in names)
        # What is fused into a node is no matter of its layer.
        lasting = settings._replace(activation=None, slope=0.0, use_global_stats=False)
        shared = node.operator, parameters, lasting
        # `freeze` changes all nodes of a graph, so those that differ need a second layer.
        frozen = settings.use_global_stats
        key = (*shared, frozen == first.setdefault(shared, frozen))
        if key not in layers:
            kind = nn.BatchNormReLU if operators[node.operator] else nn.BatchNorm
            stem = node.name[: -len("_fwd")] if node.name.endswith("_fwd") else node.name
            layers[key] = layer = kind(
                axis=settings.axis,
                momentum=settings.momentum,
                epsilon=settings.epsilon,
                scale=not settings.fix_gamma,
                prefix=f"{stem}_",
            )
            layer._params = ParameterDict(layer.prefix)
            layer._params.update(dict(zip(names, parameters)))
            layer._reg_params = dict(zip(ROLES, parameters))
            vars(layer).update(layer._reg_params)
        found.append(LayerNode(number, node.name, node.operator, layers[key], settings))
    return found, refused


def why_not(graph: Graph, node: Node, users: Users, operators: Collection[str]) -> str | None:
    """Why a node of batch normalization cannot be replaced, or None; also for a node with such
    nodes in a graph of its own. users: those of the graph."""
    inner = [part for each in node.graphs() for part in each.all_nodes()]
    if any(part.operator in operators for part in inner):
        return (
            "it has batch normalization in a graph of its own, as after optimize_for or "
            "quantization: convert the net before."
        )
    if "BatchNorm" in operators and node.op == "_contrib_quantized_batch_norm":
        return "it is quantized: convert the net before."
    if node.operator not in operators:
        return None
    if is_in_place(node):
        return "it works in place: build the net and load its parameters."
    if any(graph.entry(*user)[1] > 0 for user in users[id(node)]):
        return "its mean or variance is used as an output."
    return None


def spliced(symbol: mx.sym.Symbol, replaced: Iterable[LayerNode]) -> mx.sym.Symbol:
    """The symbol with layers in place of nodes. Layers are frozen as their nodes are."""
    graph = Graph(symbol)
    nodes = graph.nodes()
    layers = {id(nodes[each.number]): each for each in replaced}
    # The layout copies of our operator are removed with it.
    ours = {key for key, each in layers.items() if each.operator in OUR_OPERATOR}
    copies = {id(node) for node in nodes if node.is_layout_copy and id(node.inputs[0][0]) in ours}

    def change(node: Node) -> NodeEntry | None:
        if id(node) in copies:
            return node.inputs[0]
        each = layers.get(id(node))
        if each is None:
            return None
        x, residual, parameters = taken_apart(node)
        inputs = dict(zip(("x", *ROLES), (x, *parameters)))
        variables = {name: variable(name) for name in inputs}
        # Such as __ctx_group__ and __force_mirroring__.
        hidden = {name: value for name, value in node.attrs.items() if name.startswith("__")}
        each.layer._kwargs["use_global_stats"] = settings_of(node).use_global_stats
        part = Graph(each.layer.hybrid_forward(mx.sym, **variables))

        def connected(inner: Node) -> NodeEntry | None:
            if inner.op == "null":
                return inputs[inner.name]
            inner.name = f"{node.name}_{inner.name}"
            inner.attrs.update(hidden)
            return None

        part.rewrite(connected)
        part.heads[0][0].name = node.name
        return unfused(node, part.heads[0], residual)

    graph.rewrite(change)
    return graph.symbol_like(symbol)
