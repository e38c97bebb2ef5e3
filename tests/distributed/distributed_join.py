"""Workers with uneven numbers of batches, and a long training."""

import contextlib
import os

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import psutil
from distributed_stores import calls
from distributed_worker import backward
from mxnet import autograd
from mxnet.gluon import nn
from mxnet.util import is_np_array
from runs import contexts

BATCHES = [5, 3, 2]  # By rank.
SHAPE = 3, 6, 6


def batches(rank, epoch=0):
    """(data, labels) of one process, of two to four samples."""
    generator = np.random.default_rng([epoch, rank])
    sizes = [2 + (rank + number) % 3 for number in range(BATCHES[rank])]
    return [
        (generator.standard_normal((n, *SHAPE)), generator.integers(0, 3, n).astype(float))
        for n in sizes
    ]


def steps_of_all(epoch=0, early_stop=False):
    """What one process would be given: (data, labels, how many processes brought them)."""
    of_all = [batches(rank, epoch) for rank in range(len(BATCHES))]
    count = min(BATCHES) if early_stop else max(BATCHES)
    for number in range(count):
        present = [own[number] for own in of_all if number < len(own)]
        yield *(np.concatenate(arrays) for arrays in zip(*present)), len(present)


class Training:
    """The first layer has the data itself, so its statistics do not depend on the parameters."""

    def __init__(self, trainer=mx.gluon.Trainer, divided_by=1, **arguments):
        self.divided_by = divided_by
        self.net = nn.HybridSequential(prefix="net_")
        with self.net.name_scope():
            self.net.add(sbn.SyncBatchNorm(), nn.Conv2D(4, 3), sbn.SyncBatchNorm())
            self.net.add(nn.Activation("relu"), nn.Dense(3))
        mx.random.seed(1)
        self.net.initialize(mx.init.Xavier())
        self.net.hybridize()
        self.loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        optimizer = {"learning_rate": 0.1, "momentum": 0.9}
        self.make = lambda params, more: trainer(params, "sgd", optimizer, **arguments, **more)
        self.trainers = [self.make(self.net.collect_params(), {})]

    def split(self):
        """From now on there are two Trainers."""
        parameters = list(self.net.collect_params().items())
        names = ({"prefix": name} if self.divided_by > 1 else {} for name in "ab")
        # Horovod's Trainer takes no lists.
        halves = (dict(parameters[start::2]) for start in range(2))
        self.trainers = [self.make(*each) for each in zip(halves, names)]

    def step(self, data, labels, batch_size):
        self.backward(data, labels)
        self.trainers[0].step(batch_size / self.divided_by)

    def accumulate(self, number, data, labels, batch_size):
        """Batches 0 and 1 make one step, as 2 and 3 do. The gradients are set to zero at the begin
        of the first, and after the second."""
        if number == 0:
            self.samples = 0
            self.net.collect_params().setattr("grad_req", "add")
        if number % 4 == 0:
            self.clear()
        self.backward(data, labels)
        self.samples += batch_size
        if number % 2:
            self.finish()
            self.clear()
            # A second step with one batch.
            self.backward(data, labels)
            self.samples = batch_size
            self.finish()
            if number % 4 == 1:
                self.clear()

    def finish(self):
        for trainer in self.trainers:
            trainer.step(self.samples / self.divided_by)
        self.samples = 0

    def clear(self):
        for parameter in self.net.collect_params().values():
            for gradient in parameter.list_grad() if parameter.grad_req != "null" else ():
                gradient[:] = 0

    def backward(self, data, labels):
        with autograd.record():
            array = mx.np.array if is_np_array() else mx.nd.array
            data, labels = (array(each, dtype="float32") for each in (data, labels))
            loss = self.loss(self.net(data), labels)
        loss.backward()
        # An error of a layer shows here. The Trainer's first step would wait for all processes.
        loss.wait_to_read()

    def values(self):
        return {name: p.data().asnumpy() for name, p in self.net.collect_params().items()}


def lonely_layers(group):
    """Some without anything new to learn from while a process has run out of batches, or all
    processes of its group have."""
    arguments = {"in_channels": SHAPE[0]}
    return {
        "group": sbn.SyncBatchNorm(group=group, **arguments),
        "group, all batches": sbn.SyncBatchNorm(group=group, momentum=None, **arguments),
        "process": sbn.SyncBatchNorm(group=sbn.SyncGroup(group_size=1), **arguments),
        "virtual": sbn.VirtualBatchNorm(2, **arguments),
        "virtual, all batches": sbn.VirtualBatchNorm(2, momentum=None, **arguments),
    }


