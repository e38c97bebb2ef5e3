"""What the stores of :mod:`gluon_syncbn.distributed` have in common."""

import logging
import os
import threading
import time

import mxnet as mx
import numpy

from .. import native
from ..native import shutdown
from .arguments import seconds
from .liveness import CAME, FAILED, GONE, WARN_AFTER, RollCall

_log = logging.getLogger("gluon_syncbn")

# How long the KVStore may take for a parting message when all have come to their end.
_PARTING_SECONDS = 30.0
_CAUSES = (
    "Usual causes: a process has ended, hangs or is much slower; it called the net less often (an "
    "uneven number of batches: see gluon_syncbn.distributed.join), it built another net, or "
    "hybridized it at another step."
)


class Reducer:
    """What the stores of this module have in common: an exact sum of float64 over all processes,
    a time limit, and an error that says who is missing.

    rank, size : int
        This process's number, and how many there are.
    """

    # What carries the numbers, as a message names it.
    engine = "the store"

    def __init__(self, rank, size, timeout):
        self.rank, self.size = rank, size
        self._process = os.getpid()
        # By key, from its first meeting on, of which there is one at a time.
        self._lines = {}
        self._first_meetings = {}
        # All that were asked for, of which the end takes the longest.
        self._timeouts = {timeout}
        # Why no exchange can succeed any more.
        self._lost = None
        self._roll_call = None
        if size > 1:
            roll_call = RollCall(rank, size, attendance=self._connection.attendance)
            address = numpy.frombuffer(roll_call.address(), numpy.uint8).astype(numpy.float64)
            everyone = self.all_gather("hello", address, timeout=timeout)
            roll_call.set_addresses([row.astype(numpy.uint8).tobytes() for row in everyone])
            self._roll_call = roll_call
        shutdown.at_exit(self._leave)

    def all_reduce(self, key, array, timeout=None):
        """The sum of `array` over all processes.

        Added in the order of ranks with an error term of its own for every sum (Ogita, Rump and
        Oishi 2005, Sum2), so that it is as good as one in twice the precision.

        Parameters
        ----------
        key : str
            Names the sum: equal in all processes, and used for arrays of one shape. A call waits
            for an earlier one of the same key on another thread. At most 40 bytes.
        array : numpy.ndarray
            float64, of one shape in all processes. Any value: infinities and NaN are summed too.
        timeout : float, optional
            Seconds. By default the environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.

        Raises
        ------
        RuntimeError
            When a process does not come: at once where it has ended or failed, and otherwise after
            `timeout`.
        """
        array = numpy.asarray(array)
        rows = self.all_gather(key, array.reshape(-1), timeout=timeout)
        total, error = numpy.zeros(array.size), numpy.zeros(array.size)
        with numpy.errstate(invalid="ignore"):
            for row in rows:
                new = total + row
                part = new - total
                rest = (total - (new - part)) + (row - part)
                error += numpy.where(numpy.isfinite(new), rest, 0)
                total = new
            return (total + error).reshape(array.shape)

    def all_gather(self, key, array, title=None, timeout=None):
        """The arrays of all processes, shape (size, n), for one of shape (n,) here: `all_reduce`
        says the rest. `title` names the sum in what is told to the user."""
        array = numpy.asarray(array)
        if array.dtype != numpy.float64 or array.ndim != 1:
            raise ValueError(
                f"all_gather got {array.dtype} of shape {array.shape}: give float64 of shape (n,)."
            )
        if self.size == 1:
            return array.reshape(1, -1).copy()
        if self._lost or os.getpid() != self._process:
            raise RuntimeError(self._lost or "This process was forked from one of the group's.")
        title, timeout = title or repr(key), seconds(timeout)
        self._timeouts.add(timeout)
        line = self._lines.get(key)
        if line is None:
            start = time.monotonic()
            line = self._meet_first(key, array.size, title, timeout)
            # One timeout for both; all have just come, so that little is left to wait for.
            timeout = max(timeout - (time.monotonic() - start), timeout * WARN_AFTER)
        if line.size != array.size:
            raise ValueError(
                f"{title} gives {array.size} numbers after {line.size} before: give every sum of "
                "another size a key of its own."
            )
        return line.exchange(title, timeout, array)

    def native_line(self, key):
        """The `native.Channel` of a key that has met."""
        return self._lines[key]

    def fail(self, text):
        """Tells the other processes, when they ask, that a step has failed in this one."""
        if self._roll_call is not None:
            self._roll_call.tell(FAILED, text)

    def _meet_first(self, key, size, title, timeout):
        with self._first_meetings.setdefault(key, threading.Lock()):
            if key not in self._lines:
                wait = _Wait(self, title, f"{title} ({key} 1)", timeout)
                with mx.autograd.pause(), wait:
                    self._lines[key] = self._open(key, size, wait)
            return self._lines[key]

    def _open(self, key, size, wait):
        """The `native.Channel` of a new key, when all processes know that it is used."""
        raise NotImplementedError

    def _look(self, title, meeting, error, waited, timeout, looks):
        """See `native.Connection`."""
        wait = _Wait(self, title, meeting, timeout, waited, warned=looks > 0)
        if error:
            wait.fail(error)
        wait.look()

    def _lose(self, text):
        self._lost = self._lost or text
        # Layers come here again, and are told.
        native.clear_channels()

    def _leave(self, failure):
        """At the end of the process: MXNet's own end waits for all processes, also for those that
        are gone or stopped, so it may begin only when all have come to theirs. `failure`: what the
        script died of."""
        if self._roll_call is None:
            return
        if failure is not None:
            self.fail(failure)
            shutdown.abandon()
        elif self._lost:
            # The script may have ended without a look at its last step.
            _log.error("%s", self._lost)
        else:
            timeout = max(self._timeouts)
            error = self._roll_call.wait_for_the_end(timeout) or self._say_goodbye(
                min(timeout, _PARTING_SECONDS)
            )
            if error:
                _log.error("%s", error)
                shutdown.abandon()
        self._lose("The process ends.")
        self._roll_call.close()

    def _say_goodbye(self, timeout):
        """Goes through what MXNet's own end needs, now that all have come to theirs. Returns what
        went wrong, or None."""


