"""Synchronized batch normalization for Apache MXNet Gluon."""

import sys

from ._version import __version__

try:
    # First, as it explains what is wrong where MXNet or the native library cannot be loaded.
    from . import _native  # noqa: F401  isort:skip
    from . import distributed
    from .block import SyncBatchNorm, VirtualBatchNorm
    from .convert import SyncBatchNormReLU, convert_sync_batchnorm, revert_sync_batchnorm
    from .deploy import Exported, ExportError, FileError, export
    from .group import SyncGroup, set_default_group
    from .participants import participants
except ImportError:
    # The command line, for which Python imports this first, says by itself what is wrong.
    if sys.argv[0] != "-m" or sys.argv[1:2] not in (
        [command] for command in ("doctor", "export", "convert", "inspect")
    ):
        raise

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
    "participants",
    "revert_sync_batchnorm",
    "set_default_group",
    "__version__",
]
