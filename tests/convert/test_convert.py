"""convert_sync_batchnorm and revert_sync_batchnorm on all kinds of nets."""

import copy
import json
import logging
import pickle
import re
import time

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
import reference
from gluon_syncbn import SyncBatchNormReLU, convert_sync_batchnorm, revert_sync_batchnorm
from devices import KIND
from gluon_syncbn.convert import conversion
from gluon_syncbn.graph.blocks import BATCH_NORMS
from gluon_syncbn.layers.synced_layer import SyncedLayer
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import HybridConcurrent
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from mxnet.gluon.parameter import Parameter
from mxnets import needs_batch_norm_relu, with_batch_norm_relu
from runs import MODES, STOCK_RELU, contexts, shards
from tolerances import assert_close, assert_same_bits, relative_error

KINDS = {
    "nn.BatchNorm": nn.BatchNorm,
    "nn.BatchNormReLU": STOCK_RELU,
    "contrib": lambda **settings: ContribSyncBatchNorm(num_devices=3, **settings),
}
ROLES = ("gamma", "beta", "running_mean", "running_var")


def random_statistics(net):
    """Random values show in the output if a layer is missing or swapped."""
    for layer in layers_of(net):
        channels = layer.gamma.shape[0]
        for name, low, high in zip(ROLES, (0.5, -1, -1, 0.5), (2, 1, 1, 2)):
            getattr(layer, name).set_data(mx.nd.random.uniform(low, high, shape=channels))


cpu_only = pytest.mark.cpu_only("MXNet has nn.BatchNormReLU on the CPU alone")


def layers_of(net):
    found = []
    net.apply(lambda b: found.append(b) if isinstance(b, BATCH_NORMS) else None)
    return found


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


@pytest.mark.parametrize("kind", with_batch_norm_relu(KINDS))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.7, "epsilon": 1e-3, "scale": False, "in_channels": 4},
        {"center": False, "use_global_stats": True},
        {"axis": -1},
    ],
)
def test_settings_and_parameters_stay(kind, settings):
    if kind == "contrib":
        settings = {name: value for name, value in settings.items() if name != "axis"}
    net = small_net(lambda **more: KINDS[kind](**settings, **more))
    layer = net[1]
    layer.gamma.lr_mult, layer.beta.wd_mult, layer.gamma.grad_req = 3, 0, "add"
    requests = [p.grad_req for p in net.collect_params().values()]
    before, parameters = description(net), list(net.collect_params().values())
    kwargs = dict(layer._kwargs)

    assert convert_sync_batchnorm(net) is net
    assert net[1] is layer
    assert type(layer) is (SyncBatchNormReLU if kind == "nn.BatchNormReLU" else sbn.SyncBatchNorm)
    for name in ("eps", "momentum", "fix_gamma", "use_global_stats"):
        assert layer._kwargs[name] == kwargs[name]
    assert layer._kwargs["axis"] == settings.get("axis", 1)
    assert list(map(id, net.collect_params().values())) == list(map(id, parameters))
    assert (layer.gamma.lr_mult, layer.beta.wd_mult) == (3, 0)
    assert [p.grad_req for p in net.collect_params().values()] == requests
    assert (layer.beta.grad_req == "null") == (settings.get("center") is False)
    assert layer._num_devices is None and layer._own_group is None

    assert revert_sync_batchnorm(net) is net
    assert description(net) == before


@pytest.mark.parametrize("kind", with_batch_norm_relu(KINDS))
def test_a_net_that_is_one_layer(kind):
    x = images()
    layer = KINDS[kind]()
    layer.initialize()
    expected = forward(layer, x)
    converted = convert_sync_batchnorm(layer)
    assert converted is layer and isinstance(converted, sbn.SyncBatchNorm)
    y = forward(layer, x)
    assert_close(y, expected, "float32")
    assert (y.min() == 0) == (kind == "nn.BatchNormReLU")
    assert not isinstance(revert_sync_batchnorm(layer), sbn.SyncBatchNorm)


