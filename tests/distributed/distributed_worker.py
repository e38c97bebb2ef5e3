"""A worker process of the tests: connects to the others and runs the topics that it is given."""

import faulthandler
import importlib
import json
import os
import pathlib
import sys
import time

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np

# A crash shows the stacks of Python, which MXNet's own handler does not.
faulthandler.enable()


class World:
    """The connection of this process to the others, and the folder for what it finds.

    engine: "kvstore", "horovod", or "none".
    """

    def __init__(self, folder, engine, timeout=60):
        self.folder = pathlib.Path(folder)
        self.engine = engine
        self.timeout = timeout
        self.kv = self.reducer = None
        self.rank, self.size = 0, 1
        if engine == "none":
            return
        if engine == "horovod":
            import horovod.mxnet as hvd

            hvd.init()
            self.hvd = hvd
            self.reducer = sbn.distributed.HorovodReducer(hvd, timeout)
        else:
            self.kv = mx.kv.create("dist_sync")
            self.reducer = sbn.distributed.KVStoreReducer(self.kv, timeout)
        self.rank, self.size = self.reducer.rank, self.reducer.size
        self.group = sbn.SyncGroup(store=self.reducer, timeout=timeout)
        sbn.set_default_group(self.group)

    def save(self, name, **arrays):
        self._write(f"{name}-{self.rank}.npz", lambda file: np.savez(file, **arrays))

    def report(self, name, value):
        text = json.dumps(value).encode()
        self._write(f"{name}-{self.rank}.json", lambda file: file.write(text))

    def _write(self, name, write):
        """A process that sees the file sees all of it. Without an engine, all have rank 0."""
        path = self.folder / name
        with open(f"{path}.part{os.getpid()}", "wb") as file:
            write(file)
        os.replace(file.name, path)

    def barrier(self):
        self.reducer.all_reduce("barrier", np.zeros(1))


def backward(net, xs):
    """A pass of a net on the device of each array, forward and backward. Returns the losses."""
    with mx.autograd.record():
        losses = [(net(x) ** 2).sum() for x in xs]
    mx.autograd.backward(losses)
    return losses


def error_of(call):
    """(kind, text, seconds) of what the call raises, (None, "", seconds) where it does not."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None, "", time.monotonic() - begin


def forget_errors():
    """Goes on after an error, which only a new job does in earnest."""
    sbn.native.failures._recover()


def wait_for_cut(folder):
    """Waits until the driver has cut the link to the other machine."""
    while not os.path.exists(f"{folder}/cut"):
        time.sleep(0.01)


def find(topic):
    module, _, function = topic.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    timeout = os.environ.pop("GLUON_SYNCBN_TIMEOUT", "60")  # Not for a slow start.
    world = World(*sys.argv[1:3], timeout=float(timeout))
    os.environ["GLUON_SYNCBN_TIMEOUT"] = timeout
    for topic in sys.argv[3:]:
        find(topic)(world)
