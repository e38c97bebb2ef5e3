"""Nets with stock layers on simulated GPUs (make test-gpu), or with the layer's kernels on real
ones (make gpu-check): MXNet's engine, storage, copies, KVStore and Trainer are those for GPUs, and
its operators compute as on the CPU."""

import os
import subprocess
import sys
import time
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
from mxnet.gluon.model_zoo import vision  # noqa: E402

CPU, GPUS = [mx.cpu()], [mx.gpu(i) for i in range(mx.context.num_gpus())]
# Differences come from the order in which gradients are added, and grow from step to step.
TOLERANCE = 1e-5
# Nets as large as users', and longer trainings, as real GPUs are fast.
LARGE = "SIMGPU_LARGE" in os.environ
STEPS, SIDE = (20, 64) if LARGE else (2, 8)
COUNTS, CLASSES = (1, 2, 4, 8), 5
# What the simulator gives, for real GPUs.
WEIGHTS = Path(mx.__file__).resolve().parents[1] / "weights"


def small():
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(8, 3, padding=1, use_bias=False),
        nn.BatchNorm(),
        nn.Activation("relu"),
        nn.MaxPool2D(),
        nn.Conv2D(4, 3, use_bias=False),
        sbn.SyncBatchNormReLU(),
        nn.GlobalAvgPool2D(),
        nn.Dense(10),
    )
    return net


def resnet():
    if LARGE:
        block, layers, channels = vision.BottleneckV1, (3, 4, 6, 3), (64, 256, 512, 1024, 2048)
    else:
        block, layers, channels = vision.BasicBlockV1, (1, 1), (4, 4, 6)
    return vision.ResNetV1(block, layers, channels, thumbnail=True).features[:-1]


