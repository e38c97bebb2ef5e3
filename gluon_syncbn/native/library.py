"""Imports MXNet and loads the native library. Every error of loading is made here."""

import ctypes
import os
import sys

from .._version import __version__

_MXNET = "1.9.1"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.join(_PACKAGE, "libgluon_syncbn.so")


def _import_mxnet():
    try:
        import mxnet
    except (
        Exception
    ) as error:  # What an old MXNet raises under a new NumPy or Python is of any kind.
        raise ImportError(_why_mxnet_failed(error)) from error
    if mxnet.__version__ != _MXNET:
        raise ImportError(
            f"gluon_syncbn needs MXNet {_MXNET}, the last release, and found {mxnet.__version__}: "
            f"pip install mxnet=={_MXNET} (or mxnet-cu112=={_MXNET} for GPUs)."
        )
    return mxnet


def _why_mxnet_failed(error):
    if isinstance(error, ModuleNotFoundError) and error.name == "mxnet":
        return (
            f"gluon_syncbn needs MXNet {_MXNET}, which is not installed: "
            "pip install 'gluon-syncbn[cpu]', or 'gluon-syncbn[cu112]' for GPUs."
        )
    if not (3, 8) <= sys.version_info[:2] <= (3, 11):
        return (
            f"MXNet {_MXNET} needs Python 3.8 to 3.11 and cannot be imported by Python "
            f"{sys.version_info[0]}.{sys.version_info[1]} ({error}): use Python 3.11."
        )
    try:
        import numpy

        version = tuple(int(part) for part in numpy.__version__.split(".")[:2])
    except ImportError:
        return f"MXNet {_MXNET} needs NumPy, which is not installed: pip install 'numpy<1.24'."
    if version >= (1, 24):
        return (
            f"MXNet {_MXNET} needs NumPy below 1.24 and cannot be imported with "
            f"{numpy.__version__} ({error}): pip install 'numpy<1.24'."
        )
    return (
        f"MXNet {_MXNET} is installed but cannot be imported ({error}): mend or reinstall it "
        "first; mxnet-cu112 needs the CUDA 11 libraries and an NVIDIA driver."
    )


def _load():
    rebuild = (
        "Build it again: pip install --force-reinstall --no-deps . in a checkout of gluon_syncbn."
    )
    if not os.path.exists(_LIBRARY):
        raise ImportError(f"The native library of gluon_syncbn is missing ({_LIBRARY}). {rebuild}")
    try:
        library = ctypes.CDLL(_LIBRARY, ctypes.RTLD_LOCAL)
        library.gluon_syncbn_version.restype = ctypes.c_char_p
        version = library.gluon_syncbn_version().decode()
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"The native library of gluon_syncbn cannot be loaded ({error}): it was built for "
            f"another machine or is damaged. {rebuild}"
        ) from error
    if version != __version__:
        raise ImportError(
            f"The native library is of gluon_syncbn {version}, the Python part of {__version__}. "
            f"{rebuild}"
        )
    return library


mxnet = _import_mxnet()
import numpy  # noqa: E402, F401, I001  Only after MXNet, whose error says which NumPy it needs.

library = _load()

# Called by the library.
WARN = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
FAILED = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)
WAITS = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
EXCHANGE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_double),
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_double),
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_int,
)
LOOK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_double,
    ctypes.c_double,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_int,
)
TELL = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_double, ctypes.c_int)

library.gluon_syncbn_cuda.restype = ctypes.c_char_p
library.gluon_syncbn_stuck_seconds.restype = ctypes.c_double
library.gluon_syncbn_settle.argtypes = [
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_char_p,
]
library.gluon_syncbn_look_for_error.argtypes = [
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_int,
]
library.gluon_syncbn_watch_begin.restype = ctypes.c_void_p
library.gluon_syncbn_watch_begin.argtypes = [ctypes.c_void_p]
library.gluon_syncbn_watch_wait.argtypes = [ctypes.c_void_p, ctypes.c_double]
library.gluon_syncbn_watch_end.argtypes = [ctypes.c_void_p]
library.gluon_syncbn_connect.restype = ctypes.c_void_p
library.gluon_syncbn_connect.argtypes = [ctypes.c_int64, LOOK]
library.gluon_syncbn_lock_calls.argtypes = [ctypes.c_void_p]
library.gluon_syncbn_unlock_calls.argtypes = [ctypes.c_void_p]
library.gluon_syncbn_attendance.argtypes = [ctypes.c_void_p, TELL]
library.gluon_syncbn_kvstore_line.restype = ctypes.c_void_p
library.gluon_syncbn_kvstore_line.argtypes = [
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
]
library.gluon_syncbn_horovod_line.restype = ctypes.c_void_p
library.gluon_syncbn_horovod_line.argtypes = [
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
]
library.gluon_syncbn_line_calls.restype = ctypes.c_int64
library.gluon_syncbn_line_calls.argtypes = [ctypes.c_void_p]
library.gluon_syncbn_line_exchange.argtypes = [
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_double,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_int,
]
library.gluon_syncbn_set_line.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p]
