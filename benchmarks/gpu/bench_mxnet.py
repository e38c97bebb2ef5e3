"""Times a step of one layer inside MXNet, on one GPU and on all: forward and backward with MXNet's
engine, but without MXNet's kernels, which may not be compiled for the GPU.

    python benchmarks/gpu/bench_mxnet.py    # with the package and MXNet for CUDA in PYTHONPATH
"""

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


def milliseconds(devices, shape):
    """The median over the steps, to the end of backward on all devices."""
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

    mx.nd.waitall()
    return statistics.median(seconds_of(step) for _ in range(STEPS)) * 1e3


for count in COUNTS:
    for shape in SHAPES:
        took = milliseconds(GPUS[:count], shape)
        print(f"{count} x {shape} float32: {took:.3f} ms for forward and backward", flush=True)