class Holder(gluon.Block):
    """Keeps layers in places that Gluon does not search."""

    def __init__(self):
        super().__init__(prefix="holder_")
        with self.name_scope():
            self.attribute = nn.BatchNorm()
            self.in_list = [nn.BatchNorm(), [nn.BatchNorm()]]
            self.in_tuple = ("text", nn.BatchNorm(), 3)
            self.in_dict = {"a": nn.BatchNorm(), 4: {"b": (nn.BatchNorm(),)}}
            self.in_set = {nn.BatchNorm() for _ in range(3)}
            self.deep = [nn.Sequential()]
            self.deep[0].add(nn.Dense(2), nn.BatchNorm())
            self.itself = [self]
            self.of_numbers = list(range(5))
            self.of_numbers.append(self.of_numbers)


def test_layers_outside_of_the_children():
    net = Holder()
    _, report = convert_sync_batchnorm(net, return_report=True)
    assert [entry.path for entry in report.replaced] == [
        "attribute",
        "in_list[0]",
        "in_list[1][0]",
        "in_tuple[1]",
        "in_dict['a']",
        "in_dict[4]['b'][0]",
        *(f"in_set[{i}]" for i in range(3)),
        "deep[0].1",
    ]
    assert not report.refused and not report.already
    # Every process needs the same order.
    names = [entry.name for entry in report.replaced if "set" in entry.path]
    assert names == sorted(names)
    held = [net.attribute, net.in_list[1][0], net.in_tuple[1], net.in_dict[4]["b"][0]]
    held.append(net.deep[0][1])
    assert {type(layer) for layer in [*held, *net.in_set]} == {sbn.SyncBatchNorm}
    revert_sync_batchnorm(net)
    assert {type(layer) for layer in [*held, *net.in_set]} == {nn.BatchNorm}


class Residual(gluon.HybridBlock):
    """Attributes, a HybridConcurrent and a layer in two places."""

    def __init__(self):
        super().__init__(prefix="residual_")
        with self.name_scope():
            self.shared = nn.BatchNorm()
            self.branches = HybridConcurrent(axis=1)
            with self.branches.name_scope():
                self.branches.add(STOCK_RELU(), self.shared)
            self.other = nn.BatchNorm(params=self.shared.params)

    def hybrid_forward(self, F, x):
        x = self.other(self.shared(x))
        return self.branches(x)


@needs_batch_norm_relu
@cpu_only
@pytest.mark.parametrize("mode", MODES)
def test_attributes_concurrent_branches_and_shared_layers(mode):
    x = images()
    net = Residual()
    net.initialize()
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    forward(net, x)
    random_statistics(net)
    before = forward(net, x)
    order = list(net.collect_params())
    _, report = convert_sync_batchnorm(net, return_report=True)
    assert [(entry.path, entry.after) for entry in report.replaced] == [
        ("shared", "SyncBatchNorm"),
        ("branches.0", "SyncBatchNormReLU"),
        ("other", "SyncBatchNorm"),
    ]
    assert net.branches[1] is net.shared and net.other.gamma is net.shared.gamma
    assert list(net.collect_params()) == order
    # The result is rounded differently three times.
    np.testing.assert_allclose(forward(net, x), before, atol=1e-5 * np.abs(before).max())
    revert_sync_batchnorm(net)
    assert_same_bits(forward(net, x), before)


@pytest.mark.parametrize("kind", with_batch_norm_relu(KINDS))
@pytest.mark.parametrize("mode", MODES)
def test_training_on_two_devices_is_synchronized(kind, mode):
    """The net has run before, so it must be compiled again."""
    devices, x = contexts(2), images(count=6)
    net = small_net(KINDS[kind])
    net.initialize(ctx=devices)
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    for shard in shards(x, (3, 3), devices):
        net(shard)
    flags = [(block._active, list(block._flags)) for block in [net, *net._children.values()]]
    convert_sync_batchnorm(net)
    after = [(block._active, list(block._flags)) for block in [net, *net._children.values()]]
    assert after == flags
    with autograd.record():
        ys = [net(shard) for shard in shards(x, (1, 5), devices)]
    autograd.backward(ys)
    mx.nd.waitall()
    assert bool(net._cached_op) == (MODES[mode] is not None)
    convolved = np.concatenate([net[0](shard).asnumpy() for shard in shards(x, (1, 5), devices)])
    expected = reference.forward(convolved, np.ones(4), np.zeros(4))
    values = statistics(net)
    first = {name.rsplit("running")[1]: v for name, v in values.items() if "last" not in name}
    assert_close(first["_mean"], 0.1 * expected.mean.astype("float64"), "float32")
    assert_close(first["_var"], 0.9 + 0.1 * expected.variance.astype("float64"), "float32")


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


