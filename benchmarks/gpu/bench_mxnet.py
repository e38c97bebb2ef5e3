"""Times a step of one layer inside MXNet, on one GPU and on all: forward and backward with MXNet's
engine, but without MXNet's kernels, which may not be compiled for the GPU. How long the layer's
calls of CUDA take is in it; the rest is MXNet's engine, Python and the layer's own code.

    python benchmarks/gpu/bench_mxnet.py    # with the package and MXNet for CUDA in PYTHONPATH
"""

import ctypes
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests" / "gpu")]
from harness import seconds_of  # noqa: E402
from test_mxnet_gpu import COUNTS, GPUS, Device, data, mx, sbn, sync_batch_norm  # noqa: E402

# Per device: small, where the host's share shows, and large.
SHAPES = [(2, 64, 28, 28), (4, 1024, 7, 7), (32, 256, 64, 64)]
STEPS = 30
CALLS = {
    "launches": "cudaLaunchKernel",
    "waits": "cudaStreamSynchronize",
    "events": "cudaEventRecord",
    "waits for events": "cudaStreamWaitEvent",
    "copies": "cudaMemcpyAsync",
}
# tests/gpu/simgpu/cards.cc
library = sbn.native.library.library
library.gluon_syncbn_cards_allocate.restype = ctypes.c_void_p
for counter in (library.gluon_syncbn_cards_calls, library.gluon_syncbn_cards_nanoseconds):
    counter.restype = ctypes.c_uint64


def calls():
    """{name: (number, microseconds)} of the calls of CUDA so far."""
    return {
        name: (
            library.gluon_syncbn_cards_calls(function.encode()),
            library.gluon_syncbn_cards_nanoseconds(function.encode()) / 1e3,
        )
        for name, function in CALLS.items()
    }


def milliseconds(devices, shape):
    """The median over the steps, to the end of backward on all devices, and the calls of CUDA in a
    step."""
    layer = sbn.native.Layer("layer")
    layer.set_devices([str(device) for device in devices], None, 60)
    parts = [Device(device, *data(shape, 1, "float32"), "float32") for device in devices]

    def step():
        with mx.autograd.record():
            ys = [
                sync_batch_norm(
                    *(mx.nd, p.x, p.gamma, p.beta, p.mean, p.var, p.batches), layer=layer, axis=1
                )
                for p in parts
            ]
        mx.autograd.backward(ys, [p.dy for p in parts])
        mx.nd.waitall()

    step()
    before = calls()
    median = statistics.median(seconds_of(step) for _ in range(STEPS)) * 1e3
    spent = {
        name: [(now - then) / STEPS for now, then in zip(after, before[name])]
        for name, after in calls().items()
    }
    return median, ", ".join(f"{n:.0f} {name} {us:.0f} us" for name, (n, us) in spent.items())


library.gluon_syncbn_cards_allocate(ctypes.c_size_t(1))  # From now on calls are counted.
for count in COUNTS:
    for shape in SHAPES:
        took, spent = milliseconds(GPUS[:count], shape)
        print(f"{count} x {shape} float32: {took:.3f} ms for both passes; {spent}", flush=True)
