"""Reports what is installed, what works, and how to fix what does not.

Nothing here needs MXNet or the native library. Whatever may fail or hang runs in its own process.
"""

import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from typing import Any, NamedTuple

from mxnet_compat import is_needed, options
from mxnet_compat import switch as on_import

from .. import __version__

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# (distribution, what for). MXNet is required too.
_PACKAGES = (
    ("numpy", ""),
    ("gluoncv", "for its models"),
    ("horovod", "for several processes without KVStore"),
    ("onnx", "for export to ONNX"),
    ("onnxruntime", "for export to ONNX"),
)
_NOTES = {"gluoncv": "; what its nets and scripts need: docs/troubleshooting.md#gluoncv"}
_SECONDS = 120
_CRASHED = (
    "If python -c 'import mxnet' also dies, reinstall MXNet: pip install --force-reinstall "
    "--no-deps mxnet==1.9.1 (or mxnet-cu112==1.9.1). If not, rebuild gluon_syncbn: pip install "
    "--force-reinstall --no-deps . in a checkout of it."
)

_PROBES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_probes.py")
_TOLERANCE = 1e-5
# How two GPUs share sums, by the probe's answer.
_PATHS = {-1: "", 0: "; GPUs exchange sums through the host", 1: "; GPUs read each other's memory"}


def doctor():
    """Prints the findings. Returns 0 if all is well, else 1."""
    found = _Findings()
    found.say("gluon_syncbn", f"{__version__} in {_FOLDER}")
    found.say("Python", f"{platform.python_version()} ({sys.executable})")
    found.say("system", f"{platform.platform()}, {_cores()}")
    _packages(found)
    found.say("MXNet on this Python", _compatibility())
    _library(found)
    _environment(found)
    state = _mxnet(found)
    if state:
        _self_test(found, "2 CPU devices", ["cpu:0", "cpu:1"])
        count = min(2, state["gpus"])
        if count:
            title = "1 GPU" if count == 1 else f"{count} GPUs"
            _self_test(found, title, [f"gpu:{i}" for i in range(count)])
    print()
    if found.remedies:
        print("To fix:")
        for number, remedy in enumerate(found.remedies, 1):
            print(f"{number}. {remedy}")
        return 1
    print("All is well.")
    return 0


def switch(enabled, fail):
    """Sets whether every program of this environment can import mxnet. Returns 0."""
    try:
        on_import.enable() if enabled else on_import.disable()
    except OSError as error:
        fail(
            f"{error.filename} cannot be written ({error.strerror}): make the environment "
            "writable, or import gluon_syncbn before mxnet in each program."
        )
    print(f"MXNet on this Python: {_compatibility()}")
    return 0


def _compatibility():
    enabled = on_import.is_enabled()
    if not is_needed():
        text = "runs as it is"
        return f"{text}; {on_import.path()} is not needed" if enabled else text
    if enabled:
        return f"every program may import mxnet ({on_import.path()})"
    return (
        "import gluon_syncbn or mxnet_compat before mxnet, start programs with "
        "gluon_syncbn.launch, or run doctor --enable-mxnet-on-import once"
    )


class _Findings:
    """Prints lines, and collects the remedies."""

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
    installed = {each.metadata["Name"] for each in metadata.distributions()}
    # MXNet has one distribution for each CUDA version.
    mxnets = sorted(filter(re.compile(r"mxnet(-cu\d+|-native)?$").match, filter(None, installed)))
    notes = dict(_NOTES)
    if is_needed() and not on_import.is_enabled():
        notes["horovod"] = "; horovodrun needs doctor --enable-mxnet-on-import once"
    for name, purpose in (*((name, "") for name in mxnets), *_PACKAGES):
        version = _version(name)
        if version:
            found.say(name, version + notes.get(name, ""))
        elif purpose:
            found.say(name, f"not installed ({purpose})")
    if len(mxnets) > 1:
        found.fix(
            "mxnet",
            f"{' and '.join(mxnets)} are installed and overwrite each other: pip uninstall "
            f"{' '.join(mxnets)}, then install one.",
        )


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _library(found):
    # If it is missing or does not load, the import below says what to do.
    path = os.path.join(_FOLDER, "libgluon_syncbn.so")
    if not os.path.exists(path):
        found.say("native CPU part", "missing")
        return
    found.say("native CPU part", f"{path} ({os.path.getsize(path) // 1024} KiB)")
    done = _run("kernels", path)
    text = "not built; GPUs need them, CPUs do not" if done.result == "" else done.result
    found.say("native CUDA part", text or f"unknown, as the library does not load: {done.last}")


