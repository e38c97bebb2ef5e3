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


def test_a_built_layer_of_contrib_is_still_converted():
    net = nn.HybridSequential()
    net.add(CONTRIB(in_channels=2, num_devices=1))
    undo = sbn.replace_contrib()
    try:
        sbn.convert_sync_batchnorm(net)
    finally:
        undo()
    assert type(net[0]) is sbn.SyncBatchNorm
