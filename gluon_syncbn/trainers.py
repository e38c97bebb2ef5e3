"""The Trainers of this process, and functions that they call."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Iterable, Iterator, Sequence

import mxnet as mx
from mxnet.gluon import Parameter, Trainer

_trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()


def check_trainer(trainer: Any, who: str) -> None:
    """Raises TypeError for anything but a Trainer or None."""
    if trainer is None:
        return
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"{who} got a {type(trainer).__name__} as trainer: give the mxnet.gluon.Trainer whose "
            "step follows, or leave it out."
        )
    # It may have been made before this module was imported.
    _trainers.add(trainer)


def trainers() -> list[Trainer]:
    return list(_trainers)


def trained(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """Those that have gradients and are initialized, one by one."""
    return (p for p in parameters if p.grad_req != "null" and p._data is not None)


def last_gradients(parameters: Iterable[Parameter]) -> Sequence[mx.nd.NDArray]:
    """Of the first of the trained, on each device: what a backward writes last, if their order is
    that of a forward."""
    return next((p.list_grad() for p in trained(parameters) if p._grad_stype == "default"), ())


def fresh_gradients(parameter: Parameter) -> list[bool]:
    """Whether the gradient of each device is new, as MXNet knows it: a Trainer raises if not."""
    return [data._fresh_grad for data in parameter._data]


def set_fresh_gradients(parameter: Parameter, flags: Iterable[bool]) -> None:
    for data, is_fresh in zip(parameter._data, flags):
        data._fresh_grad = is_fresh


def adds_here_alone(trainer: Trainer) -> bool:
    """Whether a Trainer adds gradients over the devices of this process alone, and nobody seems to
    add them over processes."""
    # None: the loop adds. A Trainer whose construction failed has no store either.
    store = vars(trainer).get("_kvstore_params", {}).get("kvstore")
    if isinstance(store, str):
        # Third parties may have registered stores of their own.
        is_local = "dist" not in store and store.lower() not in mx.kv.KVStoreBase.kv_registry
    else:
        # MXNet makes a local store for any name that it does not know, such as "horovod".
        is_local = getattr(store, "num_workers", None) == 1
    return (
        is_local
        # Neither a subclass nor a function in the Trainer itself adds them.
        and getattr(trainer._allreduce_grads, "__func__", None) is Trainer._allreduce_grads
        # Horovod's DistributedOptimizer adds them.
        and not type(trainer._optimizer).__module__.startswith("horovod.")
    )


# The functions of a KVStore that take a key.
OF_KEYS = ("push", "pull", "pushpull", "init", "broadcast")


class _StoreOfTrainer:
    """A distributed KVStore with keys of its own for one of several Trainers. Each Trainer numbers
    its keys from 0, and MXNet would wait indefinitely for a key that comes again."""

    def __init__(self, store: mx.kv.KVStore, first: int) -> None:
        self._store, self._first = store, first

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._store, name)
        if name not in OF_KEYS:
            return function
        return lambda key, *args, **kwargs: function(self._first + key, *args, **kwargs)


# {Trainer: its first key, behind those of Trainers that were made before it on its store}
_first_keys: weakref.WeakKeyDictionary[Trainer, int] = weakref.WeakKeyDictionary()


def number_keys(trainer: Trainer) -> None:
    store = trainer._kvstore_params["kvstore"]
    if "dist" in getattr(store, "type", ""):
        _first_keys[trainer] = getattr(store, "_next_key", 0)
        store._next_key = _first_keys[trainer] + len(trainer._params)


def use_own_keys(trainer: Trainer) -> None:
    """Raises ValueError if the server would run the optimizer of the last Trainer for all keys."""
    first = _first_keys.get(trainer)
    if first and trainer._update_on_kvstore:
        trainer._kv_initialized = False
        raise ValueError(
            "Several Trainers are on one KVStore, whose server runs one optimizer: make them with "
            "update_on_kvstore=False."
        )
    if first:
        trainer._kvstore = _StoreOfTrainer(trainer._kvstore, first)


def clear(gradient: mx.nd.NDArray) -> None:
    """Sets a gradient to zero. (Parameter.zero_grad() raises for all of MXNet's NumPy arrays.)"""
    gradient = gradient.as_nd_ndarray()
    with mx.autograd.pause():
        mx.nd.zeros_like(gradient, out=gradient)


def calling(
    method: Callable[..., Any],
    before: Iterable[Callable[[Trainer], None]] = (),
    after: Iterable[Callable[[Trainer], None]] = (),
) -> Callable[..., Any]:
    """Wraps a function of Trainer."""

    @functools.wraps(method)
    def calling(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        for function in before:
            function(trainer)
        result = method(trainer, *args, **kwargs)
        _trainers.add(trainer)
        for function in after:
            function(trainer)
        return result

    return calling
