"""Compares results with the float64 reference, and bits between splits, modes and threads."""

import os
import subprocess
import sys

import gluon_syncbn as sbn
import numpy as np
import pytest
import reference
from dtypes import DTYPES, parameter_dtype, rounded, values
from runs import MODES, contexts, prepare, run
from tolerances import assert_close, assert_same_bits

SHAPES = [(1000, 3), (8, 3, 5), (8, 3, 40, 50), (6, 5, 3, 4, 5)]
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
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [0, 1e3, 1e5])
def test_against_the_reference(dtype, shape, mean):
    """An offset of the data costs no accuracy. (Modes: test_properties.py.)"""
    x, dy, gamma, beta = data(shape, dtype, mean=min(mean, FARTHEST[dtype]))
    devices = contexts(3)
    layer = prepare(sbn.SyncBatchNorm(), devices, dtype, {}, gamma, beta)
    check(run(layer, x, dy, (1, 2, len(x) - 3), devices), x, dy, gamma, beta, dtype)


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
