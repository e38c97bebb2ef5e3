"""Measures the CUDA kernels: each pass compared with a copy, and all passes with PyTorch's.

    python benchmarks/gpu/bench.py LIBRARY [--json FILE] [--repetitions N]

Calls are captured in CUDA graphs, to exclude the time of Python. Large layers alternate between
several sets of arrays, four times the size of the cache, so that no data is cached and every call
also writes back dirty lines of the call before. Small layers use one set, as their data is cached
in a net too. Measurements that are compared alternate.
"""

import functools
import math
import statistics
import sys
import traceback
from pathlib import Path

import torch

from surface import Layer, Library

# Last, as benchmarks/ has a bench.py of its own.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402

# 64 MB or more in each dtype.
LARGE = [(32, 256, 64, 64), (64, 64, 112, 112), (352, 2048, 7, 7), (64, 512, 33, 33)]
SMALL = [(2, 64, 28, 28), (8, 256, 14, 14), (4, 1024, 7, 7), (2, 2048, 8, 8)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["NCHW", "NHWC"]
# Shape, dtype, layout, kind. Only those of the kind "large" have guards. "Other": small planes, and
# float64, which is slow on many GPUs.
CASES = [(shape, dtype, lay, "large") for shape in LARGE for dtype in DTYPES for lay in LAYOUTS]
CASES += [(shape, torch.float32, layout, "small") for shape in SMALL for layout in LAYOUTS]
CASES += [((512, 1024, 8, 8), dtype, "NCHW", "other") for dtype in DTYPES]
CASES += [((32, 256, 64, 64), torch.float64, layout, "other") for layout in LAYOUTS]
CASES += [((32, 256, 64, 64), torch.float16, layout, "after ReLU") for layout in LAYOUTS]
# The function of a pass, and the arrays that it reads or writes.
PASSES = {
    "sums": ("forward_sums", 1),
    "y": ("normalize", 2),
    "backward sums": ("backward_sums", 2),
    "dx": ("input_gradient", 3),
}
# The name, and the largest part of its time that ours may take.
THEIRS = {"sync": ("SyncBatchNorm", 0.75), "batch_norm": ("batch_norm", 1.0)}
MIN_OF_COPY = 0.85
BYTES_AT_ONCE, SMALL_CALLS = 2e9, 50
EXPLANATION = """\
Passes: bytes per second, relative to a copy. Ours: the kernels of forward and backward, without the
operator's waits for their ends. SyncBatchNorm: PyTorch's, on one GPU, without its exchange.
batch_norm: by cuDNN or, where marked n, by PyTorch's own kernel. Calls, for small layers: forward
and backward as the operator runs them, each to the end of its wait."""
HEAD = ["x", "dtype", "layout", "MB", "copy GB/s", *PASSES]
HEAD += ["ours us", "/ SyncBatchNorm", "/ batch_norm", "calls us"]


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
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="relaxed")
                try:
                    _call_all(functions, rounds)
                finally:
                    graph.capture_end()
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
        except RuntimeError as error:
            torch.cuda.synchronize()
            reason = str(error).splitlines()[0]
            self.note(f"{name} was not captured, so its times include Python: {reason}")
            return functools.partial(_call_all, functions, rounds)
        return graph.replay

    def microseconds(self, candidates, rounds, capture=True):
        """The time of one call of each candidate, as the median over the repetitions. candidates:
        {name: [functions to call in turn]}."""
        torch.cuda.synchronize()
        blocks = {}
        for name, functions in candidates.items():
            # The first launch loads a kernel, and must not be captured.
            with torch.cuda.stream(self._stream):
                _call_all(functions, 1)
            torch.cuda.synchronize()
            block = functools.partial(_call_all, functions, rounds)
            blocks[name] = self.captured(name, functions, rounds) if capture else block
        timed = {name: functools.partial(_between_events, block) for name, block in blocks.items()}
        events = harness.interleave(timed, self.repetitions, warm_up=0)
        torch.cuda.synchronize()
        return {
            name: statistics.median(begin.elapsed_time(end) for begin, end in pairs)
            * (1e3 / (len(candidates[name]) * rounds))
            for name, pairs in events.items()
        }


