"""Freezes and unfreezes batch normalization in nets that are built."""

from __future__ import annotations

import logging
from typing import Sequence

from mxnet.gluon import Block, Parameter, SymbolBlock, nn

from ..graph.blocks import BATCH_NORMS, check_block, compile_again, walk
from ..graph.symbol_block import SyncGraph
from ..graph.symbols import OUR_OPERATOR, STOCK_OPERATORS, Graph, Node, settings_of, taken_apart

_log = logging.getLogger("gluon_syncbn")
# Where a parameter keeps its grad_req while it is frozen.
_GRAD_REQ = "_grad_req_unfrozen"


def freeze(net: Block | Sequence[Block], affine: bool = False) -> int:
    r"""Makes the batch normalization of a built net, or of a part of it, use its running statistics
    in training too.

    .. math:: y = \gamma \frac{x - \text{running\_mean}}{\sqrt{\text{running\_var} + \epsilon}}
        + \beta

    A frozen layer leaves its running statistics as they are, passes gradients through, and does not
    synchronize. It is as if made with ``use_global_stats=True``; mmdetection calls it
    ``norm_eval``, and with `affine` it is ``FrozenBatchNorm2d`` of torchvision and detectron2.

    It changes :class:`SyncBatchNorm`, ``nn.BatchNorm``, their subclasses, and the graphs of
    SymbolBlocks. Compiled nets follow when they are called, those around `net` too: call the net
    before MXNet's ``net.export`` or ``net.save``, which write the graph of the last call.
    :func:`export`, conversions and copies keep it; files of ``save_parameters`` hold no settings.
    All processes of a job must do it alike.

    Parameters
    ----------
    net : Block, or list of Block
        Such as ``net.features`` or ``[net.layer1, net.layer2]``. Changed in place.
    affine : bool, default False
        Whether to freeze gamma and beta too: their ``grad_req`` is "null" until `unfreeze`.

    Returns
    -------
    int
        The number of layers that were not frozen before.

    Raises
    ------
    TypeError
        If `net` is something else.
    """
    return _set_frozen(net, "freeze", True, affine)


def unfreeze(net: Block | Sequence[Block]) -> int:
    """Undoes :func:`freeze`: layers follow the batches again, also those that were made with
    ``use_global_stats=True``, and gamma and beta have the ``grad_req`` that they had.

    It takes what `freeze` takes, raises the same, and returns the number of layers that were
    frozen.
    """
    return _set_frozen(net, "unfreeze", False, True)


def _set_frozen(net: Block | Sequence[Block], function: str, frozen: bool, affine: bool) -> int:
    blocks: Sequence[Block] = net if isinstance(net, (list, tuple)) and net else [net]
    for block in blocks:
        check_block(block, function)
    found = {id(block): (path, block) for each in blocks for path, block in walk(each)}
    layers, changed = 0, 0
    left: list[str] = []
    for path, block in found.values():
        parameters: list[Sequence[Parameter]] = []
        if isinstance(block, BATCH_NORMS):
            changed += _set_layer(block, frozen)
            parameters.append((block.gamma, block.beta))
        elif isinstance(block, SymbolBlock):
            parameters, several = _set_graph(path, block, frozen, left)
            changed += several
        layers += len(parameters)
        for pair in parameters if affine else ():
            for parameter in pair:
                _set_gradient(parameter, frozen)
    if left:
        _log.warning("%s left %s as they are: they lie in graphs within a graph.", function, left)
    elif not layers:
        _log.warning("%s found no batch normalization in %s.", function, [b.name for b in blocks])
    if changed:
        compile_again(found.values())
    return changed


def _set_layer(layer: nn.BatchNorm, frozen: bool) -> bool:
    before = bool(layer._kwargs.get("use_global_stats"))
    # Copies of the layer share the dict.
    layer._kwargs = {**layer._kwargs, "use_global_stats": frozen}
    return before != frozen


def _set_graph(
    path: str, block: SymbolBlock, frozen: bool, left: list[str]
) -> tuple[list[Sequence[Parameter]], int]:
    """Changes the nodes of a graph. Returns the gamma and beta of each layer in it, and how many
    layers have changed."""
    name = "_stock_graph" if isinstance(block, SyncGraph) else "_cached_graph"
    inputs, symbol = vars(block)[name]
    graph = Graph(symbol)
    parameters: dict[tuple[str, ...], Sequence[Parameter]] = {}
    changed: set[tuple[str, ...]] = set()
    for node in graph.nodes():
        inner = [part.name for each in node.graphs() for part in each.all_nodes() if _is_norm(part)]
        left += [f"{path}:{each}" for each in inner]
        if not _is_norm(node):
            continue
        sources = [source for source, _ in taken_apart(node)[2]]
        names = tuple(source.name for source in sources)
        if settings_of(node).use_global_stats != frozen:
            changed.add(names)
        node.attrs["use_global_stats"] = str(frozen)
        # An operator may compute a gamma or beta, as in conditional batch normalization.
        own = [each.name for each in sources[:2] if each.op == "null"]
        parameters[names] = [block.params[each] for each in own if each in block.params]
    if changed:
        vars(block)[name] = inputs, graph.symbol_like(symbol)
    return list(parameters.values()), len(changed)


def _is_norm(node: Node) -> bool:
    return node.operator in STOCK_OPERATORS or node.operator in OUR_OPERATOR


def _set_gradient(parameter: Parameter, frozen: bool) -> None:
    if frozen and parameter.grad_req != "null":
        setattr(parameter, _GRAD_REQ, parameter.grad_req)
        parameter.grad_req = "null"
    elif not frozen and hasattr(parameter, _GRAD_REQ):
        parameter.grad_req = vars(parameter).pop(_GRAD_REQ)
