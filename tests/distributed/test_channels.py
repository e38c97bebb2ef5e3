"""Messages of layers through native channels: when they bypass Python, and when they go back."""

import faulthandler
from types import SimpleNamespace

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn.distributed.answers import ABSENT, ARRIVED, Answer, describe
from gluon_syncbn.distributed.reducer import Reducer
from gluon_syncbn.native.channel import LIMBS, Connection, Key
from mxnet import autograd


def test_one_message_per_layer_pass_and_process_without_python(pair):
    """Passes without backward take no new keys."""
    for reported in pair.reported("messages"):
        handshake, forward, backward = (
            f"{reported['number']} {name}" for name in ("handshake", "forward -1", "backward -1")
        )
        assert reported == {
            "number": reported["number"],
            "passes": [{handshake: 1, forward: 10}, [handshake, forward], [0.5] * 10],
            "first step": [{forward: 1, backward: 1}, [backward], [0.5]],
            "steps": [{forward: 4, backward: 4}, [], [0.5] * 4],
            # A layer that has other devices is known by now.
            "moved": [{forward: 1, backward: 1}, [forward, backward], [0.5]],
        }


def test_keys_of_users_are_no_layers(pair):
    assert pair.reported("keys of users") == [[[[3.0, 3.0]] * 6, 1, 0.5]] * 2


def test_a_layer_takes_the_store_of_its_group(pair):
    for counts, means in pair.reported("another store"):
        # The handshake, and two messages in each of two steps.
        assert counts == [[5, 0], [0, 5], [4, 0]]
        assert means == [0.5] * 6


def test_a_group_that_failed_stays_so(pair):
    for kind, text, mean_of_other in pair.reported("failed"):
        assert kind == "MXNetError" and mean_of_other == 0.5
        assert "the processes have lost each other" in text and "a device was lost" in text


def test_a_probe_shows_who_has_arrived(pair):
    assert pair.reported("probed")[1] == {
        "waits": ['a title ("probed" 3)', 'a title ("probed" 2)'],
        "before": ["arrived", "arrived", "absent"],
        "after": ["arrived", "arrived", "absent"],
    }


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


def test_processes_that_have_all_come_are_looked_at_once_more():
    """After a suspension of all, some come before others can see it."""
    reducer = Reducer.__new__(Reducer)
    reducer.rank, reducer._ranks, reducer.size = 0, {}, 2
    reducer._memory = SimpleNamespace(joins=lambda ranks: True)
    answers = {1: Answer(ARRIVED)}
    reducer._liveness = SimpleNamespace(probe=lambda *_: answers, describe=describe)
    given_up = []
    reducer._give_up = given_up.append
    reducer._probe("title", "title (key 1)", "", 10.5, 10, 1)
    assert not given_up
    answers[1] = Answer(ABSENT)
    reducer._probe("title", "title (key 1)", "", 10.5, 10, 1)
    answers[1] = Answer(ARRIVED)
    reducer._probe("title", "title (key 1)", "", 11.5, 10, 1)
    assert len(given_up) == 2


@pytest.mark.parametrize("timeout, limit", [(5, 60), (300, 300)])
def test_a_slow_machine_has_time_for_the_shutdown_of_mxnet(timeout, limit, monkeypatch):
    """After a good end: it would end with exit code 1."""
    limits = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda s, exit: limits.append(s))

    def ignore(*_):
        pass

    liveness = SimpleNamespace(wait_for_the_end=ignore, close=ignore)
    reducer = SimpleNamespace(lost=None, longest_timeout=timeout, _liveness=liveness)
    reducer._shutdown_handshake = reducer._lose = ignore
    Reducer._leave(reducer, None)
    assert limits == [limit]
