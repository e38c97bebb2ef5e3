"""The guide's recipes for several processes."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from distributed_bits import SIZES, data
from mxnet import autograd, gluon
from mxnet.gluon import nn
from recipes import recipe
from runs import contexts, run

SHAPE = 16, 3, 4, 5
SAMPLES = 26  # Of the data set. Four processes get 7, 7, 6 and 6.


def samples_of(rank):
    """Those of a rank of four, in the batch."""
    start = sum(SIZES[4][:rank])
    return list(range(start, start + SIZES[4][rank]))


def one_layer(samples):
    """What comes out of a layer on one device for these samples."""
    layer = sbn.SyncBatchNorm(in_channels=SHAPE[1])
    layer.initialize(ctx=contexts(1))
    x, dy = (data(SHAPE, "float32", seed)[samples] for seed in (5, 6))
    return run(layer, x, dy, [len(samples)], contexts(1), steps=2)._asdict()


def batch(rank, step):
    return np.random.default_rng([rank, step]).normal(rank, 1, (2 + rank, 3)).astype("float32")


# What the workers run.


def groups_of_any_ranks(world):
    ranks = recipe("guide.md", "class Ranks", store=world.reducer)["even_or_odd"]
    world.save("even or odd", **one_layer(samples_of(world.rank)))
    # A process has a batch more than the one of the rank before.
    layer = sbn.SyncBatchNorm(in_channels=3, momentum=None)
    layer.initialize()
    batches = [mx.nd.array(batch(world.rank, step)) for step in range(world.rank + 1)]
    for x in sbn.distributed.join(batches, group=world.group):
        with autograd.train_mode():
            layer(x).wait_to_read()
    world.report("ranks", list(ranks))
    world.save("even or odd, joined", mean=layer.running_mean.data().asnumpy())
    sbn.set_default_group(world.group)


def bad_batches(world):
    step_if_finite = recipe("guide.md", "def step_if_finite")["step_if_finite"]

    def trained(batches):
        net = nn.HybridSequential()
        net.add(sbn.SyncBatchNorm(in_channels=3), nn.Dense(4, in_units=3))
        net.add(sbn.SyncBatchNorm(in_channels=4))
        mx.random.seed(0)
        net.initialize(mx.init.Xavier())
        # Gradients are added in this process alone: each is compared with itself.
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None)
        stepped = []
        for number, kind in enumerate(batches):
            x = mx.nd.array(batch(world.rank, len(kind)))
            # In one process alone.
            bad = np.nan if world.rank == number % world.size else 1
            x, factor = (x * bad, 1) if kind == "NaN in x" else (x, bad if kind == "loss" else 1)

            def forward(x=x, factor=factor):
                return [(net(x) ** 2).sum(axis=1) * factor]

            stepped.append(step_if_finite(forward, net, trainer, len(x), world.reducer))
        return stepped, [each.data().asnumpy() for each in net.collect_params().values()]

    stepped, values = trained(["good", "loss", "NaN in x", "loss", "fine too"])
    world.report("stepped", stepped)
    _, expected = trained(["good", "fine too"])
    for name, arrays in {"with bad batches": values, "without": expected}.items():
        world.save(name, **{str(number): array for number, array in enumerate(arrays)})


def parts_of_a_data_set(world):
    given = {"data": gluon.data.ArrayDataset(np.arange(SAMPLES)), "store": world.reducer}
    steps = recipe("guide.md", "data.shard(", **given, trainer=None)["steps"]
    found = [
        [steps.batch_size, [] if steps.absent else x.asnumpy().astype(int).tolist()] for x in steps
    ]
    world.report("parts", found)
