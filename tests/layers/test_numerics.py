"""Compares results with the float64 reference, and bits between splits and modes."""

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
