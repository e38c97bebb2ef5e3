"""Channels to other processes, and waits for arrays that MXNet may never write."""

import ctypes
import itertools
import threading
import weakref
from collections import namedtuple

from mxnet_launch.patience import Patience

from . import shutdown, threads
from .library import (
    IN_FLIGHT,
    PROBE,
    HorovodArrays,
    HorovodSums,
    KVStoreSlots,
    KVStoreSums,
    mxnet,
    numpy,
)
from .library import library as _library

# How many float32 numbers carry one float64.
LIMBS = 3
# Whole numbers of so many bits are added exactly: in float32 and in float64.
KVSTORE_BITS, HOROVOD_BITS = 24, 53
# What a wait returns: see mxnet/watch.h.
_WRITTEN, _TIME_IS_UP, _INTERRUPTED, _CLOSED = range(4)
_MAX_ERROR_SIZE = 1 << 13


class Key(namedtuple("Key", "layer direction node group", defaults=(None, None))):
    """Names what processes exchange: a layer's messages, or without a layer what `direction`
    says."""

    def __str__(self):  # As stores and other processes see it.
        text = " ".join(str(part) for part in self[:3] if part is not None)
        return f"{text} in groups of {self.group}" if self.group else text


def write_error(failure, error, error_size):
    """Hands an exception to the native caller."""
    text = (str(failure) or type(failure).__name__).encode()[: error_size - 1]
    ctypes.memmove(error, text, len(text))


@PROBE
def _on_probe(connection, delay, error, error_size):
    """Finds out whether to go on with a slow exchange. Runs on the waiting thread."""
    try:
        delay = delay.contents
        _raise_if_released(delay.waited)
        _connections[connection].probe()(
            delay.title.decode(),
            delay.exchange.decode(),
            delay.error.decode(),
            delay.seconds,
            delay.timeout,
            delay.probes,
        )
        return 0
    except BaseException as failure:  # The native caller cannot pass exceptions on.
        write_error(failure, error, error_size)
        return 1


def _raise_if_released(waited):
    if waited in (_INTERRUPTED, _CLOSED):
        shutdown.abandon()
        raise RuntimeError("Interrupted." if waited == _INTERRUPTED else shutdown.CLOSED)


