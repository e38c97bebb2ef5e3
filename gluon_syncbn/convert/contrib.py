"""Replaces the SyncBatchNorm of MXNet's contrib package with ours."""

from __future__ import annotations

import sys
from typing import Callable

from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm

from ..layers.batch_norm import SyncBatchNorm


def replace_contrib() -> Callable[[], None]:
    """Replaces ``mxnet.gluon.contrib.nn.SyncBatchNorm`` with :class:`gluon_syncbn.SyncBatchNorm`.

    Scripts that use contrib's layer, such as gluoncv's, then train with ours unchanged. Ours takes
    the same keyword arguments. Positional arguments follow the order of ``nn.BatchNorm``, not
    contrib's. Modules that have already imported contrib's class by name get ours too.

    This does not reach existing layers, the operator ``mx.sym.contrib.SyncBatchNorm``
    (`convert_sync_batchnorm` converts both in a net), or other references to contrib's class, such
    as default arguments and subclasses. Building a layer from one of those raises a TypeError.

    Returns
    -------
    callable
        Undoes it. Modules that imported the name in between keep ours.
    """
    package = __name__.partition(".")[0]
    found = [
        (vars(module), name)
        for key, module in list(sys.modules.items())
        if hasattr(module, "__dict__") and key.partition(".")[0] != package
        for name, value in list(vars(module).items())
        if value is ContribSyncBatchNorm
    ]

    def put(kind: type) -> None:
        for names, name in found:
            names[name] = kind

    put(SyncBatchNorm)
    return lambda: put(ContribSyncBatchNorm)
