"""The traps of MXNet's KVStore: each test fails where nothing is done about one of them. More of
them stand in test_distributed.py: rounding, arrays that are overwritten, keys, stores."""

import gc
import threading
import time
from unittest import mock

import gluon_syncbn as sbn
import distributed_alone
import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn import distributed
from distributed_cluster import STORE, needs_horovod, run
from distributed_worker import backward, error_of
from gluon_syncbn.distributed import KVStoreReducer
from gluon_syncbn.supervision import limits
from mxnet.gluon import nn
from runs import contexts
from tolerances import assert_same_bits


def net_and_trainer(world, devices=1, **arguments):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), sbn.SyncBatchNorm(), nn.Conv2D(2, 3))
    net.initialize(ctx=contexts(devices))
    optimizer = {"learning_rate": 0.01}
    trainer = mx.gluon.Trainer(
        net.collect_params(), "sgd", optimizer, kvstore=world.kv, **arguments
    )

    def step(xs=None):
        xs = xs or [mx.nd.random.normal(shape=(2, 3, 6, 6), ctx=d) for d in contexts(devices)]
        backward(net, xs)
        trainer.step(8)

    return net, trainer, step


def trains_on_the_store(world):
    """One that has the server update is refused, and the next one trains, on the same store."""
    reported = {}
    _, _, step = net_and_trainer(world)
    reported["default"] = error_of(step)
    _, _, step = net_and_trainer(world, update_on_kvstore=True)
    reported["server"] = error_of(step)
    compression = {"type": "2bit", "threshold": 0.5}
    _, _, step = net_and_trainer(world, update_on_kvstore=False, compression_params=compression)
    reported["compression"] = error_of(step)
    net, trainer, step = net_and_trainer(world, devices=2, update_on_kvstore=False)
    for _ in range(10):
        step()
    # Keys that come when the Trainer has its own already.
    everyone = world.reducer.all_gather("late", np.full(3, 1.0 + world.rank))
    reported["late"] = everyone[:, 0].tolist()
    reported["one store"] = trainer._kvstore._store is world.kv
    reported["local store"] = mx.kv.create("device").type
    reported["second store"] = error_of(lambda: mx.kv.create("dist_sync"))
    other = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_device_sync")
    reported["store of a Trainer"] = error_of(lambda: other.step(1))
    reported["second reducer"] = error_of(lambda: distributed.KVStoreReducer(world.kv))
    # A DataLoader forks processes that have the store, too.
    data = mx.gluon.data.ArrayDataset(np.ones((6, 3, 6, 6), "float32"))
    for batch in mx.gluon.data.DataLoader(data, batch_size=2, num_workers=1):
        step(mx.gluon.utils.split_and_load(batch, contexts(2)))
    world.report("trainers", reported)
    arrays = {name: p.data(mx.cpu(0)).asnumpy() for name, p in net.collect_params().items()}
    world.save("trainers", **arrays)


def several_trainers(world):
    """Of two nets, in a random order, each with its own optimizer; one takes over from another."""
    world.save("several trainers", **train_with_several(world))


