"""Tests `make gpu-check` without a GPU: how it judges steps, and what becomes of those that fail,
hang or cannot run. Builds nothing and runs no kernels."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from programs import wait_until
from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import check  # noqa: E402
import steps as gpu_steps  # noqa: E402

pytestmark = pytest.mark.long

NATIVE = "cuda_kernels: 2597248 passed, 0 failed"
PASSED = f"{' 4 passed, 9 deselected in 1.00s '.center(80, '=')}\n"
BUILT, TESTED, PYTEST = [check.BUILT], [check.TESTED], [check.ALL_PASSED]
MEMCHECK, RACECHECK = ([check.TESTED, check.CLEAN[kind]] for kind in check.CLEAN)
CLEAN = "========= ERROR SUMMARY: 0 errors"
NO_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
BROKEN = "========= Error: Target application terminated before first instrumented API call"
INTERNAL = "========= Internal Sanitizer Error: The Sanitizer encountered an error"


@pytest.mark.parametrize(
    "proofs, code, text, verdict, detail",
    [
        # The texts are those of the tools.
        (BUILT, 0, "a warning\nCUDA 11.2 for sm_50 sm_60, PTX 86\n", "ok", "CUDA 11.2 for sm_50"),
        (BUILT, 0, "no kernels", "FAILED", "no kernels"),
        (BUILT, 1, "nvcc fatal   : Unsupported gpu 'compute_50'", "FAILED", "'compute_50'"),
        (BUILT, -9, "", "FAILED", "ended by SIGKILL"),
        ([], 0, "/tmp/set unpacked in 9 s", "ok", "9 s"),
        ([], 127, "bash: /no/unpack.sh: No such file or directory", "FAILED", "No such file"),
        (TESTED, 0, f"  float32 3.1 s\n{NATIVE}\n", "ok", NATIVE),
        (TESTED, 0, NATIVE.replace("0 failed", "10 failed"), "FAILED", "10 failed"),
        (TESTED, 0, "cuda_kernels: 0 passed, 0 failed", "FAILED", "0 passed"),
        (TESTED, 1, NATIVE, "FAILED", ""),
        (TESTED, -6, "  what():  CUDA error 700", "FAILED", "SIGABRT after: what"),
        (PYTEST, 0, PASSED, "ok", "4 passed, 9 deselected in 1.00s"),
        (PYTEST, 0, "=== 204 passed, 2 warnings in 95.07s (0:01:35) ===", "ok", "204 passed"),
        # 9 signs of equality, as before the lines of compute-sanitizer.
        (PYTEST, 0, "========= 4 passed in 1.00s =========", "ok", "4 passed"),
        (PYTEST, 0, "=== 2 passed, 1 skipped in 0.12s ===", "FAILED", "1 skipped"),
        (PYTEST, 0, "=== 2 passed, 1 xfailed in 0.12s ===", "FAILED", "1 xfailed"),
        (PYTEST, 5, "=== 13 deselected in 0.01s ===", "FAILED", "13 deselected"),
        (PYTEST, 1, "=== 1 failed, 3 passed in 2.00s ===", "FAILED", "1 failed"),
        (PYTEST, 0, "test_x.py::test_y PASSED [100%]", "FAILED", "test_y PASSED"),
        (PYTEST, -11, PASSED, "FAILED", "SIGSEGV"),  # At the end of the process.
        (MEMCHECK, 0, f"{NATIVE}\n{CLEAN}", "ok", f"{NATIVE}; ERROR SUMMARY: 0 errors"),
        (MEMCHECK, 0, CLEAN, "FAILED", "passed"),
        (MEMCHECK, 0, NATIVE, "FAILED", "SUMMARY"),
        (MEMCHECK, 0, f"{NATIVE}\n{NO_RACES}", "FAILED", "SUMMARY"),
        (RACECHECK, 0, f"{NATIVE}\n{NO_RACES}", "ok", "0 hazards"),
        # The exit code may be that of a success. Of two processes, the other is clean.
        (MEMCHECK, 0, f"{NATIVE}\n{CLEAN[:-8]}10 errors\n{CLEAN}", "FAILED", "10 errors"),
        (MEMCHECK, 9, f"{NATIVE}\n{CLEAN[:-8]}2 errors", "FAILED", "2 errors"),
        (RACECHECK, 0, f"{NATIVE}\n{NO_RACES[:-10]}1 warning)", "FAILED", "1 warning"),
        (RACECHECK, 0, f"{NATIVE}\n{BROKEN}\n{NO_RACES}", "FAILED", "Target application"),
        (MEMCHECK, 1, f"{NATIVE}\n{INTERNAL}\n{CLEAN}", "FAILED", "Internal Sanitizer Error"),
        (MEMCHECK, 1, "========= Error: Device not supported.", "FAILED", "not supported"),
    ],
)
def test_what_outputs_mean(proofs, code, text, verdict, detail):
    found, line = gpu_steps.judge(code, text, proofs)
    assert found == verdict and detail in re.sub(" +", " ", line), (found, line)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "check.json"


@pytest.fixture
def steps(path):
    return gpu_steps.Steps(path, 60)


def read(path):
    return json.loads(path.read_text())


def program(folder, name, text):
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def python(code):
    return [sys.executable, "-c", code]


def test_a_step_that_fails_shows_its_output_and_does_not_end_the_others(steps, path, capsys):
    assert steps.run("first", python("print('why'); exit(3)"), 30) == "FAILED"
    assert read(path)["verdict"] == "not finished"
    assert steps.run("missing", ["/no/such/program"], 30) == "FAILED"
    code = f"import json; print(json.load(open({str(path)!r})))"
    assert steps.run("second", python(code), 30) == "ok"
    assert steps.end() == 1
    assert capsys.readouterr().out.rstrip().endswith("FAILED: first, missing")
    found = read(path)
    assert found["verdict"] == "FAILED" and "running" not in found
    assert found["steps"]["first"]["output"] == ["why"]
    assert found["steps"]["first"]["exit_code"] == 3
    assert "No such file" in found["steps"]["missing"]["detail"]
    # For when this process is killed, the JSON names the step that runs.
    assert "'running': 'second'" in found["steps"]["second"]["detail"]


def has_ended(pid):
    """Gone, or a zombie that nobody has waited for."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize("hangs", [True, False])
