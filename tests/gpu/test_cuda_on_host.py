"""What the operator does on GPUs, without one: in a library with a CUDA that runs on the host and
takes CPU contexts for GPUs (make fake-cuda). The kernels are the GPU's own text."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build/native/plain/fake_cuda/libgluon_syncbn.so"
# Tests of the layer that must pass on every kind of device, except those for CPUs only. On GPUs the
# sums of a layer with an activation are added in another order than those of one without.
TESTS = ["batch_norm", "activation", "numerics", "semantics", "rendezvous"]
OF_CPUS = [
    "test_every_number_of_threads_gives_the_same_bits",
    *("test_bits_by_", "test_bits_far_from_zero", "test_activation.py and test_virtual_devices"),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package and its tests with that library."""
    subprocess.run(["make", "-s", "fake-cuda"], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    folder = tmp_path_factory.mktemp("on_host")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "gluon_syncbn", folder / "gluon_syncbn", ignore=ignored)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(LIBRARY, folder / "gluon_syncbn")
    return folder


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


@pytest.mark.timeout(600)
def test_the_tests_of_the_layer_pass(package):
    tests = [f"tests/layers/test_{name}.py" for name in TESTS]
    chosen = " and ".join(f"not ({each})" for each in OF_CPUS)
    assert " passed" in run(package, "-m", "pytest", "-q", "-x", "-k", chosen, *tests)


@pytest.mark.timeout(600)
def test_the_tests_of_gpu_check_inside_mxnet_pass(package):
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu/test_mxnet_gpu.py")
    done = run(package, *command, GPUS_FOR_TESTS="cpu(0) cpu(1)")
    assert " passed" in done and "skipped" not in done


PRELUDE = """
import ctypes, gc
import gluon_syncbn as sbn
import mxnet as mx, numpy as np
library = sbn.native.library.library
NAMES = "memory pinned streams all_memory all_streams kernels waits contexts".split()

def usage():
    numbers = (ctypes.c_int * len(NAMES))()
    library.gluon_syncbn_fake_usage(numbers)
    return dict(zip(NAMES, numbers))

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
        assert b["waits"] - a["waits"] == 2, (shape, a, b)
before = usage()
layer(x).wait_to_read()
after = usage()
# Inference waits only for its end.
assert after["kernels"] - before["kernels"] == 3, (before, after)
assert after["waits"] - before["waits"] == 1
"""

MEMORY = """
layer = layer_on(mx.cpu(0), mx.cpu(1))
for _ in range(3):
    step(layer, (mx.cpu(0), mx.cpu(1)))
before = usage()
for _ in range(5):
    step(layer, (mx.cpu(0), mx.cpu(1)))
after = usage()
assert after["all_memory"] == before["all_memory"], (before, after)
assert after["all_streams"] == before["all_streams"], (before, after)
assert 0 < after["streams"] <= 4 and after["memory"] > 0 and after["pinned"] > 0, after
library.gluon_syncbn_release()
after = usage()
assert after["memory"] == after["pinned"] == after["streams"] == 0, after
step(layer, (mx.cpu(0), mx.cpu(1)))
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
    ("cudaMemcpyAsync", 999, ["cudaMemcpyAsync of", "to the host"]),
    ("cudaStreamSynchronize", 700, ["cudaStreamSynchronize failed"]),
    ("kernel", 700, ["The kernel of the sums failed"]),
):
    layer = layer_on(mx.cpu(3))
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


SCRIPTS = {"kernels": KERNELS, "memory": MEMORY, "contexts": CONTEXTS, "errors": ERRORS}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_use_of_cuda(package, script):
    run(package, "-c", PRELUDE + script)
