"""Invalid input. It raises an error at once, or when a result is read. See test_rendezvous.py for
missing devices."""

import contextlib
import time

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from devices import KIND, context
from dtypes import DTYPES, numpy_dtype, rounded, values
from mxnet import autograd
from runs import MODES, contexts, prepare, run, shards
from test_numerics import data
from tolerances import assert_same_bits

SOON = 1


@contextlib.contextmanager
def ends_soon():
    """Checks the time, and clears pending errors of MXNet, which would be raised later."""
    begin = time.monotonic()
    yield
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()
    assert time.monotonic() - begin < SOON + 5


def layer_of(mode, devices=1, **arguments):
    arguments = {"in_channels": 3, "prefix": "bn_", **arguments}
    layer = sbn.SyncBatchNorm(group=sbn.SyncGroup(timeout=SOON), **arguments)
    return prepare(layer, contexts(devices), "float32", MODES[mode])


def train(layer, *arrays):
    with autograd.record():
        ys = [layer(array) for array in arrays]
    for y in ys:
        y.wait_to_read()


def works_again(layer, devices=1):
    """Training continues after an error."""
    x = np.arange(24, dtype="float32").reshape(4, 3, 2)
    sizes = [4] if devices == 1 else [1, 3]
    result = run(layer, x, x, sizes, contexts(devices))
    assert np.isfinite(result.y).all() and np.isfinite(result.running_var).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "shape, axis, words",
    [
        ((3,), 1, r"2 to 5 dimensions.*\(3,\)"),
        ((1, 3, 1, 1, 1, 1), 1, r"2 to 5 dimensions.*\(1, 3, 1, 1, 1, 1\)"),
        ((2, 3), 2, r"axis=2.*shape \(2, 3\).*from -2 to 1"),
        ((2, 3), -3, "axis=-3.*from -2 to 1"),
        ((2, 3, 4), 3, r"axis=3.*shape \(2, 3, 4\).*from -3 to 2"),
        ((2, 4, 3), 1, r"\(2, 4, 3\).*4 channels on axis 1.*made for 3.*in_channels"),
        ((2, 3, 4), -1, r"\(2, 3, 4\).*4 channels on axis 2.*made for 3.*axis to fit"),
    ],
)
def test_shapes(mode, shape, axis, words):
    layer = layer_of(mode, axis=axis)
    with ends_soon(), pytest.raises(mx.MXNetError, match=f"'bn'.*{words}"):
        train(layer, mx.nd.ones(shape))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_integers(mode, dtype):
    words = f"'bn'.*bfloat16, float32 and float64 data. It got {dtype}. Cast the data"
    with ends_soon(), pytest.raises(mx.MXNetError, match=words):
        train(layer_of(mode), mx.nd.ones((2, 3), dtype=dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "shape, dtype, words",
    [
        ((2, 4, 4), "float32", "4 channels on axis 1.*made for 3"),
        # Parameters of all three dtypes are float32.
        ((2, 3, 4), "float16", "has (float32|float16) data.*Cast the data of all devices to one"),
        ((2, 3, 4), "bfloat16", "has (float32|bfloat16) data.*Cast the data of all devices to one"),
        # MXNet has empty arrays only with NumPy shapes.
        ((0, 3, 4), "float32", r"\(1\): data of shape \(0, 3, 4\) holds no values.*participants"),
        ((2, 3, 0), "float32", r"\(1\): data of shape \(2, 3, 0\) holds no values.*participants"),
    ],
)
def test_other_data_on_one_device(mode, shape, dtype, words):
    layer = layer_of(mode, devices=2)
    with mx.util.np_shape(True):
        x = mx.nd.array(np.ones(shape), ctx=context(1), dtype=numpy_dtype(dtype))
        with ends_soon(), pytest.raises(mx.MXNetError, match=words):
            train(layer, mx.nd.ones((2, 3, 4)), x)
    works_again(layer, devices=2)


@pytest.mark.parametrize("mode", MODES)
def test_other_shapes_on_one_device_are_right(mode):
    """Only the number of channels must be equal."""
    layer = layer_of(mode, devices=2)
    x, y = np.random.default_rng(0).standard_normal((2, 12)).astype("float32")
    parts = [x.reshape(2, 3, 2), y.reshape(1, 3, 2, 2)]
    with autograd.record():
        ys = [layer(mx.nd.array(part, ctx=context(i))) for i, part in enumerate(parts)]
    mx.nd.waitall()
    rows = [part.swapaxes(0, 1).reshape(3, -1) for part in parts]
    expected = np.concatenate(rows, axis=1).astype("float64")
    for array, row in zip(ys, rows):
        normal = (row - expected.mean(1)[:, None]) / np.sqrt(expected.var(1)[:, None] + 1e-5)
        result = array.asnumpy().swapaxes(0, 1).reshape(3, -1)
        np.testing.assert_allclose(result, normal, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0)])
