"""Decides whether waiting for the other processes is of use.

The judge is a state machine without clock, thread and socket: it takes reports, broken connections
and the time, and says what to send. `watcher` does the rest. Its time stands still while its own
process is stopped, so a job that is suspended as a whole goes on. The table of what it knows and
decides is in docs/design.md, "Missing processes".
"""

from __future__ import annotations

from typing import Collection, Iterable, NamedTuple, Sequence

from ..durations import ALONE, LATER, RECONNECTS, REMAINS, SILENCE, WARN_AFTER, duration
from ._records import FAILED, GONE, SILENT, Exchange, Report, ranks_text, reasons

# How many exchanges to ask about at once, and the characters of a verdict.
_MOST_ASKED, _LONGEST = 8, 8000
_NEEDS_TIME = (
    "If a process only needs time, as to validate or to save, give SyncGroup(timeout=...) more."
)
_CAUSES = (
    "Usual causes: a process has ended, hangs or is much slower; it called the net less often (an "
    "uneven number of batches: see gluon_syncbn.distributed.join), it built another net, or "
    "hybridized it at another step, which matters where a net calls one layer several times. "
    + _NEEDS_TIME
)


class Decision(NamedTuple):
    """What the judge has decided.

    kind : WARNING, to be logged once for the job; VERDICT, on which all processes end; or END, when
        all scripts have finished
    """

    kind: str
    text: str = ""


WARNING, VERDICT, END = "warning", "verdict", "end"


class _Process:
    def __init__(self) -> None:
        self.report = Report()
        # When it was last heard of; None until it is known.
        self.heard: float | None = None
        # When it closed its connection, unless it has a new one, and how many looks ago.
        self.broken: float | None = None
        self.looks = 0
        # When its script ended.
        self.ended: float | None = None


