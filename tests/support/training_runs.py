"""Trainings of the examples in processes of their own, and what they leave."""

import contextlib
import csv
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from example_modules import EXAMPLES, ROOT


class Example:
    """An example's programs."""

    def __init__(self, name, modules):
        self._name, self._modules = name, modules

    def start(self, *arguments, launcher=()):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MXNET_", "OMP_"))}
        environment["PYTHONPATH"] = str(ROOT)
        environment["https_proxy"] = environment["http_proxy"] = "http://127.0.0.1:9"
        script = EXAMPLES / self._name / "train.py"
        return subprocess.Popen(
            [sys.executable, *launcher, str(script), *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, *arguments, **settings):
        process = self.start(*arguments, **settings)
        out, err = process.communicate(timeout=240)
        return SimpleNamespace(status=process.returncode, out=out, err=err)

    def trained(self, *arguments, **settings):
        done = self.train(*arguments, **settings)
        assert done.status == 0, done.err
        return done

    def options(self, *arguments):
        return self._modules.train.parse(list(map(str, arguments)))

    def open_data(self, *arguments):
        """(names, training, validation)."""
        return self._modules.data.open_data(self.options(*arguments))

    @contextlib.contextmanager
    def refuses(self, words):
        """Checks that an InputError is raised, one line with all these words."""
        with pytest.raises(self._modules.train.InputError) as caught:
            yield
        text = str(caught.value)
        assert "\n" not in text
        assert all(word in text for word in words), text

    def load(self, folder, name="last"):
        """(state, arrays) of a checkpoint."""
        return self._modules.data.RUNS.load(folder / "checkpoints" / f"{name}.npz")

    def arrays_of(self, folder):
        """All that decides how a run goes on."""
        return {name: array.tobytes() for name, array in self.load(folder)[1].items()}


def rows_of(folder):
    """The rows of metrics.csv without what depends on the time."""
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def wait_for(path, process):
    for _ in range(3600):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"there is no {path}")


def cut(path):
    """Damages a file."""
    path.write_bytes(path.read_bytes()[:-200])
