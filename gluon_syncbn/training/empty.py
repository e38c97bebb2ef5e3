"""Steps in which this process has no samples: it calls the layers that the others call."""

import weakref

import mxnet as mx
from mxnet import autograd

from .. import native
from ..layers import calls
from ..layers.operator import sync_batch_norm
from .trainer import before_adding_up

# The calls of the last step of each Trainer, and of the last step that had any.
_of_trainer, _last = weakref.WeakKeyDictionary(), ()


def end_step(trainer=None):
    """What was called so far belongs to the step that ends here."""
    global _last
    if calls.made:
        _last = tuple(calls.made)
        calls.made.clear()
    if trainer is not None:
        _of_trainer[trainer] = _last


before_adding_up.append(end_step)
_joined = False


def set_joined(joined, must_have_samples=False):
    """Sets whether this process contributes nothing to the layers from now on, and whether calls
    for which no process has samples are an error. Returns the old value."""
    global _joined
    before, _joined = _joined, joined
    if joined != before:
        try:
            # Calls of the last step may still be on their way to their exchanges.
            mx.nd.waitall()
        finally:
            native.set_joined(joined, must_have_samples)
    return before


def is_joined():
    return _joined


def take_part(trainer):
    """Calls the layers as in the last step of this Trainer, without samples. A process that has
    made no step calls each layer of the Trainer once."""
    layers = {layer.id: layer for layer in native.layers() if layer.open is not None}
    steps = _of_trainer.get(trainer) or [
        (key, None, True) for key, layer in layers.items() if trainer in layer.trainers()
    ]
    before = set_joined(True, must_have_samples=True)
    try:
        recorded_calls = []
        for key, node, recorded in steps:
            if key in layers and not layers[key].settings()["use_global_stats"]:
                with autograd.record() if recorded else autograd.train_mode():
                    results = _call(layers[key], node)
                recorded_calls += [results] if recorded else []
        # One after the other: MXNet may run independent operations in any order.
        for results in reversed(recorded_calls):
            for y in results:
                y.backward()
            mx.nd.waitall()
        mx.nd.waitall()
    finally:
        set_joined(before)
        calls.made.clear()


def _call(layer, node):
    """Calls a layer on each of its devices. What goes in does not count."""
    settings = {**layer.settings(), "activation": None, "inplace": False}
    del settings["center"]
    axis, results = settings["axis"], []
    arrays = layer.running_statistics()
    if not arrays:
        raise ValueError(
            f"{layer.name} has no values yet: call the net once, as in net(x), before the first "
            "step, in all processes."
        )
    for arrays_here in arrays.values():
        # Detached, as MXNet forgets arrays of a backward that calls share.
        mean, *others = (array.detach() for array in arrays_here)
        shape = [1] * max(2, axis + 1, -axis)
        shape[axis] = mean.shape[0]
        x = mx.nd.zeros(tuple(shape), ctx=mean.context, dtype=mean.dtype)
        x.attach_grad()
        gamma = mx.nd.zeros(mean.shape, ctx=mean.context, dtype=mean.dtype)
        more = {"layer": layer, "node": node, **settings}
        results.append(sync_batch_norm(mx.nd, x, gamma, gamma, mean, *others, **more))
    return results
