"""Tests of the 16-bit types. See test_numerics.py for tests of all dtypes."""

import gluon_syncbn as sbn
import numpy as np
import pytest
import reference
from dtypes import BFLOAT16, numpy_dtype
from runs import MODES, contexts, prepare, run
from test_numerics import data
from tolerances import assert_close

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
