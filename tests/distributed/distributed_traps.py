"""What goes wrong with a KVStore where nothing is done about it."""

from unittest import mock

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from gluon_syncbn import distributed
from distributed_worker import backward, error_of
from mxnet.gluon import nn
from runs import contexts


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


def trainers(world):
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
    reported["one store"] = trainer._kvstore is world.kv
    reported["local store"] = mx.kv.create("device").type
    reported["second store"] = error_of(lambda: mx.kv.create("dist_sync"))
    other = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_device_sync")
    reported["store of a Trainer"] = error_of(lambda: other.step(1))
    _, _, second = net_and_trainer(world, update_on_kvstore=False)
    reported["second trainer"] = error_of(second)
    reported["second reducer"] = error_of(lambda: distributed.KVStoreReducer(world.kv))
    # A DataLoader forks processes that have the store, too.
    data = mx.gluon.data.ArrayDataset(np.ones((6, 3, 6, 6), "float32"))
    for batch in mx.gluon.data.DataLoader(data, batch_size=2, num_workers=1):
        step(mx.gluon.utils.split_and_load(batch, contexts(2)))
    world.report("trainers", reported)
    arrays = {name: p.data(mx.cpu(0)).asnumpy() for name, p in net.collect_params().items()}
    world.save("trainers", **arrays)


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
