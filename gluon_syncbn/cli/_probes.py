"""The doctor's checks that may fail or hang. Each runs in its own process.

python _probes.py import | kernels LIBRARY | train DEVICE ...
"""

import json
import sys
from typing import Any, Callable, Dict


def load():
    """MXNet's version, features and GPU count, with our native library loaded, and why processes
    cannot share memory, or ""."""
    import gluon_syncbn  # noqa: F401, I001  First: its import explains what is wrong with MXNet.
    import mxnet
    from gluon_syncbn.distributed.shared_memory import SharedMemory

    memory = SharedMemory(0)
    memory.open([memory.address] * 2)  # As another process would.

    features = [name for name, f in mxnet.runtime.Features().items() if f.enabled]
    return {
        "mxnet": mxnet.__version__,
        "features": features,
        "gpus": mxnet.context.num_gpus(),
        "no_shared_memory": memory.why_not,
    }


def kernels(path):
    """The GPUs that the library's kernels were built for, without MXNet; "" if it has none."""
    import ctypes

    library = ctypes.CDLL(path)
    library.gluon_syncbn_cuda.restype = ctypes.c_char_p
    return (library.gluon_syncbn_cuda() or b"").decode()


def train(*names):
    """The largest error of y and dx against NumPy on devices with unequal shards, and how the
    devices share sums: see peer_access in cuda/device.h."""
    import gluon_syncbn as sbn
    import mxnet as mx
    import numpy as np

    devices = [mx.Context(kind, int(i)) for kind, i in (name.split(":") for name in names)]
    edges = [0, 2, 5] if len(devices) == 2 else [0, 5]
    x, dy = np.random.default_rng(0).standard_normal((2, 5, 4, 6, 6)) * 3 + 7
    layer = sbn.SyncBatchNorm(in_channels=4)
    layer.initialize(ctx=devices)

    def split(array):
        return [mx.nd.array(array[a:b], ctx=c) for a, b, c in zip(edges, edges[1:], devices)]

    shards = split(x)
    for shard in shards:
        shard.attach_grad()
    with mx.autograd.record():
        ys = [layer(shard) for shard in shards]
    mx.autograd.backward(ys, split(dy))
    y = np.concatenate([y.asnumpy() for y in ys])
    dx = np.concatenate([shard.grad.asnumpy() for shard in shards])
    axes = (0, 2, 3)
    mean, inv_std = x.mean(axes, keepdims=True), 1 / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    xhat = (x - mean) * inv_std
    wanted = dy - dy.mean(axes, keepdims=True) - xhat * (dy * xhat).mean(axes, keepdims=True)
    pairs = (y, xhat), (dx, inv_std * wanted)
    error = float(max(abs(a - b).max() / abs(b).max() for a, b in pairs))
    return error, sbn.native.library.library.gluon_syncbn_peer_access()


if __name__ == "__main__":
    # Do not import from this folder, which has modules of the package.
    del sys.path[0]
    probes: Dict[str, Callable[..., Any]] = {"import": load, "kernels": kernels, "train": train}
    probe = probes[sys.argv[1]]
    print("RESULT", json.dumps(probe(*sys.argv[2:])))
