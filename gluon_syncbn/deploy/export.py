"""Writes a trained net for stock MXNet and ONNX Runtime, which load it without this package."""

import collections
import contextlib
import copy
import functools
import inspect
import logging
import os
from typing import Dict, NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock, SymbolBlock
from mxnet.gluon.block import _flatten, _regroup
from mxnet.util import is_np_array, is_np_shape, np_array, np_shape

from ..graph.blocks import check_block, walk
from ..graph.symbol_block import SyncGraph, composed
from ..graph.symbols import ExportError, Graph, Node, is_true, make_stock, variable
from ..layers.batch_norm import SyncBatchNorm, is_bfloat16
from ..layers.operator import is_numpy
from . import onnx_model
from .files import FileError, bytes_writer, last_line, parameter_writer, text_writer, write_all
from .fold import fold as fold_graph

__all__ = ["ExportError", "Exported", "FileError", "export"]

_log = logging.getLogger("gluon_syncbn")

_DTYPES = ("float16", "float32", "float64")
# As MXNet numbers them in graphs.
_DTYPE_CODES = {"float32": "0", "float64": "1", "float16": "2"}


class Exported(NamedTuple):
    """What an export wrote.

    Attributes
    ----------
    symbol, params : str
        The files.
    onnx : str or None
        The ONNX file.
    onnx_error : float or None
        The largest difference between ONNX Runtime's outputs and MXNet's on random input, over the
        largest value.
    folded : tuple of str
        The nodes of batch normalization that were folded into the layer before them.
    left : dict of str to str
        With ``fold=True``, those that were not, and why.
    """

    symbol: str
    params: str
    onnx: Optional[str]
    onnx_error: Optional[float]
    folded: Tuple[str, ...]
    left: Dict[str, str]


def export(net, path, epoch=0, fold=False, onnx=None, input_shape=None, dtype=None):
    r"""Writes a net for inference with stock operators: ``path-symbol.json`` and
    ``path-0000.params``.

    ``mxnet.gluon.SymbolBlock.imports``, ``mxnet.mod.Module`` and MXNet's other interfaces load them
    without this package. Each kind of batch normalization (:class:`SyncBatchNorm`, the contrib
    one, ``nn.BatchNorm`` and ``nn.BatchNormReLU``) becomes ``BatchNorm``, which in inference is

    .. math:: y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta

    with the running mean :math:`\mu` and variance :math:`\sigma^2`. With `fold` it is no operator
    any more, but part of the layer before it: with :math:`k = \gamma / \sqrt{\sigma^2 + \epsilon}`,
    the weight W of a convolution, transposed convolution or dense layer becomes kW and its bias
    :math:`k (b - \mu) + \beta` for each channel.

    The net is traced and its values are copied: neither its parameters nor its compiled graphs
    change, and training goes on as it would have without. Files are written beside their place and
    moved there once all are whole; after an error the former ones are what they were.

    Parameters
    ----------
    net : Block
        Hybridized or not, on any contexts, in a process alone or one of many. Where its parameters
        differ between contexts, as running statistics without synchronization do, their mean is
        written, as by ``save_parameters``, and a warning logged.
    path : str or path
        The files' common beginning.
    epoch : int, default 0
        From 0 to 9999, in the name of the .params file.
    fold : bool, default False
        Whether to fold batch normalization, where nothing else uses the layer's output or weights.
    onnx : str or path, optional
        An ONNX file to write as well, of operator set 15: checked by ``onnx.checker`` and compared
        with MXNet on random input, by ONNX Runtime. Needs ``pip install 'gluon_syncbn[onnx]'``.
    input_shape : tuple of int or list of tuples, optional
        The shape of the input, or of each. Needed for `onnx`, and where a net of several inputs has
        not been hybridized and run.
    dtype : {'float16', 'float32', 'float64'}, optional
        What to convert the parameters to. With float16, those of ``BatchNorm`` stay float32. By
        default they stay what they are.

    Returns
    -------
    Exported
        The names of the files, what was folded and what was not.

    Raises
    ------
    ValueError
        For arguments that make no sense, and for a net whose parameters have no values yet.
    ExportError
        For a net that cannot be traced or has custom operators of others, and for an ONNX model
        that cannot be made or whose outputs differ by more than 1e-5 (float16: 3e-2) of the
        largest. Every operator that MXNet's converter lacks is named. Nothing is written then.
    FileError
        An OSError: a file cannot be written.
    MXNetError
        Of an earlier step that nobody has waited for.

    References
    ----------
    B. Jacob et al., Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, CVPR 2018, section 3.2, for folding.
    """
    check_block(net, "export")
    shapes = _check_shapes(input_shape)
    _check_arguments(path, epoch, onnx, shapes, dtype)
    # Of the last steps; with static_shape MXNet does not wait for running statistics by itself.
    mx.nd.waitall()
    parameters = _parameters(net)
    symbol, inputs = _trace(net, shapes, parameters)
    graph = Graph(symbol)
    arrays = _values(parameters, graph, inputs)
    return write_graph(graph, arrays, inputs, path, epoch, fold, onnx, shapes, dtype, net.name)


