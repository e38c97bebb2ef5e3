"""What the stores of :mod:`gluon_syncbn.distributed` have in common."""

from __future__ import annotations

import functools
import reprlib
from typing import Any, Callable

import mxnet as mx
import numpy

from .. import durations, native
from ..arguments import seconds
from ..groups.store import Store
from ..native import waits
from ..supervision import exit
from ..supervision.member import Member
from ..supervision.watcher import Watcher
from .shared_memory import SharedMemory

# Bytes of a user's key.
_LONGEST_KEY = 40


class Reducer(Store):
    """Exchanges and adds float64 arrays over all processes, with a time limit and an error that
    says which process is missing.

    rank, size : int
        This process's rank, and the number of processes.
    """

    # How messages name the store.
    name = "the store"

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        # {text of a key: what `Member` asks about its exchanges}
        self._about: dict[str, tuple[int, int, bool]] = {}
        # {user's key: how many numbers}
        self._sizes: dict[str, int] = {}
        self._memory: SharedMemory | None = None
        self._connection = native.Connection(explained_within=durations.EXPLAINED)
        # What follows may have shorter limits than a slow start.
        limit = min(timeout, seconds(None))
        self.member = Member(limit, self._connection.in_flight, self._about.__getitem__)
        self.watcher = Watcher(rank, size, self.name, self.member, self._close_routes)

    def _meet(self, timeout: float) -> None:
        """Makes the processes known to each other, as the last step of making a store."""
        if self.size > 1:
            self._exchange_addresses(SharedMemory(self.rank), timeout)
        exit.at_exit(self._leave)

    def _exchange_addresses(self, memory: SharedMemory, timeout: float) -> None:
        mine = numpy.frombuffer(self.watcher.address + memory.address, numpy.uint8)
        key = native.Key(None, "startup handshake")
        everyone = self.exchange(key, mine.astype(numpy.float64), timeout=timeout)
        rows, own = everyone.astype(numpy.uint8), len(self.watcher.address)
        opened = numpy.array([memory.open([row[own:].tobytes() for row in rows])], numpy.float64)
        self.watcher.meet(rows[0, :own].tobytes())
        key = native.Key(None, "shared memory")
        memory.agree(self.exchange(key, opened, timeout=timeout).ravel())
        self._memory = memory

    def all_reduce(self, key: str, array: Any, timeout: float | None = None) -> numpy.ndarray:
        """The sum of `array` over all processes.

        Adds in rank order with an error term for every sum (Ogita, Rump and Oishi 2005, Sum2), so
        the result is as accurate as in twice the precision.

        Parameters
        ----------
        key : str
            Names the sum: the same in all processes, and always for arrays of one shape. A call
            waits for an earlier one of the same key on another thread. At most 40 bytes, all of
            them printable.
        array : numpy.ndarray, NDArray, number, or list of these
            Of one shape in all processes, and of numbers that float64 holds exactly. Infinities and
            NaN are summed too. It may be empty; then the call only waits for all.
        timeout : float, optional
            Seconds, for this call. By default the environment variable ``GLUON_SYNCBN_TIMEOUT``, or
            else 300.

        Returns
        -------
        numpy.ndarray
            float64, of the same shape: ``()`` for a number.

        Raises
        ------
        ValueError
            For another key or array.
        RuntimeError
            If the processes bring different amounts of numbers, or one does not arrive: at once if
            it has ended or failed, otherwise after `timeout`.
        """
        rows = self._gather("all_reduce", key, array, None, timeout)
        total, error = numpy.zeros(rows.shape[1:]), numpy.zeros(rows.shape[1:])
        with numpy.errstate(invalid="ignore", over="ignore"):
            for row in rows:
                new = total + row
                part = new - total
                rest = (total - (new - part)) + (row - part)
                error += numpy.where(numpy.isfinite(new), rest, 0)
                total = new
            return numpy.asarray(total + error)

    def all_gather(
        self, key: str, array: Any, title: str | None = None, timeout: float | None = None
    ) -> numpy.ndarray:
        """The arrays of all processes, float64 of shape (size, ...), given one of shape (...): see
        `all_reduce`. `title` names the exchange in messages."""
        return self._gather("all_gather", key, array, title, timeout)

    def _gather(
        self, function: str, key: str, array: Any, title: str | None, timeout: float | None
    ) -> numpy.ndarray:
        # What is not printable includes what a store would cut off or could not encode.
        if not (isinstance(key, str) and key.isprintable() and len(key.encode()) <= _LONGEST_KEY):
            raise ValueError(
                f"{function} got the key {key!r}: give a str of printable characters, at most "
                f"{_LONGEST_KEY} bytes of UTF-8."
            )
        array = _float64(function, array)
        size = self._sizes.get(key, array.size)
        if size != array.size:
            raise ValueError(
                f"{function} got {array.size} numbers for the key {key!r}, after {size} before: "
                "give arrays of another size a key of their own."
            )
        # Quoted, so that no user's key equals a layer's.
        quoted = native.Key(None, f'"{key}"')
        everyone = self.exchange(quoted, array.reshape(-1), title or repr(key), timeout)
        self._sizes[key] = size
        return everyone.reshape(self.size, *array.shape)

    def exchange(
        self,
        key: native.Key,
        array: numpy.ndarray,
        title: str | None = None,
        timeout: float | None = None,
    ) -> numpy.ndarray:
        timeout = seconds(timeout)
        if self.size == 1:
            return array.reshape(1, -1).copy()
        with self.member.waits(timeout):
            try:
                return super().exchange(key, array, title or str(key), timeout)
            except RuntimeError:
                waits.note_failure()
                raise

    def route(
        self,
        key: native.Key,
        size: int,
        title: str,
        timeout: float,
        ranks: range | None = None,
        sums: bool = False,
    ) -> native.Route:
        self.member.check(title)
        if key.layer is not None:
            self.member.note_timeout(timeout)
        route = super().route(key, size, title, timeout, ranks, sums)
        if self.member.lost:  # Meanwhile.
            route.close(self.member.lost)
        return route

    def split(self, size: int) -> bool:
        groups = (range(first, first + size) for first in range(0, self.size, size))
        return all(map(self._memory.joins, groups)) or self._split(size)

    def _split(self, size: int) -> bool:
        """`split` through the store."""
        return False

    def fail(self, text: str) -> None:
        self.watcher.fail(text)

    def _open(
        self,
        key: native.Key,
        size: int,
        title: str,
        timeout: float,
        ranks: range | None,
        sums: bool,
    ) -> native.Route:
        text, ranks = str(key), ranks or range(self.size)
        in_memory = self._memory is not None and self._memory.joins(ranks)
        self._about[text] = ranks.start, ranks.stop, in_memory
        if in_memory:
            return self._memory.route(self._connection, text, size, ranks, sums)
        with self.member.arrives(title, text, timeout), mx.autograd.pause():
            check = functools.partial(self.member.check, title)
            return self._open_through_store(text, size, len(ranks), check, sums)

    def _open_through_store(
        self, key: str, size: int, processes: int, check: Callable[[], None], sums: bool
    ) -> native.Route:
        """The route of a new key, once all processes know that it is used. processes: how many
        exchange it. check() raises if the wait for them is of no use."""
        raise NotImplementedError

    def _close_routes(self, text: str) -> None:
        for route in list(self.routes.values()):
            route.close(text)

    def _leave(self, failure: str | None) -> None:
        self.watcher.leave(failure, self._shut_down)

    def _shut_down(self, timeout: float) -> None:
        """Does what MXNet's own shutdown needs, once all scripts have finished. Raises
        RuntimeError."""


