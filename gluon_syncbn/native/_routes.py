"""Routes to other processes, and waits for arrays that MXNet may never write."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from .. import durations
from .callbacks import callback, decoded, encoded, last_text
from .library import CLOSED, mxnet, numpy
from .library import library as _library

if TYPE_CHECKING:
    from mxnet.kvstore import KVStore
    from mxnet.nd import NDArray

# How many float32 numbers carry one float64.
THIRDS = 3
# Whole numbers of so many bits are added exactly: in float32 and in float64.
KVSTORE_BITS, HOROVOD_BITS = 24, 53
# What a wait returns: see mxnet/array_wait.h.
_WRITTEN, _TIME_IS_UP, _WAS_INTERRUPTED, _CLOSED = range(4)
# What functions return that Ctrl-C has ended: see `status_of` in api/declare.h.
INTERRUPTED = -2


class Key(NamedTuple):
    """Names what processes exchange: a layer's messages, or without a layer what `direction`
    says."""

    layer: int | None
    direction: str
    node: int | None = None
    group: int | None = None

    def __str__(self) -> str:  # As stores and other processes see it.
        text = " ".join(str(part) for part in self[:3] if part is not None)
        return f"{text} in groups of {self.group}" if self.group else text


class InFlight(NamedTuple):
    """An exchange: its title, for users; key, and number of the call with this key, which are equal
    in all processes; timeout, and when it began, or was completed, on the clock of
    time.monotonic()."""

    title: str
    key: str
    number: int
    timeout: float
    since: float

    @property
    def name(self) -> str:
        """Equal in all processes."""
        return f"{self.key} {self.number}"


class Connection:
    """What the routes through one store share, and which exchanges are in flight.

    all_reduce(key, array): the function of a user's store, which returns the sum of the processes'
    arrays.

    explained_within: seconds that an exchange which the store has failed waits to be closed with a
    text that says more.

    Within `with`, no other thread calls the store's functions.
    """

    def __init__(
        self,
        all_reduce: Callable[[str, numpy.ndarray], numpy.ndarray] | None = None,
        explained_within: float = 0.0,
    ) -> None:
        self.all_reduce = all_reduce
        self._id = next(_ids)
        _connections[self._id] = self
        self._handle = _library.gluon_syncbn_connect(explained_within)

    def __enter__(self) -> None:
        _library.gluon_syncbn_lock_calls(self._handle)

    def __exit__(self, *error: Any) -> None:
        _library.gluon_syncbn_unlock_calls(self._handle)

    def in_flight(self) -> tuple[list[InFlight], list[InFlight]]:
        """The exchanges in flight, and the last that completed: lists of `InFlight`,
        oldest first."""
        in_flight: list[InFlight] = []
        completed: list[InFlight] = []
        entries = _library.gluon_syncbn_in_flight(self._handle)
        while entries:
            head, _, entries = entries.partition(b"\n")
            is_open, number, timeout, since, *sizes = head.split()
            key, title = map(int, sizes)
            texts = decoded(entries[key : key + title]), decoded(entries[:key])
            entries = entries[key + title :]
            exchange = InFlight(*texts, int(number), float(timeout), float(since))
            (in_flight if is_open == b"1" else completed).append(exchange)
        return in_flight, completed

    def kvstore_route(
        self,
        key: str,
        size: int,
        rank: int,
        kvstore: KVStore,
        number: int,
        slots: NDArray,
        sums: tuple[int, NDArray] | None = None,
    ) -> Route:
        """A `Route` through MXNet's KVStore, where its key is `number`. slots: an array of shape
        (processes, `THIRDS`, size) that nothing else uses. sums: the number and the array, of
        `packed_size`, of a key that the store adds up."""
        sums_number, sums_array = sums or (0, None)
        handle = _library.gluon_syncbn_kvstore_route(
            self._handle,
            encoded(key),
            KVSTORE_BITS,
            pushpull=mxnet.base._LIB.MXKVStorePushPull,
            kvstore=kvstore.handle,
            number=number,
            rank=rank,
            ranks=len(slots),
            size=size,
            slots=slots.handle,
            thirds=_pointer(slots),
            sums_number=sums_number,
            sums_array=sums and sums_array.handle,
            packed=sums and _pointer(sums_array),
        )
        return Route(handle, len(slots), slots, sums)

    def horovod_route(
        self,
        key: str,
        size: int,
        processes: int,
        process_set: int,
        operations: Any,
        sums: bool = False,
    ) -> Route:
        """A `Route` through Horovod. process_set: the id of the process set. operations:
        ``hvd.mpi_ops``. sums: whether Horovod is to add up what the processes send."""
        functions = operations.MPI_MXNET_LIB_CTYPES
        mine = mxnet.nd.empty((1 + size,), dtype=numpy.float64)
        everyone = mxnet.nd.empty((processes * (1 + size),), dtype=numpy.float64)
        everyone.wait_to_read()
        count = packed_size(size, processes, HOROVOD_BITS) if sums else 0
        packed, added = (mxnet.nd.zeros((count or 1,), dtype=numpy.float64) for _ in range(2))
        handle = _library.gluon_syncbn_horovod_route(
            self._handle,
            encoded(key),
            HOROVOD_BITS,
            allgather=functions["horovod_mxnet_allgather_async"],
            process_set=process_set,
            ranks=processes,
            size=size,
            input=mine.handle,
            values=_pointer(mine),
            output=everyone.handle,
            adds=bool(count),
            allreduce=functions["horovod_mxnet_allreduce_async"],
            operation=operations.Sum,
            sums_input=packed.handle,
            sums_output=added.handle,
            packed=_pointer(packed),
            added=_pointer(added),
        )
        return Route(handle, processes, mine, everyone, packed, added)

    def shared_memory_route(
        self, key: str, size: int, rank: int, processes: int, segment: Segment, sums: bool = False
    ) -> Route:
        """A `Route` between processes of this machine, through the `Segment` of the first. sums:
        whether a layer's messages are to be added up."""
        handle = _library.gluon_syncbn_shared_memory_route(
            self._handle, encoded(key), segment.handle, rank, processes, size, sums
        )
        return Route(_checked(handle), processes)

    def function_route(
        self, key: str, size: int, rank: int, processes: int, exact_bits: int
    ) -> Route:
        """A `Route` through `all_reduce`. exact_bits: it adds whole numbers below
        ``2**exact_bits`` exactly; 0 if it may not."""
        handle = _library.gluon_syncbn_function_route(
            self._handle, encoded(key), exact_bits, self._id, rank, processes, size
        )
        return Route(handle, processes)


