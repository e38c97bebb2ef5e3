"""What is put back has the meaning it had, and what is there is left alone."""

import sys
import types

import mxnet as mx
import numpy as np
import onnx
import pytest
from mxnet_compat import _distutils_version, _fixes


def test_what_numpy_has_is_left_alone():
    numpy = types.SimpleNamespace(__version__="1.23.5")
    _fixes.add_numpy_names(numpy)
    assert vars(numpy) == {"__version__": "1.23.5"}
    numpy = types.SimpleNamespace(__version__="2.5.0", inf=np.inf, nan=np.nan, bool=np.bool_)
    _fixes.add_numpy_names(numpy)
    assert numpy.bool is np.bool_ and numpy.int is int


def test_numpy_names_mean_what_they_did():
    numpy = types.SimpleNamespace(
        __version__="2.5.0",
        **{
            name: getattr(np, name) for name in "inf nan all any isin prod ravel round sort".split()
        },
        trapezoid=getattr(np, "trapezoid", None) or np.trapz,
    )
    _fixes.add_numpy_names(numpy)
    x = np.array([[3.0, 1.0], [2.0, 2.0]])
    assert (numpy.PINF, numpy.NINF, numpy.Inf) == (np.inf, -np.inf, np.inf)
    assert np.isnan([numpy.NaN, numpy.NAN]).all()
    assert (str(numpy.PZERO), str(numpy.NZERO)) == ("0.0", "-0.0")
    assert (numpy.bool, numpy.int, numpy.float) == (bool, int, float)
    assert numpy.alltrue(x) and not numpy.sometrue(0 * x) and numpy.product(x) == 12
    assert numpy.round_(1.26, decimals=1) == 1.3
    assert numpy.trapz([1, 2, 3], dx=2) == 8
    assert (numpy.msort(x) == [[2, 1], [3, 2]]).all()
    assert numpy.in1d(x, [2, 3], invert=True).tolist() == [False, True, False, False]
    with pytest.raises(RuntimeError, match="npv.*removed.*numpy_financial"):
        numpy.npv(0.1, [1, 2])


def test_versions_compare_by_number():
    loose, strict = _distutils_version.LooseVersion, _distutils_version.StrictVersion
    assert loose("1.9.1") < loose("1.10") < "2.0.0"
    assert loose("0.10.5.post0") >= loose("0.10.5") > "0.9"
    assert strict("2.5.5") >= strict("1.6.0") and strict("1.9") == "1.9"
    assert str(loose("1.9.1")) == "1.9.1"


def test_parameters_of_operators_have_no_types_of_numpy():
    text = _fixes.parameter_text((np.int64(2), [np.float32(0.1), None], "a"))
    assert text == "(2, [0.1, None], 'a')"
    assert _fixes.parameter_text(np.float64(0.1)) == "0.1"
    x = mx.nd.arange(6)
    parts = mx.nd.split_v2(x, (np.int64(2), np.int32(4)))
    assert [part.asnumpy().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    symbol = mx.sym.split_v2(mx.sym.var("x"), (np.int64(2), np.int32(4)))
    assert symbol.eval(x=x)[1].asnumpy().tolist() == [2, 3]


def test_results_of_numpy_that_are_named_tuples():
    with mx.util.np_array(True):
        q, r = mx.np.linalg.qr(mx.np.array([[2.0, 1.0], [1.0, 3.0]]))
    assert q.shape == r.shape == (2, 2)


def test_a_record_with_several_labels():
    record = mx.recordio.pack(mx.recordio.IRHeader(0, [1, 2.5], 7, 0), b"image")
    header, content = mx.recordio.unpack(record)
    assert (header.label.tolist(), header.id, content) == ([1, 2.5], 7, b"image")
    image = np.full((8, 8, 3), 100, np.uint8)
    header, image = mx.recordio.unpack_img(mx.recordio.pack_img((0, 3.0, 7, 0), image))
    assert (header.label, image.shape) == (3.0, (8, 8, 3))


def test_onnx_mapping(monkeypatch):
    monkeypatch.setattr(_fixes, "find_spec", lambda name: None)
    monkeypatch.delattr(onnx, "mapping", raising=False)
    monkeypatch.delitem(sys.modules, "onnx.mapping", raising=False)
    _fixes.add_onnx_mapping(onnx)
    to_onnx, to_numpy = onnx.mapping.NP_TYPE_TO_TENSOR_TYPE, onnx.mapping.TENSOR_TYPE_TO_NP_TYPE
    for name, kind in {"float32": 1, "uint8": 2, "int64": 7, "bool": 9, "float16": 10}.items():
        assert to_onnx[np.dtype(name)] == kind
        assert to_numpy[kind] == np.dtype(name)
    assert to_onnx[np.dtype("O")] == onnx.TensorProto.STRING
    assert sys.modules["onnx.mapping"] is onnx.mapping
