"""Synchronized batch normalization for Apache MXNet Gluon.

`SyncBatchNorm` replaces ``nn.BatchNorm``; `convert_sync_batchnorm` puts it into existing nets.
`SyncGroup` says which devices and processes take part, and `distributed` connects processes.
`export` writes a net for stock MXNet and ONNX. The command line, ``gluon-syncbn`` or ``python -m
gluon_syncbn``, starts processes and works with files.
"""

# ruff: noqa: F403, F405

import importlib
import sys

from ._version import __version__

__all__ = [
    "ExportError",
    "Exported",
    "FileError",
    "SyncBatchNorm",
    "SyncBatchNormReLU",
    "SyncGroup",
    "VirtualBatchNorm",
    "convert_sync_batchnorm",
    "distributed",
    "export",
    "freeze",
    "participants",
    "precise_statistics",
    "replace_contrib",
    "revert_sync_batchnorm",
    "set_default_group",
    "unfreeze",
    "__version__",
]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".public", __name__), name)


# "-m" is the name of the program while Python looks for `gluon_syncbn` or `gluon_syncbn.launch` to
# run it. The launcher must not import MXNet, which would turn it into a server or scheduler if the
# environment says so, and the doctor reports problems with it. For a user's module that a command
# imports, the names above come later.
if sys.argv[:1] != ["-m"]:
    from .public import *
