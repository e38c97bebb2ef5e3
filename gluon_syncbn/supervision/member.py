"""What a process of a job knows of itself: its exchanges, its waits, its limits, and its end.

Like the judge, it decides, and the watcher acts.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import time
from typing import Callable, Iterator, Sequence

from .. import durations, native
from ..durations import duration
from ..native import waits
from ._records import Exchange, Report

_LONGEST_STATUS = 4000  # characters of an error
_MOST_IN_FLIGHT, _REMEMBERED = 8, 16
_since = operator.attrgetter("since")


class Member:
    """A process of a job.

    timeout : of its store
    in_flight() : exchanges in flight, and the last completed ones: two lists of `native.InFlight`
    about(key) : of its exchanges, the first rank, the one after the last, and whether they meet in
        shared memory
    """

    # Why no exchange can succeed any more.
    lost: str | None = None
    # Exchanges that the judge asks about.
    asked: Sequence[str] = ()

    def __init__(
        self,
        timeout: float,
        in_flight: Callable[[], tuple[list[native.InFlight], list[native.InFlight]]],
        about: Callable[[str], tuple[int, int, bool]],
    ) -> None:
        self._in_flight, self._about = in_flight, about
        # The timeouts of the store and of groups, and those of calls that are waiting.
        self._timeouts = {timeout}
        self._of_calls: list[float] = []
        # Exchanges whose routes are being opened, and those that were opened last.
        self._opening: dict[str, native.InFlight] = {}
        self._opened: collections.deque[native.InFlight] = collections.deque(maxlen=_REMEMBERED)
        # {exchange in flight: when it was first seen}
        self._seen: dict[str, float] = {}
        self._status: tuple[str, str] | None = None
        self._waits = waits.Waits()
        self._place: waits.Place | None = None
        # The last exchange that was completed, and how many operations of stores, when looked at.
        self._completed: tuple[list[native.InFlight], int] = [], 0
        self._looked = 0.0
        # When rank 0 was heard of, and the longest timeout since then.
        self._heard, self._patience = 0.0, 0.0
        # How many of Python's waits had failed before `lost`, and when it began.
        self._failed_before, self._lost_at = 0, 0.0

    # For the store, on any thread.

    @property
    def timeout(self) -> float:
        """The longest of the store and of groups."""
        return max(self._timeouts)

    @property
    def timeouts(self) -> list[float]:
        return [*self._timeouts, *self._of_calls]

    def note_timeout(self, timeout: float) -> None:
        """Notes the timeout of a group, which holds to the end of the job."""
        self._timeouts.add(timeout)

    @contextlib.contextmanager
    def waits(self, timeout: float) -> Iterator[None]:
        """Notes a timeout that holds while a call waits."""
        self._of_calls.append(timeout)
        try:
            yield
        finally:
            self._of_calls.remove(timeout)

    @contextlib.contextmanager
    def arrives(self, title: str, key: str, timeout: float) -> Iterator[None]:
        """Notes that this process is at an exchange, whose route is being opened."""
        self._opening[key] = exchange = native.InFlight(title, key, 1, timeout, time.monotonic())
        try:
            yield
            self._opened.append(exchange._replace(since=time.monotonic()))
        finally:
            del self._opening[key]

    def check(self, title: str) -> None:
        """Raises RuntimeError if no exchange can succeed any more."""
        if self.lost:
            raise RuntimeError(
                self.lost if self.lost.startswith(title) else f"{title}: {self.lost}"
            )

    def end(self, kind: str, text: str = "") -> None:
        """The script has ended, or failed. The first status stays."""
        self._status = self._status or (kind, text[:_LONGEST_STATUS])

    def lose(self, text: str) -> None:
        """No exchange can succeed any more. The first text stays."""
        if not self.lost:
            # Where a step has failed in this process, its error may have been raised already.
            self._failed_before = -1 if self._status else waits.failed
            self._lost_at = self._looked
            # From here on the error has time to be raised.
            self._waits, self._place = waits.Waits(), None
            self.lost = text

    # For the watcher.

    def look(self, now: float, may_wait: bool = True) -> Report:
        """Looks at exchanges and waits, and returns a `Report`. may_wait: whether others may be
        waited for."""
        in_flight, completed = self._exchanges()
        begun, ended = native.store_operations()
        before, self._completed = self._completed, (completed[-1:], ended)
        passed, self._looked = now - self._looked, now
        self._place = self._waits.look(
            passed, may_wait and not in_flight, self._completed != before, begun > ended
        )
        self._patience = max(self._patience, *self.timeouts)
        here = {each.name for each in (*in_flight, *completed)}
        self._seen = {each.name: self._seen.get(each.name, now) for each in in_flight}
        return Report(
            [
                Exchange(
                    each.name,
                    each.title,
                    now - self._seen[each.name],
                    each.timeout,
                    *self._about(each.key),
                )
                for each in in_flight[:_MOST_IN_FLIGHT]
            ],
            {name: name in here for name in self.asked},
            completed[-1].title if completed else None,
            self._place,
            self._status,
        )

    def hear(self, now: float) -> None:
        """Rank 0 has been heard of."""
        self._heard, self._patience = now, 0.0

    def needs_new_connection(self, now: float) -> bool:
        """Whether rank 0 has been silent for so long that its connection may be broken."""
        share = durations.WARN_AFTER * max(self.timeouts)
        return now - self._heard > max(durations.SILENCE, share)

    def gives_up(self, now: float) -> bool:
        """Whether rank 0 has been silent for longer than the timeout."""
        return now - self._heard > self._patience

    def why_it_ends(self, now: float) -> str | None:
        """Why this process ends, whatever its threads are doing, or None. A script that has caught
        the error, or does not wait, may first save what it has."""
        if not self.lost:
            return None
        place, timeout = self._place, max(self.timeouts)
        has_raised = waits.failed > self._failed_before
        waited = place and place.waited or 0.0
        if waited > durations.RAISES and not has_raised and self._waits.still_waits():
            return (
                f"{self.lost} The script is in {place.text}. No error can be raised there, so this "
                "process ends."
            )
        if now - self._lost_at > timeout:
            where = f" in {place.text}" if place else ""
            return (
                f"{self.lost} The script has gone on for {duration(timeout)}, and is{where}: this "
                "process ends."
            )
        return None

    def _exchanges(self) -> tuple[list[native.InFlight], list[native.InFlight]]:
        """Those in flight, and the last completed ones, oldest first."""
        in_flight, completed = self._in_flight()
        return (
            sorted([*self._opening.copy().values(), *in_flight], key=_since),
            sorted([*self._opened.copy(), *completed], key=_since),
        )
