"""A worker fails or is late: the errors of the others name it and say why. chaos.py tries all other
kinds of failures."""

import os
import time

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import psutil
import pytest
from distributed_cluster import Cluster
from distributed_worker import backward, error_of, forget_errors
from programs import MARK
from runs import contexts

LAST = 1  # The rank of the worker that something happens to, of two.
DEVICES = contexts(3)


def first_steps(world):
    """Returns a step of a layer whose group has the first two devices. Without a Trainer, in whose
    messages a process waits inside MXNet."""
    group = sbn.SyncGroup(devices=DEVICES[:2], store=world.reducer, timeout=world.timeout)
    norm = sbn.SyncBatchNorm(prefix="norm_", in_channels=3, group=group)
    norm.initialize(ctx=DEVICES)

    def step(devices=DEVICES[:2]):
        losses = backward(norm, [mx.nd.ones((2, 3, 4), ctx=device) for device in devices])
        for array in [*losses, *norm.gamma.list_grad()]:
            array.wait_to_read()

    for _ in range(3):
        step()
    return step


def goes_on(world, step):
    """Until there is an error, which the script dies of."""
    try:
        while True:
            step()
            time.sleep(0.005)
    except Exception as error:
        world.report("error", [type(error).__name__, str(error), time.time()])
        raise


def leaves_early(world):
    """As at the end of an epoch in which it has a batch less."""
    step = first_steps(world)
    if world.rank == LAST:
        world.report("left", time.time())
        return
    goes_on(world, step)


def dies_of_a_name_that_is_not_utf_8(world):
    step = first_steps(world)
    if world.rank == LAST:
        world.report("left", time.time())
        raise OSError("/data/b\udce9.jpg")
    goes_on(world, step)


def computes(world):
    """For longer than the timeout, in one call that Python waits for."""
    first_steps(world)
    x = mx.nd.random.normal(shape=(600, 600)) / 25
    x.wait_to_read()
    begin = time.monotonic()
    (mx.nd.dot(x, x)).wait_to_read()
    world.report("left", time.time())
    for _ in range(int(1.5 * world.timeout / (time.monotonic() - begin))):
        x = mx.nd.dot(x, x).clip(-1, 1)
    while time.monotonic() < begin + 1.4 * world.timeout:
        x = mx.nd.dot(x, x).clip(-1, 1)
        x.asnumpy()


def hangs_after_a_long_call(world):
    """The other one waits in MXNet."""
    gradient = mx.nd.zeros(1)
    world.kv.init(0, gradient)
    # Meanwhile the other one may work for longer than the timeout.
    if world.rank == LAST:
        time.sleep(1.5 * world.timeout)
    world.reducer.all_reduce("validation", 0, timeout=1000)
    world.report("left", time.time())
    if world.rank == LAST:
        while not world.reducer.member.lost:
            time.sleep(0.05)
        world.barrier()
    world.kv.pushpull(0, gradient, out=gradient)
    gradient.asnumpy()


