"""Imports MXNet and loads the native library, with errors that say what to do."""

import ctypes
import os
import re
import sys

from .._version import __version__

_MXNET = "1.9.1"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.join(_PACKAGE, "libgluon_syncbn.so")
# With what waits end at the end of the process.
CLOSED = "The process ends, and devices no longer synchronize."


def _import_mxnet():
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


def _why_mxnet_failed(error, is_broken):
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


def _load():
    if not os.path.exists(_LIBRARY):
        raise ImportError(f"The native library of gluon_syncbn is missing ({_LIBRARY}). {REBUILD}")
    try:
        library = ctypes.CDLL(_LIBRARY, ctypes.RTLD_LOCAL)
        library.gluon_syncbn_version.restype = ctypes.c_char_p
        version = library.gluon_syncbn_version().decode()
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

_bool, _int, _long, _double = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_double
_text, _pointer = ctypes.c_char_p, ctypes.c_void_p


def _struct(name, /, **fields):
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# What src/operator/api and src/operator/processes declare: tests/native/test_library.py compares.
LayerConfig = _struct(
    "LayerConfig",
    name=_text,
    devices=ctypes.POINTER(_text),
    device_count=_int,
    num_devices=_int,
    group_size=_int,
    timeout=_double,
    spans_processes=_int,
    first_rank=_int,
    end_rank=_int,
    config_error=_text,
    notice=_text,
)
KVStoreSlots = _struct(
    "KVStoreSlots",
    pushpull=_pointer,
    kvstore=_pointer,
    key=_int,
    rank=_int,
    ranks=_int,
    size=_long,
    slots=_pointer,
    thirds=_pointer,
)
KVStoreSums = _struct("KVStoreSums", key=_int, array=_pointer, packed=_pointer)
HorovodArrays = _struct(
    "HorovodArrays",
    allgather=_pointer,
    ranks=_int,
    size=_long,
    input=_pointer,
    values=_pointer,
    output=_pointer,
)
HorovodSums = _struct(
    "HorovodSums",
    allreduce=_pointer,
    operation=_int,
    input=_pointer,
    output=_pointer,
    packed=_pointer,
    sums=_pointer,
)

Outcome = _struct("Outcome", succeeded=_int, error=ctypes.c_char * (1 << 13))


def _callback(result, *arguments):
    return ctypes.CFUNCTYPE(result, *arguments, ctypes.POINTER(Outcome))


# Called by the library: see `callbacks`.
ALL_REDUCE = _callback(None, _long, _text, ctypes.POINTER(_double), _long, _long)
StoreFunction = _struct("StoreFunction", all_reduce=ALL_REDUCE, store=_long)
WARN = _callback(None, _text)
FAILED = _callback(None, _long, _text)
WAITS = _callback(None, _long, _text)
REPORTS = _callback(None, _long, _text)
MAY_RUN = _callback(_bool)
OPEN = _callback(_pointer, _long, _bool, _long, _text, _long, _long)
IN_FLIGHT = _callback(None, _text, _text, _long, _double, _double, _bool)
_KVSTORE, _HOROVOD = (KVStoreSlots, KVStoreSums), (HorovodArrays, HorovodSums)
Callbacks = _struct(
    "Callbacks",
    warn=WARN,
    failed=FAILED,
    waits=WAITS,
    reports=REPORTS,
    may_run=MAY_RUN,
    open=OPEN,
)

# Name: result, arguments.
for _name, (_result, *_arguments) in {
    "register": (_int, _pointer, _text, _bool, _bool, ctypes.POINTER(Callbacks)),
    "after_fork": (None,),
    "configure": (None, _long, ctypes.POINTER(LayerConfig)),
    "forget": (None, _long),
    "set_active_devices": (None, ctypes.POINTER(_text), _int),
    "set_joined": (None, _bool),
    "end_step": (_long, ctypes.POINTER(_long), _pointer, _int, ctypes.POINTER(_long), _int),
    "exchanges": (_long, _long, _pointer, _long),
    "take_part": (
        *(_bool, _long, _bool, _long, _long, _long, _bool, _double, _bool, _pointer, _text, _int),
    ),
    "fail": (None, _text),
    "recover": (None,),
    "has_failed": (_pointer,),
    "failure": (None, _text, _int),
    "probe": (None, _long, _text, _pointer, _bool),
    "expect_report": (None, _pointer),
    "next_ticket": (_long,),
    "settle": (None, ctypes.POINTER(_long), _int, _long, _text),
    "holds_error": (_bool, _pointer),
    "abandon": (None,),
    "is_abandoned": (_bool,),
    "close": (None, _text),
    "stuck_seconds": (_double,),
    "cuda": (_text,),
    "peer_access": (_int,),
    "release": (None,),
    "catch_interrupts": (_int,),
    "connect": (_pointer, _double),
    "lock_calls": (None, _pointer),
    "unlock_calls": (None, _pointer),
    "in_flight": (_pointer, _pointer, IN_FLIGHT, _text, _int),
    "packed_size": (_long, _long, _int, _int),
    "kvstore_route": (_pointer, _pointer, _text, _int, *map(ctypes.POINTER, _KVSTORE)),
    "horovod_route": (_pointer, _pointer, _text, _int, *map(ctypes.POINTER, _HOROVOD)),
    "segment": (_pointer, _text, _text, ctypes.POINTER(_int), _text, _int),
    "close_descriptor": (None, _pointer),
    "shared_memory_route": (
        *(_pointer, _pointer, _text, _pointer, _int, _int, _long, _bool, _text, _int),
    ),
    "function_route": (
        *(_pointer, _pointer, _text, _int, ctypes.POINTER(StoreFunction), _int, _int, _long),
    ),
    "route_calls": (_long, _pointer),
    "close_route": (None, _pointer, _text),
    "exchange": (_int, _pointer, _text, _double, _pointer, _long, _pointer, _text, _int),
    "array_wait_begin": (_pointer, _pointer),
    "array_wait": (_int, _pointer, _double),
    "array_wait_end": (None, _pointer),
    "count_operation": (None, _pointer, _int),
    "operations": (ctypes.c_int64, _int),
}.items():
    _function = getattr(library, f"gluon_syncbn_{_name}", None)
    if _function is None:
        raise ImportError(f"The native library has no function {_name}. {REBUILD}")
    _function.restype, _function.argtypes = _result, _arguments
