"""Training steps: where one ends, how one that raised is given up, and how a process without
samples takes part in one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Iterable, cast

import mxnet as mx
from mxnet.gluon import Trainer

from .. import native

if TYPE_CHECKING:
    from ..layers.synced_layer import SyncedLayer

# Of a call outside graphs that have several nodes of its layer.
_NO_NODE = -1
# The numbers of the last two steps of each Trainer.
_of_trainer: weakref.WeakKeyDictionary[Trainer, tuple[int, ...]] = weakref.WeakKeyDictionary()


def all_layers() -> list[SyncedLayer]:
    """Those of this process."""
    return cast("list[SyncedLayer]", native.layers())


def end_step(trainer: Trainer | None = None) -> None:
    """Ends a step, which was the Trainer's, or is none to make again."""
    if not native.spans_processes():
        return
    number = native.end_step([number for two in _of_trainer.values() for number in two])
    if trainer is not None:
        _of_trainer[trainer] = (*_of_trainer.get(trainer, ()), number)[-2:]


def take_part(trainer: Trainer, layers: Iterable[SyncedLayer]) -> None:
    """Makes the exchanges of these layers in a step of the Trainer, without samples. None of their
    forward calls may be in progress."""
    native.begin_training()
    layers_by_id = {
        layer.id: layer
        for layer in layers
        if layer.open is not None and not layer.settings()["use_global_stats"]
    }
    exchanges = _exchanges(trainer, layers_by_id)
    running = {key: _Running(layers_by_id[key]) for key, *_ in exchanges}
    for key, backward, node, ago in exchanges:
        running[key].take_part(backward, node, ago)
    for each in running.values():
        each.write()


def _exchanges(
    trainer: Trainer, layers: dict[int, SyncedLayer]
) -> list[tuple[int, bool, int, int]]:
    """Those of the Trainer's last step, or once each layer's if there was none: (id of the layer,
    whether it is a backward, number of the node, forward calls since that of the backward)."""
    two = [
        [one for one in native.exchanges(number) if one[0] in layers]
        for number in reversed(_of_trainer.get(trainer, ()))
    ]
    # The longer may begin with a step that all processes left before the Trainer's.
    found = min(filter(None, two), key=len, default=None)
    if found is None:
        each = [key for key, layer in layers.items() if trainer in layer.trainers()]
        found = [(key, False, _NO_NODE, 0) for key in each]
        found += [(key, True, _NO_NODE, 1) for key in reversed(each)]
    return found


class _Running:
    """The running statistics of a layer, on the host."""

    def __init__(self, layer: SyncedLayer) -> None:
        self._layer = layer
        self._arrays = list(layer.running_statistics().values())
        if not self._arrays:
            raise ValueError(
                f"{layer.name} has no values yet: call the net once, as in net(x), before the "
                "first step, in all processes."
            )
        self._values = [array.asnumpy() for array in self._arrays[0]]

    def take_part(self, backward: bool, node: int, ago: int) -> None:
        settings = self._layer.settings()
        momentum, unbiased = settings["momentum"], settings["unbiased"]
        arguments = backward, node, ago, self._values, momentum, unbiased
        error, interrupted = native.take_part(self._layer, *arguments)
        if interrupted:
            # Python has raised it in a function that C++ had called.
            raise KeyboardInterrupt
        if error:
            native.raise_failure()

    def write(self) -> None:
        with mx.autograd.pause():
            for arrays in self._arrays:
                for array, value in zip(arrays, self._values):
                    array[:] = value
