"""Scripts with a net on two devices, as programs."""

import textwrap

import pytest
from programs import Program

HEAD = """
import os, signal, sys, threading, time
import mxnet as mx
import gluon_syncbn as sbn
from devices import KIND, context
from gluon_syncbn import native

devices = [context(0), context(1)]
net = mx.gluon.nn.HybridSequential()
for _ in range(2):
    net.add(mx.gluon.nn.Conv2D(4, 3), sbn.SyncBatchNorm())
net.initialize(ctx=devices)
data = [mx.nd.ones((2, 3, 8, 8), ctx=device) for device in devices]

def step(some=devices):
    with mx.autograd.record():
        losses = [net(x).sum() for x, _ in zip(data, some)]
    for loss in losses:
        loss.backward()
    return losses

def clear_errors():
    try:
        mx.nd.waitall()
    except mx.MXNetError:
        pass

def wait_until_a_call_waits():
    for _ in range(1000):
        if native.library.library.gluon_syncbn_stuck_seconds():
            return
        time.sleep(0.01)
    raise AssertionError("no call waits")

for loss in step():
    loss.wait_to_read()
"""


@pytest.fixture
def start(tmp_path):
    """Starts a script."""
    started = []

    def start(body, **environment):
        command = ["-c", HEAD + textwrap.dedent(body)]
        started.append(Program(command, tmp_path, environment=environment))
        return started[-1]

    yield start
    for program in started:
        program.clean()


@pytest.fixture
def run(start):
    """The (output, errors) of a script that ends well."""

    def run(body, **environment):
        program = start(body, **environment)
        assert program.end(60) == 0, program.errors
        return "".join(program.output), program.errors

    return run
