"""Launchers for the tests, and what they start."""

import contextlib
import random
import socket
import tempfile

import psutil
from programs import Program

# The launcher's promise.
ENDED_SECONDS = 10

# A worker that ends when a test makes its file.
SLEEP = """
import os, sys, time
print("ready", flush=True)
while not os.path.exists("die" + os.environ["GLUON_SYNCBN_RANK"]):
    time.sleep(0.01)
sys.exit(7)
"""

TRAIN = """
import json, os, signal, sys, time
import mxnet as mx

kv = mx.kv.create("dist_sync")
kv.init(0, mx.nd.zeros(2))

def step():
    x = mx.nd.ones(2) * (kv.rank + 1)
    kv.pushpull(0, x, out=x)
    return x.asnumpy().tolist()

step()
"""

ALL_REDUCE = """
import json, os, sys
import mxnet as mx
import horovod.mxnet as hvd
hvd.init()
def step():
    x = mx.nd.ones(2, dtype="float64") * (hvd.rank() + 1)
    return hvd.allreduce(x, average=False, name="x").asnumpy().tolist()
"""


class Launcher(Program):
    def __init__(self, arguments, folder, environment):
        # What a user seldom sets.
        unset = dict.fromkeys(("OMP_NUM_THREADS", "PYTHONUNBUFFERED"))
        command = ["-m", "gluon_syncbn.launch", *arguments]
        with tempfile.TemporaryFile() as stdin:
            stdin.write(b"for nobody")
            stdin.seek(0)
            options = {"stdin": stdin, "cwd": folder}
            super().__init__(command, folder, environment={**unset, **environment}, **options)

    def find(self, name, value):
        """The launcher's child that has this variable."""
        (found,) = (
            process
            for process in psutil.Process(self.process.pid).children()
            if process.environ().get(name) == value and "guard" not in process.cmdline()
        )
        return found


def free_port():
    """A free port that a job of Slurm could get, below those that the system and the KVStore choose
    from, 10000 to 49999, and not one of test_position's."""
    while True:
        port = random.randrange(9100, 9990)
        with socket.socket() as holder, contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", port))
            return port


def alone_here():
    """The environment of a launcher of one worker and nothing else, which starts fastest."""
    port = str(free_port())
    return {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
