"""Writes a trained net for stock MXNet and ONNX Runtime, which load it without this package."""

from __future__ import annotations

import contextlib
import logging
import os
from operator import index
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block

from ..arguments import error_for, is_whole
from ..graph.blocks import check_block
from ..graph.symbols import (
    ExportError,
    Graph,
    is_random,
    make_stock,
)
from ..graph.trace import last_line, parameters_of, run, trace
from ..layers.operator import is_bfloat16
from . import _onnx_model
from ._dtypes import DTYPES, cast_all, input_dtype, write_types
from ._fold import fold as fold_graph
from ._gammas import set_fixed_gammas, set_least_gammas
from ._values import used_parameters, values_of
from .check import REPORT, check, evaluate, likely_shapes
from .files import (
    FileError,
    bytes_writer,
    parameter_writer,
    read_parameters,
    read_symbol,
    tagged,
    write_all,
)

__all__ = ["ExportError", "Exported", "FileError", "export"]

_log = logging.getLogger("gluon_syncbn")


class Exported(NamedTuple):
    """The result of an export. As a str, a few lines.

    Attributes
    ----------
    symbol, params : str
        The files.
    onnx : str or None
        The ONNX file.
    onnx_error : float or None
        The largest difference between ONNX Runtime's outputs and the net's on random input,
        relative to the largest value.
    folded : tuple of str
        The nodes of batch normalization that were folded into the layer before them.
    left : dict of str to str
        With ``fold=True``, the nodes that were not folded, and why.
    error : float or None
        The largest difference between the outputs of symbol and params and those of the net on
        random input, relative to the largest value. None if they could not be compared.
    """

    symbol: str
    params: str
    onnx: str | None
    onnx_error: float | None
    folded: tuple[str, ...]
    left: dict[str, str]
    error: float | None

    def __str__(self) -> str:
        def line(files: str, error: float | None) -> str:
            if error is None:
                return f"{files} (not compared with the net)"
            return f"{files} (differs from the net by {error:.1g} of the largest value)"

        text = line(f"{self.symbol}, {self.params}", self.error)
        if self.onnx:
            text += "\n" + line(self.onnx, self.onnx_error)
        if self.folded or self.left:
            text += f"\n{len(self.folded)} layers folded, {len(self.left)} not"
        return text + "".join(f"\n  {name}: {why}" for name, why in self.left.items())


def export(
    net: Block,
    path: str | os.PathLike[str],
    epoch: int = 0,
    fold: bool = False,
    onnx: str | os.PathLike[str] | None = None,
    input_shape: Sequence[int] | Sequence[Sequence[int]] | None = None,
    dtype: Any = None,
    any_batch: bool = False,
) -> Exported:
    r"""Writes a net for inference with stock operators: ``path-symbol.json`` and
    ``path-0000.params``.

    ``mxnet.gluon.SymbolBlock.imports``, ``mxnet.mod.Module`` and MXNet's other interfaces load them
    without this package. Each kind of batch normalization (:class:`SyncBatchNorm`, the contrib
    one, ``nn.BatchNorm`` and ``nn.BatchNormReLU``) becomes ``BatchNorm``, followed by
    ``elemwise_add``, ``Activation`` or ``LeakyReLU`` if it has a residual or an activation. In
    inference it computes

    .. math:: y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta

    with the running mean :math:`\mu` and variance :math:`\sigma^2`. `fold` merges it into the layer
    before it: with :math:`k = \gamma / \sqrt{\sigma^2 + \epsilon}`, the weight W of a convolution,
    transposed convolution or dense layer becomes kW and its bias :math:`k (b - \mu) + \beta`, for
    each channel.

    The export copies the values and changes neither the parameters nor the compiled graphs, so
    training continues as it would have without it. An error leaves existing files unchanged.

    Before the files get their final names, they are read back and compared with the net: both
    compute on the CPU, on random inputs. Without `input_shape`, common shapes are tried. A warning
    is logged if they cannot be compared because no shape fits, the net draws random numbers in
    inference, or it fails on random data.

    Parameters
    ----------
    net : Block
        Hybridized or not, on any contexts, in one process or several. If a parameter differs
        between contexts, as running statistics without synchronization do, the mean is written, as
        by ``save_parameters``, and a warning is logged.
    path : str or path
        The common prefix of the files.
    epoch : int, default 0
        The number in the name of the .params file, with at least four digits.
    fold : bool, default False
        Whether to fold batch normalization, if nothing else uses the layer's output or weights.
    onnx : str or path, optional
        An ONNX file to write as well, with operator set 15. ``onnx.checker`` checks it, and ONNX
        Runtime's outputs are compared with the net's on random input. Needs ``pip install
        'gluon_syncbn[onnx]'``.
    input_shape : tuple of int or list of tuples, optional
        The shape of the input, or of each. Required with `onnx`, and for a net of several inputs
        that has not been hybridized and run. The net is compared on inputs of this shape.
    dtype : {'float16', 'float32', 'float64'}, optional
        The dtype of the parameters. With float16, those of ``BatchNorm`` are float32. By default
        the dtypes do not change.
    any_batch : bool, default False
        Whether the ONNX file takes inputs of any batch size, the first of their axes. It is
        compared with the net on two of them, and does not say the sizes of its outputs.

    Returns
    -------
    Exported
        The names of the files, and which nodes were folded.

    Raises
    ------
    TypeError
        If `net` is not a Block, or an argument of another type.
    ValueError
        If an argument is invalid, or a parameter has no value yet.
    ExportError
        If the net cannot be traced or has third-party custom operators, if the ONNX model cannot be
        made, or if outputs differ from the net's by more than 1e-4 of the largest value (float16:
        3e-2). Nothing is written.
    FileError
        An OSError: a file cannot be written.
    MXNetError
        An error of an earlier step, raised here because the export waits for it.

    References
    ----------
    B. Jacob et al., Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, CVPR 2018, section 3.2, for folding.
    """
    check_block(net, "export")
    target = Target(path, epoch, fold, onnx, _check_shapes(input_shape), dtype, any_batch)
    check_target(target)
    # With static_shape, MXNet does not wait for the last running statistics of its own layers.
    mx.nd.waitall()
    parameters = parameters_of(net)
    symbol, inputs = trace(net, target.shapes, parameters)
    graph = Graph(symbol)
    used = used_parameters(parameters, graph, inputs)

    def run_net(values: Mapping[str, Any], data: Mapping[str, Any]) -> list[np.ndarray]:
        by_parameter = {used[name]: array for name, array in values.items()}
        try:
            return run(net, parameters, by_parameter, [data[name] for name in inputs])
        except Exception as error:  # The net's code may raise anything.
            with contextlib.suppress(mx.MXNetError):
                mx.nd.waitall()
            _log.info(
                "export: %s is compared by its graph, as it does not run on random data (%s).",
                net.name,
                last_line(error),
            )
            return evaluate(plain, values, data)

    plain, arrays = graph.symbol(), values_of(used)
    return write_graph(graph, arrays, inputs, target, net.name, run_net)