def _float64(function: str, given: Any) -> numpy.ndarray:
    """The numbers of an array or list. Raises ValueError where float64 would lose something."""
    if isinstance(given, (list, tuple)):
        parts = [_float64(function, part) for part in given]
        shapes = list(dict.fromkeys(part.shape for part in parts))
        if len(shapes) > 1 and all(part.size == 1 for part in parts):
            # MXNet's scalars have the shape (1,).
            return numpy.array([part.item() for part in parts])
        if len(shapes) > 1:
            raise ValueError(
                f"{function} got a list of arrays of shapes {', '.join(map(str, shapes))}: give "
                "each a key of its own."
            )
        return numpy.array(parts, numpy.float64)
    if isinstance(given, mx.nd.NDArray):
        # NumPy has no bfloat16.
        is_known = numpy.dtype(given.dtype).kind != "V"
        given = (given if is_known else given.astype("float32")).asnumpy()
    array = numpy.asarray(given)
    if array.dtype.kind in "biuf":
        with numpy.errstate(over="ignore"):
            numbers = array.astype(numpy.float64)
        lost = array[(numbers != array) & (array == array)].tolist()
        if array.dtype.kind in "iu":  # Which NumPy compares as float64.
            lost = [n for n in array[abs(numbers) >= 2**53].tolist() if int(float(n)) != n]
        if not lost:
            return numbers
        given = lost[0]
    raise ValueError(
        f"{function} got {reprlib.repr(given)}: give numbers that float64 holds exactly, such as "
        "integers up to 2**53, as an array of NumPy or MXNet, a number, or a list of these. For a "
        "metric, give [metric.sum_metric, metric.num_inst]."
    )
