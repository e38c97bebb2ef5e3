"""`make gpu-check`: builds for this machine's GPU, checks the kernels, and measures them.

    python benchmarks/gpu/check.py [--json FILE] [--mxnet-set FOLDER]

Needs nvcc, a C++ compiler, compute-sanitizer and PyTorch for CUDA, but neither make nor a network.
With a GPU it ends within 6 minutes: steps for which no time is left are not run, which is no
failure. Without a GPU it only compiles everything, for all architectures, or rehearses --mxnet-set
on the simulator.

--mxnet-set: a folder with unpack.sh, which unpacks a CUDA build of MXNet and prints its PYTHONPATH
and LD_LIBRARY_PATH; the layer is then tested in it, rather than the kernels. Its GPU contexts, 8 of
them, share this machine's GPU, and MXNet's own operators run on the host (tests/gpu/simgpu).

Exit code 1: a step failed, or could not run although there is a GPU. A missed guard of speed is
printed, but is no failure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

import build
from steps import OK, Steps, end_on_sigterm

ROOT = build.ROOT
HERE = Path(__file__).resolve().parent
TESTS = ROOT / "tests" / "gpu"
INSTALL = TESTS / "simgpu" / "install.py"
# A little less than 6 minutes, as processes may need some time to end. Without a GPU, more.
LIMIT, LIMIT_WITHOUT_GPU = 6 * 60 - 15, 60 * 60

BUILD = """
import ctypes, build
build.build()
library = ctypes.CDLL(str(build.LIBRARY))
library.gluon_syncbn_cuda.restype = ctypes.c_char_p
print((library.gluon_syncbn_cuda() or b"no kernels").decode())
"""
# MXNet's set, the packages, and what runs there.
IN_MXNET = '. "$1.sh" && export PYTHONPATH="$3:$2:$PYTHONPATH" && shift 3 && exec "$@"'
PYTEST = "-m pytest -v -rs --tb=short -p no:cacheprovider -o timeout_method=thread".split()
# Nets of MXNet whose GPU contexts share the GPUs that there are.
NETS = "test_simulated_gpus.py"

# What programs print if all is well.
BUILT = r"^CUDA [\d.]+ for sm_.*"
TESTED = r"^.+: [1-9]\d* passed, 0 failed$"
# Nothing may be skipped. Other tests of the file may be deselected.
ALL_PASSED = r"^=+ (\d+ passed(?:, \d+ (?:deselected|warnings?))* in .+?) =+$"
CLEAN = {
    "memcheck": r"^=+ (ERROR SUMMARY: 0 errors)$",
    "racecheck": r"^=+ (RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\))$",
}


def build_all(steps: Steps) -> bool:
    """Whether the library and the native tests were built: for this machine's GPUs, or for all if
    it has none."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", BUILD]
    return steps.run("build", command, steps.limit, [BUILT], env=environment) == OK


def sanitizer(kind: str) -> list[str]:
    """The command under which compute-sanitizer runs another."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(home / "bin")])
    tool = shutil.which("compute-sanitizer", path=path) or "compute-sanitizer"
    return [tool, "--error-exitcode", "9", "--tool", kind]


def check_kernels(steps: Steps) -> None:
    tests, passes = (build.FOLDER / name for name in build.TESTS)
    steps.run("against the CPU's kernels", [tests], 120, [TESTED])
    steps.run("devices that meet", [passes], 60, [TESTED])
    figures = build.FOLDER / "bench.json"
    if figures.exists():
        figures.unlink()
    command = [sys.executable, "-u", HERE / "bench.py", build.LIBRARY, "--json", figures]
    steps.run("speed", command, 150, show=True)
    if figures.exists():
        steps.note(speed=json.loads(figures.read_text()))
    for kind, clean in CLEAN.items():
        steps.run(kind, [*sanitizer(kind), tests, "--small"], 150, [TESTED, clean])


def copy_packages(folder: Path, library: Path) -> Path:
    """The packages of the checkout with this library."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for package in ROOT.glob("*/__init__.py"):
        shutil.copytree(package.parent, folder / package.parent.name, ignore=ignored)
    shutil.copy(library, folder / "gluon_syncbn" / "libgluon_syncbn.so")
    return folder