def fcn():
    net, scale = nn.HybridSequential(), 8 if LARGE else 2
    net.add(resnet(), nn.Conv2D(CLASSES, 1))
    net.add(nn.Conv2DTranspose(CLASSES, 2 * scale, scale, scale // 2, use_bias=False))
    return net


class SSD(mx.gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body, self.smaller, self.heads = (nn.HybridSequential() for _ in range(3))
            self.body.add(resnet())
            self.smaller.add(nn.Conv2D(8, 3, 2, 1), nn.BatchNorm(), nn.Activation("relu"))
            # For each of 4 anchors the classes and a box.
            self.heads.add(*(nn.Conv2D(4 * (CLASSES + 4), 3, padding=1) for _ in range(2)))

    def hybrid_forward(self, F, x):
        large = self.body(x)
        found = zip(self.heads, (large, self.smaller(large)))
        return F.concat(*(F.flatten(head(each)) for head, each in found), dim=1)


def net_on(build, devices, values=None):
    net = sbn.convert_sync_batchnorm(build())
    net.initialize(mx.init.Xavier(), ctx=devices)
    for parameter, value in zip(net.collect_params().values(), values or []):
        parameter.set_data(mx.nd.array(value))
    return net


def start_of(build, x):
    """Values for a net's parameters, and dy."""
    mx.random.seed(1)
    net = net_on(build, CPU)
    y = net(mx.nd.array(x))
    return values_of(net, CPU[0]), np.random.RandomState(2).normal(size=y.shape)


def values_of(net, device):
    return [each.data(device).asnumpy() for each in net.collect_params().values()]


def split(array, devices):
    return mx.gluon.utils.split_and_load(mx.nd.array(array), devices)


def train(devices, start, batches, kvstore="device", **hybridized):
    net = net_on(small, devices, start)
    if hybridized:
        net.hybridize(**hybridized)
    options = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=kvstore)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for x, labels in batches:
        parts = [split(each, devices) for each in (x, labels)]
        with mx.autograd.record():
            losses = [loss_of(net(part), wanted) for part, wanted in zip(*parts)]
        mx.autograd.backward(losses)
        trainer.step(len(x))
    found = [values_of(net, device) for device in devices]
    for values in zip(*found):
        for each in values:
            np.testing.assert_array_equal(each, values[0])
    return found[0]


def batches_of(steps):
    random = np.random.RandomState(0)
    return [
        (random.normal(size=(8, 3, 12, 12)).astype("float32"), random.randint(0, 10, 8))
        for _ in range(steps)
    ]


OPTIONS = [
    {},
    {"kvstore": "local"},
    {"active": True},
    {"static_alloc": True},
    {"static_alloc": True, "static_shape": True},
]
# A KVStore adds more than four arrays by other kernels than fewer.
CASES = [*((2, options) for options in OPTIONS), *((8, options) for options in OPTIONS[:2])]


@pytest.mark.parametrize("count, options", CASES)
def test_a_net_trains_as_on_the_cpu(count, options):
    assert sbn.native.library.library.gluon_syncbn_cuda()
    batches = batches_of(5)
    start, _ = start_of(small, batches[0][0])
    wanted = train(CPU, start, batches)
    found = train(GPUS[:count], start, batches, **options)
    for each, value, before in zip(found, wanted, start):
        assert np.abs(value - before).max() > 1e-3
        np.testing.assert_allclose(each, value, atol=TOLERANCE)


@pytest.mark.parametrize("count", COUNTS)
def test_weights_after_some_steps(count):
    """On real GPUs they are, to the bit, those of the simulator, which has run before."""
    batches = batches_of(STEPS)
    start, _ = start_of(small, batches[0][0])
    found, path = train(GPUS[:count], start, batches, static_alloc=True), f"{WEIGHTS}{count}.npz"
    if not simulated_gpus.ON_CARDS:
        np.savez(path, *found)
    for each, wanted in zip(found, np.load(path).values()):
        assert each.tobytes() == wanted.tobytes()


NETS = [(build, options) for build in (fcn, SSD) for options in (None, *OPTIONS[2:])]


@pytest.mark.parametrize("build, options", NETS if LARGE else [NETS[0], NETS[-1]])
def test_no_number_of_gpus_changes_a_bit(build, options):
    """Of y, dx and running statistics in the first step."""
    x = np.random.RandomState(1).normal(size=(8, 3, SIDE, SIDE)).astype("float32")
    start, dy = start_of(build, x)

    def step(count):
        devices = GPUS[:count]
        net = net_on(build, devices, start)
        if options:
            net.hybridize(**options)
        xs = split(x, devices)
        for each in xs:
            each.attach_grad()
        with mx.autograd.record():
            ys = [net(each) for each in xs]
        mx.autograd.backward(ys, split(dy, devices))
        y, dx = (np.concatenate([a.asnumpy() for a in of]) for of in (ys, [a.grad for a in xs]))
        running = net.collect_params(".*running.*").values()
        return [y, dx, *(each.data(device).asnumpy() for device in devices for each in running)]

    y, dx, *running = step(1)
    for count in COUNTS[1:]:
        for each, wanted in zip(step(count), [y, dx, *count * running]):
            assert each.tobytes() == wanted.tobytes(), count


def test_a_gpu_that_does_not_arrive():
    layer = sbn.SyncBatchNorm(in_channels=3, group=sbn.SyncGroup(timeout=1))
    layer.initialize(ctx=GPUS[:4])
    xs = split(np.random.normal(size=(8, 3, 5)), GPUS[:4])
    begin = time.monotonic()
    with pytest.raises(mx.MXNetError, match=r"Missing: .*gpu\(3\)"):
        with mx.autograd.record():
            for y in [layer(x) for x in xs[:3]]:
                y.wait_to_read()
    assert time.monotonic() - begin < 20
    with mx.autograd.record():
        ys = [layer(x) for x in xs]
    mx.autograd.backward(ys)
    assert abs(np.concatenate([y.asnumpy() for y in ys]).mean()) < 1e-5


# Launches of other programs on the GPU, some long and some short.
LOAD = """
import random, time, torch
a = torch.randn(4096, 4096, device="cuda")
while True:
    n = random.choice([64, 1024, 4096])
    for _ in range(random.randint(1, 50)):
        torch.mm(a[:n, :n], a[:n, :n])
    torch.cuda.synchronize()
    time.sleep(random.choice([0, 0.01]))
"""


@pytest.mark.skipif(not LARGE, reason="for real GPUs")
def test_500_steps_beside_other_work():
    batches = batches_of(500)
    start, _ = start_of(small, batches[0][0])
    wanted = train(GPUS[:8], start, batches, static_alloc=True)
    with subprocess.Popen([sys.executable, "-c", LOAD]) as load:
        try:
            found = train(GPUS[:8], start, batches, static_alloc=True)
            assert load.poll() is None
        finally:
            load.kill()
    for each, value in zip(found, wanted):
        assert each.tobytes() == value.tobytes()
