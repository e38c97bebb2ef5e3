"""Compiled graphs that came with a copy of a net, or from a file of ``Block.save``."""

import functools

from mxnet.gluon import HybridBlock, SymbolBlock

from .. import native
from ..layers.batch_norm import SyncBatchNorm
from .blocks import walk
from .symbol_block import SyncGraph
from .symbols import OUR_OPERATOR, Graph


def _layers(net):
    for _, block in walk(net):
        nodes = block._nodes if isinstance(block, SyncGraph) else ()
        for layer in (block, *(node.layer for node in nodes)):
            if isinstance(layer, SyncBatchNorm):
                yield layer


def _is_of_others(block):
    """Whether the block's graph belongs to layers of another net or process."""
    symbol = block._cached_graph[1]
    if native.OP_TYPE not in symbol.tojson():
        return False
    own = {(native.PROCESS, str(layer._layer.id)) for layer in _layers(block)}
    return any(
        node.operator in OUR_OPERATOR and (node.attrs["process"], node.attrs["layer"]) not in own
        for node in Graph(symbol).all_nodes()
    )


def _with_own_layers(get_graph):
    @functools.wraps(get_graph)
    def tracing_again(block, *args):
        # A SymbolBlock has nothing but its graph.
        if not isinstance(block, SymbolBlock) and block._cached_graph and _is_of_others(block):
            block._clear_cached_op()
        return get_graph(block, *args)

    return tracing_again


HybridBlock._get_graph = _with_own_layers(HybridBlock._get_graph)
