"""Workers of which one fails, and what becomes of the others."""

import itertools
import os
import time

import gluon_syncbn as sbn
import mxnet as mx
from distributed_worker import error_of, forget_errors
from mxnet import autograd
from mxnet.gluon import nn
from runs import contexts

LAST = 1  # The rank of the worker that fails, of two.


class Steps:
    """A net, one step at a time, without a Trainer, in whose messages a process waits inside
    MXNet."""

    def __init__(self, devices=1):
        self.devices = contexts(devices)
        self.net = nn.HybridSequential(prefix="net_")
        with self.net.name_scope():
            for _ in range(2):
                self.net.add(nn.Conv2D(4, 3), sbn.SyncBatchNorm())
        self.net.initialize(ctx=self.devices)

    def __call__(self, channels=3):
        """`channels`: of the last device's data."""
        xs = [mx.nd.random.normal(shape=(2, 3, 8, 8), ctx=device) for device in self.devices]
        if channels != 3:
            xs[-1] = mx.nd.ones((2, channels, 8, 8), ctx=self.devices[-1])
        with autograd.record():
            losses = [(self.net(x) ** 2).mean() for x in xs]
        autograd.backward(losses)
        for array in [*losses, *self.net[0].weight.list_grad()]:
            array.wait_to_read()


def first_steps(world, devices=1):
    step = Steps(devices)
    for _ in range(3):
        step()
    world.report("ready", os.getpid())
    return step


def goes_on(world, step):
    """Until there is an error, which the script dies of, or until a file says stop. Rank 0
    writes another one before its last step, so that all take as many."""
    try:
        for number in itertools.count():
            last = world.folder / f"last-{number}"
            if world.rank == 0 and (world.folder / "stop").exists():
                last.touch()
            step()
            if last.exists():
                return
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


def works_on_alone(world):
    """As to evaluate and to save."""
    first_steps(world)
    if world.rank == LAST:
        world.report("left", time.time())
        time.sleep(1.25 * world.timeout)


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


def one_device_has_other_data(world):
    """The script of that process dies of it."""
    step = first_steps(world, devices=2)
    if world.rank == LAST:
        world.report("left", time.time())
    goes_on(world, lambda: step(channels=4 if world.rank == LAST else 3))


def one_device_is_not_of_the_group(world):
    """The script of that process catches the error and goes on without the others."""
    devices = contexts(3)
    group = sbn.SyncGroup(devices=devices[:2], store=world.reducer, timeout=world.timeout)
    norm = sbn.SyncBatchNorm(prefix="norm_", in_channels=3, group=group)
    norm.initialize(ctx=devices)

    def step(used):
        xs = [mx.nd.ones((2, 3, 4), ctx=device) for device in used]
        with autograd.record():
            ys = [norm(x) for x in xs]
        for y in ys:
            y.wait_to_read()

    step(devices[:2])
    world.report("ready", os.getpid())
    if world.rank != LAST:
        goes_on(world, lambda: step(devices[:2]))
        return
    time.sleep(0.5)
    world.report("left", time.time())
    kind, text, _ = error_of(lambda: step([devices[0], devices[2]]))
    world.report("error", [kind, text, time.time()])
    forget_errors()
    deadline = time.monotonic() + 20
    while not (world.folder / "error-0.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
