"""Tests `make gpu-check` without a GPU: how it handles steps that fail, hang or cannot run. Builds
nothing and runs no kernels."""

import contextlib
import json
import os
import re
import shutil
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
import verdicts as v  # noqa: E402

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


@pytest.fixture
def gpu(monkeypatch):
    setup = SimpleNamespace(find_gpus=lambda: [90])
    monkeypatch.setattr(check.build, "setup_py", lambda: setup)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(check.build, "setup_py", lambda: SimpleNamespace(find_gpus=list))


# The pipeline.


def test_a_step_that_fails_shows_its_output_and_does_not_end_the_others(pipeline, path, capsys):
    assert pipeline.run("first", python("print('why'); exit(3)"), 30) == v.FAILED
    assert read(path)["verdict"] == "not finished" and verdicts(path) == {"first": "FAILED"}
    assert pipeline.run("second", python("print('fine')"), 30) == v.OK
    assert pipeline.end(has_gpu=False) == 1
    out = capsys.readouterr().out
    assert out.rstrip().endswith("FAILED: first") and "second: ok: fine" in out
    steps = read(path)["steps"]
    assert steps["first"]["output"] == ["why"] and steps["first"]["exit_code"] == 3
    assert read(path)["verdict"] == v.FAILED


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
    assert verdict == (v.FAILED if hangs else v.OK)
    step = read(path)["steps"]["step"]
    assert step["output"] == ["started"]
    assert step["detail"] == ("did not end within 5 s" if hangs else "started")
    # The kernel may need a moment after SIGKILL.
    wait_until(lambda: has_ended(int(file.read_text())))


def test_a_missing_program_or_a_failing_judge_is_reported_with_a_traceback(pipeline, path):
    def judge(code, text):
        raise KeyError("rows")

    assert pipeline.run("missing", ["/no/such/program"], 30) == v.FAILED
    assert pipeline.run("judged", python("pass"), 30, judge=judge) == v.FAILED
    steps = read(path)["steps"]
    assert "No such file" in steps["missing"]["detail"]
    assert all("Traceback" in step["traceback"] for step in steps.values())


def test_what_does_not_fit_is_not_run_and_no_failure(path):
    pipeline = pipelines.Pipeline(path, 20)
    assert pipeline.run("hangs", python("input"), 100, reserve=18) == v.NOT_RUN
    endless = ["sh", "-c", "echo started; exec sleep 1000"]
    assert pipeline.run("hangs for all its time", endless, 5) == v.FAILED
    assert pipeline.run("is cut", endless, 100, reserve=pipeline.left() - 6) == v.NOT_RUN
    steps = read(path)["steps"]
    assert [step.get("output") for step in steps.values()] == [None, ["started"], ["started"]]
    del pipeline.result["steps"]["hangs for all its time"]
    assert pipeline.end(has_gpu=True) == 0


TERMINATED = """
import os, signal, sys
sys.path.insert(0, FOLDER)
import check
check.build.setup_py = lambda: type("Setup", (), {"find_gpus": lambda: [90]})
check.build_all = lambda pipeline: True

def steps(pipeline, options):
    pipeline.run("done", ["true"], 60)
    pipeline.run("running", ["sh", "-c", f"echo started; kill -TERM {os.getpid()}; sleep 1000"], 60)
    pipeline.run("later", ["true"], 60)

check.check_gpu = steps
sys.exit(check.main(["--json", sys.argv[1]]))
"""


def test_sigterm_ends_the_step_that_runs_and_keeps_what_it_printed(path):
    code = TERMINATED.replace("FOLDER", repr(str(check.HERE)))
    done = subprocess.run([*python(code), str(path)], stdout=subprocess.PIPE, timeout=200)
    found = {"done": "ok", "running": "not run", "later": "not run"}
    assert done.returncode == 0 and verdicts(path) == found, done
    assert read(path)["steps"]["running"]["output"] == ["started"]
    assert read(path)["verdict"] == "ok" and "running" not in read(path)


def test_the_json_names_the_step_that_runs(pipeline, path):
    """For when this process is killed."""
    pipeline.run("first", ["true"], 60)
    code = f"import json; print(json.load(open({str(path)!r})))"
    pipeline.run("second", python(code), 60)
    text = read(path)["steps"]["second"]["detail"]
    assert "'running': 'second'" in text and "'first': {'verdict': 'ok'" in text


def test_a_skipped_step_fails_where_there_is_a_gpu(path):
    pipeline = pipelines.Pipeline(path, 20)
    pipeline.step("speed", v.MISSED, "3 of 96")
    pipeline.step("memcheck", v.IMPOSSIBLE)
    pipeline.step("inside MXNet", v.LEFT_OUT)
    assert pipeline.run("last", python("pass"), 100) == v.OK
    assert pipeline.end(has_gpu=True) == 0
    pipeline.step("PyTorch", v.SKIPPED)
    assert pipeline.end(has_gpu=False) == 0
    assert pipeline.end(has_gpu=True) == 1


