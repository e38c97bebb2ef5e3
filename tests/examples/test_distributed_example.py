"""examples/distributed/train.py learns, and all processes end with the same parameters."""

import re
import signal
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from distributed_cluster import needs_horovod
from example_modules import EXAMPLES

# Saves what each device has at the end, and how many batches its process had.
RUN = """
import runpy, sys
import numpy as np

end = runpy.run_path(sys.argv[1])
parameters = end["net"]._collect_params_with_prefix()
for device in end["devices"]:
    values = {name: value.data(device).asnumpy() for name, value in parameters.items()}
    path = f"{end['store'].rank}-{device.device_id}.npz"
    np.savez(path, batches=len(end["starts"]), **values)
"""


@pytest.mark.parametrize("engine", ["kvstore", pytest.param("horovod", marks=needs_horovod)])
def test_training_in_two_processes(tmp_path, engine):
    (tmp_path / "run.py").write_text(RUN)
    launcher = [sys.executable, "-m", "gluon_syncbn.launch", "-n", "2", "--engine", engine]
    command = [*launcher, "run.py", str(EXAMPLES / "distributed" / "train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [
        float(loss) for loss in re.findall(r"^\[0\] epoch \d: loss (\S+)$", done.stdout, re.M)
    ]
    assert len(losses) == 4 and losses[-1] < losses[0] / 10

    saved = [dict(np.load(path)) for path in sorted(tmp_path.glob("?-?.npz"))]
    assert len(saved) == (4 if engine == "kvstore" else 2)
    batches = [values.pop("batches") for values in saved]
    assert batches[0] > batches[-1]  # So `join` has something to do.
    file = mx.nd.load(str(tmp_path / "net.params"))
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
runpy.run_path(sys.argv[1])
"""


def test_the_last_checkpoint_outlives_a_kill_while_saving(tmp_path):
    (tmp_path / "run.py").write_text(KILLED)
    command = [sys.executable, "-m", "gluon_syncbn.launch", "-n", "1", "run.py"]
    command.append(str(EXAMPLES / "distributed" / "train.py"))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout + done.stderr
    assert len(mx.nd.load(str(tmp_path / "net.params"))) == 14
    assert (tmp_path / "trainer.states").stat().st_size > 0
