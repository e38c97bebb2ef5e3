"""Registers the operator and keeps its layers."""

import collections
import contextlib
import ctypes
import itertools
import logging
import os
import threading
import time
import types
import uuid
import weakref

from . import shutdown, threads
from .channel import Key, clear_channels, write_error
from .library import (
    EXCHANGE,
    FAILED,
    REBUILD,
    STRUCTS,
    WAITS,
    WARN,
    Callbacks,
    LayerConfig,
    mxnet,
    numpy,
)
from .library import library as _library

OP_TYPE = "GluonSyncBatchNorm"
# Graphs carry this UUID, so that those of another process do not find this one's layers.
PROCESS = uuid.uuid4().hex

# As in src/operator/mxnet/api.h, in the same order.
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
# The functions with which Python waits for the results of operations.
_WAITS = (
    "MXNDArrayWaitToRead",
    "MXNDArrayWaitToWrite",
    "MXNDArrayWaitAll",
    "MXNDArraySyncCopyToCPU",
    "MXNDArraySyncCopyFromCPU",
    "MXNDArraySave",
)
_log = logging.getLogger("gluon_syncbn")
# How many of these waits have ended, by thread, and how many of all with an error.
waits = types.SimpleNamespace(returned=collections.Counter(), failed=0)


def warn(text):
    """Logs on another thread. The caller must end waits in time, and the thread that holds
    logging's lock may itself be waiting, for an array that it logs."""
    with contextlib.suppress(RuntimeError):  # There are no more threads.
        threads.start(_log.warning, "%s", text)


@WARN
def _on_warning(text):
    warn(text.decode())


@FAILED
def _on_failure(layer_id, epoch, text):
    """Drains the devices of a layer after a failed step. Runs on the thread that found the
    failure."""
    layer = _layers.get(layer_id)
    if layer is None:
        return
    layer.fail(text.decode())
    arrays = layer.running_statistics()
    for device in layer.devices:
        _library.gluon_syncbn_drain(
            layer_id, epoch, device.encode(), *_handles(arrays.get(device, ())), text
        )


@WAITS
def _on_waits(layer_id, epoch, backward):
    """Looks for devices that cannot arrive, as an earlier operation there has failed. Runs on a
    thread that waits for them."""
    layer = _layers.get(layer_id)
    for device, arrays in layer.written_by(backward).items() if layer else ():
        _library.gluon_syncbn_probe_arrays(
            layer_id, epoch, backward, device.encode(), *_handles(arrays)
        )


def _on_wait(status, _function, _arguments):
    """Called after each of Python's waits for MXNet. MXNet forgets an error once it is raised, so
    later nobody can tell which calls it skipped because of it, and the devices' next calls would
    meet those of the failed step. So the failed step ends here, before the error is raised.
    """
    waits.returned[threading.get_ident()] += 1
    if status != 0:
        waits.failed += 1
        if not isinstance(threading.current_thread(), threading._DummyThread):
            _end_step()
    return status


def _end_step():
    """Waits until all calls pushed so far have ended. Those that wait for a skipped one end with an
    error."""
    for layer in layers():
        for backward in (False, True):
            written = layer.written_by(backward)
            handles, count = _handles([array for arrays in written.values() for array in arrays])
            each = count // max(1, len(written))
            _library.gluon_syncbn_flush(
                layer.id, backward, _texts(written), len(written), handles, each
            )
    begin = time.monotonic()
    # If something waits in vain for another process, calls behind it never end.
    while not shutdown.is_abandoned():
        if time.monotonic() - begin >= _library.gluon_syncbn_flushing():
            break
        time.sleep(0.001)


def _handles(arrays):
    return (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays)), len(arrays)


@EXCHANGE
def _on_exchange(message, error, error_size):
    """Exchanges the sums of this process. Runs on the thread of the device that arrived last."""
    try:
        message = message.contents
        title = message.title.decode()
        layer = _layers.get(message.layer)
        if layer is None:
            raise RuntimeError(f"{title}: the layer was deleted.")
        mine = numpy.ctypeslib.as_array(message.values, (message.size,))
        _, direction, node = message.key.decode().split()
        key = Key(layer.id, direction, int(node))
        result = layer.exchange(key, title, message.channels, mine)
        numpy.ctypeslib.as_array(message.all, (message.all_size,))[: result.size] = result.ravel()
        return int(len(result) == 1)
    except BaseException as failure:  # The native caller cannot pass exceptions on.
        write_error(failure, error, error_size)
        return -1


