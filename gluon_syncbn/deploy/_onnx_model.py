"""Converts a stock graph to ONNX with MXNet's converters, and works around their faults."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from typing import Any, Callable

import mxnet as mx
import numpy as np

from ..graph.symbols import ExportError, integers, is_true
from ..graph.trace import last_line
from .check import differences, outputs_of_net, rounded, tolerance

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
        symbol = graph.symbol()
        ordered = [shapes[name] for name in symbol.list_inputs() if name in shapes]
        free = [("batch", *shape[1:]) for shape in ordered] if any_batch else None
        # MXNet's converters print names.
        silent = contextlib.redirect_stdout(io.StringIO())
        with silent, _patched(onnx, converter, _input_shapes(graph, arrays, shapes)):
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


def compare(model, symbol, run, values, arrays, shapes, dtype, any_batch):
    """The largest relative error of ONNX Runtime's outputs against a net's on random inputs, with
    any_batch also of two samples more. Raises ExportError if it is above `tolerance`.

    run(values, inputs): the net's outputs for {name: NDArray} and {name: NumPy array}.
    """
    worst = _compare(model, symbol, run, values, arrays, shapes, dtype)
    if not any_batch:
        return worst
    more = {name: (shape[0] + 2, *shape[1:]) for name, shape in shapes.items()}
    try:
        return max(worst, _compare(model, symbol, run, values, arrays, more, dtype))
    except ExportError as error:
        raise ExportError(
            "The net or its ONNX model does not take inputs of shape "
            f"{', '.join(map(str, more.values()))} ({last_line(error)}): export it for one "
            "batch size, without any_batch."
        ) from error


def _compare(model, symbol, run, values, arrays, shapes, dtype):
    _, runtime, _ = load_onnx()
    own, own_dtype = rounded(values, arrays)
    try:
        inputs, expected = outputs_of_net(run, symbol, own, own_dtype, shapes, dtype)
    except ExportError as why:
        raise ExportError(
            f"The ONNX model cannot be compared with the net, as {why}: export without onnx=."
        ) from why
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        used = {each.name: inputs[each.name].astype(dtype) for each in session.get_inputs()}
        outputs = session.run(None, used)
    except Exception as error:  # Of several classes that are not exported.
        raise ExportError(f"ONNX Runtime cannot run the model ({_line(error)}).") from error
    largest, errors = tolerance(arrays), differences(outputs, expected)
    for number, difference in enumerate(errors):
        if not difference <= largest:
            raise ExportError(
                f"ONNX Runtime's output {number} differs from the net's by {difference:.2g} of the "
                f"largest value, more than {largest:g}: a converter of MXNet's does not fit this "
                "net, or the net amplifies rounding. Export without onnx=."
            )
    return max(errors)


@contextlib.contextmanager
def _patched(onnx, converter, shapes):
    """Makes MXNet check its result against the operators of OPSET, not the newest, and use the
    converters below. shapes: of `_input_shapes`."""
    context = onnx.checker.DEFAULT_CONTEXT
    before = context.ir_version, context.opset_imports
    context.ir_version, context.opset_imports = _IR_VERSION, {"": OPSET}
    # MXNet prefers converters of the newest version, and has none of this one.
    converter.registry_[OPSET] = {
        operator: functools.partial(convert, onnx, shapes) for operator, convert in _OWN.items()
    }
    try:
        yield
    finally:
        context.ir_version, context.opset_imports = before
        del converter.registry_[OPSET]


def _input_shapes(graph, arrays, shapes):
    """{name of a node that has a converter of ours: shape of its first input}."""
    nodes = [node for node in graph.nodes() if node.op in _OWN]
    if not nodes:
        return {}
    heads, graph.heads = graph.heads, [node.inputs[0] for node in nodes]
    symbol = graph.symbol()
    graph.heads = heads
    known = {**shapes, **{name: array.shape for name, array in arrays.items()}}
    used = {name: known[name] for name in symbol.list_inputs()}
    return {node.name: shape for node, shape in zip(nodes, symbol.infer_shape(**used)[1])}


# Converters, called as MXNet calls its own.


def _convert_batch_norm(onnx, shapes, node, outputs_lookup, **_):
    """MXNet's takes axis 1 only. Another axis is swapped with it, and back."""
    make, name, attrs = onnx.helper.make_node, node["name"], node.get("attrs", {})
    x, *parameters = (outputs_lookup[number][output].name for number, output, *_ in node["inputs"])
    epsilon = float(attrs.get("eps", 1e-3))
    order = list(range(len(shapes[name])))
    axis = order[int(attrs.get("axis", 1))]
    if axis == 1:
        return [make("BatchNormalization", [x, *parameters], [name], name, epsilon=epsilon)]
    order[1], order[axis] = axis, 1
    swapped, y = f"{name}_swapped", f"{name}_swapped_y"
    return [
        make("Transpose", [x], [swapped], swapped, perm=order),
        make("BatchNormalization", [swapped, *parameters], [y], y, epsilon=epsilon),
        make("Transpose", [y], [name], name, perm=order),
    ]


def _convert_adaptive_pooling(onnx, shapes, node, outputs_lookup, initializer, **_):
    """MXNet's takes size 1 only. This is y = A x B^T, where the rows of A and B average."""
    name, [[number, output, *_]] = node["name"], node["inputs"]
    x = outputs_lookup[number][output]
    sizes = integers(node.get("attrs", {}).get("output_size", "")) or (1,)
    a, b = (
        _averages(size, bins).astype(x.dtype) for size, bins in zip(shapes[name][2:], sizes * 2)
    )
    rows, columns, pooled = (f"{name}_{part}" for part in ("rows", "columns", "pooled"))
    initializer += [
        onnx.numpy_helper.from_array(a, rows),
        onnx.numpy_helper.from_array(np.ascontiguousarray(b.T), columns),
    ]
    return [
        onnx.helper.make_node("MatMul", [rows, x.name], [pooled], pooled),
        onnx.helper.make_node("MatMul", [pooled, columns], [name], name),
    ]


_OWN: dict[str, Callable[..., Any]] = {
    "BatchNorm": _convert_batch_norm,
    "_contrib_AdaptiveAvgPooling2D": _convert_adaptive_pooling,
}


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
