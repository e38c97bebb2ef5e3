"""The blocks of a built net."""

from __future__ import annotations

import weakref
from typing import Any, Iterable, Iterator

import mxnet as mx
from mxnet.gluon import Block, HybridBlock, nn

# MXNet's layers of batch normalization. MXNet 1.7 has one.
BATCH_NORMS = tuple(
    getattr(nn, name) for name in ("BatchNorm", "BatchNormReLU") if hasattr(nn, name)
)


def walk(net: Block) -> Iterator[tuple[str, Block]]:
    """Yields (path, block) for each block of a net once, also for blocks outside the children."""
    seen: set[int] = set()

    def visit(path: str, value: Any) -> Iterator[tuple[str, Block]]:
        if id(value) in seen or not isinstance(value, (Block, list, tuple, set, frozenset, dict)):
            return
        seen.add(id(value))
        if isinstance(value, Block):
            yield path, value
            dot = path and f"{path}."
            for name, child in value._children.items():
                yield from visit(f"{dot}{name}", child)
            for name, held in vars(value).items():
                if name != "_children":
                    yield from visit(f"{dot}{name}", held)
            return
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, (list, tuple)):
            items = list(enumerate(value))
        else:
            # All processes need one order, as it decides the layers' ids.
            blocks = [element for element in value if isinstance(element, Block)]
            items = list(enumerate(sorted(blocks, key=lambda block: block.prefix)))
        for key, held in items:
            yield from visit(f"{path}[{key!r}]", held)

    yield from visit("", net)


def clear_caches(found: Iterable[tuple[str, Block]]) -> None:
    """Makes the blocks that `walk` found compile again."""
    for _, block in found:
        if isinstance(block, HybridBlock):
            block._clear_cached_op()


# How often layers of nets that are built have changed. Graphs are traced again that are older, also
# those of blocks around the layers.
_changes = 0
_traced_after: weakref.WeakKeyDictionary[HybridBlock, int] = weakref.WeakKeyDictionary()


def compile_again(found: Iterable[tuple[str, Block]]) -> None:
    """`clear_caches`, and makes all other blocks compile again, each when it is called."""
    global _changes
    clear_caches(found)
    _changes += 1


def forget_old_graph(block: HybridBlock) -> None:
    """Clears the block's graph if layers have changed since it was traced, as far as is known."""
    if _traced_after.get(block, 0) != _changes:
        if block._cached_op is not None or block._cached_graph:
            block._clear_cached_op()
        _traced_after[block] = _changes


def check_block(net: Any, function: str) -> None:
    """Raises TypeError for anything but a Block."""
    if isinstance(net, Block):
        return
    advice = "give the net itself"
    if isinstance(net, mx.sym.Symbol):
        advice = "wrap the symbol in mx.gluon.SymbolBlock(symbol, inputs, params)"
    elif isinstance(net, type) and issubclass(net, Block):
        advice = f"create a net, as in {net.__name__}()"
    elif isinstance(net, (list, tuple)):
        advice = "call it for each net"
    raise TypeError(f"{function} takes a Gluon Block and got {type(net).__name__}: {advice}.")