class Judge:
    """The judge of `size` processes. name: of the store, in messages. timeout: in seconds, of waits
    that have none of their own; while a process waits in an exchange with a longer one, that."""

    def __init__(self, size: int, name: str, timeout: float) -> None:
        self.timeout, self._name = timeout, name
        self._processes = [_Process() for _ in range(size)]
        # The longest timeout of an exchange that some wait in, and until when it holds.
        self._longest, self._holds_until = 0.0, 0.0
        # The verdict, or END, once there is one.
        self.decided: Decision | None = None
        # Exchanges for which some have waited. Reports say who has reached them.
        self.asked: list[str] = []
        # Of waits that still last, or others that began meanwhile.
        self._has_warned = self._has_warned_of_end = False

    def begin(self, now: float) -> None:
        """All processes know each other, and report from now on."""
        for process in self._processes:
            process.heard = now

    def report(self, rank: int, report: Report, now: float) -> list[Decision]:
        """A process has reported."""
        process = self._processes[rank]
        process.heard, process.report = now, report
        longest = max((exchange.timeout for exchange in report.exchanges), default=0.0)
        if longest >= self._longest_at(now):
            self._longest, self._holds_until = longest, now + REMAINS
        if self.decided or process.ended is not None or not report.status:
            return []
        process.ended = now
        if report.status[0] == FAILED:
            # It may have failed because another one is gone.
            lost = [r for r, p in enumerate(self._processes) if r == rank or p.broken is not None]
            return self._decide(VERDICT, self._lost_text(lost, now))
        is_over = all(each.ended is not None for each in self._processes)
        return self._decide(END) if is_over else []

    def connected(self, rank: int) -> None:
        """A process has a new connection."""
        self._processes[rank].broken = None

    def disconnected(self, rank: int, now: float) -> None:
        """A process has closed its connection, as one does that ends."""
        self._processes[rank].broken, self._processes[rank].looks = now, 0

    def tick(self, now: float) -> list[Decision]:
        """Some time has passed."""
        if self.decided:
            return []
        lost = [rank for rank in range(len(self._processes)) if self._is_lost(rank, now)]
        if lost:
            return self._decide(VERDICT, self._lost_text(lost, now))
        waits = [each for each in (self._judge_exchanges(now), self._judge_places(now)) if each]
        end = self._judge_end(now)
        for decision in (*waits, *([end] if end else ())):
            if decision.kind == VERDICT:
                return self._decide(*decision)
        # One warning of waits that last, and one of scripts that wait for the end of others.
        warning = None
        if waits and not self._has_warned:
            warning = waits[0]
        elif end and not self._has_warned_of_end:
            warning, self._has_warned_of_end = end, True
        self._has_warned = bool(waits)
        return [warning] if warning else []

    def _decide(self, kind: str, text: str = "") -> list[Decision]:
        self.decided, self.asked = Decision(kind, text[:_LONGEST]), []
        return [self.decided]

    @property
    def reconnects(self) -> float:
        """Seconds that a process has to connect again."""
        return min(RECONNECTS, WARN_AFTER * self.timeout)

    def _longest_at(self, now: float) -> float:
        return max(self.timeout, self._longest if now <= self._holds_until else 0.0)

    def _is_lost(self, rank: int, now: float) -> bool:
        process = self._processes[rank]
        if process.broken is not None:
            # Where rank 0 was stopped, the new connection may be waiting to be read.
            process.looks += 1
            return process.looks > 1 and now - process.broken >= self.reconnects
        return process.heard is not None and now - process.heard > self._longest_at(now)

    # Exchanges.

    def _waits(self) -> list[tuple[int, Exchange]]:
        """Each exchange in flight, as seen by the process that has waited longest, and its rank;
        the longest wait first."""
        longest: dict[tuple[str, int], tuple[int, Exchange]] = {}
        for rank, process in enumerate(self._processes):
            for exchange in process.report.exchanges:
                # Groups of processes have exchanges of the same name.
                which = exchange.name, exchange.first
                if which not in longest or exchange.waited > longest[which][1].waited:
                    longest[which] = rank, exchange
        return sorted(longest.values(), key=lambda wait: -wait[1].waited)

    def _missing(self, exchange: Exchange) -> list[int]:
        """The members of an exchange that have not arrived."""
        return [
            rank
            for rank in exchange.members
            if exchange.name not in [e.name for e in self._processes[rank].report.exchanges]
            and not self._processes[rank].report.reached.get(exchange.name)
        ]

    def _judge_exchanges(self, now: float) -> Decision | None:
        waits = self._waits()
        asked = [e.name for _, e in waits if e.waited > e.timeout * WARN_AFTER / 2]
        self.asked = list(dict.fromkeys(asked))[:_MOST_ASKED]
        warning = None
        for rank, exchange in waits:
            timeout = exchange.timeout
            if exchange.waited < timeout * WARN_AFTER:
                continue
            missing = self._missing(exchange)
            # Some may have arrived just now, as after a suspension of all.
            limit = timeout if missing else timeout * (1 + WARN_AFTER)
            is_over = exchange.waited > limit or any(
                self._ended_before(exchange, rank, other) for other in missing
            )
            if is_over:
                text = self._exchange_text(exchange, rank, missing, now)
                return Decision(VERDICT, f"{text} {_CAUSES}")
            if not warning:
                text = self._exchange_text(exchange, rank, missing, now)
                text += f" After {duration(timeout)} this is an error. {_CAUSES}"
                warning = Decision(WARNING, text)
        return warning

    def _ended_before(self, exchange: Exchange, rank: int, other: int) -> bool:
        """Whether the script of `other` has ended without this exchange, in which `rank` has still
        been seen a while later."""
        ended, seen = self._processes[other].ended, self._processes[rank].heard
        return (
            ended is not None
            and seen - ended > exchange.timeout * WARN_AFTER / 2
            and self._processes[other].report.reached.get(exchange.name) is False
        )

    # Other waits.

    def _judge_places(self, now: float) -> Decision | None:
        counted, rank = max(
            (_counted(process.report), rank) for rank, process in enumerate(self._processes)
        )
        timeout = self._longest_at(now)
        if counted < timeout * WARN_AFTER:
            return None
        place = self._processes[rank].report.place
        others, what = self._others_text([rank], now), "for other processes"
        if counted < place.waited:
            what = "for a long computation, or for other processes"
        elif all(_counted(process.report) for process in self._processes):
            others += f" As all of them wait, {self._name} does not answer, or lost a message."
        else:
            others += f" {_NEEDS_TIME}"
        text = f"Rank {rank} has waited {duration(place.waited)} {what}, in {place.text}. {others}"
        if counted > timeout + LATER:
            return Decision(VERDICT, text)
        limit = duration(timeout * place.waited / counted)
        return Decision(WARNING, f"{text} After {limit} this ends the process.")

    def _judge_end(self, now: float) -> Decision | None:
        ended = [each.ended for each in self._processes if each.ended is not None]
        if not ended:
            return None
        waited = now - min(ended)
        is_over = waited > ALONE * self.timeout
        if waited < self.timeout * WARN_AFTER:
            return None
        finished = [rank for rank, p in enumerate(self._processes) if p.report.status]
        others = [rank for rank, p in enumerate(self._processes) if not p.report.status]
        text = (
            f"Rank {finished[0]} has reached the end of its script and has waited "
            f"{duration(waited)} for the other processes to reach theirs. "
            f"Missing: {self._reasons(others, now)}."
        )
        if is_over:
            return Decision(VERDICT, text)
        limit = duration(ALONE * self.timeout)
        return Decision(WARNING, f"{text} One that works on for {limit} is an error.")

    # Texts.

    def _reasons(self, ranks: Iterable[int], now: float) -> str:
        return reasons({rank: self._reason(rank, now) for rank in ranks})

    def _reason(self, rank: int, now: float) -> tuple[str, float | None]:
        """Why a process is missing, and the seconds for which it is where it is, or None."""
        process = self._processes[rank]
        report, place = process.report, process.report.place
        if report.status:
            kind, error = report.status
            return (f"failed: {error}" if kind == FAILED else "reached the end of the script"), None
        if process.broken is not None:
            return GONE, None
        if process.heard is None:
            return "not heard of", None
        if now - process.heard > min(SILENCE, self.timeout / 4):
            return SILENT, None
        if report.exchanges:
            longest = max(report.exchanges, key=lambda exchange: exchange.waited)
            return f"waiting in {longest.title}", longest.waited
        text = f"last completed {report.last}" if report.last else "nothing exchanged yet"
        if not place:
            return text, None
        does = "is at" if place.waited is None else "waits in"
        return f"{text}, {does} {place.text}", place.stood

    def _others_text(self, ranks: Collection[int], now: float) -> str:
        others = [rank for rank in range(len(self._processes)) if rank not in ranks]
        return f"The others: {self._reasons(others, now)}."

    def _exchange_text(
        self, exchange: Exchange, rank: int, missing: Sequence[int], now: float
    ) -> str:
        members = exchange.members
        arrived = sorted({*members} - {*missing})
        text = (
            f"{exchange.title}: rank {rank} has waited {duration(exchange.waited)} for other "
            f"processes. Arrived: {ranks_text(arrived)}. Missing: {self._reasons(missing, now)}."
        )
        if not missing and not exchange.in_memory:
            text += f" All have arrived, so {self._name} does not answer."
        if missing and len(members) < len(self._processes):
            # A member may itself wait for one that is none.
            text += f" {self._others_text(members, now)}"
        return text

    def _lost_text(self, lost: Sequence[int], now: float) -> str:
        """Why the job ends without these processes, for which another may wait in an exchange."""
        for rank, exchange in self._waits():
            missing = self._missing(exchange)
            if rank not in lost and set(missing) & set(lost):
                return self._exchange_text(exchange, rank, missing, now)
        return f"Missing: {self._reasons(lost, now)}. {self._others_text(lost, now)}"


def _counted(report: Report) -> float:
    """How long a process has waited for others, in MXNet or a store."""
    return report.place.counted if report.place else 0.0
