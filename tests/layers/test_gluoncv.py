"""gluoncv's FCN with this layer: a step of two devices matches one device with the whole batch.

In a separate process, as each of MXNet's workspaces grows to 10 MB with this net, so there must be
fewer than conftest.py sets, and as gluoncv changes Pillow's handling of damaged images globally.
"""

import os
import subprocess
import sys
import warnings

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from runs import contexts
from tolerances import assert_same_bits

SIZE = 48
CLASSES = 21


def build(devices):
    with warnings.catch_warnings():
        # gluoncv asks for newer and older packages than each other.
        warnings.simplefilter("ignore")
        from gluoncv.model_zoo import FCN
    mx.random.seed(7)
    norm = {"norm_layer": sbn.SyncBatchNorm, "norm_kwargs": {"num_devices": len(devices)}}
    sizes = {"crop_size": SIZE, "base_size": SIZE}
    net = FCN(CLASSES, backbone="resnet50", pretrained_base=False, aux=False, **norm, **sizes)
    # The heads were initialized on cpu(0) when they were created.
    net.initialize(mx.init.Xavier(), ctx=devices, force_reinit=True)
    net.apply(_without_dropout)
    net.hybridize(static_alloc=True)
    return net


def _without_dropout(block):
    # Two devices would draw different masks than one.
    if isinstance(block, nn.Dropout):
        block._rate = 0


def train(net, devices, steps):
    """The mean loss of each step."""
    generator = np.random.default_rng(0)
    images = generator.standard_normal((4, 3, SIZE, SIZE)).astype("float32")
    labels = generator.integers(0, CLASSES, (4, SIZE, SIZE)).astype("float32")
    xs, ys = (mx.gluon.utils.split_and_load(mx.nd.array(a), devices) for a in (images, labels))
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss(axis=1)
    optimizer = {"learning_rate": 1e-3, "momentum": 0.9}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", optimizer, kvstore="device")
    losses = []
    for _ in range(steps):
        with autograd.record():
            parts = [loss_of(net(x)[0], y) for x, y in zip(xs, ys)]
        autograd.backward(parts)
        trainer.step(len(images))
        losses.append(float(np.concatenate([part.asnumpy() for part in parts]).mean()))
    mx.nd.waitall()
    return losses


def compare():
    (expected,) = train(build(contexts(1)), contexts(1), 1)
    net = build(contexts(2))
    losses = train(net, contexts(2), 20)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert abs(losses[0] - expected) <= 1e-6 * abs(expected)
    running = [p for name, p in net.collect_params().items() if "running" in name]
    assert len(running) > 100
    for parameter in running:
        first, second = (array.asnumpy() for array in parameter.list_data())
        assert_same_bits(second, first, parameter.name)


@pytest.mark.long
@pytest.mark.cpu_only("an FCN takes minutes and 9 GB on simulated GPUs")
def test_fcn_resnet50_on_two_devices():
    environment = {**os.environ, "MXNET_CPU_TEMP_COPY": "512"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr


if __name__ == "__main__":
    compare()
    print("equal")
