"""What the operator does on GPUs, without one: in a library with a CUDA that runs on the host and
takes CPU contexts for GPUs (make fake-cuda). The kernels are the GPU's own text."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_cuda_build import nvcc

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/native/plain"
# Tests of the layer that must pass on every kind of device, except those for CPUs only. Where nvcc
# is, test_ptx.py runs most on compiled kernels.
TESTS = ["rendezvous"]
if nvcc is None:
    TESTS += ["activation", "batch_norm", "numerics", "semantics"]
OF_CPUS = ["test_every_number_of_threads_gives_the_same_bits"]


def package_with(target, library, folder):
    """The package and its tests with the library that `make target` builds."""
    subprocess.run(["make", "-s", target], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "gluon_syncbn", folder / "gluon_syncbn", ignore=ignored)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(BUILD / library, folder / "gluon_syncbn")
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("on_host")
    return package_with("fake-cuda", "fake_cuda/libgluon_syncbn.so", folder)


def run(package, *command, **environment):
    environment = dict(os.environ, PYTHONPATH=str(package), **environment)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=package,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def run_layer_tests(package, names):
    tests = [f"tests/layers/test_{name}.py" for name in names]
    chosen = " and ".join(f"not ({each})" for each in OF_CPUS)
    command = ("-m", "pytest", "-q", "-x", "-k", chosen, *tests)
    assert " passed" in run(package, *command)


@pytest.mark.timeout(600)
def test_the_tests_of_the_layer_pass(package):
    run_layer_tests(package, TESTS)


@pytest.mark.skipif(nvcc is not None, reason="make test-gpu runs them on simulated GPUs")
@pytest.mark.timeout(600)
def test_the_tests_of_gpu_check_inside_mxnet_pass(package):
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu/test_mxnet_gpu.py")
    done = run(package, *command, GPUS_FOR_TESTS="cpu(0) cpu(1)")
    assert " passed" in done and "skipped" not in done


PRELUDE = """
import ctypes, os
import gluon_syncbn as sbn
import mxnet as mx, numpy as np
library = sbn.native.library.library
NAMES = "memory pinned streams events all_memory all_streams kernels waits uploads stream_waits"
NAMES = [*NAMES.split(), "contexts"]

def usage():
    numbers = (ctypes.c_int * len(NAMES))()
    library.gluon_syncbn_fake_usage(numbers)
    return dict(zip(NAMES, numbers))

def used(before):
    return {name: count - before[name] for name, count in usage().items()}

def step(layer, devices=(mx.cpu(0),), shape=(4, 3, 6, 6), **options):
    xs = [mx.nd.random.normal(5, 2, shape=shape, ctx=device) for device in devices]
    with mx.autograd.record(**options):
        ys = [layer(x) for x in xs]
    mx.autograd.backward(ys)
    mx.nd.waitall()
    return ys

def layer_on(*devices, **options):
    layer = sbn.SyncBatchNorm(in_channels=3, **options)
    layer.initialize(ctx=list(devices))
    return layer
"""

KERNELS = """
layer = layer_on(mx.cpu(0))
step(layer)
for shape in ((4, 3, 6, 6), (64, 3, 40, 40)):
    before = usage()
    x = mx.nd.random.normal(5, 2, shape=shape)
    x.attach_grad()
    with mx.autograd.record():
        y = layer(x)
    y.wait_to_read()
    forward = usage()
    y.backward()
    mx.nd.waitall()
    backward = usage()
    for a, b in ((before, forward), (forward, backward)):
        assert 3 <= b["kernels"] - a["kernels"] <= 4, (shape, a, b)
        assert b["waits"] - a["waits"] == 1, (shape, a, b)
        assert b["uploads"] == b["stream_waits"] == b["pinned"] == 0, (shape, a, b)
before = usage()
layer(x).wait_to_read()
inference = used(before)
assert inference["kernels"] == 3 and inference["waits"] == 1, inference
assert inference["uploads"] == inference["pinned"] == 0
"""

# MXNET_BACKWARD_DO_MIRROR: statistics on the host, and the bits are the same.
MEETING = """
def train(devices, **options):
    np.random.seed(3)
    layer = layer_on(*devices, **options)
    layer.hybridize()
    results = []
    for _ in range(3):
        xs, dys = ([mx.nd.array(np.random.normal(5, 2, (n + 1, 3, 7, 9)), ctx=device)
                    for n, device in enumerate(devices)] for _ in range(2))
        for x in xs:
            x.attach_grad()
        before = usage()
        with mx.autograd.record():
            ys = [layer(x) for x in xs]
        mx.nd.waitall()
        forward, between = used(before), usage()
        mx.autograd.backward(ys, dys)
        mx.nd.waitall()
        backward = used(between)
        results += [*ys, *(x.grad for x in xs)]
        for each in layer.collect_params().values():
            results += each.list_data()
            results += each.list_grad() if each.grad_req != "null" else []
    return [each.asnumpy().tobytes() for each in results], forward, backward

