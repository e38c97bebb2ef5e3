"""Puts SyncBatchNorm where programs take the layer of MXNet's contrib package."""

import sys

from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm

from ..layers.batch_norm import SyncBatchNorm


def replace_contrib():
    """Lets ``mxnet.gluon.contrib.nn.SyncBatchNorm`` be :class:`gluon_syncbn.SyncBatchNorm`.

    Scripts that take contrib's layer, such as gluoncv's, then train with ours as they are. Ours
    takes all its arguments by name; by position they come in another order, that of
    ``nn.BatchNorm``. Modules that imported contrib's class by name before get ours too.

    Not reached: layers that are built already and the operator ``mx.sym.contrib.SyncBatchNorm``
    (`convert_sync_batchnorm` converts both in a net), and what else holds contrib's class, such as
    a default argument or a subclass. Building a layer from that raises a TypeError.

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

    def put(kind):
        for names, name in found:
            names[name] = kind

    put(SyncBatchNorm)
    return lambda: put(ContribSyncBatchNorm)
