"""The values of a net's parameters."""

import logging

import mxnet as mx

from ..graph.symbols import ExportError
from ..graph.trace import numbered

_log = logging.getLogger("gluon_syncbn")


def used_parameters(parameters, graph, inputs):
    """{name: parameter} of the graph, whose variables get their parameters' names back."""
    by_variable = {}
    for name, same in parameters.items():
        for number, parameter in enumerate(same):
            key = numbered(name, number) if len(same) > 1 else name
            by_variable[key] = name, parameter
    used = {}
    for node in graph.nodes():
        if node.op != "null" or node.name in inputs:
            continue
        # The graph of a SymbolBlock has the name without a number.
        name, parameter = by_variable.get(node.name, (node.name, None))
        if name not in parameters:
            raise ExportError(
                f"{name} in the graph is neither an input nor a parameter of the net."
            )
        if name in used or parameter is None:
            raise ExportError(
                f"Two parameters have the name {name}, and a graph needs unique names: give each "
                "block its own prefix."
            )
        node.name = name
        used[name] = parameter
    return used


def values_of(used):
    """{name: copy of the value on the CPU} of parameters {name: parameter}."""
    unset, arrays, uneven = [], {}, []
    for name, parameter in used.items():
        if parameter._data is None:
            unset.append(name)
            continue
        arrays[name], equal = _value(parameter)
        if not equal:
            uneven.append(name)
    if unset:
        raise ValueError(
            f"{len(unset)} parameters have no values yet, {unset[0]} among them: call "
            "net.initialize() or load_parameters(), and run the net once, which sets their shapes."
        )
    if uneven:
        _log.warning(
            "export: %d parameters, %s among them, differ between contexts, as statistics without "
            "synchronization do; their mean is written.",
            len(uneven),
            uneven[0],
        )
    return arrays


def _value(parameter):
    """(a copy on the CPU, whether all contexts agree)."""
    if parameter._stype != "default":
        return parameter._reduce().as_nd_ndarray(), True
    arrays = [array.copyto(mx.cpu()).as_nd_ndarray() for array in parameter.list_data()]
    first = arrays[0].asnumpy().tobytes()
    if all(array.asnumpy().tobytes() == first for array in arrays[1:]):
        return arrays[0], True
    return parameter._reduce().as_nd_ndarray(), False
