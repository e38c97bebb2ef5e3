"""One batch through layers, by one process or by its shards in several."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn
from runs import MODES, contexts, run, shards

SAMPLES = 16
# How the batch is split over so many devices, in the order of ranks and of devices.
SIZES = {1: [16], 2: [5, 11], 3: [6, 1, 9], 4: [1, 3, 7, 5], 8: [1, 3, 2, 1, 4, 2, 2, 1]}
DTYPES = "float16", "float32", "float64"
LAYERS = {
    "images": ((SAMPLES, 5, 7, 6), {}),
    "vectors": ((SAMPLES, 9), {"center": False}),
    "channels last": ((SAMPLES, 4, 3, 6), {"axis": -1, "scale": False, "momentum": 0.7}),
}


class Share:
    """The devices of this process and their part of the batch. By default all of it on one."""

    def __init__(self, rank=0, processes=1, count=1):
        sizes = SIZES[processes * count]
        edges = np.cumsum([0, *sizes])
        self.sizes = sizes[rank * count : (rank + 1) * count]
        self.part = slice(edges[rank * count], edges[(rank + 1) * count])
        self.devices = contexts(count)


def data(shape, dtype, seed):
    """Values with a mean that is far from 0 in some channels."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) + 100 * generator.random(shape[1:])).astype(dtype)


def layers(share, dtype, mode, **arguments):
    """y, dx and running statistics of each layer after three steps."""
    results = {}
    for seed, (name, (shape, own)) in enumerate(LAYERS.items()):
        block = sbn.SyncBatchNorm(prefix=f"{name}_".replace(" ", "_"), **own, **arguments)
        block.initialize(mx.init.One(), ctx=share.devices)
        block.cast(dtype)
        if MODES[mode] is not None:
            block.hybridize(**MODES[mode])
        x, dy = data(shape, dtype, seed), data(shape, dtype, 10 + seed)
        result = run(block, x[share.part], dy[share.part], share.sizes, share.devices, steps=3)
        for key in ("y", "dx", "running_mean", "running_var"):
            results[f"{name} {key}"] = getattr(result, key)
    return results


def shared(share, dtype, mode, **arguments):
    """A layer that is called twice in a pass, and one with two passes before one backward."""
    results = {}
    shape = LAYERS["images"][0]
    x, z, dy = (data(shape, dtype, seed)[share.part] for seed in (1, 2, 3))
    for name, kind in (("twice", Twice), ("two passes", TwoPasses)):
        net = kind(prefix=f"{name}_".replace(" ", "_"), **arguments)
        net.initialize(ctx=share.devices)
        net.cast(dtype)
        if MODES[mode] is not None:
            net.hybridize(**MODES[mode])
        xs, zs, dys = (shards(array, share.sizes, share.devices) for array in (x, z, dy))
        for array in (*xs, *zs):
            array.attach_grad()
        for _ in range(2):
            with autograd.record():
                ys = [net(x) if kind is Twice else net(x) + 2 * net(z) for x, z in zip(xs, zs)]
            autograd.backward(ys, dys)
        results[f"{name} y"] = np.concatenate([y.asnumpy() for y in ys])
        results[f"{name} dx"] = np.concatenate([x.grad.asnumpy() for x in xs])
        if kind is TwoPasses:
            results[f"{name} dz"] = np.concatenate([z.grad.asnumpy() for z in zs])
        for key in ("running_mean", "running_var"):
            values = [array.asnumpy() for array in getattr(net.norm, key).list_data()]
            assert all((value == values[0]).all() for value in values)
            results[f"{name} {key}"] = values[0]
    return results


class TwoPasses(nn.HybridBlock):
    def __init__(self, prefix, **arguments):
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.norm = sbn.SyncBatchNorm(in_channels=5, **arguments)

    def hybrid_forward(self, F, x):
        return self.norm(x)


class Twice(TwoPasses):
    def hybrid_forward(self, F, x):
        return self.norm(F.relu(self.norm(x)) + 0.5 * x)


def same_bits(share, some=False, **arguments):
    """Everything whose bits do not depend on the split, by name."""
    hybridized = [] if some else [(layers, "static_shape"), (shared, "static_shape")]
    results = {}
    for part, mode in [(layers, "imperative"), (shared, "imperative"), *hybridized]:
        for dtype in DTYPES:
            found = part(share, dtype, mode, **arguments)
            results.update({f"{dtype} {mode} {name}": a for name, a in found.items()})
    return results


# What the workers run.


def bits(world):
    for count in (1, 2):
        share = Share(world.rank, world.size, count)
        world.save(f"bits {count}", **same_bits(share, some=world.size > 2))
