"""What the package replaces in MXNet, and adds to the process, when it is imported.

docs/design.md lists hooks that are made later. Functions of classes are replaced in the class: one
stored in an object would be shared by its copies, and others replace those of a single Trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import partial
from typing import Any, Callable, Iterable, Iterator

import mxnet as mx
from mxnet.gluon import HybridBlock, Trainer
from mxnet.module.executor_group import DataParallelExecutorGroup
from mxnet.symbol import Symbol

from . import trainers
from .distributed.join import bring_nothing
from .graph import compiled, modules, static_shape
from .layers import synced_layer
from .native import failures, library, waits
from .supervision import exit, limits
from .training import participants, steps

# Operators whose values decide the shape of the output: a call waits for the inputs.
_DYNAMIC = ("_contrib_boolean_mask", "_npi_bincount", "_npi_delete", "_npi_unique", "_npx_nonzero")


def _handles(names: Iterable[str]) -> Iterator[int]:
    for name in names:
        handle = mx.base.OpHandle()
        # Old releases lack some.
        if mx.base._LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)) == 0:
            yield handle.value


_dynamic = set(_handles(_DYNAMIC))


def _inputs_if_waited_for(operator: Any, count: Any, inputs: Any, *_: Any) -> Any:
    return inputs[: count.value] if operator.value in _dynamic else None


# Functions of MXNet by which Python waits, reads and saves, with the arrays that they read. They
# note that they wait, and raise the error of a failed step.
_WAITS: list[tuple[Any, str, Callable[..., Any]]] = [
    (mx.base._LIB, name, partial(failures.waiting, arrays=arrays))
    for name, arrays in (
        ("MXNDArrayWaitToRead", lambda array: [array]),
        ("MXNDArrayWaitToWrite", lambda array: [array]),
        ("MXNDArraySyncCopyToCPU", lambda array, *_: [array]),
        ("MXNDArraySaveRawBytes", lambda array, *_: [array]),
        ("MXNDArrayWaitAll", lambda: []),
        ("MXImperativeInvokeEx", _inputs_if_waited_for),
    )
]
_SAVE = partial(
    failures.waiting, arrays=lambda _file, _count, arrays, *_: list(arrays), then_writes=True
)
_WAITS += [
    (mx.base._LIB, "MXNDArraySave", _SAVE),
    (mx.base._LIB, "MXNDArraySyncCopyFromCPU", waits.noting),
]
# What a Trainer's step does before it adds gradients over devices and processes, in this order.
_adding = partial(
    trainers.calling,
    before=[
        failures.check_step,  # A step that has failed raises here.
        bring_nothing,
        synced_layer.watch,
        steps.end_step,
        participants.clear_idle,
    ],
)
_HOOKS: list[tuple[Any, str, Callable[..., Any]]] = [
    # Fuses the graphs of marked blocks, traces again what a copy of a net, Block.load or `freeze`
    # has changed, and numbers the nodes of a layer that has several.
    (HybridBlock, "_get_graph", compiled.compiling),
    (Symbol, "bind", compiled.numbering),
    (Symbol, "simple_bind", compiled.numbering),
    # Refuses op hooks where devices of one process synchronize, and raises a failed step's error.
    (HybridBlock, "_call_cached_op", compiled.calling),
    # Gives the nodes of a Module layers, and raises a failed step's error.
    (DataParallelExecutorGroup, "__init__", modules.making_layers),
    (DataParallelExecutorGroup, "forward", modules.noting_training),
    # An exception that leaves autograd.record() gives the step up.
    (mx.autograd._RecordingStateScope, "__exit__", failures.leaving),
    # With static_shape, our running statistics are data.
    (mx.nd.CachedOp, "__init__", static_shape.with_statistics_as_data),
    # Each Trainer has keys of its own in a distributed store: MXNet numbers those of all from 0.
    (Trainer, "__init__", partial(trainers.calling, after=[trainers.number_keys])),
    (Trainer, "_init_kvstore", partial(trainers.calling, after=[trainers.use_own_keys])),
    (Trainer, "step", _adding),
    (Trainer, "allreduce_grads", _adding),
    (Trainer, "_update", partial(trainers.calling, after=[participants.watch_again])),
    # A limit; a second distributed store, which would never return, is refused.
    (mx.kv, "create", limits.creating),
]
if "HOROVOD_RANK" in os.environ:
    with contextlib.suppress(ImportError):
        from horovod.common.basics import HorovodBasics

        _HOOKS.append((HorovodBasics, "init", limits.initializing))
        for name in ("_add_process_set_impl", "_remove_process_set_impl"):
            _HOOKS.append((HorovodBasics, name, partial(waits.noting, for_others=True)))


def install() -> None:
    exit.install()
    # Under the naive engine no call waits for another. A copy into an array, with which others
    # wait, comes between the calls of two devices.
    for owner, name, wrap in ([] if library.NAIVE_ENGINE else _WAITS) + _HOOKS:
        setattr(owner, name, wrap(getattr(owner, name)))
