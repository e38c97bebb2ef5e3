"""The part of a layer that outlives its block, and parameters that know their layers."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Callable, Collection, Iterable, Sequence

import numpy as np
from mxnet.gluon.parameter import Parameter

from .. import native
from ..groups.group import SyncGroup, default_group, follow_default_group, stop_following
from ..trainers import last_gradients, trained

if TYPE_CHECKING:
    import mxnet as mx
    from mxnet.gluon import Trainer
    from numpy.typing import DTypeLike

    from .batch_norm import SyncBatchNorm


class _ObservedParameter(Parameter):
    """A parameter that notifies its layers when its contexts change. It keeps the layers alive: a
    graph may use the parameter after the block is gone."""

    _layers: set[SyncedLayer]

    def _init_impl(self, data: mx.nd.NDArray, ctx_list: list[mx.Context]) -> None:
        super()._init_impl(data, ctx_list)
        for layer in self._layers:
            layer.configure()

    def reset_ctx(self, ctx: mx.Context | list[mx.Context]) -> None:
        # Calls under way synchronize on the old devices. An earlier error is raised here, as a copy
        # of an array that holds one would never be filled.
        native.finish_calls("Parameters were moved to other contexts.")
        super().reset_ctx(ctx)

    def cast(self, dtype: DTypeLike) -> None:
        self._raise_errors()
        super().cast(dtype)
        for layer in self._layers:
            layer.configure()

    def _raise_errors(self) -> None:
        for array in self._data or ():
            array.wait_to_read()

    def __getstate__(self) -> dict[str, Any]:
        # The layers of a copy or an unpickled net register themselves.
        return {**self.__dict__, "_layers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _layers=set())

    @classmethod
    def attach(cls, parameter: Parameter, layer: SyncedLayer) -> None:
        # The object stays the same, as others share it.
        if not isinstance(parameter, cls):
            parameter.__class__ = cls
            parameter._layers = set()
        parameter._layers.add(layer)

    @staticmethod
    def detach(parameter: _ObservedParameter, layer: SyncedLayer) -> None:
        parameter._layers.discard(layer)
        # Others may share it.
        if not parameter._layers:
            del parameter._layers
            parameter.__class__ = Parameter


class SyncedLayer(native.Layer):
    """The part of a layer that outlives its block: its parameters, and which devices synchronize.

    The block and its running statistics keep it alive. So a graph made from the block works as long
    as the parameters exist.
    """

    # Weak references, until `enter` and after `leave`.
    _parameters: Sequence[Callable[[], Parameter | None]] = (lambda: None,) * 4
    _block: Callable[[], SyncBatchNorm | None] = staticmethod(lambda: None)
    # What `written` returns, if the arrays are those of a Module.
    _executors: Callable[..., dict[str, list[mx.nd.NDArray]]] | None = None
    _settings: dict[str, Any]

    @classmethod
    def of(cls, block: SyncBatchNorm) -> SyncedLayer:
        """The layer of a block. One that was reverted gets its own again: other processes may have
        kept theirs, and the count of its calls must agree."""
        layer = _left.pop(block, None) or cls(block.name)
        layer.enter(block)
        return layer

    def enter(self, block: SyncBatchNorm) -> None:
        parameters = [block.running_mean, block.running_var, block.gamma, block.beta]
        if block._kwargs["momentum"] is None:
            parameters.append(block.num_batches_tracked)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._block = weakref.ref(block)
        self.settings()
        for parameter in parameters[:2]:
            _ObservedParameter.attach(parameter, self)
        self.join(block._own_group, block._num_devices)

    def leave(self, block: SyncBatchNorm) -> None:
        """The block no longer synchronizes."""
        stop_following(self)
        self.forget()
        # Graphs made before may still use this layer.
        self.settings()
        del self._block
        for parameter in self._parameters[:2]:
            if isinstance(parameter(), _ObservedParameter):
                _ObservedParameter.detach(parameter(), self)
        del self._parameters
        _left[block] = self

    def join(self, group: SyncGroup | None, num_devices: int | None) -> None:
        """Synchronizes with the devices of the group; None: of the default group."""
        self._own_group, self._num_devices = group, num_devices
        if group is None:
            follow_default_group(self)
        self.configure()

    @property
    def group(self) -> SyncGroup:
        return self._own_group or default_group()

    def contexts(self) -> list[mx.Context]:
        """The contexts of the parameters, or of their deferred initialization; none before that."""
        parameter = self._parameters[0]()
        if parameter is None or parameter._data is None and not parameter._deferred_init:
            return []
        return parameter.list_ctx()

    def all_devices(self) -> list[str]:
        return list(self.group.devices or dict.fromkeys(map(str, self.contexts())))

    def device_groups(self) -> list[list[str]]:
        """The devices of this process, as lists of those that synchronize."""
        devices = self.all_devices()
        size = min(self.group.group_size or len(devices), len(devices))
        return [devices[i : i + size] for i in range(0, len(devices), size or 1)]

    def configure(self) -> None:
        if self._parameters[0]() is not None:
            self.dtype = np.dtype(self._parameters[0]().dtype).name
        self.group._configure(self, self.all_devices(), self._num_devices)

    def settings(self) -> dict[str, Any]:
        """What all processes must give the block alike; of a block that is gone, what it had
        last."""
        block = self._block()
        if block is not None:
            self._settings = {**block._settings(), "center": block.beta._differentiable}
        return self._settings

    def trainers(self) -> set[Trainer]:
        """The Trainers of its parameters."""
        parameters = (parameter() for parameter in self._parameters)
        return {p._trainer for p in parameters if p is not None and p._trainer is not None}

    def fail(self, text: str) -> None:
        self.group._fail(text)

    def running_statistics(self) -> dict[str, tuple[mx.nd.NDArray, ...]]:
        mean, variance, _, _, *count = (parameter() for parameter in self._parameters)
        return _by_device([mean, variance, *count], Parameter.list_data)

    def last_written(
        self, active: Collection[str]
    ) -> tuple[mx.nd.NDArray | None, mx.nd.NDArray | None]:
        mean, _, *trained = (parameter() for parameter in self._parameters[:4])
        data = mean and mean._data
        if not data:
            return None, None
        on = (i for i, array in enumerate(data) if not active or str(array.context) in active)
        first = next(on, 0)
        gradients = next((p._grad for p in trained if p is not None and p._grad), None)
        return data[first], gradients and gradients[first]

    @property
    def is_written(self) -> bool:
        return self._executors is None

    def written(self) -> dict[str, list[mx.nd.NDArray]]:
        if self._executors is not None:
            return self._executors()
        mean, _, *affine = (parameter() for parameter in self._parameters[:4])
        written = {str(array.context): [array] for array in (mean and mean._data) or ()}
        own = [gradient for p in affine if p is not None for gradient in p._grad or ()]
        # Without gamma and beta, an error that skips a backward here shows in the Trainer's.
        of_trainers = (last_gradients(trainer._params) for trainer in self.trainers())
        for gradient in own or itertools.chain(*of_trainers):
            if str(gradient.context) in written:
                written[str(gradient.context)].append(gradient)
        return written

    def trained(self) -> list[mx.nd.NDArray]:
        if self._executors is not None:
            return [array for arrays in self._executors(all=True).values() for array in arrays]
        parameters = [p for trainer in self.trainers() for p in trained(trainer._params)]
        return [array for p in parameters for array in (*p._data, *(p._grad or ()))]


def watch(trainer: Trainer) -> None:
    """Probes what the calls of a Trainer's step write. Later probes are queued behind the Trainer's
    operations and the calls of the next step, which may wait for another device.

    An error goes backward through what was called before. So one array is enough of each graph,
    and of all layers that were called by themselves.
    """
    callers = native.callers()
    graphs = [caller for caller in callers if not isinstance(caller, native.Layer)]
    alone = callers.difference(graphs, *(graph.layers for graph in graphs))
    for layer in sorted(alone, key=lambda layer: layer.id):
        if len(layer.devices) > 1 and trainer in layer.trainers():
            layer.watch_written()
            break
    for graph in graphs:
        gradients = last_gradients(p for p in graph.parameters if p._trainer is trainer)
        layer = next((layer for layer in graph.layers if len(layer.devices) > 1), None)
        for gradient in gradients if layer else ():
            layer.watch(str(gradient.context), gradient)


# {block: its layer}, for blocks that were reverted.
_left: weakref.WeakKeyDictionary[SyncBatchNorm, SyncedLayer] = weakref.WeakKeyDictionary()


def _by_device(
    parameters: Sequence[Parameter | None],
    arrays_of: Callable[[Parameter], Iterable[mx.nd.NDArray]],
) -> dict[str, tuple[mx.nd.NDArray, ...]]:
    """{device: arrays}; empty before the parameters have values, or after they are gone."""
    # An interrupted initialization leaves some parameters without values.
    if any(parameter is None or parameter._data is None for parameter in parameters):
        return {}
    arrays = zip(*map(arrays_of, parameters))
    return {str(first.context): (first, *others) for first, *others in arrays}
