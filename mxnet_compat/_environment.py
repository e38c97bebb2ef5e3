"""Whether this Python needs the package, and how child processes get it."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # As in `typing`, which the hook does not import.
if TYPE_CHECKING:
    from typing import MutableMapping

# Holds a sitecustomize.py, which Python imports when it starts.
_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")


def is_needed() -> bool:
    """Whether MXNet 1.9.1 cannot be imported here without this package."""
    from importlib import metadata

    if sys.version_info >= (3, 12):
        return True
    try:
        return tuple(map(int, metadata.version("numpy").split(".")[:2])) >= (1, 24)
    except metadata.PackageNotFoundError:
        return False


def options() -> list[str]:
    """Those of this Python, such as -O and -W, for its child processes. With -E, -I or -S they
    would lack what `inherit` adds."""
    import subprocess

    # What multiprocessing uses; the types do not tell of it.
    found = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [option for option in found if option not in ("-E", "-I", "-S")]


def inherit(environment: MutableMapping[str, str]) -> None:
    """Adds the hook to all Python processes that are started with this environment."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if _SITE not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([_SITE, *filter(None, paths)])
