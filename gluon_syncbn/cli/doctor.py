"""First contact: what is installed, what works, and what to do about what does not.

Nothing here needs MXNet or the native library. All that may fail or hang runs in a process of its
own, so that the doctor can tell.
"""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any, NamedTuple

from .._version import __version__

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# (distribution, what for); one of the first two has to be there.
_PACKAGES = (
    ("mxnet", ""),
    ("mxnet-cu112", ""),
    ("numpy", ""),
    ("gluoncv", "for its models"),
    ("horovod", "for several processes without KVStore"),
    ("onnx", "for export to ONNX"),
    ("onnxruntime", "for export to ONNX"),
)
_NOTES = {"gluoncv": "; what its nets and scripts need: docs/troubleshooting.md#gluoncv"}
_SECONDS = 120
_CRASHED = (
    "If python -c 'import mxnet' does so too, install MXNet anew: pip install --force-reinstall "
    "--no-deps mxnet==1.9.1 (or mxnet-cu112==1.9.1). If not, build gluon_syncbn again: pip install "
    "--force-reinstall --no-deps . in a checkout of it."
)

_PROBES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probes.py")
_TOLERANCE = 1e-5


def doctor():
    """Prints what it finds. Returns 0 where all is well, else 1."""
    found = _Findings()
    found.say("gluon_syncbn", f"{__version__} in {_FOLDER}")
    found.say("Python", f"{platform.python_version()} ({sys.executable})")
    found.say("system", f"{platform.platform()}, {_cores()}")
    if not (3, 8) <= sys.version_info[:2] <= (3, 11):
        found.fix("Python", "MXNet 1.9.1 needs Python 3.8 to 3.11: make an environment with one.")
    _packages(found)
    _library(found)
    _environment(found)
    state = _mxnet(found)
    if state:
        _self_test(found, "2 CPU devices", ["cpu:0", "cpu:1"])
        gpus = state["gpus"]
        if gpus:
            count = min(2, gpus)
            title = f"{count} GPU{'s' if count > 1 else ''}"
            _self_test(found, title, [f"gpu:{i}" for i in range(count)])
    print()
    if found.remedies:
        print("To fix:")
        for number, remedy in enumerate(found.remedies, 1):
            print(f"{number}. {remedy}")
        return 1
    print("All is well.")
    return 0


class _Findings:
    """Prints lines, and keeps what has to be done."""

    def __init__(self):
        self.remedies = []

    def say(self, title, text):
        print(f"{title + ':':<28}{text}", flush=True)

    def fix(self, title, remedy, text=None):
        self.say(title, text or "see below")
        if remedy not in self.remedies:
            self.remedies.append(remedy)


def _cores():
    cores = len(os.sched_getaffinity(0))
    return f"{cores} core{'s' if cores > 1 else ''}"


def _packages(found):
    versions = {name: _version(name) for name, _ in _PACKAGES}
    for name, purpose in _PACKAGES:
        if versions[name]:
            found.say(name, versions[name] + _NOTES.get(name, ""))
        elif purpose:
            found.say(name, f"not installed ({purpose})")
    if versions["mxnet"] and versions["mxnet-cu112"]:
        found.fix(
            "mxnet",
            "mxnet and mxnet-cu112 are both installed and overwrite each other: pip uninstall "
            "mxnet mxnet-cu112, then install one.",
        )


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _library(found):
    # What to do about one that is missing or does not load, the import says.
    path = os.path.join(_FOLDER, "libgluon_syncbn.so")
    if not os.path.exists(path):
        found.say("native CPU part", "missing")
        return
    found.say("native CPU part", f"{path} ({os.path.getsize(path) // 1024} KiB)")
    done = _run("kernels", path)
    text = "not built; GPUs need them, CPUs do not" if done.result == "" else done.result
    found.say("native CUDA part", text or f"unknown, as the library does not load: {done.last}")


def _environment(found):
    names = sorted(
        name
        for name in os.environ
        if name.startswith(("MXNET_", "GLUON_SYNCBN_", "DMLC_", "OMP_NUM"))
        or name == "CUDA_VISIBLE_DEVICES"
    )
    for name in names:
        found.say(name, os.environ[name])
    if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        found.fix(
            "MXNET_ENGINE_TYPE",
            "MXNET_ENGINE_TYPE=NaiveEngine computes one device after another, so that they cannot "
            "meet: unset it.",
        )


def _mxnet(found):
    """What MXNet says of itself, or None where it or the native library cannot be imported."""
    done = _run("import")
    if done.result is None:
        # An error says what to do, but a process that did not come so far does not.
        remedy = done.last if done.ended else f"{done.last[0].upper()}{done.last[1:]} {_CRASHED}"
        found.fix("import", remedy, "failed")
        return None
    state = done.result
    has = [
        name for name in ("MKLDNN", "CUDA", "CUDNN", "DIST_KVSTORE") if name in state["features"]
    ]
    found.say("import", f"MXNet {state['mxnet']} and the native library load ({', '.join(has)})")
    gpus = state["gpus"]
    if "CUDA" in state["features"]:
        found.say("devices", f"{_cores()}, {gpus} GPUs")
        if not gpus:
            found.fix(
                "GPUs",
                "MXNet is built for CUDA and sees no GPU: see whether nvidia-smi works and what "
                "CUDA_VISIBLE_DEVICES says.",
            )
    else:
        found.say("devices", f"{_cores()}; this MXNet has no CUDA")
        if os.path.exists("/proc/driver/nvidia/version"):
            found.say("GPUs", "there is an NVIDIA driver: pip install mxnet-cu112==1.9.1 uses it")
    return state


def _self_test(found, title, devices):
    done = _run("train", *devices)
    name = f"self-test, {title}"
    if done.result is None:
        found.fix(name, f"The self-test on {title} failed: {done.last}", "failed")
        return
    error = done.result
    if not error <= _TOLERANCE:
        found.fix(
            name,
            f"The self-test on {title} is wrong by {error:.1g}: please report it with all of this "
            "output.",
            "wrong",
        )
        return
    found.say(name, f"forward and backward agree with NumPy to {error:.1g}")


class _Done(NamedTuple):
    """What a process said."""

    result: Any  # None where it failed
    last: str  # the last line it wrote, or what became of it
    ended: bool = True  # by itself


def _run(*arguments):
    environment = dict(os.environ)
    environment.setdefault("GLUON_SYNCBN_TIMEOUT", "30")
    environment["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(_FOLDER), *filter(None, [environment.get("PYTHONPATH")])]
    )
    try:
        done = subprocess.run(
            [sys.executable, _PROBES, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _Done(None, f"it did not end within {_SECONDS} s.", ended=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return _Done(json.loads(line[len("RESULT ") :]), "")
    if done.returncode < 0:
        return _Done(None, f"the process died of signal {-done.returncode}.", ended=False)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"the process ended with code {done.returncode}."
    # Without the class of the error.
    head, _, tail = last.partition(": ")
    return _Done(None, tail if tail and " " not in head else last)
