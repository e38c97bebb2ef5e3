"""sbn.export: its files in stock MXNet and ONNX Runtime, and what it leaves unchanged."""

import logging
import os
import random

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import onnxruntime
import pytest
import stock
from deploy_nets import (
    Net,
    assert_outputs,
    conv_net,
    forward,
    load,
    operators,
    ready,
    residual,
    sequential,
)
from gluon_syncbn.__main__ import main
from gluon_syncbn.deploy.check import TOLERANCE
from gluon_syncbn.graph.symbols import Graph, make_stock
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnets import needs_onnx
from runs import MODES, contexts
from tolerances import EXPORTED, ONNX, assert_same_bits


@needs_onnx
@pytest.mark.parametrize("fold", [False, True])
def test_stock_mxnet_and_onnx_runtime_agree_with_the_net(tmp_path, fold):
    net, norms = residual(), 6
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


@needs_onnx
def test_a_gamma_that_is_taken_for_1_is_written_as_1(tmp_path):
    net, other = conv_net(scale=False), sbn.SyncBatchNorm(in_channels=4)
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
    net = conv_net()
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


@pytest.mark.parametrize("onnx", [False, pytest.param(True, marks=needs_onnx)])
def test_files_that_differ_from_the_net_are_not_left(tmp_path, monkeypatch, onnx):
    net = Net(
        lambda net, F, x: net.b(x, net.a(x) * 2),
        a=sbn.SyncBatchNorm(in_channels=3, activation="relu"),
        b=sbn.SyncBatchNorm(in_channels=3),
    )
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
    convolutions = conv_net(activation="relu")
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
    inner.dense.weight.set_data(mx.nd.ones((5, 4 * 30 * 30)) * np.nan)
    assert sbn.export(net, tmp_path / "m").error is None
    assert "its own output is not finite" in caplog.text
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
    with pytest.raises(sbn.ExportError, match="_fwd works in place, where small gammas count"):
        make_stock(Graph(net(mx.sym.var("data"))))


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
    return [
        (parameter.name, array.asnumpy())
        for parameter in net.collect_params().values()
        for array in parameter.list_data()
    ]


@needs_onnx
@pytest.mark.parametrize("mode", MODES)
def test_an_export_does_not_change_training(tmp_path, mode):
    devices, results = contexts(2), []
    for exports in (False, True):
        net = residual()
        mx.random.seed(3)
        net.initialize(mx.init.Xavier(), ctx=devices)
        if MODES[mode] is not None:
            net.hybridize(**MODES[mode])
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
        train_some(net, trainer, devices, 3, seed=1)
        if exports:
            before = bits(net)
            model = tmp_path / "model.onnx"
            for fold in (False, True):
                sbn.export(net, tmp_path / "m", fold=fold, onnx=model, input_shape=(1, 3, 8, 8))
            for (name, value), (_, expected) in zip(bits(net), before):
                assert_same_bits(value, expected, name)
        train_some(net, trainer, devices, 3, seed=2)
        results.append(bits(net))
    for (name, expected), (_, value) in zip(*results):
        assert_same_bits(value, expected, name)


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


def test_values_that_float16_does_not_hold(tmp_path):
    net = conv_net(epsilon=1e-12)
    ready(net, (2, 3, 4, 6))
    net[1].running_var.set_data(mx.nd.zeros(4))
    result = sbn.export(net, tmp_path / "m", fold=True, dtype="float16")
    assert "would not be finite in float16" in list(result.left.values())[0]
    net[0].weight.set_data(mx.nd.ones(net[0].weight.shape) * 1e6)
    with pytest.raises(sbn.ExportError, match=r"weight has values up to 1e\+06, which float16"):
        sbn.export(net, tmp_path / "m", dtype="float16")


@needs_onnx
@pytest.mark.parametrize("cast, fold", [("net", False), ("export", True)])
def test_float16(tmp_path, fold, cast):
    """MXNet computes no convolution in float16 on the CPU; ONNX Runtime does."""
    net = residual()
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
    assert_outputs([output], expected, TOLERANCE["float16"])
    _, dtypes, _ = load(tmp_path / "m")._cached_graph[1].infer_type(data="float16")
    assert dtypes == [np.float16]


@needs_onnx
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_variables_with_the_names_of_operators(seed, fold, tmp_path):
    """Variables are unique among themselves, and operators may have any names."""
    rng = random.Random(seed)
    pool = [f"n{number}" for number in range(16)]
    variables = rng.sample(pool, 16)
    data = x = mx.sym.var(variables.pop())
    for _ in range(2):
        weight = mx.sym.var(variables.pop(), shape=(12,))
        weight = mx.sym.Reshape(weight, shape=(3, 4), name=rng.choice([weight.name, *pool]))
        weight = mx.sym.transpose(weight, axes=(1, 0), name=rng.choice(pool))
        bias = mx.sym.var(variables.pop(), shape=(4,))
        x = mx.sym.FullyConnected(x, weight, bias, num_hidden=4, name=rng.choice(pool))
        gamma = mx.sym.var(variables.pop(), shape=(4,))
        fix_gamma = rng.random() < 0.3
        if not fix_gamma and rng.random() < 0.5:
            gamma = mx.sym.square(gamma, name=rng.choice([gamma.name, *pool]))
        others = [mx.sym.var(variables.pop(), shape=(4,)) for _ in range(3)]
        settings = {"fix_gamma": fix_gamma, "name": rng.choice(pool)}
        x = mx.sym.BatchNorm(x, gamma, *others, **settings)
        x = mx.sym.slice_axis(x, axis=1, begin=0, end=3, name=rng.choice(pool))
    net = gluon.SymbolBlock(x, data)
    net.initialize(mx.init.One())
    inputs = [np.random.default_rng(seed).standard_normal((2, 3)).astype("float32")]
    forward(net, *inputs)
    for parameter in net.collect_params().values():
        parameter.set_data(mx.nd.random.uniform(0.5, 1.5, parameter.shape))
    expected = forward(net, *inputs)
    for synced in (False, True):
        if synced:
            sbn.convert_sync_batchnorm(net, return_report=True)
        settings = {"fold": fold, "onnx": tmp_path / "m.onnx", "input_shape": (2, 3)}
        sbn.export(net, tmp_path / "m", **settings)
        loaded = load(tmp_path / "m", [data.name])
        assert_outputs(forward(loaded, *inputs), expected, EXPORTED[fold])
