"""Messages of layers: how many there are, what they share with Python, and how waits are judged."""

from functools import partial
from types import SimpleNamespace

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from distributed_stores import FileStore, calls
from distributed_worker import error_of, forget_errors
from gluon_syncbn.distributed.answers import (
    ABSENT,
    ARRIVED,
    FAILED,
    FINISHED,
    GONE,
    SILENT,
    Answer,
    describe,
)
from gluon_syncbn.distributed.peers import Peers
from mxnet import autograd
from programs import wait_until
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
    for kind, text, mean_of_other in pair.reported("failed"):
        assert kind == "MXNetError" and mean_of_other == 0.5
        assert "the processes have lost each other" in text and "a device was lost" in text


def test_a_probe_shows_who_has_arrived(pair):
    assert pair.reported("probed")[1] == {
        "waits": ['a title ("probed" 3)', 'a title ("probed" 2)'],
        "before": ["arrived", "arrived", "absent"],
        "after": ["arrived", "arrived", "absent"],
    }


def judge_of(answers, has_finished=False, exchange="title (key 1)"):
    """Peers.judge for these answers, by the seconds that it has waited, of 10, and the list of
    the errors with which it gives up."""
    peers = Peers.__new__(Peers)
    peers.rank, peers.name, peers._knows_others = 0, "the store", True
    peers._liveness = SimpleNamespace(
        probe=lambda *_: answers,
        describe=describe,
        has_finished=has_finished,
        exchanges=lambda: ([(exchange, 0.0)], [("A, forward call 0 (0 handshake 1)", 0.0)]),
    )
    given_up = []
    peers._give_up = given_up.append
    arguments = {"timeout": 10, "probes": 1, "members": range(2), "in_memory": True}
    return partial(peers.judge, "title", exchange, "", **arguments), given_up


@pytest.mark.parametrize("state", [ARRIVED, ABSENT, SILENT, GONE])
@pytest.mark.parametrize("status", [None, (FAILED, "a bad batch"), (FINISHED, "")])
@pytest.mark.parametrize("has_finished", [False, True])
def test_who_has_finished_may_still_come_to_the_exchange_after_the_scripts(
    state, status, has_finished
):
    """Where a link is cut, one process learns later than the other that both have finished."""
    look, given_up = judge_of({1: Answer(state, status=status)}, has_finished)
    look(1)
    assert all("give SyncGroup(timeout=...) more" in text for text in given_up)
    ends = status and (status[0] == FAILED or not has_finished)
    assert bool(given_up) == (state != ARRIVED and bool(ends) or state == GONE)


@pytest.mark.parametrize(
    "own, others, differ",
    [
        ("2 handshake 1", ["1 handshake 1"], True),
        ("2 handshake 1", ["1 backward -1 1"], True),
        ("1 backward -1 1", ["2 handshake 1"], True),
        ("1 forward -1 in groups of 2 6", ["1 handshake 2"], True),
        ("2 handshake 1", ["0 handshake 1"], False),  # This process was there.
        ("2 handshake 1", ["1 handshake 1", "2 handshake 1"], False),
        ("2 handshake 1", ["1 forward -1 5"], False),  # It may come one batch later.
        ("1 backward -1 1", ["2 backward -1 1"], False),  # They come in any order.
        ("2 handshake 1", ["1 handshake 1", None], False),  # Just now.
        ("2 handshake 1", ['"key" 1'], False),
        ("key 1", ["1 handshake 1"], False),
    ],
)
def test_processes_that_wait_in_first_calls_of_different_layers(own, others, differ):
    seconds = 0.1 if None in others else 0.9
    in_flight = tuple((f"B, call 0 ({key})", seconds) for key in others if key)
    state = ARRIVED if own in others else ABSENT
    look, given_up = judge_of({1: Answer(state, in_flight)}, exchange=f"A, call 0 ({own})")
    look(1)
    assert ["not built the same net" in text for text in given_up] == [True] * differ


def test_processes_that_have_all_come_are_looked_at_once_more():
    """After a suspension of all, some come before others can see it."""
    answers = {1: Answer(ARRIVED)}
    judge, given_up = judge_of(answers)
    judge(10.5)
    assert not given_up
    answers[1] = Answer(ABSENT)
    judge(10.5)
    answers[1] = Answer(ARRIVED)
    judge(11.5)
    assert len(given_up) == 2
