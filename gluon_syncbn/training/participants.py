"""Steps in which some devices or processes have no data, or which may be interrupted."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Iterable, Sequence

import mxnet as mx
from mxnet.context import Context
from mxnet.gluon import Block, Parameter, Trainer

from .. import native
from ..graph.blocks import check_block
from ..graph.compiled import layers_of
from ..trainers import (
    check_trainer,
    clear,
    fresh_gradients,
    set_fresh_gradients,
    trained,
    trainers,
)
from . import precise
from .steps import all_layers, end_step, take_part

if TYPE_CHECKING:
    from ..layers.synced_layer import SyncedLayer


class participants:
    """A context within which only some of the devices are active: the others have no data.

    ::

        for x, label in loader:
            used = devices[: len(x)]                # the last batch may have fewer samples
            with sbn.participants(used):
                xs = gluon.utils.split_and_load(x, used, even_split=False)
                ...                                 # record, backward
                trainer.step(len(x))

    The statistics are those of the samples that there are. On exit, idle devices get the running
    statistics of the active ones, so that all stay equal, bit for bit. This waits for all calls
    before and within it, unless all devices of the layers are active. Layers that have none of the
    devices are left alone.

    A Trainer's step, within the context or after it, adds zeros as the gradients of idle
    devices, which would otherwise be those of an earlier step; with ``grad_req="add"``, the
    gradients accumulated so far. A device that has gone backward since counts as usual.

    A process in which no device has data gives ``[]``, if the layers share statistics with other
    processes: it does not call the net, but steps the Trainer::

            with sbn.participants(used, trainer):
                if used:
                    ...                             # record, backward
                trainer.step(samples)               # those of all processes

    Here the layers take part without samples: they repeat the exchanges of this Trainer's last step
    in this process, all its passes in their order. Before the Trainer's first step they make one
    exchange each in forward and in backward, so a net that calls a layer several times, leaves some
    out, or calls them in another order than it makes them, needs a first step with samples in each
    process. The others get the statistics and gradients of their samples, and all get the same
    running statistics.

    A step ends where its Trainer steps. It begins after the step before it, of any Trainer, or
    where a later `participants` begins. Of a Trainer's last two steps the one with fewer exchanges
    is repeated, as the other may include passes that all processes gave up.

    A process that has samples for the net, but none for some of its blocks, such as a head, says so
    between the call of what comes before them and the Trainer's step::

            with autograd.record():
                features = backbone(x)
                ...                             # losses of other heads
            with sbn.participants([], trainer, head):
                ...                             # backward
                trainer.step(samples)

    The layers of `head` take part, and its gradients are zero, as above. This context may be within
    another. It neither waits for other blocks nor changes what counts for them.

    A step that ends in an error, such as Ctrl-C in a notebook after the net was called for one
    device and before the next, is abandoned: calls that wait for others fail at once, the error
    propagates, and the next step starts clean.

    Parameters
    ----------
    devices : list of Context or of NDArray
        The active ones: call every layer on each of them, and on no others. An array may stand for
        its device. ``[]``: this process has no samples.
    trainer : mxnet.gluon.Trainer, optional
        Needed for ``[]`` if there are several Trainers, and for a Trainer that was made before
        gluon_syncbn was imported. Make Trainers before the context. A subclass with a ``step`` of
        its own must call the Trainer's ``step`` or ``allreduce_grads``.
    blocks : Block or list of Block, optional
        For ``[]``: those that this process has no samples for. By default the whole net.

    Raises
    ------
    ValueError
        If there are no devices and no other processes, or a device on which no layer or Trainer has
        parameters, or for `blocks` and devices, or within another `participants` without `blocks`.
        For ``[]`` within :func:`precise_statistics`.
    TypeError
        For anything but contexts or arrays as `devices`, or a Trainer as `trainer`.
    MXNetError
        On waiting for a result, if a layer is called on another device. For ``[]``, at once, if no
        process has samples, or another one does not arrive.

    References
    ----------
    PyTorch has ``torch.distributed.algorithms.Join`` for the same between processes; here that is
    :class:`gluon_syncbn.distributed.join`.
    """

    _inside = False
    # The contexts that left devices idle, until the next step: one, and later ones for blocks.
    _idle: tuple[participants, ...] = ()

    def __init__(
        self,
        devices: Sequence[Context | mx.nd.NDArray],
        trainer: Trainer | None = None,
        blocks: Block | Sequence[Block] | None = None,
    ) -> None:
        devices = devices if isinstance(devices, (list, tuple)) else [devices]
        devices = [getattr(device, "context", device) for device in devices]
        if not all(isinstance(device, Context) for device in devices):
            raise TypeError(
                f"participants got {devices!r}: give the contexts that have data, or arrays on "
                "them."
            )
        check_trainer(trainer, "participants")
        # What this context leaves to the next one must keep no Trainer alive, and so no store.
        self._trainer = None if devices else weakref.ref(_trainer_of_empty_step(trainer))
        self._layers: set[int] | None = None
        self._parameters: weakref.WeakSet[Parameter] | None = None
        if blocks is not None:
            self._layers, self._parameters = _of_blocks(blocks, devices)
        self._devices = list(dict.fromkeys(map(str, devices)))
        self._active = False
        # {parameter: whether its gradient was new on each device, as MXNet knows it}, before the
        # context or the last step in it
        self._was_fresh: weakref.WeakKeyDictionary[Parameter, list[bool]] = (
            weakref.WeakKeyDictionary()
        )

    def __enter__(self) -> participants:
        if self._layers is not None:
            participants._idle = (*participants._idle, self)
            self._begin_idle()
            return self
        if participants._inside:
            raise ValueError("participants inside participants: leave the outer one first.")
        held = [
            _devices_of(parameter)
            for trainer in trainers()
            for parameter in trainer._params
            if parameter.grad_req != "null"
        ]
        self._check_devices(held)
        for trainer in trainers():
            clear_idle(trainer)  # as gradients so far belong to the last context
        # Even if whole groups of devices are idle, so that no layer needs to know.
        is_divided = not self._devices or any(map(self._divided, held))
        participants._idle = (self,) if is_divided else ()
        end_step()
        if is_divided:
            self._begin_idle()
        if any(self._parts(layer) for layer in all_layers()):
            # Earlier calls belong to a step of all devices.
            mx.nd.waitall()
            native.set_active_devices(self._devices)
            self._active = True
        participants._inside = True
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None:
                native.give_up(error)
            elif self._active:
                mx.nd.waitall()
            if self._active:
                with mx.autograd.pause():
                    for layer in all_layers():
                        self._share_running_statistics(layer)
        finally:
            if self._layers is None:
                participants._inside = False
            if self._active:
                native.set_active_devices([])
                self._active = False

    def _begin_idle(self) -> None:
        for trainer in trainers():
            self._watch(trainer)
        if self._devices:
            return
        layers = all_layers()
        if self._layers is None:
            mx.nd.waitall()
        else:
            # Not for all: backward calls of other blocks may wait for a process that waits for this
            # one here.
            written = [arrays for each in layers for arrays in each.running_statistics().values()]
            for arrays in (*written, *(each._data or () for each in self._parameters)):
                for array in arrays:
                    array.wait_to_read()
            layers = [layer for layer in layers if layer.id in self._layers]
        take_part(self._trainer(), layers)

    def _check_devices(self, held: Iterable[Sequence[str]]) -> None:
        groups = [group for layer in all_layers() for group in layer.device_groups()]
        known = {device for devices in (*held, *groups) for device in devices}
        unknown = [device for device in self._devices if device not in known]
        if known and unknown:
            raise ValueError(
                f"participants got {', '.join(unknown)}, where no layer or Trainer has parameters: "
                f"give some of {', '.join(sorted(known))}."
            )

    def _divided(self, devices: Sequence[str]) -> tuple[list[str], list[str]] | None:
        """(active, idle) devices, or None if there are not both."""
        active = [device for device in devices if device in self._devices]
        idle = [device for device in devices if device not in self._devices]
        return (active, idle) if active and idle else None

    def _parts(self, layer: SyncedLayer) -> list[tuple[list[str], list[str]]]:
        """(active, idle) devices of each group of a layer's devices that has both."""
        return list(filter(None, map(self._divided, layer.device_groups())))

    def _trained(self, trainer: Trainer) -> list[Parameter]:
        """The Trainer's parameters, or those of the blocks."""
        own = self._parameters
        return [each for each in trained(trainer._params) if own is None or each in own]

    def _watch(self, trainer: Trainer) -> None:
        """From now on, only gradients of later backward passes are new."""
        for parameter in self._trained(trainer):
            is_divided = not self._devices or self._divided(_devices_of(parameter))
            if is_divided and parameter not in self._was_fresh:
                self._was_fresh[parameter] = fresh_gradients(parameter)
                set_fresh_gradients(parameter, [False] * len(parameter._data))

    def _bring_nothing(self, trainer: Trainer) -> None:
        """Lets idle devices contribute nothing, where active ones, or other processes, have new
        gradients."""
        for parameter in self._trained(trainer):
            was_fresh = self._was_fresh.pop(parameter, ())
            # Not list_data(), which refuses sparse parameters.
            arrays = list(zip(_devices_of(parameter), parameter._data, parameter.list_grad()))
            active = [data._fresh_grad for device, data, _ in arrays if device in self._devices]
            if not (any(active) or was_fresh and not self._devices):
                now = fresh_gradients(parameter)
                set_fresh_gradients(parameter, [a or b for a, b in zip(now, was_fresh)])
                continue
            for device, data, gradient in arrays:
                if device not in self._devices and not data._fresh_grad:
                    # Accumulated gradients stay.
                    if parameter.grad_req != "add":
                        clear(gradient)
                    # Otherwise the Trainer raises, because there was no backward.
                    data._fresh_grad = True

    def _share_running_statistics(self, layer: SyncedLayer) -> None:
        arrays = layer.running_statistics()
        for active, idle in self._parts(layer):
            for device in idle:
                for source, target in zip(arrays.get(active[0], ()), arrays.get(device, ())):
                    source.copyto(target)


