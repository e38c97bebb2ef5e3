"""`make gpu-check`: builds for this machine's GPU, checks the kernels, and measures them.

    python benchmarks/gpu/check.py [--json FILE] [--mxnet-set FOLDER] [--no-bench] [--no-sanitizer]

Needs nvcc, a C++ compiler, PyTorch for CUDA, compute-sanitizer, and no network. Without a GPU it
only compiles everything, for all architectures. Ends within 8 minutes. --mxnet-set: a folder with
unpack.sh, which sets PYTHONPATH and LD_LIBRARY_PATH for a CUDA build of MXNet; the layer is then
tested in it, too.

Exit code 1: a step failed, or could not run although there is a GPU. A missed speed threshold is
reported but is not a failure.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import build
from pipeline import FAILED, IMPOSSIBLE, LEFT_OUT, MISSED, OK, SKIPPED, Pipeline, by_exit_code

ROOT = build.ROOT
HERE = Path(__file__).resolve().parent
# A little less than 8 minutes, as processes may need some time to end.
LIMIT = 8 * 60 - 15
SLOW = 150  # A machine on which the build takes more seconds is slow.
# Seconds reserved for steps after the sanitizers.
FOR_SPEED, FOR_MXNET = 90, 90
FOR_SPILLS = 90  # seconds for one architecture

BUILD = """
import ctypes, sys, build
library, *tests = build.build([int(each) for each in sys.argv[1:]])
library = ctypes.CDLL(str(library))
library.gluon_syncbn_cuda.restype = ctypes.c_char_p
print((library.gluon_syncbn_cuda() or b"without CUDA kernels").decode())
"""
REPORT = """
import json, sys, build
kernels = build.report([int(each) for each in sys.argv[2:]])
with open(sys.argv[1], "w") as file:
    json.dump(kernels, file)
"""
# Queries the driver if there is no nvidia-smi.
DRIVER = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
name, values = ctypes.create_string_buffer(256), [ctypes.c_int() for _ in range(4)]
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(values[0])) == 0
assert values[0].value > 0 and cuda.cuDeviceGetName(name, 256, 0) == 0
assert cuda.cuDriverGetVersion(ctypes.byref(values[1])) == 0
for value, attribute in zip(values[2:], (75, 76)):
    assert cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0) == 0
_, version, major, minor = (value.value for value in values)
print(f"{name.value.decode()}, for CUDA {version // 1000}.{version % 1000 // 10}, {major}.{minor}")
"""
PYTORCH = """
import torch
assert torch.cuda.is_available(), "PyTorch finds no GPU"
print(f"{torch.__version__}, CUDA {torch.version.cuda}")
"""


def ask(command):
    """The output of a program, or None if it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.decode(errors="replace").strip()
    return text if done.returncode == 0 and text else None


def ask_gpu():
    """Name, driver and compute capability of the first GPU, or None."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    for command in (query, [sys.executable, "-c", DRIVER]):
        text = ask(command)
        try:
            name, driver, capability = text.splitlines()[0].rsplit(",", 2)
            major, minor = capability.split(".")
            return {
                "name": name.strip(),
                "driver": driver.strip(),
                "architecture": 10 * int(major) + int(minor),
            }
        except (AttributeError, ValueError):
            continue
    return None


def environment():
    return dict(os.environ, PYTHONPATH=str(HERE))


def architectures_of(gpu):
    """The architecture of the GPU; empty, meaning all, if there is none."""
    return [gpu["architecture"]] if gpu else []


def build_all(pipeline, gpu):
    """The paths of the library and the native tests, or None if the build failed."""
    most = 180 if gpu else pipeline.limit
    command = [sys.executable, "-c", BUILD, *architectures_of(gpu)]
    if pipeline.run("build", command, most, env=environment()) != OK:
        return None
    return [build.FOLDER / name for name in ("libgluon_syncbn.so", *build.TESTS)]


