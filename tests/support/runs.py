"""Runs a layer on several CPU contexts and collects the results."""

import contextlib
from collections import namedtuple

import mxnet as mx
import numpy as np
from devices import context
from dtypes import numpy_dtype, parameter_dtype
from mxnet.gluon import nn
from mxnet.util import is_np_array

Result = namedtuple("Result", "y dx dgamma dbeta running_mean running_var")

# The arguments of hybridize() for all modes of a block; None: not hybridized.
MODES = {
    "imperative": None,
    "hybrid": {},
    "static_alloc": {"static_alloc": True},
    "static_shape": {"static_alloc": True, "static_shape": True},
}


@contextlib.contextmanager
def numpy_arrays():
    """With MXNet's NumPy arrays enabled."""
    mx.npx.set_np()
    try:
        yield
    finally:
        mx.npx.reset_np()


# MXNet 1.7 has none.
STOCK_RELU = getattr(nn, "BatchNormReLU", nn.BatchNorm)


def contexts(count):
    return [context(i) for i in range(count)]


def hybridize(block, mode):
    """As one of MODES says."""
    if MODES[mode] is not None:
        block.hybridize(**MODES[mode])


def prepare(block, devices, dtype="float32", mode=None, gamma=None, beta=None):
    """Initializes a layer on `devices`, with these values of gamma and beta."""
    block.initialize(ctx=devices)
    block.cast(numpy_dtype(dtype))
    if mode is not None:
        block.hybridize(**mode)
    for parameter, value in ((block.gamma, gamma), (block.beta, beta)):
        if value is not None:
            parameter.set_data(mx.nd.array(value, dtype=parameter_dtype(dtype)))
    return block


def shards(array, sizes, devices):
    edges = np.cumsum([0, *sizes])
    assert edges[-1] == len(array) and len(sizes) == len(devices)
    make = mx.np.array if is_np_array() else mx.nd.array
    return [
        make(array[start:stop], ctx=device, dtype=array.dtype)
        for start, stop, device in zip(edges, edges[1:], devices)
    ]


def run(block, x, dy, sizes, devices, steps=1):
    """Forward and backward, with the batch split into `sizes`. Adds the gradients of parameters
    over all devices."""
    xs, dys = shards(x, sizes, devices), shards(dy, sizes, devices)
    for shard in xs:
        shard.attach_grad()
    for _ in range(steps):
        with mx.autograd.record():
            ys = [block(shard) for shard in xs]
        mx.autograd.backward(ys, dys)
    return Result(
        np.concatenate([y.asnumpy() for y in ys]),
        np.concatenate([shard.grad.asnumpy() for shard in xs]),
        sum(_gradient(block.gamma, device) for device in devices),
        sum(_gradient(block.beta, device) for device in devices),
        _same_everywhere(block.running_mean),
        _same_everywhere(block.running_var),
    )


def _gradient(parameter, device):
    if parameter.grad_req == "null":
        return np.zeros(parameter.shape)
    return parameter.grad(device).asnumpy().astype(np.float64)


def _same_everywhere(parameter):
    values = [array.asnumpy() for array in parameter.list_data()]
    for value in values[1:]:
        np.testing.assert_array_equal(value, values[0])
    return values[0]
