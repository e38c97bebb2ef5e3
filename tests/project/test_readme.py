"""The Python code of README.md runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from distributed_cluster import needs_horovod

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
USE, *BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
# Those that go on with the net of the first.
(KVSTORE,) = [block for block in BLOCKS if "mx.kv.create" in block]
(HOROVOD,) = [block for block in BLOCKS if "import horovod" in block]
ALONE = [block for block in BLOCKS if block not in (KVSTORE, HOROVOD)]
STEPS = USE[USE.index("for ") :]


def run(folder, blocks, *launcher):
    (folder / "program.py").write_text("\n".join(blocks) + "\nmx.nd.waitall()\n")
    command = [sys.executable, *launcher, "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_process(tmp_path):
    # The Trainer divides by the samples, so nothing else may have done so.
    check = "assert sum(len(loss) for loss in losses) == len(data)"
    run(tmp_path, [USE, check, *ALONE])
    assert (tmp_path / "model.onnx").exists()


def test_several_processes_with_the_kvstore(tmp_path):
    run(tmp_path, [USE, KVSTORE, STEPS], "-m", "gluon_syncbn.launch", "-n", "2")


@pytest.mark.long
@needs_horovod
def test_several_processes_with_horovod(tmp_path):
    # Its Trainer knows one device in each process.
    use = USE.replace("[mx.cpu(0), mx.cpu(1)]", "[mx.cpu(0)]")
    assert use != USE
    launcher = ["-m", "gluon_syncbn.launch", "-n", "2", "--engine", "horovod"]
    run(tmp_path, [use, HOROVOD, STEPS], *launcher)
