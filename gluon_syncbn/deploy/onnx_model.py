"""Converts a stock graph to ONNX with MXNet's converters, and works around their faults."""

import contextlib
import functools
import io
import re

import mxnet as mx
import numpy as np

from ..graph.symbols import ExportError, Node, is_true
from ..graph.trace import last_line
from .check import differences, random_inputs, rounded

# MXNet's converters write operators of version 13. BatchNormalization of 15 also takes float16 data
# with float32 parameters. From 18 on other operators differ.
OPSET = 15
_IR_VERSION = 8
_CONVERTERS = (13, 12)
_INSTALL = "pip install 'gluon_syncbn[onnx]' (onnx and onnxruntime)"
# MXNet's NumPy operators of common nets, which have no converter, and equivalents with one.
_SAME = {
    "_npi_add": "broadcast_add",
    "_npi_multiply": "broadcast_mul",
    "_npi_mean": "mean",
    "_npx_relu": "relu",
    "_npx_sigmoid": "sigmoid",
}
_ADAPTIVE_POOLING = "_contrib_AdaptiveAvgPooling2D"
# Relative to the largest value of an output. In float16 each layer rounds its output to 11 bits.
TOLERANCE = {"float16": 3e-2, "float32": 1e-5, "float64": 1e-5}


def load_onnx():
    """(onnx, onnxruntime, the class of MXNet's converter). Raises ExportError."""
    if not hasattr(mx, "onnx"):
        raise ExportError(
            f"onnx= needs MXNet 1.9, and MXNet {mx.__version__} is installed, whose converters "
            "are too old: export without it, and convert the files with MXNet 1.9."
        )
    try:
        import onnx
        import onnxruntime
        from mxnet.onnx.mx2onnx._export_onnx import MXNetGraph
    except ImportError as error:
        raise ExportError(
            f"onnx= needs packages that cannot be imported ({error}): {_INSTALL}."
        ) from error
    if not MXNetGraph.registry_:
        raise ExportError(
            f"MXNet's converters do not work with onnx {onnx.__version__}: {_INSTALL}."
        )
    return onnx, onnxruntime, MXNetGraph


def _keeps_classes_apart(node):
    """Whether boxes suppress only boxes of their class. MXNet's converter ignores that, and the
    comparison cannot show it if random input gives no boxes."""
    return (
        node.op == "_contrib_box_nms"
        and node.attrs.get("id_index", "-1") != "-1"
        and not is_true(node.attrs.get("force_suppress", "False"))
    )


def to_onnx(graph, arrays, shapes, dtype, any_batch):
    """The bytes of an ONNX model of a Graph, checked with ``onnx.checker``.

    arrays: {name: NDArray}; shapes: {name of an input: shape}; dtype: of the inputs; any_batch:
    whether the first axis of the inputs may have any size. Raises ExportError, which names every
    operator that cannot be converted.
    """
    onnx, _, converter = load_onnx()
    for node in graph.nodes():
        node.op = _SAME.get(node.op, node.op)
        if node.op == "FullyConnected":
            # MXNet's default, which its converter does not know.
            node.attrs.setdefault("flatten", "True")
    known = set().union(*(converter.registry_.get(version, {}) for version in _CONVERTERS))
    nodes = graph.nodes()
    missing = {node.op for node in nodes if node.op not in known or _keeps_classes_apart(node)}
    if missing:
        raise ExportError(
            f"MXNet {mx.__version__} cannot convert these operators to ONNX: "
            f"{', '.join(sorted(missing))}. Export without onnx=, or build the net without them."
        )
    types = [onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))] * len(shapes)
    try:
        _move_channels(graph, arrays, shapes)
        symbol = graph.symbol()
        ordered = [shapes[name] for name in symbol.list_inputs() if name in shapes]
        free = [("batch", *shape[1:]) for shape in ordered] if any_batch else None
        # MXNet's converters print names.
        silent = contextlib.redirect_stdout(io.StringIO())
        with silent, _patched(onnx, converter, _pooling_sizes(graph, arrays, shapes)):
            made = converter().create_onnx_graph_proto(
                symbol,
                dict(arrays),
                ordered,
                types,
                opset_version=OPSET,
                dynamic=any_batch,
                dynamic_input_shapes=free,
            )
    except Exception as error:  # The converters raise all kinds.
        raise ExportError(
            f"MXNet {mx.__version__} cannot convert this net to ONNX ({_line(error)}). Export "
            "without onnx=, or change the net."
        ) from error
    _drop_constant_inputs(made)
    _order_outputs(made, symbol)
    model = onnx.helper.make_model(
        made,
        producer_name="gluon_syncbn",
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=_IR_VERSION,
    )
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # Of several classes that are not exported.
        raise ExportError(f"onnx.checker refuses the model ({_line(error)}).") from error
    return model.SerializeToString()


