"""The native library: the operator, its layers, and channels to other processes."""

from .channel import LIMBS, Connection, call_within, clear_channels, view, watch
from .layer import (
    HAS_ONEDNN,
    OP_TYPE,
    PROCESS,
    Layer,
    cuda_kernels,
    give_up,
    layers,
    set_active_devices,
    set_joined,
    waiting,
    warn,
)

__all__ = [
    "HAS_ONEDNN",
    "LIMBS",
    "OP_TYPE",
    "PROCESS",
    "Connection",
    "Layer",
    "call_within",
    "clear_channels",
    "cuda_kernels",
    "give_up",
    "layers",
    "set_active_devices",
    "set_joined",
    "view",
    "waiting",
    "warn",
    "watch",
]
