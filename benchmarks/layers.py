"""The layers that bench.py compares: their times and their memory. The functions must run in a new
process; see harness.in_new_process."""

import contextlib
import functools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mxnet as mx
import numpy as np
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.layers.operator import sync_batch_norm
from mxnet import autograd, gluon

from harness import interleave

# The interpreter with PyTorch that `make bench` installs.
TORCH = Path(sys.prefix, "torch", "bin", "python")


class Operator(SyncBatchNorm):
    """The operator without layout copies, which arrays in plain layout do not need."""

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        arrays = x, gamma, beta, running_mean, running_var
        settings = self._settings()
        return sync_batch_norm(
            F, *arrays, layer=self._layer, copy_layout=False, name="fwd", **settings
        )


class BatchNormRelu(gluon.nn.HybridSequential):
    def __init__(self, in_channels):
        super().__init__()
        self.add(gluon.nn.BatchNorm(in_channels=in_channels), gluon.nn.Activation("relu"))


LAYERS = {
    "operator": Operator,
    "block": SyncBatchNorm,
    "BatchNorm": gluon.nn.BatchNorm,
    "operator_relu": functools.partial(Operator, activation="relu"),
    "BatchNorm_relu": BatchNormRelu,
    "operator_last": functools.partial(Operator, axis=-1),
    "operator_last_relu": functools.partial(Operator, axis=-1, activation="relu"),
}
CHAIN = {
    "BatchNorm + LeakyReLU": lambda: [gluon.nn.BatchNorm(), gluon.nn.LeakyReLU(0.01)],
    "fused": lambda: [SyncBatchNorm(activation="leaky_relu")],
    "in place": lambda: [SyncBatchNorm(activation="leaky_relu", inplace=True)],
}


class Copy:
    """Copies an array with several threads. Returns seconds."""

    def __init__(self, shape, threads):
        source = np.random.standard_normal(int(np.prod(shape))).astype(np.float32)
        arrays = np.zeros_like(source), source
        self._parts = list(zip(*(np.array_split(array, threads) for array in arrays)))
        self._pool, self._barrier = ThreadPoolExecutor(threads), threading.Barrier(threads)

    def _copy(self, part):
        # Without the barrier, the time would include that of starting the threads.
        self._barrier.wait()
        start = time.perf_counter()
        np.copyto(*part)
        return start, time.perf_counter()

    def __call__(self):
        starts, ends = zip(*self._pool.map(self._copy, self._parts))
        return (max(ends) - min(starts),)


class Layer:
    """Forward and backward of one layer. Returns the seconds of each."""

    def __init__(self, make, channels, contexts):
        self._block = make(in_channels=channels)
        self._block.initialize(ctx=contexts)
        self._block.hybridize(static_alloc=True, static_shape=True)

    def __call__(self, xs, dys):
        start = time.perf_counter()
        with autograd.record():
            ys = [self._block(x) for x in xs]
        mx.nd.waitall()
        middle = time.perf_counter()
        autograd.backward(ys, dys)
        mx.nd.waitall()
        return middle - start, time.perf_counter() - middle


class TorchLayer:
    """PyTorch's layer in a process of its own. Returns the seconds of forward and backward."""

    def __init__(self, shape, threads, relu):
        arguments = [threads, int(relu), *shape]
        self._process = subprocess.Popen(
            [TORCH, Path(__file__).with_name("torch_layer.py"), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __call__(self):
        self._process.stdin.write("\n")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"torch_layer.py ended with status {self._process.wait()}.")
        time.sleep(0.02)  # until its idle threads no longer spin
        return tuple(map(float, line.split()))

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def random_arrays(shape, contexts):
    """x, with a gradient array, and dy for each context, which has its part of the first axis."""
    part = (shape[0] // len(contexts), *shape[1:])
    xs, dys = (
        [mx.nd.random.normal(shape=part, ctx=context) for context in contexts] for _ in range(2)
    )
    for x in xs:
        x.attach_grad()
    mx.nd.waitall()
    return xs, dys


def layer_times(shape, count, repetitions):
    """{kind: the seconds of each round}: of forward and backward, or of "copy"."""
    contexts = [mx.cpu(i) for i in range(count)]
    threads = int(os.environ["OMP_NUM_THREADS"])
    first = random_arrays(shape, contexts)
    last = random_arrays((shape[0], *shape[2:], shape[1]), contexts)
    contestants = {"copy": Copy(shape, threads)}
    contrib = functools.partial(gluon.contrib.nn.SyncBatchNorm, num_devices=count)
    for kind, make in {**LAYERS, "contrib": contrib}.items():
        layer = Layer(make, shape[1], contexts)
        contestants[kind] = functools.partial(layer, *(last if "last" in kind else first))
    with contextlib.ExitStack() as stack:
        if count == 1 and TORCH.exists():
            for kind in ("torch", "torch_relu"):
                contestants[kind] = TorchLayer(shape, threads, relu=kind == "torch_relu")
                stack.callback(contestants[kind].close)
        return interleave(contestants, repetitions)


def peak_memory(kind, shape, count):
    """The peak memory of a forward and backward, relative to the size of x, y, dy and dx
    together."""
    contexts = [mx.cpu(i) for i in range(count)]
    layer = Layer(LAYERS[kind], shape[1], contexts)
    # Allocates threads, code and buffers for sums, which do not grow with the data.
    layer(*random_arrays((count, shape[1], 64, 64), contexts))
    before = _memory("VmRSS")
    layer(*random_arrays(shape, contexts))
    return (_memory("VmHWM") - before) / (4 * np.prod(shape) * 4)


def chain_memory(kind, shape, length):
    """The peak memory of this process after training steps of a chain of convolutions, batch
    normalizations and leaky relus."""
    net = gluon.nn.HybridSequential()
    for _ in range(length):
        net.add(gluon.nn.Conv2D(shape[1], 3, padding=1), *CHAIN[kind]())
    net.initialize()
    net.hybridize(static_alloc=True)
    x = mx.nd.random.normal(shape=shape)
    x.attach_grad()
    for _ in range(2):
        with autograd.record():
            loss = net(x).mean() if length else x.mean()
        loss.backward()
        mx.nd.waitall()
    return _memory("VmHWM")


def _memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))