def test_a_trainer_made_before_continues():
    """Each step gives the same bits as a net that was synchronized from the start."""
    devices, x = contexts(2), images()
    results = []
    for norm in (nn.BatchNorm, sbn.SyncBatchNorm):
        mx.random.seed(1)
        net = small_net(norm)
        net.initialize(mx.init.Xavier(), ctx=devices)
        forward(net, x)
        net.hybridize()
        trainer = trainer_of(net)
        convert_sync_batchnorm(net)
        for _ in range(4):
            train(net, trainer, x, (1, 3), devices)
        results.append([p.data(devices[1]).asnumpy() for p in net.collect_params().values()])
    for ours, expected in zip(*results):
        assert_same_bits(ours, expected)


def test_a_trainer_continues_after_a_reversal():
    x, devices, net = images(), contexts(1), small_net()
    net.initialize()
    trainer = trainer_of(net)
    for change in (lambda net: net, convert_sync_batchnorm, revert_sync_batchnorm):
        change(net)
        forward(net, x)  # which sets the shapes
        before = [(p, p.data().asnumpy()) for p in net.collect_params().values()]
        train(net, trainer, x, (4,), devices)
    for p, value in before:
        assert (p.data().asnumpy() != value).any(), p.name


def test_parameters_shared_with_another_net():
    """They are Parameters of a special class only while a synchronized layer uses them."""
    first, second = nn.BatchNorm(in_channels=2), None
    second = nn.BatchNorm(in_channels=2, params=first.params)
    first.initialize(ctx=contexts(2))
    convert_sync_batchnorm(first)
    convert_sync_batchnorm(second)
    assert second.running_mean is first.running_mean
    revert_sync_batchnorm(first)
    first.collect_params().reset_ctx(contexts(1))
    assert second._layer.devices == (f"{KIND}(0)",)
    revert_sync_batchnorm(second)
    assert type(first.running_mean) is type(first.running_var) is Parameter
    assert not any("gluon_syncbn" in type(p).__module__ for p in first.collect_params().values())
    first.collect_params().reset_ctx(contexts(2))


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
    # A group set for all layers reaches only those that are left.
    sbn.set_default_group(sbn.SyncGroup(timeout=7))
    sbn.set_default_group(None)


def synced(net):
    """The synchronized layers of a net or a graph."""
    layers = [node.layer for node in getattr(net, "_nodes", ())] or layers_of(net)
    return [layer for layer in layers if hasattr(layer, "_layer")]


def ids_of(net):
    return {layer._layer.id for layer in synced(net)}


class SlowStore:
    """Another process that does the same as this one, but later."""

    rank, size = 0, 2

    def all_reduce(self, key, array):
        time.sleep(0.1)
        return np.stack([array[0], array[0]])


def test_pending_steps_finish():
    layer = nn.BatchNorm(in_channels=3)
    layer.initialize()
    convert_sync_batchnorm(layer, group=sbn.SyncGroup(store=SlowStore()))
    with autograd.record():
        y = layer(mx.nd.array(images()))
    y.backward()
    revert_sync_batchnorm(layer)
    assert np.isfinite(layer.gamma.grad().asnumpy()).all()


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


def test_hooks_stay():
    calls = []
    net = small_net()
    net.initialize()
    net[1].register_forward_hook(lambda block, x, y: calls.append(("after", block)))
    net[1].register_forward_pre_hook(lambda block, x: calls.append(("before", block)))
    for change in (convert_sync_batchnorm, revert_sync_batchnorm):
        change(net)
        calls.clear()
        forward(net, images())
        assert calls == [("before", net[1]), ("after", net[1])]


