"""The measurements of bench.py: times of the layers and of a training step, and memory."""

import ctypes
import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.layers.operator import sync_batch_norm
from mxnet import autograd, gluon
from tqdm import tqdm

WARM_UP = 3
MAX_WARM_UP_ROUNDS = 60
FEW_NEW_PAGES = 1000  # of about 4 KiB
STEP_CONTEXTS = 2
STEP_BATCH = 2  # images on each context
STEP_SIZE = 96
MEMORY_SHAPE = (12, 64, 224, 224)


class Operator(SyncBatchNorm):
    """The operator without layout copies, which arrays in plain layout do not need."""

    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        return sync_batch_norm(
            F,
            x,
            gamma,
            beta,
            running_mean,
            running_var,
            layer=self._layer,
            copy_layout=False,
            name="fwd",
        )


LAYERS = {
    "operator": Operator,
    "block": SyncBatchNorm,
    "BatchNorm": gluon.nn.BatchNorm,
    "contrib": gluon.contrib.nn.SyncBatchNorm,
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
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(arena_max, 1)
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)


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


def _arrays(shape, contexts):
    """Random x, with a gradient array, and dy for each context."""
    part = (shape[0] // len(contexts), *shape[1:])
    xs = [mx.nd.random.normal(shape=part, ctx=context) for context in contexts]
    dys = [mx.nd.random.normal(shape=part, ctx=context) for context in contexts]
    for x in xs:
        x.attach_grad()
    mx.nd.waitall()
    return xs, dys


def layer_times(shape, count, repetitions, progress):
    """{kind: seconds of each round}: columns forward and backward, or one column for "copy"."""
    contexts = [mx.cpu(i) for i in range(count)]
    xs, dys = _arrays(shape, contexts)
    layers = {kind: Layer(kind, shape[1], contexts) for kind in LAYERS}
    _check_agreement(layers, xs, dys)
    contestants = {kind: lambda layer=layer: layer(xs, dys) for kind, layer in layers.items()}
    return interleave({"copy": Copy(shape), **contestants}, repetitions, progress)


def _check_agreement(layers, xs, dys):
    """Raises an error if the results of the layers differ."""
    expected = None
    for kind, layer in layers.items():
        if kind == "BatchNorm" and len(xs) > 1:
            continue  # normalizes with the statistics of each context
        ys, _ = layer.run(xs, dys)
        results = [array.asnumpy() for array in ys + [x.grad for x in xs]]
        expected = expected or results
        difference = max(np.abs(a - b).max() for a, b in zip(results, expected))
        if not difference < 1e-3:
            raise RuntimeError(
                f"{kind} and operator differ by {difference:g} at {xs[0].shape} on {len(xs)} "
                "contexts: one of them is wrong, so their times cannot be compared."
            )


class TrainingStep:
    """A training step of fcn_resnet50. Returns seconds.

    `resized`: whether the net's maps are resized to the images, which are 8 times as large. MXNet's
    gradient of BilinearResize2D is added within `omp critical`, one lock for the process.
    """

    def __init__(self, norm_layer, resized):
        from gluoncv.loss import MixSoftmaxCrossEntropyLoss
        from gluoncv.model_zoo.segbase import get_segmentation_model

        contexts = [mx.cpu(i) for i in range(STEP_CONTEXTS)]
        mx.random.seed(0)
        self._net = get_segmentation_model(
            "fcn",
            dataset="pascal_voc",
            backbone="resnet50",
            pretrained_base=False,
            base_size=STEP_SIZE,
            crop_size=STEP_SIZE,
            norm_layer=norm_layer,
        )
        self._net.initialize(mx.init.Xavier(), ctx=contexts, force_reinit=True)
        self._net.hybridize(static_alloc=True)
        self._loss = MixSoftmaxCrossEntropyLoss()  # cannot be hybridized
        self._trainer = gluon.Trainer(
            self._net.collect_params(), "sgd", {"learning_rate": 1e-3, "momentum": 0.9, "wd": 1e-4}
        )
        side = STEP_SIZE if resized else STEP_SIZE // 8
        # Resizing maps to their own size takes no lock.
        self._net._up_kwargs = {"height": side, "width": side}
        self._batches = [
            (
                mx.nd.random.normal(shape=(STEP_BATCH, 3, STEP_SIZE, STEP_SIZE), ctx=context),
                mx.nd.random.randint(0, 21, shape=(STEP_BATCH, side, side), ctx=context),
            )
            for context in contexts
        ]

    def __call__(self):
        start = time.perf_counter()
        with autograd.record():
            losses = [self._loss(*self._net(x), labels) for x, labels in self._batches]
        autograd.backward(losses)
        self._trainer.step(STEP_BATCH * STEP_CONTEXTS)
        mx.nd.waitall()
        return (time.perf_counter() - start,)


def step_times(repetitions, progress, resized):
    """{kind: seconds of each round} of a training step with the block and with BatchNorm."""
    steps = {kind: TrainingStep(LAYERS[kind], resized) for kind in ("block", "BatchNorm")}
    _warm_up(steps)
    return interleave(steps, repetitions, progress)


def _warm_up(contestants):
    """Calls `contestants` until memory use hardly grows.

    In each step, MXNet's operators use different workspace slots, which grow to the largest request
    of any operator. Meanwhile clearing new pages takes up to half of a step's time.
    """
    for _ in tqdm(range(MAX_WARM_UP_ROUNDS), desc="until memory is at its peak", leave=False):
        before = _page_faults()
        interleave(contestants, 0, tqdm(disable=True))
        if _page_faults() - before < FEW_NEW_PAGES:
            return
    raise RuntimeError(
        f"memory still grew after {MAX_WARM_UP_ROUNDS * WARM_UP} training steps of each kind, so "
        "their times are not those of a long training: set MXNET_CPU_TEMP_COPY lower."
    )


def _page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


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


def _memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))
