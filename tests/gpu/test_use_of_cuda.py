"""What the operator asks of CUDA, and what becomes of it when CUDA fails: inside MXNet, on
simulated GPUs (make test-gpu), which count calls."""

import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

for folder in ("gpu/simgpu", "support"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

import simulated_gpus  # noqa: E402

if not simulated_gpus.EXIST:
    pytest.skip("this is not the MXNet of `make test-gpu`", allow_module_level=True)

import gluon_syncbn as sbn  # noqa: E402
import mxnet as mx  # noqa: E402
from runs import MODES, prepare, run  # noqa: E402
from tolerances import assert_same_bits  # noqa: E402

GPUS = [mx.gpu(i) for i in range(4)]
SHAPE = (4, 3, 6, 6)
library = sbn.native.library.library
fail_next, set_peers, calls_of = map(simulated_gpus.cuda, ("fail_next", "set_peers", "calls"))
calls_of.restype = ctypes.c_uint64

# What is counted, and what it is called here.
COUNTED = {
    "launches": "cudaLaunchKernel",
    "waits": "cudaStreamSynchronize",
    "stream waits": "cudaStreamWaitEvent",
    "records": "cudaEventRecord",
    "copies to": "copies to a device",
    "bytes": "bytes copied",
    "allocations": "cudaMalloc",
    "host allocations": "cudaHostAlloc",
    "streams": "cudaStreamCreateWithFlags",
    "events": "cudaEventCreateWithFlags",
}
IN_USE = {
    "cudaMalloc": "cudaFree",
    "cudaHostAlloc": "cudaFreeHost",
    "cudaStreamCreateWithFlags": "cudaStreamDestroy",
    "cudaEventCreateWithFlags": "cudaEventDestroy",
}


def calls(name):
    return calls_of(name.encode())


def set_order(order):
    """Real streams have an order of their own."""
    if not simulated_gpus.ON_CARDS:
        simulated_gpus.cuda("set_order")(order.encode())


def in_use():
    return [calls(take) - calls(give_back) for take, give_back in IN_USE.items()]


def cost_of(act):
    before = {name: calls(counted) for name, counted in COUNTED.items()}
    result = act()
    mx.nd.waitall()
    found = {name: calls(counted) - before[name] for name, counted in COUNTED.items()}
    return result, {name: count for name, count in found.items() if count}


def layer_on(devices, **options):
    layer = sbn.SyncBatchNorm(in_channels=3, **options)
    layer.initialize(ctx=devices)
    return layer


def data_for(devices, seed=0):
    random = np.random.RandomState(seed)
    arrays = [mx.nd.array(random.normal(5, 2, SHAPE), ctx=device) for device in devices]
    for array in arrays:
        array.attach_grad()
    return arrays


def start_step(layer, devices, seed=0):
    """The arrays of y and dx on all devices, which may not be there yet."""
    xs, dys = (data_for(devices, each) for each in (seed, seed + 1))
    mx.nd.waitall()
    with mx.autograd.record():
        ys = [layer(x) for x in xs]
    mx.autograd.backward(ys, dys)
    return [*ys, *(x.grad for x in xs)]


def step(layer, devices, seed=0):
    results = start_step(layer, devices, seed)
    mx.nd.waitall()
    return [each.asnumpy() for each in results]


@pytest.fixture(autouse=True)
def all_is_given_back():
    errors_to_come()  # Of the test before.
    library.gluon_syncbn_release()
    before = in_use()
    yield
    for function in COUNTED.values():
        fail_next(function.encode(), -1)
    errors_to_come()
    library.gluon_syncbn_release()
    assert in_use() == before
    set_order(os.environ.get("PTXSIM_STREAMS", ""))
    set_peers(b"")


def errors_to_come():
    """The texts of all errors that MXNet has not raised yet."""
    errors = []
    while True:
        try:
            mx.nd.waitall()
            return errors
        except mx.MXNetError as error:
            errors.append(str(error))


class TwinStore:
    """Another process that has the same data."""

    rank, size = 0, 2
    garbage = None

    def all_reduce(self, key, array):
        # What Python frees here may be on another GPU.
        if self.garbage is not None:
            self.garbage.wait_to_read()
        self.garbage = mx.nd.ones(3, ctx=GPUS[1])
        return np.stack([array[0], array[0]])


@pytest.fixture(params=["", "none"], ids=["peers", "no_peers"])
def peers(request):
    """Whether GPUs have access to each other's memory. Without it each lays down its sums on the
    host."""
    set_peers(request.param.encode())
    return not request.param


# The number of GPUs, arguments of the group, and what each pass costs besides launches and waits.
CASES = {
    "one GPU": (1, {}, {}),
    "two GPUs": (2, {}, {"stream waits": 2, "records": 2}),
    "a process with a store": (1, {"store": TwinStore()}, {"waits": 1, "copies to": 1}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("hybridized", [False, True])
def test_what_a_call_costs(case, hybridized, activation, peers):
    """In the steady state: four launches and one wait in each pass of each GPU, also with an
    activation, and two launches without a batch's statistics."""
    count, options, more = CASES[case]
    devices = GPUS[:count]
    layer = layer_on(devices, group=sbn.SyncGroup(**options), activation=activation)
    layer.hybridize(hybridized)
    for _ in range(3):
        step(layer, devices)
    xs = data_for(devices)
    mx.nd.waitall()

    def forward():
        with mx.autograd.record():
            return [layer(x) for x in xs]

    ys, forward_cost = cost_of(forward)
    _, backward_cost = cost_of(lambda: mx.autograd.backward(ys))
    wanted = {**more, "launches": 4 * count, "waits": count + more.get("waits", 0)}
    for cost in (forward_cost, backward_cost):
        bytes_copied = cost.pop("bytes", 0)
        assert bool(bytes_copied) == ("copies to" in more or (count == 2 and not peers))
        assert cost == wanted, case
    _, cost = cost_of(lambda: [layer(x) for x in xs])
    assert cost == {"launches": 2 * count, "waits": count}


@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", 100))))
def test_bits_depend_on_no_order_and_no_split(seed, monkeypatch):
    """Any layer has the bits of the whole batch on one GPU whose streams do their work at once, in
    any order of streams, wherever sums meet."""
    random = np.random.RandomState(seed)
    dtype = random.choice(["float16", "float32", "float64"])
    axis = random.choice([1, -1])
    shape = (9, *random.randint(1, 20, random.randint(1, 4)))
    options = {
        "axis": int(axis),
        "activation": random.choice([None, "relu", "leaky_relu"]),
        "momentum": random.choice([0.9, None]),
        "running_variance": random.choice(["biased", "unbiased"]),
        "use_global_stats": random.rand() < 0.1,
    }
    mode = MODES[random.choice(sorted(MODES))]
    x, dy = (random.normal(3, 2, shape).astype(dtype) for _ in range(2))

    def results(sizes):
        devices = GPUS[: len(sizes)]
        layer = prepare(sbn.SyncBatchNorm(**options), devices, dtype, mode)
        result = run(layer, x, dy, sizes, devices, steps=3)
        # Those of gamma and beta are summed up by the test.
        return result.y, result.dx, result.running_mean, result.running_var

    set_order("")
    wanted = results([len(x)])
    library.gluon_syncbn_release()
    set_order(str(seed))
    set_peers(random.choice(["", "none", "one way", "refused"]).encode())
    cuts = sorted(random.choice(range(1, len(x)), random.randint(len(GPUS)), replace=False))
    sizes = np.diff([0, *cuts, len(x)]).tolist()
    for name, array, right in zip(("y", "dx", "mean", "variance"), results(sizes), wanted):
        assert_same_bits(array, right, f"{name} of {options} {mode} {sizes}")


def test_memory_does_not_grow(peers):
    """On each GPU one call, and one whose sums the other GPU may still read, have a stream, an
    event and an arena each. The statistics have memory of their own."""
    layer = layer_on(GPUS[:2])
    for seed in range(30):
        step(layer, GPUS[:2], seed)
    memory, pinned, streams, events = in_use()
    assert 2 <= streams == events <= 4
    assert memory <= 2 + streams and bool(pinned) == (not peers) and pinned <= streams


# Also those that a call makes only at first.
FUNCTIONS = [
    *("cudaMalloc", "cudaHostAlloc", "cudaLaunchKernel", "cudaMemcpyAsync", "cudaSetDevice"),
    *("cudaStreamCreateWithFlags", "cudaStreamSynchronize", "cudaStreamWaitEvent"),
    *("cudaEventCreateWithFlags", "cudaEventRecord"),
]
NAMES = {
    "cudaLaunchKernel": "The kernel of",
    "cudaMemcpyAsync": "cudaMemcpyAsync of 144 bytes to the host failed",
    "cudaMalloc": "cudaMalloc of 1048576 bytes failed",
    "cudaHostAlloc": "cudaHostAlloc of 1048576 bytes failed",
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_any_call_of_cuda_may_fail(function, count, peers):
    """The n-th call of a function in a step, for each n: an error, in good time, with the layer,
    the device and what failed; nothing that was computed is wrong; and the step after it works."""
    devices = GPUS[:count]
    wanted = step(layer_on(devices), devices)
    for n in range(200):
        library.gluon_syncbn_release()
        layer = layer_on(devices, prefix="norm_")
        fail_next(function.encode(), n)
        begin, errors, results = time.monotonic(), [], []
        try:
            results = start_step(layer, devices)
        except mx.MXNetError as error:
            # A call on one device has failed before the net was called on another.
            errors.append(str(error))
        # The error is in all results that are not right, whichever one waits for first. It is gone
        # then, and others may not have been computed.
        for i in np.random.RandomState(n).permutation(len(results)):
            try:
                assert errors or results[i].asnumpy().tobytes() == wanted[i].tobytes()
            except mx.MXNetError as error:
                errors.append(str(error))
        errors += errors_to_come()
        fail_next(function.encode(), -1)
        assert time.monotonic() - begin < 20
        if not errors:
            break
        text = "\n".join(errors)
        assert "'norm'" in text and NAMES.get(function, f"{function} failed") in text, text
        assert any(f"on GPU {device.device_id} for data of shape" in text for device in devices)
        # Where one device had failed before the other was called, its next call fails as well.
        for attempt in range(3):
            try:
                assert all(np.isfinite(each).all() for each in step(layer, devices))
                break
            except mx.MXNetError as error:
                assert attempt < 2 and ("failed before" in str(error) or count > 1), error
    unused = {"cudaStreamWaitEvent", "cudaEventRecord"} if count == 1 else set()
    if count == 1 or peers:
        unused |= {"cudaHostAlloc", "cudaMemcpyAsync"}
    assert n < 199 and bool(n) == (function not in unused)


def test_what_bench_py_times():
    x, dy, y, dx = (np.random.normal(size=(4, 3, 30)).astype("float32") for _ in range(4))
    small = [np.ones(3, "float32") for _ in range(6)]
    arrays = [mx.nd.array(each, ctx=GPUS[0]) for each in (x, dy, *small[:4], y, dx, *small[4:])]
    mx.nd.waitall()
    pointers = []
    for array in arrays:
        pointers.append(ctypes.c_void_p())
        mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointers[-1])))
    shape = [ctypes.c_int64(each) for each in x.shape + (1,)]
    if not simulated_gpus.ON_CARDS:
        # MXNet leaves such an error on the thread that makes a store for several GPUs.
        mxnets = ctypes.CDLL(str(Path(mx.__file__).with_name("libcudart.so.11.0")))
        assert mxnets.cudaDeviceEnablePeerAccess(0, 0) != 0
    calls = ctypes.CDLL(library._name).gluon_syncbn_cuda_calls
    failed, cost = cost_of(lambda: calls(0, 0, *shape, *pointers, 5))
    assert failed == 0 and cost["waits"] == 10
    mean, inv_std = x.mean((0, 2)), 1 / np.sqrt(x.var((0, 2)) + 1e-5)
    wanted = (x - mean[:, None]) * inv_std[:, None] + 1
    assert abs(arrays[6].asnumpy() - wanted).max() < 1e-5
    assert abs(arrays[9].asnumpy() - dy.sum((0, 2))).max() < 1e-4
