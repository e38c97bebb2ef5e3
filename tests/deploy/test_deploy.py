"""sbn.export: its files in stock MXNet and ONNX Runtime, and what it leaves unchanged."""

import contextlib
import copy
import fcntl
import itertools
import json
import logging
import os
import resource
import sys
from pathlib import Path

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import onnx
import onnxruntime
import pytest
import stock
from example_modules import load_example
from gluon_syncbn.__main__ import main
from gluon_syncbn.deploy import files, onnx_model
from gluon_syncbn.graph.symbols import Graph, make_stock
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from mxnets import needs_onnx, with_batch_norm_relu
from runs import MODES, STOCK_RELU, contexts
from tolerances import EXPORTED, ONNX, assert_same_bits, relative_error

LIMITS = {"running_mean": (-0.5, 0.5), "beta": (-0.5, 0.5), "running_var": (0.5, 2)}
LIMITS["gamma"] = (0.5, 1.5)


def randomize(net, seed=0):
    """Random values show in the output if a layer is missing or swapped."""
    rng = np.random.default_rng(seed)
    for name, parameter in net.collect_params().items():
        for role, limits in LIMITS.items():
            if name.endswith(role):
                parameter.set_data(mx.nd.array(rng.uniform(*limits, parameter.shape)))


def ready(net, *shapes, seed=0, ctx=None):
    """The net with values, inputs of these shapes, and its outputs."""
    net.initialize(mx.init.Xavier(), ctx=ctx)
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    forward(net, *inputs)
    randomize(net)
    return inputs, forward(net, *inputs)


def forward(net, *inputs):
    outputs = net(*(mx.nd.array(x, dtype=x.dtype) for x in inputs))
    return [y.asnumpy() for y in stock.listed(outputs)]


def load(prefix, names=("data",), epoch=0):
    with pytest.warns(UserWarning):  # MXNet's own, for inputs whose dtype a file does not say
        return gluon.SymbolBlock.imports(
            f"{prefix}-symbol.json", list(names), f"{prefix}-{epoch:04d}.params"
        )


def operators(prefix):
    nodes = json.loads(Path(f"{prefix}-symbol.json").read_text())["nodes"]
    return [node["op"] for node in nodes if node["op"] != "null"]


def assert_outputs(outputs, expected, tolerance):
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected):
        error = relative_error(output, wanted)
        assert error <= tolerance, f"{error:.3g} > {tolerance:g}"


class Residual(gluon.HybridBlock):
    """Two blocks with shortcuts; the second is strided and has a convolution in its shortcut."""

    def __init__(self, norm=sbn.SyncBatchNorm):
        super().__init__(prefix="residual_")
        with self.name_scope():
            self.stem = nn.HybridSequential()
            self.stem.add(nn.Conv2D(8, 3, padding=1, in_channels=3, use_bias=False), norm())
            self.first = self._body(8, 8, 1, norm)
            self.second = self._body(8, 16, 2, norm)
            self.shortcut = nn.HybridSequential()
            self.shortcut.add(nn.Conv2D(16, 1, 2, in_channels=8, use_bias=False), norm())
            self.head = nn.Dense(7, in_units=16)

    @staticmethod
    def _body(inputs, outputs, stride, norm):
        body = nn.HybridSequential()
        body.add(nn.Conv2D(outputs, 3, stride, 1, in_channels=inputs), norm())
        body.add(nn.Activation("relu"))
        body.add(nn.Conv2D(outputs, 3, 1, 1, in_channels=outputs, use_bias=False), norm())
        return body

    def hybrid_forward(self, F, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.first(x) + x)
        x = F.relu(self.second(x) + self.shortcut(x))
        return self.head(F.mean(x, axis=(2, 3)))


class Net(gluon.HybridBlock):
    """Layers by name, and what `call(net, F, *inputs)` makes of them."""

    def __init__(self, call, **layers):
        super().__init__(prefix="net_")
        self._call = call
        for name, layer in layers.items():
            setattr(self, name, layer)

    def hybrid_forward(self, F, *inputs):
        return self._call(self, F, *inputs)


def sequential(*layers):
    net = nn.HybridSequential(prefix="net_")
    net.add(*layers)
    return net


def encoder_decoder():
    return sbn.convert_sync_batchnorm(
        load_example("segmentation").model.DigitsNet(5, channels=(4, 6, 8))
    )


NETS = {"residual": (Residual, 6), "encoder-decoder": (encoder_decoder, 11)}


@needs_onnx
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_stock_mxnet_and_onnx_runtime_agree_with_the_net(tmp_path, name, fold):
    make, norms = NETS[name]
    net = make()
    [x], expected = ready(net, (2, 3, 16, 16))
    model = tmp_path / "model.onnx"
    result = sbn.export(net, tmp_path / "m", fold=fold, onnx=model, input_shape=x.shape, epoch=3)
    assert result.symbol == str(tmp_path / "m-symbol.json")
    assert result.params == str(tmp_path / "m-0003.params")
    assert sorted(os.listdir(tmp_path)) == ["m-0003.params", "m-symbol.json", "model.onnx"]
    used = operators(tmp_path / "m")
    assert used.count("BatchNorm") == (0 if fold else norms)
    assert len(result.folded) == (norms if fold else 0) and not result.left
    assert not {"Custom", "SwapAxis"} & set(used)

    outputs = stock.outputs_of(str(tmp_path / "m"), {"data": x}, str(tmp_path), 3, str(model))
    assert set(outputs) == {"block", "module", "fused", "onnx"}
    assert_outputs(outputs["block"], expected, EXPORTED[fold])
    assert_outputs(outputs["module"], expected, EXPORTED[fold])
    assert_outputs(outputs["fused"], expected, EXPORTED[True])
    assert_outputs(outputs["onnx"], expected, ONNX)
    assert 0 < result.onnx_error <= ONNX


