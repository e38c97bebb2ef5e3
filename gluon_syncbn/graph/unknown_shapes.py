"""Lets graphs with our operator have inputs whose shape or dtype only other nodes tell.

MXNet infers both in several passes, and a stock operator leaves what is unknown to a later one. A
custom operator has to answer with a shape, layout copies need a dtype, and infer nothing from their
output. So where inference fails, MXNet infers again with the stock operator in our place.
"""

import functools

import mxnet as mx
from mxnet.ndarray.ndarray import _DTYPE_NP_TO_MX

from .. import native
from .symbols import OUR_OPERATOR, ROLES, Graph, Node, settings_of, taken_apart

# The errors of src/operator/call/operator.cc and of MXNet's SwapAxis.
_UNKNOWN = ("does not know the shape of its data", "Input must have specified type")


def inferring_by_stock(infer):
    """Wraps ``Symbol._infer_shape_impl`` and ``_infer_type_impl``."""

    @functools.wraps(infer)
    def inferring(symbol, partial, *args, **kwargs):
        try:
            found = infer(symbol, partial, *args, **kwargs)
            if not partial and found[0] is not None or native.OP_TYPE not in symbol.tojson():
                return found
        except mx.MXNetError as error:
            if not any(text in str(error) for text in _UNKNOWN):
                raise
        stock = _with_stock(symbol)
        found = infer(stock, partial, *args, **kwargs)
        if found[0] is None:
            return found
        named = _named(stock, found)
        arguments, auxiliary = symbol.list_arguments(), symbol.list_auxiliary_states()
        outputs = found[1][: len(symbol.list_outputs())]
        return [named[name] for name in arguments], outputs, [named[name] for name in auxiliary]

    return inferring


def _named(symbol, found):
    """{name of an input: what was inferred}"""
    names = symbol.list_arguments() + symbol.list_auxiliary_states()
    return dict(zip(names, found[0] + found[2]))


def _with_stock(symbol):
    """The symbol with the stock operator. It has the same inputs and outputs, and more outputs."""
    graph = Graph(symbol)

    def change(node):
        if node.is_layout_copy:
            return node.inputs[0]
        if node.operator not in OUR_OPERATOR:
            return None
        x, residual, parameters = taken_apart(node)
        node.attrs = {"axis": str(settings_of(node).axis), "output_mean_var": "True"}
        node.op, node.inputs = "BatchNorm", [x, *parameters[: len(ROLES)]]
        # The stock operator has no num_batches_tracked.
        graph.heads += parameters[len(ROLES) :]
        if residual is None:
            return None
        return Node("elemwise_add", f"{node.name}_add", inputs=[(node, 0), residual]), 0

    graph.rewrite(change)
    return graph.symbol_like(symbol)


def binding_by_stock(simple_bind):
    """Wraps ``Symbol.simple_bind``."""

    @functools.wraps(simple_bind)
    def bind(symbol, ctx, grad_req="write", type_dict=None, *args, **kwargs):
        try:
            return simple_bind(symbol, ctx, grad_req, type_dict, *args, **kwargs)
        except RuntimeError as error:
            if native.OP_TYPE not in symbol.tojson():
                raise
            try:
                symbol = _with_attributes(symbol, type_dict or {}, kwargs)
            except mx.MXNetError:
                raise error from None
        return simple_bind(symbol, ctx, grad_req, type_dict, *args, **kwargs)

    return bind


def _with_attributes(symbol, types, shapes):
    """The symbol, in which variables have the shapes and dtypes that can be inferred. They stay
    known where the executor is reshaped."""
    graph = Graph(symbol)
    given = {name: shapes[name] for name in graph.variables() & shapes.keys()}
    for attribute, found, known in (
        ("__shape__", symbol.infer_shape_partial(**given), given),
        ("__dtype__", symbol.infer_type_partial(**types), types),
    ):
        values = _named(symbol, found)
        for node in graph.nodes():
            if node.op == "null" and node.name not in known and values[node.name]:
                value = values[node.name]
                node.attrs[attribute] = str(_DTYPE_NP_TO_MX.get(value, value))
    return graph.symbol_like(symbol)
