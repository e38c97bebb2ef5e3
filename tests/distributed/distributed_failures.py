"""Workers of which one fails or computes for long, and what becomes of the others."""

import time

import gluon_syncbn as sbn
import mxnet as mx
from distributed_worker import backward, error_of, forget_errors
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
