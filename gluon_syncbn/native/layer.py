"""Registers the operator and keeps its layers."""

import collections
import ctypes
import itertools
import os
import threading
import time
import types
import uuid
import weakref

from . import shutdown, threads
from .callbacks import callback, decoded, encoded
from .library import (
    FAILED,
    OPEN,
    REBUILD,
    STRUCTS,
    WAITS,
    WARN,
    Callbacks,
    LayerConfig,
    mxnet,
)
from .library import library as _library
from .routes import Key

OP_TYPE = "GluonSyncBatchNorm"
_NAIVE_ENGINE = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"
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
# How many of these waits have ended, by thread, and how many of all with an error.
waits = types.SimpleNamespace(returned=collections.Counter(), failed=0)
# {(layer id, epoch): text} of failed steps after which no device has drained.
_failed = {}
# Whether Ctrl-C has kept an error from ending its step.
_unfinished = False
# `trains` is set in threads that have called a layer in training.
_thread = threading.local()


@callback(WARN)
def _on_warning(text):
    threads.warn(text)


@callback(FAILED)
def _on_failure(layer_id, epoch, text):
    """Notes a failed step. Runs on the thread that found the failure."""
    layer = _layers.get(layer_id)
    if layer is None:
        return
    try:
        layer.fail(text)
    finally:
        _failed[layer_id, epoch] = text
        if _NAIVE_ENGINE:  # Where nothing is pending, and arrays hold no errors.
            _drain()


def _drain():
    """Drains the devices of all layers after failed steps.

    Not when a failure is found: the user's thread goes on then, and MXNet would skip what it pushes
    between the operations that put an error in an array and clear it again, and not say so.
    """
    for layer_id, epoch in list(_failed):
        text = _failed.pop((layer_id, epoch), None)
        layer = _layers.get(layer_id)
        if text is None or layer is None:
            continue
        arrays = layer.running_statistics()
        for device in layer.devices:
            _library.gluon_syncbn_drain(
                *(layer_id, epoch, encoded(device), *_handles(arrays.get(device, ()))),
                encoded(text),
            )


@callback(WAITS)
def _on_waits(layer_id, epoch, backward):
    """Looks for devices that cannot arrive, as an earlier operation there has failed. Runs on a
    thread that waits for them."""
    layer = _layers.get(layer_id)
    for device, arrays in layer.written_by(backward).items() if layer else ():
        _library.gluon_syncbn_probe_arrays(
            layer_id, epoch, backward, encoded(device), *_handles(arrays)
        )


def _on_wait(status, function, _arguments):
    """Called after each of Python's waits for MXNet. MXNet forgets an error once it is raised, so
    later nobody can tell which calls it skipped because of it, and the devices' next calls would
    meet those of the failed step. So the failed step ends here, before the error is raised.
    """
    waits.returned[threading.get_ident()] += 1
    waits.failed += status != 0
    # A copy into an array comes between the calls of two devices.
    ends = status != 0 or _unfinished and function.__name__ != "MXNDArraySyncCopyFromCPU"
    # Errors in other threads, such as a DataLoader's, concern no step.
    if ends and trains():
        _end_step()
    return status


def _end_step():
    """Waits until all calls pushed so far have ended. Those that wait for a skipped one end with an
    error."""
    global _unfinished
    _unfinished = True
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
    _drain()
    _unfinished = False


def _handles(arrays):
    return (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays)), len(arrays)


@callback(OPEN)
def _on_open(layer_id, backward, node, title, channels, size):
    """Opens the route of a layer's messages. Runs on the thread of the device that arrived last."""
    layer = _layers.get(layer_id)
    if layer is None:
        raise RuntimeError(f"{title}: the layer was deleted.")
    key = Key(layer_id, "backward" if backward else "forward", node)
    return layer.open(key, title, channels, size).handle


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
        encoded(PROCESS),
        _NAIVE_ENGINE,
        HAS_ONEDNN,
        Callbacks(_on_warning, _on_failure, _on_waits, _on_open),
    )
    if status != 0:
        error = mxnet.base.py_str(mxnet.base._LIB.MXGetLastError())
        raise ImportError(f"MXNet did not register the operator {OP_TYPE}: {error}")
    # Under the naive engine no call waits for another.
    if not _NAIVE_ENGINE:
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
        ranks=range(1),
        open=None,
        config_error="",
        notice="",
    ):
        """devices: those that may take part, as MXNet names them; if unknown, empty: then any
        num_devices, or one, take part. num_devices: how many do, None for all. group_size: the size
        of the groups in which they synchronize, 0 for one group. open(key, title, channels, size):
        the `Route` of a key to other processes, of those whose sums are added these `ranks`; None
        if there are none. config_error: why the layer cannot train there. notice: what the first
        call in training of this process logs."""
        self.devices = tuple(devices)
        self.open = open
        # Calls may still be on their way to other processes, which wait for them, when the net is
        # dropped.
        if open is not None:
            _kept[self.id] = self
        else:
            _kept.pop(self.id, None)
        config = LayerConfig(
            name=encoded(self.name),
            devices=_texts(self.devices),
            device_count=len(self.devices),
            num_devices=num_devices or 0,
            group_size=group_size,
            timeout=timeout,
            spans_processes=open is not None,
            first_rank=ranks.start,
            end_rank=ranks.stop,
            config_error=encoded(config_error),
            notice=encoded(notice),
        )
        _library.gluon_syncbn_configure(self.id, config)

    def forget(self):
        """Lets the layer be deleted, as nothing is under way any more."""
        _kept.pop(self.id, None)

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


def cuda_kernels():
    """How and for what the GPU kernels were built, or None if there are none."""
    text = _library.gluon_syncbn_cuda()
    return decoded(text) if text else None


def note_training():
    """This thread has called a layer in training. Errors in others end no step."""
    _thread.trains = True


def trains():
    return getattr(_thread, "trains", False)


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
    return (ctypes.c_char_p * len(names))(*map(encoded, names))


def set_joined(joined, must_have_samples=False):
    """Sets whether this process has run out of data and contributes zeros to the sums of all, and
    whether a call for which no process has samples fails."""
    _library.gluon_syncbn_set_joined(joined, must_have_samples)


def spans_processes():
    """Whether any layer exchanges with other processes."""
    return bool(_kept)


def give_up(reason):
    """Ends all waits for other devices until the reason is ""."""
    _library.gluon_syncbn_give_up(encoded(reason))


_ids = itertools.count()
_layers = weakref.WeakValueDictionary()
_kept = {}
HAS_ONEDNN = (
    mxnet.runtime.Features().is_enabled("MKLDNN") and os.environ.get("MXNET_MKLDNN_ENABLED") != "0"
)
_register(mxnet)
shutdown.release_at_the_end()