class Connection:
    """What the channels through one store share, and which exchanges are in flight.

    probe(title, exchange, error, seconds, timeout, probes): called on a waiting thread, after a
    tenth of the timeout and then every second. Raises the cause if waiting is of no use. `error`:
    what the store itself says, or "". `probes`: the number of earlier calls for this wait.

    Within `with`, no other thread calls the store's functions.
    """

    def __init__(self, probe):
        # A weak reference, as a KVStore must be gone before Python is.
        self.probe = weakref.WeakMethod(probe)
        connection = next(_ids)
        _connections[connection] = self
        self._handle = _library.gluon_syncbn_connect(connection, _on_probe)

    def __enter__(self):
        _library.gluon_syncbn_lock_calls(self._handle)

    def __exit__(self, *error):
        _library.gluon_syncbn_unlock_calls(self._handle)

    def in_flight(self):
        """The exchanges in flight, and the last that completed, each as (name, monotonic time),
        oldest first."""
        exchanges = [], []

        @IN_FLIGHT
        def report(exchange, since, is_open):
            exchanges[0 if is_open else 1].append((exchange.decode(), since))

        _library.gluon_syncbn_in_flight(self._handle, report)
        return exchanges

    def kvstore_channel(self, key, size, rank, kvstore, number, slots, sums=None):
        """A `Channel` through MXNet's KVStore, where its key is `number`. slots: an array of shape
        (processes, `LIMBS`, size) that nothing else uses. sums: the number and the array, of
        `packed_size`, of a key that the store adds up."""
        arguments = KVStoreSlots(
            pushpull=_address(mxnet.base._LIB.MXKVStorePushPull),
            kvstore=kvstore.handle,
            key=number,
            rank=rank,
            ranks=len(slots),
            size=size,
            slots=slots.handle,
            limbs=_pointer(slots),
        )
        sums_arguments = None
        if sums is not None:
            number, array = sums
            sums_arguments = KVStoreSums(number, array.handle, _pointer(array))
        handle = _library.gluon_syncbn_kvstore_channel(
            self._handle, key.encode(), KVSTORE_BITS, arguments, sums_arguments
        )
        return Channel(handle, size, len(slots), slots, sums)

    def horovod_channel(self, key, size, processes, process_set, operations, sums=False):
        """A `Channel` through Horovod. process_set: the id of the process set. operations:
        ``hvd.mpi_ops``. sums: whether Horovod is to add up what the processes send."""
        functions = operations.MPI_MXNET_LIB_CTYPES
        mine = mxnet.nd.empty((1 + size,), dtype=numpy.float64)
        everyone = mxnet.nd.empty((processes * (1 + size),), dtype=numpy.float64)
        everyone.wait_to_read()
        arrays = [mine, everyone]
        arguments = HorovodArrays(
            allgather=_address(functions.horovod_mxnet_allgather_async),
            process_set=process_set,
            ranks=processes,
            size=size,
            input=mine.handle,
            values=_pointer(mine),
            output=everyone.handle,
        )
        sums_arguments = None
        count = packed_size(size, processes, HOROVOD_BITS) if sums else 0
        if count:
            packed, added = (mxnet.nd.zeros((count,), dtype=numpy.float64) for _ in range(2))
            arrays += [packed, added]
            sums_arguments = HorovodSums(
                allreduce=_address(functions.horovod_mxnet_allreduce_async),
                operation=operations.Sum,
                input=packed.handle,
                output=added.handle,
                packed=_pointer(packed),
                sums=_pointer(added),
            )
        handle = _library.gluon_syncbn_horovod_channel(
            self._handle, key.encode(), HOROVOD_BITS, arguments, sums_arguments
        )
        return Channel(handle, size, processes, *arrays)

    def shared_memory_channel(self, key, size, rank, processes, segment, sums=False):
        """A `Channel` between processes of this machine, through the `Segment` of the first. sums:
        whether a layer's messages are to be added up."""
        handle = _or_error(
            _library.gluon_syncbn_shared_memory_channel,
            *(self._handle, key.encode(), segment.handle, rank, processes, size, sums),
        )
        return Channel(handle, size, processes)


class Segment:
    """Memory that processes of one machine share: see exchange/shared_memory.h.

    file: another process's descriptor, ``/proc/PID/fd/NUMBER``. By default a new segment is made,
    which has a `descriptor` until `close`. token: 16 characters, equal for all. Raises RuntimeError
    if the memory cannot be had. It is kept until the process ends.
    """

    def __init__(self, token, file=None):
        descriptor = ctypes.c_int()
        file = file and file.encode()
        self.handle = _or_error(
            _library.gluon_syncbn_segment, file, token.encode(), ctypes.byref(descriptor)
        )
        self.descriptor = descriptor.value

    def close(self):
        """From now on nobody can open it."""
        _library.gluon_syncbn_close_descriptor(self.handle)


class Channel:
    """A key under which all processes repeatedly exchange the same number of values."""

    def __init__(self, handle, size, processes, *arrays):
        self.handle, self.size, self._processes = handle, size, processes
        # Kept alive, as the library uses them.
        self._arrays = arrays

    @property
    def calls(self):
        """The number of exchanges so far."""
        return _library.gluon_syncbn_channel_calls(self.handle)

    def restart(self):
        """Makes the next exchange one of values, like the first. All processes must call it."""
        _library.gluon_syncbn_channel_restart(self.handle)

    def exchange(self, title, timeout, mine):
        """The values of all processes, shape (processes, size), or their sums, shape (1, size).
        Raises RuntimeError."""
        mine = numpy.ascontiguousarray(mine)
        everyone = numpy.empty((self._processes, self.size))
        error = ctypes.create_string_buffer(_MAX_ERROR_SIZE)
        status = _library.gluon_syncbn_channel_exchange(
            self.handle,
            title.encode(),
            timeout,
            mine.ctypes.data,
            everyone.ctypes.data,
            error,
            _MAX_ERROR_SIZE,
        )
        if status < 0:
            raise RuntimeError(error.value.decode(errors="replace"))
        return everyone[:1] if status == 1 else everyone


