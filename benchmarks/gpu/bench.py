"""Measures the CUDA kernels: each pass compared with a copy, and all passes with PyTorch's.

    python benchmarks/gpu/bench.py LIBRARY [--json FILE] [--repetitions N]

Calls are captured in CUDA graphs, to exclude the time of Python. Large layers alternate between
several sets of arrays, four times the size of the cache, so that no data is cached and every call
also writes back dirty lines of the call before. Small layers use one set, as their data is cached
in a net too. Measurements that are compared alternate.
"""

import argparse
import ctypes
import json
import math
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))
from surface import Layer, Library  # noqa: E402

# 64 MB or more in each dtype.
LARGE = [(32, 256, 64, 64), (64, 64, 112, 112), (352, 2048, 7, 7), (64, 512, 33, 33)]
SMALL = [(2, 64, 28, 28), (8, 256, 14, 14), (4, 1024, 7, 7), (2, 2048, 8, 8)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Without thresholds: small planes, float64, which is slow on many GPUs, and data as after a ReLU.
OTHERS = [((512, 1024, 8, 8), dtype, False, False) for dtype in DTYPES]
OTHERS += [((32, 256, 64, 64), torch.float64, layout, False) for layout in (False, True)]
OTHERS += [((32, 256, 64, 64), torch.float16, layout, True) for layout in (False, True)]
# Arrays that each pass reads or writes.
PASSES = {"sums": 1, "y": 2, "backward sums": 2, "dx": 3}
THEIRS = {"sync": "SyncBatchNorm", "batch_norm": "batch_norm"}
MIN_OF_COPY, MAX_OF_THEIRS, MAX_KERNELS = 0.85, {"sync": 0.75, "batch_norm": 1.0}, 4
BYTES_AT_ONCE, SMALL_CALLS = 2e9, 50
EXPLANATION = """\
Passes: bytes per second, relative to a copy. Ours: the kernels of forward and backward, without the
operator's waits for their ends. SyncBatchNorm: PyTorch's, on one GPU, without its exchange.
batch_norm: by cuDNN or, where marked n, by PyTorch's own kernel. Eager: launched from Python, for
small layers. Calls: forward and backward as the operator runs them, each to the end of its wait."""


class Clock:
    """Measures times on the device. `notes`: reasons to doubt them."""

    def __init__(self, repetitions):
        self.repetitions = repetitions
        self.notes = []
        self._stream = torch.cuda.Stream()

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)

    def captured(self, name, functions, rounds):
        """A function that calls all of `functions`, `rounds` times, with one launch, or without
        capture if that fails."""

        def eager():
            for _ in range(rounds):
                for function in functions:
                    function()

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="relaxed")
                try:
                    eager()
                finally:
                    graph.capture_end()
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
        except RuntimeError as error:
            torch.cuda.synchronize()
            reason = str(error).splitlines()[0]
            self.note(f"{name} was not captured, so its times include Python: {reason}")
            return eager
        return graph.replay

    def microseconds(self, candidates, rounds, capture=True):
        """The time of one call of each candidate, as the median over the repetitions. candidates:
        {name: [functions to call in turn]}."""
        torch.cuda.synchronize()
        blocks = {}
        for name, functions in candidates.items():
            # The first launch loads a kernel, and must not be captured.
            with torch.cuda.stream(self._stream):
                for function in functions:
                    function()
            torch.cuda.synchronize()
            blocks[name] = self.captured(name, functions, rounds) if capture else None
            if not blocks[name]:
                blocks[name] = lambda functions=functions: [f() for f in functions * rounds]
        events = {name: [] for name in blocks}
        for _ in range(self.repetitions):
            for name, block in blocks.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                block()
                end.record()
                events[name].append((begin, end))
        torch.cuda.synchronize()
        return {
            name: statistics.median(begin.elapsed_time(end) for begin, end in pairs)
            * (1e3 / (len(candidates[name]) * rounds))
            for name, pairs in events.items()
        }


