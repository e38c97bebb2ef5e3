"""A plain training loop, as README has it, in which something happens to one of the workers."""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import time

import gluon_syncbn as sbn
import mxnet as mx
from distributed_worker import World, wait_for_cut
from mxnet import autograd, gluon
from mxnet.gluon import nn

STEPS, AT = 12, 5

folder, engine = sys.argv[1:3]
chaos = json.loads(os.environ["CHAOS"])
rank = int(os.environ.get("GLUON_SYNCBN_RANK", -1))
store = None


def strike(moment):
    """Lets the fault happen, if it is this worker's turn."""
    if moment != chaos["moment"]:
        return
    if rank < 0:  # By hand a worker has no rank before it has a store: the first one it is.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{folder}/first", os.O_CREAT | os.O_EXCL))
            happen()
    elif rank == chaos["rank"]:
        happen()


def happen():
    report("struck")
    if chaos["victim"] != "worker":
        # The driver does it, while the training goes on, but not after its end.
        if chaos["victim"] == "link":
            wait_for_cut(folder)
        return
    fault = chaos["fault"]
    # The others wait for it in their next exchange, and at the end ten times as long.
    is_at_the_end = chaos["moment"] in ("validation", "saving", "end")
    seconds = (2 if is_at_the_end and chaos["fault"] != "sleep" else 0.8) * chaos["timeout"]
    if fault in ("SIGKILL", "SIGTERM", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, fault))
    elif fault == "pause":  # The driver lets it go on.
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        raise ArithmeticError("a bad batch")
    elif fault.startswith("_exit"):
        os._exit(int(fault.split()[1]))
    elif fault == "loop":
        while True:
            pass
    elif fault == "memory":
        limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit + (64 << 20), -1))
        hoard = []
        while True:
            hoard.append(bytearray(8 << 20))
    elif fault == "disk":
        with open("/dev/full", "wb") as file:
            file.write(b"x" * (1 << 16))
    elif fault == "sleep":
        time.sleep(seconds)
    elif fault == "save":
        slow_save(seconds)
    elif fault == "operator":
        mx.nd.Custom(mx.nd.array([seconds]), op_type="sleeps").wait_to_read()
    elif fault == "files":
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        time.sleep(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    elif fault == "garbage":
        address = store.watcher.address.split()[:2]
        for number in range(20):
            with contextlib.suppress(OSError), socket.create_connection(address) as one:
                one.sendall(os.urandom(1 << number % 12))


def slow_save(seconds):
    """Saves to a pipe, from which nobody reads for a while."""
    os.mkfifo(f"{folder}/pipe-{rank}")

    def read():
        time.sleep(seconds)
        with open(f"{folder}/pipe-{rank}", "rb") as pipe:
            pipe.read()

    threading.Thread(target=read).start()
    mx.nd.save(f"{folder}/pipe-{rank}", [mx.nd.ones(3)])


class Sleeps(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        time.sleep(float(in_data[0].asscalar()))
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("sleeps")
class SleepsProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, in_shapes, in_dtypes):
        return Sleeps()


def report(name):
    with open(f"{folder}/{name}-{max(rank, 0)}.part", "w") as file:
        json.dump([os.getpid(), time.time()], file)
    os.replace(file.name, f"{folder}/{name}-{max(rank, 0)}.json")


def make_trainer(connection, parameters):
    if engine == "horovod":
        connection.broadcast_parameters(parameters)
        return connection.DistributedTrainer(parameters, "sgd", {"learning_rate": 0.1})
    return gluon.Trainer(
        parameters, "sgd", {"learning_rate": 0.1}, kvstore=connection, update_on_kvstore=False
    )


strike("start")
world = World(folder, engine, float(os.environ["GLUON_SYNCBN_TIMEOUT"]))
connection, store, rank = world.kv or world.hvd, world.reducer, world.rank
net = nn.HybridSequential()
for channels in (3, 8):
    net.add(nn.Conv2D(8, 3, in_channels=channels), sbn.SyncBatchNorm(in_channels=8))
net.add(nn.GlobalAvgPool2D(), nn.Dense(2, in_units=8))
net.initialize()
net.hybridize()
trainer = make_trainer(connection, net.collect_params())
mx.random.seed(rank)
batches = [mx.nd.random.normal(shape=(2, 3, 12, 12)) for _ in range(STEPS)]
is_queue = chaos["fault"] == "queue"
if is_queue:  # MXNet still has steps to make for longer than the timeout, and nobody reads a loss.
    batches *= 150
strike("before")
for step, x in enumerate(sbn.distributed.join(batches, trainer) if chaos["join"] else batches):
    if step == AT:
        strike("forward")
    with autograd.record():
        loss = (net(x) ** 2).mean()
    if step == 0:
        strike("first")
    if step == AT:
        strike("backward")
    loss.backward()
    if step == AT:
        strike("step")
    trainer.step(2)
    if step % 3 == 0 and not is_queue:
        print("loss", loss.asscalar(), flush=True)
strike("validation")
net(batches[0]).wait_to_read()
net.save_parameters(f"{folder}/net-{rank}.part")
strike("saving")
os.replace(f"{folder}/net-{rank}.part", f"{folder}/net-{rank}.params")
strike("end")
report("done")