def one_device_is_not_of_the_group(world):
    """The script of that process catches the error and goes on without the others."""
    step = first_steps(world)
    if world.rank != LAST:
        goes_on(world, step)
    time.sleep(0.5)
    world.report("left", time.time())
    kind, text, _ = error_of(lambda: step([DEVICES[0], DEVICES[2]]))
    world.report("error", [kind, text, time.time()])
    forget_errors()
    deadline = time.monotonic() + 20
    while not (world.folder / "error-0.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def fails_at_random(world):
    """One process, in a random step. No weights are saved."""
    random = np.random.default_rng(int(os.environ["SEED"]))
    rank, failing = random.integers(2), random.integers(1, 5)
    kind, device = random.integers([4, 2])
    net = mx.gluon.nn.HybridSequential(prefix="net_")
    for _ in range(2):
        net.add(mx.gluon.nn.Dense(3, in_units=3), sbn.SyncBatchNorm(in_channels=3))
    net.initialize(ctx=DEVICES[:2])

    def spoilt(x):
        return x * mx.nd.random.normal(0, -1, x.shape, ctx=x.context)

    def step(number):
        now = number == failing and world.rank == rank
        with mx.autograd.record():
            losses = []
            for i, x in enumerate(mx.nd.ones((2, 3), ctx=device) for device in DEVICES[:2]):
                if now and i == device and kind == 0:
                    raise ValueError("scale of the cause")
                y = net(spoilt(x) if now and i == device and kind == 1 else x)
                losses.append(spoilt(y) if now and i == device and kind == 2 else y)
        mx.autograd.backward(losses)
        if now and kind == 3:
            raise ValueError("scale of the cause")
        for array in random.permutation([0, 1, 2, 3]):
            [*losses, *net[0].weight.list_grad()][array].wait_to_read()

    for number in range(8):
        step(number)
    net.save_parameters(str(world.folder / f"saved-{world.rank}"))


def the_server_stops_at_the_end(world):
    """After all scripts, and the last barrier."""
    barrier = world.kv._barrier

    def barrier_and_stop():
        barrier()
        for process in psutil.process_iter(["environ"]):
            its = process.info["environ"] or {}
            same = all(its.get(name) == os.environ[name] for name in ("DMLC_PS_ROOT_PORT", MARK))
            if same and its["DMLC_ROLE"] == "server":
                process.suspend()
                world.report("left", time.time())

    world.kv._barrier = barrier_and_stop


TIMEOUT = 6.0
# What processes may need until they end, on a machine that has other things to do.
SLACK = 8.0


@pytest.fixture
def ended(tmp_path):
    """Runs a topic to its end, without a launcher. Something happens to rank 1."""

    def ended(topic, codes):
        topics, timeout = [f"test_distributed_failures:{topic}"], str(TIMEOUT)
        cluster = Cluster(tmp_path, 2, topics, by_hand=True, GLUON_SYNCBN_TIMEOUT=timeout)
        try:
            assert cluster.wait() == codes, cluster.all_output()
        finally:
            cluster.clean()
        return cluster

    return ended


def check_survivor(cluster, *words):
    """Rank 0 has raised an error with all these words before the time was up, and ended soon."""
    kind, text, when = cluster.reported("error")[0]
    assert kind == "MXNetError", text
    assert when - cluster.reported("left")[1] < 0.9 * TIMEOUT
    assert time.time() - when < SLACK
    for word in ("SyncBatchNorm 'norm', ", *words):
        assert word in text
    assert "terminate called" not in cluster.all_output()


def test_a_worker_has_one_batch_less(ended):
    cluster = ended("leaves_early", [1, 1])
    words = "rank 1 (reached the end of the script)", "gluon_syncbn.distributed.join"
    check_survivor(cluster, *words)
    # Both have the same text.
    text, _ = cluster.reported("error")[0][1:]
    assert text[text.index("rank 0 has waited") :] in cluster.all_output()


def test_an_error_that_is_not_utf_8_reaches_the_other_processes(ended):
    cluster = ended("dies_of_a_name_that_is_not_utf_8", [1, 1])
    check_survivor(cluster, r"Missing: rank 1 (failed: OSError: /data/b\udce9.jpg)")


def test_the_error_of_one_device_reaches_the_other_processes(ended):
    """Though the process goes on."""
    cluster = ended("one_device_is_not_of_the_group", [1, 1])
    why = "SyncBatchNorm 'norm' was called on cpu(2), but its devices are 2 (cpu(0), cpu(1))"
    check_survivor(cluster, f"Missing: rank 1 (failed: {why}")
    assert why in cluster.reported("error")[1][1]


def test_a_server_that_stops_at_the_end(ended):
    cluster = ended("the_server_stops_at_the_end", [1, 1])
    assert 0.9 * TIMEOUT < time.time() - cluster.reported("left")[0] < TIMEOUT + SLACK
    assert cluster.all_output().count("The KVStore's server has not answered for 6 s at the ") == 2


@pytest.mark.parametrize("seed", range(3))
def test_a_random_failure(seed, ended, monkeypatch):
    """Both processes end with an error, which names the cause."""
    monkeypatch.setenv("SEED", str(seed))
    cluster = ended("fails_at_random", [1, 1])
    assert "scale" in cluster.all_output()
    for worker in (-2, -1):  # The other one may know only where it was.
        text = cluster.text(worker)
        assert "scale" in text or "n earlier operation on cpu(" in text, text
    assert not list(cluster.folder.glob("saved*"))


@pytest.mark.long
def test_a_call_with_a_longer_timeout_changes_no_other(ended):
    cluster = ended("hangs_after_a_long_call", [1, 1])
    assert 0.9 * TIMEOUT < time.time() - cluster.reported("left")[0] < 3 * TIMEOUT + SLACK
    assert "Rank 0 has waited" in cluster.all_output()


@pytest.mark.long
def test_a_computation_of_all_that_is_longer_than_the_timeout(ended):
    """No process waits for another, so none is ended."""
    cluster = ended("computes", [0, 0])
    assert time.time() - cluster.reported("left")[1] > 1.3 * TIMEOUT
    assert cluster.reported("error") == [None, None]
    assert "s for other processes, in" not in cluster.all_output()
