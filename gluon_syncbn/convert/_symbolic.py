"""Makes the batch normalization of a symbol synchronized, or stock again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..graph.fusion import fuse as fuse_graph
from ..graph.modules import new_layer
from ..graph.symbol_block import LayerNode, spliced, why_not
from ..graph.symbols import OUR_OPERATOR, STOCK_OPERATORS, Graph, make_stock, settings_of
from ._report import Entry, Report

if TYPE_CHECKING:
    import mxnet as mx


def convert_symbol(symbol: mx.sym.Symbol, fuse: bool) -> tuple[mx.sym.Symbol, Report]:
    """The symbol with our nodes in place of MXNet's, and a report."""
    graph = Graph(symbol)
    users = graph.users()
    new, already, refused = [], [], []
    for number, node in enumerate(graph.nodes()):
        why = why_not(graph, node, users, STOCK_OPERATORS)
        if why:
            refused.append(Entry(node.name, node.name, node.operator, why=why))
        elif node.operator in OUR_OPERATOR:
            already.append(node.name)
        elif node.operator in STOCK_OPERATORS:
            layer = new_layer(node, "relu" if STOCK_OPERATORS[node.operator] else None)
            new.append(LayerNode(number, node.name, node.operator, layer, settings_of(node)))
    result = Graph(spliced(symbol, new))
    own = {str(each.layer._layer.id) for each in new}
    for node in result.nodes():
        if node.operator in OUR_OPERATOR and node.attrs["layer"] in own:
            # Of no process: a Module gives it a layer.
            node.attrs["process"] = ""
    fused, left = fuse_graph(result) if fuse else ((), ())
    report = Report(
        tuple(Entry(n.name, n.name, n.operator, "SyncBatchNorm") for n in new),
        tuple(already),
        tuple(refused),
        tuple(Entry(name, after=what) for name, what in fused),
        tuple(Entry(name, why=why) for name, why in left),
    )
    return result.symbol_like(symbol), report


def revert_symbol(symbol: mx.sym.Symbol) -> tuple[mx.sym.Symbol, Report]:
    """The symbol with MXNet's nodes in place of ours, and a report."""
    graph = Graph(symbol)
    nodes = graph.all_nodes()
    ours = tuple(node for node in nodes if node.operator in OUR_OPERATOR)
    already = tuple(node.name for node in nodes if node.operator in STOCK_OPERATORS)
    replaced = tuple(Entry(n.name, n.name, "SyncBatchNorm", "BatchNorm") for n in ours)
    make_stock(graph, operators=OUR_OPERATOR)
    return graph.symbol_like(symbol), Report(replaced, already, ())
