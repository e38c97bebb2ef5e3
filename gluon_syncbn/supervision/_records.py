"""What a process says of itself, and how messages describe it."""

from __future__ import annotations

import itertools
from typing import Any, Collection, Mapping, NamedTuple, Sequence

from ..durations import duration
from ..native.waits import Place

# How a script has ended.
FAILED = "failed"
FINISHED = "finished"
# Why a process is missing.
GONE = "process ended"
SILENT = "no answer: stopped, or its machine is unreachable"


class Exchange(NamedTuple):
    """An exchange in flight.

    name : equal in all processes
    title : what the user sees
    waited, timeout : seconds. While the process is stopped it does not wait.
    first, end : the range of ranks that take part
    in_memory : whether they meet in shared memory, not at the store
    """

    name: str
    title: str
    waited: float
    timeout: float
    first: int
    end: int
    in_memory: bool = False

    @property
    def members(self) -> range:
        return range(self.first, self.end)


class Report(NamedTuple):
    """What a process says of itself.

    exchanges : those in flight, oldest first
    reached : {name of an exchange that the judge asks about: whether this process has arrived}
    last : the title of the exchange that it completed last, or None
    place : the `Place` of its main thread, or of the training thread that has waited longest
    status : (FAILED, the error) or (FINISHED, ""), or None
    """

    exchanges: Sequence[Exchange] = ()
    reached: Mapping[str, bool] = {}
    last: str | None = None
    place: Place | None = None
    status: tuple[str, str] | None = None

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Report:
        exchanges, reached, last, place, status = fields
        return cls(
            [Exchange(*each) for each in exchanges],
            dict(reached),
            last,
            place and Place(*place),
            status and tuple(status),
        )


def reasons(found: Mapping[int, tuple[str, float | None]]) -> str:
    """Such as "ranks 1, 5-9 (process ended), rank 2 (waiting in x for 3 s)", of {rank: (why it is
    missing, seconds or None)}; "none" if there is none."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(found):
        groups.setdefault(found[rank][0], []).append(rank)
    parts = []
    for why, ranks in groups.items():
        seconds = [found[rank][1] for rank in ranks]
        span = "" if None in seconds else f" for {duration(max(seconds))}"
        parts.append(f"{ranks_text(ranks)} ({why}{span})")
    return ", ".join(parts) or "none"


def ranks_text(ranks: Collection[int]) -> str:
    """Such as "ranks 0, 2, 5-511"."""
    parts: list[str] = []
    # Within a run of consecutive ranks, rank minus position is constant.
    for _, pairs in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        parts += map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
