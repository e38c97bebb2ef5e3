"""A hook before a Trainer adds up gradients."""

import mxnet as mx
from mxnet.gluon import Trainer

_NAME = "_allreduce_grads"


def check_trainer(trainer, who):
    """Raises TypeError for anything but a Trainer or None."""
    if trainer is not None and not isinstance(trainer, Trainer):
        raise TypeError(
            f"{who} got trainer={trainer!r}: give the mxnet.gluon.Trainer whose step follows, or "
            "leave it out."
        )


def trained(trainer):
    """The parameters that have gradients and are initialized."""
    return [p for p in trainer._params if p.grad_req != "null" and p._data is not None]


def adds_here_alone(trainer):
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
        and type(trainer)._allreduce_grads is Trainer._allreduce_grads
        # Horovod's DistributedOptimizer adds them.
        and not type(trainer._optimizer).__module__.startswith("horovod.")
    )


def clear(gradient):
    """Sets a gradient to zero. (Parameter.zero_grad() raises for all of MXNet's NumPy arrays.)"""
    gradient = gradient.as_nd_ndarray()
    mx.nd.zeros_like(gradient, out=gradient)


def before_adding_up(trainer, function):
    """Makes a Trainer call function() before it adds gradients over devices and processes. Returns
    a function that removes the hook; several can be removed in any order."""
    hooks = getattr(vars(trainer).get(_NAME), "hooks", None)
    if hooks is None:
        hooks = []
        add_up = getattr(trainer, _NAME)

        def call_hooks_and_add_up():
            for hook in hooks:
                hook()
            add_up()

        call_hooks_and_add_up.hooks = hooks
        # None, unless somebody else has put a function of theirs there.
        call_hooks_and_add_up.replaced = vars(trainer).get(_NAME)
        setattr(trainer, _NAME, call_hooks_and_add_up)
    hooks.append(function)

    def end():
        hooks.remove(function)
        if not hooks:
            replaced = vars(trainer).pop(_NAME).replaced
            if replaced is not None:
                setattr(trainer, _NAME, replaced)

    return end
