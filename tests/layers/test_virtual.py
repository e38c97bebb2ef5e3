"""Compares VirtualBatchNorm with the same number of devices that do not synchronize."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from devices import KIND
from mxnet import autograd
from runs import MODES, contexts, prepare, shards
from tolerances import assert_close, assert_same_bits

STATISTICS = "running_mean", "running_var"


def sizes_of(samples, devices):
    return [len(part) for part in np.array_split(np.arange(samples), devices)]


def data(shape, dtype="float32", seed=0):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(shape) + 100 * generator.random(shape[1:])
    return x.astype(dtype), generator.standard_normal(shape).astype(dtype)


def alike(count, arguments, dtype="float32", mode="imperative"):
    """A layer on `count` unsynchronized devices, and a virtual one on one device."""
    generator = np.random.default_rng(9)
    gamma, beta = generator.standard_normal((2, 5))
    group = sbn.SyncGroup(group_size=1)
    real = sbn.SyncBatchNorm(in_channels=5, group=group, **arguments)
    virtual = sbn.VirtualBatchNorm(count, in_channels=5, **arguments)
    settings = dict(dtype=dtype, mode=MODES[mode], gamma=gamma, beta=beta)
    return prepare(real, contexts(count), **settings), prepare(virtual, contexts(1), **settings)


def call(layer, x, dy, devices):
    sizes = sizes_of(len(x), len(devices))
    xs, dys = shards(x, sizes, devices), shards(dy, sizes, devices)
    for array in xs:
        array.attach_grad()
    with autograd.record():
        ys = [layer(array) for array in xs]
    autograd.backward(ys, dys)
    mx.nd.waitall()
    return [np.concatenate([a.asnumpy() for a in arrays]) for arrays in (ys, [x.grad for x in xs])]


def saved(layer, path):
    """The values that MXNet writes to a file: the mean over the devices."""
    layer.save_parameters(str(path))
    return {name: mx.nd.load(str(path))[name].asnumpy() for name in STATISTICS}


SHAPES = {
    "images": ((7, 5, 4, 3), {}),
    "vectors": ((11, 5), {"center": False}),
    "channels last": ((8, 3, 2, 5), {"axis": -1, "scale": False, "momentum": 0.7}),
    "cumulative": ((9, 5, 6), {"momentum": None, "running_variance": "unbiased"}),
}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("what", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("mode", ["imperative", "static_alloc"])
def test_the_bits_of_several_devices(count, what, dtype, mode, tmp_path):
    shape, arguments = SHAPES[what]
    real, virtual = alike(count, arguments, dtype, mode)
    for number in range(4):
        x, dy = data(shape, dtype, number)
        expected = call(real, x, dy, contexts(count))
        for result, name in zip(call(virtual, x, dy, contexts(1)), ("y", "dx")):
            assert_same_bits(result, expected[("y", "dx").index(name)], name)
        for name in ("gamma", "beta"):
            if getattr(real, name).grad_req == "null":
                continue
            gradients = [getattr(real, name).grad(device).asnumpy() for device in contexts(count)]
            gradient = getattr(virtual, name).grad().asnumpy()
            assert_close(gradient, sum(gradients), "float32" if dtype == "float16" else dtype)
        statistics = saved(real, tmp_path / "real")
        for name, value in saved(virtual, tmp_path / "virtual").items():
            # Those of real devices are rounded before MXNet averages them.
            assert_close(value, statistics[name], "float64" if dtype == "float64" else "float32")
            assert_same_bits(getattr(virtual, name).data().asnumpy(), value, name)


@pytest.mark.parametrize("mode", MODES)
def test_too_few_samples(mode):
    layer = sbn.VirtualBatchNorm(3, in_channels=5, prefix="stage3_norm_")
    prepare(layer, contexts(2), mode=MODES[mode])  # And the second device is not waited for.
    with autograd.record():
        y = layer(mx.nd.ones((2, 5)))
    words = rf"VirtualBatchNorm 'stage3_norm' on {KIND}\(0\): .*virtual_devices=3.*2 samples"
    with pytest.raises(mx.MXNetError, match=words):
        y.wait_to_read()
    x, dy = data((3, 5))
    call(layer, x, dy, contexts(1))


def test_channels_on_the_axis_of_the_samples():
    layer = prepare(sbn.VirtualBatchNorm(2, in_channels=5, axis=-2), contexts(1))
    layer(mx.nd.ones((2, 5, 3)))
    with pytest.raises(mx.MXNetError, match=r"axis=-2.*shape \(5, 2\).*another axis"):
        layer(mx.nd.ones((5, 2)))
    with pytest.raises(mx.MXNetError, match=f"VirtualBatchNorm '{layer.name}' got data of shape"):
        layer(mx.nd.ones((2, 4, 3)))


@pytest.mark.parametrize(
    "count, arguments, words",
    [
        *((value, {}, "virtual_devices is") for value in (0, -1, 1.5, True, "2", None)),
        (2, {"num_devices": 2}, "its devices do not wait"),
        (2, {"group": sbn.SyncGroup()}, "its devices do not wait"),
    ],
)
def test_invalid_arguments(count, arguments, words):
    with pytest.raises(ValueError if isinstance(count, (int, float)) else TypeError, match=words):
        sbn.VirtualBatchNorm(count, **arguments)