KINDS = {
    "SyncBatchNorm": sbn.SyncBatchNorm,
    "SyncBatchNormReLU": sbn.SyncBatchNormReLU,
    "VirtualBatchNorm": lambda **settings: sbn.VirtualBatchNorm(3, **settings),
    "relu": lambda **settings: sbn.SyncBatchNorm(activation="relu", **settings),
    "leaky_relu": lambda **settings: sbn.SyncBatchNorm(
        activation="leaky_relu", slope=0.2, **settings
    ),
    "nn.BatchNorm": nn.BatchNorm,
    "nn.BatchNormReLU": STOCK_RELU,
    "contrib": lambda **settings: ContribSyncBatchNorm(num_devices=1, **settings),
}
SETTINGS = [{}, {"momentum": 0.5, "epsilon": 1e-2, "center": False}]
SETTINGS += [{"scale": False, "use_global_stats": True}]


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("kind", with_batch_norm_relu(KINDS))
def test_every_kind_becomes_batch_norm(tmp_path, kind, fold):
    for settings in SETTINGS:
        layer = KINDS[kind](**settings)
        net = sequential(nn.Conv2D(4, 3, in_channels=3), layer, nn.Conv2D(2, 1, in_channels=4))
        [x], expected = ready(net, (2, 3, 6, 7))
        sbn.export(net, tmp_path / "m", fold=fold)
        relu = ["Activation"] if "ReLU" in kind or kind == "relu" else []
        relu = ["LeakyReLU"] if kind == "leaky_relu" else relu
        norm = [] if fold else ["BatchNorm"]
        assert operators(tmp_path / "m") == ["Convolution", *norm, *relu, "Convolution"]
        assert_outputs(forward(load(tmp_path / "m"), x), expected, EXPORTED[fold])
        graph = Graph(mx.sym.load(str(tmp_path / "m-symbol.json")))
        for node in [node for node in graph.nodes() if node.op == "BatchNorm"]:
            assert float(node.attrs["eps"]) == settings.get("epsilon", 1e-5)
            assert float(node.attrs["momentum"]) == settings.get("momentum", 0.9)
            assert node.attrs["fix_gamma"] == str(not settings.get("scale", True))
            assert node.attrs["use_global_stats"] == str(settings.get("use_global_stats", False))
            assert int(node.attrs["axis"]) == 1


@needs_onnx
def test_a_gamma_that_is_taken_for_1_is_written_as_1(tmp_path):
    net = sequential(nn.Conv2D(4, 3, in_channels=3), sbn.SyncBatchNorm(scale=False, in_channels=4))
    other = sbn.SyncBatchNorm(in_channels=4)
    other._reg_params["gamma"] = vars(other)["gamma"] = net[1].gamma  # which does use it
    net.add(other)
    [x], expected = ready(net, (2, 3, 6, 7))
    gamma = net[1].gamma.data().asnumpy()
    sbn.export(net, tmp_path / "m", onnx=tmp_path / "model.onnx", input_shape=x.shape)
    arrays = mx.nd.load(str(tmp_path / "m-0000.params"))
    written = [(a.asnumpy() == 1).all() for name, a in arrays.items() if "gamma" in name]
    assert sorted(map(bool, written)) == [False, True]
    block = load(tmp_path / "m")
    for _ in range(2):  # MXNet overwrites a gamma that is fixed.
        assert_outputs(forward(block, x), expected, EXPORTED[False])
    assert_same_bits(net[1].gamma.data().asnumpy(), gamma)


@needs_onnx
def test_graphs_traced_for_gpus(tmp_path):
    """They have no layout copies, which the CPU needs."""
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Conv2D(4, 3), sbn.SyncBatchNorm())
    [x], expected = ready(net, (2, 3, 6, 7))
    net.hybridize()
    forward(net, x)
    net.export(str(tmp_path / "net"))
    graph = tmp_path / "net-symbol.json"
    graph.write_text(graph.read_text().replace('"gpu_only": "False"', '"gpu_only": "True"'))
    sbn.export(load(tmp_path / "net"), tmp_path / "m", input_shape=x.shape)
    command = f"export {tmp_path}/net -o {tmp_path}/m --onnx {tmp_path}/m.onnx --input-shape"
    assert main([*command.split(), ",".join(map(str, x.shape))]) == 0
    assert_outputs(forward(load(tmp_path / "m"), x), expected, EXPORTED[False])


@needs_onnx
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("of_graph", [False, True])
def test_residuals_and_fused_graphs(tmp_path, fuse, of_graph):
    """The layer has a residual and a leaky relu of its own, or fused into it."""

    def call(net, F, x):
        x = net.first(x)
        y = F.LeakyReLU(net.layer(x) + x, slope=0.2) if fuse else net.layer(x, x)
        return net.last(y)

    own = {} if fuse else {"activation": "leaky_relu", "slope": 0.2}
    layers = {"first": nn.Conv2D(4, 3), "last": nn.Conv2D(2, 1)}
    net = Net(call, layer=sbn.SyncBatchNorm(**own), **layers)
    [x], expected = ready(net, (2, 3, 6, 7))
    sbn.convert_sync_batchnorm(net, fuse=fuse)
    net.hybridize()
    assert_outputs(forward(net, x), expected, EXPORTED[False])
    assert "leaky_relu" in net._cached_graph[1].tojson()
    if of_graph:
        net.export(str(tmp_path / "net"))
        net = load(tmp_path / "net")
    model = tmp_path / "model.onnx"
    sbn.export(net, tmp_path / "m", fold=True, onnx=model, input_shape=x.shape)
    assert operators(tmp_path / "m") == [
        *("Convolution", "BatchNorm", "elemwise_add", "LeakyReLU", "Convolution")
    ]
    assert_outputs(forward(load(tmp_path / "m"), x), expected, EXPORTED[False])


def branch_of_a_residual():
    """A branch that only a residual reaches, with an operator behind its relu."""
    return Net(
        lambda net, F, x: net.b(x, net.a(x) * 2),
        a=sbn.SyncBatchNorm(in_channels=3, activation="relu"),
        b=sbn.SyncBatchNorm(in_channels=3),
    )


@pytest.mark.parametrize("way", ["export", "graph", "convert", "revert", "command"])
def test_a_branch_that_only_a_residual_reaches(tmp_path, way):
    net = branch_of_a_residual()
    [x], expected = ready(net, (2, 3, 6, 7))
    net.hybridize()
    forward(net, x)
    net.export(str(tmp_path / "net"))
    block = load(tmp_path / "net")
    if way in ("export", "graph"):
        sbn.export(net if way == "export" else block, tmp_path / "m")
        block = load(tmp_path / "m")
    elif way == "command":
        assert main(["convert", f"{tmp_path}/net-symbol.json", "-o", f"{tmp_path}/m.json"]) == 0
        block = gluon.SymbolBlock.imports(
            f"{tmp_path}/m.json", ["data"], f"{tmp_path}/net-0000.params"
        )
    else:
        sbn.convert_sync_batchnorm(block)
        if way == "revert":
            sbn.revert_sync_batchnorm(block)
    assert_outputs(forward(block, x), expected, EXPORTED[False])