def write_graph(graph, arrays, inputs, path, epoch, fold, onnx, shapes, dtype, title):
    """The part of :func:`export` behind the net.

    graph: a Graph, with any kind of batch normalization; arrays: {name: NDArray}; inputs: names;
    shapes: one for each of `inputs`, or None. All are changed.
    """
    if shapes and len(shapes) != len(inputs):
        raise ValueError(
            f"input_shape has {len(shapes)} shapes, and {title} has {len(inputs)} inputs "
            f"({', '.join(inputs)}): give one for each."
        )
    make_stock(graph)
    _require_stock(graph)
    graph.name_apart()
    inputs, shapes = _used(graph, inputs, shapes, title)
    if onnx is not None:
        _require_onnx(graph, arrays, dtype)
    if dtype:
        # Exact, and the others know no bfloat16.
        arrays.update({n: a.astype("float32") for n, a in arrays.items() if is_bfloat16(a.dtype)})
    for name in set(arrays) - {node.name for node in graph.nodes()}:
        # What only training needs.
        del arrays[name]
    _set_fixed_gammas(graph, arrays)
    for node in graph.nodes():
        if node.op == "null":
            # Initializers may be classes that are not there where the file is loaded.
            for key in ("__init__", "__dtype__", "__shape__"):
                node.attrs.pop(key, None)
    plain = graph.symbol(), dict(arrays)
    folded, left = fold_graph(graph, arrays, dtype) if fold else ([], {})
    if dtype:
        _cast(graph, arrays, dtype)
    for node in graph.nodes():
        if node.name in arrays:
            array = arrays[node.name]
            node.attrs["__shape__"] = str(tuple(array.shape))
            if np.dtype(array.dtype).name in _DTYPE_CODES:
                node.attrs["__dtype__"] = _DTYPE_CODES[np.dtype(array.dtype).name]
    symbol = graph.symbol()
    named = dict(zip(inputs, shapes or ()))
    input_dtype = _input_dtype(graph, symbol, arrays, inputs)
    if named:
        _check_inference(symbol, named)
    prefix = os.fspath(path)
    symbol_file, params_file = f"{prefix}-symbol.json", f"{prefix}-{epoch:04d}.params"
    auxiliary = set(symbol.list_auxiliary_states())
    tagged = {f"{'aux' if n in auxiliary else 'arg'}:{n}": array for n, array in arrays.items()}
    writers = {
        symbol_file: text_writer(symbol.tojson()),
        params_file: parameter_writer(tagged),
    }
    error = None
    if onnx is not None:
        onnx = os.fspath(onnx)
        if any(os.path.abspath(onnx) == os.path.abspath(path) for path in writers):
            raise ValueError(f"onnx= is {onnx}, which is another file of this export: rename it.")
        model = onnx_model.to_onnx(graph, arrays, named, input_dtype)
        error = _compare(model, plain, named, input_dtype)
        writers[onnx] = bytes_writer(model)
    write_all(writers)
    return Exported(symbol_file, params_file, onnx, error, tuple(folded), left)


def _check_shapes(input_shape):
    """A list of shapes, or None."""
    if input_shape is None:
        return None

    def is_shape(value):
        return (
            isinstance(value, (tuple, list))
            and value
            and all(isinstance(n, (int, np.integer)) and n > 0 for n in value)
        )

    if is_shape(input_shape):
        return [tuple(int(n) for n in input_shape)]
    if isinstance(input_shape, (tuple, list)) and input_shape and all(map(is_shape, input_shape)):
        return [tuple(int(n) for n in shape) for shape in input_shape]
    raise ValueError(
        f"input_shape is {input_shape!r}: give a tuple of whole numbers above 0 such as "
        "(1, 3, 224, 224), or a list of such tuples for several inputs."
    )


