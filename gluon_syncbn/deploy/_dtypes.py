"""The dtypes of an exported net."""

import collections

import mxnet as mx
import numpy as np

from ..graph.symbols import ExportError
from ..graph.trace import last_line

DTYPES = ("float16", "float32", "float64")
# As MXNet numbers them in graphs.
_CODES = {"float32": "0", "float64": "1", "float16": "2"}


def _of_norms(graph):
    """The names of all parameters of BatchNorm."""
    norms = [node for node in graph.all_nodes() if node.op == "BatchNorm"]
    return {node.name for norm in norms for node, _ in norm.inputs[1:]}


def cast_all(graph, arrays, dtype):
    """Converts float parameters. With float16 data, those of BatchNorm become float32. Raises
    ExportError if one overflows."""
    of_norms = _of_norms(graph)
    for name, array in arrays.items():
        if np.dtype(array.dtype).kind != "f":
            continue
        target = "float32" if name in of_norms and dtype == "float16" else dtype
        arrays[name] = array.astype(target)
        values = array.asnumpy()
        if np.isfinite(values).all() and not np.isfinite(arrays[name].asnumpy()).all():
            raise ExportError(
                f"{name} has values up to {np.abs(values).max():.3g}, which {target} does not "
                "hold: leave it in its own dtype."
            )


def input_dtype(graph, symbol, arrays, inputs):
    """The dtype of the inputs: that of most weights. ExportError if it does not fit the graph."""
    of_norms = _of_norms(graph)
    floats = {n: a.dtype for n, a in arrays.items() if np.dtype(a.dtype).kind == "f"}
    weights = [np.dtype(dtype) for name, dtype in floats.items() if name not in of_norms]
    dtypes = weights or [np.dtype(dtype) for dtype in floats.values()] or [np.dtype("float32")]
    [(dtype, _)] = collections.Counter(dtypes).most_common(1)
    known = {name: array.dtype for name, array in arrays.items()}
    try:
        symbol.infer_type(**known, **dict.fromkeys(inputs, dtype))
    except mx.MXNetError as error:
        raise ExportError(
            f"The dtypes of the graph do not match ({last_line(error)}): the net fixes a dtype "
            "somewhere. Export it in the dtype that it was built for."
        ) from error
    return dtype


def write_types(graph, arrays):
    for node in graph.nodes():
        if node.name in arrays:
            array = arrays[node.name]
            node.attrs["__shape__"] = str(tuple(array.shape))
            if np.dtype(array.dtype).name in _CODES:
                node.attrs["__dtype__"] = _CODES[np.dtype(array.dtype).name]
