"""Compares results with the float64 reference, and bits between splits, modes and threads."""

import os
import subprocess
import sys

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
import reference
import runs
from devices import context
from dtypes import DTYPES, parameter_dtype, rounded, values
from mxnet import autograd
from runs import MODES, contexts, prepare, run
from tolerances import assert_close, assert_same_bits

SHAPES = {2: (12, 5), 3: (6, 5, 11), 4: (6, 5, 7, 9), 5: (6, 5, 3, 4, 5)}
EPSILON = 1e-5
# The largest offset of data. float16 ends at 65504.
FARTHEST = {dtype: 6e4 if dtype == "float16" else 1e5 for dtype in DTYPES}


def random(shape, dtype, mean=0.0, std=1.0, seed=0):
    return rounded(np.random.default_rng(seed).standard_normal(shape) * std + mean, dtype)


def data(shape, dtype, axis=1, mean=0.0, std=1.0, seed=0):
    """x, dy, gamma and beta."""
    channels, parameters = shape[axis], parameter_dtype(dtype)
    return (
        random(shape, dtype, mean, std, seed),
        random(shape, dtype, seed=seed + 1),
        random((channels,), parameters, 1, 0.2, seed + 2),
        random((channels,), parameters, 0, 0.5, seed + 3),
    )


def check(result, x, dy, gamma, beta, dtype, axis=1, momentum=0.9, epsilon=EPSILON):
    forward = reference.forward(values(x), gamma, beta, epsilon, axis)
    backward = reference.backward(values(dy), values(x), gamma, epsilon, axis)
    parameters = parameter_dtype(dtype)
    assert_close(result.y, forward.y, dtype, "y")
    assert_close(result.dx, backward.dx, dtype, "dx")
    assert_close(result.dgamma, backward.dgamma, parameters, "dgamma")
    assert_close(result.dbeta, backward.dbeta, parameters, "dbeta")
    assert_close(result.running_mean, (1 - momentum) * forward.mean, parameters, "running_mean")
    expected = momentum + (1 - momentum) * forward.variance
    assert_close(result.running_var, expected, parameters, "running_var")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", sorted(SHAPES))
@pytest.mark.parametrize("mode", MODES)
def test_against_the_reference(dtype, rank, mode):
    x, dy, gamma, beta = data(SHAPES[rank], dtype)
    devices = contexts(3)
    layer = prepare(sbn.SyncBatchNorm(), devices, dtype, MODES[mode], gamma, beta)
    check(run(layer, x, dy, (1, 2, len(x) - 3), devices), x, dy, gamma, beta, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0, 1e2, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("shape", [(8, 3, 40, 50), (8, 3, 5), (1000, 3)])
def test_an_offset_of_the_data_costs_no_accuracy(dtype, mean, shape):
    x, dy, gamma, beta = data(shape, dtype, mean=min(mean, FARTHEST[dtype]))
    devices = contexts(2)
    layer = prepare(sbn.SyncBatchNorm(), devices, dtype, {}, gamma, beta)
    check(run(layer, x, dy, (3, len(x) - 3), devices), x, dy, gamma, beta, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1, -3])
def test_axis(dtype, axis):
    x, dy, gamma, beta = data((4, 5, 6, 7), dtype, axis=axis)
    devices = contexts(1)
    layer = prepare(sbn.SyncBatchNorm(axis=axis), devices, dtype, None, gamma, beta)
    check(run(layer, x, dy, (4,), devices), x, dy, gamma, beta, dtype, axis=axis)


