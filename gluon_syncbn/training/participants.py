"""Steps in which some devices have no data, or which may be interrupted."""

import mxnet as mx
from mxnet.context import Context

from .. import native
from .trainer import before_adding_up, check_trainer, clear, trained

_MOST_ERRORS = 10000


class participants:
    """A context within which only some of the devices are active: the others have no data.

    ::

        for x, label in loader:
            used = devices[: len(x)]                # the last batch may have fewer samples
            with sbn.participants(used, trainer):
                xs = gluon.utils.split_and_load(x, used, even_split=False)
                ...                                 # record, backward
                trainer.step(len(x))

    The statistics are those of the samples that there are. On exit, idle devices get the running
    statistics of the active ones, so that all stay equal, bit for bit. This waits for all calls
    before and within it, unless all devices of the layers are active. Layers that have none of the
    devices are left alone.

    A step that ends in an error, such as Ctrl-C in a notebook after the net was called for one
    device and before the next, is abandoned: calls that wait for others fail at once, the error
    propagates, and the next step starts clean.

    Parameters
    ----------
    devices : list of Context or of NDArray
        The active ones: call every layer on each of them, and on no others. An array may stand for
        its device.
    trainer : mxnet.gluon.Trainer, optional
        Uses zeros as the gradients of idle devices, which would otherwise be those of an earlier
        step; with ``grad_req="add"``, the gradients accumulated so far. Call its ``step`` within
        the context.

    Raises
    ------
    ValueError
        If there are no devices, or within another `participants`.
    TypeError
        For anything but a Trainer as `trainer`.
    MXNetError
        On waiting for a result, if a layer is called on another device.

    References
    ----------
    PyTorch has ``torch.distributed.algorithms.Join`` for the same between processes; here that is
    :class:`gluon_syncbn.distributed.join`.
    """

    _inside = False

    def __init__(self, devices, trainer=None):
        devices = devices if isinstance(devices, (list, tuple)) else [devices]
        devices = [getattr(device, "context", device) for device in devices]
        if not devices or not all(isinstance(device, Context) for device in devices):
            raise ValueError(
                f"participants got {devices!r}: give the contexts that have data, or arrays on "
                "them, at least one."
            )
        check_trainer(trainer, "participants")
        self._devices = list(dict.fromkeys(map(str, devices)))
        self._trainer = trainer
        self._end_hook = None
        self._active = False

    def __enter__(self):
        if participants._inside:
            raise ValueError("participants inside participants: leave the outer one first.")
        if any(self._parts(layer) for layer in native.layers()):
            # Earlier calls belong to a step of all devices.
            mx.nd.waitall()
            native.set_active_devices(self._devices)
            participants._inside = self._active = True
        # Even if whole groups of devices are idle, so that no layer needs to know.
        if self._trainer is not None and self._has_idle(trained(self._trainer)):
            self._end_hook = before_adding_up(self._trainer, self._bring_nothing)
        return self

    def __exit__(self, kind, error, trace):
        try:
            if error is not None:
                _give_up(error)
            elif self._active:
                mx.nd.waitall()
            if self._active:
                with mx.autograd.pause():
                    for layer in native.layers():
                        self._share_running_statistics(layer)
        finally:
            if self._active:
                native.set_active_devices([])
                participants._inside = self._active = False
            if self._end_hook is not None:
                self._end_hook()
                self._end_hook = None

    def _has_idle(self, parameters):
        return any(
            str(context) not in self._devices
            for parameter in parameters
            for context in parameter.list_ctx()
        )

    def _parts(self, layer):
        """(active, idle) devices of each group of a layer's devices that has both."""
        parts = []
        for group in layer.device_groups():
            active = [device for device in group if device in self._devices]
            idle = [device for device in group if device not in active]
            if active and idle:
                parts.append((active, idle))
        return parts

    def _bring_nothing(self):
        for parameter in trained(self._trainer):
            # Not list_data(), which refuses sparse parameters.
            for data, gradient in zip(parameter._data, parameter.list_grad()):
                if str(data.context) not in self._devices:
                    # Accumulated gradients stay.
                    if parameter.grad_req != "add":
                        clear(gradient)
                    # Otherwise the Trainer raises, because there was no backward.
                    data._fresh_grad = True

    def _share_running_statistics(self, layer):
        arrays = layer.running_statistics()
        for active, idle in self._parts(layer):
            for device in idle:
                for source, target in zip(arrays.get(active[0], ()), arrays.get(device, ())):
                    source.copyto(target)


def _give_up(error):
    """Ends all calls in flight after a step has failed with an error, which the user sees instead
    of theirs. Calls that wait for devices that are no longer called would wait until the
    timeout."""
    native.give_up(f"the step was given up, as it ended in {type(error).__name__}: {error}")
    try:
        # MXNet raises the errors of calls one at a time.
        for _ in range(_MOST_ERRORS):
            try:
                mx.nd.waitall()
                break
            except mx.MXNetError:
                pass
    finally:
        native.give_up("")
