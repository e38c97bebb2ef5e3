"""Channels to other processes, and waiting for arrays that MXNet may never write."""

import ctypes
import itertools
import threading
import weakref

from . import shutdown
from .library import LOOK, TELL, mxnet, numpy
from .library import library as _library

# Of a float64 in float32.
PARTS = 3
# What a wait returns: see watch.h.
_WRITTEN, _TIME_IS_UP, _INTERRUPTED, _ENDED = range(4)
_MOST_TEXT = 1 << 13


def tell(failure, error, error_size):
    text = (str(failure) or type(failure).__name__).encode()[: error_size - 1]
    ctypes.memmove(error, text, len(text))


@LOOK
def _on_look(number, waited, title, meeting, error, seconds, timeout, looks, text, size):
    """Finds out whether to go on with an exchange that takes long. Runs on the thread that
    waits."""
    try:
        _raise_unless_waiting(waited)
        _connections[number].look()(
            title.decode(), meeting.decode(), error.decode(), seconds, timeout, looks
        )
        return 0
    except BaseException as failure:  # Nothing may pass through the native caller.
        tell(failure, text, size)
        return 1


def _raise_unless_waiting(waited):
    if waited in (_INTERRUPTED, _ENDED):
        shutdown.abandon()
        raise RuntimeError("Interrupted." if waited == _INTERRUPTED else shutdown.CLOSED)


class Connection:
    """What the library knows of a store: the lines over it, and who has come to which meeting.

    look(title, meeting, error, seconds, timeout, looks): called on a thread that waits, after a
    tenth of the timeout and then every second; raises what is the matter when it is of no use to
    wait. `error`: what the store itself says, or "". `looks`: how often it was called before.

    Within `with`, nobody else calls the store's functions.
    """

    def __init__(self, look):
        # Holds nobody, as a KVStore has to be gone before Python is.
        self.look = weakref.WeakMethod(look)
        number = next(_numbers)
        _connections[number] = self
        self._handle = _library.gluon_syncbn_connect(number, _on_look)

    def __enter__(self):
        _library.gluon_syncbn_lock_calls(self._handle)

    def __exit__(self, *error):
        _library.gluon_syncbn_unlock_calls(self._handle)

    def attendance(self):
        """The meetings under way, and the last that ended well, each as (name, monotonic time) with
        the oldest first."""
        meetings = [], []

        @TELL
        def tell(meeting, since, is_open):
            meetings[0 if is_open else 1].append((meeting.decode(), since))

        _library.gluon_syncbn_attendance(self._handle, tell)
        return meetings

    def kvstore_line(self, key, size, rank, kvstore, number, slots):
        """A `Line` through MXNet's KVStore: under this number there, by way of an array of shape
        (processes, `PARTS`, size) that nobody else uses."""
        line = _library.gluon_syncbn_kvstore_line(
            self._handle,
            key.encode(),
            size,
            rank,
            len(slots),
            ctypes.cast(mxnet.base._LIB.MXKVStorePushPull, ctypes.c_void_p),
            kvstore.handle,
            number,
            slots.handle,
            _pointer(slots),
        )
        return Line(line, size, len(slots), slots)

    def horovod_line(self, key, size, processes, allgather):
        """A `Line` through Horovod. allgather: its C function."""
        mine = mxnet.nd.empty((size,), dtype=numpy.float64)
        everyone = mxnet.nd.empty((processes * size,), dtype=numpy.float64)
        everyone.wait_to_read()
        line = _library.gluon_syncbn_horovod_line(
            self._handle,
            key.encode(),
            size,
            processes,
            ctypes.cast(allgather, ctypes.c_void_p),
            mine.handle,
            _pointer(mine),
            everyone.handle,
        )
        return Line(line, size, processes, mine, everyone)


class Line:
    """A key by which all processes exchange equally many numbers, again and again."""

    def __init__(self, handle, size, processes, *arrays):
        self.handle, self.size, self._processes = handle, size, processes
        # The library uses them.
        self._arrays = arrays

    @property
    def calls(self):
        """How many exchanges there were."""
        return _library.gluon_syncbn_line_calls(self.handle)

    def exchange(self, title, timeout, mine):
        """The numbers of all processes, shape (processes, size). Raises RuntimeError."""
        mine = numpy.ascontiguousarray(mine)
        everyone = numpy.empty((self._processes, self.size))
        error = ctypes.create_string_buffer(_MOST_TEXT)
        status = _library.gluon_syncbn_line_exchange(
            self.handle,
            title.encode(),
            timeout,
            mine.ctypes.data,
            everyone.ctypes.data,
            error,
            _MOST_TEXT,
        )
        if status != 0:
            raise RuntimeError(error.value.decode(errors="replace"))
        return everyone


def clear_lines():
    """From now on all messages of layers go through Python, which then opens lines again."""
    _library.gluon_syncbn_clear_lines()


class watch:
    """Waits for an array that MXNet may never write. Within `with`, ``wait(seconds)`` says whether
    it was written."""

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
        _raise_unless_waiting(waited)
        return waited == _WRITTEN


def _pointer(array):
    """The memory of an NDArray on the CPU, which MXNet does not see change."""
    array.wait_to_read()
    pointer = ctypes.c_void_p()
    mxnet.base.check_call(mxnet.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer


def view(array):
    """NumPy's view of that memory."""
    kind = numpy.ctypeslib.as_ctypes_type(array.dtype)
    return numpy.ctypeslib.as_array(ctypes.cast(_pointer(array), ctypes.POINTER(kind)), array.shape)


def call_within(seconds, function, otherwise):
    """Calls a function of MXNet's that may never return. Raises RuntimeError(otherwise) when the
    time is up."""
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


_numbers = itertools.count()
_connections = weakref.WeakValueDictionary()