@pytest.mark.parametrize("of_graph", [False, True])
def test_again_changes_only_group_and_number(of_graph, tmp_path):
    net = exported(small_net(), tmp_path) if of_graph else small_net()
    net.initialize(ctx=contexts(2), force_reinit=True)
    group, other = sbn.SyncGroup(group_size=1), sbn.SyncGroup(group_size=2)
    _, report = convert_sync_batchnorm(net, group=group, return_report=True)
    before, paths = ids_of(net), tuple(entry.path for entry in report.replaced)
    _, report = convert_sync_batchnorm(net, return_report=True)
    assert report.already == paths and len(paths) == 2 and not report.replaced
    assert ids_of(net) == before
    for arguments, expected in (
        ({}, (group, None)),
        ({"num_devices": 2}, (group, 2)),
        ({"group": other}, (other, 2)),
    ):
        convert_sync_batchnorm(net, **arguments)
        assert {(layer._own_group, layer._num_devices) for layer in synced(net)} == {expected}


@needs_batch_norm_relu
@cpu_only
def test_layers_made_synchronized_become_plain():
    net = nn.HybridSequential()
    net.add(sbn.SyncBatchNorm(momentum=0.8, in_channels=3), SyncBatchNormReLU(in_channels=3))
    net[0]._kwargs["use_global_stats"] = True  # As gluoncv.utils.freeze_bn does.
    net.initialize()
    random_statistics(net)
    before = forward(net, images())
    revert_sync_batchnorm(net)
    assert [type(layer) for layer in net] == [nn.BatchNorm, STOCK_RELU]
    assert sorted(vars(net[0])) == sorted(vars(nn.BatchNorm(in_channels=3)))
    assert net[0]._kwargs == nn.BatchNorm(momentum=0.8, use_global_stats=True)._kwargs
    assert_close(forward(net, images()), before, "float32")


relu = pytest.param("relu", marks=[cpu_only, needs_batch_norm_relu])


@pytest.mark.parametrize("activation", [None, relu, "leaky_relu"])
def test_layers_with_an_activation_become_plain(activation):
    layer = sbn.SyncBatchNorm(activation=activation, in_channels=3)
    layer.initialize()
    random_statistics(layer)
    before = forward(layer, images())
    _, report = revert_sync_batchnorm(layer, return_report=True)
    kinds = {None: nn.BatchNorm, "relu": STOCK_RELU, "leaky_relu": sbn.SyncBatchNorm}
    assert type(layer) is kinds[activation]
    whys = [entry.why for entry in report.refused]
    expected = ["it has activation='leaky_relu', which no layer of MXNet has."]
    assert whys == (expected if activation == "leaky_relu" else [])
    assert_close(forward(layer, images()), before, "float32")
    if activation != "leaky_relu":
        assert sorted(vars(layer)) == sorted(vars(kinds[activation](in_channels=3)))
        convert_sync_batchnorm(layer)
        assert layer._own_settings.activation == activation
        assert_close(forward(layer, images()), before, "float32")


def test_an_activation_stays_where_mxnet_has_no_layer_with_one(monkeypatch):
    monkeypatch.setattr(conversion, "BATCH_NORMS", (nn.BatchNorm,))
    layer = sbn.SyncBatchNormReLU(in_channels=3)
    layer.initialize()
    _, report = revert_sync_batchnorm(layer, return_report=True)
    assert type(layer) is sbn.SyncBatchNormReLU
    assert report.refused[0].why == f"MXNet {mx.__version__} has no nn.BatchNormReLU."


@pytest.mark.parametrize("of_graph", [False, True])
def test_virtual_devices_are_left_alone_and_become_plain(of_graph, tmp_path):
    layer = sbn.VirtualBatchNorm(2, in_channels=3)
    net = exported(layer, tmp_path) if of_graph else layer
    _, report = convert_sync_batchnorm(net, group=sbn.SyncGroup(), return_report=True)
    assert "do not synchronize" in report.refused[0].why and not report.replaced
    assert layer._layer.group.group_size == 1
    _, report = revert_sync_batchnorm(net, return_report=True)
    assert [entry.after for entry in report.replaced] == ["BatchNorm"]
    if of_graph:
        assert operators(net) == ["BatchNorm"]
    else:
        assert sorted(vars(net)) == sorted(vars(nn.BatchNorm(in_channels=3)))


