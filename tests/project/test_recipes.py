"""Recipes of the guide, for one process. test_docs.py runs them, here they are compared. Those for
several processes: tests/distributed/test_distributed_recipes.py."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
import reference
from mxnet import autograd, gluon
from mxnet.gluon import nn
from recipes import recipe
from runs import MODES, contexts, hybridize, shards
from tolerances import assert_close, assert_same_bits

RUNNING = "running_mean", "running_var"


def values(net):
    """Of all parameters, on each device."""
    mx.nd.waitall()
    return {
        name: np.stack([array.asnumpy() for array in parameter.list_data()])
        for name, parameter in net.collect_params().items()
    }


# Momentum 1.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("how", [autograd.train_mode, autograd.record])
@pytest.mark.parametrize("unbiased", ["biased", "unbiased"])
def test_momentum_1_leaves_running_statistics(how, dtype, unbiased):
    generator = np.random.default_rng(0)
    layer = sbn.SyncBatchNorm(momentum=1, in_channels=5, running_variance=unbiased)
    layer.cast(dtype)
    layer.initialize(ctx=contexts(2))
    before = {name: np.exp(generator.normal(0, 20, 5)).astype(dtype) for name in RUNNING}
    for name, value in before.items():
        getattr(layer, name).set_data(mx.nd.array(value, dtype=dtype))
    x = generator.normal(3, 2, (7, 5)).astype(dtype)
    for _ in range(3):
        with how():
            ys = [layer(shard) for shard in shards(x, [3, 4], contexts(2))]
    y = np.concatenate([y.asnumpy() for y in ys])
    assert_close(y, reference.forward(x, np.ones(5), np.zeros(5)).y, dtype)
    for name, value in before.items():
        for array in getattr(layer, name).list_data():
            assert_same_bits(array.asnumpy(), value, name)


def test_the_layer_of_the_recipe():
    names = recipe("guide.md", "momentum=1)")
    np.testing.assert_allclose(names["y"].asnumpy().mean(0), np.zeros(4), atol=1e-6)
    assert_same_bits(names["layer"].running_mean.data().asnumpy(), np.zeros(4, "float32"))
    assert_same_bits(names["layer"].running_var.data().asnumpy(), np.ones(4, "float32"))


@pytest.mark.parametrize("mode", MODES)
def test_running_statistics_put_back_in_a_net_that_is_built(mode):
    names = recipe("guide.md", "def put_back")
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=3), sbn.SyncBatchNorm(), sbn.VirtualBatchNorm(2))
    net.initialize(ctx=contexts(2))
    hybridize(net, mode)
    xs = shards(np.ones((8, 3), "float32"), [4, 4], contexts(2))
    [net(x) for x in xs]
    before, kept = values(net), names["kept_statistics"](net)
    for _ in range(3):
        with autograd.train_mode():
            [net(x) for x in xs]
    names["put_back"](kept)
    for name, value in values(net).items():
        assert_same_bits(value, before[name], name)


# Batches that are skipped.


def trained(batches, mode, momentum):
    """The values after these batches, and which of them counted."""
    step_if_finite = recipe("guide.md", "def step_if_finite")["step_if_finite"]
    devices = contexts(2)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(sbn.SyncBatchNorm(momentum=momentum), nn.Dense(4, in_units=3), sbn.SyncBatchNorm())
    mx.random.seed(0)
    net.initialize(mx.init.Xavier(), ctx=devices)
    hybridize(net, mode)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    stepped = []
    for kind in ["first", *batches]:
        x = np.random.default_rng(len(kind)).normal(3, 2, (5, 3)).astype("float32")
        x[1] *= np.nan if kind == "NaN in x" else 1
        xs = shards(x, [2, 3], devices)
        if kind == "first":  # In inference.
            [net(shard).wait_to_read() for shard in xs]
            continue

        def forward(xs=xs, factors=(1, np.inf if kind == "loss" else 1)):
            return [(net(x) ** 2).sum(axis=1) * factor for x, factor in zip(xs, factors)]

        stepped.append(step_if_finite(forward, net, trainer, len(x)))
    return values(net), stepped


@pytest.mark.parametrize("momentum", [0.9, None])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_is_skipped_leaves_no_trace(mode, momentum):
    found, stepped = trained(["good", "loss", "NaN in x", "fine too"], mode, momentum)
    assert stepped == [True, False, False, True]
    expected, stepped = trained(["good", "fine too"], mode, momentum)
    assert stepped == [True, True] and len(expected) == (11 if momentum is None else 10)
    for name, value in expected.items():
        assert np.isfinite(value).all()
        assert_same_bits(found[name], value, name)


# Two axes of channels.


class TwoAxes(nn.HybridBlock):
    def __init__(self, A):
        super().__init__()
        self.A, self.norm = A, sbn.SyncBatchNorm()
        self.normalize = recipe("guide.md", "def normalize_two_axes")["normalize_two_axes"]

    def hybrid_forward(self, F, x):
        return self.normalize(self.norm, x, self.A)


@pytest.mark.parametrize("mode", MODES)
def test_two_axes_of_channels(mode):
    N, A, T, B = 4, 3, 6, 5
    generator = np.random.default_rng(0)
    gamma, beta = generator.normal(1, 1, (2, A, 1, B)).astype("float32")
    x = generator.normal(0, 1, (N, A, T, B)).astype("float32")
    x = x * gamma[::-1] + 10 * beta  # Each channel has a mean and a variance of its own.
    net = TwoAxes(A)
    net.initialize(ctx=contexts(2))
    hybridize(net, mode)
    for shard in shards(x, [1, 3], contexts(2)):  # In inference.
        net(shard)
    net.norm.gamma.set_data(mx.nd.array(gamma.reshape(-1)))
    net.norm.beta.set_data(mx.nd.array(beta.reshape(-1)))
    with autograd.record():
        ys = [net(shard) for shard in shards(x, [1, 3], contexts(2))]
    mean = x.mean((0, 2), keepdims=True, dtype="float64")
    variance = x.var((0, 2), keepdims=True, dtype="float64")
    y = (x - mean) / np.sqrt(variance + 1e-5) * gamma + beta
    assert_close(np.concatenate([each.asnumpy() for each in ys]), y, "float32")
    running = net.norm.running_mean.data().asnumpy()
    np.testing.assert_allclose(running, 0.1 * mean.reshape(-1), rtol=1e-6)


# Values of a PyTorch layer, which are NumPy's arrays here.


def torch_state(prefix=""):
    state = {
        name: np.random.default_rng(seed).uniform(0.5, 2, 4).astype("float32")
        for seed, name in enumerate(("weight", "bias", *RUNNING))
    }
    state["num_batches_tracked"] = np.array(2**24 + 2)  # int64 of shape (), as PyTorch's
    return {prefix + name: value for name, value in state.items()}


def load_torch(*arguments):
    state = torch_state("layer1.0.bn1.")
    return recipe("migrating.md", "def load_torch", state=state)["load_torch"](*arguments)


@pytest.mark.parametrize("momentum", [0.9, None])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("in_channels, prefix", [(4, ""), (0, ""), (0, "bn1.")])
def test_values_of_pytorch(in_channels, prefix, dtype, momentum):
    layer = sbn.SyncBatchNorm(in_channels=in_channels, momentum=momentum)
    layer.cast(dtype)
    layer.initialize(ctx=contexts(2))
    state = torch_state()
    others = {"conv1.weight": np.ones((2, 2)), "bn10.bias": np.ones(4)} if prefix else {}
    load_torch(layer, {**torch_state(prefix), **others}, prefix)
    x = np.random.default_rng(9).standard_normal((6, 4)).astype(dtype)
    y = np.concatenate([layer(shard).asnumpy() for shard in shards(x, [2, 4], contexts(2))])
    mean, variance = (state[name] for name in RUNNING)
    expected = reference.forward(x, state["weight"], state["bias"], mean=mean, variance=variance)
    assert_close(y, expected.y, dtype)
    if momentum is None:
        assert layer.num_batches_tracked.data().asscalar() == 2**24 + 2


@pytest.mark.parametrize(
    "change, momentum, words",
    [
        ({"bias": None}, 0.9, r"bn\.: \['bias'\] are missing, \[\] are unexpected"),
        ({"scale": 1}, 0.9, r"\[\] are missing, \['scale'\] are unexpected"),
        ({"num_batches_tracked": None}, None, r"\['num_batches_tracked'\] are missing"),
    ],
)
def test_other_names_of_pytorch(change, momentum, words):
    layer = sbn.SyncBatchNorm(in_channels=4, momentum=momentum)
    layer.initialize()
    state = {**torch_state("bn."), **{f"bn.{name}": value for name, value in change.items()}}
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(ValueError, match=words):
        load_torch(layer, state, "bn.")
    assert layer.gamma.data().asnumpy().tolist() == [1] * 4
