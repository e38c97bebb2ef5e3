"""Starts the programs of tests, and finds all that these start."""

import contextlib
import os
import subprocess
import sys
import time
import uuid

import psutil
import pytest

# In the environment of what a test starts, and so of all that this starts.
MARK = "GLUON_SYNCBN_TEST"
# What a slow machine may need to import MXNet in all processes.
STARTED_SECONDS = 120


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(command, seconds=STARTED_SECONDS, **options):
    """Runs a program of Python that ends by itself, and keeps its output."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=seconds,
        **options,
    )


def users_environment():
    """Without the workspaces that conftest.py asks MXNet for."""
    return {k: v for k, v in os.environ.items() if not k.startswith("MXNET_CPU_")}


class Programs:
    """Programs of Python, whose output goes to files in a folder."""

    def __init__(self, folder, **environment):
        self.folder, self._mark = folder, uuid.uuid4().hex
        self.environment = {**os.environ, **environment, MARK: self._mark}
        self._started, self._logs = [], []

    def start(self, command, within=(), stderr=subprocess.STDOUT, environment=(), **options):
        """The options are those of Popen. environment: None leaves a variable out."""
        own = {**self.environment, **dict(environment)}
        options.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen(
            [*within, sys.executable, *command],
            env={name: value for name, value in own.items() if value is not None},
            stdout=self.new_log(),
            stderr=stderr,
            start_new_session=True,
            **options,
        )
        self._started.append(process)
        return process

    def new_log(self):
        self._logs.append(open(self.folder / f"log-{self._mark}-{len(self._logs)}.txt", "w"))
        return self._logs[-1]

    def text(self, number):
        with open(self._logs[number].name, encoding="utf-8", errors="replace") as file:
            return file.read()

    def all_output(self):
        return "".join(map(self.text, range(len(self._logs))))

    def running(self):
        """All that was started for this, by whomever, and has not ended."""

        def is_ours(process):
            with contextlib.suppress(psutil.Error):
                ended = process.status() == psutil.STATUS_ZOMBIE
                return not ended and process.environ().get(MARK) == self._mark
            return False

        return list(filter(is_ours, psutil.process_iter()))

    def clean(self):
        for process in self.running():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in self._started:
            process.wait()
        for log in self._logs:
            log.close()


class Program(Programs):
    """One of them, and its output as it comes."""

    def __init__(self, command, folder, **options):
        """The options are those of `start`."""
        super().__init__(folder)
        self.process = self.start(command, stderr=self.new_log(), **options)

    @property
    def output(self):
        """Its lines so far."""
        return self.text(1).splitlines(keepends=True)

    @property
    def errors(self):
        return self.text(0)

    def wait_for(self, text, count=1):
        """Waits until `count` lines of the output have the text. Returns them."""
        deadline = time.monotonic() + STARTED_SECONDS
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None
            found = [line for line in self.output if text in line]
            if len(found) >= count:
                return found
            if has_ended:
                break
            time.sleep(0.02)
        pytest.fail(f"no {text!r} in {self.output} {self.errors}")

    def end(self, seconds=STARTED_SECONDS):
        """Waits until it ends and leaves nothing behind. Returns its exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the program did not end: {self.output} {self.errors}")
        assert self.running() == []
        return code