def check_prefix(path):
    """Raises ValueError for the common beginning of files where that is a folder."""
    if os.path.basename(path) in ("", ".", ".."):
        raise ValueError(
            f"path is {os.fspath(path)!r}: add the name that the files in that folder begin with, "
            "such as model of model-symbol.json."
        )


def _check_arguments(path, epoch, onnx, shapes, dtype):
    for name, value in (("path", path), ("onnx", "" if onnx is None else onnx)):
        if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
            raise ValueError(
                f"{name} is {value!r}: give the name of a file as str or pathlib.Path."
            )
    check_prefix(path)
    whole = isinstance(epoch, (int, np.integer)) and not isinstance(epoch, bool)
    if not (whole and 0 <= epoch < 10000):
        raise ValueError(f"epoch is {epoch!r}: give a whole number from 0 to 9999.")
    if onnx is not None and shapes is None:
        raise ValueError(
            "onnx= needs input_shape, such as (1, 3, 224, 224): an ONNX model is made and compared "
            "for inputs of a shape."
        )
    if onnx is not None:
        onnx_model.load_onnx()
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}: give one of {', '.join(_DTYPES)}, or None.")


def _used(graph, inputs, shapes, title):
    """The inputs, and their shapes, without those that only training reads."""
    names = graph.variables()
    unused = [name for name in inputs if name not in names]
    if unused:
        _log.info("export: %s does not use %s in inference.", title, ", ".join(unused))
    used = [i for i, name in enumerate(inputs) if name in names]
    return [inputs[i] for i in used], shapes and [shapes[i] for i in used]


def _parameters(net):
    """{name: the parameters of that name} of a net."""
    found = {}
    for _, block in walk(net):
        for parameter in (*block.params.values(), *getattr(block, "_reg_params", {}).values()):
            found.setdefault(parameter.name, {})[id(parameter)] = parameter
    return {name: list(same.values()) for name, same in found.items()}


def _trace(net, shapes, parameters):
    """The symbol of a net in inference, and the names of its inputs. Of parameters that have one
    name, each goes by its number behind it."""
    is_np = _is_numpy_net(net, parameters)
    with contextlib.ExitStack() as stack:
        # In MXNet the arrays need the shapes.
        stack.enter_context(np_shape(is_np or is_np_shape()))
        stack.enter_context(np_array(is_np))
        stack.enter_context(_left_as_it_is(net, parameters))
        stack.enter_context(mx.autograd.pause(train_mode=False))
        stack.enter_context(mx.name.NameManager())
        try:
            inputs, arguments = _inputs(net, shapes)
            outputs, _ = _flatten(net(*arguments), "output")
            symbol = mx.sym.Group(outputs) if len(outputs) > 1 else outputs[0]
        except Exception as error:  # Code of the net's own may raise anything.
            raise ExportError(
                f"{type(net).__name__} '{net.name}' cannot be traced as a graph "
                f"({type(error).__name__}: {last_line(error)}): its forward has to "
                "work with symbols, as for hybridize(); a net of several inputs needs input_shape, "
                "a list of shapes."
            ) from error
    return symbol, [each.name for each in inputs]


def _is_compiled(net):
    return isinstance(net, HybridBlock) and bool(net._cached_graph)


def _is_numpy_net(net, parameters):
    """Whether a net is one of MXNet's NumPy arrays, which `use_np` makes of it too, whatever
    `set_np` says outside of it."""
    if _is_compiled(net):
        return is_numpy(net._cached_graph[0][0])
    arrays = [
        parameter._data[0] for same in parameters.values() for parameter in same if parameter._data
    ]
    return any(map(is_numpy, arrays)) if arrays else is_np_array()


def _inputs(net, shapes):
    """(variables, arguments of the net that they make up)."""
    if _is_compiled(net):
        variables = [variable(known.name) for known in net._cached_graph[0]]
        rest = iter(variables)
        # For None, which stands for inputs that were left out, there is no variable.
        given = [next(rest) if size else None for size in _sizes(net._in_format)]
        return variables, _regroup(given, net._in_format)
    count = len(shapes) if shapes else _count_inputs(net)
    names = ["data"] if count == 1 else [f"data{number}" for number in range(count)]
    variables = [variable(name) for name in names]
    return variables, variables


def _sizes(form):
    """For each input of a net, in the structure that MXNet keeps, 1, or 0 for None."""
    if isinstance(form, int):
        return [0] if form < 0 else [1] * max(1, form)
    return [size for each in form for size in _sizes(each)]


