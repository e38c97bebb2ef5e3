"""sbn.export(net, fold=True): what is folded into the layer before it, and what stays."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from deploy_nets import (
    Net,
    assert_outputs,
    forward,
    load,
    operators,
    randomize,
    ready,
    sequential,
)
from mxnet.gluon import nn
from tolerances import EXPORTED, assert_same_bits


@pytest.mark.parametrize(
    "make, shape, axis",
    [
        (lambda: nn.Conv2D(4, 3, in_channels=6, use_bias=False), (2, 6, 7, 8), -3),
        (lambda: nn.Conv2D(6, 3, groups=2, in_channels=6), (2, 6, 7, 8), 1),
        (lambda: nn.Conv1D(4, 3, in_channels=6), (2, 6, 8), 1),
        (lambda: nn.Conv3D(4, 3, in_channels=6), (2, 6, 5, 6, 7), 1),
        (lambda: nn.Conv2DTranspose(4, 3, in_channels=6, use_bias=False), (2, 6, 7, 8), 1),
        (lambda: nn.Conv2DTranspose(4, 3, 2, 1, 1, groups=2, in_channels=6), (2, 6, 7, 8), 1),
        (lambda: nn.Dense(4, in_units=6, use_bias=False), (3, 6), -1),
        (lambda: nn.Dense(4, in_units=12), (3, 6, 2), 1),
        (lambda: nn.Dense(4, in_units=6, flatten=False), (3, 5, 6), -1),
    ],
)
def test_what_is_folded(tmp_path, make, shape, axis):
    net = sequential(make(), sbn.SyncBatchNorm(axis=axis))
    [x], expected = ready(net, shape)
    result = sbn.export(net, tmp_path / "m", fold=True)
    assert len(result.folded) == 1 and not result.left
    assert len(operators(tmp_path / "m")) == 1
    assert_outputs(forward(load(tmp_path / "m"), x), expected, EXPORTED[True])
    names = mx.nd.load(str(tmp_path / "m-0000.params"))
    assert len(names) == 2 and not any("running" in name for name in names)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv2D, nn.Conv2DTranspose])
def test_channels_last(tmp_path, kind, groups):
    """MXNet computes NHWC only on GPUs, so the weights are compared with those of NCHW."""
    weights = []
    for layout in ("NCHW", "NHWC"):
        norm = sbn.SyncBatchNorm(axis=layout.index("C"), in_channels=6)
        net = sequential(kind(6, 3, groups=groups, in_channels=4, layout=layout), norm)
        net.initialize()
        shape = (6, 4 // groups, 3, 3) if kind is nn.Conv2D else (4, 6 // groups, 3, 3)
        weight = np.random.default_rng(1).standard_normal(shape)
        net[0].weight.set_data(
            mx.nd.array(weight if layout == "NCHW" else weight.transpose(0, 2, 3, 1))
        )
        randomize(net)
        assert len(sbn.export(net, tmp_path / "m", fold=True).folded) == 1
        arrays = mx.nd.load(str(tmp_path / "m-0000.params"))
        [weight] = [a.asnumpy() for name, a in arrays.items() if "weight" in name]
        [bias] = [a.asnumpy() for name, a in arrays.items() if "bias" in name]
        weights.append((weight if layout == "NCHW" else weight.transpose(0, 3, 1, 2), bias))
    assert_same_bits(weights[0][0], weights[1][0])
    assert_same_bits(weights[0][1], weights[1][1])


def computed_gamma(net, F, x):
    parameters = net.norm._reg_params.values()
    gamma, *others = [p.var() if F is mx.sym else p.data() for p in parameters]
    return F.BatchNorm(net.conv(x), F.exp(gamma), *others, fix_gamma=False, name="fwd")


LEFT = {
    "shared weights": (
        lambda net, F, x: net.other(net.conv(F.relu(net.norm(net.conv(x))))),
        "conv_weight is shared",
    ),
    "two users": (lambda net, F, x: net.norm(y := net.conv(x)) + y, "conv_fwd has other users"),
    "output of the net": (
        lambda net, F, x: (net.norm(y := net.conv(x)), y),
        "conv_fwd has other users",
    ),
    "relu": (lambda net, F, x: net.norm(F.relu(net.conv(x))), "it follows relu"),
    "computed gamma": (computed_gamma, "net_exp0 is computed"),
    "another axis": (
        lambda net, F, x: net.rows(net.conv(x)),
        "it normalizes axis 2, conv_fwd has its channels on 1",
    ),
    # Each folds one layer, into a convolution of its own.
    "shared norm": (lambda net, F, x: net.norm(net.second(F.relu(net.norm(net.conv(x))))), None),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_cannot_be_folded_is_left_alone(tmp_path, kind):
    call, why = LEFT[kind]
    layers = {"norm": sbn.SyncBatchNorm(in_channels=3), "other": sbn.SyncBatchNorm(in_channels=3)}
    layers["rows"] = sbn.SyncBatchNorm(axis=2, in_channels=6)
    for name in ("conv", "second"):
        layers[name] = nn.Conv2D(3, 3, padding=1, in_channels=3, prefix=f"{name}_")
    net = Net(call, **layers)
    [x], expected = ready(net, (2, 3, 6, 6))
    result = sbn.export(net, tmp_path / "m", fold=True)
    assert len(result.folded) == (0 if why else 2)
    assert set(result.left.values()) == ({why} if why else set())
    assert operators(tmp_path / "m").count("BatchNorm") == len(result.left)
    assert_outputs(forward(load(tmp_path / "m"), x), expected, EXPORTED[True])
