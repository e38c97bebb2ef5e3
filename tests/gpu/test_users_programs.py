"""Programs of users on simulated GPUs (make test-gpu), in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu" / "simgpu"))

import simulated_gpus  # noqa: E402

if not simulated_gpus.EXIST:
    pytest.skip("this is not the MXNet of `make test-gpu`", allow_module_level=True)


def run(*arguments, folder=None, gpus="2", **environment):
    """What a program prints. It finds simulated GPUs by tests/support/sitecustomize.py, and chooses
    its devices itself."""
    own = {"PTXSIM_DEVICES": gpus, "SIMGPU_CONTEXTS": gpus, "GLUON_SYNCBN_TEST_DEVICES": "cpu"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "peers, words",
    [("", "GPUs read each other's memory"), ("none", "GPUs exchange sums through the host")],
)
def test_doctor(peers, words):
    # It advises against two installations of MXNet, which are here.
    _, found = run("-m", "gluon_syncbn", "doctor", PTXSIM_PEERS=peers)
    assert "self-test, 2 GPUs:" in found and words in found, found


@pytest.mark.parametrize("name, size", [("segmentation", 32), ("detection", 64)])
def test_an_example(name, size, tmp_path):
    arguments = "--steps 2 --validate-every 2 --val-images 4 --no-export --devices gpu:0,1".split()
    program, output = ROOT / "examples" / name / "train.py", tmp_path / "run"
    arguments += ["--batch", 4, "--size", size, "--output", output]
    status, found = run(program, *arguments)
    assert status == 0, found
    assert (output / "checkpoints" / "last.npz").exists()


def test_two_processes_of_two_gpus(tmp_path):
    program = ROOT / "examples" / "distributed" / "train.py"
    launch = "-m", "gluon_syncbn.launch", "-n", 2, program
    status, found = run(*launch, folder=tmp_path, gpus="4")
    assert status == 0, found
    assert "epoch 3: loss 0.0" in found


def test_the_program_of_readme(tmp_path):
    """With processes that are forked while GPUs are in use."""
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    for old, new in ("mx.cpu(", "mx.gpu("), ("batch_size=8", "batch_size=8, num_workers=2"):
        assert old in code
        code = code.replace(old, new)
    status, found = run("-c", code, folder=tmp_path)
    assert status == 0 and "loss 0." in found, found