@pytest.mark.parametrize("onnx", [False, pytest.param(True, marks=needs_onnx)])
def test_files_that_differ_from_the_net_are_not_left(tmp_path, monkeypatch, onnx):
    net = branch_of_a_residual()
    ready(net, (2, 3, 6, 7))
    sbn.export(net, tmp_path / "m")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr("gluon_syncbn.graph.symbols.unfused", lambda node, y, residual: y)
    shape = {"input_shape": (2, 3, 6, 7), "onnx": tmp_path / "m.onnx"} if onnx else {}
    with pytest.raises(sbn.ExportError, match=r"utput 0 .*differs from .*net.* by \d"):
        sbn.export(net, tmp_path / "m", **shape)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nets_are_compared_without_changing_them(tmp_path, caplog):
    """Also where no shape is given, on the values that are written, and for halves."""
    convolutions = nn.HybridSequential()
    convolutions.add(nn.Conv2D(4, 3, in_channels=3), sbn.SyncBatchNorm(activation="relu"))
    inner = Net(lambda net, F, x: net.dense(x), dense=nn.Dense(5, in_units=4 * 30 * 30))
    net = sequential(convolutions, inner)
    ready(net, (1, 3, 32, 32), ctx=contexts(2))
    convolutions.hybridize(static_alloc=True)
    net(mx.nd.zeros((1, 3, 32, 32)))
    blocks = net, convolutions, convolutions[0], inner, inner.dense
    before = [vars(block).copy() for block in blocks]
    for dtype in (None, "float64", "float16"):
        assert sbn.export(net, tmp_path / "m", dtype=dtype).error < 1e-6
    assert [vars(block) for block in blocks] == before
    net.cast("float16")
    assert sbn.export(net, tmp_path / "m", fold=True).error < 1e-2
    assert not caplog.records
    net.add(nn.HybridLambda(lambda F, x: F.Dropout(x, mode="always")))
    assert sbn.export(net, tmp_path / "m").error is None
    assert "it draws random numbers" in caplog.text


def test_small_gammas_in_place(tmp_path):
    """They are written as they count, also where another layer takes them as they are."""
    arguments = {"activation": "leaky_relu", "epsilon": 0.1, "in_channels": 3}
    net = sequential(sbn.SyncBatchNorm(inplace=True, **arguments), sbn.SyncBatchNorm(**arguments))
    net[1]._reg_params["gamma"] = vars(net[1])["gamma"] = net[0].gamma
    [x], _ = ready(net, (2, 3, 6, 7))
    net[0].gamma.set_data(mx.nd.array([-0.01, 0.02, 1]))
    expected = forward(net, x)
    sbn.export(net, tmp_path / "m")
    assert_outputs(forward(load(tmp_path / "m"), x), expected, EXPORTED[False])
    graph = Graph(net(mx.sym.var("data")))
    with pytest.raises(sbn.ExportError, match="_fwd works in place, where small gammas count"):
        make_stock(graph)


@pytest.mark.parametrize(
    "shape, axis",
    [((4, 3), 1), ((4, 3), -1), ((4, 5, 3), 2), ((2, 3, 4, 5), 1), ((2, 4, 5, 3), -1)]
    + [((2, 3, 4, 5, 2), 1), ((2, 4, 3, 5), 2)],
)
def test_axes_and_dimensions(tmp_path, shape, axis):
    net = sequential(sbn.SyncBatchNorm(axis=axis))
    [x], expected = ready(net, shape)
    sbn.export(net, tmp_path / "m", input_shape=shape)
    assert_outputs(forward(load(tmp_path / "m"), x), expected, EXPORTED[False])


def train_some(net, trainer, devices, steps, seed):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        x = rng.standard_normal((4, 3, 8, 8)).astype("float32")
        with autograd.record():
            shards = gluon.utils.split_and_load(mx.nd.array(x), devices)
            losses = [(net(shard) ** 2).sum() for shard in shards]
        autograd.backward(losses)
        trainer.step(4)
        mx.nd.waitall()


def bits(net):
    return {
        (name, number): array.asnumpy()
        for name, parameter in net.collect_params().items()
        for number, array in enumerate(parameter.list_data())
    }


@needs_onnx
@pytest.mark.parametrize("mode", MODES)
def test_an_export_does_not_change_training(tmp_path, mode):
    devices, results = contexts(2), []
    for exports in (False, True):
        net = Residual()
        mx.random.seed(3)
        net.initialize(mx.init.Xavier(), ctx=devices)
        if MODES[mode] is not None:
            net.hybridize(**MODES[mode])
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
        train_some(net, trainer, devices, 3, seed=1)
        if exports:
            before, graphs = bits(net), graphs_of(net)
            model = tmp_path / "model.onnx"
            for fold in (False, True):
                sbn.export(net, tmp_path / "m", fold=fold, onnx=model, input_shape=(1, 3, 8, 8))
            for key, value in bits(net).items():
                assert_same_bits(value, before[key], key)
            assert all(a is b for a, b in zip(graphs, graphs_of(net)))
        train_some(net, trainer, devices, 3, seed=2)
        results.append(bits(net))
    for key, value in results[0].items():
        # With static_shape MXNet keeps no order of who writes running statistics, nn.BatchNorm's
        # either: they differ between two runs without any export.
        if mode != "static_shape" or "running" not in key[0]:
            assert_same_bits(results[1][key], value, key)


def graphs_of(net):
    """What a trace and a compilation leave in each block."""
    found = []
    net.apply(lambda b: found.extend([b._cached_graph, b._cached_op]))
    return found


def test_hooks_are_not_called_and_stay(tmp_path):
    net, called = sequential(nn.Dense(3, in_units=2), sbn.SyncBatchNorm()), []
    ready(net, (4, 2))
    net[1].register_forward_hook(lambda *_: called.append("after"))
    net[1].register_forward_pre_hook(lambda *_: called.append("before"))
    sbn.export(net, tmp_path / "m")
    assert called == []
    net(mx.nd.ones((4, 2)))
    assert called == ["before", "after"]


def test_statistics_that_differ_are_averaged_with_a_warning(tmp_path, caplog):
    net = sequential(nn.BatchNorm(in_channels=1000))
    net.initialize(ctx=contexts(3))
    mean = net[0].running_mean

    def written():
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="gluon_syncbn"):
            sbn.export(net, tmp_path / "m")
        return mx.nd.load(str(tmp_path / "m-0000.params"))[f"aux:{mean.name}"].asnumpy()

    for value, array in enumerate(mean.list_data()):
        array[:] = value
    assert (written() == 1).all()
    assert "1 parameters" in caplog.text and "running_mean" in caplog.text
    # The sum of three equal values divided by three has other bits.
    mean.set_data(mx.nd.random.uniform(shape=1000))
    assert_same_bits(written(), mean.list_data()[0].asnumpy())
    assert caplog.text == ""