def _count_inputs(net):
    """How many arguments the net's forward takes at least."""
    hybrid = isinstance(net, HybridBlock) and type(net).forward is HybridBlock.forward
    function = net.hybrid_forward if hybrid else net.forward
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in kinds and parameter.default is inspect.Parameter.empty
    ]
    own = getattr(net, "_reg_params", {})
    return max(1, len([name for name in names[hybrid:] if name not in own]))


@contextlib.contextmanager
def _left_as_it_is(net, parameters):
    """Puts back what tracing changes, and keeps the hooks of the blocks from being called."""
    blocks = [block for _, block in walk(net)]
    with contextlib.ExitStack() as undo:
        for name, same in parameters.items():
            for number, parameter in enumerate(same if len(same) > 1 else ()):
                undo.callback(setattr, parameter, "_var", parameter._var)
                parameter._var = variable(_numbered(name, number))
        for block in blocks:
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                undo.callback(setattr, block, name, getattr(block, name))
                setattr(block, name, type(getattr(block, name))())
        layers = [block for block in blocks if isinstance(block, SyncBatchNorm)]
        for block in blocks:
            if isinstance(block, SyncGraph):
                undo.callback(setattr, block, "_cached_graph", block._cached_graph)
                layers += [node.layer for node in block._nodes]
            elif isinstance(block, SymbolBlock):
                undo.callback(vars(block).pop, "forward")
                vars(block)["forward"] = functools.partial(composed, block)
        for layer in layers:
            # Processes count the nodes of a layer alike, and mostly one of them exports.
            if isinstance(layer, SyncBatchNorm):
                undo.callback(setattr, layer, "_places", copy.copy(layer._places))
        yield


def _numbered(name, number):
    return f"{name}#{number}"


def _used_parameters(parameters, graph, inputs):
    """{name: the parameter} of the graph, which gets their names back."""
    by_variable = {name: (name, same[0]) for name, same in parameters.items() if len(same) == 1}
    for name, same in parameters.items():
        if len(same) > 1:
            by_variable.update({_numbered(name, i): (name, p) for i, p in enumerate(same)})
    used = {}
    for node in graph.nodes():
        if node.op != "null" or node.name in inputs:
            continue
        # In the graph of a SymbolBlock they have their names.
        if node.name not in by_variable and node.name not in parameters:
            raise ExportError(
                f"{node.name} in the graph is neither an input nor a parameter of the net."
            )
        name, parameter = by_variable.get(node.name, (node.name, None))
        if name in used or parameter is None:
            raise ExportError(
                f"Two parameters have the name {name}, and a graph tells them apart by name: "
                "give each block a prefix of its own."
            )
        node.name = name
        used[name] = parameter
    return used


