"""What the stores of :mod:`gluon_syncbn.distributed` have in common."""

import contextlib
import faulthandler
import logging
import os
import threading
import time

import mxnet as mx
import numpy
from mxnet_launch.patience import Patience
from mxnet_launch.runner import SHUTDOWN_SECONDS, beat

from .. import native
from ..native import shutdown
from .answers import ARRIVED, FAILED, GONE, describe_others
from .arguments import WARN_AFTER, duration, seconds
from .liveness import Liveness
from .shared_memory import SharedMemory
from .watch import Watch

_log = logging.getLogger("gluon_syncbn")

# How long the shutdown handshake may take once all processes have reached their end.
_SHUTDOWN_SECONDS = 30.0
# How long a process that ends because of an error takes to tell the others.
_TELL_SECONDS = 0.5
# Bytes of a user's key.
_LONGEST_KEY = 40
_CAUSES = (
    "Usual causes: a process has ended, hangs or is much slower; it called the net less often (an "
    "uneven number of batches: see gluon_syncbn.distributed.join), it built another net, or "
    "hybridized it at another step, which matters where a net calls one layer several times."
)


class Reducer:
    """Exchanges and adds float64 arrays over all processes, with a time limit and an error that
    says which process is missing.

    rank, size : int
        This process's rank, and the number of processes.
    """

    # How messages name the store, and the Trainer that adds gradients over all processes.
    name, trainer = "the store", None
    # Why no exchange can succeed any more.
    lost = None

    def __init__(self, rank, size, timeout):
        self.rank, self.size = rank, size
        self._process = os.getpid()
        # {key: channel}, from a key's first exchange on.
        self.channels = {}
        # {text of a key: the ranks that exchange it}, for keys that not all do.
        self._ranks = {}
        self._opening = {}
        # All timeouts asked for. The end of the process takes the longest.
        self._timeouts = {timeout}
        # How many of Python's waits for MXNet had failed before `lost`.
        self._failed_before = 0
        self._liveness = self._memory = None
        beat("makes its store", again=False)
        if size > 1:
            liveness = Liveness(rank, size, in_flight=self._connection.in_flight, watch=Watch(self))
            try:
                self._exchange_addresses(liveness, SharedMemory(rank), timeout)
            except BaseException:
                liveness.close()
                raise
        shutdown.at_exit(self._leave)

    def _exchange_addresses(self, liveness, memory, timeout):
        mine = numpy.frombuffer(liveness.address + memory.address, numpy.uint8)
        key = native.Key(None, "startup handshake")
        everyone = self.exchange(key, mine.astype(numpy.float64), timeout=timeout)
        rows, own = everyone.astype(numpy.uint8), len(liveness.address)
        liveness.set_addresses([row[:own].tobytes() for row in rows])
        opened = numpy.array([memory.open([row[own:].tobytes() for row in rows])], numpy.float64)
        key = native.Key(None, "shared memory")
        memory.agree(self.exchange(key, opened, timeout=timeout).ravel())
        self._memory, self._liveness = memory, liveness

    def all_reduce(self, key, array, timeout=None):
        """The sum of `array` over all processes.

        Adds in rank order with an error term for every sum (Ogita, Rump and Oishi 2005, Sum2), so
        the result is as accurate as in twice the precision.

        Parameters
        ----------
        key : str
            Names the sum: the same in all processes, and always for arrays of one shape. A call
            waits for an earlier one of the same key on another thread. At most 40 bytes, all of
            them printable.
        array : numpy.ndarray
            float64, of one shape in all processes. Any value: infinities and NaN are summed too.
            It may be empty; then the call only waits for all.
        timeout : float, optional
            Seconds. By default the environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.

        Raises
        ------
        ValueError
            For another key or array.
        RuntimeError
            If the processes bring different amounts of numbers, or one does not arrive: at once if
            it has ended or failed, otherwise after `timeout`.
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
        """The arrays of all processes, shape (size, n), given one of shape (n,): see `all_reduce`.
        `title` names the exchange in messages."""
        # What is not printable includes what a store would cut off or could not encode.
        if not (isinstance(key, str) and key.isprintable() and len(key.encode()) <= _LONGEST_KEY):
            raise ValueError(
                f"The key is {key!r}: give a str of printable characters, at most {_LONGEST_KEY} "
                "bytes of UTF-8."
            )
        array = numpy.asarray(array)
        if array.dtype != numpy.float64 or array.ndim != 1:
            raise ValueError(
                f"all_gather got {array.dtype} of shape {array.shape}: give float64 of shape (n,)."
            )
        # Quoted, so that no user's key equals a layer's.
        return self.exchange(native.Key(None, f'"{key}"'), array, title or repr(key), timeout)

    def exchange(self, key, array, title=None, timeout=None, ranks=None, sums=False):
        """`all_gather` for a layer. ranks: those that take part, see `split`. sums: the array is a
        layer's message, so its sums, shape (1, n), suffice if the store can add them."""
        if self.size == 1:
            return array.reshape(1, -1).copy()
        if self.lost or os.getpid() != self._process:
            raise RuntimeError(self.lost or "This process was forked from one of the group's.")
        title, timeout = title or str(key), seconds(timeout)
        self._timeouts.add(timeout)
        channel = self.channels.get(key)
        if channel is None:
            start = time.monotonic()
            channel = self._first_exchange(key, array.size, title, timeout, ranks, sums)
            # One timeout covers both. All have just arrived, so the rest takes little time.
            timeout = max(timeout - (time.monotonic() - start), timeout * WARN_AFTER)
        if channel.size != array.size:
            raise ValueError(
                f"{title} gives {array.size} numbers after {channel.size} before: give every sum "
                "of another size a key of its own."
            )
        return channel.exchange(title, timeout, array)

    def split(self, size):
        """Whether groups of `size` processes can exchange among themselves, from here on. All
        processes call it."""
        groups = (range(first, first + size) for first in range(0, self.size, size))
        return all(map(self._memory.joins, groups)) or self._split(size)

    def _split(self, size):
        """`split` through the store."""
        return False

    @property
    def longest_timeout(self):
        return max(self._timeouts)

    @property
    def has_raised(self):
        """Whether an error has come out of one of Python's waits for MXNet since `lost`."""
        return native.waits.failed > self._failed_before

    def exchanges_in_flight(self):
        return self._liveness is None or bool(self._liveness.exchanges()[0])

    def probe_all(self, patience):
        """What the other processes do, as {rank: Answer}."""
        return self._liveness.probe("", patience)

    def fail(self, text):
        """Reports to the other processes, when they probe, that a step has failed in this one."""
        if self._liveness is not None:
            self._liveness.set_status(FAILED, text)

    def tell_failure(self, text):
        """`fail` for a process that ends: the others know it even once this one is gone."""
        self.fail(text)
        self.probe_all(_TELL_SECONDS)

    def _first_exchange(self, key, size, title, timeout, ranks, sums):
        with self._opening.setdefault(key, threading.Lock()):
            if key not in self.channels:
                if ranks is not None:
                    self._ranks[str(key)] = ranks
                members = self._members(key)
                if self._memory and self._memory.joins(members):
                    self.channels[key] = self._memory.channel(
                        self._connection, str(key), size, members, sums
                    )
                    return self.channels[key]
                exchange = f"{title} ({key} 1)"
                if self._liveness is not None:
                    self._liveness.arrive(exchange)
                try:
                    with mx.autograd.pause():
                        wait = _Wait(self._probe, title, exchange, timeout)
                        self.channels[key] = self._open(str(key), size, wait, sums)
                finally:
                    if self._liveness is not None:
                        self._liveness.leave(exchange, complete=key in self.channels)
            return self.channels[key]

    def _members(self, key):
        return self._ranks.get(str(key), range(self.size))

    def _open(self, key, size, wait, sums):
        """The native channel of a new key, once all processes know that it is used. sums: see
        `exchange`."""
        raise NotImplementedError

    def _probe(self, title, exchange, error, waited, timeout, probes):
        """Raises RuntimeError if waiting is of no use: see `native.Connection`."""
        message = f"{title}: rank {self.rank} "
        if error:
            others = describe_others(self.probe_all(1.0)) if self._liveness is not None else ""
            self._give_up(f"{message}lost the other processes: {error} {others}")
        message += f"has waited {duration(waited)} for other processes. "
        lost = waited > timeout
        if self._liveness is not None:
            # The name of an exchange is "title (key number)".
            some = [r for key, r in self._ranks.items() if exchange.startswith(f"{title} ({key} ")]
            members = some[0] if some else range(self.size)
            patience = min(2.0, timeout / 4, max(timeout - waited, 0.1))
            answers = self._liveness.probe(exchange, patience, members)
            message += f"{self._liveness.describe(answers)} "
            if all(answer.state == ARRIVED for answer in answers.values()):
                # They may have come just now, as after a suspension of all.
                lost = waited > timeout * (1 + WARN_AFTER)
                if not self._memory.joins(members):
                    message += f"As all have come, {self.name} does not answer. "
            lost = lost or any(
                answer.state == GONE or answer.status and answer.state != ARRIVED
                for answer in answers.values()
            )
        if lost:
            self._give_up(f"{message}{_CAUSES}")
        if probes == 0:
            native.warn(f"{message}After {duration(timeout)} this is an error. {_CAUSES}")

    def _give_up(self, text):
        # The store still waits, so a process that waited for it at exit would never end.
        self._lose(text)
        shutdown.abandon()
        raise RuntimeError(text)

    def _lose(self, text):
        if not self.lost:
            self._failed_before = native.waits.failed
            self.lost = text
        # Layers then call `exchange` again, and get the error.
        native.clear_channels()

    def _leave(self, failure):
        """Runs at exit. MXNet's own shutdown waits for all processes, even for those that are gone
        or stopped, so it may begin only once all have reached their end. failure: what the script
        died of."""
        if self._liveness is None:
            return
        if failure is not None:
            self.tell_failure(failure)
            shutdown.abandon()
        elif self.lost:
            self.tell_failure(self.lost)
            # The script may have ended without waiting for its last step.
            _log.error("%s", self.lost)
        else:
            timeout = self.longest_timeout
            try:
                self._liveness.wait_for_the_end(timeout)
                self._shutdown_handshake(min(timeout, _SHUTDOWN_SECONDS))
            except RuntimeError as error:
                _log.error("%s", error)
                shutdown.abandon()
        self._lose("The process ends.")
        self._liveness.close()
        beat("ends", again=False)
        # MXNet's own shutdown waits for the other processes too, when no Python thread runs any
        # more. (This limit needs a file for standard error.)
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
            limit = max(self.longest_timeout, SHUTDOWN_SECONDS)
            faulthandler.dump_traceback_later(limit, exit=True)

    def _shutdown_handshake(self, timeout):
        """Does what MXNet's own shutdown needs, once all processes have reached their end. Raises
        RuntimeError."""


class _Wait:
    """A wait for the other processes in Python, in the first exchange of a key."""

    def __init__(self, probe, title, exchange, timeout):
        self._probe, self._title, self._exchange = probe, title, exchange
        self._timeout, self._first = timeout, timeout * WARN_AFTER
        self._patience = Patience(timeout)
        self._probes = 0

    def array(self, array):
        """Waits until MXNet has written the array. Raises RuntimeError if waiting is of no use."""
        with native.watch(array) as watch:
            while not watch.wait(self.slice()):
                self.probe()
        array.wait_to_read()

    def slice(self):
        """Seconds to wait before the next probe()."""
        waited = self._patience.waited()
        left = (self._first if waited < self._first else self._timeout) - waited
        return max(0.01, min(1.0, self._first, left if left > 0 else 1.0))

    def probe(self):
        waited = self._patience.waited()
        if waited > self._first:
            self._probe(self._title, self._exchange, "", waited, self._timeout, self._probes)
            self._probes += 1
