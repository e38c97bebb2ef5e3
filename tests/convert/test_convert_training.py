"""Training, copies and checkpoints of converted nets."""

import copy
import pickle

import gluon_syncbn as sbn
import mxnet as mx
import pytest
from gluon_syncbn import convert_sync_batchnorm, revert_sync_batchnorm
from convert_nets import (
    KINDS,
    exported,
    forward,
    ids_of,
    images,
    random_statistics,
    small_net,
    statistics,
    train,
    trainer_of,
)
from devices import KIND
from mxnet import autograd
from mxnet.gluon import nn
from mxnets import with_batch_norm_relu
from runs import MODES, contexts, hybridize, shards
from tolerances import assert_same_bits


@pytest.mark.parametrize("kind", with_batch_norm_relu(KINDS))
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_made_before_continues(kind, mode):
    """Each step has the bits of a net that was synchronized from the start. The net has run before,
    so it must be compiled again."""
    devices, x = contexts(2), images(count=6)
    results = []
    ours = sbn.SyncBatchNormReLU if kind == "nn.BatchNormReLU" else sbn.SyncBatchNorm
    for norm in (KINDS[kind], ours):
        mx.random.seed(1)
        net = small_net(norm)
        net.initialize(mx.init.Xavier(), ctx=devices)
        hybridize(net, mode)
        for shard in shards(x, (3, 3), devices):
            net(shard)
        trainer = trainer_of(net)
        flags = [(block._active, list(block._flags)) for block in [net, *net._children.values()]]
        convert_sync_batchnorm(net)
        after = [(block._active, list(block._flags)) for block in [net, *net._children.values()]]
        assert after == flags
        for _ in range(4):
            train(net, trainer, x, (1, 5), devices)
        assert bool(net._cached_op) == (MODES[mode] is not None)
        statistics(net)
        results.append([p.data(devices[1]).asnumpy() for p in net.collect_params().values()])
    for found, expected in zip(*results):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("initialized", [False, True])
def test_deferred_initialization(initialized, hybridize):
    """Converted before the shapes, or even the contexts, are known."""
    devices, x = contexts(2), images()
    net = small_net()
    net.hybridize(hybridize)
    if initialized:
        net.initialize(ctx=devices)
    convert_sync_batchnorm(net)
    if not initialized:
        net.initialize(ctx=devices)
    trainer = trainer_of(net)
    train(net, trainer, x, (1, 3), devices)
    assert net[1].gamma.shape == (4,) and net[1]._layer.devices == (f"{KIND}(0)", f"{KIND}(1)")
    statistics(net)


@pytest.mark.parametrize("of_graph", [False, True])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies(clone, of_graph, tmp_path):
    devices, x = contexts(2), images()
    net = exported(small_net(), tmp_path) if of_graph else small_net()
    net.initialize(ctx=devices, force_reinit=True)
    plain = forward(net, x)
    convert_sync_batchnorm(net)
    other = clone(net)
    assert_same_bits(forward(other, x), forward(net, x))
    assert not ids_of(net) & ids_of(other)
    assert b"gluon_syncbn" in pickle.dumps(net)
    assert b"gluon_syncbn" not in pickle.dumps(revert_sync_batchnorm(clone(net)))
    # MXNet puts the arrays of a copy on cpu(0), all of them.
    other.collect_params().reset_ctx(devices)
    for block in (other, net):
        train(block, trainer_of(block), x, (1, 3), devices)
    for value, copied in zip(statistics(net).values(), statistics(other).values()):
        assert_same_bits(copied, value)
    revert_sync_batchnorm(other)
    assert len(ids_of(net)) == 2 and not ids_of(other)
    assert forward(other, x).shape == plain.shape


def test_a_failed_step_is_reported_before_a_reversal():
    layer = nn.BatchNorm(in_channels=3)
    layer.initialize(ctx=contexts(2))
    convert_sync_batchnorm(layer, group=sbn.SyncGroup(timeout=0.2))
    with autograd.record():
        layer(mx.nd.array(images()))
    with pytest.raises(mx.MXNetError, match=rf"Missing: {KIND}\(1\)"):
        revert_sync_batchnorm(layer)
    assert isinstance(layer, sbn.SyncBatchNorm)
    revert_sync_batchnorm(layer)
    assert type(layer) is nn.BatchNorm


FORMS = {
    "nn.BatchNorm": small_net,
    "contrib": lambda: small_net(KINDS["contrib"]),
    "ours": lambda: small_net(sbn.SyncBatchNorm),
    "converted": lambda: convert_sync_batchnorm(small_net()),
    "reverted": lambda: revert_sync_batchnorm(convert_sync_batchnorm(small_net())),
}


def form_of(name):
    net = FORMS[name]()
    net.initialize()
    return net


@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loaded", FORMS)
def test_files_fit_each_way(saved, loaded, tmp_path):
    source, target = form_of(saved), form_of(loaded)
    forward(source, images())
    random_statistics(source)
    source.save_parameters(str(tmp_path / "net.params"))
    target.load_parameters(str(tmp_path / "net.params"))
    collected = form_of(loaded)
    # The default name depends on the class.
    source_names = source.collect_params().keys()
    names = dict(zip(source_names, collected.collect_params().keys()))
    arrays = {names[name]: p.data() for name, p in source.collect_params().items()}
    mx.nd.save(str(tmp_path / "collected.params"), arrays)
    collected.collect_params().load(str(tmp_path / "collected.params"))
    for net in (target, collected):
        for p, expected in zip(net.collect_params().values(), source.collect_params().values()):
            assert_same_bits(p.data().asnumpy(), expected.data().asnumpy(), p.name)
