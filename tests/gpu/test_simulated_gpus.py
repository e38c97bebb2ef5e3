"""Nets with stock layers on simulated GPUs (make test-gpu): MXNet's engine, storage, copies,
KVStore and Trainer are those for GPUs, and its operators compute as on the CPU."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "simgpu"))

import simulated_gpus  # noqa: E402

if not simulated_gpus.EXIST:
    pytest.skip("this is not the MXNet of `make test-gpu`", allow_module_level=True)

import gluon_syncbn as sbn  # noqa: E402
import mxnet as mx  # noqa: E402
from mxnet.gluon import nn  # noqa: E402

CPU, GPUS = [mx.cpu()], [mx.gpu(i) for i in range(mx.context.num_gpus())]
# Differences come from the order in which gradients are added, and grow from step to step.
TOLERANCE = 1e-5


def net_on(devices, values=None):
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(8, 3, padding=1, in_channels=3, use_bias=False),
        sbn.SyncBatchNorm(in_channels=8),
        nn.Activation("relu"),
        nn.MaxPool2D(),
        nn.Conv2D(4, 3, in_channels=8, use_bias=False),
        sbn.SyncBatchNormReLU(in_channels=4),
        nn.GlobalAvgPool2D(),
        nn.Dense(10, in_units=4),
    )
    net.initialize(mx.init.Xavier(), ctx=devices)
    for parameter, value in zip(net.collect_params().values(), values or []):
        parameter.set_data(mx.nd.array(value))
    return net


def values_of(net, device):
    return [each.data(device).asnumpy() for each in net.collect_params().values()]


def train(devices, start, batches, kvstore="device", **hybridized):
    net = net_on(devices, start)
    if hybridized:
        net.hybridize(**hybridized)
    options = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kvstore)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for x, labels in batches:
        parts = [mx.gluon.utils.split_and_load(mx.nd.array(a), devices) for a in (x, labels)]
        with mx.autograd.record():
            losses = [loss_of(net(part), wanted) for part, wanted in zip(*parts)]
        mx.autograd.backward(losses)
        trainer.step(len(x))
    return [values_of(net, device) for device in devices]


OPTIONS = [
    {},
    {"kvstore": "local"},
    {"static_alloc": True},
    {"static_alloc": True, "static_shape": True},
]
# A KVStore adds more than four arrays by other kernels than fewer.
CASES = [*((2, options) for options in OPTIONS), *((8, options) for options in OPTIONS[:2])]


@pytest.mark.parametrize("count, options", CASES)
def test_a_net_trains_as_on_the_cpu(count, options):
    assert sbn.native.library.library.gluon_syncbn_cuda()
    random = np.random.RandomState(0)
    batches = [
        (random.normal(size=(8, 3, 12, 12)).astype("float32"), random.randint(0, 10, 8))
        for _ in range(5)
    ]
    start = values_of(net_on(CPU), CPU[0])
    [wanted] = train(CPU, start, batches)
    found = train(GPUS[:count], start, batches, **options)
    for *devices, value, before in zip(*found, wanted, start):
        for each in devices:
            np.testing.assert_array_equal(each, devices[0])
        assert np.abs(value - before).max() > 1e-3
        np.testing.assert_allclose(devices[0], value, atol=TOLERANCE)
