"""Registers the operator and keeps its layers."""

import ctypes
import itertools
import os
import uuid
import weakref

from . import threads
from .callbacks import callback, decoded, encoded
from .library import (
    FAILED,
    NAIVE_ENGINE,
    OPEN,
    WAITS,
    WARN,
    Callbacks,
    LayerConfig,
    mxnet,
)
from .library import library as _library
from .routes import MAX_ERROR_SIZE, Key

OP_TYPE = "GluonSyncBatchNorm"
# Graphs carry this UUID, so that those of another process do not find this one's layers.
PROCESS = uuid.uuid4().hex

# As in src/operator/mxnet/c_api.h, in the same order.
_FUNCTIONS = (
    "MXCustomOpRegister",
    "MXNDArrayGetData",
    "MXNDArrayGetShapeEx",
    "MXNDArrayGetDType",
    "MXNDArrayFree",
    "MXNDArrayWaitToRead",
    "MXEnginePushSyncND",
    "MXGetLastError",
)


_on_warning = callback(WARN)(threads.warn)


@callback(FAILED)
def _on_failure(layer_id, text):
    """A call has ended, as the step has failed. Runs on its thread."""
    layer = _layers.get(layer_id)
    if layer is not None:
        layer.fail(text)


@callback(WAITS)
def _on_waits(layer_id, backward, meeting):
    """Looks for devices that cannot arrive, as an earlier operation there has failed. Runs on a
    thread that waits for them."""
    layer = _layers.get(layer_id)
    if layer is None:
        return
    looked_at = [*layer.written_by(backward).items()]
    if backward:
        looked_at += [(device, [mark]) for device, mark in layer.marks().items()]
    for device, arrays in looked_at:
        _library.gluon_syncbn_probe_arrays(meeting, encoded(device), *handles(arrays))


def flush(why=""):
    """Waits until all calls pushed so far have ended. The step fails if one waits for a call that
    MXNet has skipped, or, if it says why, that was never made."""
    begun = _library.gluon_syncbn_flush_begin()
    for layer in layers():
        for backward in (False, True):
            for device, arrays in layer.written_by(backward).items():
                _library.gluon_syncbn_flush_add(
                    begun, layer.id, backward, encoded(device), *handles(arrays)
                )
    _library.gluon_syncbn_flush_finish(begun, encoded(why))


def handles(arrays):
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
        *(ctypes.cast(mxnet.base._LIB[name], ctypes.c_void_p) for name in _FUNCTIONS)
    )
    status = _library.gluon_syncbn_register(
        api,
        encoded(PROCESS),
        NAIVE_ENGINE,
        HAS_ONEDNN,
        Callbacks(_on_warning, _on_failure, _on_waits, _on_open),
    )
    if status != 0:
        error = mxnet.base.py_str(mxnet.base._LIB.MXGetLastError())
        raise ImportError(f"MXNet did not register the operator {OP_TYPE}: {error}")


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

    def last_written(self, active):
        """An array that a forward in training mode changes on one of the active devices (of all
        if none are named), and one that a backward does; None where there is none."""
        return None, None

    def written_by(self, backward):
        """{device: arrays that a forward in training mode, or a backward, changes there}."""
        return {}

    def marks(self):
        """{device: an array that MXNet skips with the gradients of a Trainer's step}."""
        return {}


def layers():
    return list(_layers.values())


def set_active_devices(devices):
    """Sets which devices take part from the next forward calls on; none means all. No forward call
    may be in progress."""
    global _active
    _active = tuple(devices)
    _library.gluon_syncbn_set_active_devices(_texts(devices), len(devices))


def _texts(names):
    return (ctypes.c_char_p * len(names))(*map(encoded, names))


def set_joined(joined):
    """Sets whether this process has run out of data and contributes zeros to the sums of all."""
    _library.gluon_syncbn_set_joined(joined)


def end_step(kept):
    """Ends a step of the layers that exchange with other processes, and returns its number. From
    now on `exchanges` knows this one, and those that it has for the `kept` numbers."""
    layers = list(_kept.values())
    written = [array for layer in layers for array in layer.last_written(_active)]
    handles = (None if array is None else array.handle for array in written)
    return _library.gluon_syncbn_end_step(
        (ctypes.c_int64 * len(layers))(*(layer.id for layer in layers)),
        (ctypes.c_void_p * len(written))(*handles),
        len(layers),
        (ctypes.c_int64 * len(kept))(*kept),
        len(kept),
    )


def exchanges(step):
    """The exchanges of a step, or of the last one before it that had any, in their order: (id of
    the layer, whether it is a backward, number of the node, how many forward calls ago it went
    forward)."""
    rows = _library.gluon_syncbn_exchanges(step, None, 0)
    found = (ctypes.c_int64 * 4 * rows)()
    _library.gluon_syncbn_exchanges(step, found, rows)
    return [(key, bool(backward), node, ago) for key, backward, node, ago in found]


def take_part(layer, backward, node, ago, running, momentum, unbiased):
    """Makes an exchange without samples, as one of `exchanges`. running: the running statistics,
    NumPy arrays, which follow a forward. Returns why it has failed, or "", and whether Ctrl-C has
    come meanwhile."""
    error = ctypes.create_string_buffer(MAX_ERROR_SIZE)
    interrupted = _library.gluon_syncbn_take_part(
        layer.id,
        backward,
        node,
        ago,
        len(running[0]),
        running[0].dtype == "float64",
        momentum or 0,
        unbiased,
        (ctypes.c_void_p * 3)(*(array.ctypes.data for array in running)),
        error,
        MAX_ERROR_SIZE,
    )
    return decoded(error.value), interrupted


def spans_processes():
    """Whether any layer exchanges with other processes."""
    return bool(_kept)


_ids = itertools.count()
_layers = weakref.WeakValueDictionary()
_kept = {}
_active = ()
HAS_ONEDNN = (
    mxnet.runtime.Features().is_enabled("MKLDNN") and os.environ.get("MXNET_MKLDNN_ENABLED") != "0"
)
_register(mxnet)
