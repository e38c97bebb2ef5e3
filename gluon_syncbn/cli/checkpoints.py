"""The commands export and convert."""

import collections
import functools
import glob
import os
import re

import numpy as np

from ..deploy.check import REPORT, evaluate
from ..deploy.export import Target, check_target, write_graph
from ..deploy.files import (
    FileError,
    as_saved,
    bytes_writer,
    parameter_writer,
    read_parameters,
    read_symbol,
    tagged,
    write_all,
)
from ..graph.symbols import (
    OUR_OPERATOR,
    STOCK_OPERATORS,
    ExportError,
    Graph,
    Node,
    integers,
    make_stock,
)
from ..layers.operator import is_true

ERRORS = (ExportError, FileError, ValueError)

_SYMBOL = "-symbol.json"
# The losses of Modules: what they compute in inference, where they do not read their label.
_LOSSES = {
    "SoftmaxOutput": "softmax",
    "Softmax": "softmax",
    "LogisticRegressionOutput": "sigmoid",
    "LinearRegressionOutput": None,
    "MAERegressionOutput": None,
    "SVMOutput": None,
}
_ONEDNN = (
    "On CPUs, MXNet's oneDNN computes {} (SoftmaxOutput) over the last axis alone where data has 4 "
    "dimensions; the file has it over all axes but the first, as MXNet defines and trains it. Set "
    "MXNET_MKLDNN_ENABLED=0 for this command, or give the symbol multi_output=True (axis 1) or "
    "preserve_shape=True (the last axis), which all builds compute alike. If your data has other "
    "dimensions, say so with --input-shape."
)


def export(options):
    """Writes a checkpoint for stock MXNet and ONNX Runtime."""
    target = Target(
        options.output,
        options.epoch or 0,
        options.fold,
        options.onnx,
        options.input_shape,
        options.dtype,
        options.any_batch,
    )
    check_target(target)
    if options.source.endswith(".params"):
        raise ValueError(
            f"{options.source} holds parameters and no graph: give its NAME{_SYMBOL}, or build the "
            "net in Python, call load_parameters, then gluon_syncbn.export."
        )
    prefix, path = _names(options.source)
    symbol = read_symbol(path)
    parameters = options.params or _file_of_epoch(prefix, path, options.epoch)
    graph, flattened = _without_losses(symbol)
    names = graph.symbol().list_inputs()
    arrays = _plain(read_parameters(parameters))
    inputs = _inputs(options.inputs, symbol, path, names, arrays)
    missing = [name for name in names if name not in arrays and name not in inputs]
    if missing:
        raise FileError(
            f"{parameters} lacks {len(missing)} of the {len(names)} names in {path}, {missing[0]} "
            "among them: name the parameters of this symbol with --params, or its inputs with "
            "--inputs."
        )
    arrays = {name: arrays[name] for name in names if name not in inputs}
    _require_shapes(graph, arrays, parameters, path)
    run = functools.partial(_run_with_labels, _with_labels(symbol))
    advice = _ONEDNN.format(", ".join(flattened)) if flattened else REPORT
    with as_saved(parameters):
        print(write_graph(graph, arrays, inputs, target, options.source, run, advice))
    return 0


def convert(options):
    """Converts a symbol, with --epoch a checkpoint, to stock operators."""
    prefix, path = _names(options.file)
    graph = Graph(read_symbol(options.file if options.epoch is None else path))
    names = graph.variables()
    before = collections.Counter(
        node.operator
        for node in graph.nodes()
        if node.operator in STOCK_OPERATORS or node.operator in OUR_OPERATOR
    )
    make_stock(graph)
    symbol = graph.symbol()
    text = bytes_writer(symbol.tojson().encode())
    if options.epoch is None:
        writers = {options.output: text}
        write_all(writers)
    else:
        parameters = _file_of_epoch(prefix, path, options.epoch)
        arrays, dropped = _plain(read_parameters(parameters)), names - graph.variables()
        arrays = {name: array for name, array in arrays.items() if name not in dropped}
        output, symbol_file = _names(options.output)
        params_file = f"{output}-{options.epoch:04d}.params"
        writers = {symbol_file: text, params_file: parameter_writer(tagged(arrays, symbol))}
        with as_saved(parameters):
            write_all(writers)
    changed = ", ".join(f"{n} {op}" for op, n in sorted(before.items()) if op != "BatchNorm")
    total = sum(before.values())
    print(f"{', '.join(writers)}: {changed or 'none'} became BatchNorm, {total} in all")
    return 0


