"""What processes answer to a probe, and how messages describe it."""

import itertools
import re
import typing

from ..arguments import duration

ARRIVED = "arrived"
ABSENT = "absent"
SILENT = "silent"
GONE = "gone"

# The status of a process, which goes with every answer.
FAILED = "failed"
FINISHED = "finished"


# The end of the name of a layer's exchange.
_LAYERS = re.compile(r"\((?P<layer>\d+) (?P<what>[a-z]+)[^()]* (?P<number>\d+)\)$")


class Answer(typing.NamedTuple):
    """What one process answered about an exchange, or why it did not.

    state : ARRIVED
            ABSENT, if it answered that it has not arrived
            SILENT, if it did not answer in time: stopped, or unreachable
            GONE, if nobody, or somebody else, listens at its address
    in_flight : its oldest exchanges in flight, each as (key, seconds since it arrived)
    last : the exchange that it completed last, as (key, seconds since then), or None
    status : (FAILED, the error) or (FINISHED, ""), or None
    why : the system's message if it could not be probed, or None
    place : where its main thread is, as (text, seconds, whether it waits for others there), or
            None
    """

    state: str
    in_flight: tuple = ()
    last: typing.Optional[tuple] = None
    status: typing.Optional[tuple] = None
    why: typing.Optional[str] = None
    place: typing.Optional[tuple] = None


def describe(answers):
    """One line on which ranks have arrived, and which have not and why."""
    arrived = [rank for rank, answer in answers.items() if answer.state == ARRIVED]
    others = {rank: answer for rank, answer in answers.items() if rank not in arrived}
    return f"Arrived: {_ranks(arrived)}. Missing: {_reasons(others) or 'none'}."


def describe_others(answers):
    """One line on what other ranks are doing."""
    return f"The others: {_reasons(answers)}."


def built_another_net(exchange, answers, reached, patience):
    """Whether one of these processes has waited for `patience` seconds in the first call of another
    layer than this process, which waits in `exchange` and has `reached` these."""
    own = _LAYERS.search(exchange)
    reached = [found[0] for found in map(_LAYERS.search, reached) if found]
    others = [
        _LAYERS.search(name)
        for answer in answers
        for name, seconds in answer.in_flight
        if answer.state == ABSENT and seconds >= patience
    ]
    return any(
        own and other and other[0] not in reached and _exclude_each_other(own, other)
        for other in others
    )


def _exclude_each_other(own, other):
    """Whether two processes that wait in these wait in vain: in the first calls of two layers,
    which begin with handshakes, or in a handshake and a message of one layer."""
    handshakes = [one["what"] == "handshake" for one in (own, other)]
    if own["layer"] == other["layer"]:
        return handshakes[0] != handshakes[1]
    return any(handshakes) and own["number"] == other["number"] == "1"


def _reasons(answers):
    groups = {}
    for rank in sorted(answers):
        groups.setdefault(_kind(answers[rank]), []).append(rank)
    return ", ".join(
        f"{_ranks(ranks)} ({_reason([answers[rank] for rank in ranks])})"
        for ranks in groups.values()
    )


def _kind(answer):
    """Equal for answers that differ only in seconds."""
    last, place = answer.last and answer.last[0], answer.place and answer.place[0]
    in_flight = tuple(key for key, _ in answer.in_flight)
    return answer.state, answer.why, in_flight, last, answer.status, place


def _reason(answers):
    """Why the processes that gave these answers, of one kind, are missing."""
    first = answers[0]
    if first.status:
        kind, error = first.status
        return f"failed: {error}" if kind == FAILED else "reached the end of the script"
    if first.state == GONE:
        return "process ended"
    if first.why:
        return f"could not be probed: {first.why}"
    if first.state == SILENT:
        return "no answer: stopped, or its machine is unreachable"
    if first.in_flight:
        each = zip(*(answer.in_flight for answer in answers))
        return "waiting in " + ", ".join(f"{_name(one[0][0])} for {_span(one)}" for one in each)
    reason = "nothing exchanged yet"
    if first.last:
        reason = f"last completed {_name(first.last[0])}, {_span([a.last for a in answers])} ago"
    if first.place:
        text, _, waits = first.place
        does = "waits in" if waits else "is at"
        reason += f", {does} {text} for {_span([a.place for a in answers])}"
    return reason


def _name(exchange):
    """The title, which names layer, direction and call, without the key after it."""
    layer = _LAYERS.search(exchange)
    more = ", to compare the layer's settings" if layer and layer["what"] == "handshake" else ""
    return re.sub(r" \([^()]*\)$", "", exchange) + more


def _span(entries):
    ends = [duration(pick(entry[1] for entry in entries)) for pick in (min, max)]
    return " to ".join(dict.fromkeys(ends)).replace(" s to", " to")


def _ranks(ranks):
    """Such as "ranks 0, 2, 5-511"."""
    parts = []
    # Within a run of consecutive ranks, rank minus position is constant.
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in run]
        parts += map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
