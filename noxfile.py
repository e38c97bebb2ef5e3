"""`make test-pythons`: the wheel and the quick tests on several versions of Python."""

from pathlib import Path

import nox

# The oldest, the one that MXNet was made for, and the newest that is at hand.
PYTHONS = ["3.8", "3.11", "3.13"]
# MXNet was made for NumPy 1.23. Other versions are what pip takes, NumPy 2 where there is no MXNet
# to forbid it.
CONSTRAINTS = {"3.11": ["numpy==1.23.5"]}

# A Python that is not installed is named in nox's summary.
nox.options.error_on_missing_interpreters = False


@nox.session(python=PYTHONS, venv_backend="venv")
def tests(session):
    (wheel,) = Path("dist").glob("*.whl")
    session.install(f"{wheel}[cpu,examples,test]", *CONSTRAINTS.get(session.python, []))
    session.install("--no-deps", "mxnet==1.9.1")
    with session.chdir(session.create_tmp()):
        session.run("python", "-m", "gluon_syncbn", "doctor")
    # From here on the checkout's package comes before the wheel's.
    quick = ["-n", "2", "-m", "not long"]
    session.run("python", "-m", "pytest", *quick, *session.posargs)
