"""Tests `make gpu-check` without a GPU: how it handles steps that fail, hang or cannot run. Builds
nothing and runs no kernels."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import check  # noqa: E402
import pipeline as pipelines  # noqa: E402

pytestmark = pytest.mark.long

GPU = {"name": "NVIDIA H200", "driver": "580.1", "architecture": 90}


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


def stub_steps(monkeypatch, **stubs):
    """Replaces all steps that need a GPU by `stubs`, or by steps that pass."""
    for name in ("check_kernels", "sanitize", "bench", "run_mxnet", "find_spills"):

        def step(pipeline, *arguments, name=name):
            pipeline.step(name, pipelines.OK)

        monkeypatch.setattr(check, name, stubs.get(name, step))
    monkeypatch.setattr(check, "ask_gpu", lambda: GPU)
    monkeypatch.setattr(check, "find_pytorch", stubs.get("find_pytorch", lambda pipeline: True))
    monkeypatch.setattr(check, "build_all", stubs.get("build_all", _build))


def _build(pipeline, gpu):
    pipeline.step("build", pipelines.OK, "CUDA 13.0 for sm_90")
    return "library", "true"


# The pipeline.


def test_a_step_that_fails_shows_its_output_and_does_not_end_the_others(pipeline, path, capsys):
    assert pipeline.run("first", python("print('why'); exit(3)"), 30) == pipelines.FAILED
    assert pipeline.run("second", python("print('fine')"), 30) == pipelines.OK
    assert pipeline.end(has_gpu=False) == 1
    out = capsys.readouterr().out
    assert out.rstrip().endswith("FAILED: first") and "second: ok: fine" in out
    steps = read(path)["steps"]
    assert steps["first"]["output"] == ["why"] and steps["first"]["exit_code"] == 3
    assert read(path)["verdict"] == pipelines.FAILED


def test_the_json_is_written_after_each_step(pipeline, path):
    pipeline.run("first", python("pass"), 30)
    assert read(path)["verdict"] == "not finished" and verdicts(path) == {"first": "ok"}


def test_a_timeout_ends_children_and_keeps_the_output(pipeline, path, tmp_path):
    # A child that ignores SIGTERM, as a hanging one may do.
    file = tmp_path / "child"
    child = f"trap '' TERM; echo $$ >{file}; while :; do sleep 0.1; done"
    parent = (
        f"import subprocess, time; child = subprocess.Popen(['sh', '-c', {child!r}]); "
        "print('started', flush=True); time.sleep(100)"
    )
    begin = time.monotonic()
    assert pipeline.run("hangs", python(parent), 5) == pipelines.FAILED
    assert time.monotonic() - begin < 30
    step = read(path)["steps"]["hangs"]
    assert step["detail"] == "did not end within 5 s" and step["output"] == ["started"]
    status = Path(f"/proc/{int(file.read_text())}/stat")
    # Gone, or a zombie.
    assert not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_children_of_a_finished_step_are_ended(pipeline, tmp_path):
    file = tmp_path / "child"
    assert pipeline.run("leaves", ["sh", "-c", f"sleep 100 & echo $! >{file}"], 30) == pipelines.OK
    time.sleep(0.2)
    status = Path(f"/proc/{int(file.read_text())}/stat")
    assert not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_output_may_be_long_or_binary(pipeline, path):
    code = (
        "import sys; sys.stdout.buffer.write(b'\\xff\\xfe\\n'); print('line\\n' * 1000, end='last')"
    )
    pipeline.run("odd", python(code), 30)
    lines = read(path)["steps"]["odd"]["output"]
    assert 290 < len(lines) < 310 and lines[-1] == "last" and "\ufffd" in lines[0]


def test_a_missing_program_or_a_failing_judge_is_reported_with_a_traceback(pipeline, path):
    def judge(code, text):
        raise KeyError("rows")

    assert pipeline.run("missing", ["/no/such/program"], 30) == pipelines.FAILED
    assert pipeline.run("judged", python("pass"), 30, judge=judge) == pipelines.FAILED
    steps = read(path)["steps"]
    assert "No such file" in steps["missing"]["detail"]
    assert all("Traceback" in step["traceback"] for step in steps.values())


def test_time_is_reserved_for_later_steps(path):
    pipeline = pipelines.Pipeline(path, 20)
    assert pipeline.run("greedy", python("pass"), 100, reserve=18) == pipelines.SKIPPED
    assert pipeline.run("last", python("pass"), 100) == pipelines.OK


def test_a_skipped_step_fails_if_there_is_a_gpu(pipeline):
    pipeline.step("speed", pipelines.MISSED, "3 of 96")
    pipeline.step("memcheck", pipelines.IMPOSSIBLE)
    pipeline.step("inside MXNet", pipelines.LEFT_OUT)
    assert pipeline.end(has_gpu=True) == 0
    pipeline.step("against PyTorch", pipelines.SKIPPED)
    assert pipeline.end(has_gpu=False) == 0
    assert pipeline.end(has_gpu=True) == 1


# The steps.


def test_without_a_gpu_it_says_so_and_passes(monkeypatch, path, capsys):
    monkeypatch.setattr(check, "ask_gpu", lambda: None)
    monkeypatch.setattr(check, "BUILD", "print('CUDA 13.0 for all')")
    monkeypatch.setattr(
        check,
        "REPORT",
        "import sys; open(sys.argv[1], 'w').write("
        '\'[{"kernel": "k", "arch": 90, "spilled_bytes": 0, "occupancy": 0.5}]\')',
    )
    monkeypatch.setattr(check.build, "FOLDER", path.parent)
    assert check.main(["--json", str(path)]) == 0
    assert "GPU: left out: none is found" in capsys.readouterr().out
    assert verdicts(path) == {"build": "ok", "register spills": "ok", "GPU": "left out"}
    assert read(path)["library"] == "CUDA 13.0 for all" and read(path)["gpu"] is None


@pytest.mark.parametrize("gpu", [None, GPU])
def test_a_failed_build_is_reported(monkeypatch, path, capsys, gpu):
    monkeypatch.setattr(check, "ask_gpu", lambda: gpu)
    monkeypatch.setattr(check, "BUILD", "import sys; sys.exit('nvcc: error: no such kernel')")
    assert check.main(["--json", str(path)]) == 1
    assert "no such kernel" in read(path)["steps"]["build"]["detail"]
    assert "FAILED: build" in capsys.readouterr().out


def test_spilled_registers_fail(monkeypatch, pipeline, path):
    monkeypatch.setattr(check, "FOR_SPILLS", 5)
    monkeypatch.setattr(
        check,
        "REPORT",
        "import sys; open(sys.argv[1], 'w').write("
        '\'[{"kernel": "k", "arch": 90, "spilled_bytes": 8, "occupancy": 0.5}]\')',
    )
    monkeypatch.setattr(check.build, "FOLDER", path.parent)
    check.find_spills(pipeline, GPU)
    assert read(path)["steps"]["register spills"]["detail"] == "k on sm_90"
    assert verdicts(path)["register spills"] == pipelines.FAILED


def test_spills_are_left_out_if_no_time_is_left(pipeline, path):
    pipeline.limit = check.FOR_SPILLS - 1
    check.find_spills(pipeline, GPU)
    assert verdicts(path) == {"register spills": pipelines.LEFT_OUT}
    assert pipeline.end(GPU) == 0


def test_a_slow_machine_checks_spills_for_few_architectures(monkeypatch, pipeline, path):
    monkeypatch.setattr(check, "BUILD", "print('CUDA 13.0 for sm_75 sm_90 sm_120, PTX 121')")
    monkeypatch.setattr(
        check,
        "REPORT",
        "import sys; print(*sys.argv[2:]); open(sys.argv[1], 'w').write("
        '\'[{"kernel": "k", "arch": 90, "spilled_bytes": 0, "occupancy": 0.5}]\')',
    )
    monkeypatch.setattr(check, "SLOW", -1)
    monkeypatch.setattr(check.build, "FOLDER", path.parent)
    assert check.build_all(pipeline, None)
    check.find_spills(pipeline, None)
    step = read(path)["steps"]["register spills"]
    assert step["output"] == ["75 120"] and "only for sm_75 and sm_120" in step["detail"]


def test_all_steps_run_if_there_is_a_gpu(monkeypatch, path, tmp_path):
    stub_steps(monkeypatch)
    (tmp_path / "unpack.sh").write_text("")
    assert check.main(["--json", str(path), "--mxnet-set", str(tmp_path)]) == 0
    assert set(verdicts(path).values()) == {"ok"} and len(verdicts(path)) == 7
    # The last, as it does not need the GPU.
    assert list(verdicts(path))[-1] == "find_spills"
    assert read(path)["library"] == "CUDA 13.0 for sm_90"
    assert check.main(["--json", str(path), "--no-bench", "--no-sanitizer"]) == 0
    assert list(verdicts(path).values()).count("left out") == 3


def test_an_invalid_mxnet_set_is_refused_before_the_build(capsys, path):
    with pytest.raises(SystemExit):
        check.main(["--json", str(path), "--mxnet-set", "nowhere"])
    assert "nowhere/unpack.sh" in capsys.readouterr().err and not path.exists()


def test_missing_pytorch_fails_if_there_is_a_gpu(monkeypatch, path):
    stub_steps(monkeypatch, find_pytorch=lambda pipeline: False)
    assert check.main(["--json", str(path)]) == 1
    assert verdicts(path)["against PyTorch in float64"] == "skipped"
    assert verdicts(path)["speed"] == "skipped"


@pytest.mark.parametrize(
    "code, verdict, detail",
    [
        ("print('2.11.0, CUDA 13.0')", "ok", "2.11.0, CUDA 13.0"),
        ("import torch_", "FAILED", "torch_"),
    ],
)
def test_the_version_of_pytorch_or_its_error(monkeypatch, pipeline, path, code, verdict, detail):
    monkeypatch.setattr(check, "PYTORCH", code)
    pipeline.limit = 1000
    assert check.find_pytorch(pipeline) == (verdict == "ok")
    step = read(path)["steps"]["PyTorch"]
    assert step["verdict"] == verdict and detail in step["detail"]


def test_the_sanitizer_of_cuda_home(monkeypatch, pipeline, path, tmp_path):
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "compute-sanitizer", "echo 'ERROR SUMMARY: 0 errors'")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    pipeline.limit = 1000
    check.sanitize(pipeline, "test")
    assert verdicts(path)["memcheck"] == "ok"


def test_an_internal_error_is_in_the_json_too(monkeypatch, path):
    def broken(pipeline, library):
        raise ZeroDivisionError("an internal error")

    stub_steps(monkeypatch, check_kernels=broken)
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
def test_sanitizers_must_report_that_they_found_nothing(
    monkeypatch, pipeline, path, tmp_path, says, code, memcheck, racecheck
):
    program(tmp_path, "compute-sanitizer", f"echo '{says}'; exit {code}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pipeline.limit = 1000
    check.sanitize(pipeline, "test")
    assert verdicts(path) == {"memcheck": memcheck, "racecheck": racecheck}


def test_the_gpu_according_to_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "DRIVER", "raise OSError")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.ask_gpu() is None
    program(tmp_path, "nvidia-smi", "echo 'No devices were found'; exit 6")
    assert check.ask_gpu() is None
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA H200, 580.1, 9.0'")
    assert check.ask_gpu() == GPU
    # If nvidia-smi fails, the driver is queried.
    program(tmp_path, "nvidia-smi", "exit 1")
    monkeypatch.setattr(check, "DRIVER", "print('NVIDIA H200, 580.1, 9.0')")
    assert check.ask_gpu() == GPU


def figures(folder, name, **result):
    """A program that writes `result` to a file."""
    return f"open({str(folder / name)!r}, 'w').write({json.dumps(result)!r})\n"


@pytest.mark.parametrize(
    "missed, finished, code, verdict",
    [([], True, 0, "ok"), (["slow"], True, 0, "missed"), ([], False, 0, "FAILED")]
    + [([], True, 1, "FAILED")],
)
def test_figures_of_speed(monkeypatch, pipeline, path, tmp_path, missed, finished, code, verdict):
    monkeypatch.setattr(check.build, "FOLDER", tmp_path)
    monkeypatch.setattr(check, "HERE", tmp_path)
    pipeline.limit = 1000
    thresholds = [{"threshold": "passes below 0.85 of a copy", "of": 96, "missed": missed}]
    text = figures(tmp_path, "bench.json", finished=finished, thresholds=thresholds, rows=[1])
    (tmp_path / "bench.py").write_text(f"{text}exit({code})")
    check.bench(pipeline, "library")
    step = read(path)["steps"]["speed"]
    assert step["verdict"] == verdict and step["result"]["rows"] == [1]
    assert ("1 of 96 passes below" in step["detail"]) == bool(missed)


@pytest.mark.parametrize(
    "failed, finished, code, verdict",
    [([], True, 0, "ok"), (["y"], True, 1, "FAILED"), ([], False, -11, "FAILED")],
)
def test_figures_of_the_kernels(
    monkeypatch, pipeline, path, tmp_path, failed, finished, code, verdict
):
    monkeypatch.setattr(check.build, "FOLDER", tmp_path)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    pipeline.limit = 1000
    (tmp_path / "tests/gpu").mkdir(parents=True)
    text = figures(tmp_path, "check_kernels.json", seed=5, finished=finished, failed=failed)
    end = "import os; os.abort()" if code < 0 else f"exit({code})"
    (tmp_path / "tests/gpu/check_kernels.py").write_text(text + end)
    check.check_kernels(pipeline, "library")
    assert verdicts(path) == {"against PyTorch in float64": verdict}


@pytest.mark.parametrize(
    "ends, verdict",
    [("3 passed in 1s", "ok"), ("2 passed, 1 skipped in 1s", "skipped"), ("1 skipped", "skipped")],
)
def test_inside_mxnet(monkeypatch, pipeline, path, tmp_path, ends, verdict):
    program(tmp_path, "unpack.sh", "echo 'export PYTHONPATH=/of/the/set'")
    fake = program(tmp_path, "python", f"pwd; echo $PYTHONPATH; ls gluon_syncbn; echo '{ends}'")
    monkeypatch.setattr(sys, "executable", fake)
    library = tmp_path / "built.so"
    library.write_text("")
    pipeline.limit = 1000
    check.run_mxnet(pipeline, tmp_path, library)
    step = read(path)["steps"]["inside MXNet"]
    assert step["verdict"] == verdict, step
    folder, python_path, *names = step["output"]
    # The package with the new library comes first in PYTHONPATH and in the working directory.
    assert python_path == f"{folder}:/of/the/set" and folder.startswith("/")
    assert {"libgluon_syncbn.so", "layers"} <= set(names)
    assert not Path(folder).exists()


def test_make_without_nvcc(tmp_path):
    environment = {**os.environ, "NVCC": "/no/nvcc"}
    done = subprocess.run(
        ["make", "-s", "gpu-check"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and re.search("No nvcc is found", done.stdout), done
