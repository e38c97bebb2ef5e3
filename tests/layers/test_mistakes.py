"""What people get wrong: one message of at most six lines, which names the layer where there is
one, what came and what to write."""

import ctypes

import gluon_syncbn as sbn
import mxnet as mx
import pytest
from devices import KIND, context
from mxnet.gluon import nn
from mxnets import needs_onnx
from runs import contexts

SHAPE = (2, 3, 4, 4)


def layer_of(kind=sbn.SyncBatchNorm, **arguments):
    layer = kind(prefix="bn_", in_channels=3, **arguments)
    layer.initialize(ctx=context(0))
    return layer


def negative_variance(tmp_path):
    net = nn.HybridSequential()
    net.add(layer_of())
    net[0].collect_params().reset_ctx(mx.cpu())
    net[0].running_var.set_data(mx.nd.array([-1, 1, 1]))
    sbn.export(net, str(tmp_path / "net"), input_shape=SHAPE, onnx=str(tmp_path / "net.onnx"))


def hooked(devices, **arguments):
    """A net with an op hook that reads values, and the sums that it has read."""
    net = nn.HybridSequential(prefix="net_")
    net.add(layer_of(**arguments))
    net.collect_params().reset_ctx(contexts(devices))
    net.hybridize()
    read = []

    def hook(name, operator, array):
        array = mx.nd.NDArray(ctypes.cast(array, mx.base.NDArrayHandle), writable=False)
        read.append(array.sum().asscalar())

    net.register_op_hook(hook)
    return net, read


def train(net):
    with mx.autograd.record():
        return net(mx.nd.ones(SHAPE, ctx=context(0)))


MISTAKES = {
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
    "a list of numbers for a group": (lambda: sbn.SyncGroup([0, 1]), "list of contexts"),
    "a name for a group": (lambda: sbn.SyncGroup(f"{KIND}(0)"), "list of contexts"),
    "a device twice": (lambda: sbn.SyncGroup([context(0)] * 2), "name each device", "once"),
    "no device": (lambda: sbn.SyncGroup([]), "name each device", "once"),
    "a size of groups": (lambda: sbn.SyncGroup(group_size=0), "group_size=0", "or None"),
    "a timeout": (lambda: sbn.SyncGroup(timeout=-1), "timeout is -1"),
    "no timeout": (lambda: sbn.SyncGroup(timeout=0), "timeout is 0", "above 0"),
    "a timeout that is no number": (lambda: sbn.SyncGroup(timeout=float("nan")), "timeout is nan"),
    "a timeout in the environment": (sbn.SyncGroup, "GLUON_SYNCBN_TIMEOUT is '5 minutes'"),
    "a store that is none": (lambda: sbn.SyncGroup(store="dist_sync"), "dist_sync", "KVStore"),
    "participants by number": (lambda: sbn.participants(2).__enter__(), "[2]", "contexts"),
    # Nets.
    "instances to replace": (
        lambda: sbn.convert_sync_batchnorm(nn.Dense(2), also=[nn.BatchNorm()]),
        "list of subclasses",
    ),
    "an op hook that would wait": (lambda: train(hooked(2)[0]), "its bn ", "op hook", "read"),
}


def check(error, *words):
    text = str(error.value)
    assert len(text.splitlines()) <= 6, text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake(mistake, monkeypatch):
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", "4096")
    if "environment" in mistake:
        monkeypatch.setenv("GLUON_SYNCBN_TIMEOUT", "5 minutes")
    action, *words = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError)) as error:
        action()
    check(error, *words)


@needs_onnx
def test_a_negative_variance(tmp_path):
    with pytest.raises(sbn.ExportError) as error:
        negative_variance(tmp_path)
    check(error, "not finite", "negative variances")
