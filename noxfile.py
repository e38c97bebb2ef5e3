"""`make test-pythons`: users' programs with the wheel, on all versions of Python that README names,
and tests that depend on Python, on some."""

from pathlib import Path

import nox

PYTHONS = ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"]
# The oldest, the one that MXNet was made for, and the newest available.
TESTED = ["3.8", "3.11", "3.13"]
# MXNet was made for NumPy 1.23. Other versions are what pip takes, NumPy 2 where there is no MXNet
# to forbid it.
CONSTRAINTS = {"3.11": ["numpy==1.23.5"]}
# What ends as with 3.11 on all.
PROGRAMS = ["tests/project/test_programs.py", "tests/project/test_readme.py"]
# The tests that depend on Python, NumPy, onnx or gluoncv. The native library, and how processes and
# devices meet, are tested on one Python. `make test-pythons ARGS="-- tests"` runs all quick tests.
TESTS = "compat convert deploy examples launch/test_launch.py project/test_docs.py training".split()
TESTS += [f"layers/test_{name}.py" for name in "amp bad_input batch_norm numpy_arrays".split()]
TESTS += [f"distributed/test_{name}.py" for name in ("judge", "routes", "watcher")]

# Older versions that people still run, and the tests that depend on MXNet.
MXNETS = ["1.7.0.post2", "1.8.0.post0"]
MXNET_TESTS = "layers training convert deploy distributed launch".split()
PYTEST = ("python", "-m", "pytest", "-n", "3", "-m", "not long")

nox.options.sessions = ["programs", "tests"]
# A Python that is not installed is named in nox's summary.
nox.options.error_on_missing_interpreters = False


def install(session, extras, *more, mxnet="1.9.1"):
    (wheel,) = Path("dist").glob("*.whl")
    session.install(f"{wheel}[{extras}]", *more)
    session.install("--no-deps", f"mxnet=={mxnet}")


@nox.session(python=PYTHONS, venv_backend="venv")
def programs(session):
    install(session, "cpu", "pytest")
    # How a process ends, where Python starts no thread at its end.
    more = ["tests/native/test_process.py"] if session.python == "3.12" else []
    # Not `python -m pytest`, for which the checkout's package would come before the wheel's.
    session.run("pytest", "-m", "not long", *PROGRAMS, *more)


@nox.session(python=TESTED, venv_backend="venv")
def tests(session):
    install(session, "cpu,examples,test", *CONSTRAINTS.get(session.python, []))
    with session.chdir(session.create_tmp()):
        session.run("python", "-m", "gluon_syncbn", "doctor")
    # From here on the checkout's package comes before the wheel's.
    session.run(*PYTEST, *(session.posargs or [f"tests/{name}" for name in TESTS]))


@nox.session(python="3.8", venv_backend="venv")
@nox.parametrize("mxnet", MXNETS)
def mxnets(session, mxnet):
    """`make test-mxnets`: the wheel, and tests that depend on MXNet, on older versions of it."""
    install(session, "examples,test", "graphviz", "requests", mxnet=mxnet)
    session.run(*PYTEST, *(session.posargs or [f"tests/{name}" for name in MXNET_TESTS]))
    # AMP has float16 there only without oneDNN.
    files = [f"tests/layers/test_{name}.py" for name in ("amp", "dtypes")]
    session.run(*PYTEST, *files, env={"MXNET_MKLDNN_ENABLED": "0"})
