"""The CUDA kernels against PyTorch in float64, with fresh random data in every run: all dtypes and
layouts, ragged shapes, arrays at odd addresses, batches in 1 to 8 shards.

    python tests/gpu/check_kernels.py LIBRARY [--json FILE] [--seed N]
"""

import argparse
import json
import math
import secrets
import sys
import traceback
from pathlib import Path

import torch

from surface import Layer, Library

# The largest difference, relative to the largest value. float32 has some eight roundings, and
# 16-bit results are rounded once more.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 5e-7,
    torch.float16: 2**-11 + 5e-7,
    torch.bfloat16: 2**-8 + 5e-7,
}
SHAPES = [
    (8, 64, 56, 56),
    (8, 3, 7, 7),
    (9, 5, 33, 31),
    (8, 130, 1, 2),
    (16, 21, 17, 1),
    (8, 2048, 7, 7),
    (8, 1, 300, 300),
    (64, 100, 1, 1),
]
# The number of shards, and how many values after a multiple of 128 bytes their arrays begin.
SHARDS = [(1, 0), (1, 1), (2, 0), (3, 5), (4, 3), (5, 0), (6, 2), (7, 7), (8, 1)]


def relative_error(result, reference, size):
    """Relative to the largest of `size`; NaN if any value is."""
    result, reference = result.double(), reference.double()
    size = size.abs().max().item()
    return (result - reference).abs().max().item() / (size or 1)


def reference(x, dy, gamma, beta, channels_last, epsilon=1e-5):
    """y, dx, dgamma and dbeta in float64, each with the size that its error is relative to: itself,
    or for sums, which may cancel, the sum of the terms' magnitudes."""
    x, dy, gamma, beta = (each.double() for each in (x, dy, gamma, beta))
    axes = [i for i in range(x.dim()) if i != (x.dim() - 1 if channels_last else 1)]
    shape = [1 if i in axes else -1 for i in range(x.dim())]
    mean = x.mean(axes, keepdim=True)
    variance = (x - mean).square().mean(axes, keepdim=True)
    inv_std = (variance + epsilon).rsqrt()
    xhat = (x - mean) * inv_std
    gamma, beta = gamma.reshape(shape), beta.reshape(shape)
    means = dy.mean(axes, keepdim=True), (dy * xhat).mean(axes, keepdim=True)
    dx = (dy - means[0] - xhat * means[1]) * inv_std * gamma
    y, terms = xhat * gamma + beta, dy * xhat
    sums = [(each.sum(axes), each.abs().sum(axes)) for each in (terms, dy)]
    return (y, y), (dx, dx), *sums


def at(tensor, shift, channels_last):
    """A copy that begins `shift` values after a multiple of 128 bytes, with NaN around it."""
    guard = 64
    memory = torch.full(
        (tensor.numel() + 2 * guard + shift,), math.nan, dtype=tensor.dtype, device=tensor.device
    )
    copy = memory[guard + shift : guard + shift + tensor.numel()].view(tensor.shape)
    copy.copy_(tensor)
    return copy, memory


def guards_intact(memory, numel, shift):
    return bool(memory[: 64 + shift].isnan().all() and memory[64 + shift + numel :].isnan().all())


