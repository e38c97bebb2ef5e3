"""`make gpu-check`: builds for this machine's GPU, checks the kernels, and measures them.

    python benchmarks/gpu/check.py [--json FILE] [--mxnet-set FOLDER] [--no-bench] [--no-sanitizer]

Needs nvcc, a C++ compiler, PyTorch for CUDA, compute-sanitizer, and no network. Without a GPU it
only compiles everything, for all architectures, or rehearses --mxnet-set on the simulator. Ends
within 9 minutes. --mxnet-set: a folder with
unpack.sh, which unpacks a CUDA build of MXNet and prints its PYTHONPATH and LD_LIBRARY_PATH; the
layer is then tested in it, rather than measured. Its GPU contexts, 8 of them, share this machine's
GPU, and MXNet's own operators run on the host (tests/gpu/simgpu).

Exit code 1: a step failed, or could not run although there is a GPU. A missed guard of speed is
reported but is not a failure.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import build
from pipeline import FAILED, IMPOSSIBLE, LEFT_OUT, MISSED, OK, SKIPPED, Pipeline, by_exit_code

ROOT = build.ROOT
HERE = Path(__file__).resolve().parent
# A little less than 9 minutes, as processes may need some time to end.
LIMIT = 9 * 60 - 15
FOR_SPEED = 90  # seconds reserved

BUILD = """
import ctypes, sys, build
library, *tests = build.build([int(each) for each in sys.argv[1:]])
library = ctypes.CDLL(str(library))
library.gluon_syncbn_cuda.restype = ctypes.c_char_p
print((library.gluon_syncbn_cuda() or b"without CUDA kernels").decode())
"""
PYTORCH = """
import torch
assert torch.cuda.is_available(), "PyTorch finds no GPU"
print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
"""
# MXNet's set, the packages, and what Python runs there.
IN_MXNET = '. "$1.sh" && export PYTHONPATH="$2:$PYTHONPATH" && shift 2 && exec $UNDER "$@"'
PYTEST = "-m pytest -v -rs --tb=short -p no:cacheprovider -o timeout=90 -o timeout_method=thread"
# Tests of MXNet whose GPU contexts share the GPUs that there are.
NETS = "test_simulated_gpus.py"
WEIGHTS = [NETS, "-k", "weights"]
ON_CARDS = {
    "weights": WEIGHTS,
    "bits of nets": [NETS, "-k", "bit"],
    "small nets": [NETS, "-k", "trains or arrive"],
    "beside other work": [NETS, "-k", "beside"],
    "layers": ["test_mxnet_gpu.py"],
    "failures of CUDA": ["test_use_of_cuda.py"],
    # gluoncv, which the examples need, may not be there.
    "programs": ["test_users_programs.py", "-k", "not example"],
}


def build_all(pipeline, gpus):
    """The paths of the library and the native tests, or None if the build failed. gpus: the compute
    capabilities to build for, or none for all."""
    most = 180 if gpus else pipeline.limit
    command = [sys.executable, "-c", BUILD, *gpus]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    if pipeline.run("build", command, most, env=environment) != OK:
        return None
    return [build.FOLDER / name for name in ("libgluon_syncbn.so", *build.TESTS)]


def find_pytorch(pipeline):
    """Whether PyTorch finds the GPU."""
    # The first import may take long.
    command = [sys.executable, "-c", PYTORCH]
    return pipeline.run("PyTorch", command, 120, reserve=FOR_SPEED) == OK


def find_sanitizer():
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(home / "bin")])
    return shutil.which("compute-sanitizer", path=path)


def sanitize(pipeline, test):
    tool = find_sanitizer()
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
        pipeline.run(kind, command, 150, reserve=FOR_SPEED, judge=judge)


def bench(pipeline, library):
    """Its figures are in a file, which a program that dies does not finish."""
    found = build.FOLDER / "bench.json"
    if found.exists():
        found.unlink()

    def judge(code, text):
        result = json.loads(found.read_text()) if found.exists() else {}
        more = {"result": result}
        if not result.get("finished") or (code != 0 and not result.get("failed")):
            return FAILED, by_exit_code(code, text)[1], more
        if result["failed"]:
            return FAILED, result["failed"][-1], more
        missed = [
            f"{one['worst']:.3g} above {one['at_most']:.3g}: {one['name']}, {one['where']}"
            for one in result["guards"]
            if not one["pass"]
        ]
        return MISSED if missed else OK, "; ".join(missed) or "all guards held", more

    command = [sys.executable, "-u", HERE / "bench.py", library, "--json", found]
    pipeline.run("speed", command, 120, judge=judge, show=True)


def run_mxnet(pipeline, folder, library, gpu):
    """Runs tests/gpu in the MXNet of the set. Without a GPU the simulator takes its place."""

    def judge(code, text):
        verdict, detail, more = by_exit_code(code, text)
        detail = detail.strip("= ")
        if verdict == OK and (" passed" not in detail or "skipped" in detail):
            return SKIPPED, detail, more
        return verdict, detail, more

    with tempfile.TemporaryDirectory(prefix="mxnet-") as unpacked:
        unpacked = Path(unpacked)
        mxnet = unpacked / "set"

        def folder_of(library):
            return unpacked / f"{library.parent.name}-{library.stem}"

        def step(name, of, arguments, judge=judge, **variables):
            """Runs Python with the packages and this library, in a process of its own."""
            packages = folder_of(of)
            if not packages.exists():
                copy_packages(packages, of)
            command = ["bash", "-c", IN_MXNET, "run", mxnet, packages, sys.executable, *arguments]
            more = {"CUDA_MODULE_LOADING": "LAZY", "MXNET_CUDNN_LIB_CHECKING": "0", **variables}
            # `python -m` searches the working directory first, and the package of the checkout has
            # no library for this GPU.
            options = {"env": {**os.environ, **more}, "cwd": str(packages)}
            return pipeline.run(name, command, 150, judge=judge, **options)

        def test(name, of, file, *options, **variables):
            arguments = [*PYTEST.split(), ROOT / "tests" / "gpu" / file, *options]
            return step(name, of, arguments, **variables)

        unpack = '"$1"/unpack.sh "$2" >"$2.sh"'
        if pipeline.run("MXNet's set", ["bash", "-c", unpack, "run", folder, mxnet], 90) != OK:
            return
        if gpu:
            test("inside MXNet", library, "test_mxnet_gpu.py")
            step("time in MXNet", library, [HERE / "bench_mxnet.py"], judge=by_exit_code)
        # MXNet's own CUDA goes, except for the driver.
        stubs = "" if gpu else mxnet / "mxnet/libcuda.so.1"
        command = ["make", f"-j{os.cpu_count()}", "simgpu", f"simgpu={mxnet}"]
        command += [f"cuda_libraries={stubs}", f"python={sys.executable}"]
        if pipeline.run("simulated GPUs", command, 240, cwd=str(ROOT)) != OK:
            return
        common = {"MXNET_USE_FUSION": "0", **({"SIMGPU_LARGE": "1"} if gpu else {})}
        simulator = {"PTXSIM_DEVICES": "8", **common}
        test("weights, simulated", mxnet / "libgluon_syncbn.so", *WEIGHTS, **simulator)
        of = library if gpu else mxnet / "libcards.so"
        on_cards = {"SIMGPU_LIBRARY": str(folder_of(of) / "gluon_syncbn/libgluon_syncbn.so")}
        on_cards.update(PTXSIM_DEVICES="1", SIMGPU_CONTEXTS="8", **common)
        for name, arguments in ON_CARDS.items():
            test(name, of, *arguments, **on_cards)
        test("no peers", of, NETS, "-k", "weights or bit", PTXSIM_PEERS="none", **on_cards)
        tool = find_sanitizer()
        if tool and gpu:
            under = f"{tool} --tool racecheck --error-exitcode 9"
            test("racecheck of a net", of, NETS, "-k", "weights and 2", UNDER=under, **on_cards)


def copy_packages(folder, library):
    """The packages of the checkout with this library."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for package in ROOT.glob("*/__init__.py"):
        shutil.copytree(package.parent, folder / package.parent.name, ignore=ignored)
    shutil.copy(library, folder / "gluon_syncbn" / "libgluon_syncbn.so")


