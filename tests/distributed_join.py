"""Workers with uneven numbers of batches, and a long training."""

import os
import time

import mxnet as mx
import numpy as np
import psutil
from mxnet import autograd
from mxnet.gluon import nn

import gluon_syncbn as sbn
from distributed_stores import Counter
from layers import contexts

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
        self.loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        optimizer = {"learning_rate": 0.1, "momentum": 0.9}
        self.trainer = trainer(self.net.collect_params(), "sgd", optimizer, **arguments)

    def step(self, data, labels, batch_size):
        with autograd.record():
            loss = self.loss(self.net(mx.nd.array(data)), mx.nd.array(labels))
        loss.backward()
        # An error of a layer shows here. The Trainer's first step would wait for all processes.
        loss.wait_to_read()
        self.trainer.step(batch_size / self.divided_by)

    def values(self):
        return {name: p.data().asnumpy() for name, p in self.net.collect_params().items()}


# What the workers run.


def trains(world):
    if world.engine == "horovod":
        hvd = world.hvd
        training = Training(hvd.DistributedTrainer, divided_by=hvd.size())
    else:
        training = Training(kvstore=world.kv, update_on_kvstore=False)
    told = []
    for epoch, early_stop in enumerate((False, True, False)):
        steps = sbn.distributed.join(
            batches(world.rank, epoch), training.trainer, early_stop=early_stop
        )
        rows = []
        for data, labels in steps:
            rows.append([steps.batch_size, steps.processes, steps.absent])
            training.step(data, labels, steps.batch_size)
        told.append(rows)
        world.save(f"epoch {epoch}", **training.values())
        assert not steps.absent
    world.tell("steps", told)


def one_has_no_batch(world):
    training = Training(kvstore=world.kv, update_on_kvstore=False)
    mine = batches(0) if world.rank == 0 else []

    def go():
        for data, labels in sbn.distributed.join(mine, training.trainer):
            training.step(data, labels, 2)

    try:
        go()
    except Exception as error:
        world.tell("no batch", [type(error).__name__, str(error)])
        raise


def many_steps(world, layers=10):
    """Memory by step, of this process and of the server, and whether anything was lost."""
    count = int(os.environ.get("GLUON_SYNCBN_TEST_STEPS", "300"))
    net = nn.HybridSequential()
    for number in range(layers):
        net.add(sbn.SyncBatchNorm(in_channels=16, prefix=f"norm{number}_"))
    net.initialize(ctx=contexts(1))
    trainer = mx.gluon.Trainer(
        net.collect_params(), "sgd", kvstore=world.kv, update_on_kvstore=False
    )
    mine, server = psutil.Process(), _server()
    told = {"steps": count, "worker": [], "server": [], "begin": time.time()}
    with Counter(world) as counter:
        for number in range(count):
            x = mx.nd.array(many_steps_data(number)[world.rank :: world.size])
            with autograd.record():
                loss = (net(x) ** 2).mean()
            loss.backward()
            trainer.step(1)
            loss.asscalar()
            if number % 20 == 0:
                told["worker"].append(mine.memory_info().rss)
                told["server"].append(server.memory_info().rss)
        mx.nd.waitall()
    told["seconds"] = time.time() - told.pop("begin")
    told["messages"] = {key: count for key, count in counter.keys.items() if "hello" not in key}
    world.tell("memory", told)
    world.save("memory", **{name: p.data().asnumpy() for name, p in net.collect_params().items()})


def many_steps_data(number):
    return np.random.default_rng(number).standard_normal((8, 16, 4, 4)).astype("float32")


def _server():
    """That of this process's launcher."""
    for process in psutil.Process(os.getppid()).children():
        if process.environ().get("DMLC_ROLE") == "server":
            return process
    raise AssertionError("there is no server")