@pytest.mark.parametrize(
    "norm, converted",
    [(sbn.SyncBatchNorm, False), (sbn.SyncBatchNorm, True), (nn.BatchNorm, True)],
)
def test_symbol_blocks(tmp_path, norm, converted):
    """A graph from a file, which contains our operator or gets our layers."""
    net = sequential(nn.Conv2D(4, 3, in_channels=3), norm(), nn.Activation("relu"), norm())
    [x], expected = ready(net, (2, 3, 6, 6))
    net.hybridize()
    forward(net, x)
    net.export(str(tmp_path / "own"))
    block = load(tmp_path / "own")
    if converted:
        sbn.convert_sync_batchnorm(block)
        graph = block._cached_graph
    sbn.export(block, tmp_path / "m", fold=True)
    assert operators(tmp_path / "m") == ["Convolution", "Activation", "BatchNorm"]
    assert_outputs(forward(load(tmp_path / "m"), x), expected, EXPORTED[True])
    if converted:
        assert block._cached_graph is graph


def two_in_two_out(net, F, x, y):
    """The outputs come in another order than they are computed."""
    early = net.norm(x + y)
    return net.dense(early), early


@needs_onnx
@pytest.mark.parametrize("known", ["input_shape", "hybridized"])
def test_several_inputs_and_outputs(tmp_path, known):
    net = Net(two_in_two_out, norm=sbn.SyncBatchNorm(), dense=nn.Dense(3, in_units=4))
    if known == "hybridized":
        net.hybridize()
    inputs, expected = ready(net, (2, 4), (2, 4))
    shapes = [x.shape for x in inputs]
    sbn.export(net, tmp_path / "m", input_shape=shapes if known == "input_shape" else None)
    block = load(tmp_path / "m", ["data0", "data1"])
    assert_outputs(forward(block, *inputs), expected, EXPORTED[False])
    sbn.export(net, tmp_path / "m", onnx=tmp_path / "m.onnx", input_shape=shapes)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    outputs = session.run(None, dict(zip(["data0", "data1"], inputs)))
    assert_outputs(outputs, expected, ONNX)


def optional(net, F, x, y=None, z=None):
    x = net.norm(x)
    x = x if y is None else x + y[0] * y[1]
    return x if z is None else x * z


@pytest.mark.parametrize("given", ["x", "xz", "xyy"])
def test_inputs_that_are_left_out(given, tmp_path):
    """They are None in the call that net.hybridize() compiled; y is a list of two."""
    net = Net(optional, norm=sbn.SyncBatchNorm(in_channels=4))
    net.initialize()
    net.hybridize()
    x, y, z = (mx.nd.array(np.random.default_rng(i).normal(size=(2, 4))) for i in range(3))
    arguments = {"x": (x, None), "xz": (x, None, z), "xyy": (x, [y, y], None)}[given]
    expected = net(*arguments).asnumpy()
    sbn.export(net, tmp_path / "m")
    names = ["data0", "data1", "data2"][: len(given)] if len(given) > 1 else ["data"]
    found = load(tmp_path / "m", names)(*(dict(x=x, y=y, z=z)[name] for name in given))
    assert relative_error(found.asnumpy(), expected) <= EXPORTED[False]


