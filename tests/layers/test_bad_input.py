"""Invalid input. It raises an error at once, or when a result is read. See test_rendezvous.py for
missing devices."""

import contextlib
import textwrap
import time

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import programs
import pytest
import reference
from devices import KIND, context
from dtypes import DTYPES, numpy_dtype, rounded, values
from mxnet import autograd
from runs import MODES, contexts, prepare, run
from test_numerics import data
from tolerances import assert_close, assert_same_bits

SOON = 1


@contextlib.contextmanager
def ends_soon():
    """Checks the time, and clears pending errors of MXNet, which would be raised later."""
    begin = time.monotonic()
    yield
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()
    assert time.monotonic() - begin < SOON + 5


def layer_of(mode, devices=1, timeout=SOON, **arguments):
    arguments = {"in_channels": 3, "prefix": "bn_", **arguments}
    layer = sbn.SyncBatchNorm(group=sbn.SyncGroup(timeout=timeout), **arguments)
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
    ],
)
def test_other_data_on_one_device(mode, shape, dtype, words):
    layer = layer_of(mode, devices=2)
    x = mx.nd.array(np.ones(shape), ctx=context(1), dtype=numpy_dtype(dtype))
    with ends_soon(), pytest.raises(mx.MXNetError, match=words):
        train(layer, mx.nd.ones((2, 3, 4)), x)
    works_again(layer, devices=2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0)])
def test_no_device_has_samples(mode, devices, shape):
    words = {1: rf"of shape \({shape[0]}, 3, {shape[2]}\) holds no values, and no other device"}
    words[2] = "forward call 0: no device that shares statistics with this one has samples"
    layer = layer_of(mode, devices)
    with mx.util.np_shape(True), ends_soon():
        with pytest.raises(mx.MXNetError, match=words[devices]):
            train(layer, *(mx.nd.zeros(shape, ctx=each) for each in contexts(devices)))
    works_again(layer, devices)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "axis, shape, empty",
    [
        (1, (4, 3, 5), (0, 3, 5)),
        (1, (4, 3, 5), (2, 3, 0)),
        (1, (4, 3), (0, 3)),
        (-1, (4, 5, 3), (0, 5, 3)),
        (-1, (4, 5, 3), (2, 0, 3)),
    ],
)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"activation": "relu", "momentum": None},
        {"activation": "leaky_relu", "inplace": True},
        {"scale": False, "activation": "relu", "residual": True},
    ],
    ids=["plain", "relu", "inplace", "residual"],
)
def test_a_device_without_samples(mode, axis, shape, empty, arguments):
    """It counts as none, where MXNet has such an array: with NumPy's shapes."""
    arguments = dict(arguments)
    copies = 2 if arguments.pop("residual", False) else 1

    def results(where):
        layer = layer_of(mode, len(where), timeout=60, axis=axis, **arguments)
        layer.gamma.set_data(mx.nd.array([0, -1, 2]))
        xs = []
        for device, number in zip(contexts(len(where)), where):
            values = np.zeros(empty)
            if number is not None:
                values = np.random.default_rng(number).normal(size=shape)
            xs.append(mx.nd.array(values, ctx=device))
            xs[-1].attach_grad()
        with autograd.record():
            ys = [layer(*[x] * copies) for x in xs]
            losses = [(y * y).sum() for y in ys]
        autograd.backward(losses)
        assert [y.shape for y in ys] == [x.shape for x in xs]
        mx.nd.waitall()
        own = [i for i, number in enumerate(where) if number is not None]
        found = [array[i].asnumpy() for i in own for array in (ys, [x.grad for x in xs])]
        gradients = [p.list_grad() for p in (layer.gamma, layer.beta) if p.grad_req != "null"]
        found += [gradient[i].asnumpy() for i in own for gradient in gradients]
        for i in set(range(len(where))) - set(own):
            assert not any(gradient[i].asnumpy().any() for gradient in gradients)
        statistics = [p for p in layer.collect_params().values() if p.grad_req == "null"]
        return found, [[a.asnumpy() for a in p.list_data()] for p in statistics if p != layer.gamma]

    with mx.util.np_shape(True):
        found, statistics = results([0, None, 1])
        expected, right = results([0, 1])
    for one, other in zip(found, expected):
        assert_same_bits(one, other)
    for arrays, others in zip(statistics, right):
        for array in arrays:
            assert_same_bits(array, others[0])


@pytest.mark.parametrize("mode", MODES)
def test_other_shapes_on_one_device_are_right(mode):
    """Only the number of channels must be equal."""
    layer = layer_of(mode, devices=2)
    x, y = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("float32")
    parts = [x.reshape(1, 3, 4), y.reshape(1, 3, 2, 2)]
    with autograd.record():
        ys = [layer(mx.nd.array(part, ctx=context(i))) for i, part in enumerate(parts)]
    expected = reference.forward(np.stack([x, y]), np.ones(3), np.zeros(3)).y
    for array, part in zip(ys, expected):
        assert_close(array.asnumpy().reshape(3, 4), part, "float32")


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
    bad = {"dx"}
    # As in nn.BatchNorm. The mean of a channel with inf is inf, and its variance is NaN.
    bad |= {"y", "running_mean", "running_var"} if where == "x" else {"dgamma", "dbeta"}
    for field in result._fields:
        found, expected = (values(getattr(each, field)) for each in (result, clean))
        if found.ndim > 1:
            found, expected = found.swapaxes(0, 1), expected.swapaxes(0, 1)
        assert_same_bits(found[::2], expected[::2], field)
        if field in bad:
            is_nan = where == "x" and field != "running_mean"
            assert (np.isnan(found[1]) if is_nan else ~np.isfinite(found[1])).all(), field
        elif where == "dy":
            assert_same_bits(found[1], expected[1], field)


@pytest.mark.parametrize(
    "layer, shape", [("SyncBatchNorm()", (1, 3, 1, 1)), ("VirtualBatchNorm(2)", (3, 3))]
)
def test_one_value_per_channel_is_warned_of_once(layer, shape):
    script = f"""
        import sys, gluon_syncbn as sbn, mxnet as mx
        from devices import context

        def train(layer, *shapes):
            layer.initialize(ctx=[context(i) for i in range(len(shapes))])
            for mode in (mx.autograd.predict_mode, mx.autograd.train_mode, mx.autograd.train_mode):
                with mode():
                    for i, shape in enumerate(shapes):
                        layer(mx.nd.ones(shape, ctx=context(i)))
                mx.nd.waitall()

        train(sbn.SyncBatchNorm(), (1, 3), (1, 3))
        train(sbn.SyncBatchNorm(use_global_stats=True), (1, 3))
        print("no warning before", file=sys.stderr)
        train(sbn.{layer}, {shape})
    """
    done = programs.run(["-c", textwrap.dedent(script)])
    assert done.returncode == 0, done.stderr
    before, after = done.stderr.split("no warning before")
    text = "trains on one value per channel"
    assert (before.count(text), after.count(text)) == (0, 1), done.stderr
