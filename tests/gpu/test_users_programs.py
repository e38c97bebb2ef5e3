"""Programs of users on simulated GPUs (make test-gpu), in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu" / "simgpu"))

import simulated_gpus  # noqa: E402

if not simulated_gpus.EXIST:
    pytest.skip("this is not the MXNet of `make test-gpu`", allow_module_level=True)

import gluon_syncbn as sbn  # noqa: E402
import mxnet as mx  # noqa: E402


def run(*arguments, folder=None, **environment):
    """What a program prints. It finds simulated GPUs by tests/support/sitecustomize.py, and chooses
    its devices itself."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={
            **os.environ,
            "PTXSIM_DEVICES": "2",
            "GLUON_SYNCBN_TEST_DEVICES": "cpu",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "peers, words",
    [
        ({}, "GPUs read each other's memory"),
        ({"PTXSIM_PEERS": "none"}, "GPUs exchange sums through the host"),
    ],
    ids=["peers", "no peers"],
)
def test_doctor(peers, words):
    # It advises against two installations of MXNet, which are here.
    _, found = run("-m", "gluon_syncbn", "doctor", **{"PTXSIM_PEERS": "", **peers})
    assert "self-test, 2 GPUs:" in found and words in found, found


@pytest.mark.parametrize("name", ["segmentation", "detection"])
def test_an_example(name, tmp_path):
    arguments = (
        "--batch 4 --steps 2 --validate-every 2 --val-images 4 --no-export --devices gpu:0,1"
    )
    program, size = ROOT / "examples" / name / "train.py", {"segmentation": 32, "detection": 64}
    output = tmp_path / "run"
    status, found = run(program, *arguments.split(), "--size", size[name], "--output", output)
    assert status == 0, found
    assert (output / "checkpoints" / "last.npz").exists()


def test_two_processes_of_two_gpus(tmp_path):
    program = ROOT / "examples" / "distributed" / "train.py"
    launch = "-m", "gluon_syncbn.launch", "-n", 2, program
    status, found = run(*launch, folder=tmp_path, PTXSIM_DEVICES="4")
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


def train(devices, batches):
    """The parameters of a ResNet after two steps."""
    mx.random.seed(0)
    net = mx.gluon.model_zoo.vision.resnet18_v1(classes=10)
    sbn.convert_sync_batchnorm(net)
    # On the CPU, so that all draw the same parameters.
    net.initialize(mx.init.Xavier(), ctx=mx.cpu())
    net(mx.nd.zeros((1, 3, 32, 32), ctx=mx.cpu()))
    net.collect_params().reset_ctx(devices)
    net.hybridize(static_alloc=True)
    options = {"learning_rate": 0.01, "momentum": 0.9}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for x, labels in batches:
        parts = [mx.gluon.utils.split_and_load(mx.nd.array(a), devices) for a in (x, labels)]
        with mx.autograd.record():
            each = [loss_of(net(part), wanted) for part, wanted in zip(*parts)]
        mx.autograd.backward(each)
        trainer.step(len(x))
        losses += [loss.asnumpy() for loss in each]
    values = [p.data(devices[-1]).asnumpy() for p in net.collect_params().values()]
    return np.concatenate(losses), values


def test_a_resnet_trains_as_on_two_cpu_contexts():
    """The parameters of one step, and the losses of two. (After the second step data that differ by
    1e-7 bring parameters that differ by several percent on the CPU too: at 32x32 the last layers
    normalize eight values.)"""
    random = np.random.RandomState(0)
    batches = [
        (random.normal(size=(8, 3, 32, 32)).astype("float32"), random.randint(0, 10, 8))
        for _ in range(2)
    ]
    for count in (1, 2):
        wanted_losses, wanted = train([mx.cpu(0), mx.cpu(1)], batches[:count])
        losses, values = train([mx.gpu(0), mx.gpu(1)], batches[:count])
        np.testing.assert_allclose(losses, wanted_losses, rtol=1e-3)
        for a, b in zip(values, wanted if count == 1 else ()):
            np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())
