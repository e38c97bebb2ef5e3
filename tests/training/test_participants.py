"""Steps in which some devices have no data."""

import contextlib
import gc
import time
import weakref

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
import reference
from gluon_syncbn import native
from devices import KIND, context
from mxnet import autograd, gluon
from mxnet.gluon import nn
from runs import MODES, contexts, hybridize
from tolerances import assert_close, assert_same_bits

# Batch sizes on four devices. Some batches are too small for all of them.
BATCHES = [8, 5, 2, 7, 3, 3, 9, 2]


class Training:
    def __init__(self, count, mode="imperative", **arguments):
        self.devices = contexts(count)
        self.norm = sbn.SyncBatchNorm(in_channels=5, prefix="norm_", **arguments)
        self.net = nn.HybridSequential(prefix="net_")
        with self.net.name_scope():
            self.net.add(self.norm, nn.Dense(3, in_units=5))
        mx.random.seed(0)
        self.net.initialize(mx.init.Xavier(), ctx=self.devices)
        hybridize(self.net, mode)
        self.trainer = gluon.Trainer(
            self.net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9}
        )

    def step(self, number, samples, pass_by=lambda place: None):
        generator = np.random.default_rng(number)
        x = generator.standard_normal((samples, 5)).astype("float32") + 7
        used = self.devices[:samples]
        with sbn.participants(used, self.trainer):
            xs = gluon.utils.split_and_load(mx.nd.array(x), used, even_split=False)
            losses = []
            with autograd.record():
                for x in xs:
                    losses.append((self.net(x) ** 2).sum())
                    pass_by("between two devices")
            pass_by("before backward")
            autograd.backward(losses)
            pass_by("before the update")
            self.trainer.step(samples)

    def values(self):
        """The values of all parameters, which must be the same on all devices."""
        mx.nd.waitall()
        found = {}
        for name, parameter in self.net.collect_params().items():
            found[name], *others = [array.asnumpy() for array in parameter.list_data()]
            for other in others:
                assert_same_bits(other, found[name], name)
        return found


@pytest.fixture
def alone(monkeypatch):
    """Layers that other tests made, and that may live on, are unknown here."""
    layers, others = native.layers, native.layers()
    monkeypatch.setattr(native, "layers", lambda: [one for one in layers() if one not in others])


def layer_on(count, **arguments):
    layer = sbn.SyncBatchNorm(**{"in_channels": 2, **arguments})
    layer.initialize(ctx=contexts(count))
    return layer


def check_all_take_part(layer, count):
    # MXNet reports one error at a time.
    for _ in range(count):
        with contextlib.suppress(mx.MXNetError):
            mx.nd.waitall()
    with autograd.train_mode():
        ys = [layer(mx.nd.full((1, 2), i, ctx=device)) for i, device in enumerate(contexts(count))]
    assert all(np.isfinite(y.asnumpy()).all() for y in ys)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arguments", [{}, {"momentum": None}, {"num_devices": 4}])
def test_a_training_as_on_one_device(mode, arguments):
    """The running statistics have the same bits."""
    four = Training(4, mode, **arguments)
    one = Training(1, mode, momentum=arguments.get("momentum", 0.9))
    for number, samples in enumerate(BATCHES):
        four.step(number, samples), one.step(number, samples)
        expected = one.values()
        for name, value in four.values().items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)
            if "running" in name:
                assert_same_bits(value, expected[name], name)


def test_a_step_of_all_devices_does_not_wait(monkeypatch, alone):
    training = Training(2)
    monkeypatch.setattr(mx.nd, "waitall", lambda: pytest.fail("waited"))
    training.step(0, 5)


