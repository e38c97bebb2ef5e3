"""Messages of layers through native channels: when they bypass Python, and when they go back."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn.native.channel import LIMBS, Connection, Key
from mxnet import autograd


def test_python_has_no_part_in_what_all_processes_know(pair):
    for reported in pair.reported("through python"):
        keys = [f"{reported['number']} {name}" for name in ("forward -1", "backward -1")]
        assert reported["first"] == [f"{reported['number']} handshake", *keys]
        assert reported["steps"] == []
        # A layer that has other devices is known by now.
        assert reported["moved"] == keys
        assert [reported["first mean"], *reported["means"], reported["moved mean"]] == [0.5] * 5


def test_passes_without_backward_take_no_new_keys(pair):
    for number, counts in pair.reported("passes"):
        assert counts == {
            f"{number} handshake": 1,
            f"{number} forward -1": 11,
            f"{number} backward -1": 1,
        }


def test_keys_of_users_are_no_layers(pair):
    assert pair.reported("keys of users") == [[[[3.0, 3.0]] * 6, 1, 0.5]] * 2


def test_a_layer_takes_the_store_of_its_group(pair):
    for reported in pair.reported("another store"):
        # The handshake, and two messages in each of two steps.
        assert reported["reducer"] == [5, 0]
        assert reported["files"] == [0, 5]
        assert reported["again"] == [4, 0]
        assert reported["means"] == [0.5] * 6


def test_a_group_that_failed_stays_so(pair):
    for reported in pair.reported("failed"):
        kind, text, _ = reported["failed"]
        assert kind == "MXNetError"
        assert "the processes have lost each other" in text and "a device was lost" in text
        assert reported["other"] == [0.5, 0.5]


def test_a_probe_shows_who_has_arrived(pair):
    _, reported = pair.reported("probed")
    assert reported["second"] == reported["exchanged"] == "arrived"
    assert reported["next"] == reported["next after"] == "absent"
    assert reported["waits"] == ["arrived", 'a title ("probed" 3)', 'a title ("probed" 2)']


class Twins:
    """A store of two processes that bring the same."""

    rank, size = 0, 2

    def all_reduce(self, key, array):
        return np.stack([array[0], array[0]])

    def probe(self, *arguments):
        raise RuntimeError("not expected to wait")


@pytest.mark.parametrize("more", [(1, 0), (0, 3)])
def test_a_channel_for_other_messages_is_not_taken(more):
    """One of another size, or of more processes: the values of five fit nowhere here."""
    store = Twins()
    layer = sbn.SyncBatchNorm(in_channels=3, group=sbn.SyncGroup(store=store))
    layer.initialize()
    size, processes = 2 + 6 * 3 + more[0], 2 + more[1]
    kv = mx.kv.create("local")
    slots = mx.nd.zeros((processes, LIMBS, size))
    kv.init(7, slots)
    connection = Connection(store.probe)
    channel = connection.kvstore_channel("key", size, 0, kv, 7, slots)
    native = layer._layer
    with autograd.record():
        layer(mx.nd.zeros((1, 3))).wait_to_read()
        native.set_channel(Key(native.id, "forward", -1), channel, native.exchange)
        layer(mx.nd.ones((1, 3))).wait_to_read()
    assert channel.calls == 0
    np.testing.assert_allclose(layer.running_mean.data().asnumpy(), 0.1, rtol=1e-6)
