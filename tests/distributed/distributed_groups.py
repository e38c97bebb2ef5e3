"""Groups smaller than the cluster, and processes that have not built the same net."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from distributed_bits import SIZES, data
from distributed_stores import added_by_store
from distributed_worker import backward, error_of, forget_errors
from mxnet import autograd
from mxnet.gluon import SymbolBlock, nn
from runs import contexts, shards

SHAPE = 16, 3, 4, 5


def one_layer(sizes, start, devices, steps=2, **arguments):
    """What comes out of a layer for the samples from `start` on, the statistics of each device."""
    layer = sbn.SyncBatchNorm(in_channels=SHAPE[1], **arguments)
    layer.initialize(ctx=devices)
    part = slice(start, start + sum(sizes))
    x, dy = (data(SHAPE, "float32", seed)[part] for seed in (5, 6))
    xs, dys = shards(x, sizes, devices), shards(dy, sizes, devices)
    for shard in xs:
        shard.attach_grad()
    for _ in range(steps):
        with autograd.record():
            ys = [layer(shard) for shard in xs]
        autograd.backward(ys, dys)
    return {
        "y": np.concatenate([y.asnumpy() for y in ys]),
        "dx": np.concatenate([shard.grad.asnumpy() for shard in xs]),
        "running_mean": np.stack([array.asnumpy() for array in layer.running_mean.list_data()]),
        "running_var": np.stack([array.asnumpy() for array in layer.running_var.list_data()]),
    }


def expected(devices, group_size):
    """The same of a layer for each group that is a net of its own, on one device."""
    sizes = SIZES[devices]
    groups = [sizes[i : i + group_size] for i in range(0, devices, group_size)]
    starts = np.cumsum([0, *map(sum, groups)])
    found = [one_layer([sum(g)], s, contexts(1)) for g, s in zip(groups, starts)]
    return {
        name: np.concatenate(
            [np.repeat(f[name], group_size if "running" in name else 1, axis=0) for f in found]
        )
        for name in found[0]
    }


# What the workers run.


def sizes_of_groups(world):
    sums = {}
    for count in (1, 2):
        total = world.size * count
        sizes = SIZES[total]
        mine = slice(world.rank * count, (world.rank + 1) * count)
        start, devices = sum(sizes[: mine.start]), contexts(count)
        for k in (1, 2, 4, 8)[: count + 2]:
            before = added_by_store(world)
            group = sbn.SyncGroup(store=world.reducer, timeout=world.timeout, group_size=k)
            found = one_layer(sizes[mine], start, devices, group=group)
            world.save(f"groups of {k} of {total}", **found)
            sums[f"{k} of {total}"] = len(added_by_store(world) - before)
    world.report("sums of groups", sums)
    world.report("moving", moving(world))
    joins = world.reducer._memory.joins
    world.report("memory", [joins(ranks) for ranks in ((0, 1), (2, 3), range(world.size))])
    world.report("sets", list(getattr(world.reducer, "_sets", {}).items()))


def moving(world):
    """The means of a layer that goes from group to group, with a store that it has used before."""
    layer = sbn.SyncBatchNorm(in_channels=3, momentum=0)
    layer.initialize()
    means = []
    for k in (None, 2, None, 2):
        group = sbn.SyncGroup(store=world.reducer, timeout=world.timeout, group_size=k)
        sbn.set_default_group(group)
        for _ in range(3):
            with autograd.record():
                layer(mx.nd.full((2, 3), world.rank))
            means.append(float(layer.running_mean.data()[0].asscalar()))
    sbn.set_default_group(world.group)
    return means


def use(net, channels=3, dtype="float32"):
    """One step. Returns the error of its forward or backward."""
    x = mx.nd.ones((2, channels, 3, 3), dtype=dtype)
    x.attach_grad()

    def step():
        (loss,) = backward(net, [x])
        loss.asnumpy()
        x.grad.asnumpy()

    found = error_of(step)
    forget_errors()
    return found


def in_a_graph(group, momentum=0.9):
    norm = nn.BatchNorm(prefix="norm_", momentum=momentum, in_channels=3)
    data = mx.sym.var("data")
    block = SymbolBlock(norm(data), data, norm.collect_params())
    return sbn.convert_sync_batchnorm(block, group=group)


def other_nets(world):
    """Rank 1 builds another one than the others, which is found out in each case."""
    changes = {
        "nothing": {},
        "name": {"prefix": "other_"},
        "channels": {"channels": 4},
        "group size": {"group_size": world.size},
        "dtype": {"dtype": "float64"},
        "axis": {"axis": -1},
        "momentum": {"momentum": 0.5},
        "activation": {"activation": "relu"},
        "changed later": {"change": lambda layer: layer._kwargs.update(momentum=0.5)},
        "graph": {"make": in_a_graph, "momentum": 0.5},
        # What processes need not have in common.
        "timeout": {"timeout": 2 * world.timeout},
        "frozen": {"change": lambda layer: layer.collect_params().setattr("grad_req", "null")},
        "nothing again": {},
    }

    def layer_of(group, prefix="norm_", **settings):
        return sbn.SyncBatchNorm(prefix=prefix, group=group, **settings)

    def errors(
        channels=3,
        dtype="float32",
        group_size=None,
        timeout=world.timeout,
        make=layer_of,
        change=lambda layer: None,
        **settings,
    ):
        # In a group of its own, as after an error the processes of one have lost each other.
        group = sbn.SyncGroup(store=world.reducer, timeout=timeout, group_size=group_size)
        layer = make(group, **settings)
        layer.cast(dtype)
        layer.initialize()
        change(layer)
        return [use(layer, channels, dtype) for _ in range(2)]

    other = world.rank == 1
    reported = {
        name: errors(**{k: value for k, value in change.items() if other or k == "make"})
        for name, change in changes.items()
    }
    reported["layers"] = layers_differ(world, 2 if other else 3)
    world.report("other nets", reported)


def layers_differ(world, count):
    group = sbn.SyncGroup(store=world.reducer, timeout=5)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(count):
            net.add(sbn.SyncBatchNorm(group=group))
    net.initialize()
    return use(net)
