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
    """The dtype of the inputs: that of most weights. ExportError if no dtype fits the graph."""
    of_norms = _of_norms(graph)
    dtypes = collections.Counter(
        np.dtype(array.dtype).name
        for name, array in arrays.items()
        if name not in of_norms and np.dtype(array.dtype).kind == "f"
    )
    known = {name: array.dtype for name, array in arrays.items()}
    failure = None
    for dtype in [*(name for name, _ in dtypes.most_common()), "float32", "float64"]:
        try:
            symbol.infer_type(**known, **dict.fromkeys(inputs, np.dtype(dtype)))
            return np.dtype(dtype)
        except mx.MXNetError as error:
            failure = failure or error
    raise ExportError(
        f"The dtypes of the graph do not match ({last_line(failure)}): the net fixes a dtype "
        "somewhere. Export it in the dtype that it was built for."
    ) from failure


def write_types(graph, arrays):
    for node in graph.nodes():
        if node.name in arrays:
            array = arrays[node.name]
            node.attrs["__shape__"] = str(tuple(array.shape))
            if np.dtype(array.dtype).name in _CODES:
                node.attrs["__dtype__"] = _CODES[np.dtype(array.dtype).name]