class _Wait:
    """One process's wait for the others in one exchange."""

    def __init__(self, reducer, title, meeting, timeout, waited=0.0, warned=False):
        self._reducer = reducer
        self._roll_call = reducer._roll_call
        self._title = title
        self._meeting = meeting
        self._timeout = timeout
        self._start = time.monotonic() - waited
        self._warned = warned

    def __enter__(self):
        if self._roll_call is not None:
            self._roll_call.came(self._meeting)
        return self

    def __exit__(self, kind, error, trace):
        if self._roll_call is not None:
            self._roll_call.left(self._meeting, complete=kind is None)

    def array(self, array):
        """Waits until MXNet has written the array. Raises RuntimeError when it is no use."""
        with native.watch(array) as watch:
            while not watch.wait(self.slice()):
                self.look()
        array.wait_to_read()

    def slice(self):
        """Seconds to wait before the next look()."""
        waited = time.monotonic() - self._start
        first = self._timeout * WARN_AFTER
        return max(0.01, first - waited) if waited < first else min(1.0, first)

    def look(self):
        """Finds out whether it is of any use to go on. Raises RuntimeError where it is not."""
        waited = time.monotonic() - self._start
        rank = self._reducer.rank
        story = f"{self._title}: rank {rank} has waited {waited:.3g} s for other processes. "
        if self._roll_call is None:
            if waited > self._timeout:
                self._give_up(story + _CAUSES)
            return
        answers = self._roll_call.ask(self._meeting, patience=min(2.0, self._timeout / 4))
        story += self._roll_call.describe(answers, str)
        if all(answer.state == CAME for answer in answers.values()):
            story += f" As all have come, {self._reducer.engine} does not answer."
        lost = [
            rank
            for rank, answer in answers.items()
            if answer.state == GONE or answer.notice and answer.state != CAME
        ]
        if lost or waited > self._timeout:
            self._give_up(f"{story} {_CAUSES}")
        if not self._warned:
            self._warned = True
            native.warn(f"{story} After {self._timeout:.3g} s this is an error. {_CAUSES}")

    def fail(self, error):
        """The store says itself that it cannot go on."""
        self._give_up(f"{self._title}: rank {self._reducer.rank} lost the other processes: {error}")

    def _give_up(self, text):
        # The store still waits, and whoever waits for the store at the end of the process would do
        # so for ever.
        self._reducer._lose(text)
        shutdown.abandon()
        raise RuntimeError(text)
