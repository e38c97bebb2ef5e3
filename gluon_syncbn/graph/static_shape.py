"""Makes MXNet keep the order of our operator's running statistics with ``static_shape``.

There MXNet prepares the engine's operations of a graph, which list running statistics as read, not
as written: nothing waits for the new values, and no error reaches them. It does not prepare what
uses data of the graph. So the running statistics are passed as data.
"""

import functools

from .. import native
from .symbols import OUR_OPERATOR, Graph


def with_statistics_as_data(init):
    """Wraps ``CachedOp.__init__``."""

    @functools.wraps(init)
    def init_in_order(self, sym, flags=()):
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


def _running_statistics(sym):
    """The names of our operators' auxiliary states in a symbol."""
    used = {
        source.name
        for node in Graph(sym).nodes()
        if node.operator in OUR_OPERATOR
        for source, _ in node.inputs
    }
    return used.intersection(sym.list_auxiliary_states())
