"""The thread of each process that reports to the judge, in the process of rank 0, and carries out
what it decides."""

import asyncio
import collections
import contextlib
import logging
import os
import selectors
import threading
import time
import weakref

from .. import native
from ..native import shutdown, threads
from . import durations, waits
from .durations import duration
from .judge import END, VERDICT, WARNING, Judge
from .limits import Clock
from .links import Hub, Link
from .records import FAILED, FINISHED, GONE, SILENT, Exchange, Report, title_of

_ADDRESS_SIZE = 80  # bytes
_LONGEST_STATUS = 4000  # characters of an error
_MOST_IN_FLIGHT, _REMEMBERED = 8, 16

_log = logging.getLogger("gluon_syncbn")


class Watcher:
    """Reports where this process is, and ends its waits when the judge says so.

    name : of the store, in messages
    in_flight() : exchanges in flight, and the last completed ones: two lists of `native.InFlight`
    about(key) : the `Subject` of its exchanges
    close(text) : no exchange of the store can succeed any more

    Both functions are called on another thread. Raises OSError if the others cannot reach rank 0.
    """

    # Why no exchange can succeed any more.
    lost = None

    def __init__(self, rank, size, name, timeout, in_flight, about, close):
        self.rank, self.size = rank, size
        self._in_flight, self._about, self._close_store = in_flight, about, close
        # The timeouts of the store and of groups, and those of calls that are waiting.
        self._timeouts, self._of_calls = {timeout}, []
        # Exchanges whose routes are being opened, and those that were opened last.
        self._opening, self._opened = {}, collections.deque(maxlen=_REMEMBERED)
        # {exchange in flight: when it was first seen, by `_now`}
        self._seen = {}
        self._status = None
        self._waits, self._place = waits.Waits(), None
        # The last exchange that was completed.
        self._last = None
        # How many of Python's waits had failed before `lost`, and when it began, by `_now`.
        self._failed_before, self._lost_at = 0, 0.0
        # Until they know each other, each process judges for itself; then rank 0 does for all.
        self._judge, self._has_met = Judge(size, name, timeout), False
        self._asked = ()
        # The time, and when it last reported and heard of rank 0.
        self._clock, self._now = Clock(), 0.0
        self._last_step, self._heard = 0.0, 0.0
        # The longest timeout since then.
        self._patience = 0.0
        self._hub = self._link = self._address = self._error = None
        # Set when the judge has decided.
        self._decided = threading.Event()
        # When the thread ends, once it is to.
        self._ends = None
        self._logged = False
        self._selector = self._thread = None
        if size > 1:
            self._start()
        _all.add(self)

    def _start(self):
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=[ready], name="gluon_syncbn watcher", daemon=True
        )
        self._thread.start()
        ready.wait()
        if self._error:
            raise self._error

    @property
    def address(self):
        """Where the others reach rank 0; blank in a process that does not know. It has the same
        length in all processes."""
        return (self._address or "").encode().ljust(_ADDRESS_SIZE)

    def meet(self, address):
        """All processes know each other. address: that of rank 0."""
        self._address = address.decode().rstrip()
        self._call(self._meet)

    def note_timeout(self, timeout):
        """Notes the timeout of a group, which holds to the end of the job."""
        self._timeouts.add(timeout)

    @contextlib.contextmanager
    def waits(self, timeout):
        """Notes a timeout that holds while a call waits."""
        self._of_calls.append(timeout)
        try:
            yield
        finally:
            self._of_calls.remove(timeout)

    def _limits(self):
        return [*self._timeouts, *self._of_calls]

    @contextlib.contextmanager
    def arrives(self, title, key, timeout):
        """Notes that this process is at an exchange, whose route is being opened."""
        self._opening[key] = exchange = native.InFlight(title, key, 1, timeout, time.monotonic())
        try:
            yield
            self._opened.append(exchange._replace(since=time.monotonic()))
        finally:
            del self._opening[key]

    def fail(self, text):
        """A step has failed in this process, so all end."""
        if self._has_met:
            self._set_status(FAILED, text)

    def leave(self, failure, shut_down):
        """Runs at exit. MXNet's own shutdown waits for all processes, even for those that are gone
        or stopped, so it may begin only once all have finished. failure: what the script died of.
        shut_down(timeout): what else the store does then, raises RuntimeError."""
        if self.size == 1:
            return
        if failure is not None:
            self._set_status(FAILED, failure)
            self._decided.wait(durations.TELL)
            shutdown.abandon()
        else:
            self._set_status(FINISHED)
            while not self._decided.wait(0.1):
                pass
            try:
                if self.lost:
                    # The script may have ended without waiting for its last step.
                    raise RuntimeError(self.lost)
                shut_down(max(self._timeouts))
            except RuntimeError as error:
                _log.error("%s", error)
                shutdown.abandon()
        self.lose("The process ends.")
        self.close()

    def check(self, title):
        """Raises RuntimeError if no exchange can succeed any more."""
        if self.lost:
            raise RuntimeError(
                self.lost if self.lost.startswith(title) else f"{title}: {self.lost}"
            )

    def lose(self, text):
        """No exchange can succeed any more. The first text stays."""
        if not self.lost:
            self._failed_before, self._lost_at = waits.failed, self._now
            self.lost = text
        self._close_store(self.lost)

    def close(self):
        """Ends the thread, once the others know what was decided."""
        if self._thread:
            self._call(self._begin_to_end)
            self._thread.join(2 * durations.TELL)

    def release_in_child(self):
        """Lets go of the connections, which would outlive a parent that dies. Their numbers stay
        taken, as objects of the child still hold them."""
        if self._thread and not self._loop.is_closed():
            self._thread = None
            null = os.open(os.devnull, os.O_RDWR)
            # The selector does not know by what others wake the loop.
            wakes = self._loop._csock.fileno()
            for descriptor in [*self._selector.get_map(), self._selector.fileno(), wakes]:
                os.dup2(null, descriptor, inheritable=False)
            os.close(null)
        self.lose("This process was forked from one of the group's.")

    def _set_status(self, kind, text=""):
        """The first status stays."""
        self._status = self._status or (kind, text[:_LONGEST_STATUS])
        self._call(self._wake.set)

    def _call(self, function, *arguments):
        with contextlib.suppress(RuntimeError):  # The thread has ended.
            self._loop.call_soon_threadsafe(function, *arguments)

    # From here on, on the thread.

    def _run(self, ready):
        self._loop.set_exception_handler(lambda _, context: self._log_once(context["message"]))
        try:
            self._loop.run_until_complete(self._main(ready))
        except BaseException as error:
            self._conclude(VERDICT, f"The thread that watches over other processes ends: {error!r}")
            raise
        finally:
            ready.set()
            self._loop.close()

    async def _main(self, ready):
        self._wake = asyncio.Event()
        if self.rank == 0:
            events = self._receive_report, self._judge.connected, self._disconnected
            self._hub = Hub(self.size, *events, self._greeting)
            try:
                self._address = await self._hub.listen()
            except Exception as error:
                self._error = error
                return
        ready.set()
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
            period = min(durations.PERIOD, min(self._limits()) * durations.WARN_AFTER / 2)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), period)
            self._wake.clear()
        await self._disconnect()

    async def _disconnect(self):
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

    def _begin_to_end(self):
        self._ends = self._now + durations.TELL
        self._wake.set()

    def _meet(self):
        self._has_met = True
        self._heard = self._advance()
        if self.rank == 0:
            self._judge.begin(self._heard)
        else:
            self._link = Link(self.rank, self._address, self._receive, self._rank_0_is_gone)

    def _longest_silence(self):
        return max(durations.SILENCE, max(self._limits()) * durations.SILENT_SHARE)

    def _step(self):
        before, self._last_step = self._last_step, self._advance()
        in_flight, completed = self._exchanges()
        may_wait = self._has_met and not in_flight
        last, self._last = self._last, completed[-1] if completed else None
        self._place = place = self._waits.look(self._now - before, may_wait, self._last != last)
        report = self._report(in_flight, completed)
        timeout = max(self._limits())
        self._patience = max(self._patience, timeout)
        if self.rank == 0 or not self._has_met:
            self._judge.timeout = max(self._timeouts)
            self._act(self._judge.report(self.rank, report, self._now))
            self._act(self._judge.tick(self._now))
            self._asked = self._judge.asked
            if self._hub:
                self._hub.send(self._greeting())
        else:
            self._link.send(report)
            silence = self._now - self._heard
            if silence > self._longest_silence():
                self._link.renew()
            if silence > self._patience:
                self._conclude(VERDICT, f"Missing: rank 0 ({SILENT}).")
        if self.lost:
            # A script that has caught the error, or does not wait, may save what it has.
            has_raised = waits.failed > self._failed_before
            waited = place and place.waited or 0.0
            if waited > durations.RAISES and not has_raised and self._waits.still_waits():
                self._end(
                    f"{self.lost} The script waits in {place.text}. No error can be raised there, "
                    "so this process ends."
                )
            if self._now - self._lost_at > timeout:
                where = f" in {place.text}" if place else ""
                self._end(
                    f"{self.lost} The script has gone on for {duration(timeout)}, and is{where}: "
                    "this process ends."
                )

    def _advance(self):
        self._now = self._clock.look(min(self._limits()))
        return self._now

    def _exchanges(self):
        """Those in flight, and the last completed ones, oldest first."""
        in_flight, completed = self._in_flight()
        return (
            sorted([*self._opening.copy().values(), *in_flight], key=_since),
            sorted([*self._opened.copy(), *completed], key=_since),
        )

    def _report(self, in_flight, completed):
        here = set(map(_name, [*in_flight, *completed]))
        self._seen = {name: self._seen.get(name, self._now) for name in map(_name, in_flight)}
        return Report(
            [
                Exchange(
                    _name(each),
                    each.title,
                    each.number,
                    self._now - self._seen[_name(each)],
                    each.timeout,
                    self._about(each.key),
                )
                for each in in_flight[:_MOST_IN_FLIGHT]
            ],
            {name: name in here for name in self._asked},
            title_of(completed[-1].title, self._about(completed[-1].key)) if completed else None,
            self._place,
            self._status,
        )

    # Rank 0.

    def _receive_report(self, rank, fields):
        report, now = Report.from_json(fields), self._advance()
        if report.status and not self._judge.decided:
            # So that the verdict says what this process waits for.
            self._act(self._judge.report(0, self._report(*self._exchanges()), now))
        self._act(self._judge.report(rank, report, now))

    def _disconnected(self, rank):
        self._judge.disconnected(rank, self._advance())
        self._loop.call_later(self._judge.reconnects, self._wake.set)
        if self._ends is not None:
            self._wake.set()

    def _greeting(self):
        decided = self._judge.decided
        return {decided.kind: decided.text} if decided else {"asked": self._asked}

    def _act(self, decisions):
        for kind, text in decisions:
            if kind == WARNING:
                native.warn(text)
            else:
                if self._hub:
                    self._hub.send(self._greeting())
                self._conclude(kind, text)

    # The others.

    def _receive(self, message):
        self._heard, self._patience = self._advance(), 0.0
        self._asked = message.get("asked", self._asked)
        for kind in (VERDICT, END):
            if kind in message:
                self._conclude(kind, message[kind])

    def _rank_0_is_gone(self):
        self._conclude(VERDICT, f"Missing: rank 0 ({GONE}).")

    # The end.

    def _conclude(self, kind, text):
        if self._decided.is_set():
            return
        if kind == VERDICT:
            shutdown.abandon()
            self.lose(text)
            self._waits.forget()  # From here on the error has time to be raised.
        self._decided.set()

    def _end(self, text):
        """Ends this process, whatever its threads are doing."""
        # Logging may block: nobody may read the output, or the hanging thread may be logging.
        try:
            threads.start(_log.error, "%s", text).wait(durations.LAST_WORDS)
        except RuntimeError:  # There are no more threads.
            _log.error("%s", text)
        os._exit(1)

    def _log_once(self, error):
        if not self._logged:
            text = "The thread that watches over other processes goes on after an error: %r"
            # On another thread, as nobody may read the output.
            with contextlib.suppress(RuntimeError):  # There are no more threads.
                threads.start(_log.warning, text, error)
                self._logged = True


def _since(exchange):
    return exchange.since


def _name(exchange):
    return f"{exchange.key} {exchange.number}"


_all = weakref.WeakSet()


def _release_in_child():
    for watcher in list(_all):
        watcher.release_in_child()


os.register_at_fork(after_in_child=_release_in_child)
