"""examples/distributed/train.py learns, goes on from its files, and all processes end with the same
parameters."""

import os
import re
import signal
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


# Killed in the middle of the second file, as by the launcher when another worker has died.
KILLED = """
import os, runpy, signal, sys
from mxnet.gluon import Block

def save(net, path, whole=Block.save_parameters, calls=[]):
    calls.append(path)
    whole(net, path)
    if len(calls) == 2:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

Block.save_parameters = save
runpy.run_path(sys.argv.pop(1))
"""


@pytest.mark.long
def test_training_goes_on_from_the_last_whole_checkpoint(tmp_path):
    (tmp_path / "run.py").write_text(KILLED)
    done = run(tmp_path, *LAUNCH, "-n", "1", "run.py", TRAIN)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr
    names = {path.name for path in (tmp_path / "runs/kvstore").iterdir()}
    assert names == {"1.params", "1.states", "2.params"}
    resumed, whole = (
        run(tmp_path, *LAUNCH, "-n", "1", TRAIN, *output).stdout.splitlines()
        for output in ([], ["other"])
    )
    assert len(whole) == 4 and resumed == whole[1:]
    again = run(tmp_path, *LAUNCH, "-n", "1", TRAIN)
    assert again.returncode == 0 and "runs/kvstore holds all 4 epochs" in again.stdout


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
