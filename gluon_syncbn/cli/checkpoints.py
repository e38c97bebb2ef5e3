"""What python -m gluon_syncbn does with checkpoints."""

import contextlib
import glob
import importlib
import os
import re
import sys

import mxnet as mx
import numpy as np
from mxnet.gluon import Block

from ..deploy.export import Target, check_prefix, write_graph
from ..deploy.export import export as export_net
from ..deploy.files import (
    FileError,
    as_saved,
    parameter_writer,
    read_parameters,
    read_symbol,
    text_writer,
    write_all,
)
from ..graph.symbols import (
    STOCK_OPERATORS,
    ExportError,
    Graph,
    expected_shapes,
    is_true,
    make_stock,
    settings_of,
)
from ..layers.batch_norm import is_bfloat16

ERRORS = (ExportError, FileError, ValueError)

_SYMBOL = "-symbol.json"
_ROLE = re.compile(
    r"^(?:arg:|aux:)?(.*?)[_.]?(gamma|beta|(?:running|moving)_(?:mean|var)|num_batches_tracked)$"
)
# A channel whose output does not depend on its input, and one that no dtype holds for long.
_DEAD_VARIANCE, _DEAD_GAMMA = 1e-10, 1e-6
_LARGEST = {"mean": 1e4, "var": 1e8, "gamma": 1e3, "beta": 1e3}


def export(options):
    shapes = options.input_shape
    if options.onnx and not shapes:
        raise ValueError(
            "--onnx needs --input-shape, such as 1,3,224,224: an ONNX model is made for inputs "
            "of a shape."
        )
    check_prefix(options.output)
    if options.epoch not in range(10000):
        raise ValueError(f"--epoch is {options.epoch}: give a number from 0 to 9999.")
    target = Target(
        options.output, options.epoch, options.fold, options.onnx, shapes, options.dtype
    )
    if options.net:
        path, epoch, fold, onnx, shapes, dtype = target
        result = export_net(_load_net(options), path, epoch, fold, onnx, shapes, dtype)
    else:
        graph, arrays, inputs, parameters = _load_graph(options)
        with as_saved(parameters):
            result = write_graph(graph, arrays, inputs, target, options.source)
    print(f"symbol  {result.symbol}\nparams  {result.params}")
    if options.fold:
        print(
            f"folded  {len(result.folded)} layers of batch normalization, {len(result.left)} left"
        )
        for name, why in result.left.items():
            print(f"  {name}: {why}")
    if result.onnx:
        error = f"ONNX Runtime differs by {result.onnx_error:.1g} of the largest value"
        print(f"onnx    {result.onnx} ({error})")
    return 0


def convert(options):
    if _is_parameters(options.file):
        _convert_parameters(options)
        return 0
    if options.dtype:
        raise ValueError(f"--dtype is for .params files, and {options.file} is none.")
    graph = Graph(read_symbol(options.file))
    before, variables = _count(graph), graph.variables()
    make_stock(graph)
    write_all({options.output: text_writer(graph.symbol().tojson())})
    changed = ", ".join(f"{n} {op}" for op, n in sorted(before.items()) if op != "BatchNorm")
    print(f"{options.output}: {changed or 'none'} became BatchNorm, {sum(before.values())} in all")
    dropped = sorted(variables - graph.variables())
    if dropped:
        print(
            f"dropped what only training needs: {_some(dropped)} (export writes files without, "
            "SymbolBlock.imports loads others with ignore_extra=True)"
        )
    return 0


def _convert_parameters(options):
    arrays = read_parameters(options.file)
    if not options.dtype:
        raise ValueError(f"{options.file} would stay as it is: say with --dtype what to convert.")
    dtypes = dict.fromkeys(arrays, options.dtype)
    if options.dtype == "float16":
        # As net.cast does.
        for _, roles in _norms(arrays):
            dtypes.update(dict.fromkeys(roles.values(), "float32"))
    arrays = {name: _cast(name, a, dtypes[name]) for name, a in arrays.items()}
    with as_saved(options.file):
        write_all({options.output: parameter_writer(arrays)})
    print(f"{options.output}: {len(arrays)} parameters")