def exported(net, path, x=None, initialize=True):
    """The SymbolBlock of an exported net."""
    if initialize:
        net.initialize()
    net.hybridize()
    net(mx.nd.array(images() if x is None else x))
    net.export(str(path / "net"))
    return gluon.SymbolBlock.imports(*files_of(path / "net"))


def files_of(graph):
    return f"{graph}-symbol.json", ["data"], f"{graph}-0000.params"


def test_a_cumulative_average_is_not_reverted(tmp_path):
    layer = sbn.SyncBatchNorm(in_channels=3, momentum=None, running_variance="unbiased")
    for net in (layer, exported(layer, tmp_path, np.ones((2, 3)))):
        _, report = revert_sync_batchnorm(net, return_report=True)
        assert "momentum=None" in report.refused[0].why and not report.replaced


class OnlyArguments(nn.BatchNorm):
    def __init__(self, **kwargs):
        super().__init__(momentum=0.5, **kwargs)
        self.mark = "kept"


class OwnForward(nn.BatchNorm):
    def hybrid_forward(self, F, x, gamma, beta, running_mean, running_var):
        return x


class Mixin:
    def freeze(self):
        pass


class WithMixin(nn.BatchNorm, Mixin):
    pass


def replaced_forward(**kwargs):
    layer = nn.BatchNorm(**kwargs)
    layer.forward = lambda x: x
    return layer


def three_outputs(**kwargs):
    layer = nn.BatchNorm(**kwargs)
    layer._kwargs["output_mean_var"] = True
    return layer


def test_subclasses_that_only_set_arguments():
    layer = OnlyArguments()
    convert_sync_batchnorm(layer)
    assert type(layer) is sbn.SyncBatchNorm
    assert layer._kwargs["momentum"] == 0.5 and layer.mark == "kept"
    revert_sync_batchnorm(layer)
    assert type(layer) is OnlyArguments


@pytest.mark.parametrize(
    "kind, why",
    [
        (OwnForward, r"OwnForward defines hybrid_forward\..*also=\[OwnForward\]"),
        (WithMixin, r"Mixin defines freeze\."),
        (replaced_forward, r"its forward was replaced: delete"),
        (three_outputs, r"settings that SyncBatchNorm lacks: output_mean_var\."),
    ],
)
def test_what_has_code_or_settings_of_its_own_is_left(kind, why, caplog):
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(), kind())
    left = net[1]
    before = dict(vars(left))
    with caplog.at_level(logging.INFO, logger="gluon_syncbn"):
        _, report = convert_sync_batchnorm(net, return_report=True)
    assert [entry.path for entry in report.replaced] == ["0"]
    (entry,) = report.refused
    assert (entry.path, entry.name, entry.before) == ("1", left.name, type(left).__name__)
    assert re.search(why, entry.why)
    assert vars(left) == before and not isinstance(left, sbn.SyncBatchNorm)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and entry.why in record.getMessage()
    convert_sync_batchnorm(net, also=type(left))
    assert isinstance(left, sbn.SyncBatchNorm) == (kind is not replaced_forward)
    revert_sync_batchnorm(net)
    assert vars(left) == before


def test_our_subclasses_with_code_are_not_reverted():
    class Loud(sbn.SyncBatchNorm):
        def forward(self, x):
            return super().forward(x)

    net = small_net(Loud)
    _, report = revert_sync_batchnorm(net, return_report=True)
    assert [entry.why for entry in report.refused] == ["Loud defines forward."] * 2
    assert isinstance(net[1], Loud)


def test_what_is_said(caplog, capsys):
    convert_sync_batchnorm(small_net(), return_report=True)
    assert not any(capsys.readouterr())
    convert_sync_batchnorm(small_net())
    words = "'net': 2 layers replaced (2 BatchNorm -> SyncBatchNorm)"
    assert capsys.readouterr() == ("", f"convert_sync_batchnorm, HybridSequential {words}\n")
    assert not caplog.records
    convert_sync_batchnorm(nn.Dense(3))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no batch normalization found" in caplog.text