def _trainer_of_empty_step(trainer: Trainer | None) -> Trainer:
    """The Trainer of a step in which this process has no samples."""
    if not native.spans_processes():
        raise ValueError(
            "participants got no devices, and no layer shares statistics with other processes, "
            "which could have samples: give the contexts that have data, or leave the step out."
        )
    if precise.measured:
        text = (
            "participants got no devices within precise_statistics, where no step of a Trainer "
            "tells this process which exchanges the others make: leave the batch out in all "
            "processes, or, if some have more batches, loop over "
            "gluon_syncbn.distributed.join(loader)."
        )
        # The others call the net.
        for layer in all_layers():
            layer.fail(text)
        raise ValueError(text)
    several = [trainer] if trainer else trainers()
    if len(several) != 1:
        raise ValueError(
            f"participants got no devices, and there are {len(several)} Trainers: give the one "
            "whose step follows, as in participants([], trainer)."
        )
    return several[0]


def _of_blocks(
    blocks: Block | Sequence[Block], devices: Sequence[Context]
) -> tuple[set[int], weakref.WeakSet[Parameter]]:
    """The numbers of the layers of blocks, and their parameters."""
    if devices:
        raise ValueError(
            "participants got devices and blocks: give [] as devices for blocks that this process "
            "has no samples for, and leave blocks out otherwise."
        )
    blocks = blocks if isinstance(blocks, (list, tuple)) else [blocks]
    for block in blocks:
        check_block(block, "participants")
    parameters = (each for block in blocks for each in block.collect_params().values())
    layers = {layer.id for block in blocks for layer in layers_of(block)}
    return layers, weakref.WeakSet(parameters)


def _devices_of(parameter: Parameter) -> list[str]:
    """The devices of a parameter, also if its initialization is deferred."""
    known = parameter._data is not None or parameter._deferred_init
    return [str(context) for context in parameter.list_ctx()] if known else []


def clear_idle(trainer: Trainer) -> None:
    """Lets idle devices bring nothing to a Trainer's step."""
    # Those for blocks first, as the other one takes what they clear for a backward.
    for context in reversed(participants._idle):
        context._bring_nothing(trainer)


def watch_again(trainer: Trainer) -> None:
    """The Trainer has made its step."""
    # Blocks are without samples in one step.
    participants._idle = tuple(
        context
        for context in participants._idle
        if context._layers is None or context._trainer() is not trainer
    )
    if participants._inside:
        for context in participants._idle:
            context._watch(trainer)