class Target(NamedTuple):
    """The arguments of :func:`export` after the net; `shapes` is a list or None."""

    path: str | os.PathLike[str]
    epoch: int
    fold: bool
    onnx: str | os.PathLike[str] | None
    shapes: list[tuple[int, ...]] | None
    dtype: str | None
    any_batch: bool


def write_graph(
    graph: Graph,
    arrays: dict[str, Any],
    inputs: Sequence[str],
    target: Target,
    title: str,
    run: Callable[[Mapping[str, Any], Mapping[str, Any]], list[np.ndarray]],
    advice: str = REPORT,
) -> Exported:
    """Exports a Graph with any kind of batch normalization, for a target that was checked.

    arrays: {name: NDArray}; inputs: names; run(arrays, {input: NumPy array}): the outputs that the
    files must have; advice: what an error says if they differ. Changes the graph and arrays.
    """
    path, epoch, fold, onnx, shapes, dtype, any_batch = target
    symbol, values = graph.symbol(), dict(arrays)
    if shapes and len(shapes) != len(inputs):
        raise ValueError(
            f"input_shape has {len(shapes)} shapes, and {title} has {len(inputs)} inputs "
            f"({', '.join(inputs)}): give one for each."
        )
    all_shapes = dict(zip(inputs, shapes)) if shapes else likely_shapes(symbol, arrays, inputs)
    set_least_gammas(graph, arrays)
    make_stock(graph)
    _require_stock(graph)
    graph.name_apart()
    # Inference may not read all of them.
    names = graph.variables()
    inputs = [name for name in inputs if name in names]
    if onnx is not None:
        _require_onnx(graph, arrays, dtype)
    _prepare(graph, arrays, dtype)
    folded, left = fold_graph(graph, arrays, dtype) if fold else ([], {})
    if dtype:
        cast_all(graph, arrays, dtype)
    write_types(graph, arrays)
    symbol = graph.symbol()
    named = {name: all_shapes[name] for name in inputs} if shapes else {}
    dtype_of_inputs = input_dtype(graph, symbol, arrays, inputs)
    if named:
        _check_inference(symbol, named)
    symbol_file, params_file = (
        f"{os.fspath(path)}-symbol.json",
        f"{os.fspath(path)}-{epoch:04d}.params",
    )
    writers = {
        symbol_file: bytes_writer(symbol.tojson().encode()),
        params_file: parameter_writer(tagged(arrays, symbol)),
    }
    error = onnx_error = None
    if onnx is not None:
        onnx = os.fspath(onnx)
        if any(os.path.abspath(onnx) == os.path.abspath(path) for path in writers):
            raise ValueError(f"onnx= is {onnx}, which is another file of this export: rename it.")
        model = _onnx_model.to_onnx(graph, arrays, named, dtype_of_inputs, any_batch)
        writers[onnx] = bytes_writer(model)

    def compare(temporary: Mapping[str, str]) -> None:
        nonlocal error, onnx_error
        written = read_symbol(temporary[symbol_file])
        # The names have arg: or aux: before them. MXNet loads a file without arrays as a list.
        found = read_parameters(temporary[params_file]) if arrays else {}
        found = {name[4:]: array for name, array in found.items()}
        error = check(run, values, written, found, all_shapes, title, advice)
        if onnx is not None:
            given = symbol, run, values, arrays, all_shapes, dtype_of_inputs, any_batch
            onnx_error = _onnx_model.compare(model, *given)

    write_all(writers, compare)
    return Exported(symbol_file, params_file, onnx, onnx_error, tuple(folded), left, error)


