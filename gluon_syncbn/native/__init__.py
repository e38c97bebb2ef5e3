"""The native library: the operator, its layers, and routes to other processes."""

# ruff: noqa: F401

from .layer import (
    HAS_ONEDNN,
    OP_TYPE,
    PROCESS,
    Layer,
    cuda_kernels,
    give_up,
    layers,
    note_training,
    set_active_devices,
    set_joined,
    spans_processes,
    trains,
    waiting,
    waits,
)
from .routes import (
    KVSTORE_BITS,
    LIMBS,
    ArrayWait,
    Connection,
    Key,
    Segment,
    packed_size,
    restore_layout,
    view,
)
from .threads import warn