# By rank. Groups are of two.
BATCHES_OF_LONELY = [1, 1, 3, 2]


# What the workers run.


def trains(world):
    if world.engine == "horovod":
        hvd = world.hvd
        training = Training(hvd.DistributedTrainer, divided_by=hvd.size())
    else:
        training = Training(kvstore=world.kv, update_on_kvstore=False)
    reported = []
    for epoch, early_stop in enumerate((False, True, False)):
        steps = sbn.distributed.join(
            batches(world.rank, epoch), training.trainers, early_stop=early_stop
        )
        rows = []
        for data, labels in steps:
            rows.append([steps.batch_size, steps.processes, steps.absent])
            training.step(data, labels, steps.batch_size)
        reported.append(rows)
        world.save(f"epoch {epoch}", **training.values())
        assert not steps.absent
    world.report("steps", reported)
    training.split()
    # The last step follows the loop.
    steps = sbn.distributed.join(batches(world.rank, epoch=3), training.trainers)
    for number, (data, labels) in enumerate(steps):
        training.accumulate(number, data, labels, steps.batch_size)
    training.finish()
    world.save("accumulated", **training.values())


def trains_numpy_arrays(world):
    mx.npx.set_np()
    trains(world)


def learns_alone(world):
    group = sbn.SyncGroup(store=world.reducer, timeout=world.timeout, group_size=2)
    layers = lonely_layers(group)
    for layer in layers.values():
        layer.initialize()
    count = BATCHES_OF_LONELY[world.rank]
    generator = np.random.default_rng(world.rank)
    mine = [mx.nd.array(generator.standard_normal((4, *SHAPE))) for _ in range(count)]
    for x in mine:
        x.attach_grad()
    for number, x in enumerate(steps := sbn.distributed.join(mine)):
        reported = {}
        for name, layer in layers.items():
            with autograd.record():
                y = layer(x)
                loss = (y**3).sum()
            loss.backward()
            reported.update({f"{name}: y": y.asnumpy(), f"{name}: dx": x.grad.asnumpy()})
            for key, parameter in layer.collect_params().items():
                if parameter.grad_req == "null":
                    key = key[len(layer.prefix) :]
                    reported[f"{name}: {key}"] = parameter.data().asnumpy()
        world.save(f"step {number}", absent=steps.absent, **reported)


def one_has_no_batch(world):
    training = Training(kvstore=world.kv, update_on_kvstore=False)
    mine = batches(0) if world.rank == 0 else []
    with reporting(world, "one_has_no_batch"):
        for data, labels in sbn.distributed.join(mine, training.trainers[0]):
            training.step(data, labels, 2)


def one_leaves_a_loop(world):
    """While rank 1 has none left."""
    training = Training(kvstore=world.kv, update_on_kvstore=False)
    kept = enumerate(sbn.distributed.join(batches(world.rank), training.trainers[0]))
    with reporting(world, "one_leaves_a_loop"):
        for number, (data, labels) in kept:
            training.step(data, labels, 4)
            if number == 3:
                break
        for data, labels in batches(0):
            training.step(data, labels, 4)


@contextlib.contextmanager
def reporting(world, name):
    try:
        yield
    except Exception as error:
        world.report(name, [type(error).__name__, str(error)])
        raise


def many_steps(world, layers=10):
    """Memory by step, of this process and of the server."""
    count = int(os.environ.get("GLUON_SYNCBN_TEST_STEPS", "300"))
    net = nn.HybridSequential()
    for _ in range(layers):
        net.add(sbn.SyncBatchNorm(in_channels=16))
    net.initialize(ctx=contexts(1))
    trainer = mx.gluon.Trainer(
        net.collect_params(), "sgd", kvstore=world.kv, update_on_kvstore=False
    )
    processes = psutil.Process(), _server()
    sizes = []
    for number in range(count):
        (loss,) = backward(net, [mx.nd.random.normal(shape=(4, 16, 4, 4))])
        trainer.step(256)
        loss.asscalar()
        if number % 20 == 0:
            sizes.append([process.memory_info().rss for process in processes])
    mx.nd.waitall()
    messages = [n for key, n in calls(world).items() if key.endswith(" -1")]
    world.report("memory", [count, messages, sizes])


def _server():
    """That of this process's launcher."""
    for process in psutil.Process(os.getppid()).children():
        if process.environ().get("DMLC_ROLE") == "server":
            return process
    raise AssertionError("there is no server")
