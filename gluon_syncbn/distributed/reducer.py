"""What the stores of :mod:`gluon_syncbn.distributed` have in common."""

import functools

import mxnet as mx
import numpy

from .. import native
from ..arguments import seconds
from ..groups.store import Store
from ..native import shutdown
from .shared_memory import SharedMemory
from .watcher import Watcher

# Bytes of a user's key.
_LONGEST_KEY = 40


class Reducer(Store):
    """Exchanges and adds float64 arrays over all processes, with a time limit and an error that
    says which process is missing.

    rank, size : int
        This process's rank, and the number of processes.
    """

    # How messages name the store, and the Trainer that adds gradients over all processes.
    name, trainer = "the store", None

    def __init__(self, rank, size, timeout):
        super().__init__(rank, size)
        # {text of a key: the ranks that exchange it}, for keys that not all do.
        self._ranks = {}
        self._memory = None
        # A store fails if another process is gone, which the judge soon says.
        self._connection = native.Connection(explained_within=2.0)
        functions = self._connection.in_flight, self._members_of, self._close_routes
        self.watcher = Watcher(rank, size, self.name, timeout, *functions)

    def _meet(self, timeout):
        """Makes the processes known to each other, as the last step of making a store."""
        if self.size > 1:
            self._exchange_addresses(SharedMemory(self.rank), timeout)
        shutdown.at_exit(self._leave)

    def _exchange_addresses(self, memory, timeout):
        mine = numpy.frombuffer(self.watcher.address + memory.address, numpy.uint8)
        key = native.Key(None, "startup handshake")
        everyone = self.exchange(key, mine.astype(numpy.float64), timeout=timeout)
        rows, own = everyone.astype(numpy.uint8), len(self.watcher.address)
        opened = numpy.array([memory.open([row[own:].tobytes() for row in rows])], numpy.float64)
        self.watcher.meet(rows[0, :own].tobytes())
        key = native.Key(None, "shared memory")
        memory.agree(self.exchange(key, opened, timeout=timeout).ravel())
        self._memory = memory

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

    def exchange(self, key, array, title=None, timeout=None):
        if self.size == 1:
            return array.reshape(1, -1).copy()
        return super().exchange(key, array, title or str(key), seconds(timeout))

    def route(self, key, size, title, timeout, ranks=None, sums=False):
        self.watcher.check(title)
        self.watcher.note_timeout(timeout)
        route = super().route(key, size, title, timeout, ranks, sums)
        if self.watcher.lost:  # Meanwhile.
            route.close(self.watcher.lost)
        return route

    def split(self, size):
        groups = (range(first, first + size) for first in range(0, self.size, size))
        return all(map(self._memory.joins, groups)) or self._split(size)

    def _split(self, size):
        """`split` through the store."""
        return False

    def fail(self, text):
        self.watcher.fail(text)

    def _open(self, key, size, title, timeout, ranks, sums):
        if ranks is not None:
            self._ranks[str(key)] = ranks
        members = self._members(str(key))
        if self._joins(members):
            return self._memory.route(self._connection, str(key), size, members, sums)
        name = f"{title} ({key} 1)"
        with self.watcher.arrives(name, str(key), timeout), mx.autograd.pause():
            check = functools.partial(self.watcher.check, title)
            return self._open_through_store(str(key), size, check, sums)

    def _open_through_store(self, key, size, check, sums):
        """The route of a new key, once all processes know that it is used. check() raises if the
        wait for them is of no use."""
        raise NotImplementedError

    def _members(self, key):
        return self._ranks.get(key, range(self.size))

    def _joins(self, members):
        """Whether these processes meet in shared memory, not through the store."""
        return self._memory is not None and self._memory.joins(members)

    def _members_of(self, key):
        """The range of ranks that exchange it, and whether they meet in shared memory."""
        members = self._members(key)
        return members.start, members.stop, self._joins(members)

    def _close_routes(self, text):
        for route in list(self.routes.values()):
            route.close(text)

    def _leave(self, failure):
        self.watcher.leave(failure, self._shut_down)

    def _shut_down(self, timeout):
        """Does what MXNet's own shutdown needs, once all scripts have finished. Raises
        RuntimeError."""
