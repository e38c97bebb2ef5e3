"""Switches the hook on for every program of a Python environment, and off again."""

from __future__ import annotations

import contextlib
import os
import sysconfig

# Python executes the lines of a .pth file that begin with "import" when it starts. If this package
# is gone, the line does nothing.
_LINE = 'import sys; exec("try:\\n    import mxnet_compat\\nexcept ImportError:\\n    pass")\n'


def path() -> str:
    """The file that switches the hook on."""
    return os.path.join(sysconfig.get_path("purelib"), "mxnet_compat.pth")


def is_enabled() -> bool:
    return os.path.exists(path())


def enable() -> None:
    """Lets ``import mxnet`` work in every program of this environment. Raises OSError if its folder
    cannot be written."""
    temporary = f"{path()}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(_LINE)
        os.replace(temporary, path())
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def disable() -> None:
    """Undoes `enable`."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path())