def inspect(options):
    rows = _layers_of_net(_load_net(options)) if options.net else None
    if rows is None and _is_parameters(options.source):
        rows = _layers_of_names(options.params or options.source)
    if rows is None:
        graph, arrays, *_ = _load_graph(options)
        rows = _layers_of_graph(graph, arrays)
    if not rows:
        raise ValueError(f"{options.source} has no batch normalization.")
    table = [("layer", "kind", "channels", "gamma", "beta", "mean", "variance", "remarks")]
    channels = dead = exploding = 0
    for name, kind, values, settings in rows:
        flags = _flags(values, settings)
        count = len(next(iter(values.values())))
        channels, dead = channels + count, dead + len(flags["dead"])
        exploding += len(flags["exploding"])
        remarks = [f"{len(n)} {what}: {_some(n)}" for what, n in flags.items() if len(n)]
        ranges = (_range(values.get(role)) for role in ("gamma", "beta", "mean", "var"))
        table.append((name, kind, str(count), *ranges, "; ".join(remarks)))
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(f"{len(rows)} layers, {channels} channels: {dead} dead, {exploding} exploding")
    return 0


def _is_parameters(path):
    return path.endswith(".params") or os.path.isfile(path) and not path.endswith(".json")


def _make_net(options):
    """The net of --net."""
    module, _, function = options.net.partition(":")
    if not function:
        raise ValueError(f"--net is {options.net!r}: give package.module:function.")
    # As for python -c, where the user is.
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        net = getattr(importlib.import_module(module), function)()
    except (Exception, SystemExit) as error:  # The user's code may raise anything.
        raise ValueError(
            f"--net {options.net} failed ({type(error).__name__}: {error}): name a function "
            "without arguments that returns the net."
        ) from error
    finally:
        # The user's code may have gone elsewhere, and the files are named from here.
        os.chdir(folder)
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
    if not isinstance(net, Block):
        raise ValueError(f"--net {options.net} returned {type(net).__name__}: a net was expected.")
    return net


def _load_net(options):
    """The net of --net with the parameters of the source."""
    net = _make_net(options)
    path = options.params or options.source
    read_parameters(path)
    try:
        with as_saved(path):
            net.load_parameters(path, ctx=mx.cpu())
    except (AssertionError, ValueError, KeyError, mx.MXNetError) as error:
        text = " ".join(str(error).split())[:300]
        raise FileError(f"{path} does not fit the net of --net {options.net} ({text}).") from error
    return net


def _load_graph(options):
    """(Graph, {name: NDArray}, names of the inputs, file of the parameters) of the source."""
    source = options.source
    if _is_parameters(source):
        raise ValueError(
            f"{source} holds parameters and no graph: give the NAME{_SYMBOL} beside it, or the "
            "function that makes the net with --net module:function."
        )
    prefix = source[: -len(_SYMBOL)] if source.endswith(_SYMBOL) else source
    path = source if source.endswith(".json") else prefix + _SYMBOL
    symbol = read_symbol(path)
    parameters = options.params or _last_epoch(prefix, path)
    arrays = _plain(read_parameters(parameters))
    names = symbol.list_inputs()
    inputs = [name.strip() for name in options.inputs.split(",")] if options.inputs else []
    unknown = [name for name in inputs if name not in names]
    if unknown:
        raise ValueError(f"--inputs names {unknown[0]}, which {path} has not.")
    inputs = inputs or [n for n in names if n not in arrays and re.fullmatch(r"data\d*", n)]
    missing = [name for name in names if name not in arrays and name not in inputs]
    if missing:
        raise FileError(
            f"{parameters} lacks {len(missing)} of the {len(names)} names in {path}, {missing[0]} "
            "among them: name the parameters of this symbol with --params, or its inputs with "
            "--inputs."
        )
    arrays = {name: arrays[name] for name in names if name not in inputs}
    graph = Graph(symbol)
    shapes = {name: array.shape for name, array in arrays.items()}
    for name, expected in expected_shapes(graph, shapes):
        if name in shapes and not _fits(shapes[name], expected):
            text = str(tuple(n if n > 0 else None for n in expected)).replace("None", "?")
            raise FileError(
                f"{parameters} does not fit {path}: {name} is {shapes[name]}, {text} was expected; "
                "name the parameters of this symbol with --params."
            )
    return graph, arrays, inputs, parameters


def _fits(shape, expected):
    if not expected:
        return True
    return len(shape) == len(expected) and all(m in (n, 0, -1) for n, m in zip(shape, expected))


