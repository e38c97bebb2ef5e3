"""What a process says of itself, and how messages describe it."""

import itertools
import re
import typing

from ..arguments import duration

# How a script has ended.
FAILED = "failed"
FINISHED = "finished"
# Why a process is missing.
GONE = "process ended"
SILENT = "no answer: stopped, or its machine is unreachable"

# The end of the name of a layer's exchange.
_LAYERS = re.compile(r"\((?P<layer>\d+) (?P<what>[a-z]+)[^()]* (?P<number>\d+)\)$")


class Exchange(typing.NamedTuple):
    """An exchange in flight.

    name : "title (key number)", equal in all processes. title: of the layer, or what the user sees
    waited, timeout : seconds. While the process is stopped it does not wait.
    first, end : the range of ranks that take part
    in_memory : whether they meet in shared memory, not at the store
    """

    name: str
    waited: float
    timeout: float
    first: int
    end: int
    in_memory: bool = False


class Place(typing.NamedTuple):
    """Where a thread is: "asnumpy, called at train.py:30", the seconds that it has stood there, and
    the seconds of these in which it waited for others, or None if it does not wait."""

    text: str
    stood: float
    waited: typing.Optional[float] = None


class Report(typing.NamedTuple):
    """What a process says of itself.

    exchanges : those in flight, oldest first
    reached : {name of an exchange that the judge asks about: whether this process has arrived}
    last : the name of the exchange that it completed last, or None
    place : the `Place` of its main thread, or of the training thread that has waited longest
    status : (FAILED, the error) or (FINISHED, ""), or None
    """

    exchanges: typing.Sequence[Exchange] = ()
    reached: typing.Mapping[str, bool] = {}
    last: typing.Optional[str] = None
    place: typing.Optional[Place] = None
    status: typing.Optional[tuple] = None

    @classmethod
    def from_json(cls, fields):
        exchanges, reached, last, place, status = fields
        return cls(
            [Exchange(*exchange) for exchange in exchanges],
            dict(reached),
            last,
            place and Place(*place),
            status and tuple(status),
        )


def title(name):
    """An exchange's title, which names layer, direction and call, without the key after it."""
    layer = _LAYERS.search(name)
    more = ", to compare the layer's settings" if layer and layer["what"] == "handshake" else ""
    return re.sub(r" \([^()]*\)$", "", name) + more


def exclude_each_other(name, other):
    """Whether two processes that wait in these exchanges, and have not reached that of the other,
    wait in vain: in the first calls of two layers, which begin with handshakes, or in a handshake
    and a message of one layer."""
    one, two = _LAYERS.search(name), _LAYERS.search(other)
    if not (one and two):
        return False
    handshakes = [each["what"] == "handshake" for each in (one, two)]
    if one["layer"] == two["layer"]:
        return handshakes[0] != handshakes[1]
    return any(handshakes) and one["number"] == two["number"] == "1"


def reasons(found):
    """Such as "ranks 1, 5-9 (process ended), rank 2 (waiting in x for 3 s)", of {rank: (why it is
    missing, seconds or None)}; "none" if there is none."""
    groups = {}
    for rank in sorted(found):
        groups.setdefault(found[rank][0], []).append(rank)
    parts = []
    for why, ranks in groups.items():
        seconds = [found[rank][1] for rank in ranks]
        span = "" if None in seconds else f" for {duration(max(seconds))}"
        parts.append(f"{ranks_text(ranks)} ({why}{span})")
    return ", ".join(parts) or "none"


def ranks_text(ranks):
    """Such as "ranks 0, 2, 5-511"."""
    parts = []
    # Within a run of consecutive ranks, rank minus position is constant.
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in run]
        parts += map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
