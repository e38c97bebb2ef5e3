"""The layer between convolutions on the CPU, whose oneDNN temporaries MXNet frees while
asynchronous operators still use them."""

import json

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn.layers.operator import sync_batch_norm
from mxnet import autograd
from mxnet.gluon import nn
from runs import MODES, contexts, hybridize
from tolerances import assert_same_bits

STEPS = 50

pytestmark = pytest.mark.cpu_only("oneDNN computes on the CPU alone")


class Block(nn.HybridBlock):
    """Convolutions on both sides, a branch, and 16 channels, for which oneDNN chooses a blocked
    layout."""

    def __init__(self):
        super().__init__()
        self.before = nn.Conv2D(16, 3, padding=1, in_channels=16)
        self.norm = sbn.SyncBatchNorm(in_channels=16)
        self.after = nn.Conv2D(16, 3, padding=1, in_channels=16)
        self.second = sbn.SyncBatchNorm(in_channels=16)

    def hybrid_forward(self, F, x):
        return x + self.second(self.after(F.relu(self.norm(self.before(x)))))


def steps(mode, count=STEPS, devices=1):
    """The bits of equal steps: losses, input gradients and parameter gradients."""
    mx.random.seed(5)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1, in_channels=3), Block(), Block())
    net.add(nn.Conv2D(4, 3, in_channels=16))
    net.initialize(mx.init.Xavier(), ctx=contexts(devices))
    hybridize(net, mode)
    generator = np.random.default_rng(0)
    xs = [mx.nd.array(generator.standard_normal((2, 3, 24, 24)), ctx=c) for c in contexts(devices)]
    for x in xs:
        x.attach_grad()
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    results = []
    for _ in range(count):
        with autograd.record():
            losses = [net(x).square().sum() for x in xs]
        autograd.backward(losses)
        gradients = [gradient for p in trained for gradient in p.list_grad()]
        results.append([a.asnumpy() for a in (*losses, *(x.grad for x in xs), *gradients)])
    mx.nd.waitall()
    return results


@pytest.mark.parametrize("devices", [1, 2])
def test_fifty_steps_have_equal_bits_in_every_mode(devices):
    first = None
    for mode in MODES:
        for number, step in enumerate(steps(mode, devices=devices)):
            first = first or step
            for index, (value, expected) in enumerate(zip(step, first)):
                assert_same_bits(value, expected, f"{mode}, step {number}, array {index}")


def test_layout_copies_are_in_the_graph_only_on_the_cpu(monkeypatch):
    layer = sbn.SyncBatchNorm(in_channels=3)
    layer.initialize(ctx=contexts(2))

    def operators():
        return [node["op"] for node in json.loads(layer(mx.sym.var("x")).tojson())["nodes"]]

    assert operators().count("SwapAxis") == 2
    monkeypatch.setattr(layer._layer, "contexts", lambda: [mx.gpu(0)])
    assert "SwapAxis" not in operators() and "Custom" in operators()


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_for_gpus_refuses_the_cpu(training):
    layer = sbn.SyncBatchNorm(in_channels=3)
    layer.initialize()
    arrays = [p.data() for p in (layer.gamma, layer.beta, layer.running_mean, layer.running_var)]
    with autograd.train_mode() if training else autograd.predict_mode():
        y = sync_batch_norm(
            mx.nd, mx.nd.ones((2, 3)), *arrays, layer=layer._layer, copy_layout=None
        )
    with pytest.raises(mx.MXNetError, match=r"cpu\(0\).*traced for GPUs.*hybridize"):
        y.wait_to_read()
