"""Nets to convert, and what they hold."""

import json

import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn.graph.blocks import BATCH_NORMS
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from runs import STOCK_RELU, shards
from tolerances import assert_same_bits

KINDS = {
    "nn.BatchNorm": nn.BatchNorm,
    "nn.BatchNormReLU": STOCK_RELU,
    "contrib": lambda **settings: ContribSyncBatchNorm(num_devices=3, **settings),
}
ROLES = ("gamma", "beta", "running_mean", "running_var")
cpu_only = pytest.mark.cpu_only("MXNet has nn.BatchNormReLU on the CPU alone")


def layers_of(net):
    found = []
    net.apply(lambda b: found.append(b) if isinstance(b, BATCH_NORMS) else None)
    return found


def random_statistics(net):
    """Random values show in the output if a layer is missing or swapped."""
    for layer in layers_of(net):
        channels = layer.gamma.shape[0]
        for name, low, high in zip(ROLES, (0.5, -1, -1, 0.5), (2, 1, 1, 2)):
            getattr(layer, name).set_data(mx.nd.random.uniform(low, high, shape=channels))


def small_net(norm=nn.BatchNorm, prefix="net_"):
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, in_channels=3), norm(), nn.Activation("relu"))
        net.add(nn.Conv2D(5, 3, in_channels=4), norm(prefix="last_"))
    return net


def images(seed=0, count=4):
    return np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype("float32")


def forward(net, x, training=False):
    with autograd.record(train_mode=training):
        return net(mx.nd.array(x)).asnumpy()


def train(net, trainer, x, sizes, devices):
    with autograd.record():
        losses = [(net(shard) ** 2).sum() for shard in shards(x, sizes, devices)]
    autograd.backward(losses)
    mx.nd.waitall()  # The first step of a Trainer reads running statistics.
    trainer.step(len(x))
    mx.nd.waitall()


def trainer_of(net):
    return gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore="device"
    )


def statistics(net):
    """{name: the bits of each running statistic}, which are the same on all devices."""
    result = {}
    for name, parameter in net.collect_params(".*running").items():
        arrays = [array.asnumpy() for array in parameter.list_data()]
        for array in arrays[1:]:
            assert_same_bits(array, arrays[0], name)
        result[name] = arrays[0]
    assert result
    return result


def description(net):
    """Everything that a conversion and its reversal must preserve."""
    return [
        (
            *(name, id(layer), type(layer), layer.name, layer.prefix, list(layer._kwargs.items())),
            *(sorted(vars(layer)), getattr(layer, "fuse_relu", False)),
            [(role, id(p), type(p), p.name, p.grad_req) for role, p in layer._reg_params.items()],
        )
        for parent in [net, *net._children.values()]
        for name, layer in parent._children.items()
        if isinstance(layer, BATCH_NORMS)
    ]


def exported(net, path):
    """The SymbolBlock of an exported net."""
    net.initialize()
    net.hybridize()
    net(mx.nd.array(images()))
    net.export(str(path / "net"))
    files = f"{path}/net-symbol.json", ["data"], f"{path}/net-0000.params"
    return gluon.SymbolBlock.imports(*files)


def operators(block):
    nodes = json.loads(block._cached_graph[1].tojson())["nodes"]
    return [node["op"] for node in nodes if node["op"] != "null"]


def synced(net):
    """The synchronized layers of a net or a graph."""
    layers = [node.layer for node in getattr(net, "_nodes", ())] or layers_of(net)
    return [layer for layer in layers if hasattr(layer, "_layer")]


def ids_of(net):
    return {layer._layer.id for layer in synced(net)}