def _register(mxnet):
    api = (ctypes.c_void_p * len(_FUNCTIONS))(
        *(ctypes.cast(getattr(mxnet.base._LIB, name), ctypes.c_void_p) for name in _FUNCTIONS)
    )
    expected = [*map(ctypes.sizeof, STRUCTS), ctypes.sizeof(api)]
    sizes = (ctypes.c_int64 * len(expected))()
    _library.gluon_syncbn_struct_sizes(sizes)
    if list(sizes) != expected:
        raise ImportError(
            f"The native library's structs have {list(sizes)} bytes, those of the Python part "
            f"{expected}. {REBUILD}"
        )
    status = _library.gluon_syncbn_register(
        api,
        PROCESS.encode(),
        os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine",
        HAS_ONEDNN,
        Callbacks(_on_warning, _on_failure, _on_waits, _on_exchange),
    )
    if status != 0:
        error = mxnet.base.py_str(mxnet.base._LIB.MXGetLastError())
        raise ImportError(f"MXNet did not register the operator {OP_TYPE}: {error}")
    # Under the naive engine no call waits for another.
    if os.environ.get("MXNET_ENGINE_TYPE") != "NaiveEngine":
        for name in _WAITS:
            getattr(mxnet.base._LIB, name).errcheck = _on_wait


class Layer:
    """A layer of the native library: a unique id, a name, devices."""

    def __init__(self, name):
        self.id = next(_ids)
        self.name = name
        self.devices = ()
        _layers[self.id] = self
        weakref.finalize(self, _library.gluon_syncbn_forget, self.id).atexit = False

    def set_devices(
        self,
        devices,
        num_devices,
        timeout,
        group_size=0,
        processes=1,
        ranks=range(1),
        exchange=None,
        config_error="",
        notice="",
    ):
        """devices: those that may take part, as MXNet names them; if unknown, empty: then any
        num_devices, or one, take part. num_devices: how many do, None for all. group_size: the size
        of the groups in which they synchronize, 0 for one group. ranks: those of `processes` whose
        sums are added. exchange(key, title, channels, mine): the values of all processes, shape
        (processes, size), or their sums, shape (1, size). config_error: why the layer cannot train
        there. notice: what the first call in training of this process logs."""
        self.devices = tuple(devices)
        self.exchange = exchange
        # Calls may still be on their way to an exchange when the net is dropped, and other
        # processes wait for them.
        if exchange is not None:
            _exchanging[self.id] = self
        else:
            _exchanging.pop(self.id, None)
        config = LayerConfig(
            name=self.name.encode(),
            devices=_texts(self.devices),
            device_count=len(self.devices),
            num_devices=num_devices or 0,
            group_size=group_size,
            timeout=timeout,
            processes=processes,
            first_rank=ranks.start,
            end_rank=ranks.stop,
            config_error=config_error.encode(),
            notice=notice.encode(),
        )
        _library.gluon_syncbn_configure(self.id, config)

    def forget(self):
        """Lets the layer be deleted, as nothing is under way any more."""
        _exchanging.pop(self.id, None)

    def fail(self, text):
        """A step has failed here."""

    def device_groups(self):
        """The devices, as lists of those that synchronize."""
        return [list(self.devices)]

    def running_statistics(self):
        """{device: arrays that a forward in training mode changes there}; empty before they have
        values."""
        return {}

    def written_by(self, backward):
        """{device: arrays that a forward in training mode, or a backward, changes there}."""
        return {}

    def set_channel(self, key, channel, exchange):
        """Sends messages of this key through the channel, no longer through `exchange`, until the
        layer is configured again or `clear_channels` is called."""
        _library.gluon_syncbn_set_channel(self.id, str(key).encode(), channel.handle)
        if self.exchange is not exchange:
            clear_channels()


def cuda_kernels():
    """How and for what the GPU kernels were built, or None if there are none."""
    text = _library.gluon_syncbn_cuda()
    return text.decode() if text else None


def waiting():
    """The number of calls that wait for other devices now."""
    return _library.gluon_syncbn_waiting()


def layers():
    return list(_layers.values())


def set_active_devices(devices):
    """Sets which devices take part from the next forward calls on; none means all. No forward call
    may be in progress."""
    _library.gluon_syncbn_set_active_devices(_texts(devices), len(devices))


def _texts(names):
    return (ctypes.c_char_p * len(names))(*(name.encode() for name in names))


def set_joined(joined):
    """Sets whether this process has run out of data and contributes zeros to exchanges."""
    _library.gluon_syncbn_set_joined(bool(joined))


def give_up(reason):
    """Ends all waits for other devices until the reason is ""."""
    _library.gluon_syncbn_give_up(reason.encode())


_ids = itertools.count()
_layers = weakref.WeakValueDictionary()
_exchanging = {}
HAS_ONEDNN = (
    mxnet.runtime.Features().is_enabled("MKLDNN") and os.environ.get("MXNET_MKLDNN_ENABLED") != "0"
)
_register(mxnet)
shutdown.release_at_the_end()
