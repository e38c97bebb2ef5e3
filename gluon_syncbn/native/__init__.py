"""The native library: the operator, its layers, and routes to other processes."""

# ruff: noqa: F401

from ._layer import (
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
from ._routes import (
    KVSTORE_BITS,
    THIRDS,
    Connection,
    InFlight,
    Key,
    Route,
    Segment,
    packed_size,
    push_for_others,
    restore_layout,
    store_operations,
    view,
    wait_for,
)
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
from .threads import warn
