"""Updates of running statistics, and layers that do not train."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn import native
from devices import KIND, context
from mxnet import autograd
from runs import MODES, contexts, prepare, run, shards
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
    assert native.library.library.gluon_syncbn_stuck_seconds() == 0
