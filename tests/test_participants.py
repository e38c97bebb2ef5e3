"""Steps in which some devices have no data."""

import gc

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_syncbn as sbn
import reference
from layers import MODES, contexts
from tolerances import assert_close, assert_same_bits

# Of a training on four devices: the last batch of an epoch is a small one.
BATCHES = [8, 5, 2, 7, 3, 3, 9, 2]


class Training:
    """Of a net whose sums of gradients are exact where its data are small whole numbers."""

    def __init__(self, count, mode="imperative", layer=sbn.SyncBatchNorm, **arguments):
        self.devices, self.static_shape = contexts(count), mode == "static_shape"
        self.norm = layer(in_channels=5, prefix="norm_", **arguments)
        self.net = nn.HybridSequential(prefix="net_")
        with self.net.name_scope():
            self.net.add(self.norm, nn.Dense(3, in_units=5))
        mx.random.seed(0)
        self.net.initialize(mx.init.Xavier(), ctx=self.devices)
        if MODES[mode] is not None:
            self.net.hybridize(**MODES[mode])
        self.trainer = gluon.Trainer(
            self.net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9}
        )

    def step(self, number, samples):
        generator = np.random.default_rng(number)
        x = generator.standard_normal((samples, 5)).astype("float32") + 7
        used = self.devices[:samples]
        with sbn.participants(used, self.trainer):
            xs = gluon.utils.split_and_load(mx.nd.array(x), used, even_split=False)
            with autograd.record():
                losses = [(self.net(x) ** 2).sum() for x in xs]
            autograd.backward(losses)
            # A Trainer's first step gives all devices the running statistics of the first, and with
            # static_shape MXNet does not know that they are still to be written.
            if self.static_shape and number == 0:
                mx.nd.waitall()
            self.trainer.step(samples)
        return x

    def values(self):
        """Of the first device, when all have the same."""
        mx.nd.waitall()
        found = {}
        for name, parameter in self.net.collect_params().items():
            found[name], *others = [array.asnumpy() for array in parameter.list_data()]
            for other in others:
                assert_same_bits(other, found[name], name)
        return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arguments", [{}, {"momentum": None}, {"num_devices": 4}])
def test_a_training_as_on_one_device(mode, arguments):
    four, one = (
        Training(4, mode, **arguments),
        Training(1, mode, momentum=arguments.get("momentum", 0.9)),
    )
    for number, samples in enumerate(BATCHES):
        four.step(number, samples), one.step(number, samples)
        expected = one.values()
        for name, value in four.values().items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_the_running_statistics_have_the_bits_of_one_device(mode):
    four, one = Training(4, mode), Training(1, mode)
    for number, samples in enumerate(BATCHES):
        four.step(number, samples), one.step(number, samples)
    expected = one.values()
    for name, value in four.values().items():
        if "running" in name:
            assert_same_bits(value, expected[name], name)


def test_where_all_take_part_nothing_is_waited_for(monkeypatch):
    training = Training(2)
    # Layers of other tests, which live on other devices.
    gc.collect()
    monkeypatch.setattr(mx.nd, "waitall", lambda: pytest.fail("waited"))
    training.step(0, 5)


def test_arrays_in_place_of_devices():
    layer = sbn.SyncBatchNorm(in_channels=2, momentum=0)
    layer.initialize(ctx=contexts(3))
    xs = [mx.nd.full((2, 2), i, ctx=device) for i, device in enumerate(contexts(2))]
    with sbn.participants(xs), autograd.train_mode():
        for x in xs:
            layer(x)
    for array in layer.running_mean.list_data():
        assert (array.asnumpy() == 0.5).all()


def test_groups_whose_devices_are_all_absent_keep_their_statistics():
    layer = sbn.SyncBatchNorm(in_channels=1, momentum=0, group=sbn.SyncGroup(group_size=2))
    layer.initialize(ctx=contexts(6))
    with sbn.participants(contexts(3)), autograd.train_mode():
        for number, device in enumerate(contexts(3)):
            layer(mx.nd.full((1, 1), number + 1, ctx=device))
    means = [array.asscalar() for array in layer.running_mean.list_data()]
    assert means == [1.5, 1.5, 3, 3, 0, 0]


