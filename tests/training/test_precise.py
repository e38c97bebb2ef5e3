"""precise_statistics, against layers with momentum=None."""

import contextlib
import time

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from runs import MODES, contexts, hybridize, shards
from tolerances import assert_same_bits


class Net(nn.HybridBlock):
    """One layer is called twice, one is frozen, one is of MXNet."""

    def __init__(self, momentum, prefix="net_", stock=False):
        super().__init__(prefix=prefix)
        own = {"in_channels": 3}
        with self.name_scope():
            self.first = sbn.SyncBatchNorm(momentum=momentum, **own)
            self.twice = sbn.SyncBatchNorm(momentum=momentum, running_variance="unbiased", **own)
            self.frozen = sbn.SyncBatchNorm(use_global_stats=True, **own)
            self.virtual = sbn.VirtualBatchNorm(2, momentum=momentum, **own)
            self.stock = nn.BatchNorm(**own) if stock else None

    def hybrid_forward(self, F, x):
        x = self.virtual(self.frozen(self.twice(F.tanh(self.twice(self.first(x))))))
        return x if self.stock is None else self.stock(x)


def data(seed, count=3):
    rng = np.random.default_rng(seed)
    return [rng.normal(seed, 2, (6, 3, 2)).astype("float32") for _ in range(count)]


def called(net, x, devices, train):
    with mx.autograd.record() if train else mx.autograd.pause(train_mode=True):
        for shard in shards(x, [len(x) // len(devices)] * len(devices), devices):
            net(shard)
    mx.nd.waitall()


def statistics(net):
    return {
        name: [array.asnumpy() for array in parameter.list_data()]
        for name, parameter in net.collect_params().items()
        if "running" in name
    }


@pytest.mark.parametrize("momentum", [0.9, None])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_the_mean_over_all_batches(mode, devices, momentum):
    devices = contexts(devices)
    net, expected = Net(momentum), Net(None, "expected_")
    for each in (net, expected):
        each.initialize(ctx=devices)
        hybridize(each, mode)
    for x in data(1):
        called(net, x, devices, train=True)
    names, settings = list(net.collect_params()), [dict(net.first._kwargs), repr(net)]
    for _ in range(2):
        with sbn.precise_statistics(net):
            for x in data(2):
                for shard in shards(x, [6 // len(devices)] * len(devices), devices):
                    net(shard)
    for x in data(2):
        called(expected, x, devices, train=False)
    found = statistics(net).items()
    for (name, values), others in zip(found, statistics(expected).values()):
        for value, other in zip(values, others):
            assert_same_bits(value, other, name)
    assert [dict(net.first._kwargs), repr(net)] == settings
    assert list(net.collect_params()) == names
    # The momentum is theirs again.
    before = net.first.running_mean.data().asnumpy()
    x = data(3)[0]
    called(net, x, devices, train=True)
    if momentum:
        mean = x.mean(axis=(0, 2), dtype="float64")
        np.testing.assert_allclose(
            net.first.running_mean.data().asnumpy(), 0.9 * before + 0.1 * mean, rtol=1e-5
        )


@pytest.mark.parametrize("momentum", [0.9, 0, None])
@pytest.mark.parametrize("mode", MODES)
def test_values_before_the_first_batch_do_not_count(mode, momentum):
    devices, first = contexts(2), None
    for start in (0, np.nan, np.inf, -3e38):
        net = Net(momentum)
        net.initialize(ctx=devices)
        hybridize(net, mode)
        for layer in (net.first, net.twice, net.virtual):
            layer.running_mean.set_data(mx.nd.full(3, start))
            layer.running_var.set_data(mx.nd.full(3, start))
        # Without momentum, the last batch alone counts.
        with contextlib.nullcontext() if momentum == 0 else sbn.precise_statistics(net):
            for x in data(2):
                called(net, x, devices, train=momentum == 0)
        found = statistics(net)
        first = first or found
        for name, values in found.items():
            for value, expected in zip(values, first[name]):
                assert_same_bits(value, expected, f"{name} after {start}")


def test_a_net_without_values_stays_as_it_is():
    net = Net(0.9)
    names, settings = list(net.collect_params()), dict(net.first._kwargs)
    with pytest.raises(RuntimeError, match="has not been initialized"):
        with sbn.precise_statistics(net):
            raise AssertionError
    assert list(net.collect_params()) == names and net.first._kwargs == settings
    net.initialize()
    called(net, data(1)[0], contexts(1), train=True)


@pytest.mark.parametrize("momentum", [0.9, None])
def test_without_a_batch_or_after_an_error_nothing_changes(momentum, caplog):
    net = Net(momentum)
    net.initialize()
    called(net, data(1)[0], contexts(1), train=True)
    before = statistics(net), momentum or net.first.num_batches_tracked.data().asscalar()
    with pytest.raises(ZeroDivisionError), sbn.precise_statistics(net):
        raise ZeroDivisionError
    assert not caplog.text
    with sbn.precise_statistics(net):
        pass
    assert "net was not called within precise_statistics" in caplog.text
    after = statistics(net), momentum or net.first.num_batches_tracked.data().asscalar()
    assert str(after) == str(before) and net.first._kwargs["momentum"] == momentum


def test_an_error_between_two_devices():
    """It leaves no trace in the next step."""
    devices = contexts(2)
    layer = sbn.SyncBatchNorm(in_channels=1, epsilon=1, group=sbn.SyncGroup(timeout=20))
    layer.initialize(ctx=devices)
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError), sbn.precise_statistics(layer):
        layer(mx.nd.full((2, 1), 1000, ctx=devices[0]))
        raise ZeroDivisionError
    for _ in range(2):
        with mx.autograd.record():
            ys = [layer(mx.nd.full((2, 1), n, ctx=device)) for n, device in enumerate(devices)]
        for n, y in enumerate(ys):
            np.testing.assert_allclose(y.asnumpy(), (n - 0.5) / np.sqrt(1.25), rtol=1e-6)
    assert time.monotonic() - start < 10


def test_what_is_left_is_named(caplog):
    net = Net(0.9, stock=True)
    net.initialize()
    with sbn.precise_statistics(net):
        called(net, data(1)[0], contexts(1), train=False)
    assert "precise_statistics does not measure stock." in caplog.text
    sbn.freeze(net)
    with pytest.raises(ValueError, match="no SyncBatchNorm follows the batches"):
        with sbn.precise_statistics(net):
            raise AssertionError
    with pytest.raises(TypeError, match="takes a Gluon Block"):
        with sbn.precise_statistics(mx.sym.var("data")):
            raise AssertionError
