"""What a conversion did to each layer."""

from __future__ import annotations

import collections
from typing import Mapping, NamedTuple


class Entry(NamedTuple):
    """A layer, a node of a graph, or a block that cannot be traced.

    Attributes
    ----------
    name : str
    path : str
        As in the files of ``save_parameters``; within a SymbolBlock a colon and the name of the
        node follow. Empty for the net itself, and for what was fused.
    before, after : str
        The layer's kind, such as "BatchNorm". For a node, `after` is what was fused into it, such
        as "residual + relu".
    why : str
        Why it was left as it is.
    """

    name: str
    path: str = ""
    before: str = ""
    after: str = ""
    why: str = ""


class Report(NamedTuple):
    """The result of a conversion.

    Attributes
    ----------
    replaced : tuple of Entry
        One for each layer, in the order of the net, even if it is used several times.
    already : tuple of str
        The paths of the layers that needed no change.
    refused : tuple of Entry
        The layers that were not replaced.
    fused : tuple of Entry
        With ``fuse=True``, the nodes into which something was fused, in the graph of the net in
        inference. A layer has one for each call.
    not_fused : tuple of Entry
        The others. If the net cannot be traced, it has an entry too, and the graphs are those of
        the largest blocks in it that can.
    """

    replaced: tuple[Entry, ...]
    already: tuple[str, ...]
    refused: tuple[Entry, ...]
    fused: tuple[Entry, ...] = ()
    not_fused: tuple[Entry, ...] = ()

    def __str__(self) -> str:
        kinds = collections.Counter(f"{entry.before} -> {entry.after}" for entry in self.replaced)
        text = f"{len(self.replaced)} layers replaced{_counts(kinds)}"
        text += f", {len(self.already)} were so already" if self.already else ""
        text += f", {len(self.refused)} not replaced" if self.refused else ""
        if self.fused or self.not_fused:
            what = collections.Counter(entry.after for entry in self.fused)
            text += f", {len(self.fused)} fused{_counts(what)}"
        reasons = collections.defaultdict(list)
        for entry in self.refused:
            reasons[entry.before, entry.why].append(entry.path or "the net itself")
        for entry in self.not_fused:
            reasons["not fused", entry.why].append(entry.name)
        for (kind, why), paths in reasons.items():
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            text += f"\n  {kind} ({', '.join(paths[:3])}{more}): {why}"
        return text


def _counts(kinds: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})" if kinds else ""
