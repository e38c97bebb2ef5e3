"""Registers the operator and keeps its layers."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import uuid
import weakref
from typing import TYPE_CHECKING, Any, Callable, Collection, Mapping, Sequence

from . import callbacks, threads
from ._routes import INTERRUPTED, Key
from .callbacks import callback, encoded, last_text
from .library import NAIVE_ENGINE, mxnet
from .library import library as _library

if TYPE_CHECKING:
    from types import FrameType

    import numpy
    from mxnet.nd import NDArray

    from ._routes import Route

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


@callback
def on_warning(text: str) -> None:
    threads.warn(text)


@callback
def on_failure(layer_id: int, text: str) -> None:
    """A call has ended, as the step has failed. Runs on its thread."""
    layer = _layers.get(layer_id)
    if layer is not None:
        layer.fail(text)


@callback
def on_wait(layer_id: int, device: str) -> None:
    """A call waits for this device. Runs on its thread."""
    layer = _layers.get(layer_id)
    if layer is not None:
        layer.probe(device)


@callback
def on_report(layer_id: int, device: str) -> None:
    """A call on this device reports an error to MXNet. Runs on its thread."""
    layer = _layers.get(layer_id)
    written = layer.written().get(device) if layer is not None and layer.is_written else None
    if written is not None:
        _library.gluon_syncbn_expect_report(written[0].handle)


@callback
def on_may_run() -> bool:
    """Whether other processes or GPUs may be at work, or MXNet is calling functions of the user's,
    such as custom operators, which may sleep. Runs on a thread of MXNet's that waits."""
    if spans_processes() or "DMLC_ROLE" in os.environ or "horovod" in sys.modules:
        return True
    if any(device.startswith("gpu") for layer in layers() for device in layer.devices):
        return True
    started = {thread.ident for thread in threading.enumerate() if not is_of_mxnet(thread)}
    return any(
        ident not in started and not _is_ours(frame)
        for ident, frame in sys._current_frames().items()
    )


def is_of_mxnet(thread: threading.Thread) -> bool:
    """Whether MXNet has started it, or another library: not Python."""
    return isinstance(thread, threading._DummyThread)


def _is_ours(frame: FrameType) -> bool:
    while frame.f_back:
        frame = frame.f_back
    return frame.f_code.co_filename == callbacks.__file__


def settle(layers: Collection[Layer], why: str = "", after_error: bool = False) -> None:
    """Waits until all calls of these layers that were made so far have ended, or wait for one that
    was not made. The step fails if MXNet has skipped one; in the latter case, if it says why.
    after_error: also if what these layers train with holds an error."""
    begin = _library.gluon_syncbn_next_ticket()
    trained: dict[int, tuple[Layer, NDArray]] = {}
    for layer in layers:
        for device in layer.written():
            layer.probe(device)
        for array in layer.trained() if after_error else ():
            trained[id(array)] = layer, array
    for layer, array in trained.values():
        layer.watch(str(array.context), array)
    ids = (ctypes.c_int64 * len(layers))(*(layer.id for layer in layers))
    _library.gluon_syncbn_settle(ids, len(ids), begin, encoded(why))


@callback
def on_open(layer_id: int, backward: bool, node: int, title: str, channels: int, size: int) -> int:
    """Opens the route of a layer's messages. Runs on the thread of the device that arrived last."""
    layer = _layers.get(layer_id)
    if layer is None:
        raise RuntimeError(f"{title}: the layer was deleted.")
    key = Key(layer_id, "backward" if backward else "forward", node)
    return layer.open(key, title, channels, size).handle


def _register(mxnet: Any) -> None:
    api = (ctypes.c_void_p * len(_FUNCTIONS))(
        *(ctypes.cast(mxnet.base._LIB[name], ctypes.c_void_p) for name in _FUNCTIONS)
    )
    status = _library.gluon_syncbn_register(
        api, encoded(OP_TYPE), encoded(PROCESS), NAIVE_ENGINE, HAS_ONEDNN
    )
    if status != 0:
        error = mxnet.base.py_str(mxnet.base._LIB.MXGetLastError())
        raise ImportError(f"MXNet did not register the operator {OP_TYPE}: {error}")