@pytest.mark.parametrize("function", [convert_sync_batchnorm, revert_sync_batchnorm])
@pytest.mark.parametrize(
    "net, words",
    [
        (None, "got NoneType: give the net itself"),
        (mx.sym.var("x"), r"got Symbol: wrap the symbol in mx.gluon.SymbolBlock"),
        (nn.Dense, r"got type: create a net, as in Dense\(\)"),
        ([nn.Dense(2)], "got list: call it for each net"),
    ],
)
def test_other_objects_than_blocks(function, net, words):
    with pytest.raises(ValueError, match=rf"{function.__name__} takes a Gluon Block and {words}"):
        function(net)


@pytest.mark.parametrize(
    "arguments", [{"num_devices": 0}, {"group": "all"}, {"also": "MyNorm"}, {"also": [nn.Dense]}]
)
def test_invalid_arguments(arguments):
    net = small_net()
    before = description(net)
    with pytest.raises(ValueError, match=next(iter(arguments))):
        convert_sync_batchnorm(net, **arguments)
    assert description(net) == before


def test_a_failure_leaves_the_net_unchanged(monkeypatch, tmp_path):
    """It fails at the last layer, the only one with three devices."""
    configure = sbn.SyncGroup._configure

    def fail(group, layer, devices, num_devices):
        if group.group_size and len(devices) == 3:
            raise RuntimeError("three devices")
        configure(group, layer, devices, num_devices)

    monkeypatch.setattr(sbn.SyncGroup, "_configure", fail)
    x = images()
    net = nn.HybridSequential()
    net.add(exported(small_net(), tmp_path), nn.BatchNorm(), sbn.SyncBatchNorm())
    net[1].initialize()
    net[2].initialize()
    net.collect_params().reset_ctx(contexts(2))
    net[2].collect_params().reset_ctx(contexts(3))
    before = description(net), net[0]._cached_graph, type(net[0])
    group = net[2]._own_group
    expected = forward(net[:2], x)
    with pytest.raises(RuntimeError, match="three devices"):
        convert_sync_batchnorm(net, group=sbn.SyncGroup(group_size=2))
    assert (description(net), net[0]._cached_graph, type(net[0])) == before
    assert net[2]._own_group is group
    assert_same_bits(forward(net[:2], x), expected)


def test_hybridize_compiles_a_block_around_the_net_again():
    """convert_sync_batchnorm cannot find that block; its docstring names this remedy."""
    devices, x = contexts(2), images()
    outer = nn.HybridSequential()
    outer.add(small_net())
    outer.initialize(ctx=devices)
    outer.hybridize()
    for shard in shards(x, (2, 2), devices):
        outer(shard)
    convert_sync_batchnorm(outer[0])
    outer.hybridize()
    train(outer, trainer_of(outer), x, (1, 3), devices)
    statistics(outer)


# Graphs


def operators(block):
    nodes = json.loads(block._cached_graph[1].tojson())["nodes"]
    return [node["op"] for node in nodes if node["op"] != "null"]


@pytest.mark.parametrize("kind", with_batch_norm_relu(["nn.BatchNorm", "nn.BatchNormReLU"]))
def test_the_graph_of_a_file(kind, tmp_path):
    x = images()
    net = exported(small_net(KINDS[kind]), tmp_path)
    random = np.random.default_rng(0)
    for p in net.collect_params(".*gamma|.*beta|.*running").values():
        p.set_data(mx.nd.array(random.uniform(0.5, 1.5, p.shape)))
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
    assert relative_error(forward(net, x), before) < 5e-6  # the last layer adds to it
    assert convert_sync_batchnorm(net, return_report=True)[1].already == tuple(paths)
    revert_sync_batchnorm(net)
    assert type(net) is gluon.SymbolBlock and net._cached_graph[1].tojson() == graph
    assert not any("gluon_syncbn" in type(p).__module__ for _, p in parameters)
    assert_same_bits(forward(net, x), before)


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


class Twice(gluon.HybridBlock):
    def __init__(self, block):
        super().__init__(prefix="")
        self.block = block

    def hybrid_forward(self, F, x):
        return self.block(x) + self.block(F.sin(x))


