"""Imports MXNet and loads the native library, with errors that say what to do."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import Any

from .. import __version__

_MXNET = "1.9.1"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.join(_PACKAGE, "libgluon_syncbn.so")
# With what waits end at the end of the process.
CLOSED = "The process ends, and devices no longer synchronize."


def _import_mxnet() -> Any:
    # Python keeps the submodules of a package whose import has failed.
    is_broken = "mxnet.base" in sys.modules and "mxnet" not in sys.modules
    try:
        import mxnet_compat  # noqa: F401, I001  First: it lets MXNet run on today's Python and NumPy.
        import mxnet
    except Exception as error:  # Old MXNet may raise anything under a new NumPy or Python.
        raise ImportError(_why_mxnet_failed(error, is_broken)) from error
    if not re.match(r"1\.[789]\.", mxnet.__version__):
        raise ImportError(
            f"gluon_syncbn needs MXNet 1.7 to {_MXNET}, the last release, and found "
            f"{mxnet.__version__}: pip install mxnet=={_MXNET} (or mxnet-cu112=={_MXNET} for GPUs)."
        )
    return mxnet


def _why_mxnet_failed(error: Exception, is_broken: bool) -> str:
    if is_broken:
        return (
            "MXNet was imported before gluon_syncbn in this process, and that failed: restart it "
            "(in a notebook, the kernel) and import gluon_syncbn first, or run "
            "python -m gluon_syncbn doctor --enable-mxnet-on-import once."
        )
    missing = error.name if isinstance(error, ModuleNotFoundError) else ""
    if missing == "mxnet":
        if sys.version_info < (3, 13):
            how = "pip install 'gluon-syncbn[cpu]', or 'gluon-syncbn[cu112]' for GPUs."
        else:
            how = f"pip install --no-deps mxnet=={_MXNET}, or mxnet-cu112=={_MXNET} for GPUs."
        return f"gluon_syncbn needs MXNet 1.7 to {_MXNET}, which is not installed: {how}"
    if missing in ("graphviz", "numpy", "requests"):
        return f"MXNet needs {missing}, which is not installed: pip install {missing}."
    if sys.flags.optimize > 1:
        return (
            "MXNet cannot be imported without docstrings, which python -OO and PYTHONOPTIMIZE=2 "
            "remove: use -O or PYTHONOPTIMIZE=1."
        )
    return (
        f"MXNet is installed but cannot be imported ({error}): fix or reinstall it first; one for "
        "GPUs needs the libraries of its CUDA (mxnet-cu112: CUDA 11) and an NVIDIA driver."
    )


REBUILD = "Build it again: pip install --force-reinstall --no-deps . in a checkout of gluon_syncbn."


class _Library(ctypes.CDLL):
    """The functions of src/operator/api/, and those that Python gives it to call. It carries their
    declarations as texts: see api/declare.h."""

    def __getattr__(self, name: str) -> Any:
        kind, parameters = self.declared(name)
        function = kind((name, self), tuple((1, parameter) for parameter in parameters))
        setattr(self, name, function)
        return function

    def declared(self, name: str) -> tuple[type, list[str]]:
        """The type of a function, for ctypes, and the names of its parameters."""
        try:
            text = ctypes.c_char.in_dll(self, f"{name}_declaration")
        except ValueError as error:
            raise AttributeError(f"{error}. {REBUILD}") from error
        declaration = ctypes.string_at(ctypes.addressof(text)).decode().replace(" *", "*")
        result, parameters = declaration.rstrip(")").split("(")
        pairs = [pair.rpartition(" ") for pair in parameters.split(", ") if pair]
        kinds = [_ctype(kind) for kind in [result, *(kind for kind, _, _ in pairs)]]
        return ctypes.CFUNCTYPE(*kinds), [parameter for _, _, parameter in pairs]


_NUMBERS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "double": ctypes.c_double}


def _ctype(kind: str) -> Any:
    """The type of ctypes for one in C."""
    if kind == "void":
        return None
    if kind.endswith("*"):
        return ctypes.c_char_p if kind == "const char*" else ctypes.c_void_p
    return _NUMBERS[kind]


def _load() -> _Library:
    if not os.path.exists(_LIBRARY):
        raise ImportError(f"The native library of gluon_syncbn is missing ({_LIBRARY}). {REBUILD}")
    try:
        library = _Library(_LIBRARY, ctypes.RTLD_LOCAL)
        # Any version has it.
        function = library["gluon_syncbn_version"]
        function.restype = ctypes.c_char_p
        version = function().decode()
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"The native library of gluon_syncbn cannot be loaded ({error}): it was built for "
            f"another machine or is damaged. {REBUILD}"
        ) from error
    if version != __version__:
        raise ImportError(
            f"The native library is of gluon_syncbn {version}, the Python part of {__version__}. "
            f"{REBUILD}"
        )
    return library


mxnet = _import_mxnet()
import numpy  # noqa: E402, F401, I001  Only after MXNet: if it is missing, the error says so.

library = _load()
# Where operations end before the next begins.
NAIVE_ENGINE = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"
