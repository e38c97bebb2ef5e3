"""The native library: the operator, its layers, and channels to other processes."""

from .channel import PARTS, Connection, call_within, clear_lines, view, watch
from .layer import (
    HAS_ONEDNN,
    OP_TYPE,
    PROCESS,
    Layer,
    cuda_kernels,
    give_up,
    layers,
    set_absent,
    set_present,
    waiting,
    warn,
)

__all__ = [
    "HAS_ONEDNN",
    "OP_TYPE",
    "PARTS",
    "PROCESS",
    "Connection",
    "Layer",
    "call_within",
    "clear_lines",
    "cuda_kernels",
    "give_up",
    "layers",
    "set_absent",
    "set_present",
    "view",
    "waiting",
    "warn",
    "watch",
]
