"""Compares the bits of splits and modes. (With the reference: test_properties.py.)"""

import gluon_syncbn as sbn
import numpy as np
import pytest
from dtypes import DTYPES, parameter_dtype, rounded
from runs import MODES, contexts, prepare, run
from tolerances import assert_same_bits

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
