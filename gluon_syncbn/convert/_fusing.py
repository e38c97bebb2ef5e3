"""Fuses the graphs of a net's blocks, and finds out what there is to fuse."""

from __future__ import annotations

import inspect
from typing import Sequence

from mxnet.gluon import Block, HybridBlock

from ..graph.blocks import clear_caches, walk
from ..graph.fusion import fuse, is_fusing, start_fusing, stop_fusing
from ..graph.symbol_block import SyncGraph
from ..graph.symbols import Graph
from ..graph.trace import last_line, parameters_of, trace
from ..layers.batch_norm import SyncBatchNorm
from ._report import Entry


def fuse_blocks(found: Sequence[tuple[str, Block]]) -> tuple[list[Entry], list[Entry]]:
    """Fuses the graphs of blocks from now on. Returns entries for the fused nodes, and for the
    others."""
    blocks = [block for _, block in found if isinstance(block, HybridBlock)]
    before = [block for block in blocks if is_fusing(block)]
    # The trace shows what there is to fuse in SymbolBlocks too.
    for block in before:
        stop_fusing(block)
    try:
        result = _what_fuses(found)
    finally:
        for block in before:
            start_fusing(block)
    for block in blocks:
        start_fusing(block)
    if len(before) < len(blocks):
        clear_caches(found)
    return result


def _what_fuses(found: Sequence[tuple[str, Block]]) -> tuple[list[Entry], list[Entry]]:
    fused: list[Entry] = []
    left: list[Entry] = []
    traced: set[int] = set()
    for path, block in found:
        if id(block) in traced or not isinstance(block, HybridBlock):
            continue
        inner = [each for _, each in walk(block)]
        if not any(isinstance(each, (SyncBatchNorm, SyncGraph)) for each in inner):
            continue
        try:
            symbol, _ = trace(block, [None] * _count_inputs(block), parameters_of(block))
        except Exception as error:  # The net's code may raise anything.
            cause = last_line(error.__cause__ or error)
            why = f"it cannot be traced ({cause}): what follows is of the blocks in it."
            left.append(Entry(path or "the net itself", why=why))
            continue
        traced.update(map(id, inner))
        now_fused, now_left = fuse(Graph(symbol))
        fused += [Entry(name, after=what) for name, what in now_fused]
        left += [Entry(name, why=why) for name, why in now_left]
    return fused, left


def _count_inputs(block: HybridBlock) -> int:
    """The number of arrays that a call of a block needs."""
    _, *inputs = inspect.signature(block.hybrid_forward).parameters.values()
    needed = [
        each.name
        for each in inputs
        if each.kind is each.POSITIONAL_OR_KEYWORD
        and each.default is each.empty
        and each.name not in block._reg_params
    ]
    return max(1, len(needed))
