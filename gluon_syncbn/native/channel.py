"""Channels to other processes, and waits for arrays that MXNet may never write."""

import ctypes
import itertools
import threading
import weakref

from . import shutdown
from .library import IN_FLIGHT, PROBE, HorovodArrays, KVStoreSlots, mxnet, numpy
from .library import library as _library

# Of a float64 in float32.
LIMBS = 3
# What a wait returns: see mxnet/watch.h.
_WRITTEN, _TIME_IS_UP, _INTERRUPTED, _CLOSED = range(4)
_MAX_ERROR_SIZE = 1 << 13


def write_error(failure, error, error_size):
    """Hands an exception to the native caller."""
    text = (str(failure) or type(failure).__name__).encode()[: error_size - 1]
    ctypes.memmove(error, text, len(text))


@PROBE
def _on_probe(connection, delay, error, error_size):
    """Finds out whether to go on with an exchange that takes long. Runs on the waiting thread."""
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

    def kvstore_channel(self, key, size, rank, kvstore, number, slots):
        """A `Channel` through MXNet's KVStore, where its key is `number`. slots: an array of shape
        (processes, `LIMBS`, size) that nothing else uses."""
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
        handle = _library.gluon_syncbn_kvstore_channel(self._handle, key.encode(), arguments)
        return Channel(handle, size, len(slots), slots)

    def horovod_channel(self, key, size, processes, allgather):
        """A `Channel` through Horovod. allgather: its C function."""
        mine = mxnet.nd.empty((size,), dtype=numpy.float64)
        everyone = mxnet.nd.empty((processes * size,), dtype=numpy.float64)
        everyone.wait_to_read()
        arguments = HorovodArrays(
            allgather=_address(allgather),
            ranks=processes,
            size=size,
            input=mine.handle,
            values=_pointer(mine),
            output=everyone.handle,
        )
        handle = _library.gluon_syncbn_horovod_channel(self._handle, key.encode(), arguments)
        return Channel(handle, size, processes, mine, everyone)


class Channel:
    """A key by which all processes exchange the same number of values, again and again."""

    def __init__(self, handle, size, processes, *arrays):
        self.handle, self.size, self._processes = handle, size, processes
        # The library uses them.
        self._arrays = arrays

    @property
    def calls(self):
        """The number of exchanges so far."""
        return _library.gluon_syncbn_channel_calls(self.handle)

    def exchange(self, title, timeout, mine):
        """The values of all processes, shape (processes, size). Raises RuntimeError."""
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
        if status != 0:
            raise RuntimeError(error.value.decode(errors="replace"))
        return everyone


def clear_channels():
    """From now on all messages of layers go through Python, which then opens channels again."""
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


def call_within(seconds, function, otherwise):
    """Calls a function of MXNet's that may never return. Raises RuntimeError(otherwise) on
    timeout."""
    failures = []

    def call():
        try:
            function()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        shutdown.abandon()
        raise RuntimeError(otherwise)
    if failures:
        raise failures[0]


_ids = itertools.count()
_connections = weakref.WeakValueDictionary()
