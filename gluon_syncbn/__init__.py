"""Synchronized batch normalization for Apache MXNet Gluon.

`SyncBatchNorm` replaces ``nn.BatchNorm``; `convert_sync_batchnorm` puts it into existing nets.
`SyncGroup` says which devices and processes take part, and `distributed` connects processes.
`export` writes a net for stock MXNet and ONNX. The command line, ``gluon-syncbn`` or ``python -m
gluon_syncbn``, starts processes and works with files.
"""

import importlib
import os
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


def _is_run():
    """Whether Python imports this package to run a command line: `gluon-syncbn`, `python -m
    gluon_syncbn` or `python -m gluon_syncbn.launch`. These report problems with MXNet themselves.
    And the launcher must not import MXNet, which would turn it into a server or scheduler if the
    environment says so."""
    importer = sys._getframe(1).f_back
    while importer and importer.f_code.co_filename.startswith("<frozen importlib"):
        importer = importer.f_back
    if importer is None:
        return False
    # Python's `-m` is the module runpy.
    program = os.path.basename(importer.f_code.co_filename)
    return importer.f_globals.get("__name__") == "runpy" or program == "gluon-syncbn"


if not _is_run():
    # First: it explains what is wrong if MXNet or the native library cannot be loaded.
    from . import native  # noqa: F401  isort:skip
    from .convert.contrib import replace_contrib
    from .convert.conversion import convert_sync_batchnorm, revert_sync_batchnorm
    from .convert.freezing import freeze, unfreeze
    from .deploy.export import Exported, ExportError, FileError, export
    from .graph import hooks, modules, static_shape, unknown_shapes  # noqa: F401  MXNet hooks.
    from .groups.group import SyncGroup, set_default_group
    from .layers.batch_norm import SyncBatchNorm, SyncBatchNormReLU
    from .layers.virtual import VirtualBatchNorm
    from .training.participants import participants
    from .training.precise import precise_statistics

    # It bounds mx.kv.create, which a worker calls before anything of ours.
    if "DMLC_ROLE" in os.environ:
        from . import distributed


def __getattr__(name):
    # What joins processes is imported where it is used.
    if name == "distributed":
        return importlib.import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
