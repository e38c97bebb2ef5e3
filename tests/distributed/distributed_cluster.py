"""Starts the processes for the tests of gluon_syncbn.distributed, with the launcher or by hand."""

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from mxnet_launch import __main__ as launch
from programs import STARTED_SECONDS, Programs

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "distributed_worker.py")
# Has the processes of one machine exchange through the store, as those of several do.
STORE = {"GLUON_SYNCBN_SHARED_MEMORY": "0"}
# Topics of four processes, which may be on two machines.
FOUR = ["distributed_stores:sums", "distributed_bits:bits", "distributed_groups:sizes_of_groups"]
FOUR += [f"distributed_recipes:{name}" for name in ("groups_of_any_ranks", "bad_batches")]
FOUR += ["distributed_recipes:parts_of_a_data_set"]


def has_horovod():
    return any(d.metadata["Name"] == "horovod" for d in importlib.metadata.distributions())


needs_horovod = pytest.mark.skipif(
    not has_horovod(), reason="Horovod is not installed: see build/horovod.log"
)


class Cluster(Programs):
    """Workers that run `topics`, as functions of modules in this folder: "distributed_bits:train",
    and what they saved.

    by_hand: without the launcher, so that nobody ends the others when one has died.
    """

    def __init__(
        self,
        folder,
        workers,
        topics,
        engine="kvstore",
        by_hand=False,
        script=WORKER,
        **environment,
    ):
        # So that convolutions have the same bits wherever they run.
        super().__init__(folder, **{"OMP_NUM_THREADS": "1", **environment})
        self.workers = workers
        command = [script, str(folder), engine, *topics]
        self._held = contextlib.ExitStack()
        self.services, self.processes = [], []
        if by_hand:
            self._start_by_hand(command)
        else:
            self._launch(engine, command)

    def arrays(self, name):
        """A dict of arrays for each rank."""
        files = [np.load(self.folder / f"{name}-{rank}.npz") for rank in range(self.workers)]
        return [dict(file) for file in files]

    def reported(self, name):
        """A JSON value for each rank, None where it reported nothing."""
        paths = [self.folder / f"{name}-{rank}.json" for rank in range(self.workers)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    def _launch(self, engine, command):
        launcher = ["-m", "gluon_syncbn.launch", "-n", str(self.workers)]
        launcher += ["--engine", "horovod"] if engine == "horovod" else []
        self.processes = [self.start(launcher + command)]

    def _start_by_hand(self, command):
        port = self._held.enter_context(launch._hold())
        shared = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_INTERFACE": "lo",
            "DMLC_NUM_WORKER": str(self.workers),
            "DMLC_NUM_SERVER": "1",
        }
        for role in ("scheduler", "server"):
            environment = {"DMLC_ROLE": role, **shared}
            self.services.append(self.start(["-c", "import mxnet"], environment=environment))
        for _ in range(self.workers):
            environment = {"DMLC_ROLE": "worker", **shared}
            self.processes.append(self.start(command, environment=environment))

    def wait_for(self, name, ranks=None, seconds=STARTED_SECONDS):
        """Waits until these ranks, by default all, have reported `name`. Returns what all did."""
        ranks = range(self.workers) if ranks is None else ranks
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            reported = self.reported(name)
            if all(reported[rank] is not None for rank in ranks):
                return reported
            if all(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.02)
        pytest.fail(f"not all of {list(ranks)} reported {name!r}: {self.all_output()[-4000:]}")

    def find(self, role):
        """The number of the process that is the scheduler or the server."""
        if self.services:
            return self.services[("scheduler", "server").index(role)].pid
        (found,) = (p for p in self.running() if p.environ().get("DMLC_ROLE") == role)
        return found.pid

    def wait(self, seconds=STARTED_SECONDS):
        """Waits for the workers by hand, or for the launcher. Returns their exit codes."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process.poll() for process in self.processes]

    def clean(self):
        super().clean()
        self._held.close()


def has_namespaces():
    """Whether this machine lets us make network namespaces."""
    tools = shutil.which("ip") and shutil.which("unshare")
    return bool(tools) and subprocess.run(["unshare", "-n", "-m", "true"]).returncode == 0


# The commands for two machines in docs/distributed.md: variables and options.
BY_HAND = re.findall(
    r"^    (RANK=.+) python -m gluon_syncbn\.launch (.+) -n 4 train\.py ",
    (Path(__file__).parents[2] / "docs" / "distributed.md").read_text("utf-8"),
    re.MULTILINE,
)


class TwoMachines(Cluster):
    """Half of the workers in each of two network namespaces, and a switch between them in a third
    one."""

    def _launch(self, engine, command):
        self._engine = engine
        name = f"sbn{self._mark[:6]}"
        switch, machines = f"{name}s", [f"{name}{number}" for number in range(2)]
        for space in (switch, *machines):
            self._held.callback(subprocess.run, ["ip", "netns", "del", space])
            self._ip(f"netns add {space}")
            self._ip(f"-n {space} link set lo up")
        self._ip(f"-n {switch} link add name sw0 type bridge")
        self._ip(f"-n {switch} link set sw0 up")
        for number, space in enumerate(machines):
            self._ip(f"-n {switch} link add p{number} type veth peer name eth0 netns {space}")
            self._ip(f"-n {switch} link set p{number} master sw0 up")
            self._ip(f"-n {space} addr add 10.77.0.{number + 1}/24 dev eth0")
            self._ip(f"-n {space} link set eth0 up")
            # Horovod takes the address of the machine's name.
            hosts = self.folder / f"hosts{number}"
            hosts.write_text(f"127.0.0.1 localhost\n10.77.0.{number + 1} {os.uname().nodename}\n")
        self._link = f"-n {switch} link set p1"
        own = self.workers // 2
        if engine == "horovod":
            # It starts processes of other machines with ssh: these are namespaces here.
            ssh = self.folder / "ssh"
            there = shlex.join(self._within(machines, 1))
            ssh.write_text(f'#!/bin/sh\nshift $(($# - 1))\n{there} sh -c "$1"\n')
            ssh.chmod(0o755)
            path = f"{self.folder}:{os.environ['PATH']}"
            horovodrun = ["-m", "horovod.runner.launch", "-np", str(self.workers), "--gloo"]
            horovodrun += ["-H", f"10.77.0.1:{own},10.77.0.2:{own}", "--network-interface", "eth0"]
            horovodrun += [sys.executable, *command]
            self.processes = [
                self.start(horovodrun, self._within(machines, 0), environment={"PATH": path})
            ]
            return
        for number, (variables, options) in enumerate(BY_HAND):
            environment = dict(variable.split("=") for variable in variables.split())
            environment["MASTER_ADDR"] = "10.77.0.1"
            launcher = ["-m", "gluon_syncbn.launch", *options.split(), "-n", str(own), *command]
            within = self._within(machines, number)
            self.processes.append(self.start(launcher, within, environment=environment))

    def wait(self, seconds=STARTED_SECONDS):
        codes = super().wait(seconds)
        # Horovod's launcher does not wait for the shells that it has started.
        if self._engine == "horovod":
            psutil.wait_procs(self.running(), 10)
        return codes

    def _within(self, machines, number):
        """What begins a command that runs on this machine."""
        mount = f'mount --bind {self.folder / f"hosts{number}"} /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", machines[number], "unshare", "-m", "sh", "-c", mount, "sh"]

    def cut(self, seconds):
        """For good if seconds is None."""
        self._ip(f"{self._link} down")
        (self.folder / "cut").touch()
        if seconds is None:
            return
        time.sleep(seconds)
        self._ip(f"{self._link} up")

    @staticmethod
    def _ip(words):
        subprocess.run(["ip", *words.split()], check=True)


def run(folder, workers, topics, kind=Cluster, **options):
    """Runs the topics to their end, which has to be a good one."""
    cluster = kind(folder, workers, topics, **options)
    try:
        codes = cluster.wait()
        assert set(codes) == {0}, cluster.all_output()[-6000:]
        assert "terminate called" not in cluster.all_output()
        for service in cluster.services:  # They end by themselves, after the workers.
            service.wait(STARTED_SECONDS)
        assert cluster.running() == []
    finally:
        cluster.clean()
    return cluster