def peak_bandwidth():
    """The theoretical bandwidth in bytes per second according to the driver, or None."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        kilohertz, bits = ctypes.c_int(), ctypes.c_int()
        device = torch.cuda.current_device()
        for value, attribute in ((kilohertz, 36), (bits, 37)):
            if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                return None
    except (OSError, AttributeError):
        return None
    # Two transfers per cycle.
    return 2e3 * kilohertz.value * bits.value / 8 or None


def kernels_of(function):
    """The names of our kernels that a function launches, or None if the profiler finds none."""
    try:
        # The first time, the profiler may miss some.
        for _ in range(2):
            with torch.profiler.profile() as profile:
                function()
                torch.cuda.synchronize()
        on_device = torch.autograd.DeviceType.CUDA
        names = [event.name for event in profile.events() if event.device_type == on_device]
    except Exception:  # Times do not depend on the profiler.
        return None
    return [name for name in names if "gluon_syncbn" in name] or None


def of_pytorch(x, dy, gamma, beta):
    """Functions for forward and backward of torch.nn.SyncBatchNorm and of batch_norm, and the name
    of batch_norm's implementation."""
    channels, count = len(gamma), x.numel() // len(gamma)
    running = torch.zeros_like(gamma), torch.ones_like(gamma)
    counts = torch.full((1,), count, dtype=gamma.dtype, device=x.device)
    whole_counts = torch.full((1,), count, dtype=torch.int32, device=x.device)

    def synchronized():
        mean, inv_std = torch.batch_norm_stats(x, 1e-5)
        mean, inv_std = torch.batch_norm_gather_stats_with_counts(
            *(x, mean.view(1, channels), inv_std.view(1, channels)),
            *(*running, 0.1, 1e-5, counts),
        )
        torch.batch_norm_elemt(x, gamma, beta, mean, inv_std, 1e-5)
        sums = torch.batch_norm_backward_reduce(dy, x, mean, inv_std, gamma, True, True, True)
        torch.batch_norm_backward_elemt(dy, x, mean, inv_std, gamma, sums[0], sums[1], whole_counts)

    leaf = x.detach().requires_grad_()
    weights = [each.detach().requires_grad_() for each in (gamma, beta)]

    def forward():
        return torch.nn.functional.batch_norm(leaf, *running, *weights, True, 0.1, 1e-5)

    def batch_norm():
        torch.autograd.grad(forward(), [leaf, *weights], dy)

    return synchronized, batch_norm, forward().grad_fn.name()


class Set:
    """The arrays of one call, for our kernels and PyTorch's."""

    def __init__(self, library, shape, dtype, channels_last, after_relu=False):
        n, channels, height, width = shape
        stored = (n, height, width, channels) if channels_last else shape
        parameter = torch.float64 if dtype == torch.float64 else torch.float32
        x = torch.randn(stored, device="cuda") * 2
        x = (x.clamp(min=0) if after_relu else x + 3).to(dtype)
        dy = torch.randn(stored, device="cuda").to(dtype)
        gamma, beta = (torch.randn(channels, device="cuda", dtype=parameter) for _ in range(2))
        self.layer = Layer(library, x, dy, gamma, beta, channels_last)
        self.ours()
        order = (0, 3, 1, 2)
        theirs = [each.permute(order) if channels_last else each for each in (x, dy)]
        self.sync, self.batch_norm, self.kind = of_pytorch(*theirs, gamma, beta)

    def copy(self):
        self.layer.y.copy_(self.layer.x)

    def ours(self):
        self.layer.forward()
        self.layer.backward()


def microseconds_of_calls(layer, repetitions):
    """The time of a forward and a backward of the operator, with the host's waits for both."""
    times = []
    torch.cuda.synchronize()
    for _ in range(repetitions):
        begin = time.perf_counter()
        layer.calls(SMALL_CALLS)
        times.append((time.perf_counter() - begin) / SMALL_CALLS * 1e6)
    return statistics.median(times)


def measure(library, clock, shape, dtype, channels_last, large, after_relu=False):
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(2, math.ceil(4 * cache / size)) if large else 1
    sets = [Set(library, shape, dtype, channels_last, after_relu) for _ in range(count)]
    rounds = max(1, round(BYTES_AT_ONCE / (size * count))) if large else SMALL_CALLS
    row = {
        "shape": shape,
        "dtype": str(dtype).replace("torch.", ""),
        "layout": "NHWC" if channels_last else "NCHW",
        "megabytes": size / 1e6,
        "large": large,
        "after_relu": after_relu,
        "calls": rounds * count,
        "batch_norm_kind": sets[0].kind,
    }

    def times(candidates, capture=True):
        functions = {name: [pick(each) for each in sets] for name, pick in candidates.items()}
        return clock.microseconds(functions, rounds, capture)

    alone = {
        "copy": lambda s: s.copy,
        "sums": lambda s: s.layer.forward_sums,
        "y": lambda s: s.layer.normalize,
        "backward sums": lambda s: s.layer.backward_sums,
        "dx": lambda s: s.layer.input_gradient,
    }
    together = {
        "ours": lambda s: s.ours,
        "sync": lambda s: s.sync,
        "batch_norm": lambda s: s.batch_norm,
    }
    if large:
        row["us"] = times({**alone, **together})
        row["copy_bytes_per_second"] = rate = 2 * size / row["us"]["copy"] * 1e6
        row["of_copy"] = {
            name: arrays * size / row["us"][name] * 1e6 / rate for name, arrays in PASSES.items()
        }
        peak = peak_bandwidth()
        if peak and rate > peak:
            clock.note(
                f"a copy of {shape} {row['dtype']} ran at {rate / 1e9:.0f} GB/s, above the card's "
                f"{peak / 1e9:.0f}: part of it was in the cache"
            )
    else:
        row["us"] = times(together)
        row["eager_us"] = times(together, capture=False)
        row["calls_us"] = microseconds_of_calls(sets[0].layer, clock.repetitions)
    return row