def _names(source):
    """What the names of a checkpoint's files begin with, and its symbol's file."""
    prefix = re.sub(r"(-symbol)?\.json$", "", source)
    return prefix, source if source.endswith(".json") else prefix + _SYMBOL


def _plain(arrays):
    return {re.sub("^(arg|aux):", "", name): array for name, array in arrays.items()}


def _file_of_epoch(prefix, path, epoch):
    """The parameters of an epoch, by default of the last."""
    name = re.compile(re.escape(os.path.basename(prefix)) + r"-([0-9]{4}|[1-9][0-9]{4,})\.params")
    files = glob.glob(glob.escape(prefix) + "-*.params")
    found = {int(match[1]): f for f in files if (match := name.fullmatch(os.path.basename(f)))}
    if epoch is None:
        epoch = max(found, default=0)
    if epoch not in found:
        epochs = ", ".join(map(str, sorted(found)))
        choice = "give a NAME that has one, or, to export, name it with --params"
        choice = f"choose one of its epochs ({epochs})" if found else choice
        raise FileError(f"There is no {prefix}-{epoch:04d}.params for {path}: {choice}.")
    return found[epoch]


def _inputs(option, symbol, path, names, arrays):
    """The inputs among the names of a symbol without losses, by default data, data0, ..."""
    inputs = [name.strip() for name in option.split(",")] if option else []
    for name in inputs:
        if name not in symbol.list_inputs():
            raise ValueError(f"--inputs names {name}, which is not in {path}.")
    # Only losses read the others.
    inputs = [name for name in inputs if name in names]
    return inputs or [n for n in names if n not in arrays and re.fullmatch(r"data\d*", n)]


def _require_shapes(graph, arrays, parameters, path):
    for node in graph.nodes():
        expected = integers(node.attrs.get("__shape__", ""))
        found = arrays[node.name].shape if node.name in arrays else expected
        # 0 and -1 stand for an unknown size.
        pairs = zip(found, expected)
        if expected and (len(found) != len(expected) or any(m not in (n, 0, -1) for n, m in pairs)):
            raise FileError(
                f"{parameters} does not fit {path}: {node.name} is {found}, {expected} was "
                "expected; name the parameters of this symbol with --params."
            )


def _without_losses(symbol):
    """The Graph of a symbol in inference, without labels, and the names of the nodes whose softmax
    is over all axes but the first."""
    graph, flattened = Graph(symbol), []

    def change(node):
        if node.op not in _LOSSES:
            return None
        x, operator = node.inputs[0], _LOSSES[node.op]
        if operator != "softmax":
            return (Node(operator, node.name, inputs=[x]), 0) if operator else x
        if is_true(node.attrs.get("multi_output", "False")):
            axis = "1"
        elif is_true(node.attrs.get("preserve_shape", "False")) or _is_matrix(x[0]):
            axis = "-1"
        else:
            flattened.append(node.name)
            x_2d = Node("Flatten", f"{node.name}_flatten", inputs=[x]), 0
            y = Node("softmax", f"{node.name}_softmax", {"axis": "-1"}, [x_2d]), 0
            return Node("reshape_like", node.name, inputs=[y, x]), 0
        return Node("softmax", node.name, {"axis": axis}, [x]), 0

    graph.rewrite(change)
    return graph, flattened


def _is_matrix(node):
    """Whether a node's output has two dimensions, whatever its input has."""
    is_dense = node.op == "FullyConnected" and is_true(node.attrs.get("flatten", "True"))
    return is_dense or node.op == "Flatten"


def _with_labels(symbol):
    """The symbol with a variable for each label, whose shape the loss itself infers: it may not
    follow through what computes the label."""
    graph = Graph(symbol)
    for node in graph.nodes():
        if node.op in _LOSSES:
            node.inputs[1] = Node("null", graph.free_name(f"{node.name}_label")), 0
    return graph.symbol()


def _run_with_labels(symbol, arrays, inputs):
    """The outputs of a symbol whose labels are 0."""
    known = {name: array.shape for name, array in {**arrays, **inputs}.items()}
    dtype = next(x.dtype for x in inputs.values())
    pairs = zip(symbol.list_arguments(), symbol.infer_shape_partial(**known)[0])
    labels = {name: np.zeros(shape, dtype) for name, shape in pairs if name not in known}
    return evaluate(symbol, arrays, {**labels, **inputs})