def test_children_end_with_their_step(steps, path, tmp_path, hangs):
    """Also one that ignores SIGTERM, as a hanging one may. What was printed is kept."""
    file = tmp_path / "child"
    text = f"trap '' TERM; echo $$ >{file}; while :; do sleep 0.1; done"
    child = program(tmp_path, "child.sh", text)
    wait = "wait" if hangs else f"until [ -s {file} ]; do sleep 0.1; done"
    parent = program(tmp_path, "parent.sh", f"echo started; {child} & {wait}")
    begin = time.monotonic()
    verdict = steps.run("step", [parent], 5 if hangs else 30)
    assert time.monotonic() - begin < 30
    assert verdict == ("FAILED" if hangs else "ok")
    step = read(path)["steps"]["step"]
    assert step["output"] == ["started"]
    assert step["detail"] == ("did not end within 5 s" if hangs else "started")
    # The kernel may need a moment after SIGKILL.
    wait_until(lambda: has_ended(int(file.read_text())))


def test_what_does_not_fit_is_not_run_and_no_failure(path):
    steps = gpu_steps.Steps(path, 6)
    assert steps.run("is cut", ["sh", "-c", "echo started; exec sleep 1000"], 100) == "not run"
    assert steps.run("has no time", python("input"), 100) == "not run"
    assert [step["output"] for step in read(path)["steps"].values()] == [["started"], []]
    assert steps.end() == 0 and read(path)["verdict"] == "ok"


TERMINATED = """
import os, sys
sys.path.insert(0, FOLDER)
import check
check.build.setup_py = lambda: type("Setup", (), {"find_gpus": lambda: [90]})
check.build_all = lambda steps: True
command = f"echo $$ >{sys.argv[2]}; sleep 1; kill -TERM {os.getpid()}; exec sleep 1000"
check.check_kernels = lambda steps: steps.run("running", ["sh", "-c", command], 60)
check.main(["--json", sys.argv[1]])
"""


