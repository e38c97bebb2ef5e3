"""`make gpu-check`: builds for the GPU that is there, checks the kernels, and measures them.

    python benchmarks/gpu/check.py [--json FILE] [--mxnet-set FOLDER] [--no-bench]

Needs nvcc, a C++ compiler, PyTorch for CUDA, and no network; compute-sanitizer where it is found.
Without a GPU it compiles everything and says so. Ends within 8 minutes. --mxnet-set: a folder with
unpack.sh that sets PYTHONPATH and LD_LIBRARY_PATH for a CUDA build of MXNet; the layer then runs in
it, too.
"""

import argparse
import datetime
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import build

ROOT = build.ROOT
sys.path.insert(0, str(ROOT / "tests" / "gpu"))
LIMIT = 8 * 60


def ask_gpu():
    """Name, driver and compute capability of the first GPU, or None."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if done.returncode or not done.stdout.strip():
        return None
    name, driver, capability = (part.strip() for part in done.stdout.splitlines()[0].split(","))
    return {"name": name, "driver": driver, "architecture": int(capability.replace(".", ""))}


class Check:
    def __init__(self):
        self.begin = time.monotonic()
        self.result = {"steps": {}}

    def left(self):
        return LIMIT - (time.monotonic() - self.begin)

    def step(self, name, passed, detail="", **more):
        seconds = round(time.monotonic() - self.begin, 1)
        self.result["steps"][name] = {"passed": passed, "detail": detail, "at": seconds, **more}
        verdict = {True: "ok", False: "FAILED", None: "skipped"}[passed]
        print(f"[{seconds:5.0f} s] {name}: {verdict}{detail and ': ' + detail}", flush=True)

    def run(self, name, command, most, **options):
        """A step that is a program of its own. Its last line is told, or all where it fails."""
        seconds = min(most, self.left())
        if seconds < 5:
            return self.step(name, None, "no time is left")
        try:
            done = subprocess.run(
                [str(part) for part in command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                **options,
            )
        except subprocess.TimeoutExpired:
            return self.step(name, False, f"no end within {seconds:.0f} s")
        lines = done.stdout.strip().splitlines() or [""]
        if done.returncode:
            print(done.stdout[-6000:])
        return self.step(name, done.returncode == 0, lines[-1], output=lines[-30:])


def check_kernels(check, library):
    import check_kernels as kernels
    import surface

    seed = secrets.randbits(32)
    lines = []
    try:
        failed = kernels.check_all(surface.Library(library), seed, lines.append)
    except Exception as error:
        failed = [f"{type(error).__name__}: {error}"]
    for line in lines:
        print("        ", line)
    detail = f"seed {seed}, " + (f"{len(failed)} failed" if failed else "all dtypes and layouts")
    check.step("beside PyTorch in float64", not failed, detail, output=lines + failed)


def sanitize(check, test):
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    for kind in ("memcheck", "racecheck"):
        if not tool:
            check.step(kind, None, "compute-sanitizer is not found")
            continue
        command = [tool, "--tool", kind, "--error-exitcode", "9", test, "--small"]
        check.run(kind, command, 90)


def bench(check, library):
    import surface

    import bench as speed

    try:
        rows, missed = speed.main(surface.Library(library), 20)
    except Exception as error:
        return check.step("speed", False, f"{type(error).__name__}: {error}")
    detail = f"{len(missed)} bars missed" if missed else "all bars held"
    return check.step("speed", not missed, detail, rows=rows, missed=missed)


def run_mxnet(check, folder, library):
    """tests/gpu/test_mxnet_gpu.py in the MXNet of the set."""
    if not folder:
        return check.step("inside MXNet", None, "no --mxnet-set")
    unpacked = tempfile.mkdtemp(prefix="mxnet-")
    package = Path(unpacked) / "package" / "gluon_syncbn"
    shutil.copytree(ROOT / "gluon_syncbn", package, ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(library, package)
    script = (
        f'eval "$({Path(folder).resolve()}/unpack.sh {unpacked}/set)" && '
        f'PYTHONPATH="{package.parent}:$PYTHONPATH" exec {sys.executable} -m pytest -q -rs '
        f"-p no:cacheprovider {ROOT}/tests/gpu/test_mxnet_gpu.py"
    )
    environment = dict(os.environ, CUDA_MODULE_LOADING="LAZY", MXNET_CUDNN_LIB_CHECKING="0")
    return check.run("inside MXNet", ["bash", "-c", script], 150, env=environment, cwd=ROOT)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="where the results go (build/gpu/check.json)")
    parser.add_argument("--mxnet-set", help="a CUDA build of MXNet, with unpack.sh")
    parser.add_argument("--no-bench", action="store_true", help="measure nothing")
    options = parser.parse_args()
    check = Check()
    gpu = ask_gpu()
    architectures = [gpu["architecture"]] if gpu else []
    check.result["gpu"] = gpu
    check.result["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat("T", "minutes")

    library, test = build.build(architectures)
    check.step("build", True, f"for sm_{architectures[0]}" if gpu else "for all architectures")
    kernels = build.report(architectures)
    spilled = [f"{k['kernel']} on sm_{k['arch']}" for k in kernels if k["spilled_bytes"]]
    detail = "; ".join(spilled) or f"{len(kernels)} kernels without"
    check.step("register spills", not spilled, detail, kernels=kernels)
    if gpu:
        build.print_report(kernels)
        check.run("beside the CPU's kernels", [test], 120)
        try:
            import torch

            check.result["pytorch"] = f"{torch.__version__}, CUDA {torch.version.cuda}"
            has_torch = torch.cuda.is_available()
        except ImportError:
            has_torch = False
        if has_torch:
            check_kernels(check, library)
        else:
            check.step("beside PyTorch in float64", None, "no PyTorch that finds the GPU")
        sanitize(check, test)
        run_mxnet(check, options.mxnet_set, library)
        if has_torch and not options.no_bench:
            bench(check, library)
    else:
        print("No GPU is found (nvidia-smi), so nothing was run: what was built compiles.")

    path = Path(options.json or build.FOLDER / "check.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(check.result, indent=1) + "\n")
    print(f"Everything is in {path}.")
    # A missed bar of speed is told, but only wrong results fail.
    wrong = [n for n, s in check.result["steps"].items() if s["passed"] is False and n != "speed"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