def _last_epoch(prefix, path):
    found = [
        name
        for name in glob.glob(glob.escape(prefix) + "-*.params")
        if re.fullmatch(r"-\d{4}\.params", name[len(prefix) :])
    ]
    if not found:
        raise FileError(f"There is no {prefix}-0000.params beside {path}: name it with --params.")
    return max(found)


def _plain(arrays):
    return {re.sub("^(arg|aux):", "", name): array for name, array in arrays.items()}


def _norms(names):
    """[(name of a layer, {role: name})] of the batch normalization among names of parameters."""
    layers = {}
    for name in names:
        found = _ROLE.match(name)
        if found:
            layers.setdefault(found.group(1), {})[found.group(2).split("_")[-1]] = name
    # LayerNorm and others have no running statistics.
    return [(layer, roles) for layer, roles in layers.items() if roles.keys() & {"mean", "var"}]


def _cast(name, array, dtype):
    if is_bfloat16(array.dtype):
        array = array.astype("float32")
    if np.dtype(array.dtype).kind != "f":
        return array
    result = array.astype(dtype)
    if np.isfinite(array.asnumpy()).all() and not np.isfinite(result.asnumpy()).all():
        raise ExportError(
            f"{name} has values up to {np.abs(array.asnumpy()).max():.3g}, which {dtype} does not "
            "hold: leave it in its own dtype."
        )
    return result


def _count(graph):
    counts = {}
    for node in graph.nodes():
        if node.op != "null" and (node.operator in STOCK_OPERATORS or node.op == "Custom"):
            counts[node.operator] = counts.get(node.operator, 0) + 1
    return counts


def _layers_of_net(net):
    from ..graph.blocks import walk

    rows = []
    for path, block in walk(net):
        if isinstance(block, mx.gluon.nn.basic_layers._BatchNorm):
            values = {
                role.split("_")[-1]: getattr(block, role).data().asnumpy()
                for role in ("gamma", "beta", "running_mean", "running_var")
            }
            rows.append((path or block.name, type(block).__name__, values, block._kwargs))
    return rows


def _layers_of_graph(graph, arrays):
    rows = []
    for node in graph.nodes():
        if node.op == "null" or node.operator not in {**STOCK_OPERATORS, "GluonSyncBatchNorm": 0}:
            continue
        names = [source.name for source, _ in node.inputs[1:]]
        values = {
            role: arrays[name].asnumpy()
            for role, name in zip(("gamma", "beta", "mean", "var"), names)
            if name in arrays
        }
        settings = settings_of(node.attrs)
        rows.append((node.name, node.operator, values, {"fix_gamma": not settings["scale"]}))
    return rows


def _layers_of_names(path):
    arrays = read_parameters(path)
    rows = []
    for layer, roles in _norms(name for name, array in arrays.items() if array.ndim == 1):
        roles.pop("tracked", None)
        if not {"mean", "var"} <= roles.keys():
            continue
        variance = roles["var"]
        for name in roles.values():
            if arrays[name].shape != arrays[variance].shape:
                raise FileError(
                    f"{path} is damaged: {name} is {arrays[name].shape}, and {variance} beside it "
                    f"is {arrays[variance].shape}. Take another copy."
                )
        values = {role: arrays[name].asnumpy() for role, name in roles.items()}
        rows.append((layer, "unknown", values, {}))
    return rows


def _flags(values, settings):
    """{"dead": numbers of channels, "exploding": numbers}."""
    channels = len(values["var"])
    dead, exploding = np.zeros(channels, bool), np.zeros(channels, bool)
    for role, value in values.items():
        if role == "gamma" and is_true(str(settings.get("fix_gamma", False))):
            continue
        value = value.astype(np.float64)
        exploding |= ~(np.abs(value) <= _LARGEST[role])
        if role == "gamma":
            dead |= np.abs(value) <= _DEAD_GAMMA
        if role == "var":
            dead |= value <= _DEAD_VARIANCE
    return {"dead": np.flatnonzero(dead), "exploding": np.flatnonzero(exploding)}


def _range(value):
    if value is None:
        return "-"
    finite = value[np.isfinite(value)]
    text = f"{finite.min():.3g} .. {finite.max():.3g}" if finite.size else ""
    return text if finite.size == value.size else f"{text} not finite".strip()


def _some(numbers):
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