def test_the_calls_of_a_graph_are_nodes_of_their_own(tmp_path):
    net = Twice(exported(small_net(), tmp_path))
    convert_sync_batchnorm(net)
    nodes = json.loads(net(mx.sym.var("data")).tojson())["nodes"]
    ours = [node["attrs"] for node in nodes if node["op"] == "Custom"]
    ids = {(attrs["layer"], attrs["node"]) for attrs in ours}
    assert len(ids) == 4 and len({layer for layer, _ in ids}) == 2


def test_a_layer_in_two_nodes_of_a_graph(tmp_path):
    devices, x = contexts(2), images()
    net = exported(Twice(nn.BatchNorm(in_channels=3)), tmp_path)
    net.collect_params().reset_ctx(devices)
    before = forward(net, x)
    _, report = convert_sync_batchnorm(net, return_report=True)
    assert len(report.replaced) == 1 and operators(net).count("Custom") == 2
    assert_close(forward(net, x), before, "float32")
    train(net, trainer_of(net), x, (1, 3), devices)
    statistics(net)
    assert len(revert_sync_batchnorm(net, return_report=True)[1].replaced) == 1


def test_settings_of_nodes():
    x, scale = mx.sym.var("data"), {"eps": 1e-4, "fix_gamma": False, "momentum": 0.8}
    contrib = mx.sym.contrib.SyncBatchNorm(x, name="norm", key="a", ndev=3, **scale)
    # MXNet's defaults for a symbol differ from those of a layer.
    stock = mx.sym.BatchNorm(x, name="norm")
    for y, expected in ((contrib, (1e-4, 0.8, False, 1)), (stock, (1e-3, 0.9, True, 1))):
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


# Checkpoints


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


def prepared(name):
    net = form_of(name)
    forward(net, images())
    random_statistics(net)
    return net


@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loaded", FORMS)
def test_files_fit_each_way(saved, loaded, tmp_path):
    source, target = prepared(saved), form_of(loaded)
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


def test_an_exported_net_of_ours_becomes_stock_and_ours(tmp_path):
    devices, x = contexts(2), images()
    source = convert_sync_batchnorm(prepared("nn.BatchNorm"))
    expected = forward(source, x)
    net = exported(source, tmp_path, initialize=False)
    stock = gluon.SymbolBlock.imports(*files_of(tmp_path / "net"))
    _, report = revert_sync_batchnorm(stock, return_report=True)
    assert len(report.replaced) == 2
    norm = ["Convolution", "BatchNorm"]
    assert operators(stock) == [*norm, "Activation", *norm]
    assert_close(forward(stock, x), expected, "float32")
    _, report = convert_sync_batchnorm(net, return_report=True)
    assert len(report.replaced) == 2 and operators(net).count("SwapAxis") <= 4
    assert_same_bits(forward(net, x), expected)
    net.collect_params().reset_ctx(devices)
    train(net, trainer_of(net), x, (1, 3), devices)
    statistics(net)
    _, report = revert_sync_batchnorm(net, return_report=True)
    assert len(report.replaced) == 2 and operators(net) == operators(stock)


def test_one_checkpoint_for_any_number_of_devices(tmp_path):
    """Only of batch normalization: a convolution's gradient depends on its share of the batch."""
    files = []

    def two_norms():
        net = nn.HybridSequential(prefix="net_")
        net.add(nn.BatchNorm(prefix="a_"), nn.BatchNorm(prefix="b_"))
        return net

    # MXNet saves the sum of all devices' values, divided by their number.
    for sizes in ((4,), (1, 3), (1, 1, 1, 1)):
        devices = contexts(len(sizes))
        net = two_norms()
        net.initialize(ctx=devices)
        convert_sync_batchnorm(net)
        for step in range(3):
            with autograd.record():
                ys = [net(shard) for shard in shards(images(step), sizes, devices)]
            autograd.backward(ys)
        mx.nd.waitall()
        statistics(net)
        files.append(tmp_path / f"{len(sizes)}.params")
        net.save_parameters(str(files[-1]))
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    loaded = two_norms()
    loaded.load_parameters(str(files[2]), ctx=mx.current_context())
    assert np.isfinite(forward(loaded, images())).all()