def test_groups_of_idle_devices_keep_their_statistics():
    layer = layer_on(6, in_channels=1, momentum=0, group=sbn.SyncGroup(group_size=2))
    with sbn.participants(contexts(3)), autograd.train_mode():
        for number, device in enumerate(contexts(3)):
            layer(mx.nd.full((1, 1), number + 1, ctx=device))
    means = [array.asscalar() for array in layer.running_mean.list_data()]
    assert means == [1.5, 1.5, 3, 3, 0, 0]


def test_the_backward_of_a_step_may_come_later():
    """It waits for the devices of its forward, even after a later forward on all devices."""
    layer = layer_on(3, in_channels=5)
    x = np.random.default_rng(0).standard_normal((6, 5)).astype("float32")
    dy = np.random.default_rng(1).standard_normal((6, 5)).astype("float32")
    xs = [mx.nd.array(x[2 * i : 2 * i + 2], ctx=contexts(3)[i]) for i in range(3)]
    for array in xs:
        array.attach_grad()
    with autograd.record(), sbn.participants(contexts(2)):
        ys = [layer(array) for array in xs[:2]]
    with autograd.record():
        others = [layer(array) for array in xs]
    dys = [mx.nd.array(dy[2 * i : 2 * i + 2], ctx=contexts(3)[i]) for i in (0, 1)]
    # Otherwise MXNet detaches the other graph from the variables that both share.
    autograd.backward(ys, dys, retain_graph=True)
    expected = reference.backward(dy[:4], x[:4], np.ones(5))
    assert_close(np.concatenate([a.grad.asnumpy() for a in xs[:2]]), expected.dx, "float32")
    autograd.backward(others)
    mx.nd.waitall()


@pytest.mark.parametrize(
    "used, words",
    [
        ([0], rf"Arrived: {KIND}\(0\). Missing: {KIND}\(2\)\."),
        ([0, 2, 1], rf"called on {KIND}\(1\).*are {KIND}\(2\), {KIND}\(0\)"),
    ],
)
def test_other_devices_than_the_participants(used, words):
    layer = layer_on(4, group=sbn.SyncGroup(timeout=1 if used == [0] else 60))
    with pytest.raises(mx.MXNetError, match=words):
        with sbn.participants([context(2), context(0)]), autograd.train_mode():
            for i in used:
                layer(mx.nd.ones((2, 2), ctx=context(i)))
    check_all_take_part(layer, 4)


@pytest.mark.parametrize("devices", [[], [None], f"{KIND}(0)", [context(0), 1]])
def test_invalid_participants(devices, monkeypatch):
    # Layers of other tests may.
    monkeypatch.setattr(native, "spans_processes", lambda: False)
    with pytest.raises(TypeError if devices else ValueError, match="give the contexts that have"):
        sbn.participants(devices)


@pytest.mark.parametrize("trainer", [mx.optimizer.SGD(), "sgd"])
@pytest.mark.parametrize("function", [sbn.participants, sbn.distributed.join])
def test_an_argument_that_is_no_trainer(function, trainer):
    what = f"got a {type(trainer).__name__} as trainer: give the mxnet.gluon.Trainer"
    with pytest.raises(TypeError, match=what):
        function(contexts(1), trainer)


@pytest.mark.parametrize(
    "devices, blocks, kind, words",
    [
        (contexts(1), nn.Dense(1), ValueError, "devices and blocks"),
        ([], "head", TypeError, "takes a Gluon Block"),
    ],
)
def test_invalid_blocks(devices, blocks, kind, words, monkeypatch):
    monkeypatch.setattr(native, "spans_processes", lambda: True)
    trainer = Training(1).trainer
    with pytest.raises(kind, match=words):
        sbn.participants(devices, trainer, blocks)


def test_a_trainer_is_not_kept():
    training = Training(2)
    with sbn.participants(training.devices[:1], training.trainer):
        pass
    trainer = weakref.ref(training.trainer)
    del training
    gc.collect()
    assert trainer() is None


