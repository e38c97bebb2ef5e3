"""Compares what an export writes with the net."""

import collections
import logging

import mxnet as mx
import numpy as np

from ..graph.symbols import ExportError, Graph, add_layout_copies, is_random
from ..graph.trace import last_line
from ..layers.operator import is_bfloat16

_log = logging.getLogger("gluon_syncbn")

# Relative to an output's largest value. A net that amplifies rounding may differ by AMPLIFIED times
# as much as its own output changes when its parameters change by a rounding error.
TOLERANCE, AMPLIFIED = 1e-5, 10
_PERTURBED = 3
# Small inputs are drawn several times, so that a relu cuts off some value.
_DRAWS, _VALUES = 8, 4096
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


def random_inputs(shapes, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


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
    None, with a warning, if they cannot be compared. Raises ExportError if they differ too much.

    run(values, inputs): the outputs of the net with {name: NDArray} as parameters; values: its
    own; arrays: those of the symbol; shapes: {name of an input: shape}.
    """
    own, dtype = rounded(values, arrays)
    floats = [a.dtype for a in arrays.values() if np.dtype(a.dtype).kind == "f"]
    epsilon = max((float(np.finfo(each).eps) for each in floats), default=0)
    arrays = {
        name: _as_float(array, own[name].dtype if name in own else dtype)
        for name, array in arrays.items()
    }
    why = None
    if any(map(is_random, Graph(symbol).all_nodes())):
        why = "it draws random numbers in inference"
    elif not shapes:
        why = "the shape of its input is not known: give input_shape"
    count = max(1, min(_DRAWS, _VALUES // sum(map(np.prod, shapes.values())))) if shapes else 0
    worst = 0.0
    for seed in range(0 if why else count):
        inputs = random_inputs(shapes, dtype, seed)
        try:
            wanted = run(own, inputs)
        except Exception as error:  # The net's code may raise anything.
            why = f"it does not run on random data ({type(error).__name__}: {last_line(error)})"
            break
        used = {name: inputs[name] for name in inputs if name in symbol.list_inputs()}
        negative = negative_variances(values)
        if negative and not all(np.isfinite(y).all() for y in wanted):
            why = f"its own output is not finite: {', '.join(negative)} has a value below zero"
            break
        try:
            outputs = evaluate(symbol, arrays, used)
        except mx.MXNetError as error:
            raise ExportError(
                f"Stock MXNet cannot run what was exported of {title} ({last_line(error)}). No "
                "file was written."
            ) from error
        errors = differences(outputs, wanted)
        if not max(errors) <= TOLERANCE:
            changes = _changes(run, own, inputs, wanted, epsilon)
            for number, error in enumerate(errors):
                if not (error <= TOLERANCE or error <= AMPLIFIED * changes[number]):
                    raise ExportError(
                        f"Output {number} of the exported graph differs from that of {title} by "
                        f"{error:.2g} of the largest value, on random inputs of shape "
                        f"{', '.join(map(str, shapes.values()))}. {advice} No file was written."
                    )
        worst = max(worst, *errors)
    if why:
        _log.warning("export: what was written is not compared with %s, as %s.", title, why)
        return None
    return worst


def negative_variances(values):
    """The names of the running variances that have a value below zero."""
    return [
        name
        for name, array in values.items()
        if name.endswith(("running_var", "moving_var")) and (array.asnumpy() < 0).any()
    ]


def _changes(run, values, inputs, wanted, epsilon):
    """How much a net's outputs change when each parameter changes by up to epsilon times its
    value."""

    def changed(array, rng):
        if np.dtype(array.dtype).kind != "f":
            return array
        factors = 1 + epsilon * rng.uniform(-1, 1, array.shape)
        return mx.nd.array(array.asnumpy() * factors, dtype=array.dtype)

    outputs = [
        run({name: changed(array, rng) for name, array in values.items()}, inputs)
        for rng in map(np.random.default_rng, range(_PERTURBED))
    ]
    return np.max([differences(each, wanted) for each in outputs], axis=0)


def differences(outputs, wanted):
    """The largest difference of each output, relative to its largest value; infinite if shapes
    differ. Equal infinities and NaN count as no difference."""
    if [y.shape for y in outputs] != [y.shape for y in wanted]:
        return [np.inf] * len(wanted)
    return [_difference(*map(np.float64, pair)) for pair in zip(outputs, wanted)]


def _difference(output, wanted):
    unequal = (output != wanted) & ~(np.isnan(output) & np.isnan(wanted))
    if not unequal.any():
        return 0.0
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0) or 1
    error = float(np.abs(output - wanted)[unequal].max() / largest)
    return np.inf if np.isnan(error) else error


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