def _call_all(functions, rounds):
    for _ in range(rounds):
        for function in functions:
            function()


def _between_events(block):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    block()
    end.record()
    return begin, end


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


def measure(library, clock, shape, dtype, layout, kind):
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    small = kind == "small"
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    count = 1 if small else max(2, math.ceil(4 * cache / size))
    arguments = library, shape, dtype, layout == "NHWC", kind == "after ReLU"
    sets = [Set(*arguments) for _ in range(count)]
    rounds = SMALL_CALLS if small else max(1, round(BYTES_AT_ONCE / (size * count)))
    names = ["ours", *THEIRS] if small else ["copy", "ours", *THEIRS]
    candidates = {name: [getattr(each, name) for each in sets] for name in names}
    if not small:
        for name, (function, _) in PASSES.items():
            candidates[name] = [getattr(each.layer, function) for each in sets]
    row = {
        "shape": shape,
        "dtype": str(dtype).replace("torch.", ""),
        "layout": layout,
        "kind": kind,
        "megabytes": size / 1e6,
        "calls": rounds * count,
        "batch_norm_kind": sets[0].kind,
        "us": clock.microseconds(candidates, rounds),
    }
    if small:
        # With the host's waits.
        calls = functools.partial(sets[0].layer.calls, SMALL_CALLS)
        seconds = statistics.median(harness.seconds_of(calls) for _ in range(clock.repetitions))
        row["calls_us"] = seconds / SMALL_CALLS * 1e6
    else:
        row["copy_bytes_per_second"] = rate = 2 * size / row["us"]["copy"] * 1e6
        row["of_copy"] = {
            name: arrays * size / row["us"][name] * 1e6 / rate
            for name, (_, arrays) in PASSES.items()
        }
    return row


def comparisons(rows):
    for row in rows:
        where = f"{row['shape']} {row['dtype']} {row['layout']}"
        if row["kind"] == "large":
            for name, part in row["of_copy"].items():
                title = "time of a pass / a copy of its bytes"
                yield title, 1 / MIN_OF_COPY, 1 / part, f"{where}: {name}"
            for name, (title, most) in THEIRS.items():
                yield f"time / PyTorch's {title}", most, row["us"]["ours"] / row["us"][name], where


def cells(row):
    dtype = f"{row['dtype']}, after ReLU" if row["kind"] == "after ReLU" else row["dtype"]
    yield from (row["shape"], dtype, row["layout"], f"{row['megabytes']:.0f}")
    if row["kind"] == "small":
        yield from [""] * (1 + len(PASSES))
    else:
        yield f"{row['copy_bytes_per_second'] / 1e9:.0f}"
        yield from (f"{part:.2f}" for part in row["of_copy"].values())
    yield f"{row['us']['ours']:.1f}"
    for name in THEIRS:
        native = name == "batch_norm" and "Cudnn" not in row["batch_norm_kind"]
        yield f"{row['us']['ours'] / row['us'][name]:.2f}{' n' if native else ''}"
    yield f"{row['calls_us']:.1f}" if row["kind"] == "small" else ""


def main():
    parser = harness.options(__doc__, repetitions=15)
    parser.add_argument("library")
    args = parser.parse_args()
    library, clock = Library(args.library), Clock(args.repetitions)
    result = {"gpu": torch.cuda.get_device_name(0), "pytorch": torch.__version__}
    result.update(library=library.description, notes=clock.notes, rows=[], failed=[])
    print(EXPLANATION, result["gpu"], harness.table(HEAD, []), sep="\n")
    for case in CASES:
        try:
            row = measure(library, clock, *case)
        except Exception as error:
            traceback.print_exc()
            result["failed"].append(f"{case}: {type(error).__name__}: {error}")
            # Raises if the CUDA error has made the device unusable.
            torch.cuda.synchronize()
            continue
        result["rows"].append(row)
        print(harness.row(cells(row)))
        harness.write({**result, "finished": False}, args.json)
    result.update(guards=harness.judge(comparisons(result["rows"])), finished=True)
    notes = [f"Note: {text}." for text in clock.notes]
    notes += [f"FAILED {text}" for text in result["failed"]]
    harness.finish(result, notes, args)
    return bool(result["failed"])


if __name__ == "__main__":
    sys.exit(main())
