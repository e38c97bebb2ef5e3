"""The thread of each process that reports to the judge, in the process of rank 0, and carries out
what it decides."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Callable, Sequence

from .. import durations, native
from ..native import threads
from ..native.waits import Clock
from . import exit
from ._judge import END, VERDICT, WARNING, Decision, Judge
from ._links import Hub, Link
from ._records import FAILED, FINISHED, GONE, SILENT, Report

if TYPE_CHECKING:
    from .member import Member

_ADDRESS_SIZE = 80  # bytes

_log = logging.getLogger("gluon_syncbn")


class Watcher:
    """Sends what a `Member` reports to the judge, and carries out what the judge decides.

    name : of the store, in messages
    close(text) : no exchange of the store can succeed any more. It is called on another thread.

    Raises OSError if the others cannot reach rank 0.
    """

    def __init__(
        self, rank: int, size: int, name: str, member: Member, close: Callable[[str], None]
    ) -> None:
        self.rank, self.size, self.member, self._close_store = rank, size, member, close
        # Until they know each other, each process judges for itself; then rank 0 does for all.
        self._judge, self._has_met = Judge(size, name, member.timeout), False
        self._clock, self._now = Clock(), 0.0
        self._hub: Hub | None = None
        self._link: Link | None = None
        self._address: str | None = None
        # Set when the judge has decided.
        self._decided = threading.Event()
        # When the thread ends, once it is to.
        self._ends: float | None = None
        self._logged = False
        self._thread: threading.Thread | None = None
        if size > 1:
            self._start()
        else:
            self._decided.set()
        this = weakref.ref(self)

        def release() -> None:
            watcher = this()
            if watcher:
                watcher.release_in_child()

        os.register_at_fork(after_in_child=release)

    def _start(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=[ready], name="gluon_syncbn watcher", daemon=True
        )
        self._thread.start()
        ready.result()

    @property
    def address(self) -> bytes:
        """Where the others reach rank 0; blank in a process that does not know. It has the same
        length in all processes."""
        return (self._address or "").encode().ljust(_ADDRESS_SIZE)

    def meet(self, address: bytes) -> None:
        """All processes know each other. address: that of rank 0."""
        self._address = address.decode().rstrip()
        self._call(self._meet)

    def fail(self, text: str) -> None:
        """A step has failed in this process, so all end."""
        if self._has_met:
            self._set_status(FAILED, text)

    def leave(self, failure: str | None, shut_down: Callable[[float], None]) -> None:
        """Runs at exit. MXNet's own shutdown waits for all processes, even for those that are gone
        or stopped, so it may begin only once all have finished. failure: what the script died of.
        shut_down(timeout): what else the store does then, raises RuntimeError."""
        if self.size == 1 and failure is not None:
            return
        if failure is not None:
            self._set_status(FAILED, failure)
            self._decided.wait(durations.TELL)
            exit.abandon()
        else:
            self._set_status(FINISHED)
            while not self._decided.wait(durations.SLICE):
                pass
            try:
                if self.member.lost:
                    # The script may have ended without waiting for its last step.
                    raise RuntimeError(self.member.lost)
                shut_down(self.member.timeout)
            except RuntimeError as error:
                _log.error("%s", error)
                exit.abandon()
        self.lose("The process ends.")
        self.close()

    def lose(self, text: str) -> None:
        """No exchange can succeed any more. The first text stays."""
        self.member.lose(text)
        self._close_store(self.member.lost)

    def close(self) -> None:
        """Ends the thread, once the others know what was decided."""
        if self._thread:
            self._call(self._begin_to_end)
            self._thread.join(2 * durations.TELL)

    def release_in_child(self) -> None:
        """Lets go of the connections, which would outlive a parent that dies. Their numbers stay
        taken, as objects of the child still hold them."""
        if self._thread and not self._loop.is_closed():
            self._thread = None
            null = os.open(os.devnull, os.O_RDWR)
            # The selector does not know by what others wake the loop.
            loop: Any = self._loop
            wakes, selector = loop._csock.fileno(), loop._selector
            for descriptor in [*selector.get_map(), selector.fileno(), wakes]:
                os.dup2(null, descriptor, inheritable=False)
            os.close(null)
        self.lose("This process was forked from one of the group's.")

    def _set_status(self, kind: str, text: str = "") -> None:
        self.member.end(kind, text)
        if self._thread:
            self._call(self._wake.set)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # The thread has ended.
            self._loop.call_soon_threadsafe(function, *arguments)

    # From here on, on the thread.

    def _run(self, ready: Future[None]) -> None:
        self._loop.set_exception_handler(lambda _, context: self._log_once(context["message"]))
        try:
            self._loop.run_until_complete(self._main(ready))
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            self._conclude(VERDICT, f"The thread that watches over other processes ends: {error!r}")
            raise
        finally:
            self._loop.close()

    async def _main(self, ready: Future[None]) -> None:
        self._wake = asyncio.Event()
        if self.rank == 0:
            events = self._receive_report, self._judge.connected, self._disconnected
            self._hub = Hub(self.size, *events, self._greeting)
            try:
                self._address = await self._hub.listen()
            except Exception as error:
                ready.set_exception(error)
                return
        ready.set_result(None)
        while True:
            try:
                self._step()
            except Exception as error:
                # What failed, such as a look without free file descriptors, may succeed next time.
                self._log_once(error)
            # Only now, as the last step may tell why this process ends.
            if self._ends is not None:
                if not (self._hub and self._hub.connected and self._now < self._ends):
                    break
            period = min(durations.PERIOD, min(self.member.timeouts) * durations.WARN_AFTER / 2)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), period)
            self._wake.clear()
        await self._disconnect()

    async def _disconnect(self) -> None:
        self._loop.set_exception_handler(lambda *_: None)  # Some Pythons complain of the end.
        if self._hub:
            self._hub.close()
        # Before Python 3.12, asyncio.wait_for may lose a cancellation.
        while True:
            connections = asyncio.all_tasks() - {asyncio.current_task()}
            if not connections:
                break
            for connection in connections:
                connection.cancel()
            await asyncio.wait(connections, timeout=0.1)
        await asyncio.sleep(0)  # Sockets close one turn later.

    def _begin_to_end(self) -> None:
        self._ends = self._now + durations.TELL
        self._wake.set()

    def _meet(self) -> None:
        self.member.hear(self._advance())
        if self.rank == 0:
            self._judge.begin(self._now)
        else:
            gone = functools.partial(self._conclude, VERDICT, f"Missing: rank 0 ({GONE}).")
            self._link = Link(self.rank, self._address, self._receive, gone)
        self._has_met = True

    def _step(self) -> None:
        member, now = self.member, self._advance()
        report = member.look(now, self._has_met)
        if self.rank == 0 or not self._has_met:
            self._judge.timeout = member.timeout
            self._act(self._judge.report(self.rank, report, now))
            self._act(self._judge.tick(now))
            member.asked = self._judge.asked
            if self._hub:
                self._hub.send(self._greeting())
        else:
            self._link.send(report)
            if member.needs_new_connection(now):
                self._link.renew()
            if member.gives_up(now):
                self._conclude(VERDICT, f"Missing: rank 0 ({SILENT}).")
        text = member.why_it_ends(now)
        if text:
            _end(text)

    def _advance(self) -> float:
        self._now = self._clock.look(min(self.member.timeouts))
        return self._now

    # Rank 0.

    def _receive_report(self, rank: int, fields: Any) -> None:
        report, now = Report.from_json(fields), self._advance()
        if report.status and not self._judge.decided:
            # So that the verdict says what this process waits for.
            self._act(self._judge.report(0, self.member.look(now), now))
        self._act(self._judge.report(rank, report, now))

    def _disconnected(self, rank: int) -> None:
        self._judge.disconnected(rank, self._advance())
        self._loop.call_later(self._judge.reconnects, self._wake.set)
        if self._ends is not None:
            self._wake.set()

    def _greeting(self) -> dict[str, Any]:
        decided = self._judge.decided
        return {decided.kind: decided.text} if decided else {"asked": self._judge.asked}

    def _act(self, decisions: Sequence[Decision]) -> None:
        for kind, text in decisions:
            if kind == WARNING:
                native.warn(text)
            else:
                if self._hub:
                    self._hub.send(self._greeting())
                self._conclude(kind, text)

    # The others.

    def _receive(self, message: dict[str, Any]) -> None:
        self.member.hear(self._advance())
        self.member.asked = message.get("asked", self.member.asked)
        for kind in (VERDICT, END):
            if kind in message:
                self._conclude(kind, message[kind])

    # The end.

    def _conclude(self, kind: str, text: str) -> None:
        if self._decided.is_set():
            return
        if kind == VERDICT:
            exit.abandon()
            self.lose(text)
        self._decided.set()

    def _log_once(self, error: Any) -> None:
        if not self._logged:
            text = "The thread that watches over other processes goes on after an error: %r"
            # On another thread, as nobody may read the output.
            with contextlib.suppress(RuntimeError):  # There are no more threads.
                threads.start(_log.warning, text, error)
                self._logged = True


def _end(text: str) -> None:
    """Ends this process, whatever its threads are doing."""
    # Logging may block: nobody may read the output, or the hanging thread may be logging.
    try:
        threads.start(_log.error, "%s", text).wait(durations.LAST_WORDS)
    except RuntimeError:  # There are no more threads.
        _log.error("%s", text)
    os._exit(1)