class Thresholds:
    """Counts for each threshold the figures that were compared with it, and lists those that miss
    it."""

    def __init__(self):
        self.thresholds = {}

    def compare(self, threshold, held, what):
        entry = self.thresholds.setdefault(
            threshold, {"threshold": threshold, "of": 0, "missed": []}
        )
        entry["of"] += 1
        if not held:
            entry["missed"].append(what)

    def judge(self, row):
        """A row of a large shape."""
        what = f"{tuple(row['shape'])} {row['dtype']} {row['layout']}"
        for name, part in row["of_copy"].items():
            threshold = f"passes below {MIN_OF_COPY} of a copy"
            self.compare(threshold, part >= MIN_OF_COPY, f"{what}: {name} at {part:.2f}")
        for name, most in MAX_OF_THEIRS.items():
            part = row["us"]["ours"] / row["us"][name]
            threshold = f"shapes above {most} of PyTorch's {THEIRS[name]}"
            self.compare(threshold, part <= most, f"{what}: {part:.2f}")


def count_kernels(library, clock, thresholds):
    """Yields a row for each small layer."""
    for shape in SMALL:
        for channels_last in (False, True):
            each = Set(library, shape, DTYPES[0], channels_last)
            row = {"shape": shape, "layout": "NHWC" if channels_last else "NCHW"}
            passes = {"forward": each.layer.forward, "backward": each.layer.backward}
            for name, function in passes.items():
                row[name] = kernels = kernels_of(function)
                if not kernels:
                    clock.note("the profiler found no kernels, so they were not counted")
                    return
                threshold = f"{name}s of small layers with more than {MAX_KERNELS} kernels"
                what = f"{shape} {row['layout']}: {len(kernels)}"
                thresholds.compare(threshold, len(kernels) <= MAX_KERNELS, what)
            yield row


HEAD = ["x", "dtype", "layout", "MB", "copy GB/s", *PASSES]
HEAD += ["ours us", "/ SyncBatchNorm", "/ batch_norm"]
HEAD += ["eager: ours us", "/ SyncBatchNorm", "/ batch_norm", "calls us"]


def cells(row):
    def compared(times):
        yield f"{times['ours']:.1f}"
        for name in THEIRS:
            native = name == "batch_norm" and "Cudnn" not in row["batch_norm_kind"]
            yield f"{times['ours'] / times[name]:.2f}{' n' if native else ''}"

    yield "x".join(map(str, row["shape"]))
    yield row["dtype"] + (", after ReLU" if row["after_relu"] else "")
    yield from (row["layout"], f"{row['megabytes']:.0f}")
    if row["large"]:
        yield f"{row['copy_bytes_per_second'] / 1e9:.0f}"
        yield from (f"{row['of_copy'][name]:.2f}" for name in PASSES)
        yield from compared(row["us"])
        yield from [""] * (2 + len(THEIRS))
    else:
        yield from [""] * (1 + len(PASSES))
        yield from compared(row["us"])
        yield from compared(row["eager_us"])
        yield f"{row['calls_us']:.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    library, clock, thresholds = Library(options.library), Clock(options.repetitions), Thresholds()
    peak = peak_bandwidth()
    result = {
        "finished": False,
        "gpu": torch.cuda.get_device_name(0),
        "pytorch": torch.__version__,
        "library": library.description,
        "peak_bytes_per_second": peak,
        "rows": [],
        "failed": [],
    }

    def write():
        result.update(thresholds=list(thresholds.thresholds.values()), notes=clock.notes)
        if options.json:
            Path(options.json).write_text(json.dumps(result, indent=1))

    print(EXPLANATION)
    print(f"{result['gpu']}, " + (f"{peak / 1e9:.0f} GB/s" if peak else "peak bandwidth unknown"))
    print("| " + " | ".join(HEAD) + " |")
    print("| " + " | ".join("---" for _ in HEAD) + " |")
    layouts = (False, True)
    plain = False
    tasks = [(s, d, layout, plain, "large") for s in LARGE for d in DTYPES for layout in layouts]
    tasks += [(shape, DTYPES[0], layout, plain, "small") for shape in SMALL for layout in layouts]
    tasks += [(*other, "other") for other in OTHERS]
    for shape, dtype, channels_last, after_relu, kind in tasks:
        large = kind != "small"
        try:
            row = measure(library, clock, shape, dtype, channels_last, large, after_relu)
        except Exception as error:
            traceback.print_exc()
            result["failed"].append(f"{shape} {dtype}: {type(error).__name__}: {error}")
            # Raises if the CUDA error has made the device unusable.
            torch.cuda.synchronize()
            continue
        result["rows"].append(row)
        if kind == "large":
            thresholds.judge(row)
        print("| " + " | ".join(cells(row)) + " |")
        write()
    # Last, as the profiler may slow down later calls.
    result["kernels"] = list(count_kernels(library, clock, thresholds))
    counts = [f"{len(row['forward'])} + {len(row['backward'])}" for row in result["kernels"]]
    print("Kernels of the operator on small layers, forward + backward:", ", ".join(counts) or "?")
    result["finished"] = True
    write()
    for text in clock.notes:
        print(f"Note: {text}.")
    for threshold in result["thresholds"]:
        print(f"{len(threshold['missed'])} of {threshold['of']} {threshold['threshold']}")
    for text in result["failed"]:
        print(f"FAILED {text}")
    return bool(result["failed"])


if __name__ == "__main__":
    sys.exit(main())
