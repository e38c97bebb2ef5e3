"""Steps that fail where several threads train, infer or fail on their own, against the same steps
of each net alone."""

import contextlib
import functools
import inspect
import os
import threading
import time

import gluon_syncbn as sbn
import failing_nets
import mxnet as mx
import numpy as np
import programs
import pytest
from failing_nets import BAD, Net, bad_like, faults
from mxnet import autograd, gluon
from runs import MODES, contexts, hybridize

CASES = int(os.environ.get("CASES", 200))
FIRST_SEED = int(os.environ.get("SEED", 0))
TIMEOUT, NEVER, LONGEST = 2.0, 40.0, 30.0


class Training:
    """A net that trains, and what its steps give alone."""

    def __init__(self, random, steps=4, number=0, timeout=NEVER):
        self.random, self.steps = random, steps
        self.devices = contexts(int(random.integers(2, 4)))
        self.net = Net(random, sbn.SyncGroup(timeout=timeout), number)
        self.net.initialize(mx.init.Normal(1), ctx=self.devices)
        hybridize(self.net, list(MODES)[random.integers(len(MODES))])
        self.trainer = gluon.Trainer(
            self.net.collect_params(), "sgd", {"learning_rate": 0.001}, update_on_kvstore=False
        )
        shape = steps, len(self.devices), 6, 4
        self.data = random.standard_normal(shape).astype("float32")
        self.step(0)
        self.before = [p.data(self.devices[0]).asnumpy() for p in self.parameters()]
        self.alone = [self.read(self.step(number)) for number in range(steps)]
        self.restore()

    def parameters(self):
        return self.net.collect_params().values()

    def restore(self):
        for parameter, value in zip(self.parameters(), self.before):
            parameter.set_data(mx.nd.array(value))

    def forward(self, number, i):
        """One device's loss."""
        with autograd.record():
            return self.net(mx.nd.array(self.data[number, i], ctx=self.devices[i])).square().sum()

    def step(self, number, forward=None):
        """The losses, and something that the step has written."""
        losses = forward or [self.forward(number, i) for i in range(len(self.devices))]
        autograd.backward(losses)
        self.trainer.step(len(losses))
        return [*losses, self.net.norms[0].running_mean.data(self.devices[-1])]

    def read(self, arrays):
        return [array.asnumpy() for array in arrays]

    def run(self, before_step=lambda number: None):
        """All steps, and what they give."""
        for number in range(self.steps):
            before_step(number)
            for value, expected in zip(self.read(self.step(number)), self.alone[number]):
                np.testing.assert_array_equal(value, expected, f"step {number}")

    def fault(self, what="writes"):
        """Of the next step. Returns what an error has to say."""
        number = self.net.operators[self.random.integers(len(self.net.operators))]
        direction = ("Forward", "Backward")[self.random.integers(2)]
        faults[number, direction, str(self.devices[self.random.integers(len(self.devices))])] = what
        return BAD


def in_threads(*functions, here=lambda: None):
    """Calls each on a thread of its own, and one here meanwhile. Returns what they return; raises
    what one raises."""
    results, errors = {}, []

    def call(i, function):
        try:
            results[i] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=each) for each in enumerate(functions)]
    for thread in threads:
        thread.start()
    call(len(functions), here)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(functions))]


