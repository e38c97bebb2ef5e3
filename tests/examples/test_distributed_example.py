"""examples/distributed/train.py learns, goes on from its files, and all processes end with the same
parameters."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from distributed_cluster import needs_horovod
from example_modules import EXAMPLES

TRAIN = str(EXAMPLES / "distributed" / "train.py")
LAUNCH = [sys.executable, "-m", "gluon_syncbn.launch"]


def run(folder, *command):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


# Saves what each device has at the end, and how many batches its process had.
RUN = """
import runpy, sys
import numpy as np

end = runpy.run_path(sys.argv.pop(1))
parameters = end["net"]._collect_params_with_prefix()
for device in end["devices"]:
    values = {name: value.data(device).asnumpy() for name, value in parameters.items()}
    path = f"{end['store'].rank}-{device.device_id}.npz"
    np.savez(path, batches=len(end["starts"]), **values)
"""


@pytest.mark.parametrize("engine", ["kvstore", pytest.param("horovod", marks=needs_horovod)])
def test_training_in_two_processes(tmp_path, engine):
    (tmp_path / "run.py").write_text(RUN)
    done = run(tmp_path, *LAUNCH, "-n", "2", "--engine", engine, "run.py", TRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^\[0\] epoch \d: loss (\S+)$", done.stdout, re.M)
    assert len(losses) == 4 and float(losses[-1]) < float(losses[0]) / 10

    saved = [dict(np.load(path)) for path in sorted(tmp_path.glob("?-?.npz"))]
    assert len(saved) == 2
    batches = [values.pop("batches") for values in saved]
    assert batches[0] > batches[-1]  # So `join` has something to do.
    file = mx.nd.load(str(tmp_path / "runs" / engine / "4.params"))
    for values in saved:
        assert values.keys() == file.keys()
        for name, value in values.items():
            np.testing.assert_array_equal(value, file[name].asnumpy(), name)


# Rank 0 is killed in the middle of its second file, and after the first restart rank 1 in its fifth
# step.
KILLED = """
import os, runpy, signal, sys
from mxnet.gluon import Block, Trainer

def calling(function, rank, restart, limit, before):
    calls = []
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append(args)
        if (os.environ["GLUON_SYNCBN_RANK"], os.environ["GLUON_SYNCBN_RESTART"]) == (rank, restart):
            if len(calls) == limit:
                before(*args)
                os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

truncate = lambda net, path: os.truncate(path, os.path.getsize(path) // 2)
Block.save_parameters = calling(Block.save_parameters, "0", "0", 2, truncate)
Trainer.step = calling(Trainer.step, "1", "1", 5, lambda *args: None)
runpy.run_path(sys.argv.pop(1))
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("engine", ["kvstore", pytest.param("horovod", marks=needs_horovod)])
def test_training_goes_on_from_its_last_whole_checkpoint_when_workers_are_killed(tmp_path, engine):
    (tmp_path / "run.py").write_text(KILLED)
    options = "-n", "2", "--engine", engine
    done = run(tmp_path, *LAUNCH, *options, "--restarts", "2", "run.py", TRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    for number, rank in ((1, 0), (2, 1)):
        assert re.search(rf"worker {rank} \(process \d+\) was killed by SIGKILL", done.stderr)
        assert f"all processes start again, restart {number} of 2." in done.stderr
    whole = run(tmp_path, *LAUNCH, *options, TRAIN, "whole").stdout
    epochs = [f"[0] epoch {number}: loss" for number in (0, 1, 1, 2, 3)]
    lines = done.stdout.splitlines()
    # It prints before it saves.
    assert [line.rpartition(" ")[0] for line in lines] == epochs
    assert list(dict.fromkeys(lines)) == whole.splitlines()
    files = [mx.nd.load(str(tmp_path / name / "4.params")) for name in (f"runs/{engine}", "whole")]
    assert files[0].keys() == files[1].keys()
    for name, value in files[0].items():
        np.testing.assert_array_equal(value.asnumpy(), files[1][name].asnumpy(), name)
    again = run(tmp_path, *LAUNCH, *options, TRAIN)
    assert again.returncode == 0 and f"runs/{engine} holds all 4 epochs" in again.stdout


def test_started_alone(tmp_path):
    done = run(tmp_path, sys.executable, TRAIN)
    assert done.returncode == 1 and not os.listdir(tmp_path)
    assert done.stderr.strip().endswith("launch -n 2 examples/distributed/train.py")


@pytest.mark.long
@needs_horovod
def test_horovodrun(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    done = run(tmp_path, "horovodrun", "-np", "2", "--gloo", sys.executable, TRAIN)
    assert done.returncode == 0 and "epoch 3: loss" in done.stdout, done.stdout + done.stderr
