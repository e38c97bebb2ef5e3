"""Tests `make gpu-check` without a GPU: how it handles steps that fail, hang or cannot run. Builds
nothing and runs no kernels."""

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
import pipeline as pipelines  # noqa: E402

pytestmark = pytest.mark.long


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "check.json"


@pytest.fixture
def pipeline(path):
    return pipelines.Pipeline(path, 60)


def read(path):
    return json.loads(path.read_text())


def verdicts(path):
    return {name: step["verdict"] for name, step in read(path)["steps"].items()}


def program(folder, name, text):
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def python(code):
    return [sys.executable, "-c", code]


def set_gpus(monkeypatch, *gpus):
    setup = SimpleNamespace(find_gpus=lambda: list(gpus))
    monkeypatch.setattr(check.build, "setup_py", lambda: setup)


def stub_steps(monkeypatch, **stubs):
    """Replaces all steps that need a GPU by `stubs`, or by steps that pass."""
    for name in ("sanitize", "bench", "run_mxnet"):

        def step(pipeline, *arguments, name=name):
            pipeline.step(name, pipelines.OK)

        monkeypatch.setattr(check, name, stubs.get(name, step))

    def build_all(pipeline, gpus):
        pipeline.step("build", pipelines.OK, "CUDA 13.0 for sm_90")
        return "library", "true", "true"

    set_gpus(monkeypatch, 90)
    monkeypatch.setattr(check, "find_pytorch", lambda pipeline: True)
    monkeypatch.setattr(check, "build_all", build_all)


# The pipeline.


def test_a_step_that_fails_shows_its_output_and_does_not_end_the_others(pipeline, path, capsys):
    assert pipeline.run("first", python("print('why'); exit(3)"), 30) == pipelines.FAILED
    assert read(path)["verdict"] == "not finished" and verdicts(path) == {"first": "FAILED"}
    assert pipeline.run("second", python("print('fine')"), 30) == pipelines.OK
    assert pipeline.end(has_gpu=False) == 1
    out = capsys.readouterr().out
    assert out.rstrip().endswith("FAILED: first") and "second: ok: fine" in out
    steps = read(path)["steps"]
    assert steps["first"]["output"] == ["why"] and steps["first"]["exit_code"] == 3
    assert read(path)["verdict"] == pipelines.FAILED


def has_ended(pid):
    """Gone, or a zombie that nobody has waited for."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize("hangs", [True, False])
def test_children_end_with_their_step(pipeline, path, tmp_path, hangs):
    """Also one that ignores SIGTERM, as a hanging one may. What was printed is kept."""
    file = tmp_path / "child"
    text = f"trap '' TERM; echo $$ >{file}; while :; do sleep 0.1; done"
    child = program(tmp_path, "child.sh", text)
    wait = "wait" if hangs else f"until [ -s {file} ]; do sleep 0.1; done"
    parent = program(tmp_path, "parent.sh", f"echo started; {child} & {wait}")
    begin = time.monotonic()
    verdict = pipeline.run("step", [parent], 5 if hangs else 30)
    assert time.monotonic() - begin < 30
    assert verdict == (pipelines.FAILED if hangs else pipelines.OK)
    step = read(path)["steps"]["step"]
    assert step["output"] == ["started"]
    assert step["detail"] == ("did not end within 5 s" if hangs else "started")
    # The kernel may need a moment after SIGKILL.
    wait_until(lambda: has_ended(int(file.read_text())))


def test_a_missing_program_or_a_failing_judge_is_reported_with_a_traceback(pipeline, path):
    def judge(code, text):
        raise KeyError("rows")

    assert pipeline.run("missing", ["/no/such/program"], 30) == pipelines.FAILED
    assert pipeline.run("judged", python("pass"), 30, judge=judge) == pipelines.FAILED
    steps = read(path)["steps"]
    assert "No such file" in steps["missing"]["detail"]
    assert all("Traceback" in step["traceback"] for step in steps.values())


def test_a_skipped_step_fails_where_there_is_a_gpu(path):
    pipeline = pipelines.Pipeline(path, 20)
    pipeline.step("speed", pipelines.MISSED, "3 of 96")
    pipeline.step("memcheck", pipelines.IMPOSSIBLE)
    pipeline.step("inside MXNet", pipelines.LEFT_OUT)
    assert pipeline.run("last", python("pass"), 100) == pipelines.OK
    assert pipeline.end(has_gpu=True) == 0
    # As time is reserved for later steps.
    assert pipeline.run("greedy", python("pass"), 100, reserve=18) == pipelines.SKIPPED
    assert pipeline.end(has_gpu=False) == 0
    assert pipeline.end(has_gpu=True) == 1


# The steps.


def test_without_a_gpu_it_says_so_and_all_is_well(monkeypatch, path, capsys):
    set_gpus(monkeypatch)
    monkeypatch.setattr(check, "BUILD", "print('CUDA 13.0 for all')")
    assert check.main(["--json", str(path)]) == 0
    assert "GPU: left out: none is found" in capsys.readouterr().out
    assert verdicts(path) == {"build": "ok", "GPU": "left out"}
    assert read(path)["library"] == "CUDA 13.0 for all" and read(path)["gpus"] == []
    monkeypatch.setattr(check, "BUILD", "import sys; sys.exit('nvcc: error: no such kernel')")
    assert check.main(["--json", str(path)]) == 1
    assert "no such kernel" in read(path)["steps"]["build"]["detail"]


def test_it_builds_for_the_gpus_that_there_are(monkeypatch, pipeline, path):
    monkeypatch.setattr(check, "BUILD", "import sys; print(sys.argv[1:])")
    check.build_all(pipeline, [75, 90])
    assert read(path)["steps"]["build"]["detail"] == "['75', '90']"


def test_all_steps_run_if_there_is_a_gpu(monkeypatch, path, tmp_path):
    stub_steps(monkeypatch)
    (tmp_path / "unpack.sh").write_text("")
    assert check.main(["--json", str(path)]) == 0
    left_out = [name for name, verdict in verdicts(path).items() if verdict != "ok"]
    assert left_out == ["inside MXNet"] and len(verdicts(path)) == 6
    assert read(path)["library"] == "CUDA 13.0 for sm_90"
    for options in (["--no-bench", "--no-sanitizer"], ["--mxnet-set", str(tmp_path)]):
        assert check.main(["--json", str(path), *options]) == 0
        assert {"compute-sanitizer", "speed"} <= set(verdicts(path))
    assert verdicts(path)["run_mxnet"] == "ok"


def test_an_error_of_its_own_ends_in_the_json_too(monkeypatch, path):
    def broken(pipeline, test):
        raise ZeroDivisionError("an internal error")

    stub_steps(monkeypatch, sanitize=broken)
    assert check.main(["--json", str(path)]) == 1
    step = read(path)["steps"]["gpu-check itself"]
    assert "an internal error" in step["detail"] and "Traceback" in step["traceback"]


@pytest.mark.parametrize(
    "says, code, memcheck, racecheck",
    [
        ("ERROR SUMMARY: 0 errors", 0, "ok", "FAILED"),
        ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, "FAILED", "ok"),
        ("ERROR SUMMARY: 2 errors", 9, "FAILED", "FAILED"),
        ("ERROR SUMMARY: 0 errors", 1, "FAILED", "FAILED"),
        ("========= Error: Device not supported", 1, "not supported", "not supported"),
    ],
)
def test_a_sanitizer_must_say_that_it_found_nothing(
    monkeypatch, pipeline, path, tmp_path, says, code, memcheck, racecheck
):
    program(tmp_path, "compute-sanitizer", f"echo '{says}'; exit {code}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pipeline.limit = 1000
    check.sanitize(pipeline, "test")
    assert verdicts(path) == {"memcheck": memcheck, "racecheck": racecheck}


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
sys.exit(bench.main() or CODE)
"""
STOP = "bench.comparisons = lambda rows: os.abort()"


