"""The native library: registers the operator, and knows its layers, connections and lines."""

import ctypes
import itertools
import logging
import os
import threading
import uuid
import weakref

from . import _ending
from ._loading import EXCHANGE, FAILED, LOOK, TELL, WAITS, WARN, mxnet, numpy
from ._loading import library as _library

OP_TYPE = "GluonSyncBatchNorm"
# Graphs carry this word, so that one made in another process does not find this one's layers by
# their numbers.
PROCESS = uuid.uuid4().hex
# Of a float64 in float32.
PARTS = 3

# mxnet_api.h, in the same order.
_FUNCTIONS = (
    "MXCustomOpRegister",
    "MXNDArrayGetData",
    "MXNDArrayGetShapeEx",
    "MXNDArrayGetDType",
    "MXNDArrayCreateEx",
    "MXNDArrayFree",
    "MXNDArrayWaitToRead",
    "MXEnginePushSyncND",
    "MXGetLastError",
)
# What a wait returns: see watch.h.
_WRITTEN, _TIME_IS_UP, _INTERRUPTED, _ENDED = range(4)
_MOST_TEXT = 1 << 13
_log = logging.getLogger("gluon_syncbn")


def warn(text):
    """Logs on a thread of its own. The one that calls this has to end somebody's wait in time, and
    who holds a lock of logging's may be the one who waits: for an array that it logs."""
    threading.Thread(target=_log.warning, args=("%s", text), daemon=True).start()


@WARN
def _on_warning(text):
    warn(text.decode())


@FAILED
def _on_failure(number, generation, text):
    """Lets the devices of a layer start anew after a failed step. Runs on the thread that noticed
    the failure."""
    layer = _layers.get(number)
    if layer is None:
        return
    layer.fail(text.decode())
    arrays = layer.running_statistics()
    for device in layer.devices:
        _library.gluon_syncbn_settle(
            number, generation, device.encode(), *_handles(arrays.get(device, ())), text
        )


@WAITS
def _on_waits(number, generation, backward):
    """Looks for devices that cannot come, as an earlier operation there has failed. Runs on a
    thread that waits for them."""
    layer = _layers.get(number)
    for device, arrays in layer.written_by(backward).items() if layer else ():
        _library.gluon_syncbn_look_for_error(
            number, generation, backward, device.encode(), *_handles(arrays)
        )


def _handles(arrays):
    return (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays)), len(arrays)


@EXCHANGE
def _on_exchange(number, key, title, channels, mine, size, everyone, total, error, error_size):
    """Brings the sums of this process to the others. Runs on the thread of the last device that
    came."""
    try:
        layer = _layers.get(number)
        if layer is None:
            raise RuntimeError(f"{title.decode()}: the layer was deleted.")
        mine = numpy.ctypeslib.as_array(mine, (size,))
        result = layer.exchange(key.decode(), title.decode(), channels, mine)
        numpy.ctypeslib.as_array(everyone, (total,))[:] = result.reshape(-1)
        return 0
    except BaseException as failure:  # Nothing may pass through the native caller.
        _tell(failure, error, error_size)
        return 1


def _tell(failure, error, error_size):
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
        _tell(failure, text, size)
        return 1


def _raise_unless_waiting(waited):
    if waited in (_INTERRUPTED, _ENDED):
        _ending.abandon()
        raise RuntimeError("Interrupted." if waited == _INTERRUPTED else _ending.CLOSED)


def _register(mxnet):
    api = (ctypes.c_void_p * len(_FUNCTIONS))(
        *(ctypes.cast(getattr(mxnet.base._LIB, name), ctypes.c_void_p) for name in _FUNCTIONS)
    )
    status = _library.gluon_syncbn_register(
        api,
        PROCESS.encode(),
        os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine",
        HAS_ONEDNN,
        _on_warning,
        _on_failure,
        _on_waits,
        _on_exchange,
    )
    if status != 0:
        error = mxnet.base.py_str(mxnet.base._LIB.MXGetLastError())
        raise ImportError(f"MXNet did not register the operator {OP_TYPE}: {error}")


class Layer:
    """A layer as the native library knows it: a number that no other layer has, a name, devices, a
    timeout."""

    def __init__(self, name):
        self.number = next(_numbers)
        self.name = name
        self.devices = ()
        _layers[self.number] = self
        weakref.finalize(
            self, _library.gluon_syncbn_forget, ctypes.c_int64(self.number)
        ).atexit = False

    def set_devices(
        self,
        devices,
        num_devices,
        timeout,
        group_size=0,
        processes=1,
        ranks=range(1),
        exchange=None,
        misfit="",
    ):
        """devices: those that may take part, as MXNet names them; none where that is not known, and
        any num_devices or one do. num_devices: how many do, None for all; group_size: they meet in
        groups of so many, 0: in one; ranks: those of `processes` whose sums are added;
        exchange(key, title, channels, mine): the numbers of all processes, shape (processes, size);
        misfit: why the layer cannot train there."""
        self.devices = tuple(devices)
        self.exchange = exchange
        _library.gluon_syncbn_configure(
            ctypes.c_int64(self.number),
            self.name.encode(),
            _texts(self.devices),
            len(self.devices),
            num_devices or 0,
            group_size,
            ctypes.c_double(timeout),
            processes,
            ranks.start,
            ranks.stop,
            misfit.encode(),
        )

    def restart(self, variance):
        """Somebody writes the running mean, or the running variance: virtual devices go on from
        there."""
        _library.gluon_syncbn_restart(ctypes.c_int64(self.number), variance)

    def fail(self, text):
        """A step has failed here."""

    def running_statistics(self):
        """{device: arrays that a forward in training mode changes there}; empty before they have
        values."""
        return {}

    def written_by(self, backward):
        """{device: arrays that a forward in training mode, or a backward, changes there}."""
        return {}

    def set_line(self, key, line, exchange):
        """The messages of this key take the line from now on, and no longer call `exchange`. They
        do again when the layer is configured anew, and after `clear_lines`."""
        _library.gluon_syncbn_set_line(self.number, key.encode(), line.handle)
        if self.exchange is not exchange:
            clear_lines()


def cuda_kernels():
    """What the library's kernels for GPUs were built with and for, or None where it has none."""
    text = _library.gluon_syncbn_cuda()
    return text.decode() if text else None


def waiting():
    """The number of calls that wait for other devices at this moment."""
    return _library.gluon_syncbn_waiting()


def layers():
    return list(_layers.values())


def set_present(devices):
    """Which devices take part in the next forward calls, all of which are still to be made; none:
    all."""
    _library.gluon_syncbn_set_present(_texts(devices), len(devices))


def _texts(names):
    return (ctypes.c_char_p * len(names))(*(name.encode() for name in names))


def set_absent(absent):
    """Whether this process brings nothing to exchanges, as it has run out of data."""
    _library.gluon_syncbn_set_absent(bool(absent))


def give_up(reason):
    """Ends all waits for other devices, now and until the reason is ""."""
    _library.gluon_syncbn_give_up(reason.encode())


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
        _ending.abandon()
        raise RuntimeError(otherwise)
    if failures:
        raise failures[0]


_numbers = itertools.count()
_layers = weakref.WeakValueDictionary()
_connections = weakref.WeakValueDictionary()
HAS_ONEDNN = mxnet.runtime.Features().is_enabled("MKLDNN")
_register(mxnet)
_ending.release_at_the_end()
