"""Registers the operator, and knows its layers."""

import ctypes
import itertools
import logging
import os
import threading
import uuid
import weakref

from . import shutdown
from .channel import clear_lines, tell
from .library import EXCHANGE, FAILED, WAITS, WARN, mxnet, numpy
from .library import library as _library

OP_TYPE = "GluonSyncBatchNorm"
# Graphs carry this word, so that one made in another process does not find this one's layers by
# their numbers.
PROCESS = uuid.uuid4().hex

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
        tell(failure, error, error_size)
        return 1


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


_numbers = itertools.count()
_layers = weakref.WeakValueDictionary()
HAS_ONEDNN = mxnet.runtime.Features().is_enabled("MKLDNN")
_register(mxnet)
shutdown.release_at_the_end()