def seeded(fraction):
    """Runs a test with this fraction of CASES random generators. A failure has the seed."""

    def wrap(test):
        @functools.wraps(test)
        def run(**arguments):
            for seed in range(FIRST_SEED, FIRST_SEED + max(1, CASES // fraction)):
                begin = time.monotonic()
                try:
                    test(np.random.default_rng(seed), **arguments)
                    assert time.monotonic() - begin < LONGEST
                except BaseException:
                    print(f"SEED={seed}, after {time.monotonic() - begin:.1f} s")
                    raise

        run.__signature__ = inspect.Signature(list(inspect.signature(test).parameters.values())[1:])
        return run

    return wrap


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    # Each new thread has its own. What conftest.py asks for takes 300 megabytes and some 0.1 s.
    monkeypatch.setenv("MXNET_CPU_PARALLEL_RAND_COPY", "4")
    yield
    faults.clear()


@seeded(40)
def test_a_thread_for_each_device(random):
    """They end with the step, as those of gluoncv's DataParallelModel; the rest is done here."""
    with_exception = random.random() < 0.1
    training = Training(random, 2, timeout=TIMEOUT if with_exception else NEVER)
    fails_at = int(random.integers(training.steps))

    def step(number, is_hit=False):
        def forward(i):
            if is_hit and with_exception and i == 1:
                raise ZeroDivisionError
            return training.forward(number, i)

        several = [lambda i=i: forward(i) for i in range(len(training.devices))]
        return training.read(training.step(number, in_threads(*several)))

    words = "Missing: " if with_exception else training.fault()
    if with_exception:
        with pytest.raises(ZeroDivisionError):
            step(fails_at, is_hit=True)
        with pytest.raises(mx.MXNetError, match=words):
            mx.nd.waitall()
    else:
        with pytest.raises(mx.MXNetError, match=words):
            step(fails_at)
            mx.nd.waitall()
    training.restore()
    for number in range(training.steps):
        for value, expected in zip(step(number), training.alone[number]):
            np.testing.assert_array_equal(value, expected)


@seeded(20)
def test_a_net_in_each_of_two_threads(random):
    """A step fails for both, until both have stopped and somebody says so."""
    trainings = [Training(random, number=number) for number in range(2)]
    barrier = threading.Barrier(3, timeout=30)

    def train(training, fails):
        for is_failing in (False, True, True, False):
            deadline = time.monotonic() + 25
            try:
                if is_failing and fails:
                    training.run(lambda number: number == 2 and training.fault())
                while is_failing:
                    assert time.monotonic() < deadline
                    training.restore()
                    training.run()
            except mx.MXNetError as error:
                assert is_failing and BAD in str(error), error
            else:
                training.run()
            barrier.wait()  # Both have stopped.
            barrier.wait()  # Somebody has recovered.

    def recover():
        for is_failing in (False, True, True, False):
            barrier.wait()
            for training in trainings if is_failing else ():
                for wait in (
                    mx.nd.waitall,
                    lambda t=training: t.read(t.net.head.weight.list_data()),
                ):
                    with pytest.raises(mx.MXNetError, match="gluon_syncbn.recover"):
                        wait()
            if is_failing:
                sbn.recover()
            faults.clear()
            for training in trainings:
                training.restore()
            mx.nd.waitall()
            barrier.wait()

    in_threads(lambda: train(trainings[0], True), lambda: train(trainings[1], False), here=recover)


BESIDE = ("errors", "inference", "inference, and steps that fail")


@pytest.mark.parametrize("what", BESIDE)
@seeded(20)
def test_another_thread(random, what):
    """2,000 healthy steps in all, beside threads that do something else."""
    steps, fails = (20, True) if "fail" in what else (100, False)
    training = Training(random, steps)
    other = Net(random, sbn.SyncGroup(timeout=NEVER), 9)
    other.initialize(ctx=training.devices)
    hybridize(other, list(MODES)[random.integers(len(MODES))])
    x = mx.nd.array(training.data[0, 0], ctx=training.devices[0])
    expected = other(x).asnumpy()
    has_ended = threading.Event()

    def beside():
        while not has_ended.wait(0.001):
            if what == "errors":
                with pytest.raises(mx.MXNetError, match=BAD):
                    bad_like(x).asnumpy()
                continue
            with contextlib.suppress(mx.MXNetError) if fails else contextlib.nullcontext():
                np.testing.assert_array_equal(other(x).asnumpy(), expected)

    def train():
        try:
            for _ in range(5 if fails else 0):
                words = training.fault()
                with pytest.raises(mx.MXNetError, match=words):
                    training.run()
                    mx.nd.waitall()
                training.restore()
            training.run()
        finally:
            has_ended.set()

    in_threads(beside, here=train)


@pytest.mark.cpu_only("its own operators sleep there, too")
def test_an_operator_that_sleeps_is_no_reason_to_fail():
    training = Training(np.random.default_rng(0), steps=1)
    training.fault("sleeps")
    begin = time.monotonic()
    training.run()
    mx.nd.waitall()
    assert time.monotonic() - begin > failing_nets.SLEEP and not faults


WITHOUT_WORKSPACES = """
import time
import gluon_syncbn as sbn, mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn

devices = [mx.cpu(0), mx.cpu(1)]
net = nn.HybridSequential()
for _ in range(2):
    net.add(nn.Conv2D(64, 3), sbn.SyncBatchNorm(), nn.Activation("relu"))
net.add(nn.GlobalAvgPool2D(), nn.Dense(2))
net.initialize(ctx=devices)
net.hybridize(static_alloc=True)
net(mx.nd.ones((1, 3, 32, 32), ctx=devices[0])).wait_to_read()
begin = time.monotonic()
try:
    for _ in range(20):
        with autograd.record():
            losses = [net(mx.nd.ones((4, 3, 32, 32), ctx=each)).sum() for each in devices]
        autograd.backward(losses)
        mx.nd.waitall()
except mx.MXNetError as error:
    print(time.monotonic() - begin, error)
"""


@pytest.mark.cpu_only("only CPU contexts share workspaces")
def test_a_net_that_runs_out_of_workspaces():
    environment = programs.users_environment()
    done = programs.run(["-c", WITHOUT_WORKSPACES], env=environment)
    seconds, _, text = done.stdout.partition(" ")
    assert float(seconds) < 12, done
    assert "a thread of its own" in text and "Usual causes" not in text, done


IN_THREADS = """
import os, sys
import gluon_syncbn as sbn, mxnet as mx
from concurrent.futures import ThreadPoolExecutor
from mxnet import autograd, gluon

devices = [mx.cpu(number) for number in range(3)]
net = sbn.convert_sync_batchnorm(gluon.model_zoo.vision.resnet18_v1(classes=5))
mx.random.seed(1)
net.initialize(mx.init.Xavier())
net(mx.nd.ones((1, 3, 32, 32)))  # Deferred initialization draws the thread's random numbers.
net.collect_params().reset_ctx(devices)
if sys.argv[1] != "imperative":
    net.hybridize(static_alloc=sys.argv[1] == "static_alloc")
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})


def forward_backward(x):
    with autograd.record():
        loss = (net(x) ** 2).mean()
    loss.backward()
    return loss


threads = [ThreadPoolExecutor(1) for _ in devices]
call = (lambda thread, x: thread.submit(forward_backward, x).result())
if "MXNET_CPU_TEMP_COPY" in os.environ:
    call = (lambda thread, x: forward_backward(x))
for step in range(4):
    x = mx.nd.sin(mx.nd.arange(9 * 3 * 32 * 32).reshape((9, 3, 32, 32)) * (step + 1))
    losses = [*map(call, threads, gluon.utils.split_and_load(x, devices))]
    trainer.step(9)
print([float(loss.asscalar()) for loss in losses])
"""


@pytest.mark.cpu_only("only CPU contexts share workspaces")
@pytest.mark.parametrize("mode", ["imperative", "hybrid", "static_alloc"])
def test_a_thread_for_each_context(mode):
    """Each has workspaces of its own, so the default number is enough; the bits are the same."""
    environment = programs.users_environment()
    texts = [
        programs.run(["-c", IN_THREADS, mode], env={**environment, **more}).stdout
        for more in ({}, {"MXNET_CPU_TEMP_COPY": "512"})
    ]
    assert texts[0].startswith("[") and texts[0] == texts[1]


FAILS_OFTEN = """
import gluon_syncbn as sbn, mxnet as mx

mean, variance = mx.sym.var("mean"), mx.sym.var("variance")
chain = mean - mean
for _ in range(300):
    chain = mx.sym.add_n(chain, mean, variance)
uses = mx.gluon.SymbolBlock(chain, [mean, variance])
uses.hybridize(forward_bulk_size=0)
for _ in range(400):
    layer = sbn.SyncBatchNorm(in_channels=3, momentum=None)
    layer.initialize()
    layer.num_batches_tracked.cast("float16")
    statistics = layer.running_mean.data(), layer.running_var.data()
    mx.nd.waitall()
    with mx.autograd.record():
        y = layer(mx.nd.ones((4, 3)))
    result = uses(*statistics)  # Pushes operations, while another thread finds the failure.
    errors = []
    for wait in (result.asnumpy, y.wait_to_read, mx.nd.waitall, mx.nd.waitall):
        try:
            value = wait()
            assert errors or (value == 300).all(), value
        except mx.MXNetError as error:
            assert "num_batches_tracked is of dtype float16" in str(error), error
            errors.append(error)
    assert errors
"""


@pytest.mark.long
def test_a_failure_while_running_statistics_are_in_use():
    """It hangs nowhere, and what MXNet skips because of it has an error, too."""
    done = programs.run(["-c", FAILS_OFTEN], seconds=100)
    assert done.returncode == 0, done.stderr