class Layer:
    """A layer of the native library: a unique id, a name, devices."""

    def __init__(self, name: str) -> None:
        self.id = next(_ids)
        self.name = name
        self.devices: tuple[str, ...] = ()
        # As a graph has.
        self.layers: weakref.WeakSet[Layer] = weakref.WeakSet([self])
        _layers[self.id] = self
        weakref.finalize(self, _library.gluon_syncbn_forget, self.id).atexit = False

    def set_devices(
        self,
        devices: Sequence[str],
        num_devices: int | None,
        timeout: float,
        group_size: int = 0,
        ranks: range = range(1),
        open: Callable[[Key, str, int, int], Route] | None = None,
        config_error: str = "",
        notice: str = "",
    ) -> None:
        """devices: those that may take part, as MXNet names them; if unknown, empty: then any
        num_devices, or one, take part. num_devices: how many do, None for all. group_size: the size
        of the groups in which they synchronize, 0 for one group. open(key, title, channels, size):
        the `Route` of a key to other processes, of those whose sums are added these `ranks`; None
        if there are none. config_error: why the layer cannot train there. notice: what the first
        call in training of this process logs."""
        self.devices = tuple(devices)
        self.open = open
        if open is not None:
            _spanning[self.id] = self
        else:
            _spanning.pop(self.id, None)
        _library.gluon_syncbn_configure(
            self.id,
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

    def forget(self) -> None:
        """Lets the layer be deleted, as nothing is under way any more."""
        _spanning.pop(self.id, None)

    def fail(self, text: str) -> None:
        """A step has failed here."""

    def last_written(self, active: Sequence[str]) -> tuple[NDArray | None, NDArray | None]:
        """An array that a forward in training mode changes on one of the active devices (of all
        if none are named), and one that a backward does; None where there is none."""
        return None, None

    @property
    def is_written(self) -> bool:
        """Whether MXNet knows that a forward call writes the running mean."""
        return True

    def written(self) -> Mapping[str, Sequence[NDArray]]:
        """{device: [the running mean, others that hold an error if MXNet has skipped a call]}"""
        return {}

    def trained(self) -> Sequence[NDArray]:
        """The parameters that are trained with the layer, and their gradients."""
        return ()

    def probe(self, device: str) -> None:
        """Pushes operations behind the calls that were made on a device."""
        arrays = self.written().get(device, ())
        for array in arrays:
            self.watch(device, array)
        if arrays:
            _library.gluon_syncbn_probe(self.id, encoded(device), arrays[0].handle, True)

    def watch_written(self) -> None:
        """Watches what the calls that were made so far write."""
        for device, arrays in self.written().items():
            for array in arrays:
                self.watch(device, array)

    def watch(self, device: str, array: NDArray) -> None:
        """The step fails if the array, which a call on this device writes, holds an error by the
        time that what was pushed so far has ended."""
        _library.gluon_syncbn_probe(self.id, encoded(device), array.handle, False)


def layers() -> list[Any]:
    """Those of this process, all of the class that the package makes of `Layer`."""
    return list(_layers.values())


def set_active_devices(devices: Sequence[str]) -> None:
    """Sets which devices take part from the next forward calls on; none means all. No forward call
    may be in progress."""
    global _active
    _active = tuple(devices)
    _library.gluon_syncbn_set_active_devices(_texts(devices), len(devices))


def _texts(names: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(names))(*map(encoded, names))


def set_joined(joined: bool) -> None:
    """Sets whether this process has run out of data and contributes zeros to the sums of all."""
    _library.gluon_syncbn_set_joined(joined)


def end_step(kept: Sequence[int]) -> int:
    """Ends a step of the layers that exchange with other processes, and returns its number. From
    now on `exchanges` knows this one, and those that it has for the `kept` numbers."""
    layers = list(_spanning.values())
    written = [array for layer in layers for array in layer.last_written(_active)]
    handles = (None if array is None else array.handle for array in written)
    return _library.gluon_syncbn_end_step(
        (ctypes.c_int64 * len(layers))(*(layer.id for layer in layers)),
        (ctypes.c_void_p * len(written))(*handles),
        len(layers),
        (ctypes.c_int64 * len(kept))(*kept),
        len(kept),
    )


def exchanges(step: int) -> list[tuple[int, bool, int, int]]:
    """The exchanges of a step, or of the last one before it that had any, in their order: (id of
    the layer, whether it is a backward, number of the node, how many forward calls ago it went
    forward)."""
    rows = _library.gluon_syncbn_exchanges(step, None, 0)
    found = (ctypes.c_int64 * 4 * rows)()
    _library.gluon_syncbn_exchanges(step, found, rows)
    return [(key, bool(backward), node, ago) for key, backward, node, ago in found]


def take_part(
    layer: Layer,
    backward: bool,
    node: int,
    ago: int,
    running: Sequence[numpy.ndarray],
    momentum: float | None,
    unbiased: bool,
) -> tuple[str, bool]:
    """Makes an exchange without samples, as one of `exchanges`. running: the running statistics,
    NumPy arrays, which follow a forward. Returns why it has failed, or "", and whether Ctrl-C has
    come meanwhile."""
    status = _library.gluon_syncbn_take_part(
        layer.id,
        backward,
        node,
        ago,
        len(running[0]),
        running[0].dtype == "float64",
        momentum or 0,
        unbiased,
        (ctypes.c_void_p * 3)(*(array.ctypes.data for array in running)),
    )
    return last_text() if status else "", status == INTERRUPTED


def spans_processes() -> bool:
    """Whether any layer exchanges with other processes."""
    return bool(_spanning)


_ids = itertools.count()
_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
# Those that exchange with other processes. Calls may still be on their way there, where others wait
# for them, when the net is dropped.
_spanning: dict[int, Layer] = {}
_active: Sequence[str] = ()
HAS_ONEDNN = (
    mxnet.runtime.Features().is_enabled("MKLDNN") and os.environ.get("MXNET_MKLDNN_ENABLED") != "0"
)
_register(mxnet)