def packed_size(size, processes, exact_bits):
    """How many numbers a store adds up for a message of `size` values; 0 if it cannot, as it adds
    only whole numbers below ``2**exact_bits`` exactly."""
    return _library.gluon_syncbn_packed_size(size, processes, exact_bits)


class FixedPoint:
    """Sums of messages in whole numbers that a store adds exactly: see exchange/fixed_point.h. All
    processes call the functions in the same order."""

    def __init__(self, size, processes, exact_bits):
        self._size = size
        self._packed_size = packed_size(size, processes, exact_bits)
        self._handle = _library.gluon_syncbn_fixed_point(size, processes, exact_bits)
        weakref.finalize(self, _library.gluon_syncbn_free_fixed_point, self._handle).atexit = False

    def pack(self, message):
        """What the store is to add up, or None before the first `follow`."""
        if not _library.gluon_syncbn_fixed_point_ready(self._handle):
            return None
        packed = numpy.empty(self._packed_size)
        message = numpy.ascontiguousarray(message)
        _library.gluon_syncbn_pack(self._handle, message.ctypes.data, packed.ctypes.data)
        return packed

    def unpack(self, packed):
        """The sums. None, in all processes alike, if the windows do not fit the values of all."""
        message = numpy.empty(self._size)
        packed = numpy.ascontiguousarray(packed)
        found = _library.gluon_syncbn_unpack(self._handle, packed.ctypes.data, message.ctypes.data)
        return message if found else None

    def follow(self, messages):
        """Takes the messages of all processes, shape (processes, size), after an exchange without
        sums."""
        messages = numpy.ascontiguousarray(messages)
        _library.gluon_syncbn_follow(self._handle, messages.ctypes.data)


def _or_error(function, *arguments):
    """The handle that a function returns. Raises RuntimeError with the error that it writes."""
    error = ctypes.create_string_buffer(_MAX_ERROR_SIZE)
    handle = function(*arguments, error, _MAX_ERROR_SIZE)
    if not handle:
        raise RuntimeError(error.value.decode(errors="replace"))
    return handle


def clear_channels():
    """Sends all messages of layers through Python from now on, which then opens channels again."""
    _library.gluon_syncbn_clear_channels()


class watch:
    """Waits for an array that MXNet may never write. Within `with`, ``wait(seconds)`` returns
    whether it was written."""

    def __init__(self, array):
        self._array = array

    def __enter__(self):
        self._watch = _library.gluon_syncbn_watch_begin(self._array.handle)
        if not self._watch:
            raise MemoryError("MXNet's engine takes no more operations.")
        return self

    def __exit__(self, *error):
        _library.gluon_syncbn_watch_end(self._watch)

    def wait(self, seconds):
        waited = _library.gluon_syncbn_watch_wait(self._watch, seconds)
        _raise_if_released(waited)
        return waited == _WRITTEN


def _address(function):
    return ctypes.cast(function, ctypes.c_void_p)


def _pointer(array):
    """The memory of an NDArray on the CPU. MXNet does not notice when it is written."""
    array.wait_to_read()
    pointer = ctypes.c_void_p()
    mxnet.base.check_call(mxnet.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer


def view(array):
    """NumPy's view of the memory of an NDArray."""
    kind = numpy.ctypeslib.as_ctypes_type(array.dtype)
    return numpy.ctypeslib.as_array(ctypes.cast(_pointer(array), ctypes.POINTER(kind)), array.shape)


# The threads that run functions with a time limit.
bounded = set()


def call_within(seconds, function, otherwise):
    """The result of a function of MXNet that may never return. Raises RuntimeError(otherwise) on
    timeout."""
    results, failures = [], []

    def call():
        bounded.add(threading.get_ident())
        try:
            results.append(function())
        except Exception as error:
            failures.append(error)
        finally:
            bounded.discard(threading.get_ident())

    end = threads.start(call, patience=min(seconds, 1.0))
    patience = Patience(seconds)
    try:
        while not end.wait(min(seconds / 10, 1.0)) and patience.waited() < seconds:
            pass
    finally:
        if not end.is_set():  # Also on Ctrl-C.
            shutdown.abandon()
    if failures:
        raise failures[0]
    if not results:
        raise RuntimeError(otherwise)
    return results[0]


_ids = itertools.count()
_connections = weakref.WeakValueDictionary()
