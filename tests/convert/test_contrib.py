"""replace_contrib: our layer under the name of contrib's."""

import sys
import types

import gluon_syncbn as sbn
import pytest
from mxnet.gluon import contrib, nn

# Before anything is replaced.
CONTRIB = contrib.nn.SyncBatchNorm


@pytest.fixture
def module(monkeypatch):
    """One that has imported contrib's class by name."""
    module = types.ModuleType("imported_before")
    exec("from mxnet.gluon.contrib.nn import SyncBatchNorm as Norm", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def names(module):
    return contrib.nn.SyncBatchNorm, contrib.nn.basic_layers.SyncBatchNorm, module.Norm


def test_all_names_become_ours_until_it_is_undone(module):
    undo = sbn.replace_contrib()
    try:
        assert set(names(module)) == {sbn.SyncBatchNorm}
        undo_again = sbn.replace_contrib()
        undo_again()
        assert set(names(module)) == {sbn.SyncBatchNorm}
    finally:
        undo()
    assert set(names(module)) == {CONTRIB}


def test_ours_takes_the_arguments_of_contrib():
    arguments = {
        "in_channels": 3,
        "num_devices": 1,
        "momentum": 0.8,
        "epsilon": 1e-3,
        "center": False,
        "scale": False,
        "use_global_stats": True,
        "beta_initializer": "ones",
        "gamma_initializer": "zeros",
        "running_mean_initializer": "ones",
        "running_variance_initializer": "zeros",
        "prefix": "norm_",
        "params": None,
    }
    before = CONTRIB(**arguments)
    undo = sbn.replace_contrib()
    try:
        after = contrib.nn.SyncBatchNorm(**arguments)
    finally:
        undo()
    assert list(after.collect_params()) == list(before.collect_params())
    names = before._kwargs.keys() - {"ndev", "key"}
    assert {n: after._kwargs[n] for n in names} == {n: before._kwargs[n] for n in names}
    for one, other in zip(before.collect_params().values(), after.collect_params().values()):
        assert (one.shape, one.init, one.grad_req) == (other.shape, other.init, other.grad_req)


def test_a_built_layer_of_contrib_is_still_converted():
    net = nn.HybridSequential()
    net.add(CONTRIB(in_channels=2, num_devices=1))
    undo = sbn.replace_contrib()
    try:
        sbn.convert_sync_batchnorm(net)
    finally:
        undo()
    assert type(net[0]) is sbn.SyncBatchNorm