@pytest.mark.parametrize(
    "change, code, verdict, detail",
    [
        ("", 0, "ok", "all guards held"),
        ("times['dx'] = 180", 0, "missed", r"^1\.2 above 1\.18: .*float32 NHWC: dx$"),
        ("bench.Set = None", 0, "FAILED", "TypeError: "),
        (STOP, 0, "FAILED", ""),
        ("", 1, "FAILED", ""),
    ],
)
def test_speed(monkeypatch, pipeline, path, tmp_path, change, code, verdict, detail):
    """The program's figures are in a file, which one that dies has not finished."""
    monkeypatch.setattr(check.build, "FOLDER", tmp_path)
    folder = repr(str(check.HERE))
    text = BENCH.replace("FOLDER", folder).replace("CHANGE", change).replace("CODE", str(code))
    (tmp_path / "bench.py").write_text(text)
    monkeypatch.setattr(check, "HERE", tmp_path)
    pipeline.limit = 1000
    check.bench(pipeline, "library")
    step = read(path)["steps"]["speed"]
    assert step["verdict"] == verdict and re.search(detail, step["detail"]), step
    assert step["result"]["finished"] == (change != STOP)


@pytest.mark.parametrize("ends, verdict", [("3 passed", "ok"), ("2 passed, 1 skipped", "skipped")])
def test_inside_mxnet(monkeypatch, pipeline, path, tmp_path, ends, verdict):
    unpack = "mkdir $1; touch $1/libgluon_syncbn.so; echo 'export PYTHONPATH=/of/the/set'"
    program(tmp_path, "unpack.sh", unpack)
    program(tmp_path, "make", "echo $@")
    says = "pwd; echo $PYTHONPATH; echo $SIMGPU_LIBRARY; ls . gluon_syncbn"
    monkeypatch.setattr(sys, "executable", program(tmp_path, "python", f"{says}; echo '{ends} 1s'"))
    monkeypatch.setattr(check, "find_sanitizer", lambda: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    library = tmp_path / "built.so"
    library.write_text("")
    pipeline.limit = 1000
    check.run_mxnet(pipeline, tmp_path, library, True)
    steps = read(path)["steps"]
    built = steps.pop("simulated GPUs")["detail"]
    for name in ("inside MXNet", "weights, simulated", "no peers", *check.ON_CARDS):
        step = steps[name]
        assert step["verdict"] == verdict, step
        folder, python_path, on_cards, *names = step["output"]
        # The package with the new library comes first in PYTHONPATH and in the working directory.
        assert python_path == f"{folder}:/of/the/set" and folder.startswith("/")
        assert {"libgluon_syncbn.so", "layers"} <= set(names)
        simulated = name in ("inside MXNet", "weights, simulated")
        assert on_cards == ("" if simulated else f"{folder}/gluon_syncbn/libgluon_syncbn.so")
        assert not Path(folder).exists()
    assert f" simgpu simgpu={Path(folder).parent}/set cuda_libraries= " in built
    # With it all others that are installed.
    include = re.search(r"^include = (.*)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    packages = find_packages(str(ROOT), include=json.loads(include[1]))
    assert {name for name in packages if "." not in name} <= set(names)


def test_make_without_nvcc(tmp_path):
    environment = {**os.environ, "NVCC": "/no/nvcc"}
    done = subprocess.run(
        ["make", "-s", "gpu-check"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and re.search("No nvcc is found", done.stdout), done
