"""Random small nets on several devices: no hang, right results, no leak."""

import gc

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import psutil
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from runs import MODES, contexts, hybridize
from tolerances import assert_same_bits


class RandomNet(nn.HybridBlock):
    """Branches that are added or concatenated, and layers that are called several times."""

    def __init__(self, generator):
        super().__init__()
        self.plan = []
        self.layers = nn.HybridSequential()
        channels = 4
        for _ in range(int(generator.integers(2, 5))):
            self.layers.add(nn.Conv2D(channels, 3, padding=1, in_channels=channels))
            self.layers.add(sbn.SyncBatchNorm(in_channels=channels))
        for _ in range(int(generator.integers(3, 8))):
            kind = ("chain", "residual", "branches")[int(generator.integers(3))]
            picks = [2 * int(generator.integers(len(self.layers) // 2)) for _ in range(2)]
            self.plan.append((kind, picks))

    def hybrid_forward(self, F, x):
        def unit(index, x):
            return F.relu(self.layers[index + 1](self.layers[index](x)))

        for kind, (first, second) in self.plan:
            if kind == "chain":
                x = unit(first, x)
            elif kind == "residual":
                x = x + unit(first, x)
            else:
                x = 0.5 * (unit(first, x) + unit(second, x))
        return x.mean()


@pytest.mark.parametrize("seed", range(8))
def test_random_nets(seed):
    generator = np.random.default_rng(seed)
    devices = contexts(int(generator.integers(2, 5)))
    net = RandomNet(generator)
    net.initialize(mx.init.Xavier(), ctx=devices)
    mode = list(MODES)[seed % len(MODES)]
    hybridize(net, mode)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    for step in range(60):
        xs = [
            mx.nd.array(
                generator.standard_normal((int(generator.integers(1, 4)), 4, 6, 6)), ctx=device
            )
            for device in devices
        ]
        with autograd.record():
            losses = [net(x) for x in xs]
        for position in generator.permutation(len(losses)):
            losses[position].backward()
        if step == 0:
            mx.nd.waitall()  # The first step of a Trainer reads running statistics.
        trainer.step(len(xs), ignore_stale_grad=True)
        if step % 20 == 19:
            assert np.isfinite([float(loss.asscalar()) for loss in losses]).all()
    mx.nd.waitall()
    for name, parameter in net.collect_params().items():
        if "running" in name:
            for array in parameter.list_data()[1:]:
                assert_same_bits(array.asnumpy(), parameter.list_data()[0].asnumpy(), name)


def resident():
    gc.collect()
    mx.nd.waitall()
    return psutil.Process().memory_info().rss


def net_of(layers, mode, devices):
    net = nn.HybridSequential()
    for _ in range(layers):
        net.add(sbn.SyncBatchNorm(in_channels=64))
    net.initialize(ctx=devices)
    hybridize(net, mode)
    return net


def grown(step, before, count):
    """The bytes that `count` steps leave, after some before."""
    for number in range(before + count):
        if number == before:
            start = resident()
        step()
    return resident() - start


def step_of(net, devices):
    with autograd.record():
        ys = [net(mx.nd.ones((2, 64), ctx=device)) for device in devices]
    autograd.backward(ys)
    mx.nd.waitall()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_memory_stays_flat(mode):
    """Each call has eight or more array handles. A leaked handle costs about 200 bytes."""
    devices, layers, count = contexts(2), 5, 400
    net = net_of(layers, mode, devices)
    # 22 handles for each forward and backward of each layer on each device.
    leak = count * len(devices) * layers * 22 * 200
    assert grown(lambda: step_of(net, devices), 100, count) < leak / 10


def test_deleted_nets_leave_nothing():
    devices = contexts(2)
    assert grown(lambda: step_of(net_of(1, "hybrid", devices), devices), 100, 300) < 4 << 20
