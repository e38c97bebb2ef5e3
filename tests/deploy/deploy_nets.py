"""Nets with values, and what their exports contain and compute."""

import json
from pathlib import Path

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
import stock
from mxnet import gluon
from mxnet.gluon import nn
from tolerances import relative_error

LIMITS = {"running_mean": (-0.5, 0.5), "beta": (-0.5, 0.5), "running_var": (0.5, 2)}
LIMITS["gamma"] = (0.5, 1.5)


def randomize(net, seed=0):
    """Random values show in the output if a layer is missing or swapped."""
    rng = np.random.default_rng(seed)
    for name, parameter in net.collect_params().items():
        for role, limits in LIMITS.items():
            if name.endswith(role):
                parameter.set_data(mx.nd.array(rng.uniform(*limits, parameter.shape)))


def ready(net, *shapes, seed=0, ctx=None):
    """Gives the net values; inputs of these shapes, and its outputs."""
    net.initialize(mx.init.Xavier(), ctx=ctx)
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    forward(net, *inputs)
    randomize(net)
    return inputs, forward(net, *inputs)


def forward(net, *inputs):
    outputs = net(*(mx.nd.array(x, dtype=x.dtype) for x in inputs))
    return [y.asnumpy() for y in stock.listed(outputs)]


def load(prefix, names=("data",), epoch=0):
    with pytest.warns(UserWarning):  # MXNet's own, for inputs whose dtype a file does not say
        return gluon.SymbolBlock.imports(
            f"{prefix}-symbol.json", list(names), f"{prefix}-{epoch:04d}.params"
        )


def operators(prefix):
    nodes = json.loads(Path(f"{prefix}-symbol.json").read_text())["nodes"]
    return [node["op"] for node in nodes if node["op"] != "null"]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def assert_outputs(outputs, expected, tolerance):
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected):
        error = relative_error(output, wanted)
        assert error <= tolerance, f"{error:.3g} > {tolerance:g}"


class Net(gluon.HybridBlock):
    """Layers by name, and what `call(net, F, *inputs)` makes of them."""

    def __init__(self, call, **layers):
        super().__init__(prefix="net_")
        self._call = call
        for name, layer in layers.items():
            setattr(self, name, layer)

    def hybrid_forward(self, F, *inputs):
        return self._call(self, F, *inputs)


def sequential(*layers):
    net = nn.HybridSequential(prefix="net_")
    net.add(*layers)
    return net


def conv_net(*more, channels=4, **settings):
    """A convolution of 3 channels, our layer, and more."""
    norm = sbn.SyncBatchNorm(in_channels=channels, **settings)
    return sequential(nn.Conv2D(channels, 3, in_channels=3), norm, *more)


def residual(norm=sbn.SyncBatchNorm):
    """Two blocks with shortcuts; the second is strided and has a convolution in its shortcut."""

    def body(inputs, outputs, stride):
        first = nn.Conv2D(outputs, 3, stride, 1, in_channels=inputs)
        second = nn.Conv2D(outputs, 3, 1, 1, in_channels=outputs, use_bias=False)
        return sequential(first, norm(), nn.Activation("relu"), second, norm())

    def call(net, F, x):
        x = F.relu(net.stem(x))
        x = F.relu(net.first(x) + x)
        x = F.relu(net.second(x) + net.shortcut(x))
        return net.head(F.mean(x, axis=(2, 3)))

    return Net(
        call,
        stem=sequential(nn.Conv2D(8, 3, padding=1, in_channels=3, use_bias=False), norm()),
        first=body(8, 8, 1),
        second=body(8, 16, 2),
        shortcut=sequential(nn.Conv2D(16, 1, 2, in_channels=8, use_bias=False), norm()),
        head=nn.Dense(7, in_units=16),
    )