class Segment:
    """Memory that processes of one machine share: see processes/shared_memory.h.

    file: another process's descriptor, ``/proc/PID/fd/NUMBER``. By default a new segment is made,
    which has a `descriptor` until `close`. token: 16 characters, equal for all. Raises RuntimeError
    if the memory cannot be had. It is kept until the process ends.
    """

    def __init__(self, token: str, file: str | None = None) -> None:
        path = file and encoded(file)
        self.handle = _checked(_library.gluon_syncbn_segment(path, encoded(token)))
        self.descriptor = _library.gluon_syncbn_descriptor(self.handle)

    def close(self) -> None:
        """From now on nobody can open it."""
        _library.gluon_syncbn_close_descriptor(self.handle)


class Route:
    """A key under which all processes repeatedly exchange the same number of values: see
    processes/route.h."""

    def __init__(self, handle: int, processes: int, *arrays: Any) -> None:
        self.handle, self._processes = handle, processes
        # Kept alive, as the library uses them.
        self._arrays = arrays

    @property
    def calls(self) -> int:
        """The number of exchanges so far."""
        return _library.gluon_syncbn_route_calls(self.handle)

    def close(self, why: str) -> None:
        """Makes exchanges that begin from now on raise this text, after their title."""
        _library.gluon_syncbn_close_route(self.handle, encoded(why))

    def exchange(self, title: str, timeout: float, mine: numpy.ndarray) -> numpy.ndarray:
        """The values of all processes, shape (processes, size), or their sums, shape (1, size).
        Raises RuntimeError, or KeyboardInterrupt if Ctrl-C has ended it."""
        mine = numpy.ascontiguousarray(mine, numpy.float64)
        everyone = numpy.empty((self._processes, mine.size))
        status = _library.gluon_syncbn_exchange(
            self.handle,
            encoded(title),
            timeout,
            mine.ctypes.data,
            mine.size,
            everyone.ctypes.data,
        )
        if status == INTERRUPTED:
            # Python has raised it in a function that C++ had called.
            _library.gluon_syncbn_abandon()
            raise KeyboardInterrupt
        if status < 0:
            raise RuntimeError(last_text())
        return everyone[:1] if status == 1 else everyone