for count in (1, 2, 3):
    for options in ({}, {"momentum": None, "running_variance": "unbiased"}):
        found = {}
        for first, way in ((0, "host"), (10, "peers"), (20, "copies")):
            devices = [mx.cpu(first + i) for i in range(count)]
            os.environ["MXNET_BACKWARD_DO_MIRROR"] = str(int(way == "host"))
            library.gluon_syncbn_fake_peers(int(way == "peers"))
            library.gluon_syncbn_release()
            found[way], forward, backward = train(devices, **options)
            for each in (backward,) if way == "host" else (forward, backward):
                assert each["waits"] == count, (way, each)
                assert each["stream_waits"] == count * (count - 1), (way, each)
                assert each["uploads"] == 0, (way, each)
            if way == "host":
                assert forward["waits"] == 2 * count and forward["uploads"] == count, forward
            elif way == "peers" or count == 1:
                assert usage()["pinned"] == 0, (way, usage())
        assert found["host"] == found["peers"] == found["copies"], (count, options)
"""

MEMORY = """
for peers in (1, 0):
    library.gluon_syncbn_fake_peers(peers)
    devices = [mx.cpu(10 * peers), mx.cpu(10 * peers + 1)]
    layer = layer_on(*devices)
    before = usage()
    for _ in range(30):
        step(layer, devices)
    now, after = used(before), usage()
    # On each device one call, and one whose sums the other device may still read. They have a
    # stream, an arena, and one on the host for copies; the statistics have memory of their own.
    assert 2 <= now["all_streams"] == now["events"] <= 4, now
    assert now["all_memory"] <= 2 + now["all_streams"] * (1 if peers else 2), now
    assert after["memory"] > 0 and (after["pinned"] > 0) == (not peers), after
    library.gluon_syncbn_release()
    after = usage()
    assert after["memory"] == after["pinned"] == after["streams"] == after["events"] == 0, after
    step(layer, devices)
    library.gluon_syncbn_release()
"""

# The threads of the calls have never set a device, so theirs is 0. No context may be created there.
CONTEXTS = """
layer = layer_on(mx.cpu(3))
step(layer, (mx.cpu(3),))
assert usage()["contexts"] == 1, usage()
library.gluon_syncbn_release()
assert usage()["contexts"] == 1, usage()
"""

ERRORS = """
for function, code, words in (
    ("cudaMalloc", 2, ["cudaMalloc of", "bytes", "out of memory (cudaErrorMemoryAllocation)"]),
    ("cudaHostAlloc", 2, ["cudaHostAlloc of", "out of memory"]),
    ("cudaStreamCreateWithFlags", 999, ["cudaStreamCreateWithFlags failed"]),
    ("cudaSetDevice", 999, ["cudaSetDevice failed"]),
    ("cudaEventCreateWithFlags", 999, ["cudaEventCreateWithFlags failed"]),
    ("cudaStreamSynchronize", 700, ["cudaStreamSynchronize failed"]),
    ("kernel", 700, ["The kernel of the sums failed"]),
):
    pinned = function == "cudaHostAlloc"
    layer = layer_on(mx.cpu(3))
    layer.hybridize(active=pinned)
    os.environ["MXNET_BACKWARD_DO_MIRROR"] = str(int(pinned))
    library.gluon_syncbn_release()
    library.gluon_syncbn_fake_fail_next(function.encode(), code)
    try:
        step(layer, (mx.cpu(3),))
    except mx.MXNetError as error:
        text = str(error)
    else:
        raise AssertionError(f"{function} was not reported")
    words += ["SyncBatchNorm", "cpu(3)", "GPU 3", "data of shape (4, 3, 6, 6)"]
    assert all(word in text for word in words), text
    try:
        mx.nd.waitall()
    except mx.MXNetError:
        pass
    assert np.isfinite(step(layer, (mx.cpu(3),))[0].asnumpy()).all()
