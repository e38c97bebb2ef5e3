"""Compares what an export writes with the net."""

import collections
import logging

import mxnet as mx
import numpy as np

from ..graph.symbols import ExportError, Graph, add_layout_copies, is_random
from ..graph.trace import last_line
from ..layers.operator import is_bfloat16

_log = logging.getLogger("gluon_syncbn")

# The largest difference between outputs, relative to their largest value, by the least exact dtype
# of the parameters. In float16 each layer rounds to 11 bits.
TOLERANCE = {"float16": 3e-2, "float32": 1e-4, "float64": 1e-4}
REPORT = "This is a fault of the export: please report the net."
# Input sizes to try if none is given.
_BATCH, _SIDES = 4, (32, 224, 64, 128, 300, 28)


def evaluate(symbol, arrays, inputs):
    """The outputs of a symbol in inference on the CPU. arrays: {name: NDArray}, inputs: {name:
    NumPy array}; the arrays are copied, because MXNet overwrites a fixed gamma."""
    graph = add_layout_copies(Graph(symbol))
    for node in graph.nodes():
        node.attrs.pop("__dtype__", None)
    symbol = graph.symbol()
    # MXNet's NumPy operators need its NumPy shapes.
    is_np = any(node.op.startswith("_np") for node in graph.nodes()) or mx.util.is_np_shape()
    values = {name: array.copyto(mx.cpu()) for name, array in arrays.items()}
    with mx.autograd.pause(train_mode=False), mx.util.np_shape(is_np), mx.cpu():
        values.update({name: mx.nd.array(x, dtype=x.dtype) for name, x in inputs.items()})
        outputs = mx.nd.CachedOp(symbol)(*(values[name] for name in symbol.list_inputs()))
        return [y.asnumpy() for y in (outputs if isinstance(outputs, list) else [outputs])]


def tolerance(arrays):
    """The TOLERANCE of {name: NDArray}."""
    names = {np.dtype(array.dtype).name for array in arrays.values()}
    return max((TOLERANCE[name] for name in names & TOLERANCE.keys()), default=TOLERANCE["float32"])


def outputs_of_net(run, symbol, values, dtype, shapes, of_file=None):
    """(random inputs, the net's outputs for them). of_file: the dtype of a file's inputs, to which
    they are rounded. Raises ExportError, whose text is the reason, if they cannot be compared."""
    if any(map(is_random, Graph(symbol).all_nodes())):
        raise ExportError("it draws random numbers in inference")
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.standard_normal(shape).astype(of_file or dtype).astype(dtype)
        for name, shape in shapes.items()
    }
    try:
        outputs = run(values, inputs)
    except Exception as error:  # The net's code may raise anything.
        raise ExportError(
            f"it does not run on random data ({type(error).__name__}: {last_line(error)})"
        ) from error
    if not all(np.isfinite(y).all() for y in outputs):
        raise ExportError("its own output is not finite (look for negative variances)")
    return inputs, outputs


def rounded(values, arrays):
    """(values, dtype of the inputs) with which the net computes what a file with these arrays must
    give: the values are rounded to the file's dtypes, then converted to the net's own dtype.
    (float16 becomes float32, because MXNet's CPU operators lack float16.)"""
    own = collections.Counter(np.dtype(array.dtype).name for array in values.values())
    dtype = "float64" if 2 * own["float64"] > len(values) else "float32"
    result = {}
    for name, array in values.items():
        kind = array.dtype if np.dtype(array.dtype) in (np.float32, np.float64) else dtype
        result[name] = _as_float(_as_float(array, arrays.get(name, array).dtype), kind)
    return result, np.dtype(dtype)


def check(run, values, symbol, arrays, shapes, title, advice=REPORT):
    """The largest difference between a symbol's outputs and a net's, relative to the largest value.
    None, with a warning, if they cannot be compared. Raises ExportError if it exceeds TOLERANCE.

    run(values, inputs): the outputs of the net with {name: NDArray} as parameters; values: its
    own; arrays: those of the symbol; shapes: {name of an input: shape}; advice: what the error
    says.
    """
    own, dtype = rounded(values, arrays)
    try:
        if not shapes:
            raise ExportError("the shape of its input is not known: give input_shape")
        inputs, wanted = outputs_of_net(run, symbol, own, dtype, shapes)
    except ExportError as why:
        _log.warning("export: what was written is not compared with %s, as %s.", title, why)
        return None
    used = {name: inputs[name] for name in inputs if name in symbol.list_inputs()}
    exact = {
        name: _as_float(array, own[name].dtype if name in own else dtype)
        for name, array in arrays.items()
    }
    try:
        outputs = evaluate(symbol, exact, used)
    except mx.MXNetError as error:
        raise ExportError(
            f"Stock MXNet cannot run what was exported of {title} ({last_line(error)}). No file "
            "was written."
        ) from error
    errors = differences(outputs, wanted)
    for number, difference in enumerate(errors):
        if not difference <= tolerance(arrays):
            raise ExportError(
                f"Output {number} of the exported graph differs from that of {title} by "
                f"{difference:.2g} of the largest value, on random inputs of shape "
                f"{', '.join(map(str, shapes.values()))}. {advice} No file was written."
            )
    return max(errors)


def differences(outputs, wanted):
    """The largest difference of each output, relative to its largest value; infinite if shapes
    differ, NaN if an output is not finite."""
    if [y.shape for y in outputs] != [y.shape for y in wanted]:
        return [np.inf] * len(wanted)
    return [_difference(*map(np.float64, pair)) for pair in zip(outputs, wanted)]


def _difference(output, wanted):
    largest = np.abs(wanted).max(initial=0) or 1
    return float(np.abs(output - wanted).max(initial=0) / largest)


def _as_float(array, dtype):
    """A float array in another dtype, and others as they are."""
    is_float = np.dtype(array.dtype).kind == "f" or is_bfloat16(array.dtype)
    return array.astype(dtype) if is_float else array


def likely_shapes(symbol, arrays, inputs):
    """{name of an input: a shape} with which a graph works, found by trial; {} if none is found."""
    known = {name: array.shape for name, array in arrays.items()}
    sizes = dict.fromkeys(n for name in symbol.list_inputs() for n in known.get(name, ())[:2][::-1])
    for side in _SIDES:
        for size in list(sizes)[:4]:
            for spatial in (2, 0, 1, 3):
                for shape in ((size, *[side] * spatial), (*[side] * spatial, size)):
                    shapes = dict.fromkeys(inputs, (_BATCH, *shape))
                    try:
                        if all(map(_whole, symbol.infer_shape_partial(**known, **shapes)[1])):
                            return shapes
                    except mx.MXNetError:
                        pass
    return {}


def _whole(shape):
    return bool(shape) and all(n > 0 for n in shape)
