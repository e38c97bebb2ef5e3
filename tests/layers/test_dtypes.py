"""Tests of the 16-bit types. See test_numerics.py for tests of all dtypes."""

import os
from pathlib import Path

import gluon_syncbn as sbn
import numpy as np
import programs
import pytest
from dtypes import BFLOAT16, numpy_dtype
from runs import contexts, run
from test_numerics import data

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


@pytest.mark.cpu_only("only without oneDNN no layout copy adds the gradient")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_gradient_is_rounded_before_it_is_added(dtype):
    """As in separate operators, so that every mode gives the same bits."""
    program = Path(__file__).with_name("added_gradients.py")
    settings = {"MXNET_EXEC_INPLACE_GRAD_SUM_CAP": "1", "MXNET_MKLDNN_ENABLED": "0"}
    result = programs.run([program, 0, 15, dtype], env={**os.environ, **settings})
    assert f"{dtype}: 0 differ" in result.stdout, result.stdout + result.stderr
