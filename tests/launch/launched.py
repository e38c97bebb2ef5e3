"""Starts launchers for the tests, and finds what they started."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
import uuid

import psutil
import pytest
from distributed_cluster import MARK, running

# The launcher's promise, and what a slow machine may need to get that far.
ENDED_SECONDS = 10
STARTED_SECONDS = 90

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

# A launcher of one worker and nothing else, which starts fastest.
ALONE = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "1",
    "DMLC_NUM_WORKER": "1",
    "DMLC_NUM_SERVER": "1",
}


class Launcher:
    """A launcher, with its output as it comes. What it starts carries an id in its environment."""

    def __init__(self, arguments, folder, environment):
        self.id = uuid.uuid4().hex
        # What a user seldom sets.
        unset = "OMP_NUM_THREADS", "PYTHONUNBUFFERED"
        own = {name: value for name, value in os.environ.items() if name not in unset}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gluon_syncbn.launch", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            cwd=folder,
            env={**own, MARK: self.id, **environment},
            start_new_session=True,
        )
        with self.process.stdin as stdin:
            stdin.write("for nobody")
        self.output, self.errors = [], []
        pairs = (self.process.stdout, self.output), (self.process.stderr, self.errors)
        self._readers = [threading.Thread(target=self._read, args=pair) for pair in pairs]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines):
        with stream:
            for line in iter(stream.readline, ""):
                lines.append(line)

    @property
    def text(self):
        return "".join(self.errors)

    def processes(self):
        """All that it started and that still run."""
        return [process for process in running(self.id) if process.pid != self.process.pid]

    def find(self, name, value):
        """The launcher's child that has this variable."""
        (found,) = (
            process
            for process in psutil.Process(self.process.pid).children()
            if process.environ().get(name) == value and "guard" not in process.cmdline()
        )
        return found

    def wait_for(self, text, count=1):
        """Waits until `count` lines of the output have the text. Returns them."""
        deadline = time.monotonic() + STARTED_SECONDS
        while time.monotonic() < deadline:
            found = [line for line in list(self.output) if text in line]
            if len(found) >= count:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        pytest.fail(f"no {text!r} in {self.output} {self.errors}")

    def end(self, seconds=STARTED_SECONDS):
        """Waits until the launcher ends and leaves nothing behind. Returns its exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher did not end: {self.output} {self.errors}")
        for reader in self._readers:
            reader.join(10)
        assert self.processes() == []
        return code

    def clean(self):
        for process in [self.process, *self.processes()]:
            with contextlib.suppress(psutil.Error, OSError):
                process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(10)


def free_port():
    """The first of two free ports in a row, below those that the system and the KVStore choose
    from: 10000 to 49999."""
    while True:
        port = random.randrange(5000, 9999)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
