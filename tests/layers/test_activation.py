"""A layer with an activation or a residual, and the same in nodes of their own."""

import functools

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from devices import KIND, context
from dtypes import parameter_dtype, rounded, values
from gluon_syncbn.layers.operator import sync_batch_norm
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import autograd
from mxnet.gluon import HybridBlock
from mxnets import HAS_BFLOAT16
from runs import MODES, contexts, prepare, shards
from test_properties import COMMON

KINDS = [
    ("relu", False),
    ("relu", True),
    ("leaky_relu", False),
    ("leaky_relu", True),
    (None, True),
]
SLOPE = 0.1
WRITE = ["write"] * 3
# MXNet's LeakyReLU computes negative values of float64 in float32, and rounds before and after
# with 16 bits.
LEAKY = {"float16": 4e-3, "bfloat16": 3e-2, "float64": 1e-7}


class Apart(HybridBlock):
    """The layer, elemwise_add and an activation in a row."""

    def __init__(self, layer, activation, **arguments):
        super().__init__(**arguments)
        self.layer, self.activation = layer, activation
        self.gamma, self.beta = layer.gamma, layer.beta

    def hybrid_forward(self, F, x, residual=None, **parameters):
        y = self.layer(x)
        if residual is not None:
            y = F.elemwise_add(y, residual)
        if self.activation == "relu":
            y = F.Activation(y, act_type="relu")
        return F.LeakyReLU(y, slope=SLOPE) if self.activation == "leaky_relu" else y


def data(shape, dtype, channels, mean=0):
    """x, residual, dy, gamma and beta; gamma has both signs and a zero."""
    rng = np.random.default_rng(sum(shape))
    x = rounded(rng.standard_normal(shape) * 2 + mean, dtype)
    residual, dy = (rounded(rng.standard_normal(shape), dtype) for _ in range(2))
    gamma, beta = (rng.standard_normal(channels).astype(parameter_dtype(dtype)) for _ in range(2))
    gamma[0], gamma[1] = 0, -abs(gamma[1])
    return x, residual, dy, gamma, beta


def run(block, layer, x, residual, dy, sizes, training, requests):
    """{what: array} of two forwards and backwards. `requests` are those of x, residual, gamma."""
    devices = contexts(len(sizes))
    inputs = [shards(each, sizes, devices) for each in (x, residual) if each is not None]
    dys = shards(dy, sizes, devices)
    layer.gamma.grad_req = requests[2]
    for request, parts in zip(requests, inputs):
        for part in parts:
            part.attach_grad(grad_req=request)
    for _ in range(2):
        with autograd.record(train_mode=training):
            ys = [block(*each) for each in zip(*inputs)]
        autograd.backward(ys, dys, train_mode=training)
    result = {"y": np.concatenate([y.asnumpy() for y in ys])}
    for what, request, parts in zip(("dx", "dresidual"), requests, inputs):
        if request != "null":
            result[what] = np.concatenate([part.grad.asnumpy() for part in parts])
    for name in ("gamma", "beta", "running_mean", "running_var"):
        parameter = getattr(layer, name)
        for device in devices if parameter.grad_req != "null" else ():
            result[f"d{name} on {device}"] = parameter.grad(device).asnumpy()
        result[name] = parameter.data(devices[0]).asnumpy()
    return result


DTYPES = ["float16", "float32", "float64"]
# MXNet's Activation has it in oneDNN alone.
DTYPES += ["bfloat16"] if KIND == "cpu" and HAS_BFLOAT16 else []
SHAPES = [(5, 7), (5, 6, 7), (4, 3, 9, 11), (4, 3, 70, 40), (4, 70, 3), (3, 4, 2, 3, 5)]
REQUESTS = [WRITE, ["add"] * 3, ["null", "null", "write"]]
REQUESTS += [["null" if i == j else "write" for i in range(3)] for j in range(3)]
PHASES = {"training": {}, "inference": {}, "global": {"use_global_stats": True}}
NORMS = [sbn.SyncBatchNorm, sbn.SyncBatchNorm, functools.partial(sbn.VirtualBatchNorm, 2)]