@pytest.mark.parametrize("use_global_stats", [False, True])
def test_no_values_in_inference(use_global_stats, shape, mode):
    """As with nn.BatchNorm, since no statistics are computed from them. MXNet raises errors of
    empty arrays only in waitall()."""
    layer = layer_of(mode, use_global_stats=use_global_stats)
    with mx.util.np_shape(True):
        x = mx.nd.zeros(shape)
        x.attach_grad()
        with autograd.record(train_mode=use_global_stats):
            y = layer(x)
        for parameter in (layer.gamma, layer.beta):
            parameter.data().grad[:] = 5
        y.backward(train_mode=use_global_stats)
        mx.nd.waitall()
        assert y.shape == x.grad.shape == shape
        for parameter in (layer.gamma, layer.beta):
            assert parameter.grad().asnumpy().tolist() == [0, 0, 0]
    works_again(layer)


@pytest.mark.parametrize("mode", MODES)
def test_no_channels(mode):
    words = r"Provided = \[3\], inferred shape=\[0\]"
    with mx.util.np_shape(True):
        with ends_soon(), pytest.raises(mx.MXNetError, match=words):
            train(layer_of(mode), mx.nd.zeros((2, 0, 4)))
        with pytest.raises(AssertionError, match="in_channels"):
            train(layer_of(mode, in_channels=0), mx.nd.zeros((2, 0, 4)))


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ([None], TypeError, "bn was called with None: give an NDArray, such as mx.nd.array"),
        ([np.ones((2, 3), "f")], TypeError, "bn was called with array.*: give an NDArray"),
        ([[mx.nd.ones((2, 3))] * 2], TypeError, "with a list of 2: call it with one array at a"),
        (
            [mx.nd.ones((2, 3), ctx=context(5))],
            ValueError,
            rf"{KIND}\(5\).*parameters live on \[{KIND}\(0\), {KIND}\(1\)\].*reset_ctx",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["imperative", "hybrid"])
def test_what_is_refused_at_once(arguments, error, words, mode):
    layer = layer_of(mode, devices=2)
    with pytest.raises(error, match=words):
        train(layer, *arguments)
    works_again(layer, devices=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (4, 3), (2, 3, 3000)])
@pytest.mark.parametrize("where", ["x", "dy"])
def test_nan_and_inf_spoil_one_channel(where, dtype, value, shape):
    x, dy, gamma, beta = data(shape, dtype)
    spoilt = values(x if where == "x" else dy).copy()
    spoilt[(1, 1) + (0,) * (len(shape) - 2)] = value
    spoilt = rounded(spoilt, dtype)
    results = []
    for arrays in ((x, dy), (spoilt, dy) if where == "x" else (x, spoilt)):
        layer = prepare(sbn.SyncBatchNorm(), contexts(2), dtype, {}, gamma, beta)
        results.append(run(layer, *arrays, (1, len(x) - 1), contexts(2)))
    clean, result = results
    assert not np.isfinite(values(result.dx)[:, 1]).any()
    if where == "x":
        # As in nn.BatchNorm. The mean of a channel with inf is inf, and its variance is NaN.
        assert np.isnan(values(result.y)[:, 1]).all() and np.isnan(values(result.dx)[:, 1]).all()
        assert np.isnan(result.running_var[1]) and not np.isfinite(result.running_mean[1])
    else:
        assert_same_bits(result.y, clean.y)
        assert_same_bits(result.running_var, clean.running_var)
        assert not np.isfinite(result.dgamma[1]) and not np.isfinite(result.dbeta[1])
    for channel in (0, 2):
        for field in ("y", "dx"):
            one, other = (getattr(r, field)[:, channel] for r in (result, clean))
            assert_same_bits(one, other, field)
        for field in ("dgamma", "dbeta", "running_mean", "running_var"):
            assert getattr(result, field)[channel] == getattr(clean, field)[channel], field


def test_training_goes_on_after_nan():
    """NaN stays in the running statistics, as with nn.BatchNorm; the next batch is normalized."""
    layer = layer_of("hybrid", devices=2)
    x = np.full((4, 3, 2), np.nan, "float32")
    run(layer, x, x, (1, 3), contexts(2))
    x = np.arange(24, dtype="float32").reshape(4, 3, 2)
    with autograd.record():
        ys = [layer(shard) for shard in shards(x, (1, 3), contexts(2))]
    assert all(np.isfinite(y.asnumpy()).all() for y in ys)
    assert np.isnan(layer.running_mean.data(context(0)).asnumpy()).all()
