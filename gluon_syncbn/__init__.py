"""Synchronized batch normalization for Apache MXNet Gluon."""

from ._version import __version__
from .block import SyncBatchNorm
from .group import SyncGroup

__all__ = ["SyncBatchNorm", "SyncGroup", "__version__"]