def _environment(found):
    prefixes = ("MXNET_", "GLUON_SYNCBN_", "DMLC_", "OMP_NUM", "CUDA_VISIBLE_DEVICES")
    for name in sorted(name for name in os.environ if name.startswith(prefixes)):
        found.say(name, os.environ[name])
    if os.environ.get("DMLC_ROLE", "worker") != "worker":
        found.say(
            "DMLC_ROLE",
            "makes what imports mxnet such a process of a KVStore; the checks run without it",
        )
    if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        found.fix(
            "MXNET_ENGINE_TYPE",
            "MXNET_ENGINE_TYPE=NaiveEngine runs one device after another, so the devices cannot "
            "exchange statistics: unset it.",
        )


def _mxnet(found):
    """MXNet's report, or None if MXNet or the native library cannot be imported."""
    done = _run("import")
    if done.result is None:
        # An error says what to do; a crash does not.
        remedy = done.last if done.ended else f"{done.last[0].upper()}{done.last[1:]} {_CRASHED}"
        found.fix("import", remedy, "failed")
        return None
    state = done.result
    features, gpus = state["features"], state["gpus"]
    has = [name for name in ("MKLDNN", "CUDA", "CUDNN", "DIST_KVSTORE") if name in features]
    found.say("import", f"MXNet {state['mxnet']} and the native library load ({', '.join(has)})")
    why_not = state["no_shared_memory"]
    how = f"meet in the store ({why_not})" if why_not else "meet in shared memory"
    found.say("processes of a machine", how)
    if "CUDA" in features:
        found.say("devices", f"{_cores()}, {gpus} GPUs")
        if not gpus:
            found.fix(
                "GPUs",
                "MXNet is built for CUDA and sees no GPU: check nvidia-smi and "
                "CUDA_VISIBLE_DEVICES.",
            )
    else:
        found.say("devices", f"{_cores()}; this MXNet has no CUDA")
        if os.path.exists("/proc/driver/nvidia/version"):
            found.say("GPUs", "an NVIDIA driver is present: pip install mxnet-cu112==1.9.1 uses it")
    return state


def _self_test(found, title, devices):
    done = _run("train", *devices)
    name = f"self-test, {title}"
    if done.result is None:
        found.fix(name, f"The self-test on {title} failed: {done.last}", "failed")
        return
    error, access = done.result
    if not error <= _TOLERANCE:
        remedy = f"The self-test on {title} is wrong by {error:.1g}: please report it with all of"
        found.fix(name, f"{remedy} this output.", "wrong")
    else:
        found.say(name, f"forward and backward agree with NumPy to {error:.1g}{_PATHS[access]}")


class _Done(NamedTuple):
    """The outcome of a process."""

    result: Any  # None if it failed
    last: str  # its last line, or how it ended
    ended: bool = True  # neither killed nor timed out


def _run(*arguments):
    # With a role of a job, `import mxnet` does not return: the process becomes a server.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DMLC_")}
    environment.setdefault("GLUON_SYNCBN_TIMEOUT", "30")
    environment["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(_FOLDER), *filter(None, [environment.get("PYTHONPATH")])]
    )
    try:
        done = subprocess.run(
            [sys.executable, *options(), _PROBES, *arguments],
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
    # Drop the class of the error.
    head, _, tail = last.partition(": ")
    return _Done(None, tail if tail and " " not in head else last)
