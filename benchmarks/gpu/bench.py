"""How fast the CUDA kernels are: each pass beside a copy, and all together beside PyTorch's.

    python benchmarks/gpu/bench.py LIBRARY [--json FILE] [--repetitions N]

Calls are captured in CUDA graphs, so that Python has no part in the times. Large arrays come in
several sets, used in turn, which together are four times the cache: nothing is in it, and what a
call leaves there for others to write back, the call before left to it. Small layers keep to one
set, as their data is in the cache in a net too. All that is compared is measured in turns.
"""

import argparse
import ctypes
import json
import math
import statistics
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))
from surface import Layer, Library  # noqa: E402

# 64 MB or more in each dtype.
LARGE = [(32, 256, 64, 64), (64, 64, 112, 112), (352, 2048, 7, 7), (64, 512, 33, 33)]
SMALL = [(2, 64, 28, 28), (8, 256, 14, 14), (4, 1024, 7, 7), (2, 2048, 8, 8)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Figures alone: small planes, float64, which GPUs without many units for it compute slowly, and
# data behind a relu.
OTHERS = [((512, 1024, 8, 8), dtype, False, False) for dtype in DTYPES]
OTHERS += [((32, 256, 64, 64), torch.float64, layout, False) for layout in (False, True)]
OTHERS += [((32, 256, 64, 64), torch.float16, layout, True) for layout in (False, True)]
# Arrays that each pass reads or writes.
PASSES = {"sums": 1, "y": 2, "backward sums": 2, "dx": 3}
THEIRS = {"sync": "SyncBatchNorm", "batch_norm": "batch_norm"}
LEAST_OF_COPY, MOST_OF_THEIRS, MOST_KERNELS = 0.85, {"sync": 0.75, "batch_norm": 1.0}, 4
BYTES_AT_ONCE, SMALL_CALLS = 2e9, 50
EXPLANATION = """\
Passes: bytes per second, by those of a copy. Ours: the kernels of forward and backward, and a small
one for the statistics. The operator computes those on the host instead, so it waits for the sums,
and for its end, in forward and in backward. PyTorch's SyncBatchNorm as on one GPU, without its
exchange. batch_norm: by cuDNN, or where marked n, by PyTorch's own kernel. Eager: launched by
Python, for small layers."""


class Clock:
    """Times on the device. `notes`: what makes them doubtful."""

    def __init__(self, repetitions):
        self.repetitions = repetitions
        self.notes = []
        self._stream = torch.cuda.Stream()

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)

    def captured(self, name, functions, rounds):
        """A function that calls all of `functions`, so many rounds, with one launch; the calls
        themselves where they cannot be captured."""

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
            self.note(f"{name} was not captured, so Python has a part in its times: {reason}")
            return eager
        return graph.replay

    def microseconds(self, candidates, rounds, capture=True):
        """Of one call of each: medians over the repetitions, measured in turns. candidates:
        {name: [functions that are called in turn]}."""
        torch.cuda.synchronize()
        blocks = {}
        for name, functions in candidates.items():
            # Kernels are loaded at their first launch, which must not be a captured one.
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
    """Bytes a second by the data sheet, as the driver knows it, or None."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        kilohertz, bits = ctypes.c_int(), ctypes.c_int()
        device = torch.cuda.current_device()
        for value, attribute in ((kilohertz, 36), (bits, 37)):
            if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                return None
    except (OSError, AttributeError):
        return None
    # Two transfers a cycle.
    return 2e3 * kilohertz.value * bits.value / 8 or None


def kernels_of(function):
    """The names of our kernels that it launches, or None where the profiler does not tell."""
    try:
        # The first time it may miss some.
        for _ in range(2):
            with torch.profiler.profile() as profile:
                function()
                torch.cuda.synchronize()
        on_device = torch.autograd.DeviceType.CUDA
        names = [event.name for event in profile.events() if event.device_type == on_device]
    except Exception:  # No figure of speed depends on it.
        return None
    return [name for name in names if "gluon_syncbn" in name] or None


def of_pytorch(x, dy, gamma, beta):
    """Forward and backward as torch.nn.SyncBatchNorm does them, as batch_norm does, and what does
    the latter."""
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
    """The arrays of one call, of us and of PyTorch."""

    def __init__(self, library, shape, dtype, channels_last, behind_relu=False):
        n, channels, height, width = shape
        stored = (n, height, width, channels) if channels_last else shape
        parameter = torch.float64 if dtype == torch.float64 else torch.float32
        x = torch.randn(stored, device="cuda") * 2
        x = (x.clamp(min=0) if behind_relu else x + 3).to(dtype)
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

    def operators_forward(self):
        """The kernels that the operator launches."""
        self.layer.forward_sums()
        self.layer.prepare_forward()
        self.layer.normalize()


def measure(library, clock, shape, dtype, channels_last, large, behind_relu=False):
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(2, math.ceil(4 * cache / size)) if large else 1
    sets = [Set(library, shape, dtype, channels_last, behind_relu) for _ in range(count)]
    rounds = max(1, round(BYTES_AT_ONCE / (size * count))) if large else SMALL_CALLS
    row = {
        "shape": shape,
        "dtype": str(dtype).replace("torch.", ""),
        "layout": "NHWC" if channels_last else "NCHW",
        "megabytes": size / 1e6,
        "large": large,
        "behind_relu": behind_relu,
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
    return row


class Bars:
    """What is asked of the figures, how often, and where they miss it."""

    def __init__(self):
        self.thresholds = {}

    def ask(self, threshold, held, what):
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
            threshold = f"passes below {LEAST_OF_COPY} of a copy"
            self.ask(threshold, part >= LEAST_OF_COPY, f"{what}: {name} at {part:.2f}")
        for name, most in MOST_OF_THEIRS.items():
            part = row["us"]["ours"] / row["us"][name]
            threshold = f"shapes above {most} of PyTorch's {THEIRS[name]}"
            self.ask(threshold, part <= most, f"{what}: {part:.2f}")


def count_kernels(library, clock, thresholds):
    """Of small layers, a row each."""
    for shape in SMALL:
        for channels_last in (False, True):
            each = Set(library, shape, DTYPES[0], channels_last)
            row = {"shape": shape, "layout": "NHWC" if channels_last else "NCHW"}
            passes = {"forward": each.operators_forward, "backward": each.layer.backward}
            for name, function in passes.items():
                row[name] = kernels = kernels_of(function)
                if not kernels:
                    clock.note("the profiler tells of no kernels, so they were not counted")
                    return
                threshold = f"{name}s of small layers with more than {MOST_KERNELS} kernels"
                what = f"{shape} {row['layout']}: {len(kernels)}"
                thresholds.ask(threshold, len(kernels) <= MOST_KERNELS, what)
            yield row


HEAD = ["x", "dtype", "layout", "MB", "copy GB/s", *PASSES]
HEAD += ["ours us", "/ SyncBatchNorm", "/ batch_norm"]
HEAD += ["eager: ours us", "/ SyncBatchNorm", "/ batch_norm"]


def cells(row):
    def beside(times):
        yield f"{times['ours']:.1f}"
        for name in THEIRS:
            native = name == "batch_norm" and "Cudnn" not in row["batch_norm_kind"]
            yield f"{times['ours'] / times[name]:.2f}{' n' if native else ''}"

    yield "x".join(map(str, row["shape"]))
    yield row["dtype"] + (", behind relu" if row["behind_relu"] else "")
    yield from (row["layout"], f"{row['megabytes']:.0f}")
    if row["large"]:
        yield f"{row['copy_bytes_per_second'] / 1e9:.0f}"
        yield from (f"{row['of_copy'][name]:.2f}" for name in PASSES)
        yield from beside(row["us"])
        yield from [""] * (1 + len(THEIRS))
    else:
        yield from [""] * (1 + len(PASSES))
        yield from beside(row["us"])
        yield from beside(row["eager_us"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    library, clock, thresholds = Library(options.library), Clock(options.repetitions), Bars()
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
    for shape, dtype, channels_last, behind_relu, kind in tasks:
        large = kind != "small"
        try:
            row = measure(library, clock, shape, dtype, channels_last, large, behind_relu)
        except Exception as error:
            traceback.print_exc()
            result["failed"].append(f"{shape} {dtype}: {type(error).__name__}: {error}")
            # After some errors of CUDA nothing works any more, and this raises.
            torch.cuda.synchronize()
            continue
        result["rows"].append(row)
        if kind == "large":
            thresholds.judge(row)
        print("| " + " | ".join(cells(row)) + " |")
        write()
    # Last, as the profiler may slow down what comes after it.
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
