"""The measurements of bench.py: times of the layers, and memory."""

import contextlib
import ctypes
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

WARM_UP = 3
# The interpreter with PyTorch that `make bench` installs.
TORCH = Path(sys.prefix, "torch", "bin", "python")
MEMORY_SHAPE = (12, 64, 224, 224)
# With these in its environment, a process keeps freed memory.
KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
}


class Operator(SyncBatchNorm):
    """The operator without layout copies, which arrays in plain layout do not need."""

    activation = None
    channels = 1  # the axis

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        return sync_batch_norm(
            F,
            x,
            gamma,
            beta,
            running_mean,
            running_var,
            layer=self._layer,
            axis=self.channels,
            activation=self.activation,
            copy_layout=False,
            name="fwd",
        )


class OperatorRelu(Operator):
    activation = "relu"


class OperatorLast(Operator):
    channels = -1


class OperatorLastRelu(OperatorLast):
    activation = "relu"


class BatchNormRelu(gluon.nn.HybridSequential):
    def __init__(self, in_channels):
        super().__init__()
        self.add(gluon.nn.BatchNorm(in_channels=in_channels), gluon.nn.Activation("relu"))


LAYERS = {
    "operator": Operator,
    "block": SyncBatchNorm,
    "BatchNorm": gluon.nn.BatchNorm,
    "contrib": gluon.contrib.nn.SyncBatchNorm,
    "operator_relu": OperatorRelu,
    "BatchNorm_relu": BatchNormRelu,
    "operator_last": OperatorLast,
    "operator_last_relu": OperatorLastRelu,
}


def threads():
    """The number of threads of a layer."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdigit() and int(setting) else len(os.sched_getaffinity(0))


def keep_freed_memory():
    """Makes the C library keep freed memory. Must be called before MXNet's threads start.

    A single layer allocates y in each call. Sometimes the freed pages would go back to the system,
    and new pages cost as much time as a fast layer. A net reuses its arrays.
    """
    parameters = {
        "MALLOC_ARENA_MAX": -8,
        "MALLOC_MMAP_THRESHOLD_": -3,
        "MALLOC_TRIM_THRESHOLD_": -1,
    }
    for name, value in KEEP_FREED_MEMORY.items():
        ctypes.CDLL(None).mallopt(parameters[name], int(value))


def orders(n):
    """Orders of 0..n-1, in which each comes right after each other one equally often (Williams)."""
    zigzag = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]
    rows = [[(i + shift) % n for i in zigzag] for shift in range(n)]
    return rows if n % 2 == 0 else [row for pair in rows for row in (pair, pair[::-1])]


def interleave(contestants, repetitions, progress):
    """Calls all of `contestants`, {name: function}, in each round, in an order that changes.

    Returns {name: what the function returned, an array with one row for each round}.
    """
    names = list(contestants)
    rows = orders(len(names))
    results = {name: [] for name in names}
    for round_ in range(-WARM_UP, repetitions):
        for i in rows[round_ % len(rows)]:
            result = contestants[names[i]]()
            if round_ >= 0:
                results[names[i]].append(result)
        progress.update()
    return {name: np.array(rows) for name, rows in results.items()}


class Copy:
    """Copies an array with several threads. Returns seconds."""

    def __init__(self, shape):
        source = np.random.standard_normal(int(np.prod(shape))).astype(np.float32)
        n = threads()
        self._parts = list(zip(np.array_split(np.zeros_like(source), n), np.array_split(source, n)))
        self._pool = ThreadPoolExecutor(n)
        self._barrier = threading.Barrier(n)

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

    def __init__(self, kind, channels, contexts):
        settings = {"num_devices": len(contexts)} if kind == "contrib" else {}
        self._block = LAYERS[kind](in_channels=channels, **settings)
        self._block.initialize(ctx=contexts)
        self._block.hybridize(static_alloc=True, static_shape=True)

    def run(self, xs, dys):
        """Returns y of each context, the start, and the ends of forward and backward."""
        start = time.perf_counter()
        with autograd.record():
            ys = [self._block(x) for x in xs]
        mx.nd.waitall()
        middle = time.perf_counter()
        autograd.backward(ys, dys)
        mx.nd.waitall()
        return ys, (start, middle, time.perf_counter())

    def __call__(self, xs, dys):
        _, (start, middle, end) = self.run(xs, dys)
        return middle - start, end - middle


class TorchLayer:
    """PyTorch's layer in a process of its own. Returns the seconds of forward and backward."""

    def __init__(self, shape, relu):
        script = Path(__file__).with_name("torch_layer.py")
        command = [TORCH, script, str(threads()), str(int(relu)), *map(str, shape)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **KEEP_FREED_MEMORY},
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


