"""Compares results with the float64 reference, and bits between splits, modes and threads."""

import os
import subprocess
import sys

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
import reference
from dtypes import DTYPES, parameter_dtype, rounded, values
from mxnet import autograd
from runs import MODES, contexts, hybridize, prepare, run, shards
from tolerances import assert_close, assert_same_bits

SHAPES = {2: (12, 5), 3: (6, 5, 11), 4: (6, 5, 7, 9), 5: (6, 5, 3, 4, 5)}
# The largest offset of data. float16 ends at 65504.
FARTHEST = {dtype: 6e4 if dtype == "float16" else 1e5 for dtype in DTYPES}


def random(shape, dtype, mean=0.0, std=1.0, seed=0):
    return rounded(np.random.default_rng(seed).standard_normal(shape) * std + mean, dtype)


def data(shape, dtype, mean=0.0):
    """x, dy, gamma and beta."""
    channels, parameters = shape[1], parameter_dtype(dtype)
    return (
        random(shape, dtype, mean),
        random(shape, dtype, seed=1),
        random((channels,), parameters, 1, 0.2, seed=2),
        random((channels,), parameters, 0, 0.5, seed=3),
    )


def check(result, x, dy, gamma, beta, dtype):
    forward = reference.forward(values(x), gamma, beta)
    backward = reference.backward(values(dy), values(x), gamma)
    parameters = parameter_dtype(dtype)
    assert_close(result.y, forward.y, dtype, "y")
    assert_close(result.dx, backward.dx, dtype, "dx")
    assert_close(result.dgamma, backward.dgamma, parameters, "dgamma")
    assert_close(result.dbeta, backward.dbeta, parameters, "dbeta")
    assert_close(result.running_mean, 0.1 * forward.mean, parameters, "running_mean")
    assert_close(result.running_var, 0.9 + 0.1 * forward.variance, parameters, "running_var")


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
@pytest.mark.parametrize("shape", [(4, 2, 3, 3), (1, 3), (1, 3, 1, 1)])
def test_channels_of_one_value(dtype, shape):
    dy, gamma, beta = data(shape, dtype)[1:]
    x = rounded(np.full(shape, 1234.56789), dtype)
    devices = contexts(min(2, len(x)))
    layer = prepare(sbn.SyncBatchNorm(), devices, dtype, None, gamma, beta)
    result = run(layer, x, dy, (1, 3)[: len(x)], devices)
    check(result, x, dy, gamma, beta, dtype)
    expected = np.broadcast_to(rounded(beta, dtype)[:, None], (len(x), shape[1], x[0, 0].size))
    assert_same_bits(result.y, expected.reshape(shape))
    np.testing.assert_array_equal(result.running_var, 0.9 * np.ones_like(result.running_var))
    if len(x) == 1:
        assert not values(result.dx).any() and not result.dgamma.any()


def test_two_values_on_two_devices():
    x = np.array([[1.0], [3.0]], "float32")
    layer = prepare(sbn.SyncBatchNorm(epsilon=0), contexts(2))
    assert_same_bits(run(layer, x, x, (1, 1), contexts(2)).y, np.array([[-1.0], [1.0]], "float32"))


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
    hidden, gradient = [x.astype("float64")], dy
    for _ in range(6):
        hidden.append(hidden[-1] + reference.forward(hidden[-1], np.ones(3), np.zeros(3)).y)
    for each in reversed(hidden[:-1]):
        gradient = gradient + reference.backward(gradient, each, np.ones(3)).dx
    for mode in MODES:
        net = Residual()
        net.initialize(ctx=contexts(2))
        hybridize(net, mode)
        xs, dys = shards(x, (1, 3), contexts(2)), shards(dy, (1, 3), contexts(2))
        for shard in xs:
            shard.attach_grad()
        with autograd.record():
            ys = [net(shard) for shard in xs]
        autograd.backward(ys, dys)
        result = np.concatenate([shard.grad.asnumpy() for shard in xs])
        # Six layers, with the tolerance for each.
        assert np.abs(result - gradient).max() <= 1e-5 * np.abs(gradient).max(), mode


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
