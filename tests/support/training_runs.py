"""Trainings of the examples in processes of their own, and what they leave."""

import contextlib
import csv
import os
import re
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

    def start(self, *arguments, launcher=(), **variables):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MXNET_", "OMP_"))}
        environment["PYTHONPATH"] = str(ROOT)
        environment["https_proxy"] = environment["http_proxy"] = "http://127.0.0.1:9"
        environment.update(variables)
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

    def check_run(self, run, *others):
        """Checks the files of a run and that its loss falls; returns the rows of its metrics."""
        found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
        assert found == {
            *("config.json metrics.csv curves.png predictions.png".split()),
            *("checkpoints/last.npz checkpoints/best.npz".split()),
            *(f"export/{kind}-symbol.json" for kind in ("model", "folded")),
            *(f"export/{kind}-0000.params" for kind in ("model", "folded")),
            *others,
        }
        rows = rows_of(run)
        assert [row["step"] for row in rows] == ["5", "10", "10", "15", "20", "20"]
        losses = [float(row["loss"]) for row in rows if row["loss"]]
        assert losses[-1] < losses[0]
        return rows

    def check_two_processes(self, run, folder, *arguments, engine="kvstore", later=1e-3):
        """Trains in two processes as in the run; `later` is the tolerance after step 5."""
        launcher = f"-m gluon_syncbn.launch -n 2 --engine {engine}".split()
        done = self.trained(*arguments, "--output", folder, launcher=launcher)
        said = re.findall(r"^(.*step \d+ of 20: loss) \d", done.out, re.MULTILINE)
        assert said == [f"[0] step {step} of 20: loss" for step in (1, 5, 10, 15, 20)], done.out
        for ours, theirs in zip(rows_of(folder), rows_of(run)):
            assert ours["step"] == theirs["step"]
            if ours["loss"]:
                close = 1e-3 if ours["step"] == "5" else later
                assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=close)

    def check_evaluation(self, run, model, words, capsys):
        """Checks that a model of a run gets the score of its training, printed after `words`."""
        self._modules.predict.main(["--model", str(run / model), "--evaluate"])
        found = float(capsys.readouterr().out.split(words)[1].split()[0])
        assert found == pytest.approx(self.load(run, "best")[0]["best"]["score"], abs=1e-3)


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