# The steps.


def test_without_a_gpu_it_says_so_and_all_is_well(no_gpu, monkeypatch, path, capsys):
    monkeypatch.setattr(check, "BUILD", "print('CUDA 13.0 for sm_75, PTX 121')")
    assert check.main(["--json", str(path)]) == 0
    assert "GPU: left out: none is found" in capsys.readouterr().out
    assert verdicts(path) == {"GPU": "left out", "build": "ok"}
    assert read(path)["gpus"] == []
    monkeypatch.setattr(check, "BUILD", "import sys; sys.exit('nvcc: error: no such kernel')")
    assert check.main(["--json", str(path)]) == 1
    assert "no such kernel" in read(path)["steps"]["build"]["detail"]


class Commands(pipelines.Pipeline):
    """Runs nothing, and keeps what would run."""

    def run(self, name, command, most, **options):
        self.result.setdefault("commands", {})[name] = [*map(str, command)], most, options
        return self.step(name, v.OK)


@pytest.fixture
def commands(monkeypatch):
    monkeypatch.setattr(check, "Pipeline", Commands)
    monkeypatch.setattr(Commands, "_write", lambda self: None)
    made = []
    monkeypatch.setattr(Commands, "end", lambda self, has_gpu: made.append(self) or 0)
    return made


def test_the_order_and_the_judges_of_the_kernels(gpu, commands, monkeypatch, path):
    monkeypatch.setattr(check, "find_sanitizer", lambda: "/a/compute-sanitizer")
    check.main(["--json", str(path)])
    check.main(["--json", str(path), "--no-sanitizer", "--no-bench"])
    found = commands[0].result["commands"]
    assert {name: options.get("judge") for name, (_, _, options) in found.items()} == {
        "build": v.of_build,
        "against the CPU's kernels": v.of_native_tests,
        "devices that meet": v.of_native_tests,
        "memcheck": v.of_memcheck,
        "racecheck": v.of_racecheck,
        "PyTorch": None,
        "speed": found["speed"][2]["judge"],
    }
    assert list(found)[-2:] == ["PyTorch", "speed"]
    for name in ("memcheck", "racecheck"):
        assert found[name][0][:5] == ["/a/compute-sanitizer", *check.SANITIZE, name]
    # Whatever the others do, there is time for the speed.
    late = [options["reserve"] for _, _, options in found.values() if "reserve" in options]
    assert late == [check.FOR_SPEED] * 4 and check.LIMIT < 6 * 60
    steps = commands[1].result["steps"]
    assert steps["speed"]["verdict"] == steps["compute-sanitizer"]["verdict"] == "left out"


def test_what_is_missing_is_skipped(gpu, commands, monkeypatch, path):
    monkeypatch.setattr(check, "find_sanitizer", lambda: None)
    monkeypatch.setattr(check, "find_pytorch", lambda pipeline: False)
    check.main(["--json", str(path)])
    steps = commands[0].result["steps"]
    assert [name for name, step in steps.items() if step["verdict"] == "skipped"] == [
        *("memcheck", "racecheck", "speed"),
    ]


def test_an_error_of_its_own_ends_in_the_json_too(gpu, monkeypatch, path):
    def broken(pipeline):
        raise ZeroDivisionError("an internal error")

    monkeypatch.setattr(check, "build_all", broken)
    assert check.main(["--json", str(path)]) == 1
    step = read(path)["steps"]["gpu-check itself"]
    assert "an internal error" in step["detail"] and "Traceback" in step["traceback"]


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
    check.bench(pipeline)
    step = read(path)["steps"]["speed"]
    assert step["verdict"] == verdict and re.search(detail, step["detail"]), step
    assert read(path)["speed"]["finished"] == (change != STOP)