def test_the_backward_of_a_step_may_come_later():
    """It meets those that took part in its forward, also beside a forward of all."""
    layer = sbn.SyncBatchNorm(in_channels=5)
    layer.initialize(ctx=contexts(3))
    x = np.random.default_rng(0).standard_normal((6, 5)).astype("float32")
    dy = np.random.default_rng(1).standard_normal((6, 5)).astype("float32")
    xs = [mx.nd.array(x[2 * i : 2 * i + 2], ctx=contexts(3)[i]) for i in range(3)]
    for array in xs:
        array.attach_grad()
    with sbn.participants(contexts(2)), autograd.record():
        ys = [layer(array) for array in xs[:2]]
    with autograd.record():
        others = [layer(array) for array in xs]
    dys = [mx.nd.array(dy[2 * i : 2 * i + 2], ctx=contexts(3)[i]) for i in (0, 1)]
    # MXNet cuts the graph of others off the variables that both have, if it is not retained.
    autograd.backward(ys, dys, retain_graph=True)
    expected = reference.backward(dy[:4], x[:4], np.ones(5))
    assert_close(np.concatenate([a.grad.asnumpy() for a in xs[:2]]), expected.dx, "float32")
    autograd.backward(others)
    mx.nd.waitall()


def test_a_missing_participant():
    group = sbn.SyncGroup(timeout=1)
    layer = sbn.SyncBatchNorm(in_channels=2, group=group)
    layer.initialize(ctx=contexts(4))
    with pytest.raises(mx.MXNetError, match=r"Came: cpu\(0\). Missing: cpu\(2\)\. "):
        with sbn.participants([mx.cpu(2), mx.cpu(0)]), autograd.train_mode():
            layer(mx.nd.ones((2, 2)))
    check_all_take_part(layer, 4)


def test_one_who_should_not_have_come():
    layer = sbn.SyncBatchNorm(in_channels=2)
    layer.initialize(ctx=contexts(3))
    with pytest.raises(mx.MXNetError, match=r"called on cpu\(2\).*are cpu\(0\), cpu\(1\)"):
        with sbn.participants(contexts(2)), autograd.train_mode():
            for device in contexts(3):
                layer(mx.nd.ones((2, 2), ctx=device))
    check_all_take_part(layer, 3)


def check_all_take_part(layer, count):
    # MXNet tells of one error at a time.
    for _ in range(count):
        try:
            mx.nd.waitall()
        except mx.MXNetError:
            pass
    with autograd.train_mode():
        ys = [layer(mx.nd.full((1, 2), i, ctx=device)) for i, device in enumerate(contexts(count))]
    assert all(np.isfinite(y.asnumpy()).all() for y in ys)


def test_an_error_inside_is_the_users():
    layer = sbn.SyncBatchNorm(in_channels=2)
    layer.initialize(ctx=contexts(2))
    with pytest.raises(KeyError):
        with sbn.participants(contexts(1)):
            raise KeyError
    check_all_take_part(layer, 2)


def test_the_trainer_is_as_it_was():
    training = Training(2)
    with sbn.participants(contexts(1), training.trainer):
        assert "_allreduce_grads" in vars(training.trainer)
    assert "_allreduce_grads" not in vars(training.trainer)


def test_no_participants_inside_others():
    layer = sbn.SyncBatchNorm(in_channels=2)
    layer.initialize(ctx=contexts(3))
    with sbn.participants(contexts(2)):
        with pytest.raises(ValueError, match="leave the outer one first"):
            with sbn.participants(contexts(1)):
                pass
    check_all_take_part(layer, 3)


@pytest.mark.parametrize("devices", [[], None, "cpu(0)", [mx.cpu(0), 1]])
def test_participants_that_make_no_sense(devices):
    with pytest.raises(ValueError, match="give the contexts that have data"):
        sbn.participants(devices)