def run_shards(library, x, dy, gamma, beta, channels_last, shards, shift):
    """The results for the batch, split into shards as for several devices."""
    borders = [len(x) * i // shards for i in range(shards + 1)]
    layers, memories = [], []
    for begin, end in zip(borders, borders[1:]):
        arrays = [x[begin:end], dy[begin:end]]
        poison = torch.full_like(arrays[0], math.nan)
        own = [at(each, shift and shift + i, channels_last) for i, each in enumerate(arrays)]
        results = [at(poison, shift and shift + i, channels_last) for i in (2, 3)]
        memories += [(m, c.numel(), shift and shift + i) for i, (c, m) in enumerate(own + results)]
        (x_part, dy_part), (y, dx) = [c for c, _ in own], [c for c, _ in results]
        layers.append(Layer(library, x_part, dy_part, gamma, beta, channels_last, y, dx))

    count = sum(layer.count for layer in layers)
    for layer in layers:
        layer.forward_sums()
    sums = torch.stack([layer.sums for layer in layers])
    for layer in layers:
        layer.prepare_forward(sums, count)
        layer.normalize()
        layer.backward_sums()
    sums = torch.stack([layer.gradient_sums for layer in layers])
    for layer in layers:
        layer.prepare_backward(sums, count)
        layer.input_gradient()
    torch.cuda.synchronize()
    assert all(guards_intact(*each) for each in memories), "written outside of an array"
    return (
        torch.cat([layer.y for layer in layers]),
        torch.cat([layer.dx for layer in layers]),
        layers[0].statistics,
        sum(layer.dgamma.double() for layer in layers),
        sum(layer.dbeta.double() for layer in layers),
    )


def check(library, shape, dtype, channels_last, offset, generator):
    """The largest error of y, dx, dgamma and dbeta, relative to its tolerance."""
    device = torch.device("cuda")

    def draw(*size):
        values = torch.randn(size, generator=generator, device=device, dtype=torch.float64)
        return values.to(torch.float64 if dtype == torch.float64 else torch.float32)

    order = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)
    stored = [shape[i] for i in order]
    channels = shape[1]
    x, dy = (draw(*stored) + offset).to(dtype), (draw(*stored) + 0.3).to(dtype)
    if offset == 0:
        # Some channels are as after a ReLU.
        x[..., 1::2].clamp_(min=0) if channels_last else x[:, 1::2].clamp_(min=0)
    gamma, beta = draw(channels), draw(channels)
    expected = reference(x, dy, gamma, beta, channels_last)
    first, worst = None, 0
    for shards, shift in SHARDS:
        if shards > len(x):
            continue
        got = run_shards(library, x, dy, gamma, beta, channels_last, shards, shift)
        pairs = zip((got[0], got[1], got[3], got[4]), expected)
        for name, (result, (wanted, size)) in zip(("y", "dx", "dgamma", "dbeta"), pairs):
            error = relative_error(result, wanted, size)
            allowed = TOLERANCE[dtype if name in ("y", "dx") else gamma.dtype]
            # With few values the variance may be small compared with epsilon, and dx less accurate.
            if not error <= allowed * (4 if shape[0] * shape[2] * shape[3] < 50 else 1):
                raise AssertionError(
                    f"{name} has an error of {error:.3g} with {shards} shards at {shift}"
                )
            worst = max(worst, error / allowed)
        if first is None:
            first = got
        for name, a, b in zip(("y", "dx", "statistics"), first, got):
            if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
                raise AssertionError(f"{name} has different bits with {shards} shards at {shift}")
    return worst


def check_all(library, seed, out=print, progress=lambda failed: None):
    """A line for each failure. progress(failed) is called after each dtype."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    failed = []
    for dtype in TOLERANCE:
        worst = 0
        for shape in SHAPES:
            for channels_last in (False, True):
                for offset in (0, 1e3 if dtype in (torch.float32, torch.float64) else 3):
                    what = f"{dtype} {shape} {'NHWC' if channels_last else 'NCHW'} at {offset:g}"
                    try:
                        arguments = (library, shape, dtype, channels_last, offset, generator)
                        worst = max(worst, check(*arguments))
                    except (AssertionError, RuntimeError) as error:
                        failed.append(f"{what}: {error}")
                        out(f"FAILED {failed[-1]}")
                        if not isinstance(error, AssertionError):
                            out(traceback.format_exc())
                        # Raises if the CUDA error has made the device unusable.
                        torch.cuda.synchronize()
        out(f"{dtype}: the largest error is {worst:.2f} of the tolerance")
        progress(failed)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--json", help="where to write the results")
    options = parser.parse_args()
    print("seed", options.seed)
    library = Library(options.library)

    def write(failed, finished=False):
        if options.json:
            result = {"seed": options.seed, "library": library.description}
            result.update(finished=finished, failed=failed)
            Path(options.json).write_text(json.dumps(result, indent=1))

    failed = check_all(library, options.seed, progress=write)
    write(failed, finished=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
