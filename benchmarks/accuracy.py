"""Compares the outputs of three layers with batch normalization in float64.

Prints a Markdown table of the largest error of y, in standard deviations of y. The data are float32
with standard deviation 1: with several means on one CPU context, and split unevenly over two
contexts, 1 + 7 images.
"""

import os

# MXNet reads these when it starts; see the README on several CPU contexts.
os.environ["MXNET_CPU_TEMP_COPY"] = "256"
os.environ["MXNET_CPU_PARALLEL_RAND_COPY"] = "64"

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm

from harness import table

SHAPE = (8, 16, 32, 32)
MEANS = (0, 1e2, 1e3, 1e4, 1e5)
KINDS = {
    "`gluon.nn.BatchNorm`": lambda devices: mx.gluon.nn.BatchNorm(),
    "`gluon.contrib.nn.SyncBatchNorm`": lambda devices: ContribSyncBatchNorm(num_devices=devices),
    "`gluon_syncbn.SyncBatchNorm`": lambda devices: sbn.SyncBatchNorm(),
}


def reference(x):
    x = x.astype("float64")
    centered = x - x.mean(axis=(0, 2, 3), keepdims=True)
    # Again, to remove the rounding error of the mean.
    centered -= centered.mean(axis=(0, 2, 3), keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis=(0, 2, 3), keepdims=True) + 1e-5)


def error(kind, mean, sizes):
    generator = np.random.default_rng(0)
    x = (generator.standard_normal(SHAPE) + mean).astype("float32")
    devices = [mx.cpu(i) for i in range(len(sizes))]
    layer = KINDS[kind](len(devices))
    layer.initialize(ctx=devices)
    parts = np.split(x, np.cumsum(sizes)[:-1])
    shards = [mx.nd.array(part, ctx=device) for part, device in zip(parts, devices)]
    # Deferred initialization, one device after the other.
    for shard in shards:
        layer(shard).wait_to_read()
    with mx.autograd.record():
        ys = [layer(shard) for shard in shards]
    y = np.concatenate([y.asnumpy() for y in ys])
    return np.abs(y - reference(x)).max()


def main():
    columns = {f"mean {mean:g}": (mean, SHAPE[:1]) for mean in MEANS}
    columns["1 + 7 images, mean 0"] = 0, (1, 7)
    rows = [[kind, *(f"{error(kind, *of):.0e}" for of in columns.values())] for kind in KINDS]
    print(table(["error of y", *columns], rows))


if __name__ == "__main__":
    main()
