"""The commands export, convert and inspect."""

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
    ROLES,
    STOCK_OPERATORS,
    ExportError,
    Graph,
    Node,
    integers,
    make_stock,
    settings_of,
    taken_apart,
)
from ..layers.operator import is_true

ERRORS = (ExportError, FileError, ValueError)

_SYMBOL = "-symbol.json"
_ROLE = re.compile(r"^(?:arg:|aux:)?(.*?)[_.]?(gamma|beta|(?:running|moving)_(?:mean|var))$")
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
_DEAD = {"running_var": 1e-10, "gamma": 1e-6}
_LARGEST = {"running_mean": 1e4, "running_var": 1e8, "gamma": 1e3, "beta": 1e3}


def export(options):
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
    symbol, (graph, flattened), arrays, inputs, parameters = _load(options)
    run = functools.partial(_run_with_labels, _with_labels(symbol))
    advice = _ONEDNN.format(", ".join(flattened)) if flattened else REPORT
    with as_saved(parameters):
        result = write_graph(graph, arrays, inputs, target, options.source, run, advice)
    print(f"symbol  {result.symbol}\nparams  {result.params}")
    if options.fold:
        folded, left = len(result.folded), len(result.left)
        print(f"folded  {folded} layers of batch normalization, {left} left")
        for name, why in result.left.items():
            print(f"  {name}: {why}")
    if result.onnx:
        error = f"{result.onnx_error:.1g} of the largest value"
        print(f"onnx    {result.onnx} (ONNX Runtime differs by {error})")
    return 0


def convert(options):
    prefix, path = _names(options.file)
    graph = Graph(read_symbol(options.file if options.epoch is None else path))
    before, names = _count(graph), graph.variables()
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


def inspect(options):
    if _is_parameters(options.source):
        if options.epoch is not None:
            raise ValueError(
                f"{options.source} is one file: --epoch needs a NAME, as of NAME{_SYMBOL}."
            )
        rows = list(_rows_of_names(read_parameters(options.params or options.source)))
    else:
        _, (graph, _), arrays, _, _ = _load(options)
        rows = list(_rows_of_graph(graph, arrays))
    if not rows:
        print("0 layers: no batch normalization, or all of it is folded.")
        return 0
    table = [("layer", "kind", "channels", "gamma", "beta", "mean", "variance", "remarks")]
    totals = collections.Counter()
    for name, kind, arrays, fix_gamma in rows:
        shapes = {array.shape for array in arrays.values()}
        if len(shapes) != 1:
            raise FileError(
                f"{options.params or options.source} is damaged: gamma, beta and the statistics of "
                f"{name} have the shapes {sorted(shapes)}. Take another copy."
            )
        [(channels,)] = shapes
        values = {role: array.asnumpy().astype(np.float64) for role, array in arrays.items()}
        ranges = [_range(values.get(role)) for role in ROLES]
        if fix_gamma:
            values.pop("gamma", None)
        flags = {
            "dead": _dead(values),
            "exploding": _exploding(values),
            "negative": _channels(values[role] < 0 for role in ("running_var",) if role in values),
        }
        totals.update({"all": channels, **{what: len(found) for what, found in flags.items()}})
        remarks = "; ".join(f"{len(n)} {what}: {_some(n)}" for what, n in flags.items() if len(n))
        table.append((name, kind, str(channels), *ranges, remarks))
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    counts = ", ".join(f"{totals[what]} {what}" for what in flags)
    print(f"{len(rows)} layers, {totals['all']} channels: {counts}")
    return 0


def _is_parameters(path):
    return path.endswith(".params") or os.path.isfile(path) and not path.endswith(".json")


def _names(source):
    """What the names of a checkpoint's files begin with, and its symbol's file."""
    prefix = re.sub(r"(-symbol)?\.json$", "", source)
    return prefix, source if source.endswith(".json") else prefix + _SYMBOL