def train_with_several(world=None):
    """The parameters after it. By default all samples are of this process."""
    rank, size = (world.rank, world.size) if world else (0, 1)
    nets = [nn.HybridSequential(prefix=f"net{number}_") for number in range(2)]
    for number, net in enumerate(nets):
        with net.name_scope():
            # A bias before a normalization has no gradient, only rounding, which adam enlarges.
            net.add(nn.Dense(5 - number, in_units=4, use_bias=False), sbn.SyncBatchNorm())
            net.add(nn.Dense(4))
        mx.random.seed(number)
        net.initialize()
        net.hybridize()

    def trainer(number, *optimizer):
        parameters = nets[number].collect_params()
        if world and world.engine == "horovod":
            name = f"{number} {optimizer[0]} "
            return world.hvd.DistributedTrainer(parameters, *optimizer, prefix=name)
        more = {"kvstore": world.kv, "update_on_kvstore": False} if world else {"kvstore": None}
        return mx.gluon.Trainer(parameters, *optimizer, **more)

    of_nets = [trainer(0, "sgd", {"learning_rate": 0.1, "momentum": 0.9}), trainer(1, "adam")]
    # DistributedTrainer divides by the number of processes, too.
    samples = 8 / size if world and world.engine == "horovod" else 8
    random = np.random.RandomState(3)
    for number in range(12):
        if number == 6:
            of_nets[0] = trainer(0, "nag", {"learning_rate": 0.01})
        x = mx.nd.array(np.split(random.standard_normal((8, 4)), size)[rank])
        with mx.autograd.record():
            loss = mx.nd.exp(nets[1](nets[0](x))).sum()
        loss.backward()
        for which in random.permutation(2)[: random.randint(1, 3)]:
            of_nets[which].step(samples)
    return {name: p.data().asnumpy() for net in nets for name, p in net.collect_params().items()}


class Adds(mx.gluon.Trainer):
    """A Trainer that adds gradients in its own way."""

    def _allreduce_grads(self):
        pass


def trainers_that_add_here_alone(world):
    """What the first steps of a layer say about its Trainer."""
    make = mx.gluon.Trainer
    other = nn.Dense(1, in_units=1)
    other.initialize()
    makes = {
        "default": lambda own: make(own, "sgd"),
        "unknown store": lambda own: make(own, "sgd", kvstore=mx.kv.create("horovod")),
        "no store": lambda own: make(own, "sgd", kvstore=None),
        "another way": lambda own: Adds(own, "sgd"),
        "a function of its own": lambda own: vars(make(own, "sgd")).update(_allreduce_grads=print),
        "another net": lambda own: make(other.collect_params(), "sgd"),
        "store": lambda own: make(own, "sgd", kvstore=world.kv, update_on_kvstore=False),
    }
    if world.engine == "horovod":
        makes["Horovod"] = lambda own: world.hvd.DistributedTrainer(own, "sgd")
        optimizer = world.hvd.DistributedOptimizer(mx.optimizer.SGD())
        makes["its optimizer"] = lambda own: make(own, optimizer)
    said, reported = [], {}
    with mock.patch("gluon_syncbn.native.warn", said.append):
        for name, make_trainer in makes.items():
            layer = sbn.SyncBatchNorm(in_channels=2)
            layer.initialize()
            make_trainer(layer.collect_params())
            for _ in range(2):
                backward(layer, [mx.nd.ones((2, 2))])
            mx.nd.waitall()
            reported[name] = said.copy()
            said.clear()
            # It is said once.
            vars(world.reducer).pop("trainer", None)
    world.report("add here alone", reported)


def updates_before(world):
    """The server has an optimizer when the reducer comes."""
    world.kv = mx.kv.create("dist_sync")
    world.rank = world.kv.rank
    _, _, step = net_and_trainer(world, update_on_kvstore=True)
    step()
    reported = error_of(lambda: distributed.KVStoreReducer(world.kv, timeout=20))
    world.report("updates before", reported)


