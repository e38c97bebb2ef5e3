"""Folds batch normalization into the layer before it."""

import mxnet as mx
import numpy as np

from ..graph.symbols import Node, integers, settings_of
from ..layers.operator import is_true

# The default of no_bias.
_NO_BIAS = {"Convolution": "False", "Deconvolution": "True", "FullyConnected": "False"}


def fold(graph, arrays, dtype=None):
    """Folds each ``BatchNorm`` of a Graph in inference into the convolution, transposed convolution
    or dense layer before it, where that gives the same outputs: the formula is in the docstring of
    ``export``. Computes in float64 and rounds once to `dtype`, by default that of the weight.

    Changes the graph and arrays {name: NDArray}. Returns the names of the folded nodes, and {name
    of a node that stays: reason}.
    """
    folded, left = [], {}
    for norm in [node for node in graph.nodes() if node.op == "BatchNorm"]:
        why = _fold_one(graph, norm, arrays, dtype)
        if why:
            left[norm.name] = why
        else:
            folded.append(norm.name)
    for name in arrays.keys() - {node.name for node in graph.nodes()}:
        del arrays[name]
    return folded, left


def _fold_one(graph, norm, arrays, dtype):
    """Folds one node. Returns the reason if it cannot be folded."""
    layer, _ = norm.inputs[0]
    if layer.op not in _NO_BIAS:
        return f"it follows {'an input' if layer.op == 'null' else layer.op}"
    users = graph.users()
    if len(users[id(layer)]) > 1:
        return f"{layer.name} has other users"
    if any(graph.entry(*user)[1] > 0 for user in users[id(norm)]):
        return "its mean or variance is used"
    biased = not is_true(layer.attrs.get("no_bias", _NO_BIAS[layer.op]))
    own = [node for node, _ in layer.inputs[1 : 3 if biased else 2]]
    for parameter in own + [node for node, _ in norm.inputs[1:]]:
        if parameter.name not in arrays:
            return f"{parameter.name} is computed"
    for parameter in own:
        if len(users[id(parameter)]) > 1:
            return f"{parameter.name} is shared"
        if np.dtype(arrays[parameter.name].dtype).kind != "f":
            return f"{parameter.name} is {np.dtype(arrays[parameter.name].dtype)}"
    settings = settings_of(norm)
    where = _channel_axis(layer)
    if settings.axis not in where:
        return f"it normalizes axis {settings.axis}, {layer.name} has its channels on {where[0]}"

    def exact(node):
        return arrays[node.name].asnumpy().astype(np.float64)

    gamma, beta, mean, variance = (exact(node) for node, _ in norm.inputs[1:])
    if settings.fix_gamma:
        gamma = np.ones_like(gamma)
    k = gamma / np.sqrt(variance + settings.epsilon)
    bias = exact(own[1]) if biased else np.zeros_like(mean)
    dtype = dtype or arrays[own[0].name].dtype
    with np.errstate(over="ignore", invalid="ignore"):
        new_weight = _scaled(layer, exact(own[0]), k).astype(dtype)
        new_bias = (k * (bias - mean) + beta).astype(dtype)
    if not (np.isfinite(new_weight).all() and np.isfinite(new_bias).all()):
        return f"{own[0].name} would not be finite in {np.dtype(dtype)}"
    if biased:
        bias_name = own[1].name
    else:
        stem = layer.name[: -len("_fwd")] if layer.name.endswith("_fwd") else layer.name
        bias_name = graph.free_name(f"{stem}_bias")
        layer.inputs.append((Node("null", bias_name), 0))
        layer.attrs["no_bias"] = "False"
    arrays[own[0].name] = mx.nd.array(new_weight, dtype=dtype)
    arrays[bias_name] = mx.nd.array(new_bias, dtype=dtype)
    graph.rewrite(lambda node: (layer, 0) if node is norm else None)
    return None


def _channel_axis(layer):
    """The channel axis of a layer's output, as every number that denotes it."""
    if layer.op == "FullyConnected":
        return (1, -1) if is_true(layer.attrs.get("flatten", "True")) else (-1,)
    dimensions = len(integers(layer.attrs["kernel"])) + 2
    layout = layer.attrs.get("layout", "None")
    axis = layout.index("C") if "C" in layout else 1
    return axis, axis - dimensions


def _scaled(layer, weight, k):
    """The weight of a layer, with the output channels multiplied by k of shape (C,)."""
    if layer.op != "Deconvolution":
        return weight * k.reshape(-1, *[1] * (weight.ndim - 1))
    # (inputs, C / groups, ...), or channels last. Each group of inputs has its own output channels.
    groups = int(layer.attrs.get("num_group", 1))
    layout = layer.attrs.get("layout", "None")
    parts = weight.reshape(groups, -1, *weight.shape[1:])
    shape = [1] * parts.ndim
    shape[0] = groups
    shape[-1 if layout.endswith("C") else 2] = len(k) // groups
    return (parts * k.reshape(shape)).reshape(weight.shape)