def check_gpu(pipeline, options, library, test, passes):
    pipeline.run("against the CPU's kernels", [test], 120, reserve=FOR_SPEED)
    pipeline.run("devices that meet", [passes], 60, reserve=FOR_SPEED)
    has_torch, mxnet = find_pytorch(pipeline), options.mxnet_set
    no_torch = not has_torch and (SKIPPED, "no PyTorch that finds the GPU")
    # The time is MXNet's.
    no_sanitizer = (options.no_sanitizer or mxnet) and (LEFT_OUT, "--no-sanitizer or --mxnet-set")
    no_bench = (options.no_bench or mxnet) and (LEFT_OUT, "--no-bench or --mxnet-set")
    no_mxnet = not mxnet and (LEFT_OUT, "no --mxnet-set")
    steps = [
        ("compute-sanitizer", no_sanitizer, sanitize, [test]),
        ("speed", no_bench or no_torch, bench, [library]),
        ("inside MXNet", no_mxnet, run_mxnet, [mxnet, library, True]),
    ]
    for name, reason, check, arguments in steps:
        if reason:
            pipeline.step(name, *reason)
        else:
            check(pipeline, *arguments)


def mxnet_set(text):
    folder = Path(text).resolve()
    if not (folder / "unpack.sh").is_file():
        raise argparse.ArgumentTypeError(f"there is no {folder / 'unpack.sh'}")
    return folder


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = build.FOLDER / "check.json"
    parser.add_argument("--json", default=default, help=f"where the results go ({default})")
    mxnet = "a CUDA build of MXNet, with unpack.sh"
    parser.add_argument("--mxnet-set", type=mxnet_set, metavar="FOLDER", help=mxnet)
    parser.add_argument("--no-bench", action="store_true", help="measure nothing")
    parser.add_argument("--no-sanitizer", action="store_true", help="without compute-sanitizer")
    options = parser.parse_args(arguments)
    pipeline = Pipeline(options.json, LIMIT)
    gpus = []
    try:
        gpus = build.setup_py().find_gpus()
        now = datetime.datetime.now(datetime.timezone.utc)
        system = f"{platform.platform()}, Python {platform.python_version()}"
        pipeline.facts(gpus=gpus, date=now.isoformat("T", "minutes"), system=system)
        rehearses = options.mxnet_set and not gpus
        built = None if rehearses else build_all(pipeline, gpus)
        if built:
            pipeline.facts(library=pipeline.result["steps"]["build"]["detail"])
        if gpus and built:
            check_gpu(pipeline, options, *built)
        elif gpus:
            pipeline.step("all checks", SKIPPED, "nothing was built")
        else:
            detail = "a simulator plays it" if rehearses else "nothing was run, only compiled"
            pipeline.step("GPU", LEFT_OUT, f"none is found (libcuda.so.1): {detail}")
        if rehearses:
            run_mxnet(pipeline, options.mxnet_set, None, False)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        pipeline.step("gpu-check itself", FAILED, detail, traceback=traceback.format_exc())
    return pipeline.end(has_gpu=bool(gpus))


if __name__ == "__main__":
    sys.exit(main())