@pytest.mark.parametrize("kind", KINDS)
@settings(COMMON, max_examples=120)
@given(
    norm=st.sampled_from(NORMS),
    shape=st.sampled_from(SHAPES),
    axis=st.sampled_from([1, -1]),
    dtype=st.sampled_from(DTYPES),
    mean=st.sampled_from([0, 0, 1e3, -1e5]),
    mode=st.sampled_from(sorted(MODES)),
    phase=st.sampled_from(["training", *PHASES]),
    requests=st.sampled_from([WRITE, *REQUESTS]),
    first=st.integers(0, 2),
)
def test_the_bits_of_separate_nodes(
    kind, norm, shape, axis, dtype, mean, mode, phase, requests, first
):
    """`first`: the samples of the first of two devices, or 0 for one device."""
    activation, with_residual = kind
    sizes = (first, shape[0] - first) if first else (shape[0],)
    if norm is not sbn.SyncBatchNorm:
        sizes = (shape[0],)  # Each chunk has the bits of a device.
    mean = mean if dtype in ("float32", "float64") else 0
    x, residual, dy, gamma, beta = data(shape, dtype, shape[axis], mean)
    results = []
    for fused in (True, False):
        own = {"activation": activation, "slope": SLOPE} if fused else {}
        layer = norm(axis=axis, in_channels=shape[axis], **own, **PHASES[phase])
        block = layer if fused else Apart(layer, activation)
        prepare(block, contexts(len(sizes)), dtype, MODES[mode], gamma, beta)
        arrays = x, residual if with_residual else None, dy
        # MXNet's elemwise_add gives wrong gradients if its second operand has "add", or "null" with
        # static_alloc.
        asked = requests if fused else WRITE
        results.append(run(block, layer, *arrays, sizes, phase != "inference", asked))
    for what, result in results[0].items():
        expected = results[1][what]
        if "add" in requests and what.split()[0] in ("dx", "dresidual", "dgamma"):
            expected = 2 * values(expected)
        if activation == "leaky_relu" and dtype in LEAKY:
            tolerance = LEAKY[dtype] * np.abs(values(expected)).max()
            np.testing.assert_allclose(values(result), values(expected), 0, tolerance, what)
        else:
            np.testing.assert_array_equal(values(result), values(expected), what)


INPLACE = {"activation": "leaky_relu", "slope": SLOPE, "inplace": True}


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("train", [True, False])
def test_in_place_agrees_with_the_gradients_of_x(axis, mode, train):
    shape = (4, 3, 9, 11)
    x, _, dy, gamma, beta = data(shape, "float32", shape[axis])
    gamma[:2] = 0.7, -0.3
    results = []
    for inplace in (True, False):
        layer = sbn.SyncBatchNorm(axis=axis, **{**INPLACE, "inplace": inplace})
        prepare(layer, contexts(2), "float32", MODES[mode], gamma, beta)
        results.append(run(layer, layer, x, None, dy, (1, 3), train, WRITE))
    for what, expected in results[1].items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(results[0][what], expected, 0, 1e-5 * scale, what)
        if not what.startswith("d"):
            np.testing.assert_array_equal(results[0][what], expected, what)


@pytest.mark.parametrize("train", [True, False])
def test_in_place_small_gammas_count_as_epsilon(train):
    x, _, dy, gamma, beta = data((4, 3, 9), "float32", 3)
    results = []
    for gammas in ([0, -1e-9, 1], [1e-3, -1e-3, 1]):
        layer = sbn.SyncBatchNorm(epsilon=1e-3, **INPLACE)
        prepare(layer, contexts(1), "float32", None, np.float32(gammas), beta)
        results.append(run(layer, layer, x, None, dy, (4,), train, WRITE))
        assert np.isfinite(results[-1]["dx"]).all()
    for what in results[0].keys() - {"gamma"}:
        scale = np.abs(results[1][what]).max()
        np.testing.assert_allclose(results[0][what], results[1][what], 0, 1e-4 * scale, what)


@pytest.mark.parametrize("inplace", [True, False])
def test_in_place_backward_does_not_read_x(inplace):
    x, _, dy, gamma, beta = data((4, 3, 9), "float32", 3)
    layer = sbn.SyncBatchNorm(in_channels=3)
    layer.initialize()
    parameters = {name: p.data() for name, p in layer._reg_params.items()}
    gradients = []
    for overwrites in (False, True):
        source = mx.nd.array(x)
        source.attach_grad()
        with autograd.record():
            computed = source + 1
            more = {**INPLACE, "inplace": inplace}
            y = sync_batch_norm(mx.nd, computed, **parameters, layer=layer._layer, **more)
        if overwrites:
            computed[:] = 0
        y.backward(mx.nd.array(dy))
        gradients.append(source.grad.asnumpy())
    assert np.array_equal(*gradients) == inplace


X = mx.nd.ones((2, 3, 4), ctx=context(0))


@pytest.mark.parametrize(
    "residual, error, words",
    [
        (X.as_in_context(context(1)), ValueError, rf"data on {KIND}\(1\), but its parameters live"),
        ([X], TypeError, "called with a list of 1"),
        (1.5, TypeError, "layer was called with .*: give an NDArray, such as"),
        (np.ones((2, 3, 4), "f"), TypeError, "layer was called with .*: give an NDArray, such as"),
        (mx.sym.var("residual"), ValueError, "do not support mixed NDArrays and Symbols"),
        (X[:, :, :1], mx.MXNetError, "'layer'.*Give it a residual of the shape of the data"),
        (X.astype("float16"), mx.MXNetError, "'layer'.*a residual must be"),
    ],
)
def test_residuals_that_do_not_fit(residual, error, words):
    layer = sbn.SyncBatchNorm(in_channels=3, prefix="layer_")
    layer.initialize()
    with pytest.raises(error, match=words):
        layer(X, residual)


def test_no_residual_in_place():
    layer = sbn.SyncBatchNorm(**INPLACE)
    layer.initialize()
    with pytest.raises(ValueError, match="has inplace=True, where backward recovers x from y"):
        layer(X, X)