library.gluon_syncbn_release()
assert usage()["memory"] == usage()["streams"] == 0
"""

# An error before the meeting ends the calls of both devices, one after it that of one device.
ERRORS_OF_TWO = """
import time
library.gluon_syncbn_fake_peers(0)
devices = [mx.cpu(0), mx.cpu(1)]
functions = ["kernel", "cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent"]
for function in functions:
    layer = layer_on(*devices)
    for _ in range(2):
        assert all(np.isfinite(y.asnumpy()).all() for y in step(layer, devices))
    xs = [mx.nd.random.normal(shape=(4, 3, 6, 6), ctx=device) for device in devices]
    mx.nd.waitall()
    means = [mean.asnumpy() for mean in layer.running_mean.list_data()]
    library.gluon_syncbn_fake_fail_next(function.encode(), 700)
    begin, errors = time.monotonic(), []
    with mx.autograd.record():
        ys = [layer(x) for x in xs]
    for _ in range(3):
        try:
            mx.nd.waitall()
        except mx.MXNetError as error:
            errors.append(str(error))
    assert errors and all(function.replace("kernel", "sums") in error for error in errors), errors
    assert time.monotonic() - begin < 20
    now = [mean.asnumpy() for mean in layer.running_mean.list_data()]
    moved = sum(a.tobytes() != b.tobytes() for a, b in zip(now, means))
    behind = function == "cudaStreamWaitEvent"
    assert moved == behind, (function, moved)
    assert any("running statistics are as before" in error for error in errors) == behind, errors
    try:
        # If one device had failed before the other was called, its next call fails as well.
        step(layer, devices)
    except mx.MXNetError as error:
        assert "failed before" in str(error)
    assert all(np.isfinite(y.asnumpy()).all() for y in step(layer, devices))
"""


# Failures of random functions in nets of three layers: the step ends at once, and training goes on.
FAILURES = """
import random, time

def ended(act):
    for _ in range(3):
        try:
            return act()
        except mx.MXNetError:
            pass
    raise AssertionError(seed)

devices = [mx.cpu(0), mx.cpu(1)]
functions = ["kernel", "cudaStreamSynchronize", "cudaStreamWaitEvent", "cudaEventRecord"]
for seed in range(20):
    chosen = random.Random(seed)
    net = mx.gluon.nn.HybridSequential()
    net.add(*[sbn.SyncBatchNorm(in_channels=3) for _ in range(3)])
    net.initialize(ctx=devices)
    net.hybridize(chosen.random() < 0.7, static_alloc=chosen.random() < 0.5)
    step(net, devices)
    for _ in range(4):
        begin = time.monotonic()
        library.gluon_syncbn_fake_fail_next(chosen.choice(functions).encode(), 700)
        xs = [mx.nd.ones((4, 3, 6, 6), ctx=device) for device in devices]
        with mx.autograd.record():
            ys = [net(x) for x in xs]
        mx.autograd.backward(ys)
        try:
            for y in chosen.sample(ys, 2):
                y.asnumpy()
        except mx.MXNetError:
            pass
        ended(mx.nd.waitall)
        assert time.monotonic() - begin < 20, seed
        ended(lambda: step(net, devices))
"""


# What bench.py times.
CALLS = """
x, dy, y, dx = (np.random.normal(size=(4, 3, 30)).astype("float32") for _ in range(4))
small = [np.ones(3, "float32") for _ in range(6)]
pointers = [ctypes.c_void_p(each.ctypes.data) for each in (x, dy, *small[:4], y, dx, *small[4:])]
shape = [ctypes.c_int64(each) for each in (4, 3, 30, 1)]
before = usage()
assert library.gluon_syncbn_cuda_calls(0, 0, *shape, *pointers, 5) == 0
assert used(before)["waits"] == 10
mean, inv_std = x.mean((0, 2)), 1 / np.sqrt(x.var((0, 2)) + 1e-5)
wanted = (x - mean[:, None]) * inv_std[:, None] + 1
assert abs(y - wanted).max() < 1e-5 and abs(small[5] - dy.sum((0, 2))).max() < 1e-4
"""


# What the doctor says of two GPUs; in a process of its own, as what was found out stays.
PATHS = """
import contextlib, io
from gluon_syncbn.cli import doctor
for value, path in (("0", "exchange sums through the host"), ("1", "read each other's memory")):
    os.environ["MXNET_ENABLE_GPU_P2P"] = value
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        doctor._self_test(doctor._Findings(), "2 GPUs", ["cpu:0", "cpu:1"])
    assert path in out.getvalue(), out.getvalue()
"""


SCRIPTS = {
    "kernels": KERNELS,
    "meeting": MEETING,
    "calls": CALLS,
    "memory": MEMORY,
    "contexts": CONTEXTS,
    "errors": ERRORS,
    "errors of two": ERRORS_OF_TWO,
    "failures": FAILURES,
    "paths": PATHS,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_use_of_cuda(package, script):
    run(package, "-c", PRELUDE + script)
