"""Puts back what MXNet 1.9.1 and gluoncv 0.10.5 use and other packages have removed.

Each function adds what is missing, and leaves alone what is there.
"""

from __future__ import annotations

import os
import sys
import types
from importlib.util import find_spec
from typing import Any, Callable

from ._environment import inherit, is_needed


def _before_mxnet() -> None:
    import numpy

    add_numpy_names(numpy)
    if find_spec("distutils") is None:
        add_distutils()
    if is_needed():
        # DataLoader workers that are not forked import mxnet first.
        inherit(os.environ)


def add_numpy_names(numpy: Any) -> None:
    """Adds names that NumPy 1.24 to 2 removed, and MXNet and gluoncv still use."""
    if _release(numpy.__version__) < (1, 24):
        return

    def renamed(name: str, new: str) -> Callable[..., Any]:
        # A new function, as MXNet registers one of its own for each name.
        def function(*args: Any, **kwargs: Any) -> Any:
            return getattr(numpy, new)(*args, **kwargs)

        function.__name__ = name
        return function

    def moved_to_numpy_financial(name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                f"numpy.{name} was removed from NumPy 1.20: use {name} of numpy_financial"
            )

        function.__name__ = name
        return function

    names: dict[str, Any] = {
        "Inf": numpy.inf,
        "NAN": numpy.nan,
        "NINF": -numpy.inf,
        "NZERO": -0.0,
        "NaN": numpy.nan,
        "PINF": numpy.inf,
        "PZERO": 0.0,
        "bool": bool,  # NumPy 2 has one of its own, which MXNet takes as well.
        "compat": types.SimpleNamespace(basestring=str),
        "float": float,
        "in1d": lambda ar1, ar2, **options: numpy.isin(numpy.ravel(ar1), ar2, **options),
        "int": int,
        "msort": lambda a: numpy.sort(a, axis=0),
    }
    for name in ("mirr", "npv", "pmt", "ppmt", "pv", "rate"):
        names[name] = moved_to_numpy_financial(name)
    for name, new in {
        "alltrue": "all",
        "product": "prod",
        "round_": "round",
        "sometrue": "any",
        "trapz": "trapezoid",
    }.items():
        names[name] = renamed(name, new)
    for name, value in names.items():
        if name not in vars(numpy):
            setattr(numpy, name, value)


def _release(version: str) -> tuple[int, ...]:
    """(2, 1) of "2.1.0rc1"."""
    return tuple(int(number) for number in version.split(".")[:2])


def add_distutils() -> None:
    """``distutils.version``, which is all that MXNet and gluoncv use of distutils. Python 3.12
    removed it; setuptools, where it is installed, brings the whole of it."""
    from . import _distutils_version

    distutils: Any = types.ModuleType("distutils", "Added by mxnet_compat.")
    distutils.__path__ = []
    distutils.version = _distutils_version
    sys.modules["distutils"] = distutils
    sys.modules["distutils.version"] = _distutils_version


def _after_mxnet(mxnet: Any) -> None:
    import numpy

    if mxnet.__version__ != "1.9.1":
        return
    if _release(numpy.__version__) >= (2, 0):
        # Operators get their parameters as text, and NumPy 2 writes (np.int64(2),) where NumPy 1
        # wrote (2,).
        for module in (mxnet._ctypes.ndarray, mxnet._ctypes.symbol):
            module.str = parameter_text
    if _release(numpy.__version__) >= (1, 25):
        _accept_named_tuples(mxnet.numpy.multiarray)
    if not hasattr(numpy.ndarray, "tostring"):
        for function in (mxnet.recordio.pack, mxnet.recordio.pack_img):
            _rename_attribute(function, "tostring", "tobytes")


def _accept_named_tuples(multiarray: Any) -> None:
    """Lets mx.np functions that NumPy computes return named tuples. NumPy returns them since 1.25,
    as from ``linalg.qr``, and MXNet would create them again from a list."""
    convert = multiarray._as_mx_np_array

    def as_mx_np_array(object: Any, ctx: Any = None) -> Any:
        return convert(tuple(object) if hasattr(object, "_fields") else object, ctx)

    multiarray._as_mx_np_array = as_mx_np_array


def parameter_text(value: Any) -> str:
    """``str(value)``, with NumPy scalars inside tuples and lists as NumPy 1 wrote them."""
    return str(_with_bare_numbers(value)) if type(value) in (tuple, list) else str(value)


def _with_bare_numbers(value: Any) -> Any:
    import numpy

    if type(value) in (tuple, list):
        return type(value)(map(_with_bare_numbers, value))
    return _Bare(value) if isinstance(value, numpy.generic) else value


class _Bare(str):
    """Text that a tuple or list shows without quotes."""

    __repr__ = str.__str__


def _rename_attribute(function: types.FunctionType, old: str, new: str) -> None:
    """Makes a function use another attribute, for everybody who holds the function."""
    code = function.__code__
    names = tuple(new if name == old else name for name in code.co_names)
    function.__code__ = code.replace(co_names=names)


def add_onnx_mapping(onnx: Any) -> None:
    """``onnx.mapping``, which onnx 1.17 removed."""
    if find_spec("onnx.mapping") is not None:
        return
    from onnx import TensorProto, helper

    mapping: Any = types.ModuleType("onnx.mapping", "Added by mxnet_compat.")
    to_numpy = {}
    for kind in TensorProto.DataType.values():
        if kind != TensorProto.UNDEFINED:
            to_numpy[kind] = helper.tensor_dtype_to_np_dtype(kind)
    mapping.TENSOR_TYPE_TO_NP_TYPE = to_numpy
    # If several types share one in NumPy, the first.
    mapping.NP_TYPE_TO_TENSOR_TYPE = {dtype: kind for kind, dtype in reversed(to_numpy.items())}
    onnx.mapping = sys.modules["onnx.mapping"] = mapping


def add_pillow_names(image: Any) -> None:
    """A filter that Pillow 10 renamed."""
    if not hasattr(image, "ANTIALIAS"):
        image.ANTIALIAS = image.LANCZOS


# Module: what to call before it is executed, and with the module afterwards.
FIXES: dict[str, tuple[Callable[[], None], Callable[[Any], None]]] = {
    "mxnet": (_before_mxnet, _after_mxnet),
    "onnx": (lambda: None, add_onnx_mapping),
    "PIL.Image": (lambda: None, add_pillow_names),
}
