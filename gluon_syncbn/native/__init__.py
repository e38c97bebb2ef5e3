"""The native library: the operator, its layers, and routes to other processes."""

# ruff: noqa: F401

from .failures import (
    begin_training,
    callers,
    check_step,
    finish_calls,
    give_up,
    raise_failure,
    recover,
    wait_unheard,
)
from .layer import (
    HAS_ONEDNN,
    OP_TYPE,
    PROCESS,
    Layer,
    end_step,
    exchanges,
    layers,
    set_active_devices,
    set_joined,
    spans_processes,
    take_part,
)
from .routes import (
    KVSTORE_BITS,
    THIRDS,
    Connection,
    InFlight,
    Key,
    Segment,
    packed_size,
    push_for_others,
    restore_layout,
    store_operations,
    view,
    wait_for,
)
from .threads import warn