def check_in_mxnet(steps: Steps, folder: Path, library: Path, has_gpu: bool) -> None:
    """Runs tests/gpu in the MXNet of the set. Without a GPU the simulator takes its place."""
    with tempfile.TemporaryDirectory(prefix="mxnet-") as unpacked:
        own, simulated = Path(unpacked) / "set", Path(unpacked) / "simulated"

        def test(name, mxnet, packages, file, *options, under=(), proofs=(ALL_PASSED,), **more):
            """Runs a file of tests with this MXNet and these packages."""
            command = ["bash", "-c", IN_MXNET, "run", own, mxnet, packages, *under]
            command += [sys.executable, *PYTEST, "-o", f"timeout={steps.limit / 6:.0f}"]
            variables = {"CUDA_MODULE_LOADING": "LAZY", "MXNET_CUDNN_LIB_CHECKING": "0", **more}
            # `python -m` searches the working directory first, and the package of the checkout has
            # no library for this GPU.
            place = {"env": {**os.environ, **variables}, "cwd": str(packages)}
            steps.run(name, [*command, TESTS / file, *options], steps.limit / 2, proofs, **place)

        unpack = ["bash", "-c", '"$1"/unpack.sh "$2" >"$2.sh"', "run", folder, own]
        if steps.run("MXNet's set", unpack, 90) != OK:
            return
        if has_gpu:
            packages = copy_packages(Path(unpacked) / "with-library", library)
            test("layers", own, packages, "test_mxnet_gpu.py")
        # MXNet's own CUDA goes, except for the driver.
        shutil.copytree(own, simulated, copy_function=os.link)
        install = [sys.executable, INSTALL, simulated, *["--driver"] * has_gpu]
        if steps.run("simulated GPUs", install, steps.limit / 2) != OK:
            return
        on_simulator = copy_packages(
            Path(unpacked) / "with-simulator", simulated / "libgluon_syncbn.so"
        )
        if not has_gpu:
            packages = copy_packages(Path(unpacked) / "with-cards", simulated / "libcards.so")
        common = {"MXNET_USE_FUSION": "0", **({"SIMGPU_LARGE": "1"} if has_gpu else {})}
        on_cards = {"PTXSIM_DEVICES": "1", "SIMGPU_CONTEXTS": "8", **common}
        on_cards["SIMGPU_LIBRARY"] = str(packages / "gluon_syncbn" / "libgluon_syncbn.so")

        def test_on_cards(name, *arguments, **more):
            test(name, simulated, packages, *arguments, **on_cards, **more)

        # What is most worth knowing comes first. The weights are compared with the simulator's.
        weights = NETS, "-k", "weights"
        test_on_cards("bits of nets", NETS, "-k", "bit")
        test("weights, simulated", simulated, on_simulator, *weights, PTXSIM_DEVICES="8", **common)
        test_on_cards("weights", *weights)
        test_on_cards("failures of CUDA", "test_use_of_cuda.py")
        test_on_cards("no peers", NETS, "-k", "weights or bit", PTXSIM_PEERS="none")
        test_on_cards("small nets", NETS, "-k", "trains or arrive")
        if has_gpu:
            checked = {"under": sanitizer("racecheck"), "proofs": [ALL_PASSED, CLEAN["racecheck"]]}
            test_on_cards("racecheck of a net", NETS, "-k", "weights and 2", **checked)
            test_on_cards("beside other work", NETS, "-k", "beside")
        # gluoncv, which the examples need, may not be there.
        test_on_cards("programs", "test_users_programs.py", "-k", "not example")


def mxnet_set(text: str) -> Path:
    folder = Path(text).resolve()
    if not (folder / "unpack.sh").is_file():
        raise argparse.ArgumentTypeError(f"there is no {folder / 'unpack.sh'}")
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = build.FOLDER / "check.json"
    parser.add_argument("--json", default=default, help=f"where the results go ({default})")
    mxnet = "a CUDA build of MXNet, with unpack.sh"
    parser.add_argument("--mxnet-set", type=mxnet_set, metavar="FOLDER", help=mxnet)
    options = parser.parse_args(arguments)
    gpus = build.setup_py().find_gpus()
    steps = Steps(options.json, LIMIT if gpus else LIMIT_WITHOUT_GPU)
    end_on_sigterm()
    now = datetime.datetime.now(datetime.timezone.utc)
    system = f"{platform.platform()}, Python {platform.python_version()}"
    steps.note(gpus=gpus, date=now.isoformat("T", "minutes"), system=system)
    if not gpus:
        what = "a simulator plays it" if options.mxnet_set else "nothing is run, only compiled"
        print(f"No GPU is found (libcuda.so.1): {what}.")
    if build_all(steps):
        if options.mxnet_set:
            check_in_mxnet(steps, options.mxnet_set, build.LIBRARY, bool(gpus))
        elif gpus:
            check_kernels(steps)
    return steps.end()


if __name__ == "__main__":
    sys.exit(main())