def layers_under_way(world):
    """A step of many layers, none of which has exchanged anything when this returns."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(20):
            net.add(sbn.SyncBatchNorm(in_channels=2))
    net.initialize()
    x = mx.nd.random.normal(shape=(4, 2, 3, 3))
    for _ in range(2):
        backward(net, [x])
    return net


def a_group_that_is_left(world):
    """By rank 1 first, while its last step is under way."""
    world.net = layers_under_way(world)
    if world.rank == 1:
        sbn.set_default_group(None)
    mx.nd.waitall()
    world.report("left", True)


def ends_in_a_step(world):
    world.net = layers_under_way(world)
    world.report("ends", True)


def ends_while_all_hold_the_store(world):
    """References and threads, which keep Python from freeing it."""
    kv = world.kv or mx.kv.create("dist_sync" if world.engine == "none" else "local")
    layers_under_way(world)

    def sleep(seconds):
        while kv.type:
            time.sleep(seconds)

    for seconds in (0.003, 1, 10):
        threading.Thread(target=sleep, args=[seconds], daemon=True).start()
    try:
        kv.itself = kv  # A cycle.
        raise ValueError
    except ValueError as error:
        mx.held = kv, lambda: kv, error
    gc.freeze()
    world.report("held", True)


REMEDY = "make the Trainer with update_on_kvstore=False"
ONE_STORE = "give the Trainer the store itself, as kvstore=kv"
REFUSED = {
    "default": REMEDY,
    "server": REMEDY,
    "compression": "make the Trainer without compression_params",
    "second reducer": "has a KVStoreReducer already",
    "second store": ONE_STORE,
    "store of a Trainer": ONE_STORE,
}


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    return run(
        tmp_path_factory.mktemp("trainers"), 2, ["test_distributed_traps:trains_on_the_store"]
    )


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


def test_several_trainers_on_a_store(pair):
    alone = train_with_several()
    first, second = pair.arrays("several trainers")
    for name, value in first.items():
        assert_same_bits(second[name], value, name)
        np.testing.assert_allclose(value, alone[name], rtol=0, atol=1e-5, err_msg=name)


def several_optimizers_of_a_server(world):
    """Of a store without layers of ours."""
    kv = mx.kv.create("dist_sync")
    world.rank = kv.rank
    nets = [nn.Dense(1, in_units=1) for _ in range(2)]
    for each in nets:
        each.initialize()
    first, second = (mx.gluon.Trainer(each.collect_params(), "sgd", kvstore=kv) for each in nets)
    for each in nets:
        backward(each, [mx.nd.ones((1, 1))])
    first.step(1)
    world.report("several optimizers", error_of(lambda: second.step(1)))


@pytest.mark.long
def test_several_optimizers_of_a_server(tmp_path):
    """The second would run for the first Trainer's parameters, too."""
    topics = ["test_distributed_traps:several_optimizers_of_a_server"]
    for kind, text, _ in run(tmp_path, 2, topics, engine="none").reported("several optimizers"):
        assert kind == "ValueError" and REMEDY.split(" the Trainer ")[1] in text


@pytest.mark.long
def test_a_server_that_updates_already(tmp_path):
    topics = ["test_distributed_traps:updates_before"]
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


@pytest.mark.parametrize(
    "engine, options",
    [
        ("kvstore", {}),
        ("kvstore", {"by_hand": True}),
        ("none", {}),
        pytest.param("horovod", {}, marks=needs_horovod),
    ],
)
def test_a_job_ends_well_whoever_holds_the_store(engine, options, tmp_path):
    """MXNet aborts a process whose store has not been freed when Python ends."""
    topics = ["test_distributed_traps:ends_while_all_hold_the_store"]
    run(tmp_path, 2, topics, engine=engine, **options)


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

    init = broadcast = push = pull = pushpull = _barrier = _call


def test_calls_of_the_store_come_one_after_the_other(monkeypatch):
    """The store notes new keys in tables of its own, without a lock, also those of a Trainer."""
    store = Calls()
    monkeypatch.setattr(limits, "stores", set())
    KVStoreReducer(store)
    names = "init", "broadcast", "push", "pull", "pushpull"
    threads = [threading.Thread(target=getattr(store, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.most == 1
    with pytest.raises(ValueError, match="give the Trainer the store itself"):
        mx.kv.create("dist_sync")


def test_a_store_whose_reducer_has_failed_is_as_before(monkeypatch):
    def fails(self, timeout):
        raise RuntimeError("nobody is there")

    store = Calls()
    before = dict(vars(store))
    monkeypatch.setattr(limits, "stores", set())
    with monkeypatch.context() as patch:
        patch.setattr(KVStoreReducer, "_meet", fails)
        with pytest.raises(RuntimeError, match="nobody is there"):
            KVStoreReducer(store)
    assert vars(store) == before and not limits.stores
    KVStoreReducer(store)