def test_sigterm_ends_the_step_that_runs(path, tmp_path):
    code, child = TERMINATED.replace("FOLDER", repr(str(check.HERE))), tmp_path / "child"
    done = subprocess.run([*python(code), str(path), str(child)], timeout=200)
    assert done.returncode == 1 and read(path)["running"] == "running"
    wait_until(lambda: has_ended(int(child.read_text())))


def find_gpus(monkeypatch, *gpus):
    setup = SimpleNamespace(find_gpus=lambda: list(gpus))
    monkeypatch.setattr(check.build, "setup_py", lambda: setup)


def test_without_a_gpu_it_says_so_and_all_is_well(monkeypatch, path, capsys):
    find_gpus(monkeypatch)
    monkeypatch.setattr(check, "BUILD", "print('CUDA 13.0 for sm_75, PTX 121')")
    assert check.main(["--json", str(path)]) == 0
    assert "No GPU is found" in capsys.readouterr().out
    assert list(read(path)["steps"]) == ["build"] and read(path)["gpus"] == []
    monkeypatch.setattr(check, "BUILD", "import sys; sys.exit('nvcc: error: no such kernel')")
    assert check.main(["--json", str(path)]) == 1
    assert "no such kernel" in read(path)["steps"]["build"]["detail"]


def test_the_order_and_the_proofs_of_the_kernels(monkeypatch, path):
    ran = {}

    def run(self, name, command, most, proofs=(), **options):
        ran[name] = [*map(str, command)], proofs
        return "ok"

    find_gpus(monkeypatch, 90)
    monkeypatch.setattr(gpu_steps.Steps, "run", run)
    assert check.main(["--json", str(path)]) == 0
    assert {name: proofs for name, (_, proofs) in ran.items()} == {
        "build": BUILT,
        "against the CPU's kernels": TESTED,
        "devices that meet": TESTED,
        "speed": (),
        "memcheck": MEMCHECK,
        "racecheck": RACECHECK,
    }
    # What takes longest and is most often missing comes last.
    assert list(ran)[-3:] == ["speed", "memcheck", "racecheck"]
    for name in ("memcheck", "racecheck"):
        tool, *options, test, small = ran[name][0]
        assert tool.endswith("compute-sanitizer") and options[-2:] == ["--tool", name]
        assert test.endswith("test_cuda_kernels") and small == "--small"


# bench.py with times in place of PyTorch and a GPU.
BENCH = """
import os, sys
from unittest.mock import MagicMock

dtypes = {name: f"torch.{name}" for name in ("float64", "float32", "float16", "bfloat16")}
torch, surface = MagicMock(__version__="2.11", **dtypes), MagicMock()
torch.cuda.get_device_name.return_value = "NVIDIA H200"
torch.cuda.get_device_properties.return_value.L2_cache_size = 60 << 20
torch.empty.return_value.element_size.return_value = 4
surface.Library.return_value.description = "CUDA 13.0 for sm_90"
sys.modules.update(torch=torch, surface=surface)
sys.path.insert(0, FOLDER)
import bench

times = {"copy": 100, "ours": 70, "sync": 100, "batch_norm": 100}
times.update({name: 50 * arrays for name, (_, arrays) in bench.PASSES.items()})
bench.Clock.microseconds = lambda clock, names, rounds: {name: times[name] for name in names}
bench.Set = MagicMock(return_value=MagicMock(kind="CudnnBatchNormBackward0"))
CHANGE
sys.exit(bench.main())
"""


