"""What people get wrong: one message of at most six lines, which names the layer where there is
one, what came and what to write."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from devices import KIND, context
from mxnet import autograd
from mxnet.gluon import nn
from mxnets import needs_onnx
from runs import contexts

SHAPE = (2, 3, 4, 4)


def layer_of(kind=sbn.SyncBatchNorm, **arguments):
    layer = kind(prefix="bn_", in_channels=3, **arguments)
    layer.initialize(ctx=context(0))
    return layer


def data(*shape, dtype="float32"):
    return mx.nd.ones(shape or SHAPE, ctx=context(0), dtype=dtype)


def train(*inputs, layer=None, hybridized=False):
    layer = layer or layer_of()
    if hybridized:
        layer.hybridize()
    with autograd.record():
        layer(*inputs).asnumpy()


def alone(**group):
    """One of two devices."""
    layer = sbn.SyncBatchNorm(prefix="bn_", in_channels=3, group=sbn.SyncGroup(**group))
    layer.initialize(ctx=contexts(2))
    train(data(), layer=layer)


def export(net, **arguments):
    net.initialize()
    net(mx.nd.ones(SHAPE))
    sbn.export(net, "/nowhere/net", input_shape=SHAPE, **arguments)


def negative_variance(tmp_path):
    net = nn.HybridSequential()
    net.add(layer_of())
    net[0].collect_params().reset_ctx(mx.cpu())
    net[0].running_var.set_data(mx.nd.array([-1, 1, 1]))
    sbn.export(net, str(tmp_path / "net"), input_shape=SHAPE, onnx=str(tmp_path / "net.onnx"))


class Loud(nn.BatchNorm):
    def forward(self, x):
        return super().forward(x)


MISTAKES = {
    # The layer's arguments.
    "contrib's first argument": (lambda: sbn.SyncBatchNorm(64), "axis is 64", "in_channels=64"),
    "a misspelled argument": (lambda: layer_of(num_device=2), "'num_device'", "'num_devices'"),
    "contrib's argument": (lambda: layer_of(ndev=2), "'ndev'", "'num_devices'"),
    "PyTorch's argument": (lambda: layer_of(eps=1e-3), "'eps'", "'epsilon'"),
    "Keras' argument": (lambda: layer_of(name="bn"), "no argument 'name'"),
    "an axis": (lambda: layer_of(axis=-6), "axis is -6", "from -5 to 4"),
    "a momentum": (lambda: layer_of(momentum=2), "momentum is 2", "from 0 to 1, or None"),
    "an epsilon": (lambda: layer_of(epsilon=-1), "epsilon is -1", "0 or more"),
    "an activation": (lambda: layer_of(activation="tanh"), "'tanh'", "'relu' or 'leaky_relu'"),
    "a number of devices": (lambda: layer_of(num_devices=0), "num_devices is 0", "or None"),
    "in place with relu": (
        lambda: layer_of(activation="relu", inplace=True),
        "activation='relu'",
        "leave inplace out",
    ),
    # Groups.
    "a store as a layer's group": (
        lambda: layer_of(group=mx.kv.create("local")),
        "SyncGroup(store=gluon_syncbn.distributed.KVStoreReducer(kv))",
    ),
    "a store as the default group": (
        lambda: sbn.set_default_group(mx.kv.create("local")),
        "SyncGroup(store=gluon_syncbn.distributed.KVStoreReducer(kv))",
    ),
    "devices as the default group": (
        lambda: sbn.set_default_group(contexts(2)),
        f"SyncGroup([{KIND}(0), {KIND}(1)])",
    ),
    "a number as a group": (lambda: layer_of(group=2), "group is 2", "SyncGroup, or None"),
    "a number of devices for a group": (lambda: sbn.SyncGroup(2), "devices=2", "list of contexts"),
    "a device twice": (lambda: sbn.SyncGroup([context(0)] * 2), "name each device", "once"),
    "a size of groups": (lambda: sbn.SyncGroup(group_size=0), "group_size=0", "or None"),
    "a timeout": (lambda: sbn.SyncGroup(timeout=-1), "timeout", "-1"),
    "a store that is none": (lambda: sbn.SyncGroup(store="dist_sync"), "dist_sync", "KVStore"),
    "participants by number": (lambda: sbn.participants(2).__enter__(), "[2]", "contexts"),
    # Data.
    "channels": (lambda: train(data(2, 4, 3, 3)), "'bn'", "(2, 4, 3, 3)", "made for 3"),
    "channels, hybridized": (
        lambda: train(data(2, 4, 3, 3), hybridized=True),
        "'bn'",
        "(2, 4, 3, 3)",
        "made for 3",
    ),
    "one dimension": (lambda: train(data(3)), "'bn'", "(3,)", "2 to 5 dimensions"),
    "whole numbers": (lambda: train(data(dtype="int32")), "'bn'", "int32", "Cast the data"),
    "float64": (lambda: train(data(dtype="float64")), "'bn'", "float64", "cast('float64')"),
    "a NumPy array": (lambda: train(np.ones(SHAPE, "f")), "bn was called", "mx.nd.array"),
    "data elsewhere": (lambda: train(data().as_in_context(context(2))), "bn", f"{KIND}(2)"),
    "a residual's shape": (
        lambda: train(data(), data(2, 3, 4, 5), layer=layer_of(sbn.SyncBatchNormReLU)),
        "'bn'",
        "(2, 3, 4, 5)",
        "of the shape of the data",
    ),
    "a residual's dtype": (
        lambda: train(data(), data(dtype="float16"), layer=layer_of(sbn.SyncBatchNormReLU)),
        "'bn'",
        "float16",
        "cast('float32')",
    ),
    "a device that is left out": (
        lambda: alone(timeout=0.3),
        "'bn', forward call 0",
        f"Came: {KIND}(0). Missing: {KIND}(1).",
        "gluon_syncbn.participants",
    ),
    # Nets.
    "a list of nets": (lambda: sbn.convert_sync_batchnorm([nn.Dense(2)]), "got list", "each net"),
    "a class": (lambda: sbn.convert_sync_batchnorm(nn.Dense), "got type", "Dense()"),
    "no net": (lambda: sbn.convert_sync_batchnorm(None), "NoneType", "the net itself"),
    "instances to replace": (
        lambda: sbn.convert_sync_batchnorm(nn.Dense(2), also=[Loud()]),
        "list of subclasses",
    ),
    # Exports.
    "a net without values": (
        lambda: sbn.export(layer_of().__class__(), "/nowhere/net"),
        "no values yet",
        "net.initialize()",
    ),
    "no folder": (lambda: export(nn.Dense(2)), "/nowhere"),
    "a net that is no net": (lambda: sbn.export("net", "x"), "got str", "net itself"),
    "an epoch": (lambda: export(nn.Dense(2), epoch=-1), "epoch", "-1"),
    "a shape": (lambda: sbn.export(nn.Dense(2), "x", input_shape="224"), "input_shape", "224"),
}


@pytest.fixture(autouse=True)
def leave_no_error():
    yield
    while True:
        try:
            return mx.nd.waitall()
        except mx.MXNetError:
            pass


def check(error, *words):
    text = str(error.value)
    # Behind what MXNet puts before an error of ours.
    text = text[text.rfind("MXNetError: ") + 1 :]
    assert len(text.splitlines()) <= 6, text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake(mistake, monkeypatch):
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", "4096")
    action, *words = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError, OSError, mx.MXNetError)) as error:
        action()
    check(error, *words)


@needs_onnx
def test_a_negative_variance(tmp_path):
    with pytest.raises(sbn.ExportError) as error:
        negative_variance(tmp_path)
    check(error, "bn_running_var has a value below zero", "not finite")


def test_a_subclass_with_code_of_its_own(caplog):
    net = nn.HybridSequential(prefix="net_")
    net.add(Loud())
    sbn.convert_sync_batchnorm(net)
    assert len(caplog.records) == 1 and "also=[Loud]" in caplog.text
    assert len(caplog.records[0].getMessage().splitlines()) <= 6
