"""What goes over native channels and what through Python, and that channels end in time."""

import time

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from distributed_stores import FileStore, calls
from distributed_worker import error_of, forget_errors
from mxnet import autograd


def new_layer(**arguments):
    layer = sbn.SyncBatchNorm(in_channels=3, momentum=0, **arguments)
    layer.initialize()
    return layer


def step(world, layer, backward=True):
    """The running mean, which is that of the ranks where all have exchanged."""
    (device,) = layer.running_mean.list_ctx()
    x = mx.nd.full((2, 3, 4), world.rank, ctx=device)
    with autograd.record():
        loss = (layer(x) ** 2).sum()
    if backward:
        loss.backward()
    mx.nd.waitall()
    return float(layer.running_mean.data(device)[0].asscalar())


def through_python(world, steps=3):
    """How many messages take the way through Python, in the first step and in all others."""
    layer = new_layer()
    exchange, keys = world.reducer.exchange, []

    def counted(key, *args, **options):
        keys.append(str(key))
        return exchange(key, *args, **options)

    # Where the group's exchange finds it.
    world.reducer.exchange = counted
    reported = {"first mean": step(world, layer), "first": list(keys)}
    keys.clear()
    reported["means"] = [step(world, layer) for _ in range(steps)]
    reported["steps"] = list(keys)
    # From now on again, until it has a channel.
    layer.collect_params().reset_ctx(mx.cpu(1))
    reported["moved mean"] = step(world, layer)
    reported["moved"] = list(keys)
    del world.reducer.exchange
    reported["number"] = layer._layer.id
    world.report("through python", reported)


def passes_without_backward(world, passes=10):
    """The keys that appear in evaluations in training mode, and how often each is exchanged."""
    layer = new_layer()
    before = calls(world)
    for _ in range(passes):
        step(world, layer, backward=False)
    step(world, layer)
    world.report("passes", [layer._layer.id, calls(world) - before])


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
    """A layer that moves to another store and back."""
    layer = new_layer()
    files = sbn.SyncGroup(store=FileStore(world.folder, world.rank, world.size), timeout=30)
    reported = {"means": []}
    for name, group in (("reducer", world.group), ("files", files), ("again", world.group)):
        sbn.set_default_group(group)
        before = sum(calls(world).values()), sum(files.store.calls.values())
        reported["means"] += [step(world, layer) for _ in range(2)]
        after = sum(calls(world).values()), sum(files.store.calls.values())
        reported[name] = [now - then for now, then in zip(after, before)]
    world.report("another store", reported)


def a_group_that_failed(world):
    """It stays so, and another one with the same store goes on."""
    groups = [sbn.SyncGroup(store=world.reducer, timeout=world.timeout) for _ in range(2)]
    layers = [new_layer(group=group) for group in groups]
    for layer in layers:
        step(world, layer)
    # Without a word to the other process, which does the same.
    groups[0]._exchange._fail = None
    groups[0]._fail("a device was lost")
    reported = {"failed": error_of(lambda: step(world, layers[0]))}
    forget_errors()
    reported["other"] = [step(world, layers[1]) for _ in range(2)]
    world.report("failed", reported)


def probed(world):
    """Rank 1 probes rank 0, which waits for it."""
    reducer = world.reducer

    def gather():
        reducer.all_gather("probed", np.ones(3), title="a title")

    gather()
    gather()
    reported = {}
    if world.rank == 1:
        name = 'a title ("probed" {})'

        def probe(call):
            return reducer._liveness.probe(name.format(call))[0]

        deadline = time.monotonic() + 10
        while probe(3).state != "arrived" and time.monotonic() < deadline:
            time.sleep(0.01)
        answer = probe(3)
        reported = {
            "second": probe(2).state,
            "waits": [answer.state, answer.in_flight[0][0], answer.last[0]],
            "next": probe(4).state,
        }
    gather()
    if world.rank == 1:
        reported["exchanged"] = probe(3).state
        reported["next after"] = probe(4).state
    world.barrier()
    world.report("probed", reported)
