"""The names that the package offers. Importing this imports MXNet and installs the hooks."""

# ruff: noqa: F401

# First: it explains what is wrong if MXNet or the native library cannot be loaded.
from . import native  # isort:skip
from . import _hooks, distributed
from .convert.contrib import replace_contrib
from .convert.conversion import convert_sync_batchnorm, revert_sync_batchnorm
from .convert.freezing import freeze, unfreeze
from .deploy.export import Exported, ExportError, FileError, export
from .groups.group import SyncGroup, set_default_group
from .layers.batch_norm import SyncBatchNorm, SyncBatchNormReLU
from .layers.virtual import VirtualBatchNorm
from .native import recover
from .training.estimator import UnevenBatches
from .training.participants import participants
from .training.precise import precise_statistics

_hooks.install()
