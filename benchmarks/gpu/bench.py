"""How fast the CUDA kernels are: each pass beside a copy, and all together beside PyTorch's.

python benchmarks/gpu/bench.py LIBRARY [--json FILE]
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))
from surface import Layer, Library  # noqa: E402

# 64 MB or more in each dtype.
SHAPES = [(32, 256, 64, 64), (64, 64, 112, 112), (352, 2048, 7, 7), (32, 512, 33, 33)]
SMALL = [(2, 64, 28, 28), (8, 256, 14, 14), (4, 1024, 7, 7)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Arrays that each pass reads or writes.
PASSES = {"sums": 1, "y": 2, "backward sums": 2, "dx": 3}
LEAST_OF_COPY, MOST_OF_SYNC, MOST_OF_CUDNN = 0.85, 0.75, 1.0


class Timer:
    """Medians of times on the device, each with the cache cold."""

    def __init__(self, repetitions):
        self.repetitions = repetitions
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(max(4 * cache, 256 << 20), dtype=torch.uint8, device="cuda")

    def milliseconds(self, function, cold=True):
        for _ in range(3):
            function()
        events = []
        for _ in range(self.repetitions):
            if cold:
                self.flush.fill_(1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events)


def of_pytorch(x, dy, gamma, beta):
    """Forward and backward as torch.nn.SyncBatchNorm does them, and as cuDNN does."""
    channels, count = len(gamma), x.numel() // len(gamma)
    running = torch.zeros_like(gamma), torch.ones_like(gamma)
    counts = torch.full((1,), count, dtype=torch.float32, device=x.device)
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

    def cudnn():
        y = torch.nn.functional.batch_norm(leaf, *running, *weights, True, 0.1, 1e-5)
        torch.autograd.grad(y, [leaf, *weights], dy)

    return synchronized, cudnn


def measure(library, timer, shape, dtype, channels_last, cold=True):
    n, channels, height, width = shape
    stored = (n, height, width, channels) if channels_last else shape
    x = (torch.randn(stored, device="cuda") * 2 + 3).to(dtype)
    dy = torch.randn(stored, device="cuda").to(dtype)
    gamma, beta = torch.randn(channels, device="cuda"), torch.randn(channels, device="cuda")
    layer = Layer(library, x, dy, gamma, beta, channels_last)
    layer.forward()
    formulae = layer.formulae.clone()
    layer.backward()
    backward_formulae = layer.formulae.clone()

    def with_formulae(values, function):
        layer.formulae.copy_(values)
        return function

    size = x.numel() * x.element_size()
    row = {
        "shape": shape,
        "dtype": str(dtype).replace("torch.", ""),
        "layout": "NHWC" if channels_last else "NCHW",
        "megabytes": size / 1e6,
    }
    copy = timer.milliseconds(lambda: layer.y.copy_(x), cold)
    row["copy_ms"], rate = copy, 2 * size / copy
    passes = {
        "sums": layer.forward_sums,
        "y": layer.normalize,
        "backward sums": layer.backward_sums,
        "dx": layer.input_gradient,
    }
    for name, function in passes.items():
        values = backward_formulae if name == "dx" else formulae
        time = timer.milliseconds(with_formulae(values, function), cold)
        row[f"{name}_ms"] = time
        row[f"{name}_of_copy"] = PASSES[name] * size / time / rate

    def ours():
        layer.forward()
        layer.backward()

    order = (0, 3, 1, 2)
    theirs = [each.permute(order) if channels_last else each for each in (x, dy)]
    synchronized, cudnn = of_pytorch(*theirs, gamma, beta)
    row["ours_ms"] = timer.milliseconds(ours, cold)
    for name, function in (("pytorch_sync", synchronized), ("pytorch_batch_norm", cudnn)):
        row[f"{name}_ms"] = timer.milliseconds(function, cold)
        row[f"ours_over_{name}"] = row["ours_ms"] / row[f"{name}_ms"]
    return row


def main(library, repetitions, out=print):
    """Rows of figures, and what misses a bar."""
    timer = Timer(repetitions)
    rows, missed = [], []
    head = ["x", "dtype", "layout", "MB", "copy GB/s", *(f"{name} / copy" for name in PASSES)]
    head += ["ours ms", "/ sync", "/ batch_norm"]
    out("| " + " | ".join(head) + " |")
    out("| " + " | ".join("---" for _ in head) + " |")
    for large, shapes in ((True, SHAPES), (False, SMALL)):
        for shape in shapes:
            for dtype in DTYPES if large else DTYPES[:1]:
                for channels_last in (False, True):
                    row = measure(library, timer, shape, dtype, channels_last)
                    row["large"] = large
                    rows.append(row)
                    ratios = [row[f"{name}_of_copy"] for name in PASSES]
                    cells = [str(shape), row["dtype"], row["layout"], f"{row['megabytes']:.0f}"]
                    cells.append(f"{2 * row['megabytes'] / row['copy_ms']:.0f}")
                    cells += [f"{ratio:.2f}" for ratio in ratios]
                    cells.append(f"{row['ours_ms']:.3f}")
                    beside = row["ours_over_pytorch_sync"], row["ours_over_pytorch_batch_norm"]
                    cells += [f"{ratio:.2f}" for ratio in beside]
                    out("| " + " | ".join(cells) + " |")
                    if not large:
                        continue
                    what = f"{shape} {row['dtype']} {row['layout']}"
                    for name, ratio in zip(PASSES, ratios):
                        if not ratio >= LEAST_OF_COPY:
                            missed.append(f"{what}: {name} at {ratio:.2f} of a copy")
                    for ratio, most, name in zip(
                        beside, (MOST_OF_SYNC, MOST_OF_CUDNN), ("synchronized", "batch_norm")
                    ):
                        if not ratio <= most:
                            missed.append(f"{what}: {ratio:.2f} of PyTorch's {name}")
    for line in missed:
        out(f"missed: {line}")
    return rows, missed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--json")
    parser.add_argument("--repetitions", type=int, default=30)
    options = parser.parse_args()
    figures, below = main(Library(options.library), options.repetitions)
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": figures, "missed": below}, indent=1))
