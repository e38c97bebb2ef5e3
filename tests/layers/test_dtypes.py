"""Tests of the 16-bit types. See test_numerics.py for tests of all dtypes."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
import reference
from dtypes import BFLOAT16, numpy_dtype, rounded, values
from gluon_syncbn.layers.operator import sync_batch_norm
from mxnet import autograd, gluon
from mxnet.gluon import nn
from runs import MODES, contexts, hybridize, prepare, run, shards
from test_numerics import data
from tolerances import RELATIVE, assert_close, assert_same_bits, relative_error

HALVES = ["float16", "bfloat16"]


def params_of(block):
    return block.collect_params().values()


@pytest.mark.parametrize("dtype", ["float16", np.float16, "bfloat16", BFLOAT16])
def test_cast_leaves_the_parameters_in_float32(dtype):
    layer = sbn.SyncBatchNorm(in_channels=3)
    layer.initialize()
    layer.cast(dtype)
    assert {np.dtype(p.data().dtype) for p in params_of(layer)} == {np.dtype("float32")}
    layer.cast("float64")
    layer.cast(dtype)
    assert {np.dtype(p.data().dtype) for p in params_of(layer)} == {np.dtype("float32")}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("before", ["initialize", "first data"])
def test_cast_before_parameters_exist(dtype, before):
    layer = sbn.SyncBatchNorm()
    layer.cast(numpy_dtype(dtype))
    layer.initialize(ctx=contexts(2))
    if before == "first data":
        layer.cast(numpy_dtype(dtype))
    x, dy, gamma, beta = data((4, 3, 5), dtype)
    assert run(layer, x, dy, (1, 3), contexts(2)).y.dtype == numpy_dtype(dtype)


@pytest.mark.parametrize("mode", MODES)
def test_values_at_the_end_of_float16(mode):
    """Their sums and squares exceed its range."""
    largest = np.finfo("float16").max
    x, dy, gamma, beta = data((6, 3, 9, 11), "float16")
    x[:, 0] = np.where(x[:, 0] > 0, largest, -largest)
    x[:, 1] = np.where(x[:, 1] > 0, largest, largest - 32)
    x[0, 2, 0, 0] = -largest
    layer = prepare(sbn.SyncBatchNorm(), contexts(2), "float16", MODES[mode], gamma, beta)
    result = run(layer, x, dy, (1, 5), contexts(2))
    assert np.isfinite(result.y).all() and np.isfinite(result.dx).all()
    # Compares each channel separately, as the scales differ.
    expected = reference.forward(x, gamma, beta)
    gradients = reference.backward(dy, x, gamma)
    for c in range(3):
        assert_close(result.y[:, c], expected.y[:, c], "float16", f"y of channel {c}")
        assert_close(result.running_mean[c], 0.1 * expected.mean[c], "float32")
        assert_close(result.running_var[c], 0.9 + 0.1 * expected.variance[c], "float32")
        assert_close(result.dgamma[c], gradients.dgamma[c], "float32", f"dgamma of channel {c}")
        # dx is near the smallest numbers of float16, whose spacing is 2^-24.
        error = np.abs(result.dx[:, c] - gradients.dx[:, c]).max()
        assert error <= max(2**-25, 2**-11 * np.abs(gradients.dx[:, c]).max()) * 1.01


def test_results_beyond_float16_are_infinite():
    x, dy, _, beta = data((6, 3, 4), "float16")
    gamma = np.array([1, 1e6, 1], "float32")
    layer = prepare(sbn.SyncBatchNorm(), contexts(2), "float16", None, gamma, beta)
    result = run(layer, x, dy, (2, 4), contexts(2))
    assert np.isinf(result.y[:, 1]).any() and not np.isnan(result.y).any()
    assert np.isfinite(result.y[:, ::2]).all() and np.isfinite(result.running_var).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            (4, 3, 40, 50), marks=pytest.mark.cpu_only("GPUs add 16-bit data in another order")
        ),
        (700, 70),
    ],
)
def test_results_are_those_of_float32_rounded(dtype, shape):
    """Nothing is computed in 16 bits, which only store data."""
    x, dy, gamma, beta = data(shape, dtype, mean=3)
    results = []
    for wide in (False, True):
        kind = "float32" if wide else dtype
        layer = prepare(sbn.SyncBatchNorm(), contexts(2), kind, {}, gamma, beta)
        arrays = (values(x), values(dy)) if wide else (x, dy)
        results.append(run(layer, *arrays, (1, len(x) - 1), contexts(2)))
    narrow, wide = results
    assert_same_bits(narrow.y, rounded(wide.y, dtype), "y")
    assert_same_bits(narrow.dx, rounded(wide.dx, dtype), "dx")
    for field in ("dgamma", "dbeta", "running_mean", "running_var"):
        assert_same_bits(getattr(narrow, field), getattr(wide, field), field)


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_added_before_they_are_rounded(dtype):
    """grad_req="add": one rounding and not two (without layout copies, which would add)."""
    x, dy, gamma, beta = data((4, 3, 50), dtype)
    layer = prepare(sbn.SyncBatchNorm(), contexts(1), dtype, None, gamma, beta)
    run(layer, x, dy, (4,), contexts(1))
    array, gradient, gradient_before = (shards(a, (4,), contexts(1))[0] for a in (x, dy, dy))
    array.attach_grad("add")
    gradient_before.copyto(array.grad)
    parameters = (layer.gamma, layer.beta, layer.running_mean, layer.running_var)
    with autograd.record():
        y = sync_batch_norm(mx.nd, array, *(p.data() for p in parameters), layer=layer._layer)
    y.backward(gradient)
    expected = values(dy) + reference.backward(values(dy), values(x), gamma).dx
    result = values(array.grad.asnumpy()).astype("float64")
    error = np.abs(result - expected)
    assert (error <= RELATIVE[dtype] * np.abs(expected) + 1e-6).all()


class Weighted(mx.gluon.HybridBlock):
    """A layer with float16 weights, which MXNet's convolutions do not support on the CPU."""

    def __init__(self, channels):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(1, channels, 1, 1), init="ones")

    def hybrid_forward(self, F, x, weight):
        return F.broadcast_mul(x, weight)


