"""`make gpu-check`: builds for this machine's GPU, checks the kernels, and measures them.

    python benchmarks/gpu/check.py [--json FILE] [--mxnet-set FOLDER] [--no-bench] [--no-sanitizer]

Needs nvcc, a C++ compiler, compute-sanitizer and PyTorch for CUDA, but neither make nor a network.
With a GPU it ends within 6 minutes: steps for which no time is left are not run, which is no
failure. Without a GPU it only compiles everything, for all architectures, or rehearses --mxnet-set
on the simulator.

--mxnet-set: a folder with unpack.sh, which unpacks a CUDA build of MXNet and prints its PYTHONPATH
and LD_LIBRARY_PATH; the layer is then tested in it, rather than the kernels. Its GPU contexts, 8 of
them, share this machine's GPU, and MXNet's own operators run on the host (tests/gpu/simgpu).

Exit code 1: a step failed, or could not run although there is a GPU. A missed guard of speed is
reported but is not a failure.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import build
import verdicts
from pipeline import Pipeline
from verdicts import FAILED, LEFT_OUT, OK, SKIPPED

ROOT = build.ROOT
HERE = Path(__file__).resolve().parent
TESTS = ROOT / "tests" / "gpu"
INSTALL = TESTS / "simgpu" / "install.py"
# A little less than 6 minutes, as processes may need some time to end. Without a GPU, more.
LIMIT, LIMIT_WITHOUT_GPU = 6 * 60 - 15, 60 * 60
FOR_SPEED = 90  # seconds reserved

BUILD = """
import ctypes, build
build.build()
library = ctypes.CDLL(str(build.LIBRARY))
library.gluon_syncbn_cuda.restype = ctypes.c_char_p
print((library.gluon_syncbn_cuda() or b"no kernels").decode())
"""
PYTORCH = """
import torch
assert torch.cuda.is_available(), "PyTorch finds no GPU"
print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
"""
# Without pytest-timeout a test that hangs ends with its step.
PACKAGES = """
import importlib.util, gluon_syncbn, mxnet, numpy, psutil, pytest
names = [f"{each.__name__} {each.__version__}" for each in (mxnet, numpy, psutil, pytest)]
print(*names, *(["no pytest-timeout"] * (not importlib.util.find_spec("pytest_timeout"))), sep=", ")
"""
# MXNet's set, the packages, and what Python runs there.
IN_MXNET = '. "$1.sh" && export PYTHONPATH="$3:$2:$PYTHONPATH" && shift 3 && exec $UNDER "$@"'
PYTEST = "-m pytest -v -rs --tb=short -p no:cacheprovider -o timeout_method=thread"
SANITIZE = ["--error-exitcode", "9", "--tool"]
# Nets of MXNet whose GPU contexts share the GPUs that there are.
NETS = "test_simulated_gpus.py"


def build_all(pipeline):
    """Whether the library and the native tests were built: for this machine's GPUs, or for all if
    it has none."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", BUILD]
    judge = verdicts.of_build
    return pipeline.run("build", command, pipeline.limit, judge=judge, env=environment) == OK


def find_pytorch(pipeline):
    # The first import may take long.
    return pipeline.run("PyTorch", [sys.executable, "-c", PYTORCH], 60) == OK


def find_sanitizer():
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(home / "bin")])
    return shutil.which("compute-sanitizer", path=path)


def sanitize(pipeline, test):
    tool = find_sanitizer()
    for kind, judge in (("memcheck", verdicts.of_memcheck), ("racecheck", verdicts.of_racecheck)):
        if tool:
            command = [tool, *SANITIZE, kind, test, "--small"]
            pipeline.run(kind, command, 150, reserve=FOR_SPEED, judge=judge)
        else:
            pipeline.step(kind, SKIPPED, "compute-sanitizer is not found (--no-sanitizer)")


def bench(pipeline):
    """Its figures are in a file."""
    found = build.FOLDER / "bench.json"
    if found.exists():
        found.unlink()

    def figures():
        return json.loads(found.read_text()) if found.exists() else {}

    def judge(code, text):
        return verdicts.of_speed(code, text, figures())

    command = [sys.executable, "-u", HERE / "bench.py", build.LIBRARY, "--json", found]
    pipeline.run("speed", command, 120, judge=judge, show=True)
    pipeline.facts(speed=figures())


