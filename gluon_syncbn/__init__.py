"""Synchronized batch normalization for Apache MXNet Gluon."""

# First, as it explains what is wrong where MXNet or the native library cannot be loaded.
from . import _native  # noqa: F401  isort:skip
from . import distributed
from ._version import __version__
from .block import SyncBatchNorm, VirtualBatchNorm
from .convert import SyncBatchNormReLU, convert_sync_batchnorm, revert_sync_batchnorm
from .group import SyncGroup, set_default_group
from .participants import participants

__all__ = [
    "SyncBatchNorm",
    "SyncBatchNormReLU",
    "SyncGroup",
    "VirtualBatchNorm",
    "convert_sync_batchnorm",
    "distributed",
    "participants",
    "revert_sync_batchnorm",
    "set_default_group",
    "__version__",
]