def test_devices_of_no_net():
    layer = layer_on(2)
    with pytest.raises(ValueError, match=rf"got {KIND}\(99\), where no .*: give some of .*1\)"):
        with sbn.participants([context(0), type(context(0))(context(0).device_type, 99)]):
            pass
    check_all_take_part(layer, 2)


def test_no_participants_inside_others():
    layer = layer_on(3)
    with sbn.participants(contexts(2)):
        with pytest.raises(ValueError, match="leave the outer one first"):
            with sbn.participants(contexts(1)):
                pass
    check_all_take_part(layer, 3)


@pytest.mark.parametrize("mode", ["imperative", "hybrid", "static_shape"])
@pytest.mark.parametrize("where", ["between two devices", "before backward", "before the update"])
def test_an_interrupted_step_of_all_devices(where, mode):
    """As in a notebook, where the cell is then run again: it leaves no trace."""

    def train(interrupts):
        training = Training(3, mode, group=sbn.SyncGroup(timeout=100))
        # Step 1 is tried again after each interrupt.
        for number, interrupt in [(0, None), *((1, each) for each in interrupts), (2, None)]:

            def pass_by(place, interrupt=interrupt):
                if place == interrupt:
                    raise KeyboardInterrupt
                if place == "before the update":
                    # A Trainer's first step reads running statistics, which static graphs write.
                    mx.nd.waitall()

            with contextlib.suppress(KeyboardInterrupt):
                training.step(number, 6, pass_by)
        return training.values()

    start = time.monotonic()
    found, expected = train([where, None]), train([None])
    assert time.monotonic() - start < 50
    for name, value in found.items():
        assert np.isfinite(value).all()
        if where == "between two devices":
            assert_same_bits(value, expected[name], name)


@pytest.mark.parametrize("norm", [sbn.SyncBatchNorm, nn.BatchNorm])
def test_no_gradients_of_an_earlier_step_are_added(norm, alone):
    """Also if no layer has both active and idle devices in a group. (Otherwise: see the random
    steps.)"""
    devices = contexts(4)
    net = nn.HybridSequential()
    groups = {"group": sbn.SyncGroup(group_size=2)} if norm is sbn.SyncBatchNorm else {}
    net.add(nn.Dense(3, in_units=2), norm(in_channels=3, **groups))
    net.initialize(ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})

    def step(used, weight):
        with sbn.participants(used, trainer):
            with autograd.record():
                losses = [
                    weight * ((net(mx.nd.random.normal(shape=(4, 2), ctx=device)) + 1) ** 3).mean()
                    for device in used
                ]
            autograd.backward(losses)
            trainer.step(4)

    step(devices, 1)
    before = net[0].weight.data(devices[0]).asnumpy()
    step(devices[:2], 0)
    assert_same_bits(net[0].weight.data(devices[0]).asnumpy(), before)


def test_statistics_are_shared_after_a_failed_step():
    layer = layer_on(2, momentum=None)
    with pytest.raises(FloatingPointError):
        x = mx.nd.ones((2, 2))
        with sbn.participants([x]), autograd.train_mode():  # An array stands for its device.
            layer(x)
            raise FloatingPointError
    assert [array.asscalar() for array in layer.num_batches_tracked.list_data()] == [1, 1]