@pytest.mark.parametrize("dtype", DTYPES)
def test_momentum_and_epsilon(dtype):
    x, dy, gamma, beta = data(SHAPES[4], dtype)
    layer = sbn.SyncBatchNorm(momentum=0.25, epsilon=0.1)
    prepare(layer, contexts(2), dtype, {}, gamma, beta)
    result = run(layer, x, dy, (2, 4), contexts(2))
    check(result, x, dy, gamma, beta, dtype, momentum=0.25, epsilon=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_input(dtype):
    x = rounded(np.full((4, 2, 3, 3), 1234.56789), dtype)
    dy, (gamma, beta) = random(x.shape, dtype), data(x.shape, dtype)[2:]
    layer = prepare(sbn.SyncBatchNorm(), contexts(2), dtype, None, gamma, beta)
    result = run(layer, x, dy, (1, 3), contexts(2))
    expected = np.broadcast_to(rounded(beta, dtype)[:, None, None], x.shape)
    np.testing.assert_array_equal(values(result.y), values(expected))
    np.testing.assert_array_equal(result.running_var, np.full(2, 0.9, parameter_dtype(dtype)))
    check(result, x, dy, gamma, beta, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_variance(dtype):
    x, dy, gamma, beta = data(SHAPES[4], dtype, mean=1, std=1e-4)
    layer = prepare(sbn.SyncBatchNorm(), contexts(2), dtype, None, gamma, beta)
    check(run(layer, x, dy, (2, 4), contexts(2)), x, dy, gamma, beta, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
def test_a_single_value_per_channel(dtype, shape):
    x, dy, gamma, beta = data(shape, dtype)
    layer = prepare(sbn.SyncBatchNorm(), contexts(1), dtype, None, gamma, beta)
    result = run(layer, x, dy, (1,), contexts(1))
    assert_same_bits(result.y.ravel(), rounded(beta, dtype))
    assert not values(result.dx).any() and not result.dgamma.any()
    assert_close(result.dbeta, values(dy).ravel(), parameter_dtype(dtype))


def test_two_values_on_two_devices():
    x = np.array([[1.0], [3.0]], "float32")
    layer = prepare(sbn.SyncBatchNorm(epsilon=0), contexts(2))
    assert_same_bits(run(layer, x, x, (1, 1), contexts(2)).y, np.array([[-1.0], [1.0]], "float32"))


def constant_statistics(layer, devices, dtype, channels):
    parameters = parameter_dtype(dtype)
    mean = random((channels,), parameters, 2, seed=9)
    variance = 0.5 + random((channels,), parameters, seed=8) ** 2
    layer.running_mean.set_data(mx.nd.array(mean, dtype=parameters))
    layer.running_var.set_data(mx.nd.array(variance, dtype=parameters))
    return mean, variance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["inference", "use_global_stats"])
def test_running_statistics_as_constants(dtype, mode, how):
    """On one device, as nothing is synchronized. The gradient treats statistics as constants."""
    x, dy, gamma, beta = data(SHAPES[4], dtype)
    layer = sbn.SyncBatchNorm(use_global_stats=how == "use_global_stats", in_channels=5)
    prepare(layer, contexts(2), dtype, MODES[mode], gamma, beta)
    mean, variance = constant_statistics(layer, contexts(2), dtype, 5)
    (xs,) = runs.shards(x, (len(x),), contexts(1))
    xs.attach_grad()
    with autograd.record(train_mode=how != "inference"):
        y = layer(xs)
    y.backward(*runs.shards(dy, (len(dy),), contexts(1)))
    constants, parameters = {"mean": mean, "variance": variance}, parameter_dtype(dtype)
    assert_close(y.asnumpy(), reference.forward(values(x), gamma, beta, **constants).y, dtype, "y")
    expected = reference.backward(values(dy), values(x), gamma, **constants)
    assert_close(xs.grad.asnumpy(), expected.dx, dtype, "dx")
    assert_close(layer.gamma.grad(context(0)).asnumpy(), expected.dgamma, parameters, "dgamma")
    assert_close(layer.beta.grad(context(0)).asnumpy(), expected.dbeta, parameters, "dbeta")
    assert_same_bits(layer.running_mean.data(context(0)).asnumpy(), mean)
    assert_same_bits(layer.running_var.data(context(0)).asnumpy(), variance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale, center", [(False, True), (True, False), (False, False)])
def test_scale_and_center(dtype, scale, center):
    x, dy, gamma, beta = data(SHAPES[4], dtype)
    layer = sbn.SyncBatchNorm(scale=scale, center=center, in_channels=5)
    prepare(layer, contexts(2), dtype, {}, gamma, beta if center else None)
    result = run(layer, x, dy, (2, 4), contexts(2))
    gamma = gamma if scale else np.ones(5)
    beta = beta if center else np.zeros(5)
    x, dy = values(x), values(dy)
    assert_close(result.y, reference.forward(x, gamma, beta).y, dtype, "y")
    assert_close(result.dx, reference.backward(dy, x, gamma).dx, dtype, "dx")
    assert (layer.gamma.grad_req, layer.beta.grad_req) == (
        "write" if scale else "null",
        "write" if center else "null",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("request_x", ["write", "add", "null"])
@pytest.mark.parametrize("request_parameters", ["write", "add", "null"])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_requests(dtype, request_x, request_parameters, mode):
    x, dy, gamma, beta = data(SHAPES[4], dtype)
    devices = contexts(2)
    layer = sbn.SyncBatchNorm(in_channels=5)
    layer.gamma.grad_req = layer.beta.grad_req = request_parameters
    prepare(layer, devices, dtype, MODES[mode], gamma, beta)
    xs, dys = runs.shards(x, (2, 4), devices), runs.shards(dy, (2, 4), devices)
    ones = runs.shards(rounded(np.ones(x.shape), dtype), (2, 4), devices)
    for shard, one in zip(xs, ones):
        shard.attach_grad(request_x)
        if request_x != "null":
            one.copyto(shard.grad)
    for parameter in (layer.gamma, layer.beta):
        for gradient in parameter.list_grad() if request_parameters != "null" else ():
            gradient[:] = 1
    with autograd.record():
        ys = [layer(shard) for shard in xs]
    if request_x == request_parameters == "null":
        return
    autograd.backward(ys, dys)
    expected = reference.backward(values(dy), values(x), gamma)
    if request_x != "null":
        dx = np.concatenate([shard.grad.asnumpy() for shard in xs])
        assert_close(dx, expected.dx + (request_x == "add"), dtype, "dx")
    if request_parameters != "null":
        already = 2 if request_parameters == "add" else 0
        dgamma = sum(layer.gamma.grad(device).asnumpy() for device in devices)
        dbeta = sum(layer.beta.grad(device).asnumpy() for device in devices)
        assert_close(dgamma, expected.dgamma + already, parameter_dtype(dtype), "dgamma")
        assert_close(dbeta, expected.dbeta + already, parameter_dtype(dtype), "dbeta")


def test_residual_connections_that_add_gradients_in_place():
    """y = x + bn(x), many times: MXNet may request that the operator adds to the gradient of the
    branch."""

    class Residual(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.norms = mx.gluon.nn.HybridSequential()
            for _ in range(6):
                self.norms.add(sbn.SyncBatchNorm(in_channels=3))

        def hybrid_forward(self, F, x):
            for norm in self.norms:
                x = x + norm(x)
            return x

    x, dy, _, _ = data((4, 3, 5, 5), "float32")
    results = []
    for mode in MODES.values():
        net = Residual()
        net.initialize(ctx=contexts(2))
        if mode is not None:
            net.hybridize(**mode)
        xs, dys = runs.shards(x, (1, 3), contexts(2)), runs.shards(dy, (1, 3), contexts(2))
        for shard in xs:
            shard.attach_grad()
        with autograd.record():
            ys = [net(shard) for shard in xs]
        autograd.backward(ys, dys)
        results.append(np.concatenate([shard.grad.asnumpy() for shard in xs]))
    for result in results[1:]:
        assert_close(result, results[0], "float32")
    expected, gradient = [x.astype("float64")], dy
    for _ in range(6):
        expected.append(expected[-1] + reference.forward(expected[-1], np.ones(3), np.zeros(3)).y)
    for activation in reversed(expected[:-1]):
        gradient = gradient + reference.backward(gradient, activation, np.ones(3)).dx
    # Six layers, with the tolerance for each.
    assert np.abs(results[0] - gradient).max() <= 1e-5 * np.abs(gradient).max()


SPLITS = [(8,), (4, 4), (2, 2, 2, 2), (1, 3, 4), (7, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0, 1e5])
@pytest.mark.parametrize("shape", [(8, 7, 33, 33), (8, 70), (8, 7, 3), (8, 2, 100, 100)])
def test_every_split_gives_the_same_bits(dtype, mean, shape):
    x, dy, gamma, beta = data(shape, dtype, mean=min(mean, FARTHEST[dtype]))
    results = []
    for sizes in SPLITS:
        devices = contexts(len(sizes))
        layer = prepare(sbn.SyncBatchNorm(), devices, dtype, {}, gamma, beta)
        results.append(run(layer, x, dy, sizes, devices))
    for sizes, result in zip(SPLITS, results):
        for field in ("y", "dx", "running_mean", "running_var"):
            assert_same_bits(
                getattr(result, field), getattr(results[0], field), f"{field}, {sizes}"
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_run_and_mode_gives_the_same_bits(dtype):
    x, dy, gamma, beta = data((8, 7, 33, 33), dtype)
    first = None
    for repetition in range(20 if dtype == "float32" else 5):
        for name, mode in MODES.items():
            layer = prepare(sbn.SyncBatchNorm(), contexts(3), dtype, mode, gamma, beta)
            result = run(layer, x, dy, (1, 3, 4), contexts(3), steps=2)
            first = first or result
            for field in result._fields:
                what = f"{field}, {name}, repetition {repetition}"
                assert_same_bits(getattr(result, field), getattr(first, field), what)


_THREADS = """
import itertools
import sys
import numpy as np
sys.path.insert(0, {tests!r})
from runs import contexts, prepare, run
from test_numerics import DTYPES, data
import gluon_syncbn as sbn

results = []
shapes = [(4, 7, 133, 133), (4, 2, 300, 300), (5000, 70), (4, 500, 12, 12)]
for shape, dtype in itertools.product(shapes, DTYPES):
    x, dy, gamma, beta = data(shape, dtype, mean=100)
    layer = prepare(sbn.SyncBatchNorm(), contexts(2), dtype, {{}}, gamma, beta)
    results += run(layer, x, dy, (1, shape[0] - 1), contexts(2))
np.savez({output!r}, *results)
"""


def test_every_number_of_threads_gives_the_same_bits(tmp_path):
    files = []
    for threads in (1, 2, 5):
        files.append(str(tmp_path / f"{threads}.npz"))
        program = _THREADS.format(tests=os.path.dirname(__file__), output=files[-1])
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    results = [np.load(file) for file in files]
    for result in results[1:]:
        for name in results[0].files:
            assert_same_bits(result[name], results[0][name], name)
