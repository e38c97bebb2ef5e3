"""Steps in which some devices have no data."""

import mxnet as mx
from mxnet.context import Context

from . import _native


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
    running statistics of the others, so that all stay equal, bit for bit. Where all devices take
    part it does nothing, and otherwise it waits for what was called before and within it.

    Parameters
    ----------
    devices : list of Context or of NDArray
        Those that take part: every layer is called on each of them, and on no others. In place of
        a device an array on it may be given.
    trainer : mxnet.gluon.Trainer, optional
        Takes zeros for the gradients of devices without data, which else would be those of an
        earlier step. ``step`` has to be called within.

    Raises
    ------
    ValueError
        Without devices, and inside another one.
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
        self._devices = list(dict.fromkeys(map(str, devices)))
        self._trainer = trainer
        self._active = False

    def __enter__(self):
        if participants._inside:
            raise ValueError("participants inside participants: leave the outer one first.")
        if all(set(layer.devices) <= set(self._devices) for layer in _native.layers()):
            return self
        # Who has been called already, takes part in a step of all.
        mx.nd.waitall()
        _native.set_present(self._devices)
        participants._inside = self._active = True
        if self._trainer is not None:
            add_up = self._trainer._allreduce_grads

            def add_up_what_there_is():
                self._clear_gradients()
                add_up()

            self._trainer._allreduce_grads = add_up_what_there_is
        return self

    def __exit__(self, kind, error, trace):
        if not self._active:
            return
        try:
            mx.nd.waitall()
        finally:
            _native.set_present([])
            participants._inside = self._active = False
            if self._trainer is not None:
                del self._trainer._allreduce_grads
        if kind is None:
            for layer in _native.layers():
                self._share_running_statistics(layer)

    def _clear_gradients(self):
        for parameter in self._trainer._params:
            if parameter.grad_req == "null":
                continue
            for data, gradient in zip(parameter.list_data(), parameter.list_grad()):
                if str(data.context) not in self._devices:
                    gradient[:] = 0
                    # What the Trainer looks at to find devices that were forgotten.
                    data._fresh_grad = True

    def _share_running_statistics(self, layer):
        block = layer.block()
        if block is None:
            return
        arrays = block._running_statistics()
        for group in layer.groups():
            have = [device for device in group if device in self._devices]
            for device in group:
                if have and device not in have:
                    for source, target in zip(arrays[have[0]], arrays[device]):
                        source.copyto(target)


def _as_list(devices):
    return devices if isinstance(devices, (list, tuple)) else [devices]