class TwoNets:
    """Two nets, each with its Trainer, whose gradients are added or written."""

    def __init__(self, devices, on_kvstore, requests):
        self.devices, self.nets, self.trainers = devices, [], []
        for number, request in enumerate(requests):
            net = nn.HybridSequential()
            net.add(nn.Dense(3, in_units=2), sbn.SyncBatchNorm(in_channels=3), nn.Dense(1))
            net.cast("float64")
            mx.random.seed(number)
            net.initialize(mx.init.Normal(1), ctx=devices)
            for parameter in net.collect_params().values():
                if parameter.grad_req == "write":
                    parameter.grad_req = request
            self.nets.append(net)
            self.trainers.append(
                gluon.Trainer(
                    net.collect_params(),
                    "sgd",
                    {"learning_rate": 0.01, "momentum": 0.9},
                    update_on_kvstore=on_kvstore,
                )
            )

    def run(self, blocks, generator):
        for x, actions in blocks:
            here = self.devices[: len(x)]
            plain = len(x) >= 3 and generator.random() < 0.5
            with contextlib.nullcontext() if plain else sbn.participants(here):
                left = self._act(actions, x, here, generator)
            self._act(left, x, here, generator)
        mx.nd.waitall()
        return [
            [array.asnumpy() for array in parameter.list_data()]
            for net in self.nets
            for parameter in net.collect_params().values()
        ]

    def _act(self, actions, x, here, generator):
        """Returns the actions after "end"."""
        for number, (what, which) in enumerate(actions):
            net, trainer = self.nets[which], self.trainers[which]
            if what == "end":
                return actions[number + 1 :]
            if what == "forward":
                # A backward detaches arrays that two graphs share.
                xs = gluon.utils.split_and_load(x.copy(), here, even_split=False)
                with autograd.record():
                    net.losses = [(net(part) ** 2).sum() for part in xs]
            elif what == "backward":
                autograd.backward(net.losses)
            elif what == "step":
                if trainer._update_on_kvstore is False and generator.random() < 0.5:
                    trainer.allreduce_grads()
                    trainer.update(len(x), ignore_stale_grad=generator.random() < 0.5)
                else:
                    trainer.step(len(x), ignore_stale_grad=generator.random() < 0.5)
                if net[0].weight.grad_req == "add":
                    net.collect_params().zero_grad()
        return []


def random_block(generator, backward_since_step):
    """Samples, and actions in and after a context of these."""
    samples = int(generator.integers(1, 5))
    actions, pending = [], []
    for _ in range(generator.integers(1, 8)):
        which = int(generator.integers(2))
        what = generator.choice(["forward", "step"])
        if what == "forward":
            actions.append(("forward", which))
            pending = [*(set(pending) - {which}), which]
        if pending and generator.random() < 0.8:
            actions.append(("backward", done := pending.pop()))
            backward_since_step.add(done)
        # On one device MXNet uses no store, and treats gradients that it has used otherwise.
        if what == "step" and which in backward_since_step:
            actions.append(("step", which))
            backward_since_step.discard(which)
    # Forward calls only within the context.
    last = max((i for i, (what, _) in enumerate(actions) if what == "forward"), default=-1)
    actions.insert(int(generator.integers(last + 1, len(actions) + 1)), ("end", 0))
    return mx.nd.array(generator.normal(size=(samples, 2)), dtype="float64"), actions


def random_program(seed):
    """A source of further random numbers, requests for the gradients of two nets, and blocks."""
    generator, since = np.random.default_rng(seed), set()
    pass_of = [("forward", 0), ("backward", 0)]
    x = mx.nd.array(generator.normal(size=(3, 2)), dtype="float64")
    # The second context begins with gradients of devices that are idle in it.
    blocks = [(x, [*pass_of, ("end", 0)]), (x[:1], [("step", 0), *pass_of, ("step", 0)])]
    blocks += [random_block(generator, since) for _ in range(6)]
    return generator, generator.choice(["add", "write"], 2), blocks


@pytest.mark.parametrize("on_kvstore", [None, False, True])
def test_random_steps_as_on_one_device(on_kvstore):
    """A device without data adds nothing, wherever its Trainer steps, and all stay equal."""
    for seed in range(6):
        generator, requests, blocks = random_program(seed)
        found = TwoNets(contexts(3), on_kvstore, requests).run(blocks, generator)
        expected = TwoNets(contexts(1), None, requests).run(blocks, generator)
        for arrays, (right,) in zip(found, expected):
            for array in arrays:
                np.testing.assert_allclose(array, right, 1e-6, 1e-9, err_msg=f"seed {seed}")
