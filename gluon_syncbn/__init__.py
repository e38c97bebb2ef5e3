"""Synchronized batch normalization for Apache MXNet Gluon.

`SyncBatchNorm` replaces ``nn.BatchNorm``; `convert_sync_batchnorm` puts it into existing nets.
`SyncGroup` says which devices and processes take part, and `distributed` connects processes.
`export` writes a net for stock MXNet and ONNX. The command line, ``gluon-syncbn`` or ``python -m
gluon_syncbn``, starts processes and works with files.
"""

# ruff: noqa: F403, F405

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import mxnet_compat

from ._version import __version__

__all__ = [
    "ExportError",
    "Exported",
    "FileError",
    "SyncBatchNorm",
    "SyncBatchNormReLU",
    "SyncGroup",
    "UnevenBatches",
    "VirtualBatchNorm",
    "convert_sync_batchnorm",
    "distributed",
    "export",
    "freeze",
    "participants",
    "precise_statistics",
    "recover",
    "replace_contrib",
    "revert_sync_batchnorm",
    "set_default_group",
    "unfreeze",
    "__version__",
]


def _load() -> ModuleType:
    return importlib.import_module("._public", __name__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_load(), name)


# While `python -m` looks for the module that it runs, the program's name is "-m". The launcher must
# not import MXNet, which would turn it into a server or scheduler if the environment says so, and
# the doctor reports problems with it. A user's package that is run so gets the whole package when
# it uses it, or imports MXNet.
if sys.argv[0] == "-m" and "mxnet" not in sys.modules:
    mxnet_compat.after_mxnet.append(_load)
else:
    from ._public import *
