"""Tests the layer on GPUs inside MXNet, without MXNet's own kernels, which may not be compiled for
the GPU (sm_90). Memory, engine and autograd work anyway. So arrays come from the host, each is used
once, gradients are marked by hand, and references are computed in NumPy.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

mx = pytest.importorskip("mxnet")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import gluon_syncbn as sbn  # noqa: E402
import reference  # noqa: E402
from gluon_syncbn.layers.operator import sync_batch_norm  # noqa: E402

GPUS = [mx.gpu(i) for i in range(mx.context.num_gpus())]
CPU = mx.cpu(7)
if not GPUS:
    pytest.skip("MXNet finds no GPU", allow_module_level=True)
if not sbn.native.library.library.gluon_syncbn_cuda():
    pytest.skip("the library was built without CUDA kernels", allow_module_level=True)

# The largest difference, relative to the largest value. See tests/support/tolerances.py.
TOLERANCE = {"float16": 2**-11 + 1e-6, "float32": 1e-6, "float64": 1e-12}
COUNTS = sorted({1, len(GPUS)})


def put(array, device, dtype="float32"):
    return mx.nd.array(np.asarray(array, dtype), ctx=device, dtype=dtype)


def relative_error(result, wanted):
    result, wanted = (np.asarray(each, "float64") for each in (result, wanted))
    return np.abs(result - wanted).max() / (np.abs(wanted).max() or 1)


def parameter_dtype(dtype):
    return "float64" if dtype == "float64" else "float32"


def data(shape, axis, dtype, offset=3):
    """Random x, dy, gamma and beta, rounded to their dtypes. Different in each run."""
    random = np.random.RandomState()
    arrays = [random.normal(offset, 2, shape), random.normal(0.3, 1, shape)]
    parameters = [random.normal(size=shape[axis]) for _ in range(2)]
    kinds = [dtype] * 2 + [parameter_dtype(dtype)] * 2
    return [each.astype(kind).astype("float64") for each, kind in zip(arrays + parameters, kinds)]


class Device:
    """A layer's arrays on one device, created without MXNet's kernels. `before`: initial gradients
    of x, gamma and beta, to which the pass adds."""

    def __init__(self, device, x, dy, gamma, beta, dtype, before=None, residual=None):
        kind = parameter_dtype(dtype)
        self.x, self.dy = put(x, device, dtype), put(dy, device, dtype)
        self.gamma, self.beta = (put(each, device, kind) for each in (gamma, beta))
        ones = np.ones(len(gamma))
        self.mean, self.var = (put(each, device, kind) for each in (0.5 * ones, 2 * ones))
        self.batches = put([4], device, kind)
        self.residual = None if residual is None else put(residual, device, dtype)
        self.leaves = [self.x, self.gamma, self.beta]
        self.leaves += [] if residual is None else [self.residual]
        starts = before or [np.full(each.shape, np.nan) for each in self.leaves]
        self.grads = [put(start, device, a.dtype) for start, a in zip(starts, self.leaves)]
        reqs = "write" if before is None else "add"
        mx.autograd.mark_variables(self.leaves, self.grads, grad_reqs=reqs)


class Results:
    """The results of all devices: y, dx and the residual's gradient, or again dx, concatenated, the
    gradients of gamma and beta added, and the running statistics of each device."""

    def __init__(self, ys, parts):
        self.y, self.dx, self.dresidual = (
            np.concatenate([each.asnumpy() for each in arrays])
            for arrays in (ys, [p.grads[0] for p in parts], [(p.grads * 2)[3] for p in parts])
        )
        self.dgamma, self.dbeta = (
            sum(p.grads[i].asnumpy().astype("float64") for p in parts) for i in (1, 2)
        )
        self.running = [[p.mean.asnumpy(), p.var.asnumpy(), p.batches.asnumpy()] for p in parts]


def run(
    devices,
    x,
    dy,
    gamma,
    beta,
    dtype="float32",
    axis=1,
    training=True,
    before=None,
    residual=None,
    **more,
):
    """Forward and backward over the devices."""
    layer = sbn.native.Layer("layer")
    layer.set_devices([str(device) for device in devices], None, 60)
    cut = [len(x) * i // len(devices) for i in range(len(devices) + 1)]
    parts = [
        Device(
            *(device, x[a:b], dy[a:b], gamma, beta, dtype, before),
            residual=None if residual is None else residual[a:b],
        )
        for device, a, b in zip(devices, cut, cut[1:])
    ]
    with mx.autograd.record(train_mode=training):
        ys = [
            sync_batch_norm(
                *(mx.nd, p.x, p.gamma, p.beta, p.mean, p.var, p.batches),
                layer=layer,
                axis=axis,
                residual=p.residual,
                **more,
            )
            for p in parts
        ]
    mx.autograd.backward(ys, [p.dy for p in parts])
    return Results(ys, parts)


# At least one sample for each of up to 16 GPUs.
SHAPES = [((16, 5, 7, 9), 1), ((16, 7, 9, 5), 3), ((16, 20), 1), ((16, 33, 40, 41), 1)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape, axis", SHAPES)
@pytest.mark.parametrize("count, adds", [*((count, False) for count in COUNTS), (1, True)])
def test_forward_and_backward(dtype, shape, axis, count, adds):
    """adds: gradients are added to others."""
    x, dy, gamma, beta = data(shape, axis, dtype)
    before = data(shape, axis, dtype)[1:] if adds else None
    got = run(GPUS[:count], x, dy, gamma, beta, dtype, axis, before=before)
    wanted = reference.forward(x, gamma, beta, axis=axis)
    gradients = reference.backward(dy, x, gamma, axis=axis)
    dx, dgamma, dbeta = (a + b for a, b in zip(gradients, before or (0, 0, 0)))
    parameters = TOLERANCE[parameter_dtype(dtype)]
    assert relative_error(got.y, wanted.y) <= TOLERANCE[dtype]
    assert relative_error(got.dx, dx) <= (1 + adds) * TOLERANCE[dtype]
    # Sums of terms of both signs.
    assert relative_error(got.dgamma, dgamma) <= 4 * parameters
    assert relative_error(got.dbeta, dbeta) <= 4 * parameters
    for mean, variance, _ in got.running:
        assert relative_error(mean, 0.45 + 0.1 * wanted.mean) <= parameters
        assert relative_error(variance, 1.8 + 0.1 * wanted.variance) <= parameters


MODES = {
    "training": {},
    "inference": {"training": False},
    "use_global_stats": {"use_global_stats": True},
    "fix_gamma": {"fix_gamma": True},
    "momentum": {"momentum": 0.7, "epsilon": 1e-3},
    "cumulative": {"momentum": None, "unbiased": True},
    "virtual devices": {"virtual_devices": 3},
    "residual": {"residual": True},
    "relu": {"activation": "relu"},
    "relu, global": {"activation": "relu", "use_global_stats": True},
    "sum, relu": {"activation": "relu", "residual": True},
    "sum, relu, global": {"activation": "relu", "residual": True, "use_global_stats": True},
    "in place": {"activation": "leaky_relu", "inplace": True},
    "in place, global": {"activation": "leaky_relu", "inplace": True, "use_global_stats": True},
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape, axis", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_the_cpu_agrees(dtype, shape, axis, mode):
    """In bits where statistics are given, and for (N, C) data. Else within twice the tolerance."""
    arrays, options = data(shape, axis, dtype), dict(MODES[mode])
    if options.get("residual"):
        options["residual"] = data(shape, axis, dtype)[1]
    gpu = run(GPUS[:1], *arrays, dtype, axis, **options)
    cpu = run([CPU], *arrays, dtype, axis, **options)
    given = "use_global_stats" in options or mode == "inference"
    kind = parameter_dtype(dtype)
    pairs = [(gpu.y, cpu.y, dtype)]
    pairs += [(a, b, kind) for a, b in zip(gpu.running[0], cpu.running[0])]
    # A rounding may decide on which side of zero a value lies.
    comparable = given or len(shape) == 2 or "activation" not in options
    if comparable:
        pairs += [(gpu.dx, cpu.dx, dtype), (gpu.dresidual, cpu.dresidual, dtype)]
    for a, b, kind in pairs:
        assert relative_error(a, b) <= 2 * TOLERANCE[kind]
        if given or len(shape) == 2:
            assert a.tobytes() == b.tobytes()
    if comparable and not given:
        for a, b in ((gpu.dgamma, cpu.dgamma), (gpu.dbeta, cpu.dbeta)):
            assert relative_error(a, b) <= 8 * TOLERANCE[kind]
            assert len(shape) != 2 or a.tobytes() == b.tobytes()


def test_every_run_has_the_same_bits():
    arrays = data((16, 5, 133, 131), 1, "float32", offset=1e3)
    first = run(GPUS[:1], *arrays)
    for devices in [GPUS[:1]] * 5 + [GPUS]:
        other = run(devices, *arrays)
        for name in ("y", "dx"):
            assert getattr(first, name).tobytes() == getattr(other, name).tobytes(), name
        assert first.running[0][0].tobytes() == other.running[0][0].tobytes()


def test_a_gpu_synchronizes_with_the_cpu():
    arrays = data((16, 20), 1, "float32")
    alone, together = run(GPUS[:1], *arrays), run([GPUS[0], CPU], *arrays)
    assert alone.y.tobytes() == together.y.tobytes()
    assert alone.dx.tobytes() == together.dx.tobytes()


# The layer itself.


def zeros_from_the_host(shape, ctx=None, dtype=None, **_):
    return put(np.zeros(shape), ctx, dtype or "float32")


def layer_on(devices, hybridize=None, dtype="float32", **options):
    layer = sbn.SyncBatchNorm(in_channels=5, **options)
    layer.cast(dtype)
    with mock.patch.object(mx.nd, "zeros", zeros_from_the_host):
        layer.initialize(ctx=devices)
    if hybridize is not None:
        layer.hybridize(**hybridize)
    return layer


def train(layer, device, steps, dtype="float32"):
    """Forward and backward on one device for each (x, dy). Returns all results as arrays."""
    results = {}
    for i, (x, dy) in enumerate(steps):
        x, dx = put(x, device, dtype), put(np.full(x.shape, np.nan), device, dtype)
        mx.autograd.mark_variables([x], [dx])
        with mx.autograd.record():
            y = layer(x)
        mx.autograd.backward([y], [put(dy, device, dtype)])
        mx.nd.waitall()
        results.update({f"y {i}": y.asnumpy(), f"dx {i}": dx.asnumpy()})
    for name in ("gamma", "beta"):
        results[f"d{name}"] = getattr(layer, name).grad(device).asnumpy()
    for name in ("running_mean", "running_var"):
        results[name] = getattr(layer, name).data(device).asnumpy()
    return results


def steps_of(count, dtype="float32", shape=(4, 5, 16, 17)):
    return [data(shape, 1, dtype)[:2] for _ in range(count)]


HYBRIDIZED = [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hybridize", HYBRIDIZED, ids=lambda options: " ".join(options) or "plain")
def test_hybridized(dtype, hybridize):
    steps = steps_of(3, dtype)
    device = GPUS[0]
    wanted = train(layer_on([device], dtype=dtype), device, steps, dtype)
    got = train(layer_on([device], hybridize, dtype), device, steps, dtype)
    for name, array in wanted.items():
        assert array.tobytes() == got[name].tobytes(), name
    x, dy = steps[-1]
    y = reference.forward(x, np.ones(5), np.zeros(5)).y
    assert relative_error(got["y 2"], y) <= TOLERANCE[dtype]
    assert relative_error(got["dx 2"], reference.backward(dy, x, np.ones(5)).dx) <= TOLERANCE[dtype]
