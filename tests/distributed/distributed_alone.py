"""What a process may do alone with a net between the steps of a training."""

import copy
import os

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from distributed_worker import backward
from mxnet.gluon import nn
from runs import MODES, contexts


class Twice(mx.gluon.HybridBlock):
    """Calls one layer twice, the second branch first in the order of the graph."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first, self.second = nn.Dense(4, in_units=4), nn.Dense(4, in_units=4)
            self.shared = sbn.SyncBatchNorm(in_channels=4)

    def hybrid_forward(self, F, x):
        first = self.shared(self.first(x))
        return self.shared(self.second(x)) * 2 + first


def twice():
    net = Twice()
    net.initialize()
    return net


def once():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4, in_units=4), sbn.SyncBatchNorm(in_channels=4))
        net.add(nn.Dense(4, in_units=4), nn.BatchNorm(in_channels=4))
    net.initialize()
    return sbn.convert_sync_batchnorm(net)


def from_a_file(path):
    """A graph of stock operators, in which layers are put."""
    net = once()
    sbn.export(net, path, input_shape=(2, 4))
    net = mx.gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")
    return sbn.convert_sync_batchnorm(net)


NETS = {"once": lambda path: once(), "twice": lambda path: twice(), "file": from_a_file}
SHARDS = 4


def train(net, places, mine, between):
    """The parameters after each step, on `mine` of the shards. between(step): called after it."""
    random = np.random.RandomState(7)
    net.collect_params().reset_ctx(places)
    net.hybridize()
    parameters = {p.name: p for p in net.collect_params().values()}
    for _, parameter in sorted(parameters.items()):
        shape = parameter.data(places[0]).shape
        parameter.set_data(mx.nd.array(random.uniform(0.5, 1.5, shape)))
    found = []
    for step in range(12):
        shards = [mx.nd.array(random.normal(size=(3, 4))) for _ in range(SHARDS)]
        backward(net, [x.as_in_context(place) for x, place in zip(shards[mine], places)])
        mx.nd.waitall()
        found.append({name: p.data(places[0]).asnumpy() for name, p in parameters.items()})
        between(step)
    return {name: np.stack([step[name] for step in found]) for name in found[0]}


def trained_among_other_things(world):
    """Each process does other things between the steps, none of which changes the training."""
    devices = SHARDS // world.size
    mine = slice(world.rank * devices, (world.rank + 1) * devices)
    seed = int(os.environ.get("GLUON_SYNCBN_TEST_SEED", "0"))
    paths = {name: str(world.folder / f"{name}-{world.rank}") for name in NETS}
    # All before the first copy, as all processes have to make layers in the same order.
    nets = {name: make(paths[name]) for name, make in NETS.items()}
    for name, net in nets.items():
        random = np.random.RandomState([seed, world.rank, len(name)])
        more = other_things(net, contexts(devices), random, paths[name], name == "twice")
        done = []

        def between(step, done=done, more=more, random=random, name=name):
            for thing in random.choice(sorted(more), random.randint(3), replace=False):
                done.append([step, str(thing)])
                # Before, so that it can be read where the processes wait.
                world.report(f"among {name}", [seed, done])
                more[thing]()

        world.save(f"among {name}", **train(net, contexts(devices), mine, between))


def other_things(net, places, random, path, calls_twice):
    """What a process may do alone with a net, by name."""
    x = mx.nd.ones((2, 4))
    modes = [mode for mode in MODES.values() if mode is not None]
    compiled = {}

    def compile(block):
        nonlocal compiled
        mode = modes[random.randint(len(modes))]
        if block is net:
            compiled = mode
        block.hybridize(**mode)

    def evaluate():
        net.hybridize(False)
        net(x) if isinstance(net, mx.gluon.SymbolBlock) else net.summary(x)
        net.hybridize(**compiled)

    def copied():
        net.hybridize(False)  # MXNet cannot copy what is compiled.
        copy.deepcopy(net)(x)
        net.hybridize(**compiled)

    def wrap():
        wrapper = nn.HybridSequential()
        wrapper.add(net, nn.Activation("tanh"))
        compile(wrapper)
        wrapper(x)
        wrapper.hybridize(False)  # The net keeps it, so what it compiled could not be copied.
        net.hybridize(**compiled)

    def revert():
        sbn.revert_sync_batchnorm(net)
        net(x)
        sbn.convert_sync_batchnorm(net)

    def move():
        for where in (mx.cpu(3), places):
            net.collect_params().reset_ctx(where)

    def files():
        net.collect_params().save(path)
        net.collect_params().load(path, ctx=places)

    things = {
        "trace": lambda: net(mx.sym.var("data")),
        "compile": lambda: compile(net),
        "export": lambda: sbn.export(net, path, input_shape=(2, 4)),
        "cast": lambda: [net.cast(dtype) for dtype in ("float64", "float32")],
    }
    for thing in (evaluate, copied, wrap, revert, move, files):
        things[thing.__name__] = thing
    if not calls_twice:
        # Graphs number the calls of a layer that is called several times, and blocks do not.
        things["do not compile"] = lambda: net.hybridize(False)
    return things