def _arrays(shape, contexts):
    """Random x, with a gradient array, and dy for each context."""
    part = (shape[0] // len(contexts), *shape[1:])
    xs = [mx.nd.random.normal(shape=part, ctx=context) for context in contexts]
    dys = [mx.nd.random.normal(shape=part, ctx=context) for context in contexts]
    return _with_gradients(xs, dys)


def _with_gradients(xs, dys):
    for x in xs:
        x.attach_grad()
    mx.nd.waitall()
    return xs, dys


def _channels_last(arrays):
    return [mx.nd.moveaxis(array, 1, -1) for array in arrays]


def layer_times(shape, count, repetitions, progress):
    """{kind: seconds of each round}: columns forward and backward, or one column for "copy"."""
    contexts = [mx.cpu(i) for i in range(count)]
    first = _arrays(shape, contexts)
    last = _with_gradients(*map(_channels_last, first))
    data = {kind: last if "last" in kind else first for kind in LAYERS}
    layers = {kind: Layer(kind, shape[1], contexts) for kind in LAYERS}
    _check_agreement(layers, data)
    contestants = {
        kind: lambda layer=layer, kind=kind: layer(*data[kind]) for kind, layer in layers.items()
    }
    contestants["copy"] = Copy(shape)
    with contextlib.ExitStack() as stack:
        if count == 1 and TORCH.exists():
            for kind in ("torch", "torch_relu"):
                contestants[kind] = TorchLayer(shape, relu=kind == "torch_relu")
                stack.callback(contestants[kind].close)
        return interleave(contestants, repetitions, progress)


def _check_agreement(layers, data):
    """Raises an error if the results of the layers differ."""
    expected = {}
    for kind, layer in layers.items():
        xs, dys = data[kind]
        if kind.startswith("BatchNorm") and len(xs) > 1:
            continue  # normalizes with the statistics of each context
        ys, _ = layer.run(xs, dys)
        results = [array.asnumpy() for array in ys + [x.grad for x in xs]]
        if "last" in kind:
            results = [np.moveaxis(array, -1, 1) for array in results]
        right = expected.setdefault(kind.endswith("relu"), results)
        difference = max(np.abs(a - b).max() for a, b in zip(results, right))
        if not difference < 1e-3:
            raise RuntimeError(
                f"{kind} and operator differ by {difference:g} at {xs[0].shape} on {len(xs)} "
                "contexts: one of them is wrong, so their times cannot be compared."
            )


def peak_memory(kind, count):
    """The peak memory of a forward and backward, relative to the size of x, y, dy and dx together.

    Must run in a new process, as it reads the peak of the whole process.
    """
    contexts = [mx.cpu(i) for i in range(count)]
    layer = Layer(kind, MEMORY_SHAPE[1], contexts)
    # Allocates threads, code and buffers for sums, which do not grow with the data.
    layer(*_arrays((count, MEMORY_SHAPE[1], 64, 64), contexts))
    before = _memory("VmRSS")
    xs, dys = _arrays(MEMORY_SHAPE, contexts)
    layer(xs, dys)
    four_arrays = 4 * sum(array.size * array.dtype().itemsize for array in xs)
    return (_memory("VmHWM") - before) / four_arrays


CHAIN_LENGTH = 20
CHAIN_SHAPE = (4, 64, 128, 128)


def chain_memory(kind):
    """The peak memory of this process, which must be a new one, after training steps of a chain of
    convolution, batch normalization and leaky relu. Without `kind` there is no chain."""
    layers = {
        "BatchNorm + LeakyReLU": lambda: [gluon.nn.BatchNorm(), gluon.nn.LeakyReLU(0.01)],
        "fused": lambda: [SyncBatchNorm(activation="leaky_relu")],
        "in place": lambda: [SyncBatchNorm(activation="leaky_relu", inplace=True)],
    }
    net = gluon.nn.HybridSequential()
    for _ in range(CHAIN_LENGTH if kind else 0):
        net.add(gluon.nn.Conv2D(CHAIN_SHAPE[1], 3, padding=1), *layers[kind]())
    net.initialize()
    net.hybridize(static_alloc=True)
    x = mx.nd.random.normal(shape=CHAIN_SHAPE)
    x.attach_grad()
    for _ in range(2):
        with autograd.record():
            loss = net(x).mean() if kind else x.mean()
        loss.backward()
        mx.nd.waitall()
    return _memory("VmHWM")


def _memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))
