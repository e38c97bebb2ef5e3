"""What the package adds where MXNet compiles graphs and runs them."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterator

from mxnet import autograd
from mxnet.gluon import SymbolBlock

from .. import native
from ..layers.batch_norm import SyncBatchNorm
from .blocks import forget_old_graph, walk
from .fusion import fused, is_fusing
from .symbol_block import SyncGraph
from .symbols import OUR_OPERATOR, Graph, with_node_ids

if TYPE_CHECKING:
    import mxnet as mx
    from mxnet.gluon import Block, HybridBlock

    from ..layers.synced_layer import SyncedLayer


def compiling(get_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``HybridBlock._get_graph``, which traces what MXNet compiles."""

    @functools.wraps(get_graph)
    def get_graph_to_compile(
        block: HybridBlock, *args: Any
    ) -> tuple[list[mx.sym.Symbol], mx.sym.Symbol]:
        forget_old_graph(block)
        # A SymbolBlock has nothing but its graph.
        if block._cached_graph and not isinstance(block, SymbolBlock) and _is_of_others(block):
            block._clear_cached_op()
        if is_fusing(block) and not block._cached_graph:
            inputs, symbol = get_graph(block, *args)
            block._cached_graph = inputs, fused(symbol)
        inputs, symbol = get_graph(block, *args)
        return inputs, with_node_ids(symbol)

    return get_graph_to_compile


def calling(call_cached_op: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``HybridBlock._call_cached_op``, which runs it."""

    @functools.wraps(call_cached_op)
    def call(block: HybridBlock, *args: Any) -> Any:
        forget_old_graph(block)
        _refuse_op_hooks(block)
        trains, is_compiled = autograd.is_training(), block._cached_op is not None
        if trains and is_compiled:
            _begin_training(block)
        result = call_cached_op(block, *args)
        # Only now it is known what the first call has compiled.
        if trains and not is_compiled:
            _begin_training(block)
        return result

    return call


def _refuse_op_hooks(block: HybridBlock) -> None:
    for layer in layers_of(block) if block._callback and autograd.is_training() else ():
        for devices in layer.device_groups():
            if len(devices) > 1 and not layer.settings()["use_global_stats"]:
                # MXNet loses the error of a hook that would wait until the timeout.
                raise ValueError(
                    f"{block.name} has an op hook (register_op_hook), and its {layer.name} "
                    f"synchronizes {', '.join(devices)}: a hook that reads a value would wait for "
                    "devices on which the net is not called before it returns. Train with one "
                    "device per process while you look, or return the arrays from the net and "
                    "read them once it was called on all devices."
                )


class _Graph:
    """What a block has compiled, whether nodes of ours are in it, its layers and parameters."""

    def __init__(self, block: HybridBlock) -> None:
        self.compiled, self.parameters = block._cached_op, list(block.collect_params().values())
        self.has_ours = native.OP_TYPE in block._cached_graph[1].tojson()
        self.layers = weakref.WeakSet(layers_of(block) if self.has_ours else ())


_graphs: weakref.WeakKeyDictionary[HybridBlock, _Graph] = weakref.WeakKeyDictionary()


def _begin_training(block: HybridBlock) -> None:
    graph = _graphs.get(block)
    if graph is None or graph.compiled is not block._cached_op:
        graph = _graphs[block] = _Graph(block)
    if graph.has_ours:
        native.begin_training(graph)


def _is_of_others(block: HybridBlock) -> bool:
    """Whether the block's graph belongs to layers of another net or process, as it came with a copy
    of the block, or from a file of ``Block.save``."""
    symbol = block._cached_graph[1]
    if native.OP_TYPE not in symbol.tojson():
        return False
    own = {(native.PROCESS, str(layer.id)) for layer in layers_of(block)}
    return any(
        node.operator in OUR_OPERATOR and (node.attrs["process"], node.attrs["layer"]) not in own
        for node in Graph(symbol).all_nodes()
    )


def layers_of(net: Block) -> Iterator[SyncedLayer]:
    """Our layers in a net."""
    for _, block in walk(net):
        nodes = block._nodes if isinstance(block, SyncGraph) else ()
        for each in (block, *(node.layer for node in nodes)):
            if isinstance(each, SyncBatchNorm):
                yield each._layer


def numbering(bind: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Symbol.bind`` and ``simple_bind``."""

    @functools.wraps(bind)
    def bind_numbered(symbol: mx.sym.Symbol, *args: Any, **kwargs: Any) -> mx.executor.Executor:
        return bind(with_node_ids(symbol), *args, **kwargs)

    return bind_numbered
