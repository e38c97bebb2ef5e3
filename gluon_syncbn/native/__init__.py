"""The native library: the operator, its layers, and channels to other processes."""

from .channel import (
    KVSTORE_BITS,
    LIMBS,
    Connection,
    FixedPoint,
    call_within,
    clear_channels,
    packed_size,
    view,
    watch,
)
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
    "KVSTORE_BITS",
    "LIMBS",
    "OP_TYPE",
    "PROCESS",
    "Connection",
    "FixedPoint",
    "Layer",
    "call_within",
    "clear_channels",
    "cuda_kernels",
    "give_up",
    "layers",
    "packed_size",
    "set_active_devices",
    "set_joined",
    "view",
    "waiting",
    "warn",
    "watch",
]
