"""A layer with an activation or a residual, and the same in nodes of their own."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from devices import KIND, context
from dtypes import parameter_dtype, rounded, values
from gluon_syncbn.layers.operator import sync_batch_norm
from mxnet import autograd
from mxnet.gluon import HybridBlock
from mxnets import needs_bfloat16
from runs import MODES, contexts, prepare, shards

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


def compare(kind, shape, dtype, axis, sizes, mode=None, mean=0, train=True, requests=WRITE, **more):
    activation, with_residual = kind
    channels = shape[axis]
    x, residual, dy, gamma, beta = data(shape, dtype, channels, mean)
    results = []
    for fused in (True, False):
        own = {"activation": activation, "slope": SLOPE} if fused else {}
        layer = sbn.SyncBatchNorm(axis=axis, in_channels=channels, **own, **more)
        block = layer if fused else Apart(layer, activation)
        prepare(block, contexts(len(sizes)), dtype, mode, gamma, beta)
        arrays = x, residual if with_residual else None, dy
        # MXNet's elemwise_add gives wrong gradients if its second operand has "add", or "null" with
        # static_alloc.
        results.append(run(block, layer, *arrays, sizes, train, requests if fused else WRITE))
    for what, result in results[0].items():
        expected = results[1][what]
        if "add" in requests and what.split()[0] in ("dx", "dresidual", "dgamma"):
            expected = 2 * expected
        if activation == "leaky_relu" and dtype in LEAKY:
            tolerance = LEAKY[dtype] * np.abs(values(expected)).max()
            np.testing.assert_allclose(values(result), values(expected), 0, tolerance, what)
        else:
            np.testing.assert_array_equal(values(result), values(expected), what)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype",
    [
        *("float16", "float32", "float64"),
        pytest.param(
            "bfloat16",
            marks=[
                needs_bfloat16,
                pytest.mark.cpu_only("MXNet's Activation has it in oneDNN alone"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("axis", [1, -1])
def test_bits_by_dtype_and_rank(kind, dtype, axis):
    for shape in ((5, 7), (5, 6, 7), (5, 3, 4, 6), (3, 4, 2, 3, 5)):
        compare(kind, shape, dtype, axis, (2, shape[0] - 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(4,), (1, 3)])
def test_bits_by_mode_and_phase(kind, mode, sizes):
    for train, use_global_stats in ((True, False), (True, True), (False, False)):
        more = {"train": train, "use_global_stats": use_global_stats}
        compare(kind, (4, 3, 9, 11), "float32", 1, sizes, MODES[mode], **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("mode", ["imperative", "static_alloc"])
def test_bits_by_request(kind, axis, mode):
    null = [["null" if i == j else "write" for i in range(3)] for j in range(3)]
    for requests in (*null, ["null", "null", "write"], ["add"] * 3):
        compare(kind, (4, 3, 9, 5), "float32", axis, (1, 3), MODES[mode], requests=requests)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", [1e3, -1e5])
def test_bits_far_from_zero(kind, mean):
    for dtype in ("float32", "float64"):
        compare(kind, (4, 3, 70, 40), dtype, 1, (1, 3), mean=mean)
        compare(kind, (4, 70, 3), dtype, -1, (1, 3), mean=mean)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [1, 2])
def test_virtual_devices(kind, devices):
    """Each chunk has the bits of a device."""
    activation, with_residual = kind
    x, residual, dy, gamma, beta = data((8, 3, 9, 5), "float32", 3)
    arrays = x, residual if with_residual else None, dy
    results = []
    for fused in (True, False):
        own = {"activation": activation, "slope": SLOPE} if fused else {}
        layer = sbn.VirtualBatchNorm(3, in_channels=3, **own)
        block = layer if fused else Apart(layer, activation)
        prepare(block, contexts(devices), "float32", None, gamma, beta)
        results.append(run(block, layer, *arrays, [8 // devices] * devices, True, WRITE))
    for what, expected in results[1].items():
        np.testing.assert_array_equal(results[0][what], expected, what)


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
