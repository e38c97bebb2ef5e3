"""Times a step of one layer inside MXNet, on one GPU and on all: forward and backward with MXNet's
engine, but without MXNet's kernels, which may not be compiled for the GPU.

    python benchmarks/gpu/bench_mxnet.py    # with the package and MXNet for CUDA in PYTHONPATH
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))
import test_mxnet_gpu as tests  # noqa: E402
from test_mxnet_gpu import GPUS, Device, data, mx, sbn, sync_batch_norm  # noqa: E402

# Per device: small, where the host's share shows, and large.
SHAPES = [(2, 64, 28, 28), (4, 1024, 7, 7), (32, 256, 64, 64)]
STEPS = 30


def milliseconds(devices, shape):
    """The median over the steps, to the end of backward on all devices."""
    layer = sbn.native.Layer("layer")
    layer.set_devices([str(device) for device in devices], None, 60)
    parts = [Device(device, *data(shape, 1, "float32"), "float32") for device in devices]
    times = []
    for _ in range(STEPS):
        mx.nd.waitall()
        begin = time.perf_counter()
        with mx.autograd.record():
            ys = [
                sync_batch_norm(
                    *(mx.nd, p.x, p.gamma, p.beta, p.mean, p.var, p.batches), layer=layer, axis=1
                )
                for p in parts
            ]
        mx.autograd.backward(ys, [p.dy for p in parts])
        mx.nd.waitall()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


for count in tests.COUNTS:
    for shape in SHAPES:
        took = milliseconds(GPUS[:count], shape)
        print(f"{count} x {shape} float32: {took:.3f} ms for forward and backward", flush=True)