# Layers in front of a BatchNorm, the shape of their input, and the layer's axis.
FOLDED = {
    "convolution": (lambda: nn.Conv2D(4, 3, in_channels=6), (2, 6, 7, 8), 1),
    "no bias, negative axis": (
        lambda: nn.Conv2D(4, 3, in_channels=6, use_bias=False),
        (2, 6, 7, 8),
        -3,
    ),
    "groups": (lambda: nn.Conv2D(4, 3, groups=2, in_channels=6), (2, 6, 7, 8), 1),
    "depthwise": (lambda: nn.Conv2D(6, 3, groups=6, in_channels=6), (2, 6, 7, 8), 1),
    "1d": (lambda: nn.Conv1D(4, 3, in_channels=6), (2, 6, 8), 1),
    "3d": (lambda: nn.Conv3D(4, 3, in_channels=6), (2, 6, 5, 6, 7), 1),
    "transposed": (
        lambda: nn.Conv2DTranspose(4, 3, in_channels=6, use_bias=False),
        (2, 6, 7, 8),
        1,
    ),
    "transposed, groups": (
        lambda: nn.Conv2DTranspose(4, 3, 2, 1, 1, groups=2, in_channels=6),
        (2, 6, 7, 8),
        1,
    ),
    "dense": (lambda: nn.Dense(4, in_units=6), (3, 6), 1),
    "dense without bias": (lambda: nn.Dense(4, in_units=6, use_bias=False), (3, 6), -1),
    "dense that flattens": (lambda: nn.Dense(4, in_units=12), (3, 6, 2), 1),
    "dense for each": (lambda: nn.Dense(4, in_units=6, flatten=False), (3, 5, 6), -1),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folding(tmp_path, name):
    make, shape, axis = FOLDED[name]
    net = sequential(make(), sbn.SyncBatchNorm(axis=axis))
    [x], expected = ready(net, shape)
    result = sbn.export(net, tmp_path / "m", fold=True)
    assert len(result.folded) == 1 and not result.left
    assert len(operators(tmp_path / "m")) == 1
    assert_outputs(forward(load(tmp_path / "m"), x), expected, EXPORTED[True])
    names = mx.nd.load(str(tmp_path / "m-0000.params"))
    assert len(names) == 2 and not any("running" in name for name in names)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_folding_with_channels_last(tmp_path, transposed, groups):
    """MXNet computes NHWC only on GPUs, so the weights are compared with those of NCHW."""
    weights = []
    for layout in ("NCHW", "NHWC"):
        kind = nn.Conv2DTranspose if transposed else nn.Conv2D
        channels = layout.index("C")
        norm = sbn.SyncBatchNorm(axis=channels, in_channels=6)
        net = sequential(kind(6, 3, groups=groups, in_channels=4, layout=layout), norm)
        net.initialize()
        shape = (4, 6 // groups, 3, 3) if transposed else (6, 4 // groups, 3, 3)
        weight = np.random.default_rng(1).standard_normal(shape)
        net[0].weight.set_data(
            mx.nd.array(weight if layout == "NCHW" else weight.transpose(0, 2, 3, 1))
        )
        randomize(net)
        result = sbn.export(net, tmp_path / "m", fold=True)
        assert len(result.folded) == 1
        arrays = mx.nd.load(str(tmp_path / "m-0000.params"))
        [weight] = [a.asnumpy() for name, a in arrays.items() if "weight" in name]
        [bias] = [a.asnumpy() for name, a in arrays.items() if "bias" in name]
        weights.append((weight if layout == "NCHW" else weight.transpose(0, 3, 1, 2), bias))
    assert_same_bits(weights[0][0], weights[1][0])
    assert_same_bits(weights[0][1], weights[1][1])


def computed_gamma(net, F, x):
    parameters = net.norm._reg_params.values()
    gamma, *others = [p.var() if F is mx.sym else p.data() for p in parameters]
    return F.BatchNorm(net.conv(x), F.exp(gamma), *others, fix_gamma=False, name="fwd")


LEFT = {
    "shared weights": (
        lambda net, F, x: net.other(net.conv(F.relu(net.norm(net.conv(x))))),
        "conv_weight is shared",
    ),
    "two users": (lambda net, F, x: net.norm(y := net.conv(x)) + y, "conv_fwd has other users"),
    "output of the net": (
        lambda net, F, x: (net.norm(y := net.conv(x)), y),
        "conv_fwd has other users",
    ),
    "relu": (lambda net, F, x: net.norm(F.relu(net.conv(x))), "it follows relu"),
    "computed gamma": (computed_gamma, "net_exp0 is computed"),
    "another axis": (
        lambda net, F, x: net.rows(net.conv(x)),
        "it normalizes axis 2, conv_fwd has its channels on 1",
    ),
    # Each folds one layer, into a convolution of its own.
    "shared norm": (lambda net, F, x: net.norm(net.second(F.relu(net.norm(net.conv(x))))), None),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_cannot_be_folded_is_left_alone(tmp_path, kind):
    call, why = LEFT[kind]
    layers = {"norm": sbn.SyncBatchNorm(in_channels=3), "other": sbn.SyncBatchNorm(in_channels=3)}
    layers["rows"] = sbn.SyncBatchNorm(axis=2, in_channels=6)
    for name in ("conv", "second"):
        layers[name] = nn.Conv2D(3, 3, padding=1, in_channels=3, prefix=f"{name}_")
    net = Net(call, **layers)
    [x], expected = ready(net, (2, 3, 6, 6))
    result = sbn.export(net, tmp_path / "m", fold=True)
    assert len(result.folded) == (0 if why else 2)
    assert set(result.left.values()) == ({why} if why else set())
    assert operators(tmp_path / "m").count("BatchNorm") == len(result.left)
    assert_outputs(forward(load(tmp_path / "m"), x), expected, EXPORTED[True])


@pytest.mark.parametrize("fold", [False, True])
def test_a_graph_that_is_called_twice_shares_its_parameters(tmp_path, fold):
    net = sequential(nn.Conv2D(4, 3, in_channels=3), sbn.SyncBatchNorm())
    ready(net, (2, 3, 6, 6))
    sbn.export(net, tmp_path / "backbone")
    backbone = load(tmp_path / "backbone")
    twice = Net(lambda net, F, a, b: net.backbone(a) - net.backbone(b), backbone=backbone)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((2, 3, 6, 6)).astype("float32") for _ in range(2)]
    expected = forward(twice, *inputs)
    result = sbn.export(twice, tmp_path / "m", fold=fold, input_shape=[(2, 3, 6, 6)] * 2)
    assert all("is shared" in why for why in result.left.values()) and len(result.left) == 2 * fold
    loaded = load(tmp_path / "m", ["data0", "data1"])
    assert_outputs(forward(loaded, *inputs), expected, EXPORTED[False])


def averaged(net, F, x):
    infers = net.copies and not autograd.is_training()
    return (net.copies[0] if infers else net.net)(x)


def test_of_parameters_of_one_name_those_are_written_that_infer(tmp_path):
    """The copy is not among the children, so that a Trainer does not see it."""
    net = Net(averaged, net=sequential(nn.Conv2D(4, 3, in_channels=3), sbn.SyncBatchNorm()))
    net.copies = []
    [x], _ = ready(net, (2, 3, 6, 6))
    net.copies = [copy.deepcopy(net.net)]
    weights = [net.copies[0][0].weight, net.net[0].weight]
    weights[0].set_data(weights[0].data() * 0.5)
    before = [weight.var() for weight in weights]
    sbn.export(net, tmp_path / "m")
    assert_outputs(forward(load(tmp_path / "m"), x), forward(net, x), EXPORTED[False])
    assert all(weight.var() is var for weight, var in zip(weights, before))


@needs_onnx
@pytest.mark.parametrize("fold", [False, True])
def test_blocks_that_are_called_several_times_go_to_onnx(tmp_path, fold):
    """Their nodes have one name, and ONNX identifies values by name."""
    conv = nn.Conv2D(3, 3, padding=1, in_channels=3)
    cell = sequential(conv, sbn.SyncBatchNorm(), nn.Activation("relu"))
    net = sequential(cell, cell, nn.MaxPool2D(), cell)
    ready(net, (1, 3, 8, 8))
    result = sbn.export(
        net, tmp_path / "m", fold=fold, onnx=tmp_path / "m.onnx", input_shape=(1, 3, 8, 8)
    )
    assert result.onnx_error < ONNX and len(result.left) == 3 * fold


@mx.operator.register("of_others")
class OfOthers(mx.operator.CustomOpProp):
    def __init__(self, **attributes):  # Those of the scope in which a loop is traced.
        super().__init__(need_top_grad=True)

    def create_operator(self, *_):
        class Identity(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                self.assign(out_data[0], req[0], in_data[0])

        return Identity()


@pytest.mark.parametrize("arguments, gamma", [({}, 3), ({"scale": False}, 1)])
def test_batch_normalization_in_a_loop(tmp_path, arguments, gamma):
    net = loop(gamma_initializer=mx.init.Constant(3), **arguments)
    for dtype in (None, "float16"):
        sbn.export(net, tmp_path / "m", dtype=dtype)
        values = mx.nd.load(str(tmp_path / "m-0000.params"))
        assert values["arg:norm_gamma"].dtype == np.float32
        assert (values["arg:norm_gamma"].asnumpy() == gamma).all()
        assert values["arg:dense_weight"].dtype == np.dtype(dtype or "float32")


def test_names_of_all_alphabets(tmp_path):
    net = nn.HybridSequential(prefix="größe_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4))
    [x], expected = ready(net, (2, 3, 6, 6))
    sbn.export(net, tmp_path / "m")
    loaded = load(tmp_path / "m")
    assert_outputs(forward(loaded, x), expected, EXPORTED[False])
    assert_outputs(forward(sbn.convert_sync_batchnorm(loaded), x), expected, EXPORTED[False])


def masked(net, F, x, mask):
    return F.broadcast_mul(net.conv(x), mask) if autograd.is_training() else net.conv(x)


@needs_onnx
def test_an_input_that_only_training_reads_is_not_in_the_file(tmp_path):
    net, shapes = Net(masked, conv=nn.Conv2D(4, 3, in_channels=3)), [(2, 3, 6, 6), (1,)]
    (x, _), expected = ready(net, *shapes)
    sbn.export(net, tmp_path / "m", input_shape=shapes, onnx=tmp_path / "m.onnx")
    assert_outputs(forward(load(tmp_path / "m", ["data0"]), x), expected, EXPORTED[False])


@needs_onnx
def test_bfloat16_to_another_dtype(tmp_path):
    net = sequential(nn.Conv2D(4, 3, in_channels=3), sbn.SyncBatchNorm())
    ready(net, (2, 3, 6, 6))
    net.cast(np.dtype([("bfloat16", np.uint16)]))
    settings = {"onnx": tmp_path / "m.onnx", "input_shape": (2, 3, 6, 6)}
    result = sbn.export(net, tmp_path / "m", fold=True, dtype="float32", **settings)
    assert len(result.folded) == 1 and result.onnx_error < ONNX
    with pytest.raises(sbn.ExportError, match="give dtype='float32'"):
        sbn.export(net, tmp_path / "m", **settings)


@needs_onnx
def test_random_outputs_are_not_compared(tmp_path):
    """Training goes on with the same random numbers."""
    mx.random.seed(7)
    expected = mx.nd.random.uniform(shape=(2,)).asnumpy()
    mx.random.seed(7)
    with pytest.raises(sbn.ExportError, match="draws random numbers"):
        noisy = nn.HybridLambda(lambda F, x: F.broadcast_add(x, F.random.uniform(shape=(1,))))
        sbn.export(noisy, tmp_path / "m", onnx=tmp_path / "m.onnx", input_shape=(2, 3))
    assert_same_bits(mx.nd.random.uniform(shape=(2,)).asnumpy(), expected)


def test_values_that_float16_does_not_hold(tmp_path):
    net = sequential(nn.Conv2D(3, 1, in_channels=3), sbn.SyncBatchNorm(epsilon=1e-12))
    ready(net, (2, 3, 4, 6))
    net[1].running_var.set_data(mx.nd.zeros(3))
    result = sbn.export(net, tmp_path / "m", fold=True, dtype="float16")
    assert "would not be finite in float16" in list(result.left.values())[0]
    net[0].weight.set_data(mx.nd.ones(net[0].weight.shape) * 1e6)
    with pytest.raises(sbn.ExportError, match=r"weight has values up to 1e\+06, which float16"):
        sbn.export(net, tmp_path / "m", dtype="float16")


@needs_onnx
@pytest.mark.parametrize("cast", ["net", "export"])
@pytest.mark.parametrize("fold", [False, True])
def test_float16(tmp_path, fold, cast):
    """MXNet computes no convolution in float16 on the CPU; ONNX Runtime does."""
    net = Residual()
    [x], expected = ready(net, (2, 3, 16, 16))
    if cast == "net":
        net.cast("float16")
    settings = {"onnx": tmp_path / "m.onnx", "input_shape": x.shape, "fold": fold}
    settings["dtype"] = "float16" if cast == "export" else None
    result = sbn.export(net, tmp_path / "m", **settings)
    for name, array in mx.nd.load(result.params).items():
        of_norm = name.split("_")[-1] in ("gamma", "beta", "mean", "var")
        assert array.dtype == (np.float32 if of_norm else np.float16), name
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    [output] = session.run(None, {"data": x.astype("float16")})
    assert output.dtype == np.float16
    assert_outputs([output], expected, onnx_model.TOLERANCE["float16"])
    _, dtypes, _ = load(tmp_path / "m")._cached_graph[1].infer_type(data="float16")
    assert dtypes == [np.float16]


def test_float64(tmp_path):
    net = Residual()
    net.cast("float64")
    net.initialize()
    x = np.random.default_rng(0).standard_normal((2, 3, 16, 16))
    expected = forward(net, x)
    sbn.export(net, tmp_path / "m", fold=True)
    assert_outputs(forward(load(tmp_path / "m"), x), expected, 1e-12)
    sbn.export(net, tmp_path / "n", dtype="float32")
    assert_outputs(forward(load(tmp_path / "n"), x.astype("float32")), expected, 1e-5)


@needs_onnx
def test_onnx_is_of_one_operator_set_and_has_no_parameters_for_inputs(tmp_path):
    model = tmp_path / "model.onnx"
    net = Residual()
    ready(net, (2, 3, 16, 16))
    sbn.export(net, tmp_path / "m", onnx=model, input_shape=(2, 3, 16, 16))
    made = onnx.load(str(model))
    assert [(entry.domain, entry.version) for entry in made.opset_import] == [("", 15)]
    [value] = made.graph.input
    assert value.name == "data"
    assert [d.dim_value for d in value.type.tensor_type.shape.dim] == [2, 3, 16, 16]
    assert made.ir_version == 8
    assert onnx.checker.DEFAULT_CONTEXT.opset_imports[""] == onnx.defs.onnx_opset_version()
    onnx.checker.check_model(made, full_check=True)


@needs_onnx
def test_operators_and_settings_that_onnx_lacks_are_named_before_anything_is_written(tmp_path):
    unknown = nn.HybridLambda(lambda F, x: F.smooth_l1(F.sinh(F.smooth_l1(x))))
    net = sequential(nn.Conv2D(3, 3, in_channels=3), sbn.SyncBatchNorm(), unknown)
    ready(net, (2, 3, 6, 6))
    with pytest.raises(sbn.ExportError) as failure:
        sbn.export(net, tmp_path / "m", onnx=tmp_path / "o", input_shape=(2, 3, 6, 6))
    text = str(failure.value)
    assert "sinh (" in text and "smooth_l1 (" in text and "Convolution" not in text
    net = sequential(sbn.SyncBatchNorm(axis=-1))
    ready(net, (2, 3, 6, 6))
    with pytest.raises(sbn.ExportError, match="axis != 1"):
        sbn.export(net, tmp_path / "m", onnx=tmp_path / "o", input_shape=(2, 3, 6, 6))
    assert os.listdir(tmp_path) == []


@needs_onnx
@pytest.mark.parametrize(
    "size, dtype",
    [((), "float32"), (1, "float32"), ((3, 4), "float16"), (4, "float16"), (4, "float32")]
    + [((5, 2), "float32"), ((7, 11), "float32")],
)
def test_adaptive_pooling_goes_to_onnx(tmp_path, size, dtype):
    """With bins of one size, bins that share values, and more bins than values."""
    pool = nn.HybridLambda(lambda F, x: F.contrib.AdaptiveAvgPooling2D(x, output_size=size))
    net = sequential(nn.Conv2D(3, 1, in_channels=3), sbn.SyncBatchNorm(), pool)
    ready(net, (2, 3, 6, 8))
    before = copy.deepcopy(onnx_model.load_onnx()[2].registry_)
    model = tmp_path / "model.onnx"
    sbn.export(net, tmp_path / "m", onnx=model, input_shape=(2, 3, 6, 8), dtype=dtype)
    nodes = [node.op_type for node in onnx.load(str(model)).graph.node]
    even = size in ((), 1, (3, 4))
    assert (nodes.count("AveragePool"), nodes.count("MatMul")) == ((1, 0) if even else (0, 2))
    # MXNet's own exporter does not change.
    assert onnx_model.load_onnx()[2].registry_ == before


def two_heads():
    """The first output is -1 for each input, like the class of a detector that finds nothing."""
    return nn.HybridLambda(lambda F, x: (F.zeros_like(x) - 1, F.relu(x)))


@needs_onnx
@pytest.mark.parametrize("make, number", [(Residual, 0), (two_heads, 1)])
def test_a_wrong_converter_is_noticed(tmp_path, monkeypatch, make, number):
    net = make()
    ready(net, (2, 3, 16, 16))
    _, _, converter = onnx_model.load_onnx()
    monkeypatch.setitem(converter.registry_[12], "relu", converter.registry_[12]["sigmoid"])
    with pytest.raises(sbn.ExportError, match=rf"output {number} differs from the net's by \d"):
        sbn.export(net, tmp_path / "m", onnx=tmp_path / "o", input_shape=(2, 3, 16, 16))
    assert os.listdir(tmp_path) == []


@needs_onnx
def test_suppression_by_class_is_refused_where_no_box_would_show_it(tmp_path):
    detector = nn.HybridLambda(lambda F, x: F.contrib.box_nms(x, valid_thresh=1e6, id_index=0))
    net = sequential(sbn.SyncBatchNorm(), detector)
    [x], [y] = ready(net, (2, 3, 6))
    assert (y == -1).all()
    with pytest.raises(sbn.ExportError, match="_contrib_box_nms"):
        sbn.export(net, tmp_path / "m", onnx=tmp_path / "o", input_shape=x.shape)


@needs_onnx
def test_a_net_that_amplifies_rounding_is_refused(tmp_path):
    """The net's own output changes as much when the input is rounded differently."""
    chaotic = nn.HybridLambda(lambda F, x: F.sin(1e5 * x))
    net = sequential(nn.Conv2D(4, 3, in_channels=64), chaotic)
    ready(net, (1, 64, 16, 16))
    with pytest.raises(sbn.ExportError, match=r"by \S+ of .* the net amplifies rounding, as"):
        sbn.export(net, tmp_path / "m", onnx=tmp_path / "m.onnx", input_shape=(1, 64, 16, 16))
    assert os.listdir(tmp_path) == []


def test_an_mxnet_whose_converters_are_too_old(tmp_path, monkeypatch):
    monkeypatch.delattr(mx, "onnx", raising=False)
    net = sequential(nn.Conv2D(4, 3, in_channels=3), sbn.SyncBatchNorm())
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


def of_one_name():
    one, two = (sbn.SyncBatchNorm(in_channels=3, prefix="same_") for _ in range(2))
    one.initialize()
    two.initialize()
    return Net(lambda net, F, x: net.two(net.one(x)), one=one, two=two)


def loop(operator=None, **arguments):
    """Batch normalization in the graph of a loop."""

    def call(net, F, x):
        def body(step, state):
            y = net.norm(net.dense(step))
            return (F.Custom(y, op_type=operator) if operator else y), state

        return F.contrib.foreach(body, x, [F.zeros((1,))])[0]

    norm = sbn.SyncBatchNorm(in_channels=5, prefix="norm_", **arguments)
    net = Net(call, dense=nn.Dense(5, in_units=6, prefix="dense_"), norm=norm)
    net.initialize()
    net(mx.nd.ones((3, 4, 6)))
    return net


@pytest.mark.parametrize(
    "make, error, text",
    [
        (
            lambda: nn.HybridLambda(lambda F, x: F.Custom(x, op_type="of_others")),
            sbn.ExportError,
            r"custom operators \(of_others\)",
        ),
        (
            lambda: loop(operator="of_others"),
            sbn.ExportError,
            r"custom operators \(of_others\)",
        ),
        (
            lambda: loop(momentum=None),
            sbn.ExportError,
            "has momentum=None and is called in net_.*foreach",
        ),
        (
            lambda: nn.HybridLambda(lambda F, x: x.reshape((x.shape[0], -1))),
            sbn.ExportError,
            "HybridLambda 'hybridlambda",
        ),
        (of_one_name, sbn.ExportError, "Two parameters have the name same_"),
        (lambda: nn.Dense(3), ValueError, "2 parameters have no values yet, dense"),
        (lambda: mx.sym.var("data"), ValueError, "export takes a Gluon Block and got Symbol"),
    ],
)
def test_nets_that_cannot_be_exported(tmp_path, make, error, text):
    net = make()
    with pytest.raises(error, match=text):
        sbn.export(net, tmp_path / "m")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"path": b"m"}, "path is b'm': give the name of a file"),
        ({"path": "folder/"}, "path is 'folder/': add the name that the files"),
        ({"onnx": True, "input_shape": (1, 3, 6, 6)}, "onnx is True: give the name of a file"),
        ({"epoch": -1}, "epoch is -1"),
        ({"onnx": "o"}, "onnx= needs input_shape"),
        ({"input_shape": (0, 3)}, "input_shape is (0, 3)"),
        ({"input_shape": [(1, 3), (1, 3)]}, "cannot be traced"),
        ({"input_shape": (1, 4, 4, 4)}, "does not take inputs of input_shape (1, 4, 4, 4)"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        pytest.param(
            *(
                {"onnx": "m-symbol.json", "input_shape": (1, 3, 6, 6)},
                "another file of this export",
            ),
            marks=needs_onnx,
        ),
    ],
)
def test_arguments(tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    net = sequential(nn.Conv2D(4, 3, in_channels=3), sbn.SyncBatchNorm())
    ready(net, (2, 3, 6, 6))
    with pytest.raises((ValueError, sbn.ExportError)) as failure:
        sbn.export(net, **{"path": "m", **arguments})
    assert text in str(failure.value), failure.value
    assert os.listdir(tmp_path) == []


def small(path, value):
    """Exports a small net whose weights have this value: 2 kB of symbol, 360 kB of parameters."""
    net = sequential(nn.Dense(300, in_units=300), sbn.SyncBatchNorm())
    net.initialize(mx.init.Constant(value))
    net(mx.nd.ones((2, 300)))
    sbn.export(net, path)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    small(tmp_path / "m", 1)
    before = contents(tmp_path)

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(sbn.FileError, match="cannot be written .No space left on device."):
        small(tmp_path / "m", 2)
    assert contents(tmp_path) == before


def test_no_folder_device_or_pipe_is_replaced(tmp_path):
    with pytest.raises(sbn.FileError, match="No such file or directory"):
        small(tmp_path / "no" / "m", 1)
    for name, make, why in (
        ("m-0000.params", os.mkdir, "a folder has"),
        ("m-0000.params", os.mkfifo, "this is a device"),
        ("m-symbol.json", lambda path: os.symlink("/dev/null", path), "this is a device"),
    ):
        make(tmp_path / name)
        kind = os.lstat(tmp_path / name).st_mode
        with pytest.raises(sbn.FileError, match=f"{name} cannot be written .{why}"):
            small(tmp_path / "m", 1)
        assert os.listdir(tmp_path) == [name] and os.lstat(tmp_path / name).st_mode == kind
        os.rmdir(tmp_path / name) if make is os.mkdir else os.unlink(tmp_path / name)


def test_what_a_link_points_to_is_written(tmp_path):
    (tmp_path / "far").mkdir()
    for name in ("m-symbol.json", "m-0000.params"):
        (tmp_path / name).symlink_to(tmp_path / "far" / name)
    (tmp_path / "far" / "m-0000.params").write_text("old")
    small(tmp_path / "m", 1)
    assert all(path.is_symlink() for path in tmp_path.glob("m-*"))
    assert sorted(os.listdir(tmp_path / "far")) == ["m-0000.params", "m-symbol.json"]
    load(tmp_path / "far" / "m")


def killed_before(call, paths, monkeypatch):
    """Writes the paths in a child that is killed before the n-th file is renamed."""
    calls = itertools.count(1)

    def replace(*args, rename=os.replace):
        if next(calls) == call:
            os._exit(9)
        rename(*args)

    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "replace", replace)
        files.write_all({path: files.bytes_writer(b"new") for path in paths})
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def test_an_export_that_is_killed_leaves_no_mixed_files(tmp_path, monkeypatch):
    """Its first file, the symbol, is missing where the others are not all old, or all new."""
    paths = [str(tmp_path / name) for name in ("m-symbol.json", "m-0000.params", "m.onnx")]
    found = []
    for call in itertools.count(1):
        for path in paths:
            Path(path).write_bytes(b"old")
        was_killed = killed_before(call, paths, monkeypatch)
        values = [Path(path).read_bytes() if os.path.exists(path) else None for path in paths]
        assert values[0] is None or len(set(values)) == 1, (call, values)
        found.append(values[0])
        assert was_killed == any(name.endswith("tmp") for name in os.listdir(tmp_path))
        files.write_all({path: files.bytes_writer(b"next") for path in paths})
        assert len(os.listdir(tmp_path)) == 3  # It has removed what the killed one left.
        if not was_killed:
            break
    assert found[0] == b"old" and found[-1] == b"new" and None in found


def test_temporary_files_of_another_process_stay(tmp_path):
    """It still writes them."""
    with open(tmp_path / "m-symbol.json.0123456789ab.tmp", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        small(tmp_path / "m", 1)
        assert os.path.exists(file.name)
    small(tmp_path / "m", 1)
    assert not os.path.exists(file.name)


@pytest.mark.parametrize("name", ["m-symbol.json", "m-0000.params"])
def test_an_error_between_two_renames_leaves_the_old_files(name, tmp_path, monkeypatch):
    small(tmp_path / "m", 1)
    before = contents(tmp_path)

    def replace(source, target, rename=os.replace):
        if str(target).endswith(name) and not str(source).endswith(".old.tmp"):
            raise PermissionError(1, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(sbn.FileError, match=f"{name} cannot be written .Operation not"):
        small(tmp_path / "m", 2)
    assert contents(tmp_path) == before


def test_files_that_a_check_refuses_are_not_written(tmp_path):
    path = str(tmp_path / "m")
    seen = []

    def check(temporary):
        seen.append(Path(temporary[path]).read_bytes())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        files.write_all({path: files.bytes_writer(b"new")}, check)
    assert seen == [b"new"] and os.listdir(tmp_path) == []


def test_a_file_that_is_replaced_keeps_its_rights(tmp_path):
    small(tmp_path / "m", 1)
    (tmp_path / "m-0000.params").chmod(0o640)
    (tmp_path / "m-symbol.json").chmod(0o444)
    small(tmp_path / "m", 2)
    assert (tmp_path / "m-0000.params").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "m-symbol.json").stat().st_mode & 0o777 == 0o444


@contextlib.contextmanager
def limited(size):
    """Within it, no file may grow above `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [100, 20_000, 355_000])
def test_without_room_for_a_file_the_old_files_stay(tmp_path, size):
    small(tmp_path / "m", 1)
    before = contents(tmp_path)
    with limited(size), pytest.raises(sbn.FileError, match="cannot be written"):
        small(tmp_path / "m", 2)
    assert contents(tmp_path) == before


def test_files_have_the_usual_rights(tmp_path):
    small(tmp_path / "m", 1)
    (tmp_path / "plain").write_text("")
    rights = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(rights) == 1
