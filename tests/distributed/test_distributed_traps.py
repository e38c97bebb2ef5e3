"""The traps of MXNet's KVStore: each test fails where nothing is done about one of them. More of
them stand in test_distributed.py: rounding, arrays that are overwritten, keys, stores."""

import threading
import time

import mxnet as mx
import numpy as np
import pytest
from distributed_cluster import Cluster, needs_horovod, run
from tolerances import assert_same_bits

from gluon_syncbn.distributed import KVStoreReducer

REMEDY = "make the Trainer with update_on_kvstore=False"


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    return run(tmp_path_factory.mktemp("trainers"), 2, ["distributed_traps:trainers"])


@pytest.mark.parametrize("what", ["default", "server"])
def test_a_server_that_updates_is_refused_at_the_first_step(trainers, what):
    for reported in trainers.reported("trainers"):
        kind, text, _ = reported[what]
        assert kind == "ValueError" and REMEDY in text


def test_gradient_compression_is_refused_at_the_first_step(trainers):
    for reported in trainers.reported("trainers"):
        kind, text, _ = reported["compression"]
        assert kind == "ValueError" and "make the Trainer without compression_params" in text


def test_a_trainer_on_the_store_of_the_layers(trainers):
    """On one store with other keys, with other processes forked from these, to a clean end."""
    first, second = trainers.arrays("trainers")
    for name in first:
        assert np.isfinite(first[name]).all()
        assert_same_bits(first[name], second[name], name)
    for reported in trainers.reported("trainers"):
        assert reported["one store"] and reported["late"] == [1, 2]


def test_a_store_has_one_reducer(trainers):
    for reported in trainers.reported("trainers"):
        kind, text, _ = reported["second reducer"]
        assert kind == "ValueError" and "has a KVStoreReducer already" in text


@pytest.mark.parametrize("what", ["second store", "store of a Trainer"])
def test_a_second_store_is_refused(trainers, what):
    for reported in trainers.reported("trainers"):
        kind, text, _ = reported[what]
        assert kind == "ValueError" and "give the Trainer the store itself, as kvstore=kv" in text
        assert reported["local store"] == "device"


@pytest.mark.long
def test_a_server_that_updates_already(tmp_path):
    topics = ["distributed_traps:updates_before"]
    for reported in run(tmp_path, 2, topics, engine="bare").reported("updates before"):
        kind, text, _ = reported
        assert kind == "RuntimeError"
        assert "The KVStore changes what is sent to it" in text and REMEDY in text


def test_what_one_process_does_besides_training_stops_nobody(two):
    first, second = two.arrays("more")
    assert_same_bits(first["means"], second["means"])


def test_a_second_trainer_is_refused(trainers):
    """MXNet would wait indefinitely."""
    for reported in trainers.reported("trainers"):
        kind, text, _ = reported["second trainer"]
        assert kind == "ValueError" and "make one Trainer for all parameters" in text


def test_a_group_that_is_left_in_a_step(two):
    assert two.reported("left") == [True, True]


@needs_horovod
def test_horovod_ends_after_the_last_step(horovod):
    """Its own exit hook would end it before."""
    assert horovod.reported("ends") == [True, True]


@pytest.mark.long
def test_no_key_beyond_the_last(tmp_path):
    """Beyond, the number of the server is negative. Only rank 0 knows the numbers."""
    cluster = Cluster(tmp_path, 2, ["distributed_traps:last_keys"], GLUON_SYNCBN_TIMEOUT="10")
    try:
        assert cluster.wait() == [1], cluster.output()[-4000:]
        assert cluster.running() == []
        first, second = cluster.reported("last keys")
    finally:
        cluster.clean()
    for reported in (first, second):
        assert reported["numbers"] == [1_076_647, 1_076_648]
        assert reported["sums"] == [[0, 2, 4]] * 2
        kind, text, seconds = reported["beyond"]
        assert kind == "RuntimeError" and seconds < 8
        assert "All 76648 keys of the KVStore are in use" in text
    assert "rank 0 (failed: All 76648" in second["beyond"][1]


class Calls:
    """A KVStore that notes how many calls are in it at once."""

    type, rank, num_workers = "dist_sync", 0, 1

    def __init__(self):
        self.inside = self.most = 0

    def _call(self, *args, **options):
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.02)
        self.inside -= 1

    init = broadcast = push = pull = pushpull = _call


def test_calls_of_the_store_come_one_after_the_other():
    """The store notes new keys in tables of its own, without a lock, also those of a Trainer."""
    store, create = Calls(), mx.kv.create
    reducer = KVStoreReducer(store)
    names = "init", "broadcast", "push", "pull", "pushpull"
    threads = [threading.Thread(target=getattr(store, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.most == 1
    with pytest.raises(ValueError, match="give the Trainer the store itself"):
        mx.kv.create("dist_sync")
    # When the reducer leaves, MXNet is as it was.
    reducer._leave(None)
    assert set(vars(store)) == {"inside", "most"} and mx.kv.create is create
    with pytest.raises(ZeroDivisionError):
        KVStoreReducer(Unreachable())
    assert mx.kv.create is create


class Unreachable(Calls):
    """A store that fails while a reducer is made."""

    num_workers = 2

    def init(self, *args):
        raise ZeroDivisionError
