"""convert_sync_batchnorm and revert_sync_batchnorm: which layers of which nets."""

import logging
import re

import gluon_syncbn as sbn
import mxnet as mx
import pytest
from gluon_syncbn import SyncBatchNormReLU, convert_sync_batchnorm, revert_sync_batchnorm
from convert_nets import (
    KINDS,
    cpu_only,
    description,
    exported,
    forward,
    ids_of,
    images,
    operators,
    random_statistics,
    small_net,
    synced,
)
from gluon_syncbn.convert import conversion
from mxnet import gluon
from mxnet.gluon import nn
from mxnets import needs_batch_norm_relu, with_batch_norm_relu
from runs import STOCK_RELU, contexts
from tolerances import assert_close


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
            self.twice = self.attribute
            self.shared = nn.BatchNorm(params=self.attribute.params)
            self.itself = [self]
            self.of_numbers = list(range(5))
            self.of_numbers.append(self.of_numbers)


def test_layers_outside_of_the_children():
    net = Holder()
    _, report = convert_sync_batchnorm(net, return_report=True)
    assert [entry.path for entry in report.replaced] == [
        "attribute",
        "shared",
        "in_list[0]",
        "in_list[1][0]",
        "in_tuple[1]",
        "in_dict['a']",
        "in_dict[4]['b'][0]",
        *(f"in_set[{i}]" for i in range(3)),
        "deep[0].1",
    ]
    assert not report.refused and not report.already
    assert net.twice is net.attribute and net.shared.gamma is net.attribute.gamma
    # Every process needs the same order.
    names = [entry.name for entry in report.replaced if "set" in entry.path]
    assert names == sorted(names)
    held = [net.attribute, net.in_list[1][0], net.in_tuple[1], net.in_dict[4]["b"][0]]
    held.append(net.deep[0][1])
    assert {type(layer) for layer in [*held, *net.in_set]} == {sbn.SyncBatchNorm}
    revert_sync_batchnorm(net)
    assert {type(layer) for layer in [*held, *net.in_set]} == {nn.BatchNorm}


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


@pytest.mark.parametrize(
    "activation", [None, pytest.param("relu", marks=[cpu_only, needs_batch_norm_relu])]
)
def test_layers_made_synchronized_become_plain(activation):
    layer = sbn.SyncBatchNorm(activation=activation, momentum=0.8, in_channels=3)
    layer._kwargs["use_global_stats"] = True  # As gluoncv.utils.freeze_bn does.
    layer.initialize()
    random_statistics(layer)
    before = forward(layer, images())
    revert_sync_batchnorm(layer)
    kind = STOCK_RELU if activation else nn.BatchNorm
    assert type(layer) is kind
    assert sorted(vars(layer)) == sorted(vars(kind(in_channels=3)))
    assert layer._kwargs == kind(momentum=0.8, use_global_stats=True)._kwargs
    assert_close(forward(layer, images()), before, "float32")
    convert_sync_batchnorm(layer)
    assert layer._own_settings["activation"] == activation
    assert_close(forward(layer, images()), before, "float32")


class Loud(sbn.SyncBatchNorm):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize(
    "kind, settings, why",
    [
        (sbn.SyncBatchNorm, {"activation": "leaky_relu"}, "which no layer of MXNet has"),
        (sbn.SyncBatchNorm, {"momentum": None, "running_variance": "unbiased"}, "momentum=None"),
        (Loud, {}, "Loud defines forward."),
        (sbn.SyncBatchNormReLU, {}, f"MXNet {mx.__version__} has no nn.BatchNormReLU."),
    ],
)
def test_what_is_not_reverted(kind, settings, why, monkeypatch):
    monkeypatch.setattr(conversion, "BATCH_NORMS", (nn.BatchNorm,))  # As in MXNet 1.7.
    layer = kind(in_channels=3, **settings)
    _, report = revert_sync_batchnorm(layer, return_report=True)
    assert type(layer) is kind and not report.replaced
    assert why in report.refused[0].why


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
        assert type(net) is nn.BatchNorm


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


def test_one_process_speaks_for_all(monkeypatch, capsys):
    for rank in "012":
        monkeypatch.setenv("GLUON_SYNCBN_RANK", rank)
        convert_sync_batchnorm(small_net())
    assert capsys.readouterr().err.count("2 layers replaced") == 1


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
        (nn.Dense, r"got type: create a net, as in Dense\(\)"),
        ([nn.Dense(2)], "got list: call it for each net"),
    ],
)
def test_other_objects_than_blocks(function, net, words):
    with pytest.raises(TypeError, match=rf"{function.__name__} takes a Gluon Block and {words}"):
        function(net)


@pytest.mark.parametrize(
    "kind, arguments",
    [
        (ValueError, {"num_devices": 0}),
        (TypeError, {"num_devices": "all"}),
        (TypeError, {"group": "all"}),
        (TypeError, {"also": "MyNorm"}),
        (TypeError, {"also": [nn.Dense]}),
    ],
)
def test_invalid_arguments(kind, arguments):
    net = small_net()
    before = description(net)
    with pytest.raises(kind, match=next(iter(arguments))):
        convert_sync_batchnorm(net, **arguments)
    assert description(net) == before
