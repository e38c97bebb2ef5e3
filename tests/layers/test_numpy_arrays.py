"""MXNet's NumPy arrays, ``mx.npx.set_np()``, give the same bits as NDArrays."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn.__main__ import main
from gluon_syncbn.deploy.files import read_parameters
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnets import needs_onnx
from runs import MODES, STOCK_RELU, contexts, numpy_arrays, prepare, run
from tolerances import EXPORTED, ONNX, assert_same_bits, relative_error

GENERATOR = np.random.default_rng(3)
X = GENERATOR.normal(1, 2, (4, 3, 10, 10)).astype("float32")


LAYERS = {
    "plain": lambda axis: sbn.SyncBatchNorm(axis=axis),
    "cumulative": lambda axis: sbn.SyncBatchNorm(axis=axis, momentum=None),
    "frozen": lambda axis: sbn.SyncBatchNorm(axis=axis, use_global_stats=True),
    "no scale": lambda axis: sbn.SyncBatchNorm(axis=axis, scale=False, center=False),
    "virtual": lambda axis: sbn.VirtualBatchNorm(2, axis=axis),
    "leaky": lambda axis: sbn.SyncBatchNorm(axis=axis, activation="leaky_relu", inplace=True),
    "relu": lambda axis: sbn.convert_sync_batchnorm(STOCK_RELU(axis=axis)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("mode", MODES)
def test_same_bits(mode, dtype, kind):
    generator = np.random.default_rng(1)
    x, dy = (generator.normal(2, 3, (4, 6, 5)).astype(dtype) for _ in range(2))
    sizes = [4] if kind == "virtual" else [3, 1]
    devices = contexts(len(sizes))

    def results():
        layer = prepare(LAYERS[kind](axis=2), devices, dtype, MODES[mode])
        return run(layer, x, dy, sizes, devices, steps=2)

    expected = results()
    with numpy_arrays():
        found = results()
    for name, array in expected._asdict().items():
        assert_same_bits(getattr(found, name), array, name)


class Residual(gluon.HybridBlock):
    def __init__(self, channels, norm, **arguments):
        super().__init__(**arguments)
        with self.name_scope():
            self.body = nn.HybridSequential()
            for _ in range(2):
                self.body.add(nn.Conv2D(channels, 3, padding=1), norm())
            self.shortcut = nn.Conv2D(channels, 1)

    def hybrid_forward(self, F, x):
        return F.npx.relu(self.body(x) + self.shortcut(x))


def make_net(norm=sbn.SyncBatchNorm, count=2):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(Residual(6, norm), nn.MaxPool2D(), Residual(4, norm), nn.GlobalAvgPool2D())
        net.add(nn.Dense(3))
    mx.random.seed(2)
    net.initialize(mx.init.Xavier(), ctx=contexts(count))
    return net


def step(net, count=2, x=X, trainer=None):
    devices = contexts(count)
    with autograd.record():
        losses = [(net(part) ** 2).mean() for part in split(x, devices)]
    autograd.backward(losses)
    mx.nd.waitall()
    if trainer:
        trainer.step(count)
    return np.mean([loss.asnumpy() for loss in losses])


def split(x, devices):
    return gluon.utils.split_and_load(mx.np.array(x), devices)


def outputs(net, x=X):
    with autograd.pause():
        return net(mx.np.array(x)).asnumpy()


def test_other_arrays_are_refused_before_devices_wait():
    with numpy_arrays():
        layer = sbn.SyncBatchNorm(in_channels=3)
        layer.initialize(ctx=contexts(2))
        with autograd.record(), pytest.raises(TypeError, match=r"mx\.nd array.*as_np_ndarray\(\)"):
            layer(mx.nd.array(X))
        assert sbn.native.library.library.gluon_syncbn_stuck_seconds() == 0
        mx.nd.waitall()


def load(prefix):
    with pytest.warns(UserWarning):  # MXNet's own, for inputs whose dtype a file does not say
        return gluon.SymbolBlock.imports(
            f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params", ctx=contexts(2)
        )


@pytest.mark.parametrize("norm", [sbn.SyncBatchNorm, nn.BatchNorm])
def test_conversion(norm, tmp_path):
    """Of blocks, and of a graph from a file."""
    with numpy_arrays():
        net = make_net(norm, 1)
        net.hybridize()
        loss = step(net, 1)
        expected = outputs(net)
        net.export(str(tmp_path / "net"))
        net.save_parameters(str(tmp_path / "net.params"))
        net.collect_params().reset_ctx(contexts(2))
        for converted in (net, load(tmp_path / "net")):
            sbn.convert_sync_batchnorm(converted)
            assert relative_error(outputs(converted), expected) < 1e-6
            assert step(converted) == pytest.approx(loss, rel=1e-6)
            sbn.revert_sync_batchnorm(converted)
            assert step(converted) != pytest.approx(loss, rel=1e-6)
        other = make_net()
        other.load_parameters(str(tmp_path / "net.params"), ctx=contexts(2))
        assert relative_error(outputs(other), expected) < 1e-6


@needs_onnx
@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("fold", [False, True])
def test_export(fold, hybridized, tmp_path):
    with numpy_arrays():
        net = make_net()
        if hybridized:
            net.hybridize()
        step(net)
        expected = outputs(net)
        onnx = tmp_path / "m.onnx"
        made = sbn.export(net, tmp_path / "m", fold=fold, onnx=onnx, input_shape=X.shape)
        assert made.onnx_error <= ONNX
        assert relative_error(outputs(load(tmp_path / "m")), expected) <= EXPORTED[fold]
        # The net can still be used.
        assert_same_bits(outputs(net), expected)
        step(net)


@pytest.mark.parametrize("convert", [sbn.convert_sync_batchnorm, lambda graph: graph])
def test_export_of_a_graph(convert, tmp_path):
    """MXNet's SymbolBlock does not support NumPy symbols, and changes itself in the attempt."""
    with numpy_arrays():
        net = make_net()
        net.hybridize()
        step(net)
        net.export(str(tmp_path / "own"))
        graph = convert(load(tmp_path / "own"))
        nested = nn.HybridSequential()
        nested.add(graph, nn.Dense(2))
        nested[1].initialize(ctx=contexts(2))
        for net in (graph, nested, graph):
            expected, before = outputs(net), graph._cached_graph[1].tojson()
            sbn.export(net, tmp_path / "m")
            assert relative_error(outputs(load(tmp_path / "m")), expected) <= EXPORTED[False]
            assert graph._cached_graph[1].tojson() == before
            assert_same_bits(outputs(net), expected)
            step(net)