def find_spills(pipeline, gpu):
    """Compiles once more to find register spills. Runs last, as it does not need the GPU."""
    architectures = architectures_of(gpu)
    if gpu and pipeline.left() < FOR_SPILLS:
        pipeline.step("register spills", LEFT_OUT, "no time is left, see `make cuda-report`")
        return
    found = build.FOLDER / "kernels.json"
    which = ""
    if not gpu and pipeline.left() < pipeline.limit - SLOW:
        # All architectures would take twice as long as the build.
        text = pipeline.result["steps"]["build"]["detail"]
        built = re.findall(r"sm_(\d+)", text)
        architectures = sorted({built[0], built[-1]}, key=int)
        which = f", only for sm_{' and sm_'.join(architectures)}, as the machine is slow"

    def judge(code, text):
        if code != 0:
            return by_exit_code(code, text)
        kernels = json.loads(found.read_text())
        spilled = [f"{k['kernel']} on sm_{k['arch']}" for k in kernels if k["spilled_bytes"]]
        least = min(k["occupancy"] for k in kernels)
        detail = f"{len(kernels)} kernels without spills, occupancy at least {least:.0%}{which}"
        return FAILED if spilled else OK, "; ".join(spilled) or detail, {"kernels": kernels}

    command = [sys.executable, "-c", REPORT, found, *architectures]
    pipeline.run("register spills", command, pipeline.limit, judge=judge, env=environment())


def find_pytorch(pipeline):
    """Whether PyTorch finds the GPU."""
    # The first import may take long.
    command = [sys.executable, "-c", PYTORCH]
    return pipeline.run("PyTorch", command, 120, reserve=FOR_SPEED) == OK


def check_kernels(pipeline, library):
    name = "against PyTorch in float64"
    found = build.FOLDER / "check_kernels.json"

    def judge(code, text):
        result = json.loads(found.read_text()) if found.exists() else {}
        if not result.get("finished"):
            return FAILED, by_exit_code(code, text)[1], {"result": result}
        failed = f"{len(result['failed'])} failed"
        detail = failed if result["failed"] else "all dtypes, layouts and numbers of shards"
        verdict = OK if code == 0 and not result["failed"] else FAILED
        return verdict, f"seed {result['seed']}, {detail}", {"result": result}

    _remove(found)
    command = [sys.executable, "-u", ROOT / "tests/gpu/check_kernels.py", library, "--json", found]
    pipeline.run(name, command, 120, reserve=FOR_SPEED, judge=judge)


def sanitize(pipeline, test):
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(home / "bin")])
    tool = shutil.which("compute-sanitizer", path=path)
    clean = {
        "memcheck": "ERROR SUMMARY: 0 errors",
        "racecheck": "RACECHECK SUMMARY: 0 hazards displayed",
    }
    for kind, summary in clean.items():
        if not tool:
            pipeline.step(kind, SKIPPED, "compute-sanitizer is not found (--no-sanitizer)")
            continue

        def judge(code, text, summary=summary):
            if "Device not supported" in text:
                return IMPOSSIBLE, "compute-sanitizer: Device not supported", {}
            verdict, detail, more = by_exit_code(code, text)
            if verdict == OK and summary not in text:
                return FAILED, f"the output lacks: {summary}", more
            return verdict, detail, more

        command = [tool, "--tool", kind, "--error-exitcode", "9", test, "--small"]
        pipeline.run(kind, command, 150, reserve=FOR_SPEED + FOR_MXNET, judge=judge)


