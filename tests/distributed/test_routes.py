"""Messages of layers: how many there are, and what they share with Python."""

import gluon_syncbn as sbn
import mxnet as mx
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
    """It stays so, though its layer has routes, and with it the process."""
    groups = [sbn.SyncGroup(store=world.reducer, timeout=world.timeout) for _ in range(2)]
    layers = [new_layer(group=group) for group in groups]
    for layer in layers:
        step(world, layer)
    # Without a word to the other process, which does the same.
    groups[0]._processes._break("a device was lost")
    failed = error_of(lambda: step(world, layers[0]))[:2]
    world.report("failed", [*failed, *error_of(lambda: step(world, layers[1]))[:2]])
    forget_errors()


def test_one_message_per_layer_pass_and_process(pair):
    """Python only opens the route of a key, and passes without backward take no new keys."""
    for reported in pair.reported("messages"):
        handshake, forward, backward = (
            f"{reported['number']} {name}" for name in ("handshake", "forward -1", "backward -1")
        )
        assert reported == {
            "number": reported["number"],
            "passes": [{handshake: 1, forward: 10}, [handshake, forward], [0.5] * 10],
            "first step": [{forward: 1, backward: 1}, [backward], [0.5]],
            "steps": [{forward: 4, backward: 4}, [], [0.5] * 4],
            # A layer that has other devices is known by now.
            "moved": [{forward: 1, backward: 1}, [forward, backward], [0.5]],
        }


def test_a_layer_takes_the_store_of_its_group(pair):
    for counts, means in pair.reported("another store"):
        # The handshake, and two messages in each of two steps.
        assert counts == [[5, 0], [0, 5], [4, 0]]
        assert means == [0.5] * 6


def test_a_group_that_failed_stays_so(pair):
    for kind, text, *then in pair.reported("failed"):
        assert [kind, text] == then and kind == "MXNetError"
        assert "the processes have lost each other" in text and "a device was lost" in text