def compare(model, run, values, arrays, shapes, dtype, any_batch):
    """The largest relative error of ONNX Runtime's outputs against a net's on random inputs, with
    any_batch also of two samples more. Raises ExportError if it is above TOLERANCE.

    run(values, inputs): the net's outputs for {name: NDArray} and {name: NumPy array}.
    """
    worst = _compare(model, run, values, arrays, shapes, dtype)
    if not any_batch:
        return worst
    more = {name: (shape[0] + 2, *shape[1:]) for name, shape in shapes.items()}
    try:
        return max(worst, _compare(model, run, values, arrays, more, dtype))
    except (ExportError, mx.MXNetError) as error:
        raise ExportError(
            "The net or its ONNX model does not take inputs of shape "
            f"{', '.join(map(str, more.values()))} ({last_line(error)}): export it for one "
            "batch size, without any_batch."
        ) from error


def _compare(model, run, values, arrays, shapes, dtype):
    _, runtime, _ = load_onnx()
    values, own_dtype = rounded(values, arrays)
    inputs = random_inputs(shapes, dtype)
    expected = run(values, {name: x.astype(own_dtype) for name, x in inputs.items()})
    for number, output in enumerate(expected):
        if not np.isfinite(output).all():
            raise ExportError(
                f"The net's own output {number} is not finite on random input, so no ONNX file was "
                "written: look for negative variances with python -m gluon_syncbn inspect."
            )
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {each.name: inputs[each.name] for each in session.get_inputs()})
    except Exception as error:  # Of several classes that are not exported.
        raise ExportError(f"ONNX Runtime cannot run the model ({_line(error)}).") from error
    tolerance = TOLERANCE[np.dtype(dtype).name]
    errors = differences(outputs, expected)
    for number, error in enumerate(errors):
        if not error <= tolerance:
            raise ExportError(
                f"ONNX Runtime's output {number} differs from the net's by {error:.2g} of the "
                f"largest value, more than {tolerance:g}: a converter of MXNet's does not fit this "
                "net, or the net amplifies rounding. Export without onnx=."
            )
    return max(errors)


@contextlib.contextmanager
def _patched(onnx, converter, sizes):
    """Makes MXNet check its result against the operators of OPSET, not the newest, and convert
    adaptive pooling to any size, not only to 1x1."""
    context = onnx.checker.DEFAULT_CONTEXT
    before = context.ir_version, context.opset_imports
    context.ir_version, context.opset_imports = _IR_VERSION, {"": OPSET}
    own = functools.partial(_convert_adaptive_pooling, onnx, sizes)
    # MXNet prefers converters of the newest version, and has none of this one.
    converter.registry_[OPSET] = {_ADAPTIVE_POOLING: own}
    try:
        yield
    finally:
        context.ir_version, context.opset_imports = before
        del converter.registry_[OPSET]