def run_mxnet(pipeline, folder, library, gpu):
    """Runs tests/gpu in the MXNet of the set. Without a GPU the simulator takes its place."""
    with tempfile.TemporaryDirectory(prefix="mxnet-") as unpacked:
        own = Path(unpacked) / "set"
        simulated = Path(unpacked) / "simulated"

        def step(name, mxnet, of, *arguments, judge=verdicts.of_pytest, **variables):
            """Runs Python with the packages, this MXNet and this library, in a process of its
            own."""
            packages = packages_with(of)
            command = ["bash", "-c", IN_MXNET, "run", own, mxnet, packages]
            more = {"CUDA_MODULE_LOADING": "LAZY", "MXNET_CUDNN_LIB_CHECKING": "0", **variables}
            # `python -m` searches the working directory first, and the package of the checkout has
            # no library for this GPU.
            options = {"env": {**os.environ, **more}, "cwd": str(packages)}
            command += [sys.executable, *arguments]
            return pipeline.run(name, command, pipeline.limit / 2, judge=judge, **options)

        def packages_with(library):
            packages = Path(unpacked) / f"with-{library.parent.name}-{library.stem}"
            if not packages.exists():
                copy_packages(packages, library)
            return packages

        def test(name, mxnet, of, file, *options, **more):
            pytest = [*PYTEST.split(), "-o", f"timeout={pipeline.limit / 6:.0f}"]
            return step(name, mxnet, of, *pytest, TESTS / file, *options, **more)

        unpack = '"$1"/unpack.sh "$2" >"$2.sh"'
        if pipeline.run("MXNet's set", ["bash", "-c", unpack, "run", folder, own], 90) != OK:
            return
        # MXNet's own CUDA goes, except for the driver.
        shutil.copytree(own, simulated, copy_function=os.link)
        command = [sys.executable, INSTALL, simulated, *["--driver"] * gpu]
        common = {"MXNET_USE_FUSION": "0", **({"SIMGPU_LARGE": "1"} if gpu else {})}
        of = library if gpu else simulated / "libcards.so"
        simulator = simulated / "libgluon_syncbn.so"

        def test_on_cards(name, *arguments, **more):
            path = packages_with(of) / "gluon_syncbn/libgluon_syncbn.so"
            contexts = {"PTXSIM_DEVICES": "1", "SIMGPU_CONTEXTS": "8"}
            test(
                name,
                simulated,
                of,
                *arguments,
                SIMGPU_LIBRARY=str(path),
                **contexts,
                **common,
                **more,
            )

        def test_nets():
            """What is most worth knowing comes first."""
            test_on_cards("bits of nets", NETS, "-k", "bit")
            weights = NETS, "-k", "weights"
            test("weights, simulated", simulated, simulator, *weights, PTXSIM_DEVICES="8", **common)
            test_on_cards("weights", *weights)
            test_on_cards("failures of CUDA", "test_use_of_cuda.py")
            tool = find_sanitizer()
            if gpu and tool:
                more = {"UNDER": " ".join([tool, *SANITIZE, "racecheck"])}
                more["judge"] = verdicts.of_racecheck_of_pytest
                test_on_cards("racecheck of a net", NETS, "-k", "weights and 2", **more)
            elif gpu:
                pipeline.step("racecheck of a net", SKIPPED, "compute-sanitizer is not found")
            test_on_cards("no peers", NETS, "-k", "weights or bit", PTXSIM_PEERS="none")
            test_on_cards("small nets", NETS, "-k", "trains or arrive")
            test_on_cards("beside other work", NETS, "-k", "beside")
            test_on_cards("layers", "test_mxnet_gpu.py")
            # gluoncv, which the examples need, may not be there.
            test_on_cards("programs", "test_users_programs.py", "-k", "not example")

        arguments = "packages", simulated, of, "-c", PACKAGES
        if pipeline.run("simulated GPUs", command, pipeline.limit / 2) == OK:
            if step(*arguments, judge=verdicts.by_exit_code) == OK:
                test_nets()
        if gpu:
            test("inside MXNet", own, library, "test_mxnet_gpu.py")
            program = HERE / "bench_mxnet.py"
            step("time in MXNet", own, library, program, judge=verdicts.by_exit_code)


def copy_packages(folder, library):
    """The packages of the checkout with this library."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for package in ROOT.glob("*/__init__.py"):
        shutil.copytree(package.parent, folder / package.parent.name, ignore=ignored)
    shutil.copy(library, folder / "gluon_syncbn" / "libgluon_syncbn.so")


def check_gpu(pipeline, options):
    tests, passes = (build.FOLDER / name for name in build.TESTS)
    for name, test, most in (
        ("against the CPU's kernels", tests, 120),
        ("devices that meet", passes, 60),
    ):
        pipeline.run(name, [test], most, reserve=FOR_SPEED, judge=verdicts.of_native_tests)
    if options.no_sanitizer:
        pipeline.step("compute-sanitizer", LEFT_OUT, "--no-sanitizer")
    else:
        sanitize(pipeline, tests)
    if options.no_bench:
        pipeline.step("speed", LEFT_OUT, "--no-bench")
    elif find_pytorch(pipeline):
        bench(pipeline)
    else:
        pipeline.step("speed", SKIPPED, "no PyTorch that finds the GPU")


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
    signal.signal(signal.SIGTERM, pipeline.end_early)
    try:
        gpus = build.setup_py().find_gpus()
        now = datetime.datetime.now(datetime.timezone.utc)
        system = f"{platform.platform()}, Python {platform.python_version()}"
        pipeline.facts(gpus=gpus, date=now.isoformat("T", "minutes"), system=system)
        if not gpus:
            pipeline.limit = LIMIT_WITHOUT_GPU
            what = "a simulator plays it" if options.mxnet_set else "nothing is run, only compiled"
            pipeline.step("GPU", LEFT_OUT, f"none is found (libcuda.so.1): {what}")
        if not build_all(pipeline):
            pipeline.step("all checks", FAILED, "nothing was built")
        elif options.mxnet_set:
            run_mxnet(pipeline, options.mxnet_set, build.LIBRARY, bool(gpus))
        elif gpus:
            check_gpu(pipeline, options)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        pipeline.step("gpu-check itself", FAILED, detail, traceback=traceback.format_exc())
    return pipeline.end(has_gpu=bool(gpus))


if __name__ == "__main__":
    sys.exit(main())
