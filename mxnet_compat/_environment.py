"""Whether this Python needs the package, and how child processes get it."""

import os
import sys

# Holds a sitecustomize.py, which Python imports when it starts.
_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")


def is_needed():
    """Whether MXNet 1.9.1 cannot be imported here without this package."""
    from importlib import metadata

    if sys.version_info >= (3, 12):
        return True
    try:
        return tuple(map(int, metadata.version("numpy").split(".")[:2])) >= (1, 24)
    except metadata.PackageNotFoundError:
        return False


def options():
    """Those of this Python, such as -O and -W, for its child processes. With -E, -I or -S they
    would lack what `inherit` adds."""
    import subprocess

    found = subprocess._args_from_interpreter_flags()
    return [option for option in found if option not in ("-E", "-I", "-S")]


def inherit(environment):
    """Adds the hook to all Python processes that are started with this environment."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if _SITE not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([_SITE, *filter(None, paths)])