@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("multi_precision", [False, True])
def test_a_trainer_for_float16(mode, multi_precision):
    devices = contexts(2)
    net = nn.HybridSequential()
    net.add(Weighted(3), sbn.SyncBatchNorm(in_channels=3), Weighted(3), sbn.SyncBatchNorm())
    net.initialize(ctx=devices)
    net.cast("float16")
    hybridize(net, mode)
    optimizer = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": multi_precision}
    trainer = gluon.Trainer(net.collect_params(), "sgd", optimizer)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((6, 3, 5, 5)).astype("float16")
    target = (2 * x + 1).astype("float16")
    losses = []
    for step in range(30):
        with autograd.record():
            parts = [
                ((net(a) - b) ** 2).mean()
                for a, b in zip(shards(x, (2, 4), devices), shards(target, (2, 4), devices))
            ]
        autograd.backward(parts)
        if step == 0:
            mx.nd.waitall()  # The first step of a Trainer reads running statistics.
        trainer.step(2)
        losses.append(np.mean([float(part.asscalar()) for part in parts]))
    assert losses[-1] < 0.1 * losses[0]
    for parameter in params_of(net):
        weight = parameter.name.endswith("weight")
        first, second = (array.asnumpy() for array in parameter.list_data())
        assert first.dtype == (np.float16 if weight else np.float32)
        assert_same_bits(first, second, parameter.name)


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("momentum", [0.9, None])
def test_an_exported_net_loads_as_float16(tmp_path, momentum):
    net = nn.HybridSequential()
    net.add(sbn.SyncBatchNorm(in_channels=3, momentum=momentum), nn.Activation("relu"))
    net.initialize()
    net.hybridize()
    x = mx.nd.random.normal(shape=(2, 3, 8, 8))
    expected = net(x).asnumpy()
    net.export(str(tmp_path / "net"))
    loaded = gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    )
    loaded.cast("float16")
    y = loaded(x.astype("float16"))
    assert y.dtype == np.float16
    # x is rounded too.
    assert relative_error(y.asnumpy(), expected) < 2 * 2**-11 + 1e-6


def test_the_number_of_batches_is_not_counted_in_float16():
    layer = sbn.SyncBatchNorm(in_channels=3, momentum=None)
    layer.initialize()
    layer.num_batches_tracked.cast("float16")
    layer(mx.nd.ones((2, 3))).wait_to_read()
    with pytest.raises(mx.MXNetError, match="num_batches_tracked is of dtype float16 and must"):
        with autograd.train_mode():
            layer(mx.nd.ones((2, 3))).wait_to_read()
