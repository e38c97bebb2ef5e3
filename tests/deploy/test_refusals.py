"""What sbn.export refuses, before anything is written."""

import os
import sys

import gluon_syncbn as sbn
import mxnet as mx
import pytest
from deploy_nets import Net, conv_net, ready
from mxnet.gluon import nn
from mxnets import needs_onnx


@mx.operator.register("of_others")
class OfOthers(mx.operator.CustomOpProp):
    def __init__(self, **attributes):  # Those of the scope in which a loop is traced.
        super().__init__(need_top_grad=True)

    def create_operator(self, *_):
        class Identity(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                self.assign(out_data[0], req[0], in_data[0])

        return Identity()


def of_one_name():
    one, two = (sbn.SyncBatchNorm(in_channels=3, prefix="same_") for _ in range(2))
    one.initialize()
    two.initialize()
    return Net(lambda net, F, x: net.two(net.one(x)), one=one, two=two)


@pytest.mark.parametrize(
    "make, text",
    [
        (
            lambda: nn.HybridLambda(lambda F, x: F.Custom(x, op_type="of_others")),
            r"custom operators \(of_others\)",
        ),
        (
            lambda: nn.HybridLambda(lambda F, x: x.reshape((x.shape[0], -1))),
            "HybridLambda 'hybridlambda",
        ),
        (of_one_name, "Two parameters have the name same_"),
        (lambda: nn.Dense(3), r"2 parameters have no values yet, dense.*net\.initialize\(\)"),
    ],
)
def test_nets_that_cannot_be_exported(tmp_path, make, text):
    net = make()
    with pytest.raises((ValueError, sbn.ExportError), match=text):
        sbn.export(net, tmp_path / "m")
    assert os.listdir(tmp_path) == []


def test_a_symbol(tmp_path):
    with pytest.raises(TypeError, match="export takes a Gluon Block and got Symbol"):
        sbn.export(mx.sym.var("data"), tmp_path / "m")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments, kind, text",
    [
        ({"path": "folder/"}, ValueError, "path is 'folder/': add the name that the files"),
        ({"path": b"m"}, TypeError, "path is b'm': give the name of a file"),
        ({"epoch": -1}, ValueError, "epoch is -1"),
        ({"epoch": 3.0}, ValueError, "epoch is 3.0: give an integer from 0"),
        ({"epoch": None}, TypeError, "epoch is None: give an integer from 0"),
        ({"onnx": "o"}, ValueError, "onnx needs input_shape"),
        ({"onnx": True, "input_shape": (1, 3, 6, 6)}, TypeError, "onnx is True: give the name"),
        ({"input_shape": (0, 3)}, ValueError, "input_shape is (0, 3)"),
        ({"input_shape": "224"}, ValueError, "input_shape is '224'"),
        ({"input_shape": [(1, 3), (1, 3)]}, sbn.ExportError, "cannot be traced"),
        ({"input_shape": (1, 4, 4, 4)}, ValueError, "does not take inputs of input_shape (1, 4,"),
        ({"dtype": "int8"}, ValueError, "dtype is 'int8'"),
        pytest.param(
            {"onnx": "m-symbol.json", "input_shape": (1, 3, 6, 6)},
            ValueError,
            "another file of this export",
            marks=needs_onnx,
        ),
    ],
)
def test_arguments(tmp_path, monkeypatch, arguments, kind, text):
    monkeypatch.chdir(tmp_path)
    net = conv_net()
    ready(net, (2, 3, 6, 6))
    with pytest.raises(kind) as failure:
        sbn.export(net, **{"path": "m", **arguments})
    assert text in str(failure.value), failure.value
    assert os.listdir(tmp_path) == []


def test_an_mxnet_whose_converters_are_too_old(tmp_path, monkeypatch):
    monkeypatch.delattr(mx, "onnx", raising=False)
    net = conv_net()
    ready(net, (2, 3, 6, 6))
    with pytest.raises(sbn.ExportError, match=rf"needs MXNet 1\.9.*{mx.__version__} is installed"):
        sbn.export(net, tmp_path / "m", onnx=tmp_path / "o", input_shape=(2, 3, 6, 6))
    assert os.listdir(tmp_path) == []
    sbn.export(net, tmp_path / "m")


@needs_onnx
def test_only_the_argument_onnx_needs_its_packages(tmp_path, monkeypatch):
    for name in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    net = sbn.SyncBatchNorm(in_channels=3)
    net.initialize()
    sbn.export(net, tmp_path / "m")
    with pytest.raises(sbn.ExportError, match=r"pip install 'gluon_syncbn\[onnx\]'"):
        sbn.export(net, tmp_path / "m", onnx=tmp_path / "o", input_shape=(1, 3))
    assert sorted(os.listdir(tmp_path)) == ["m-0000.params", "m-symbol.json"]