def _values(parameters, graph, inputs):
    """{name: a copy on the CPU of the value} of the graph's parameters."""
    unset, arrays, uneven = [], {}, []
    for name, parameter in _used_parameters(parameters, graph, inputs).items():
        if parameter._data is None:
            unset.append(name)
            continue
        arrays[name], equal = _value(parameter)
        if not equal:
            uneven.append(name)
    if unset:
        raise ValueError(
            f"{len(unset)} parameters have no values yet, {unset[0]} among them: call "
            "net.initialize() or load_parameters(), and the net once on data, so that their shapes "
            "are known."
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
    """(a copy on the CPU, whether all contexts have the same)."""
    if parameter._stype != "default":
        return parameter._reduce().as_nd_ndarray(), True
    arrays = [array.copyto(mx.cpu()).as_nd_ndarray() for array in parameter.list_data()]
    first = arrays[0].asnumpy().tobytes()
    if all(array.asnumpy().tobytes() == first for array in arrays[1:]):
        return arrays[0], True
    return parameter._reduce().as_nd_ndarray(), False


def _require_stock(graph):
    custom = sorted({node.operator for node in graph.all_nodes() if node.op == "Custom"})
    if custom:
        raise ExportError(
            f"The net has custom operators ({', '.join(custom)}), which stock MXNet does not load: "
            "build it without them."
        )


def _require_onnx(graph, arrays, dtype):
    """Of a net whose outputs are not random, and in a dtype that MXNet's exporter has."""
    random = sorted(
        {
            node.op
            for node in graph.all_nodes()
            if node.op.startswith(("_random_", "_sample_"))
            or node.op == "Dropout"
            and node.attrs.get("mode") == "always"
        }
    )
    if random:
        raise ExportError(
            f"The net draws random numbers in inference ({', '.join(random)}), so ONNX Runtime's "
            "outputs cannot be compared with MXNet's: export it without onnx=."
        )
    if not dtype and any(is_bfloat16(array.dtype) for array in arrays.values()):
        raise ExportError(
            "The net's parameters are bfloat16, which MXNet's converters to ONNX do not know: give "
            "dtype='float32'."
        )


def _set_fixed_gammas(graph, arrays):
    """Writes 1 for each gamma that ``fix_gamma`` takes for 1, as not all who read a file heed the
    flag, and MXNet itself overwrites it."""
    users = graph.users()
    for norm in [node for node in graph.nodes() if node.op == "BatchNorm"]:
        if not is_true(norm.attrs.get("fix_gamma", "True")):
            continue
        gamma, _ = norm.inputs[1]
        if gamma.name not in arrays:
            continue
        others = [
            user
            for user, number in users[id(gamma)]
            if user is None
            or user.op != "BatchNorm"
            or number != 1
            or not is_true(user.attrs.get("fix_gamma", "True"))
        ]
        value = mx.nd.ones_like(arrays[gamma.name])
        if others:
            own = Node("null", graph.free_name(f"{norm.name}_gamma"))
            norm.inputs[1] = own, 0
            gamma = own
        arrays[gamma.name] = value
    outer = {id(node) for node in graph.nodes()}
    for norm in graph.all_nodes():
        if norm.op == "BatchNorm" and is_true(norm.attrs.get("fix_gamma", "True")):
            name = norm.inputs[1][0].name
            if id(norm) not in outer and name in arrays:
                arrays[name] = mx.nd.ones_like(arrays[name])


def _of_norms(graph):
    """The names of all parameters of BatchNorm."""
    norms = [node for node in graph.all_nodes() if node.op == "BatchNorm"]
    return {node.name for norm in norms for node, _ in norm.inputs[1:]}


def _cast(graph, arrays, dtype):
    """Converts float parameters. Those of BatchNorm have float32 beside data in float16."""
    of_norms = _of_norms(graph)
    for name, array in arrays.items():
        target = "float32" if name in of_norms and dtype == "float16" else dtype
        if np.dtype(array.dtype).kind != "f" or np.dtype(array.dtype) == target:
            continue
        arrays[name] = array.astype(target)
        finite = np.isfinite(arrays[name].asnumpy())
        if not finite.all() and np.isfinite(array.asnumpy()).all():
            raise ExportError(
                f"{name} has values up to {np.abs(array.asnumpy()).max():.3g}, which {target} does "
                "not hold: export it in its own dtype."
            )


def _input_dtype(graph, symbol, arrays, inputs):
    """The dtype of the inputs, that of most weights; ExportError where no dtype fits the graph."""
    of_norms = _of_norms(graph)
    dtypes = collections.Counter(
        np.dtype(array.dtype).name
        for name, array in arrays.items()
        if name not in of_norms and np.dtype(array.dtype).kind == "f"
    )
    known = {name: array.dtype for name, array in arrays.items()}
    failure = None
    for dtype in [*(name for name, _ in dtypes.most_common()), "float32"]:
        try:
            symbol.infer_type(**known, **dict.fromkeys(inputs, np.dtype(dtype)))
            return np.dtype(dtype)
        except mx.MXNetError as error:
            failure = failure or error
    raise ExportError(
        f"The dtypes of the graph do not fit each other ({last_line(failure)}): the net fixes a "
        "dtype somewhere; export it in the one that it was built for."
    ) from failure


def _check_inference(symbol, shapes):
    try:
        symbol.infer_shape_partial(**shapes)
    except Exception as error:  # A bare one for sides of 2 ** 31 and more.
        raise ValueError(
            f"The net does not take inputs of input_shape {', '.join(map(str, shapes.values()))} "
            f"({last_line(error)}): give the shape of what it is called with."
        ) from error


def _compare(model, plain, shapes, dtype):
    """ONNX Runtime beside MXNet, which computes float16 nets in float32: its CPU part has no
    others."""
    symbol, arrays = plain
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    compute = "float32" if dtype == np.float16 else dtype
    values = {
        name: array.astype(compute if np.dtype(array.dtype).kind == "f" else array.dtype)
        for name, array in arrays.items()
    }

    def evaluate(inputs):
        values.update({name: mx.nd.array(x, dtype=compute) for name, x in inputs.items()})
        with mx.autograd.pause(train_mode=False):
            outputs = mx.nd.CachedOp(symbol)(*(values[name] for name in symbol.list_inputs()))
        return [y.asnumpy() for y in (outputs if isinstance(outputs, list) else [outputs])]

    return onnx_model.compare(model, evaluate, inputs, dtype)
