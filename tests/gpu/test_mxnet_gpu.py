"""The layer on GPUs inside MXNet. On a GPU that MXNet's own kernels were not compiled for (sm_90)
memory, engine, autograd and our kernels run all the same, so arrays come from the host, gradients
are marked by hand, and references are NumPy's."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mxnet")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gluon_syncbn as sbn  # noqa: E402
import reference  # noqa: E402
from gluon_syncbn.functional import sync_batch_norm  # noqa: E402

GPUS = [mx.gpu(i) for i in range(mx.context.num_gpus())]
if not GPUS:
    pytest.skip("MXNet finds no GPU", allow_module_level=True)
sbn._native._library.gluon_syncbn_cuda.restype = __import__("ctypes").c_char_p
if not sbn._native._library.gluon_syncbn_cuda():
    pytest.skip("the library was built without CUDA kernels", allow_module_level=True)

TOLERANCE = {"float16": 2**-11 + 2e-6, "float32": 2e-6, "float64": 1e-12}


def put(array, device, dtype="float32"):
    return mx.nd.array(np.asarray(array, dtype), ctx=device, dtype=dtype)


def away(result, wanted):
    return np.abs(result.astype("float64") - wanted).max() / (np.abs(wanted).max() or 1)


class Device:
    """A layer's arrays on one device, made without any kernel of MXNet's."""

    def __init__(self, device, x, dy, gamma, beta, dtype):
        self.parameter = "float64" if dtype == "float64" else "float32"
        self.x, self.dy = put(x, device, dtype), put(dy, device, dtype)
        self.gamma, self.beta = (put(each, device, self.parameter) for each in (gamma, beta))
        ones = np.ones_like(gamma)
        self.mean, self.var = (put(each, device, self.parameter) for each in (0 * ones, ones))
        self.leaves = [self.x, self.gamma, self.beta]
        self.grads = [put(0 * each.asnumpy(), device, each.dtype) for each in self.leaves]
        mx.autograd.mark_variables(self.leaves, self.grads)


def run(devices, x, dy, gamma, beta, dtype="float32", axis=1, training=True, **options):
    """Forward and backward over the devices; results put together, gradients of gamma added."""
    name = options.pop("name", "layer")

    class Owner:
        def _on_failure(self, text):
            pass

        def _running_statistics(self):
            return {}

    owner = Owner()
    layer = sbn._native.Layer(name, owner)
    layer.configure([str(device) for device in devices], None, 60)
    cut = [len(x) * i // len(devices) for i in range(len(devices) + 1)]
    parts = [
        Device(device, x[a:b], dy[a:b], gamma, beta, dtype)
        for device, a, b in zip(devices, cut, cut[1:])
    ]
    with mx.autograd.record(train_mode=training):
        ys = [
            sync_batch_norm(
                *(mx.nd, p.x, p.gamma, p.beta, p.mean, p.var), layer=layer, axis=axis, **options
            )
            for p in parts
        ]
    mx.autograd.backward(ys, [p.dy for p in parts])
    y, dx = (
        np.concatenate([each.asnumpy() for each in arrays])
        for arrays in (ys, [p.grads[0] for p in parts])
    )
    dgamma, dbeta = (sum(p.grads[i].asnumpy().astype("float64") for p in parts) for i in (1, 2))
    return y, dx, dgamma, dbeta, parts


def data(shape, axis, offset=3):
    random = np.random.RandomState()
    x, dy = random.normal(offset, 2, shape), random.normal(0.3, 1, shape)
    return x, dy, random.normal(size=shape[axis]), random.normal(size=shape[axis])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape, axis", [((8, 5, 7, 9), 1), ((8, 7, 9, 5), 3), ((16, 20), 1)])
@pytest.mark.parametrize("count", [1, len(GPUS)])
def test_forward_and_backward(dtype, shape, axis, count):
    x, dy, gamma, beta = data(shape, axis)
    x, dy = x.astype(dtype).astype("float64"), dy.astype(dtype).astype("float64")
    gamma, beta = gamma.astype("float32"), beta.astype("float32")
    y, dx, dgamma, dbeta, parts = run(GPUS[:count], x, dy, gamma, beta, dtype, axis)
    wanted = reference.forward(x, gamma, beta, axis=axis)
    gradients = reference.backward(dy, x, gamma, axis=axis)
    parameters = TOLERANCE["float64" if dtype == "float64" else "float32"]
    assert away(y, wanted.y) <= TOLERANCE[dtype]
    assert away(dx, gradients.dx) <= 2 * TOLERANCE[dtype]
    assert away(dgamma, gradients.dgamma) <= 2 * parameters
    assert away(dbeta, gradients.dbeta) <= 2 * parameters
    for p in parts:
        assert away(p.mean.asnumpy(), 0.1 * wanted.mean) <= parameters
        assert away(p.var.asnumpy(), 0.9 + 0.1 * wanted.variance) <= parameters


def test_constant_statistics_and_inference():
    x, dy, gamma, beta = data((6, 5, 4, 3), 1)
    ones = np.ones(5)
    for options in ({"use_global_stats": True}, {"training": False}):
        y, dx, _, _, parts = run(GPUS[:1], x, dy, gamma, beta, **options)
        wanted = reference.forward(x, gamma, beta, mean=0 * ones, variance=ones)
        gradients = reference.backward(dy, x, gamma, mean=0 * ones, variance=ones)
        assert away(y, wanted.y) <= 2e-6 and away(dx, gradients.dx) <= 2e-6
        assert (parts[0].mean.asnumpy() == 0).all() and (parts[0].var.asnumpy() == 1).all()


def test_virtual_devices():
    x, dy, gamma, beta = data((6, 5, 4, 3), 1)
    y = run(GPUS[:1], x, dy, gamma, beta, virtual_devices=2)[0]
    halves = [reference.forward(half, gamma, beta).y for half in (x[:3], x[3:])]
    assert away(y, np.concatenate(halves)) <= 2e-6


def test_bits_do_not_depend_on_the_split():
    x, dy, gamma, beta = data((8, 5, 33, 31), 1, offset=1e3)
    once = run(GPUS[:1], x, dy, gamma, beta)
    for devices in (GPUS[:1], GPUS):
        again = run(devices, x, dy, gamma, beta)
        for a, b in zip(once[:2], again[:2]):
            assert a.tobytes() == b.tobytes()


WORKER = """
import sys
sys.path[:0] = {paths!r}
import numpy as np, mxnet as mx
import gluon_syncbn as sbn
import test_mxnet_gpu as t
kv = mx.kv.create("dist_sync")
store = sbn.distributed.KVStoreReducer(kv)
sbn.set_default_group(sbn.SyncGroup(store=store))
mx.nd.zeros = lambda shape, ctx=None, dtype="float32", **_: mx.nd.array(
    np.zeros(shape, dtype), ctx=ctx, dtype=dtype)
x = np.random.RandomState(0).normal(3, 2, (4, 5, 6, 7))
gamma, beta = np.ones(5), np.zeros(5)
layer = sbn.SyncBatchNorm(in_channels=5)
layer.initialize(ctx=mx.gpu(0))
part = t.put(np.split(x, 2)[kv.rank], mx.gpu(0))
with mx.autograd.record():
    y = layer(part)
wanted = np.split(np.asarray(t.reference.forward(x, gamma, beta).y), 2)[kv.rank]
assert t.away(y.asnumpy(), wanted) < 2e-6
print("rank", kv.rank, "is right", flush=True)
"""


def test_two_processes_on_one_gpu(tmp_path):
    here = Path(__file__).resolve().parent
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(paths=[str(here), str(here.parent)]))
    command = [sys.executable, "-m", "gluon_syncbn.launch", "-n", "2", str(script)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.count("is right") == 2, done.stdout