def _prepare(graph: Graph, arrays: dict[str, Any], dtype: Any) -> None:
    """Drops what only training needs."""
    for name in set(arrays) - {node.name for node in graph.nodes()}:
        del arrays[name]
    if dtype:
        # The next steps do not support bfloat16, and float32 holds its values exactly.
        arrays.update({n: a.astype("float32") for n, a in arrays.items() if is_bfloat16(a.dtype)})
    set_fixed_gammas(graph, arrays)
    for node in graph.nodes():
        if node.op == "null":
            # An initializer may be a class that the reader of the file does not have.
            for key in ("__init__", "__dtype__", "__shape__"):
                node.attrs.pop(key, None)


def _check_shapes(input_shape: Any) -> list[tuple[int, ...]] | None:
    """A list of shapes, or None."""
    if input_shape is None:
        return None
    try:
        is_one = np.ndim(input_shape[0]) == 0
        shapes = [tuple(map(index, each)) for each in ([input_shape] if is_one else input_shape)]
    except (TypeError, LookupError):
        shapes = []
    if shapes and all(shapes) and min(map(min, shapes)) > 0:
        return shapes
    raise ValueError(
        f"input_shape is {input_shape!r}: give a tuple of positive integers such as "
        "(1, 3, 224, 224), or a list of such tuples for several inputs."
    )


def check_target(target: Target) -> None:
    """Raises ValueError, TypeError, or ExportError if the packages for ONNX are missing."""
    for name, value in (("path", target.path), ("onnx", target.onnx or "")):
        if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
            raise TypeError(f"{name} is {value!r}: give the name of a file, str or pathlib.Path.")
    path = os.fspath(target.path)
    if os.path.basename(path) in ("", ".", ".."):
        raise ValueError(
            f"path is {path!r}: add the name that the files in that folder begin with, such as "
            "model of model-symbol.json."
        )
    if not is_whole(target.epoch) or target.epoch < 0:
        raise error_for(target.epoch)(f"epoch is {target.epoch!r}: give an integer from 0.")
    if target.onnx is not None:
        if target.shapes is None:
            raise ValueError("onnx needs input_shape, such as (1, 3, 224, 224).")
        _onnx_model.load_onnx()
    elif target.any_batch:
        raise ValueError(
            "any_batch is for ONNX alone: give onnx too. Stock MXNet's files take any."
        )
    if target.dtype is not None and target.dtype not in DTYPES:
        raise ValueError(f"dtype is {target.dtype!r}: give one of {', '.join(DTYPES)}, or None.")


def _require_stock(graph: Graph) -> None:
    custom = sorted({n.attrs["op_type"] for n in graph.all_nodes() if n.op == "Custom"})
    if custom:
        raise ExportError(
            f"The net has custom operators ({', '.join(custom)}), which stock MXNet does not load: "
            "build it without them."
        )


def _require_onnx(graph: Graph, arrays: Mapping[str, Any], dtype: Any) -> None:
    """The outputs must not be random, and MXNet's converters must know the dtype."""

    random = {node.op for node in filter(is_random, graph.all_nodes())}
    if random:
        raise ExportError(
            f"The net draws random numbers in inference ({', '.join(sorted(random))}), so ONNX "
            "Runtime's outputs cannot be compared with MXNet's: export it without onnx=."
        )
    if not dtype and any(is_bfloat16(array.dtype) for array in arrays.values()):
        raise ExportError(
            "MXNet cannot convert the net's bfloat16 parameters to ONNX: give dtype='float32'."
        )


def _check_inference(symbol: mx.symbol.Symbol, shapes: Mapping[str, Any]) -> None:
    try:
        symbol.infer_shape_partial(**shapes)
    except Exception as error:  # MXNet raises a plain Exception for sides of 2 ** 31 or more.
        raise ValueError(
            f"The net does not take inputs of input_shape {', '.join(map(str, shapes.values()))} "
            f"({last_line(error)}): give the shapes with which the net is called."
        ) from error