def _load(options):
    """(symbol, what `_without_losses` makes of it, {name: NDArray}, names of the inputs, file of
    the parameters) of the source."""
    source = options.source
    if _is_parameters(source):
        raise ValueError(
            f"{source} holds parameters and no graph: give its NAME{_SYMBOL}, or build the net in "
            "Python, call load_parameters, then gluon_syncbn.export."
        )
    prefix, path = _names(source)
    symbol = read_symbol(path)
    parameters = options.params or _file_of_epoch(prefix, path, options.epoch)
    arrays = _plain(read_parameters(parameters))
    names = symbol.list_inputs()
    inputs = [name.strip() for name in options.inputs.split(",")] if options.inputs else []
    unknown = [name for name in inputs if name not in names]
    if unknown:
        raise ValueError(f"--inputs names {unknown[0]}, which is not in {path}.")
    inference = graph, _ = _without_losses(symbol)
    kept = graph.variables()
    names, inputs = ([name for name in some if name in kept] for some in (names, inputs))
    inputs = inputs or [n for n in names if n not in arrays and re.fullmatch(r"data\d*", n)]
    missing = [name for name in names if name not in arrays and name not in inputs]
    if missing:
        raise FileError(
            f"{parameters} lacks {len(missing)} of the {len(names)} names in {path}, {missing[0]} "
            "among them: name the parameters of this symbol with --params, or its inputs with "
            "--inputs."
        )
    arrays = {name: arrays[name] for name in names if name not in inputs}
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
    return symbol, inference, arrays, inputs, parameters


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


def _file_of_epoch(prefix, path, epoch):
    """The parameters of an epoch, by default of the last."""
    name = re.compile(re.escape(os.path.basename(prefix)) + r"-([0-9]{4}|[1-9][0-9]{4,})\.params")
    files = glob.glob(glob.escape(prefix) + "-*.params")
    found = {int(match[1]): f for f in files if (match := name.fullmatch(os.path.basename(f)))}
    if epoch is None:
        epoch = max(found, default=0)
    if epoch not in found:
        epochs = ", ".join(map(str, sorted(found)))
        choice = "give a NAME that has one, or, to export and inspect, name it with --params"
        choice = f"choose one of its epochs ({epochs})" if found else choice
        raise FileError(f"There is no {prefix}-{epoch:04d}.params for {path}: {choice}.")
    return found[epoch]


def _plain(arrays):
    return {re.sub("^(arg|aux):", "", name): array for name, array in arrays.items()}


def _count(graph):
    return collections.Counter(
        node.operator
        for node in graph.nodes()
        if node.operator in STOCK_OPERATORS or node.operator in OUR_OPERATOR
    )


# The rows of the table: (layer, kind, {role: array}, whether gamma counts as 1).


def _rows_of_graph(graph, arrays):
    for node in graph.nodes():
        if node.operator in STOCK_OPERATORS or node.operator in OUR_OPERATOR:
            settings, (_, residual, parameters) = settings_of(node), taken_apart(node)
            fused = "residual" if residual else None, settings.activation
            kind = " + ".join(filter(None, (node.operator, *fused)))
            names = {role: source.name for role, (source, _) in zip(ROLES, parameters)}
            own = {role: arrays[name] for role, name in names.items() if name in arrays}
            yield node.name, kind, own, settings.fix_gamma


def _rows_of_names(arrays):
    layers = collections.defaultdict(dict)
    for name, array in arrays.items():
        if array.ndim == 1 and (found := _ROLE.match(name)):
            layers[found[1]][found[2].replace("moving", "running")] = array
    for layer, own in layers.items():
        # LayerNorm and others have no running statistics.
        if {"running_mean", "running_var"} <= own.keys():
            yield layer, "unknown", own, False


def _dead(values):
    """The channels whose output does not depend on their input."""
    return _channels(
        np.abs(values[role]) <= least for role, least in _DEAD.items() if role in values
    )


def _exploding(values):
    """The channels with values that no dtype holds for long, NaN among them."""
    return _channels(~(np.abs(value) <= _LARGEST[role]) for role, value in values.items())


def _channels(conditions):
    return np.flatnonzero(np.any(list(conditions), axis=0))


def _range(value):
    if value is None:
        return "-"
    finite = value[np.isfinite(value)]
    text = f"{finite.min():.3g} .. {finite.max():.3g}" if finite.size else ""
    return text if finite.size == value.size else f"{text} not finite".strip()


def _some(numbers):
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
