"""Updates of running statistics, and layers that do not train."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn import native
from devices import KIND, context
from mxnet import autograd, gluon
from mxnet.gluon import nn
from runs import MODES, contexts, hybridize, prepare, run, shards
from tolerances import assert_close, assert_same_bits

SHAPE, SIZES = (7, 5, 4, 3), (2, 5)


def batches(count, shape=SHAPE, dtype="float32"):
    generator = np.random.default_rng(0)
    return [(generator.standard_normal(shape) * 3 + 2).astype(dtype) for _ in range(count)]


def step(layer, x, sizes=SIZES):
    run(layer, x, np.ones_like(x), sizes, contexts(len(sizes)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("running_variance", ["biased", "unbiased"])
def test_the_cumulative_average(dtype, mode, running_variance):
    data = batches(4, dtype=dtype)
    layer = sbn.SyncBatchNorm(momentum=None, running_variance=running_variance)
    prepare(layer, contexts(2), dtype, MODES[mode])
    ddof = running_variance == "unbiased"
    for count, x in enumerate(data, 1):
        step(layer, x)
        exact = [each.astype("longdouble") for each in data[:count]]
        mean = sum(each.mean((0, 2, 3)) for each in exact) / count
        variance = sum(each.var((0, 2, 3), ddof=ddof) for each in exact) / count
        for device in contexts(2):
            assert layer.num_batches_tracked.data(device).asscalar() == count
            assert_close(layer.running_mean.data(device).asnumpy(), mean, dtype)
            assert_close(layer.running_var.data(device).asnumpy(), variance, dtype)


def test_the_cumulative_average_continues_after_a_checkpoint(tmp_path):
    first, second = batches(2)
    path = str(tmp_path / "layer.params")
    straight = prepare(sbn.SyncBatchNorm(momentum=None), contexts(2))
    for x in (first, second):
        step(straight, x)
    saved = prepare(sbn.SyncBatchNorm(momentum=None), contexts(2))
    step(saved, first)
    saved.save_parameters(path)
    # On other devices.
    loaded = sbn.SyncBatchNorm(momentum=None)
    loaded.load_parameters(path, ctx=contexts(1))
    step(loaded, second, (len(second),))
    for name, parameter in straight.collect_params().items():
        other = getattr(loaded, name[len(straight.prefix) :])
        assert_same_bits(other.data().asnumpy(), parameter.data(context(1)).asnumpy(), name)


def test_the_cumulative_average_restarts_with_a_file_without_count(tmp_path):
    path = str(tmp_path / "layer.params")
    other = prepare(nn.BatchNorm(in_channels=5), contexts(1))
    other.save_parameters(path)
    layer = sbn.SyncBatchNorm(momentum=None, in_channels=5)
    layer.initialize()
    layer.load_parameters(path, allow_missing=True)
    (x,) = batches(1)
    step(layer, x, (len(x),))
    mean = x.astype(np.float64).mean(axis=(0, 2, 3))
    assert_close(layer.running_mean.data().asnumpy(), mean, "float32")
    # In the other direction, the count is an extra entry.
    layer.save_parameters(path)
    other.load_parameters(path, ignore_extra=True)


@pytest.mark.parametrize("kind", [sbn.SyncBatchNorm, lambda **kw: sbn.VirtualBatchNorm(2, **kw)])
@pytest.mark.parametrize("momentum", [0.9, None])
def test_a_process_without_data_keeps_its_running_statistics(kind, momentum):
    """See gluon_syncbn.distributed.join. Everything else is unchanged."""
    first, second = batches(2)
    layer = prepare(kind(momentum=momentum), contexts(1))
    results = []
    for absent in (True, False):
        step(layer, first, [len(first)])
        before = [array.asnumpy() for array in layer._layer.running_statistics()[f"{KIND}(0)"]]
        native.set_joined(absent)
        try:
            results.append(run(layer, second, np.ones_like(second), [len(second)], contexts(1)))
        finally:
            native.set_joined(False)
        for found, value in zip(layer._layer.running_statistics()[f"{KIND}(0)"], before):
            assert (found.asnumpy() == value).all() == absent
    for name in ("y", "dx"):
        assert_same_bits(*(getattr(result, name) for result in results), name)


def test_a_failed_step_is_not_counted():
    layer = prepare(sbn.SyncBatchNorm(momentum=None, group=sbn.SyncGroup(timeout=1)), contexts(2))
    (x,) = batches(1)
    step(layer, x)
    with autograd.record():
        y = layer(mx.nd.array(x))
    with pytest.raises(mx.MXNetError, match=rf"Missing: {KIND}\(1\)"):
        y.wait_to_read()
    step(layer, x)
    for device in contexts(2):
        assert layer.num_batches_tracked.data(device).asscalar() == 2


@pytest.mark.parametrize("mode", ["imperative", "hybrid"])
def test_backward_twice(mode):
    """With retain_graph. Both synchronize and give equal gradients; statistics are updated once."""
    (x,), devices = batches(1), contexts(2)
    layer = prepare(sbn.SyncBatchNorm(), devices, mode=MODES[mode])
    xs = shards(x, SIZES, devices)
    for array in xs:
        array.attach_grad()
    with autograd.record():
        losses = [(layer(array) ** 3).sum() for array in xs]
    found = []
    for retain in (True, True, False):
        autograd.backward(losses, retain_graph=retain)
        found.append(
            [array.grad.asnumpy() for array in xs] + [layer.gamma.grad(context(1)).asnumpy()]
        )
    for other in found[1:]:
        for a, b in zip(other, found[0]):
            assert_same_bits(a, b)
    mean = 0.1 * x.astype(np.float64).mean(axis=(0, 2, 3))
    assert_close(layer.running_mean.data(context(0)).asnumpy(), mean, "float32")


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_layer_inside_a_training_net(mode):
    """It propagates the gradient, does not synchronize and keeps its statistics."""
    devices = contexts(2)
    net = nn.HybridSequential()
    # A bias before batch normalization has no gradient, also with layers in between.
    net.add(nn.Dense(4, in_units=3, use_bias=False))
    net.add(sbn.SyncBatchNorm(use_global_stats=True, in_channels=4))
    net.add(nn.Dense(2, in_units=4, use_bias=False), sbn.SyncBatchNorm(in_channels=2))
    net.initialize(mx.init.Xavier(), ctx=devices)
    frozen = net[1]
    frozen.collect_params().setattr("grad_req", "null")
    frozen.running_mean.set_data(mx.nd.array([1, 2, 3, 4]))
    hybridize(net, mode)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    before = {name: p.data(context(0)).asnumpy() for name, p in net.collect_params().items()}
    xs = shards(np.random.default_rng(0).standard_normal((6, 3)).astype("float32"), (2, 4), devices)
    with autograd.record():
        losses = [(net(x) ** 3).sum() for x in xs]
    autograd.backward(losses)
    trainer.step(6)
    for name, parameter in net.collect_params().items():
        same = (parameter.data(context(0)).asnumpy() == before[name]).all()
        assert same == name.startswith(frozen.prefix), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["inference", "use_global_stats"])
def test_devices_do_not_wait_without_statistics_of_the_batch(how, mode):
    layer = sbn.SyncBatchNorm(use_global_stats=how == "use_global_stats", in_channels=3)
    prepare(layer, contexts(2), mode=MODES[mode])
    x = mx.nd.ones((2, 3), ctx=context(1))
    x.attach_grad()
    with autograd.record(train_mode=how != "inference"):
        y = layer(x)
    y.backward()
    assert_close(x.grad.asnumpy(), np.full((2, 3), 1 / np.sqrt(1 + 1e-5)), "float32")
    assert native.waiting() == 0
