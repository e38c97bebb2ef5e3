"""The traps of MXNet's KVStore: each test fails where nothing is done about one of them. More of
them stand in test_distributed.py: rounding, arrays that are overwritten, keys, stores."""

import threading
import time

import distributed_alone
import mxnet as mx
import numpy as np
import pytest
from distributed_cluster import STORE, needs_horovod, run
from gluon_syncbn.distributed import KVStoreReducer
from runs import contexts
from tolerances import assert_same_bits

REMEDY = "make the Trainer with update_on_kvstore=False"
ONE_STORE = "give the Trainer the store itself, as kvstore=kv"
REFUSED = {
    "default": REMEDY,
    "server": REMEDY,
    "compression": "make the Trainer without compression_params",
    "second reducer": "has a KVStoreReducer already",
    "second store": ONE_STORE,
    "store of a Trainer": ONE_STORE,
    # MXNet would wait indefinitely.
    "second trainer": "make one Trainer for all parameters",
}


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    return run(tmp_path_factory.mktemp("trainers"), 2, ["distributed_traps:trainers"])


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_store_with_layers_refuses(trainers, what):
    for reported in trainers.reported("trainers"):
        kind, text, _ = reported[what]
        assert kind == "ValueError" and REFUSED[what] in text
        assert reported["local store"] == "device"


def test_a_trainer_on_the_store_of_the_layers(trainers):
    """On one store with other keys, with other processes forked from these, to a clean end."""
    first, second = trainers.arrays("trainers")
    for name in first:
        assert np.isfinite(first[name]).all()
        assert_same_bits(first[name], second[name], name)
    for reported in trainers.reported("trainers"):
        assert reported["one store"] and reported["late"] == [1, 2]


@pytest.mark.long
def test_a_server_that_updates_already(tmp_path):
    topics = ["distributed_traps:updates_before"]
    for reported in run(tmp_path, 2, topics, engine="none").reported("updates before"):
        kind, text, _ = reported
        assert kind == "RuntimeError"
        assert "The KVStore changes what is sent to it" in text and REMEDY in text


@pytest.fixture(scope="module", params=[{}, STORE], ids=["memory", "KVStore"])
def among_others(request, tmp_path_factory):
    topics = ["distributed_alone:trained_among_other_things"]
    return run(tmp_path_factory.mktemp("among others"), 2, topics, **request.param)


@pytest.mark.parametrize("name", distributed_alone.NETS)
def test_what_one_process_does_besides_training_changes_nothing(among_others, name, tmp_path):
    job, count = among_others, distributed_alone.SHARDS
    net = distributed_alone.NETS[name](str(tmp_path / "net"))
    places = contexts(count)
    expected = distributed_alone.train(net, places, slice(count), lambda step: None)
    assert len(expected) >= 8
    for rank, found in enumerate(job.arrays(f"among {name}")):
        for (of, value), other in zip(sorted(found.items()), sorted(expected)):
            if "running" in other:
                seed_and_things = job.reported(f"among {name}")[rank]
                assert_same_bits(value, expected[other], f"rank {rank}, {of}: {seed_and_things}")


def test_a_group_that_is_left_in_a_step(two):
    assert two.reported("left") == [True, True]


def test_a_trainer_that_adds_in_one_process_alone_is_told_of_once(pair, request):
    how = "update_on_kvstore=False"
    if "[horovod]" in request.node.name:
        how = "hvd.DistributedTrainer(net.collect_params(), "
    for reported in pair.reported("add here alone"):
        for name in ("default", "unknown store"):
            (text,) = reported.pop(name)
            assert "so the weights of the processes drift apart" in text and how in text
        assert all(said == [] for said in reported.values()), reported


@needs_horovod
def test_horovod_ends_after_the_last_step(horovod):
    """Its own exit hook would end it before."""
    assert horovod.reported("ends") == [True, True]


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
