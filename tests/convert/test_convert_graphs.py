"""The conversion of SymbolBlocks."""

import json

import gluon_syncbn as sbn
import mxnet as mx
import pytest
from gluon_syncbn import convert_sync_batchnorm, revert_sync_batchnorm
from convert_nets import (
    KINDS,
    exported,
    forward,
    images,
    operators,
    small_net,
    statistics,
    train,
    trainer_of,
)
from gluon_syncbn.layers.synced_layer import SyncedLayer
from mxnet import gluon
from mxnet.gluon import nn
from mxnets import with_batch_norm_relu
from runs import MODES, contexts, shards
from tolerances import assert_same_bits


@pytest.mark.parametrize("kind", with_batch_norm_relu(["nn.BatchNorm", "nn.BatchNormReLU"]))
def test_the_graph_of_a_file(kind, tmp_path):
    x = images()
    net = exported(small_net(KINDS[kind]), tmp_path)
    before, graph = forward(net, x), net._cached_graph[1].tojson()
    parameters = list(net.collect_params().items())
    outputs = net._cached_graph[1].list_outputs()
    _, report = convert_sync_batchnorm(net, return_report=True)
    paths = [entry.path for entry in report.replaced]
    assert paths == [":net_batchnorm0_fwd", ":net_last_fwd"] or kind == "nn.BatchNormReLU"
    assert operators(net).count("Custom") == 2 == len(paths)
    assert not {"BatchNorm", "_contrib_BatchNormWithReLU"} & set(operators(net))
    assert list(net.collect_params().items()) == parameters
    assert net._cached_graph[1].list_outputs() == outputs
    assert convert_sync_batchnorm(net, return_report=True)[1].already == tuple(paths)
    revert_sync_batchnorm(net)
    assert type(net) is gluon.SymbolBlock and net._cached_graph[1].tojson() == graph
    assert not any("gluon_syncbn" in type(p).__module__ for _, p in parameters)
    assert_same_bits(forward(net, x), before)


class Twice(gluon.HybridBlock):
    def __init__(self, block):
        super().__init__(prefix="")
        self.block = block

    def hybrid_forward(self, F, x):
        return self.block(x) + self.block(F.sin(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_graph_is_trained_synchronized(inside, mode, tmp_path):
    """Alone, and in a block that calls it twice."""
    devices, x = contexts(2), images(count=6)
    graph = exported(small_net(), tmp_path)
    net = graph
    if inside:
        net = nn.HybridSequential(prefix="")
        net.add(Twice(graph))
    net.collect_params().reset_ctx(devices)
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    for shard in shards(x, (3, 3), devices):
        net(shard)
    convert_sync_batchnorm(net)
    trainer = trainer_of(net)
    for _ in range(3):
        train(net, trainer, x, (1, 5), devices)
    statistics(net)


def test_the_nodes_of_a_layer_are_numbered_where_a_graph_is_compiled(tmp_path):
    """By blocks and by Modules, and not where it is only traced."""
    x = mx.nd.array(images())
    net = Twice(exported(small_net(), tmp_path))
    convert_sync_batchnorm(net)
    traced = net(mx.sym.var("data"))
    bound = traced.simple_bind(mx.cpu(), data=x.shape)._symbol
    for symbol, ids in ((net._get_graph(x)[1], {"0", "1"}), (bound, {"0", "1"}), (traced, {None})):
        nodes = [node["attrs"] for node in json.loads(symbol.tojson())["nodes"] if "attrs" in node]
        ours = [attrs for attrs in nodes if "op_type" in attrs]
        assert len(ours) == 4 and len({attrs["layer"] for attrs in ours}) == 2
        assert {attrs.get("node") for attrs in ours} == ids


def test_settings_of_nodes():
    x, scale = mx.sym.var("data"), {"eps": 1e-4, "fix_gamma": False, "momentum": 0.8}
    contrib = mx.sym.contrib.SyncBatchNorm(x, name="norm", key="a", ndev=3, **scale)
    # MXNet's defaults for a symbol differ from those of a layer.
    stock, old = mx.sym.BatchNorm(x, name="norm"), mx.sym.BatchNorm_v1(x, name="norm")
    usual = 1e-3, 0.9, True, 1
    for y, expected in ((contrib, (1e-4, 0.8, False, 1)), (stock, usual), (old, usual)):
        settings = convert_sync_batchnorm(gluon.SymbolBlock(y, x))._nodes[0].layer._kwargs
        names = ("eps", "momentum", "fix_gamma", "axis")
        assert tuple(settings[name] for name in names) == expected


def test_nodes_that_cannot_be_replaced():
    x, start = mx.sym.var("data"), mx.sym.var("start")
    y = mx.sym.BatchNorm(x, name="three", output_mean_var=True)
    scaled = mx.sym.BatchNorm(y[0], gamma=mx.sym.var("g") * 2, name="scaled", fix_gamma=False)

    def body(step, state):
        return mx.sym.BatchNorm(step, name="inner"), state

    loop, _ = mx.sym.contrib.foreach(body, scaled, [start])
    net = gluon.SymbolBlock(mx.sym.Group([loop + 1, y[1]]), [x, start])
    before = net._cached_graph[1].tojson()
    _, report = convert_sync_batchnorm(net, return_report=True)
    refused = {entry.path or entry.before: entry.why for entry in report.refused}
    assert refused.pop(":three") == "its mean or variance is used as an output."
    why = "gamma, beta or a running statistic is not a parameter of the SymbolBlock."
    assert refused.pop(":scaled") == why
    ((_, why),) = refused.items()
    assert "graph of its own" in why
    assert net._cached_graph[1].tojson() == before


def test_a_quantized_normalization_is_named():
    inputs = {name: mx.sym.var(name) for name in ("data", "min_data", "max_data")}
    symbol = mx.sym.contrib.quantized_batch_norm(**inputs, name="norm")[0]
    _, report = convert_sync_batchnorm(symbol, return_report=True)
    assert [(e.name, "it is quantized" in e.why) for e in report.refused] == [("norm", True)]


def test_a_graph_on_gpus_has_no_layout_copies(tmp_path, monkeypatch):
    """The devices of its parameters count when it is compiled, as for any net."""
    net = exported(small_net(), tmp_path)
    convert_sync_batchnorm(net)
    copied = operators(net)
    monkeypatch.setattr(SyncedLayer, "contexts", lambda layer: [mx.gpu(0)])
    net.hybridize()
    assert operators(net) == [operator for operator in copied if operator != "SwapAxis"]
    monkeypatch.undo()
    net.hybridize()
    assert operators(net) == copied


def test_a_cumulative_average_is_not_reverted(tmp_path):
    net = exported(sbn.SyncBatchNorm(in_channels=3, momentum=None), tmp_path)
    _, report = revert_sync_batchnorm(net, return_report=True)
    assert "momentum=None" in report.refused[0].why and not report.replaced


def test_blocks_around_what_is_converted_and_reverted_follow():
    inner, net = small_net(), nn.HybridSequential()
    net.add(nn.HybridSequential())
    net[0].add(inner)
    net.initialize()
    net.hybridize()
    for change, count in ((convert_sync_batchnorm, 2), (revert_sync_batchnorm, 0)):
        net(mx.nd.array(images()))
        change(inner)
        net(mx.nd.array(images()))
        assert operators(net).count("Custom") == count