@callback
def on_all_reduce(store: int, key: str, values: int, rows: int, size: int) -> None:
    """Adds numbers through a user's function. Runs on the waiting thread."""
    numbers = ctypes.cast(values, ctypes.POINTER(ctypes.c_double))
    array = numpy.ctypeslib.as_array(numbers, (size,))
    shape = (rows, size // rows) if rows > 1 else (size,)
    # A copy, as the function may keep what it gets.
    array[:] = _connections[store].all_reduce(key, array.reshape(shape).copy()).ravel()


def packed_size(size: int, processes: int, exact_bits: int) -> int:
    """How many numbers a store adds up for a message of `size` values; 0 if it cannot, as it adds
    only whole numbers below ``2**exact_bits`` exactly."""
    return _library.gluon_syncbn_packed_size(size, processes, exact_bits)


def _checked(handle: int) -> int:
    """Raises RuntimeError if the function that returned it has failed."""
    if not handle:
        raise RuntimeError(last_text())
    return handle


def wait_for(array: NDArray, check: Callable[[], None]) -> None:
    """Waits until MXNet, which may never do so, has written an NDArray. check() is called now and
    then, and raises if the wait is of no use."""
    wait = _library.gluon_syncbn_array_wait_begin(array.handle)
    if not wait:
        raise MemoryError("MXNet's engine takes no more operations.")
    try:
        while (waited := _library.gluon_syncbn_array_wait(wait, durations.SLICE)) == _TIME_IS_UP:
            check()
        if waited != _WRITTEN:
            _library.gluon_syncbn_abandon()
            raise RuntimeError("Interrupted." if waited == _WAS_INTERRUPTED else CLOSED)
    finally:
        _library.gluon_syncbn_array_wait_end(wait)
    array.wait_to_read()


def push_for_others(push: Callable[[], Any], inputs: Any, outputs: Any) -> Any:
    """Calls push(), by which a store pushes an operation to MXNet that waits for other processes.
    inputs, outputs : handles of arrays, or None: it is under way from when the one is written until
    the other is."""
    if not outputs:
        return push()
    _library.gluon_syncbn_count_operation(inputs, 0)
    try:
        return push()
    finally:
        _library.gluon_syncbn_count_operation(outputs, 1)


def store_operations() -> tuple[int, ...]:
    """How many of these operations have begun, and how many have ended."""
    return tuple(map(_library.gluon_syncbn_operations, range(2)))


def _pointer(array: NDArray) -> ctypes.c_void_p:
    """The memory of an NDArray on the CPU. MXNet does not notice when it is written."""
    array.wait_to_read()
    pointer = ctypes.c_void_p()
    mxnet.base.check_call(mxnet.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer


def restore_layout(array: NDArray) -> None:
    """Gives an NDArray on a CPU MXNet's usual layout in memory, if oneDNN gave it another."""
    _pointer(array)


def view(array: NDArray) -> numpy.ndarray:
    """NumPy's view of the memory of an NDArray."""
    kind = numpy.ctypeslib.as_ctypes_type(array.dtype)
    return numpy.ctypeslib.as_array(ctypes.cast(_pointer(array), ctypes.POINTER(kind)), array.shape)


_ids = itertools.count()
_connections: weakref.WeakValueDictionary[int, Connection] = weakref.WeakValueDictionary()