@mx.util.use_np
class OfUseNp(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(4)
            self.norm = sbn.SyncBatchNorm()

    def hybrid_forward(self, F, x):
        return F.npx.relu(self.norm(self.body(x)))


@pytest.mark.parametrize("hybridized", [False, True])
def test_export_of_a_net_of_use_np(hybridized, tmp_path):
    """NumPy arrays are enabled only within its methods."""
    net = OfUseNp()
    net.initialize()
    if hybridized:
        net.hybridize()
    x = mx.np.array(GENERATOR.normal(size=(4, 6)), dtype="float32")
    with autograd.record():
        net(x).backward()
    expected = net(x).asnumpy()
    sbn.export(net, tmp_path / "m")
    assert not mx.util.is_np_array() and not mx.util.is_np_shape()
    found = load(tmp_path / "m")(x).asnumpy()
    assert relative_error(found, expected) <= EXPORTED[False]


def test_commands(tmp_path):
    """MXNet has two formats of parameters: one loads only with NumPy arrays enabled, the other only
    without. Commands write the format that they read."""
    with numpy_arrays():
        net = make_net()
        net.hybridize()
        step(net)
        expected = outputs(net)
        net.export(str(tmp_path / "own"))
    mx.nd.save(str(tmp_path / "other.params"), {"w": mx.nd.ones(2)})
    assert main(["export", str(tmp_path / "own"), "--fold", "-o", str(tmp_path / "m")]) == 0
    assert not mx.util.is_np_shape()
    with numpy_arrays():
        assert relative_error(outputs(load(tmp_path / "m")), expected) <= EXPORTED[True]
        # Also the other format.
        assert read_parameters(str(tmp_path / "other.params"))["w"].shape == (2,)


def test_participants():
    with numpy_arrays():
        net = make_net()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        step(net, trainer=trainer)
        with sbn.participants(contexts(1), trainer):
            step(net, 1, trainer=trainer)
        for name, parameter in net.collect_params().items():
            first, second = (array.asnumpy() for array in parameter.list_data())
            assert_same_bits(second, first, name)
