"""Steps in which some devices have no data, or which may be interrupted."""

import mxnet as mx
from mxnet.context import Context

from .. import native
from .trainer import before_adding_up, check_trainer, clear, trained

_MOST_ERRORS = 10000


class participants:
    """Within it, only some of the devices take part in steps: the others have no data.

    ::

        for x, label in loader:
            used = devices[: len(x)]                # the last batch may have fewer samples
            with sbn.participants(used, trainer):
                xs = gluon.utils.split_and_load(x, used, even_split=False)
                ...                                 # record, backward
                trainer.step(len(x))

    The statistics are those of the samples that there are. At the end devices without data get the
    running statistics of the others, so that all stay equal, bit for bit. It waits for what was
    called before and within it, but where all devices of the layers take part, for nothing. Layers
    that have none of the devices are left alone.

    A step that ends in an error, such as Ctrl-C in a notebook after the net was called for one
    device and before it was for the next, is given up: calls that wait for others fail at once, the
    error comes out, and the next step begins anew.

    Parameters
    ----------
    devices : list of Context or of NDArray
        Those that take part: every layer is called on each of them, and on no others. In place of
        a device an array on it may be given.
    trainer : mxnet.gluon.Trainer, optional
        Takes zeros for the gradients of devices without data, which else would be those of an
        earlier step; with ``grad_req="add"`` what was added up before. ``step`` has to be called
        within.

    Raises
    ------
    ValueError
        Without devices, and within another `participants`.
    TypeError
        For anything but a Trainer as `trainer`.
    MXNetError
        Where a result is waited for, when a layer is called on another device.

    References
    ----------
    PyTorch has ``torch.distributed.algorithms.Join`` for the same between processes; here that is
    :class:`gluon_syncbn.distributed.join`.
    """

    _inside = False

    def __init__(self, devices, trainer=None):
        devices = [getattr(device, "context", device) for device in _as_list(devices)]
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
            # Who has been called already, takes part in a step of all.
            mx.nd.waitall()
            native.set_active_devices(self._devices)
            participants._inside = self._active = True
        # Also where whole groups of devices are absent, and no layer has to know.
        if self._trainer is not None and self._absent(trained(self._trainer)):
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

    def _absent(self, parameters):
        """Whether some of their devices have no data."""
        return any(
            str(context) not in self._devices
            for parameter in parameters
            for context in parameter.list_ctx()
        )

    def _parts(self, layer):
        """Of each group of a layer's devices of which some take part and some do not: both."""
        parts = []
        for group in layer.device_groups():
            present = [device for device in group if device in self._devices]
            absent = [device for device in group if device not in present]
            if present and absent:
                parts.append((present, absent))
        return parts

    def _bring_nothing(self):
        for parameter in trained(self._trainer):
            # Not list_data(), which refuses what is sparse.
            for data, gradient in zip(parameter._data, parameter.list_grad()):
                if str(data.context) not in self._devices:
                    # What was added up before stays.
                    if parameter.grad_req != "add":
                        clear(gradient)
                    # What the Trainer looks at to find devices that were forgotten.
                    data._fresh_grad = True

    def _share_running_statistics(self, layer):
        arrays = layer.running_statistics()
        for present, absent in self._parts(layer):
            for device in absent:
                for source, target in zip(arrays.get(present[0], ()), arrays.get(device, ())):
                    source.copyto(target)


def _give_up(error):
    """Lets all calls end that are under way when a step ends in an error, which is the user's to
    see: those that wait for devices that are not called any more would wait for long."""
    native.give_up(f"the step was given up, as it ended in {type(error).__name__}: {error}")
    try:
        # MXNet tells one error at a time, of one call each.
        for _ in range(_MOST_ERRORS):
            try:
                mx.nd.waitall()
                break
            except mx.MXNetError:
                pass
    finally:
        native.give_up("")


def _as_list(devices):
    return devices if isinstance(devices, (list, tuple)) else [devices]