def bench(pipeline, library):
    found = build.FOLDER / "bench.json"

    def judge(code, text):
        result = json.loads(found.read_text()) if found.exists() else {}
        if code != 0 or not result.get("finished"):
            return FAILED, by_exit_code(code, text)[1], {"result": result}
        counts = [
            f"{len(threshold['missed'])} of {threshold['of']} {threshold['threshold']}"
            for threshold in result["thresholds"]
            if threshold["missed"]
        ]
        return (
            MISSED if counts else OK,
            "; ".join(counts) or "all thresholds held",
            {"result": result},
        )

    _remove(found)
    command = [sys.executable, "-u", HERE / "bench.py", library, "--json", found]
    pipeline.run("speed", command, 120, reserve=FOR_MXNET // 2, judge=judge, show=True)


def run_mxnet(pipeline, folder, library):
    """Runs bench_mxnet.py and tests/gpu/test_mxnet_gpu.py in the MXNet of the set."""

    def judge(code, text):
        verdict, detail, more = by_exit_code(code, text)
        detail = detail.strip("= ")
        if verdict == OK and (" passed" not in detail or "skipped" in detail):
            return SKIPPED, detail, more
        return verdict, detail, more

    with tempfile.TemporaryDirectory(prefix="mxnet-") as unpacked:
        packages = Path(unpacked) / "packages"
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        for package in ROOT.glob("*/__init__.py"):
            shutil.copytree(package.parent, packages / package.parent.name, ignore=ignored)
        shutil.copy(library, packages / "gluon_syncbn" / "libgluon_syncbn.so")
        script = (
            'eval "$("$1"/unpack.sh "$2"/set)" && export PYTHONPATH="$3:$PYTHONPATH" && '
            '"$4" "$5"/benchmarks/gpu/bench_mxnet.py && exec "$4" -m pytest '
            "-v -rs --tb=short -p no:cacheprovider -o timeout=90 -o timeout_method=thread "
            '"$5"/tests/gpu/test_mxnet_gpu.py'
        )
        arguments = ["run", folder, unpacked, packages, sys.executable, ROOT]
        environment = dict(os.environ, CUDA_MODULE_LOADING="LAZY", MXNET_CUDNN_LIB_CHECKING="0")
        # `python -m` searches the working directory first, and the package of the checkout has no
        # library for this GPU.
        options = {"env": environment, "cwd": str(packages)}
        command = ["bash", "-c", script, *arguments]
        pipeline.run("inside MXNet", command, 150, judge=judge, **options)


def check_gpu(pipeline, options, library, test, passes):
    pipeline.run("against the CPU's kernels", [test], 120, reserve=FOR_SPEED)
    pipeline.run("devices that meet", [passes], 60, reserve=FOR_SPEED)
    has_torch = find_pytorch(pipeline)
    no_torch = "no PyTorch that finds the GPU"
    if has_torch:
        check_kernels(pipeline, library)
    else:
        pipeline.step("against PyTorch in float64", SKIPPED, no_torch)
    if options.no_sanitizer:
        pipeline.step("compute-sanitizer", LEFT_OUT, "--no-sanitizer")
    else:
        sanitize(pipeline, test)
    if options.no_bench:
        pipeline.step("speed", LEFT_OUT, "--no-bench")
    elif has_torch:
        bench(pipeline, library)
    else:
        pipeline.step("speed", SKIPPED, no_torch)
    if options.mxnet_set:
        run_mxnet(pipeline, options.mxnet_set, library)
    else:
        pipeline.step("inside MXNet", LEFT_OUT, "no --mxnet-set")


def _remove(path):
    if path.exists():
        path.unlink()


def mxnet_set(text):
    folder = Path(text).resolve()
    if not (folder / "unpack.sh").is_file():
        raise argparse.ArgumentTypeError(f"there is no {folder / 'unpack.sh'}")
    return folder


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = build.FOLDER / "check.json"
    parser.add_argument("--json", default=default, help=f"where the results go ({default})")
    parser.add_argument(
        "--mxnet-set",
        type=mxnet_set,
        metavar="FOLDER",
        help="a CUDA build of MXNet, with unpack.sh",
    )
    parser.add_argument("--no-bench", action="store_true", help="measure nothing")
    parser.add_argument("--no-sanitizer", action="store_true", help="without compute-sanitizer")
    options = parser.parse_args(arguments)
    pipeline = Pipeline(options.json, LIMIT)
    gpu = None
    try:
        gpu = ask_gpu()
        now = datetime.datetime.now(datetime.timezone.utc)
        system = f"{platform.platform()}, Python {platform.python_version()}"
        pipeline.facts(gpu=gpu, date=now.isoformat("T", "minutes"), system=system)
        built = build_all(pipeline, gpu)
        if built:
            pipeline.facts(library=pipeline.result["steps"]["build"]["detail"])
        if gpu and built:
            print(f"{gpu['name']}, driver {gpu['driver']}", flush=True)
            check_gpu(pipeline, options, *built)
        elif gpu:
            pipeline.step("all checks", SKIPPED, "nothing was built")
        else:
            detail = "nothing was run, only compiled"
            pipeline.step("GPU", LEFT_OUT, f"none is found (nvidia-smi, libcuda.so.1): {detail}")
        if built:
            find_spills(pipeline, gpu)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        pipeline.step("gpu-check itself", FAILED, detail, traceback=traceback.format_exc())
    return pipeline.end(gpu)


if __name__ == "__main__":
    sys.exit(main())