@pytest.fixture
def mxnet_set(monkeypatch, tmp_path, pipeline):
    """A set, a library, Python that says "4 passed", and a compute-sanitizer that says something
    after what runs under it. Nothing else is in PATH but the shell's own programs."""
    unpack = "mkdir $1; touch $1/libgluon_syncbn.so; echo 'export PYTHONPATH=/of/the/set'"
    program(tmp_path, "unpack.sh", unpack)
    (tmp_path / "bin").mkdir()
    for name in ("bash", "env", "ls", "mkdir", "sh", "touch"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "built.so").write_text("")
    pipeline.limit = 1000

    def run(says="4 passed, 9 deselected in 1.00s", sanitizer="", has_sanitizer=True):
        ends = f"echo '====== {says} ======'"
        shows = "pwd; echo $PYTHONPATH; echo $SIMGPU_LIBRARY; ls . gluon_syncbn"
        fails = '[ "$1" = "no such file" ] && exit 2'
        python = program(tmp_path, "python", f"{fails}\n{shows} 2>/dev/null; echo $@; {ends}")
        monkeypatch.setattr(sys, "executable", python)
        text = f'shift 4; "$@" || exit; echo "========= {sanitizer}"'
        tool = program(tmp_path, "compute-sanitizer", text)
        monkeypatch.setattr(check, "find_sanitizer", lambda: tool if has_sanitizer else None)
        check.run_mxnet(pipeline, tmp_path, tmp_path / "built.so", True)
        return pipeline.result["steps"]

    return run


CLEAN = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"


def test_inside_mxnet(mxnet_set, pipeline):
    steps = mxnet_set(sanitizer=CLEAN)
    assert pipeline.end(has_gpu=True) == 0
    names = list(steps)
    assert names == [
        *("MXNet's set", "simulated GPUs", "packages"),
        # What is most worth knowing comes first.
        *("bits of nets", "weights, simulated", "weights", "failures of CUDA"),
        *("racecheck of a net", "no peers", "small nets", "beside other work", "layers"),
        *("programs", "inside MXNet", "time in MXNet"),
    ]
    assert steps["simulated GPUs"]["detail"].startswith("====== 4 passed")
    for name in names[2:]:
        output = [line for line in steps[name]["output"] if "COMPUTE" not in line]
        folder, python_path, on_cards, *files = output
        # The package with the library comes first in PYTHONPATH and in the working directory, then
        # the MXNet with simulated GPUs, or the set's own.
        own = name in ("inside MXNet", "time in MXNet")
        mxnet = f"{Path(folder).parent}/{'set' if own else 'simulated'}"
        assert python_path == f"{folder}:{mxnet}:/of/the/set" and folder.startswith("/")
        assert {"libgluon_syncbn.so", "layers"} <= set(files)
        simulated = own or name in ("packages", "weights, simulated")
        assert on_cards == ("" if simulated else f"{folder}/gluon_syncbn/libgluon_syncbn.so")
        assert not Path(folder).exists()
    # With it all others that are installed.
    include = re.search(r"^include = (.*)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    packages = find_packages(str(ROOT), include=json.loads(include[1]))
    assert {name for name in packages if "." not in name} <= set(files)


@pytest.mark.parametrize(
    "sanitizer, verdict",
    [
        (CLEAN, "ok"),
        ("RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", "FAILED"),
        ("ERROR SUMMARY: 0 errors", "FAILED"),
        ("Error: Device not supported", "not supported"),
    ],
)
def test_a_net_under_racecheck(mxnet_set, pipeline, sanitizer, verdict):
    assert mxnet_set(sanitizer=sanitizer)["racecheck of a net"]["verdict"] == verdict
    assert pipeline.end(has_gpu=True) == (verdict == "FAILED")


@pytest.mark.parametrize("says, verdict", [("2 passed, 1 skipped", "skipped"), ("", "FAILED")])
def test_tests_that_did_not_run_in_mxnet(mxnet_set, pipeline, says, verdict):
    steps = mxnet_set(f"{says} in 1.00s" if says else "", CLEAN, has_sanitizer=False)
    for name in ("bits of nets", "weights", "failures of CUDA", "inside MXNet", "no peers"):
        assert steps[name]["verdict"] == verdict
    assert steps["racecheck of a net"]["verdict"] == "skipped"
    assert pipeline.end(has_gpu=True) == 1


def test_the_layer_alone_runs_without_simulated_gpus(mxnet_set, pipeline, monkeypatch):
    monkeypatch.setattr(check, "INSTALL", "no such file")
    steps = mxnet_set()
    assert {name: step["verdict"] for name, step in steps.items()} == {
        "MXNet's set": "ok",
        "simulated GPUs": "FAILED",
        "inside MXNet": "ok",
        "time in MXNet": "ok",
    }


def test_a_set_that_cannot_be_unpacked(mxnet_set, pipeline, tmp_path):
    program(tmp_path, "unpack.sh", "echo No space left on device >&2; exit 1")
    steps = mxnet_set()
    assert list(steps) == ["MXNet's set"] and "No space left" in steps["MXNet's set"]["detail"]
    assert pipeline.end(has_gpu=True) == 1


def test_make_without_nvcc(tmp_path):
    environment = {**os.environ, "NVCC": "/no/nvcc"}
    done = subprocess.run(
        ["make", "-s", "gpu-check"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and re.search("No nvcc is found", done.stdout), done