@pytest.mark.parametrize(
    "change, verdict, says",
    [
        ("", "ok", r"\| at most \| worst \|"),
        ("times['dx'] = 180", "ok", r"1\.2\d* \| .*float32 NHWC: dx \*\*FAIL\*\*"),
        ("bench.Set = None", "FAILED", "TypeError: "),
        ("bench.comparisons = lambda rows: os.abort()", "FAILED", ""),
    ],
)
def test_speed(monkeypatch, steps, path, tmp_path, change, verdict, says):
    """The figures are in the JSON. A missed guard is shown, but is no failure."""
    monkeypatch.setattr(check.build, "FOLDER", tmp_path)
    text = BENCH.replace("FOLDER", repr(str(check.HERE))).replace("CHANGE", change)
    (tmp_path / "bench.py").write_text(text)
    monkeypatch.setattr(check, "HERE", tmp_path)
    steps.limit = 1000
    check.check_kernels(steps)
    step = read(path)["steps"]["speed"]
    assert step["verdict"] == verdict and re.search(says, "\n".join(step["output"])), step
    assert read(path)["speed"]["finished"] == ("abort" not in change)


@pytest.fixture
def mxnet_set(monkeypatch, tmp_path, steps):
    """A set, a library, a Python that says "4 passed" and a compute-sanitizer."""
    unpack = "mkdir $1; touch $1/libgluon_syncbn.so; echo 'export PYTHONPATH=/of/the/set'"
    program(tmp_path, "unpack.sh", unpack)
    (tmp_path / "built.so").write_text("")
    shows = "pwd; echo $PYTHONPATH; echo $SIMGPU_LIBRARY; ls . gluon_syncbn"
    text = f'[ "$1" = "no such file" ] && exit 2\n{shows}; echo $@; echo \'{PASSED}\''
    monkeypatch.setattr(sys, "executable", program(tmp_path, "python", text))
    tool = program(tmp_path, "compute-sanitizer", f'shift 4; "$@" || exit; echo "{NO_RACES}"')
    monkeypatch.setattr(check, "sanitizer", lambda kind: [tool, "--error-exitcode", "9", kind, ""])
    steps.limit = 1000

    def run():
        check.check_in_mxnet(steps, tmp_path, tmp_path / "built.so", True)
        return steps.result["steps"]

    return run


def test_inside_mxnet(mxnet_set, steps):
    found = mxnet_set()
    assert steps.end() == 0, found
    assert list(found) == [
        *("MXNet's set", "layers", "simulated GPUs"),
        *("bits of nets", "weights, simulated", "weights", "failures of CUDA", "no peers"),
        *("small nets", "racecheck of a net", "beside other work", "programs"),
    ]
    for name in list(found)[1:2] + list(found)[3:]:
        folder, python_path, on_cards, *files = found[name]["output"]
        # The package with the library comes first in PYTHONPATH and in the working directory, then
        # the MXNet with simulated GPUs, or the set's own.
        mxnet = f"{Path(folder).parent}/{'set' if name == 'layers' else 'simulated'}"
        assert python_path == f"{folder}:{mxnet}:/of/the/set" and folder.startswith("/")
        assert {"libgluon_syncbn.so", "layers"} <= set(files)
        alone = name in ("layers", "weights, simulated")
        assert on_cards == ("" if alone else f"{folder}/gluon_syncbn/libgluon_syncbn.so")
        assert not Path(folder).exists()
    # With it all others that are installed.
    include = re.search(r"^include = (.*)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    packages = find_packages(str(ROOT), include=json.loads(include[1]))
    assert {name for name in packages if "." not in name} <= set(files)


def test_the_layer_alone_runs_without_simulated_gpus(mxnet_set, steps, monkeypatch):
    monkeypatch.setattr(check, "INSTALL", "no such file")
    verdicts = {name: step["verdict"] for name, step in mxnet_set().items()}
    assert verdicts == {"MXNet's set": "ok", "layers": "ok", "simulated GPUs": "FAILED"}


def test_a_set_that_cannot_be_unpacked(mxnet_set, steps, tmp_path):
    program(tmp_path, "unpack.sh", "echo No space left on device >&2; exit 1")
    found = mxnet_set()
    assert list(found) == ["MXNet's set"] and "No space left" in found["MXNet's set"]["detail"]
    assert steps.end() == 1


def test_make_without_nvcc():
    environment = {**os.environ, "NVCC": "/no/nvcc"}
    done = subprocess.run(
        ["make", "-s", "gpu-check"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and re.search("No nvcc is found", done.stdout), done
