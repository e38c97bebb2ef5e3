"""Makes MXNet keep the order of our operator's running statistics with ``static_shape``.

There MXNet prepares the engine's operations of a graph, which list running statistics as read, not
as written: nothing waits for the new values, and no error reaches them. It does not prepare what
uses data of the graph. So the running statistics are passed as data.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable, Iterable

from .. import native
from .symbols import OUR_OPERATOR, Graph

if TYPE_CHECKING:
    import mxnet as mx


def with_statistics_as_data(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``CachedOp.__init__``."""

    @functools.wraps(init)
    def init_in_order(
        self: mx.nd.CachedOp, sym: mx.sym.Symbol, flags: Iterable[tuple[str, Any]] = ()
    ) -> None:
        values = dict(flags)
        parameters = values.get("param_indices", ())
        if values.get("static_shape") and parameters and native.OP_TYPE in sym.tojson():
            names = sym.list_inputs()
            ours = _running_statistics(sym)
            values["param_indices"] = [i for i in parameters if names[i] not in ours]
            data = (i for i in parameters if names[i] in ours)
            values["data_indices"] = [*values.get("data_indices", ()), *data]
        init(self, sym, list(values.items()))

    return init_in_order


def _running_statistics(sym: mx.sym.Symbol) -> set[str]:
    """The names of our operators' auxiliary states in a symbol."""
    used = {
        source.name
        for node in Graph(sym).nodes()
        if node.operator in OUR_OPERATOR
        for source, _ in node.inputs
    }
    return used.intersection(sym.list_auxiliary_states())
