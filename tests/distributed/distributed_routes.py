"""What goes over routes, when they are opened, and what probes find of it."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from distributed_cluster import wait_until
from distributed_stores import FileStore, calls
from distributed_worker import error_of, forget_errors
from mxnet import autograd
from runs import contexts


def new_layer(devices=None, **arguments):
    layer = sbn.SyncBatchNorm(in_channels=3, momentum=0, **arguments)
    layer.initialize(ctx=devices)
    return layer


def step(world, layer, backward=True):
    """The running mean, which is that of the ranks where all have exchanged."""
    devices = layer.running_mean.list_ctx()
    with autograd.record():
        xs = [mx.nd.full((2, 3, 4), world.rank, ctx=device) for device in devices]
        losses = [(layer(x) ** 2).sum() for x in xs]
    if backward:
        autograd.backward(losses)
    mx.nd.waitall()
    return float(layer.running_mean.data(devices[0])[0].asscalar())


def messages(world):
    """How often a layer of two devices exchanges each key, which routes Python opens, and the
    means."""
    layer = new_layer(contexts(2))
    route, opened = world.reducer.route, []
    reported = {"number": layer._layer.id}

    def noted(key, *args, **options):
        opened.append(str(key))
        return route(key, *args, **options)

    def report(name, steps, **options):
        before = calls(world)
        opened.clear()
        means = [step(world, layer, **options) for _ in range(steps)]
        reported[name] = [calls(world) - before, list(opened), means]

    world.reducer.route = noted
    report("passes", 10, backward=False)
    report("first step", 1)
    report("steps", 4)
    layer.collect_params().reset_ctx(contexts(4)[2:])
    report("moved", 1)
    del world.reducer.route
    world.report("messages", reported)


def keys_of_users(world):
    """Any text, also such as layers have."""
    layer = new_layer()
    number = layer._layer.id
    keys = ["", " ", "join", "a (b 3)", f"{number} forward -1", f"{number} handshake"]
    mine = np.full(2, 1.0 + world.rank)
    sums = {key: world.reducer.all_reduce(key, mine).tolist() for key in keys}
    steps = [batch.shape for batch in sbn.distributed.join([mx.nd.ones((1, 3))])]
    world.report("keys of users", [list(sums.values()), len(steps), step(world, layer)])


def another_store(world):
    """How often a layer calls each of two stores, when it moves to another one and back."""
    layer = new_layer()
    files = sbn.SyncGroup(store=FileStore(world.folder, world.rank, world.size), timeout=30)
    counts, means = [], []
    for group in (world.group, files, world.group):
        sbn.set_default_group(group)
        before = sum(calls(world).values()), sum(files.store.calls.values())
        means += [step(world, layer) for _ in range(2)]
        after = sum(calls(world).values()), sum(files.store.calls.values())
        counts.append([now - then for now, then in zip(after, before)])
    world.report("another store", [counts, means])


def a_group_that_failed(world):
    """It stays so, though its layer has routes, and another one with the same store goes on."""
    groups = [sbn.SyncGroup(store=world.reducer, timeout=world.timeout) for _ in range(2)]
    layers = [new_layer(group=group) for group in groups]
    for layer in layers:
        step(world, layer)
    # Without a word to the other process, which does the same.
    groups[0]._processes._break("a device was lost")
    failed = error_of(lambda: step(world, layers[0]))[:2]
    forget_errors()
    world.report("failed", [*failed, step(world, layers[1])])


def probed(world):
    """Rank 1 probes rank 0, which waits for it in the third of three exchanges."""
    found = {}

    def gather():
        world.reducer.all_gather("probed", np.ones(3), title="a title")

    def probe(call):
        return world.reducer.peers._liveness.probe(f'a title ("probed" {call})')[0]

    gather()
    gather()
    if world.rank == 1:
        wait_until(lambda: probe(3).state == "arrived")
        found["waits"] = probe(3).in_flight[0][0], probe(3).last[0]
        found["before"] = [probe(call).state for call in (2, 3, 4)]
    gather()
    if world.rank == 1:
        found["after"] = [probe(call).state for call in (2, 3, 4)]
    world.barrier()
    world.report("probed", found)
