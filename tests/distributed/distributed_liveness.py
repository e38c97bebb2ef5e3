"""Processes that answer probes, and nothing else."""

import os
import subprocess
import sys
import textwrap

from gluon_syncbn.distributed import liveness as module
from gluon_syncbn.distributed.liveness import Liveness

ROOT = os.path.abspath(f"{module.__file__}/../../..")
# The scripts import the folders without their __init__.py, and so without MXNet, to start quickly.
HEAD = f"""
import os, sys, time, types
sys.stdout.reconfigure(line_buffering=True)
for name in ("gluon_syncbn", "gluon_syncbn.distributed", "gluon_syncbn.native"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{ROOT!r} + "/" + name.replace(".", "/")]
from gluon_syncbn.distributed.liveness import Liveness

rank, size = int(sys.argv[1]), int(sys.argv[2])
liveness = Liveness(rank, size, "127.0.0.1")
print(liveness.address.hex())
liveness.set_addresses(bytes.fromhex(word) for word in sys.stdin.readline().split())

def ready(*words):
    print("ready", *words)
    sys.stdin.readline()
"""


class Job:
    """Processes of which this one is rank 0 and each other runs a script."""

    def __init__(self, *bodies):
        self.liveness = Liveness(0, len(bodies) + 1, "127.0.0.1")
        self.processes = [self._start(rank, body) for rank, body in enumerate(bodies, 1)]
        words = [self.liveness.address.hex()]
        words += [process.stdout.readline().strip() for process in self.processes]
        self.liveness.set_addresses(bytes.fromhex(word) for word in words)
        for process in self.processes:
            process.stdin.write(" ".join(words) + "\n")
            process.stdin.flush()
        self.reported = []
        for process in self.processes:
            word, *reported = process.stdout.readline().split()
            assert word == "ready"
            self.reported.append(reported)

    def _start(self, rank, body):
        script = [sys.executable, "-X", "dev", "-c", HEAD + textwrap.dedent(body)]
        return subprocess.Popen(
            [*script, str(rank), str(self.liveness.size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.liveness.close()
        for process in self.processes:
            process.kill()
            process.communicate()


def at_another_port(one, server):
    """Its address, with the port of somebody else."""
    ip, _, *tokens = one.address.decode().split()
    port = str(server.getsockname()[1])
    return " ".join([ip, port, *tokens]).encode().ljust(module._ADDRESS_SIZE)