def _move_channels(graph, arrays, shapes):
    """Swaps the axis of each BatchNorm with axis 1, the only one that MXNet's converter takes."""
    norms = [n for n in graph.nodes() if n.op == "BatchNorm" and n.attrs.get("axis", "1") != "1"]
    found = _shapes_of([norm.inputs[0] for norm in norms], graph, arrays, shapes)
    orders = {id(norm): list(range(len(shape))) for norm, shape in zip(norms, found)}

    def change(node):
        if id(node) not in orders:
            return None
        order = orders[id(node)]
        axis, node.attrs["axis"] = order[int(node.attrs["axis"])], "1"
        if axis == 1:
            return None
        order[1], order[axis] = axis, 1
        name, axes = node.name, {"axes": str(tuple(order))}
        node.name = graph.free_name(f"{name}_swapped")
        node.inputs[0] = Node("transpose", graph.free_name(f"{name}_x"), axes, node.inputs[:1]), 0
        return Node("transpose", name, axes, [(node, 0)]), 0

    graph.rewrite(change)


def _shapes_of(entries, graph, arrays, shapes):
    """The shapes of entries of a Graph."""
    if not entries:
        return []
    heads, graph.heads = graph.heads, entries
    symbol = graph.symbol()
    graph.heads = heads
    known = {**shapes, **{name: array.shape for name, array in arrays.items()}}
    used = {name: known[name] for name in symbol.list_inputs()}
    return symbol.infer_shape(**used)[1]


def _pooling_sizes(graph, arrays, shapes):
    """{name of a node of adaptive pooling: ((height, width) of its input, of its output)}."""
    pools = [node for node in graph.nodes() if node.op == _ADAPTIVE_POOLING]
    entries = [entry for node in pools for entry in (node.inputs[0], (node, 0))]
    sizes = [shape[2:] for shape in _shapes_of(entries, graph, arrays, shapes)]
    return {node.name: pair for node, pair in zip(pools, zip(sizes[::2], sizes[1::2]))}


def _convert_adaptive_pooling(onnx, sizes, node, outputs_lookup, initializer, **_):
    """A converter as MXNet calls it. Bins of one size become an AveragePool; others become
    y = A x B^T, where the rows of A and B average."""
    name, [[number, output, *_]] = node["name"], node["inputs"]
    x = outputs_lookup[number][output]
    inputs, outputs = sizes[name]
    if all(size % bins == 0 for size, bins in zip(inputs, outputs)):
        kernel = [size // bins for size, bins in zip(inputs, outputs)]
        settings = {"kernel_shape": kernel, "strides": kernel}
        return [onnx.helper.make_node("AveragePool", [x.name], [name], name, **settings)]
    a, b = (_averages(*pair).astype(x.dtype) for pair in zip(inputs, outputs))
    rows, columns, pooled = (f"{name}_{part}" for part in ("rows", "columns", "pooled"))
    initializer += [
        onnx.numpy_helper.from_array(a, rows),
        onnx.numpy_helper.from_array(np.ascontiguousarray(b.T), columns),
    ]
    return [
        onnx.helper.make_node("MatMul", [rows, x.name], [pooled], pooled),
        onnx.helper.make_node("MatMul", [pooled, columns], [name], name),
    ]


def _averages(size, bins):
    """(bins, size): each row averages one bin. Bins overlap if `bins` does not divide `size`."""
    result = np.zeros((bins, size))
    for number, row in enumerate(result):
        first, last = number * size // bins, -(-(number + 1) * size // bins)
        row[first:last] = 1 / (last - first)
    return result


def _drop_constant_inputs(made):
    """Drops parameters from the inputs: a runtime cannot optimize a parameter that is an input."""
    constant = {tensor.name for tensor in made.initializer}
    inputs = [value for value in made.input if value.name not in constant]
    del made.input[:]
    made.input.extend(inputs)


def _order_outputs(made, symbol):
    """Restores the order of the outputs, which MXNet's converter lists in node order."""
    by_name = {value.name: value for value in made.output}
    names = [re.sub(r"_output(\d?)$", r"\1", name) for name in symbol.list_outputs()]
    if set(names) != set(by_name) or len(names) != len(by_name):
        raise ExportError(
            f"MXNet's converter gives the outputs {', '.join(by_name)} in place of "
            f"{', '.join(names)}: make each output of the net the output of another node, or "
            "export without onnx=."
        )
    del made.output[:]
    made.output.extend(by_name[name] for name in names)


def _line(error):
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
