"""A job in which one process waits in a call, while something has happened to the other one:
python distributed_waits.py FOLDER kvstore|horovod CALL FAULT."""

import itertools
import multiprocessing
import os
import signal
import sys

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from distributed_worker import World, wait_for_cut
from mxnet import autograd, gluon

CALLS = {"kvstore": {}, "horovod": {}}
# Calls before there is a store; the fault comes before them.
STARTS = {"kvstore": ["create", "KVStoreReducer"], "horovod": ["hvd_init", "HorovodReducer"]}


def of(*engines):
    """Adds a call of these engines, by default of both."""

    def add(function):
        for engine in engines or CALLS:
            CALLS[engine][function.__name__] = function
        return function

    return add


class Setting:
    """What the calls use, made and used once by both processes."""

    def __init__(self, world):
        self.world = world
        self.array = mx.nd.ones(3)
        self.layer = sbn.SyncBatchNorm(in_channels=4)
        self.layer.initialize()
        self.dense = gluon.nn.Dense(2, in_units=2)
        self.dense.initialize(mx.init.One())
        if world.engine == "kvstore":
            self.trainer = gluon.Trainer(
                self.dense.collect_params(), "sgd", kvstore=world.kv, update_on_kvstore=False
            )
            world.kv.init(5, self.array)
        else:
            self.trainer = world.hvd.DistributedTrainer(self.dense.collect_params(), "sgd")
        self.train()
        self.step().wait_to_read()
        world.barrier()

    def train(self):
        x = mx.nd.random.normal(shape=(4, 4, 3))
        with autograd.record():
            y = self.layer(x)
        y.backward()
        return x, y

    def step(self):
        with autograd.record():
            loss = self.dense(mx.nd.ones((2, 2)))
        loss.backward()
        self.trainer.step(2)
        return self.dense.weight.data()

    def pending(self):
        """An array that only the other process can complete."""
        if self.world.engine == "kvstore":
            self.world.kv.pushpull(5, self.array, out=self.array)
            return self.array
        return self.world.hvd.allreduce(self.array, name="pending")


# MXNet's.


@of()
def asnumpy(s):
    s.pending().asnumpy()


@of()
def wait_to_read(s):
    s.pending().wait_to_read()


@of()
def waitall(s):
    s.pending()
    mx.nd.waitall()


@of()
def copy_into(s):
    s.pending()._sync_copyfrom(np.ones(3, "float32"))


@of()
def dynamic_shape(s):
    mx.nd.contrib.boolean_mask(mx.nd.ones(3), s.pending())


@of()
def save(s):
    mx.nd.save(f"{s.world.folder}/array", [s.pending()])


@of()
def save_parameters(s):
    s.step()
    s.dense.save_parameters(f"{s.world.folder}/net")


@of()
def fork(s):
    s.pending()
    if os.fork() == 0:
        os._exit(0)


@of()
def start_a_process(s):
    s.pending()
    multiprocessing.get_context("fork").Process(target=print).start()


@of()
def end_of_the_script(s):
    s.pending()


@of()
def trainer_step(s):
    for _ in range(3):
        s.step().asnumpy()


# Ours.


@of()
def forward(s):
    s.train()[1].wait_to_read()


@of()
def backward(s):
    x = mx.nd.ones((4, 4, 3))
    x.attach_grad()
    with autograd.record():
        y = s.layer(x)
    # Both processes make the forward call, and one the backward.
    y.wait_to_read()
    s.world.barrier()
    strike()
    y.backward()
    x.grad.wait_to_read()


@of()
def first_forward(s):
    layer = sbn.SyncBatchNorm(in_channels=4)
    layer.initialize()
    with autograd.record():
        layer(mx.nd.ones((4, 4, 3))).wait_to_read()


@of()
def all_reduce(s):
    s.world.reducer.all_reduce("sum", [1.0, 2.0])


@of()
def all_gather(s):
    s.world.reducer.all_gather("rows", [1.0, 2.0])


@of()
def join(s):
    for _ in sbn.distributed.join([mx.nd.ones(2)]):
        pass


@of()
def precise_statistics(s):
    with sbn.precise_statistics(s.layer):
        s.layer(mx.nd.ones((4, 4, 3)))


@of()
def participants(s):
    with sbn.participants([], s.trainer, s.layer):
        pass
    s.step().asnumpy()


# The store's.


@of("kvstore")
def push_and_pull(s):
    s.world.kv.push(5, s.array)
    s.world.kv.pull(5, out=s.array)
    s.array.asnumpy()


@of("kvstore")
def init(s):
    s.world.kv.init(6, s.array)


@of("kvstore")
def broadcast(s):
    s.world.kv.broadcast(6, s.array, out=s.array)
    s.array.asnumpy()


@of("kvstore")
def barrier(s):
    s.world.kv._barrier()


@of("horovod")
def allgather(s):
    s.world.hvd.allgather(s.array, name="all").asnumpy()


@of("horovod")
def alltoall(s):
    s.world.hvd.alltoall(mx.nd.ones(2), name="all").asnumpy()


@of("horovod")
def grouped_allreduce(s):
    s.world.hvd.grouped_allreduce([s.array, s.array + 1], name="some")[1].asnumpy()


@of("horovod")
def broadcast_parameters(s):
    s.world.hvd.broadcast_parameters(s.dense.collect_params())
    s.dense.weight.data().asnumpy()


@of("horovod")
def broadcast_object(s):
    s.world.hvd.broadcast_object({"a": s.world.rank})


@of("horovod")
def add_process_set(s):
    s.world.hvd.add_process_set([0])


def strike():
    if not is_victim:
        return
    # The test looks for it.
    open(f"{folder}/struck-{os.getpid()}", "w").close()
    if fault == "is cut off":
        return wait_for_cut(folder)
    if fault == "loops":
        while True:
            pass
    os.kill(os.getpid(), {"is gone": signal.SIGKILL, "is stopped": signal.SIGSTOP}[fault])


def is_first():
    for number in itertools.count():
        try:
            os.close(os.open(f"{folder}/number-{number}", os.O_CREAT | os.O_EXCL))
            return number == 0
        except FileExistsError:
            pass


if __name__ == "__main__":
    folder, engine, call, fault = sys.argv[1:]
    is_victim = is_first()
    if call in ("create", "hvd_init"):
        strike()
    if call == "KVStoreReducer":
        kv = mx.kv.create("dist_sync")
        strike()
        sbn.distributed.KVStoreReducer(kv)
    elif call == "HorovodReducer":
        import horovod.mxnet as hvd

        hvd.init()
        strike()
        sbn.distributed.HorovodReducer(hvd)
    timeout = os.environ["GLUON_SYNCBN_TIMEOUT"]
    if call not in STARTS[engine]:
        del os.environ["GLUON_SYNCBN_TIMEOUT"]  # Not for a slow start.
    world = World(folder, engine, float(timeout))
    os.environ["GLUON_SYNCBN_TIMEOUT"] = timeout
    setting = Setting(world)
    if call != "backward":
        strike()
    CALLS[engine][call](setting)
