"""The graph of a net in inference. The net does not change."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import Block, HybridBlock, Parameter, SymbolBlock
from mxnet.gluon.block import _flatten, _regroup
from mxnet.util import is_np_array, is_np_shape, np_array, np_shape

from ..layers.operator import is_numpy
from .blocks import walk
from .symbol_block import SyncGraph, composed
from .symbols import ExportError, variable

if TYPE_CHECKING:
    import numpy as np

# {name: the parameters with that name}
Parameters = Mapping[str, Sequence[Parameter]]


def parameters_of(net: Block) -> dict[str, list[Parameter]]:
    """{name: the parameters with that name} of a net."""
    found: dict[str, dict[int, Parameter]] = {}
    for _, block in walk(net):
        for parameter in (*block.params.values(), *getattr(block, "_reg_params", {}).values()):
            found.setdefault(parameter.name, {})[id(parameter)] = parameter
    return {name: list(same.values()) for name, same in found.items()}


def trace(
    net: Block, shapes: Sequence[Any] | None, parameters: Parameters
) -> tuple[mx.sym.Symbol, list[str]]:
    """The symbol of a net in inference, and the names of its inputs. Parameters that share a name
    get a number after it."""
    with _in_inference(net, parameters):
        try:
            variables = [variable(name) for name in _input_names(net, shapes)]
            outputs, _ = _flatten(net(*_arguments(net, variables)), "output")
            symbol = mx.sym.Group(outputs) if len(outputs) > 1 else outputs[0]
        except Exception as error:  # The net's code may raise anything.
            raise ExportError(
                f"{type(net).__name__} '{net.name}' cannot be traced as a graph "
                f"({type(error).__name__}: {last_line(error)}): its forward must work with "
                "symbols, as for hybridize(). For a net of several inputs, give input_shape=[...]."
            ) from error
    return symbol, [each.name for each in variables]


def run(
    net: Block,
    parameters: Parameters,
    values: Mapping[Parameter, mx.nd.NDArray],
    inputs: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """The outputs of the net itself in inference, as NumPy arrays: on the CPU and not hybridized.

    values: {parameter: NDArray} to compute with; inputs: NumPy arrays, in the order of the inputs.
    """
    with _in_inference(net, parameters) as is_np, contextlib.ExitStack() as undo, mx.cpu():

        def change(thing: Any, **attributes: Any) -> None:
            undo.callback(vars(thing).update, {name: vars(thing)[name] for name in attributes})
            vars(thing).update(attributes)

        for parameter, value in values.items():
            data = [value.as_np_ndarray() if is_np else value]
            # MXNet indexes by the lowest bit of the device type, 1 for the CPU.
            change(parameter, _data=data, _ctx_list=[mx.cpu()], _ctx_map=[[], [0]])
        for _, block in walk(net):
            if isinstance(block, HybridBlock):
                change(block, _active=False, _cached_op=None, _cached_op_args=[])
            if isinstance(block, SyncGraph):
                block._splice()
        make = mx.np.array if is_np else mx.nd.array
        arrays = [make(x, dtype=x.dtype) for x in inputs]
        outputs, _ = _flatten(net(*_arguments(net, arrays)), "output")
        return [y.asnumpy() for y in outputs]


@contextlib.contextmanager
def _in_inference(net: Block, parameters: Parameters) -> Iterator[bool]:
    is_np = _is_numpy_net(net, parameters)
    with contextlib.ExitStack() as stack:
        # MXNet's NumPy arrays need its NumPy shapes.
        stack.enter_context(np_shape(is_np or is_np_shape()))
        stack.enter_context(np_array(is_np))
        stack.enter_context(_unchanged(net, parameters))
        stack.enter_context(mx.autograd.pause(train_mode=False))
        stack.enter_context(mx.name.NameManager())
        yield is_np


def _is_compiled(net: Block) -> bool:
    return isinstance(net, HybridBlock) and bool(net._cached_graph)


def _is_numpy_net(net: Block, parameters: Parameters) -> bool:
    """Whether a net computes with MXNet's NumPy arrays, by `set_np` or by `use_np`."""
    if _is_compiled(net):
        return is_numpy(net._cached_graph[0][0])
    arrays = [
        parameter._data[0] for same in parameters.values() for parameter in same if parameter._data
    ]
    return any(map(is_numpy, arrays)) if arrays else is_np_array()


def _input_names(net: Block, shapes: Sequence[Any] | None) -> list[str]:
    if _is_compiled(net):
        return [known.name for known in net._cached_graph[0]]
    count = len(shapes or [None])
    return ["data"] if count == 1 else [f"data{number}" for number in range(count)]


def _arguments(net: Block, inputs: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a call of the net, made from its inputs."""
    if not _is_compiled(net):
        return inputs
    rest = iter(inputs)
    # An input that is None has no variable.
    return _regroup(
        [next(rest) if size else None for size in _sizes(net._in_format)], net._in_format
    )


def _sizes(form: int | Sequence[Any]) -> list[int]:
    """1 for each input in MXNet's description of a call, or 0 for None."""
    if isinstance(form, int):
        return [0] if form < 0 else [1] * max(1, form)
    return [size for each in form for size in _sizes(each)]


@contextlib.contextmanager
def _unchanged(net: Block, parameters: Parameters) -> Iterator[None]:
    """Restores what tracing changes, and disables the blocks' hooks."""
    blocks = [block for _, block in walk(net)]
    with contextlib.ExitStack() as undo:
        for name, same in parameters.items():
            for number, parameter in enumerate(same if len(same) > 1 else ()):
                undo.callback(setattr, parameter, "_var", parameter._var)
                parameter._var = variable(numbered(name, number))
        for block in blocks:
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                hooks = getattr(block, name)
                undo.callback(setattr, block, name, hooks)
                setattr(block, name, type(hooks)())
        for block in blocks:
            if isinstance(block, SyncGraph):
                undo.callback(setattr, block, "_cached_graph", block._cached_graph)
            elif isinstance(block, SymbolBlock):
                undo.callback(vars(block).pop, "forward")
                vars(block)["forward"] = functools.partial(composed, block)
        yield


def numbered(name: str, number: int) -> str:
    return f"{name}#{number}"


def last_line(error: BaseException | None) -> str:
    """The message of an error, without MXNet's stack trace and line numbers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return re.sub(r"(MXNetError: )?(\[[\d:]+\] \S+:\d+: )?", "", text)[:300]
