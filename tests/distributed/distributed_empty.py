"""What processes do in test_distributed_empty.py."""

import contextlib
import time

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from distributed_worker import error_of
from mxnet import autograd
from mxnet.gluon import nn
from runs import MODES, contexts, hybridize

CHANNELS, STEPS = 3, 6
SEEDS = range(len(MODES) * 2)
# (what is done, the ranks that have samples), nothing of which waits.
SEQUENCE = [
    ("step", [0, 1]),
    ("bare step", [0, 1]),
    ("measurement", [0, 1]),
    ("step", [0]),
    ("skipped step", [0, 1]),
    ("bare step", [0, 1]),
    ("step", [0]),
    ("step", [1]),
    ("pass by pass", [0, 1]),
    ("pass by pass", [0]),
]
PLACES = ["while recording", "before backward", "after backward", "first step", "within", "zero"]


class Net(nn.HybridBlock):
    """Layers that keep samples apart, in random order; one is called twice if its net is not."""

    def __init__(self, seed):
        super().__init__(prefix=f"net{seed}_")
        rng = np.random.default_rng(seed)
        with self.name_scope():
            self.layers = nn.HybridSequential()
            for _ in range(rng.integers(1, 4)):
                arguments = {"axis": rng.choice([1, -1]), "activation": rng.choice([None, "relu"])}
                arguments["momentum"] = None if rng.random() < 0.3 else 0.9
                self.layers.add(sbn.SyncBatchNorm(use_global_stats=rng.random() < 0.2, **arguments))
                self.layers.add(sbn.SyncBatchNorm())
            self.twice = sbn.SyncBatchNorm()

    def hybrid_forward(self, F, x):
        return self.twice(F.tanh(self.twice(self.layers(x))))


def prepared(seed, devices):
    """A net, and the number of devices that it is on."""
    net = Net(seed)
    net.initialize(ctx=devices)
    net(mx.nd.zeros((1, CHANNELS, 2, CHANNELS), ctx=devices[0]))
    hybridize(net, list(MODES)[seed % len(MODES)])
    return net


def batches(seed, workers):
    """For each step the data, and how many samples each process has: all have some in the first."""
    rng = np.random.default_rng([7, seed])
    for number in range(STEPS):
        counts = rng.integers(0, 5, workers) * (rng.random(workers) < 0.6)
        counts = counts + (number == 0)
        counts[rng.integers(workers)] += 1
        yield rng.normal(1, 2, (sum(counts), CHANNELS, 2, CHANNELS)).astype("float32"), counts


def step(net, parts, devices):
    """Calls the net for each part. Returns (y, dx) of all."""
    xs = [mx.nd.array(part, ctx=device) for part, device in zip(parts, devices)]
    for x in xs:
        x.attach_grad()
    with autograd.record():
        ys = [net(x) for x in xs]
        losses = [(y * y * y).sum() for y in ys]
    autograd.backward(losses)
    return [np.concatenate([each.asnumpy() for each in of]) for of in (ys, [x.grad for x in xs])]


def values(net):
    """Running statistics of all devices, and gradients, added over them."""
    found = {}
    for name, parameter in net.collect_params().items():
        name = name[len(net.prefix) :]
        if parameter.grad_req == "null":
            found[name] = np.stack([each.asnumpy() for each in parameter.list_data()])
        else:
            found[name] = sum(each.asnumpy() for each in parameter.list_grad())
    return found


class Run:
    """What the processes of these ranks do, or one that has the samples of all. Nothing in it
    waits."""

    def __init__(self, devices, ranks, trainer_of=None):
        self.devices, self.ranks, self.trainer_of = devices, ranks, trainer_of

    def net(self, name, layers=1, **arguments):
        net = nn.HybridSequential(prefix=name)
        with net.name_scope():
            for _ in range(layers):
                net.add(sbn.SyncBatchNorm(in_channels=CHANNELS, **arguments))
                net.add(nn.HybridLambda("tanh"))
        net.initialize(ctx=self.devices)
        return net

    def trainer(self, *nets):
        parameters = mx.gluon.ParameterDict()
        for net in nets:
            parameters.update(net.collect_params())
        return self.trainer_of and self.trainer_of(parameters)

    def within(self, x, trainer, used=True):
        if trainer is None or not used:
            return contextlib.nullcontext()
        return sbn.participants(self.devices if x.size else [], trainer)

    def data(self, *seed, present=(0, 1)):
        x = np.random.default_rng(seed).normal(1, 2, (2, 2, CHANNELS)).astype("float32")
        return x[[rank for rank in self.ranks if rank in present]].reshape(-1, CHANNELS)

    def parts(self, x):
        return mx.gluon.utils.split_and_load(mx.nd.array(x), self.devices) if x.size else []

    @staticmethod
    def statistics(*nets):
        return {
            name: parameter.list_data()[-1].asnumpy()
            for net in nets
            for name, parameter in net.collect_params().items()
            if parameter.grad_req == "null"
        }

    def sequence(self, seed):
        """Steps of one, two or three accumulated passes."""
        passes = 1 + seed % 3
        net = self.net(f"sequence{seed}_", layers=2)
        hybridize(net, list(MODES)[seed % len(MODES)])
        net.collect_params().setattr("grad_req", "add" if passes > 1 else "write")
        trainer = self.trainer(net)
        for number, (what, present) in enumerate(SEQUENCE):
            batches = [self.data(seed, number, i, present=present) for i in range(passes)]
            with self.within(batches[0], trainer, what == "step"):
                with contextlib.ExitStack() as measuring:
                    if what == "measurement":
                        measuring.enter_context(sbn.precise_statistics(net))
                    for x in batches:
                        with self.within(x, trainer, what == "pass by pass"):
                            backward(net, self.parts(x), what != "measurement")
                if trainer and what not in ("measurement", "skipped step"):
                    trainer.step(1)
            net.collect_params().zero_grad()
        return self.statistics(net)

    def measurement(self, seed):
        """Some have more batches than others. Those that have none left join."""
        net = self.net(f"measured{seed}_", layers=2)
        hybridize(net, list(MODES)[seed % len(MODES)])
        counts = np.random.default_rng(seed).integers(1, 5, 2)
        steps = [self.data(seed, n, present=np.flatnonzero(counts > n)) for n in range(max(counts))]
        if len(self.ranks) == 1:
            steps = sbn.distributed.join(steps[: counts[self.ranks[0]]])
        with sbn.precise_statistics(net):
            for x in steps:
                for part in self.parts(x):
                    net(part)
        return self.statistics(net)

    def adversaries(self):
        """One net goes backward in the step of its Trainer, and forward in the one before."""
        first, second = self.net("first_"), self.net("second_")
        trainers = self.trainer(first), self.trainer(second)
        for number in range(4):
            x = self.data(number, present=[0, 1] if number < 2 else [number - 2])
            parts = self.parts(x)
            with self.within(x, trainers[0]):
                with autograd.record():
                    fakes = [second(part * part) for part in parts]
                    losses = [(first(p) ** 2).sum() for p in parts]
                    losses += [(first(fake.detach()) ** 3).sum() for fake in fakes]
                losses and autograd.backward(losses)
                trainers[0] and trainers[0].step(1)
            with self.within(x, trainers[1]):
                with autograd.record():
                    losses = [(first(fake) ** 3).sum() for fake in fakes]
                losses and autograd.backward(losses)
                trainers[1] and trainers[1].step(1)
        return self.statistics(first, second)

    def head(self, place):
        """Rank 1 has no samples for the head in one step."""
        first = sbn.SyncBatchNorm(in_channels=CHANNELS, prefix=f"first {place}_")
        # Called several times, but where there is no step to tell.
        head = self.net(f"head {place}_", momentum=None)
        calls = 1 if place == "first step" else 2
        first.initialize(ctx=self.devices)
        trainer, found = self.trainer(first, head), {}
        for number in range(3):
            here = [0] if number == (place != "first step") else [0, 1]
            here = [rank for rank in self.ranks if rank in here]
            x = mx.nd.array(self.data(number))
            x.attach_grad()

            def absent(at, here=here):
                is_here = not here and at == place.replace("first step", "before backward")
                return sbn.participants([], trainer, head) if is_here else contextlib.nullcontext()

            with contextlib.ExitStack() as within:
                if place == "within" and trainer:
                    within.enter_context(sbn.participants(self.devices, trainer))
                with autograd.record():
                    features = first(x)
                    loss = (features**3).sum()
                    if here or place == "zero":
                        y = features[: 2 * len(here)]
                        for _ in range(calls):
                            y = head(y)
                        loss = loss + (y**3).sum()
                        assert y.shape == (2 * len(here), CHANNELS)
                        # MXNet does not read an array without values.
                        found.update({f"y {number}": y} if here else {})
                    with absent("while recording"):
                        pass
                with absent("before backward"), absent("within"):
                    loss.backward()
                with absent("after backward"):
                    trainer and trainer.step(1)
            found[f"dx {number}"] = x.grad.copy()
        found = {name: value.asnumpy() for name, value in found.items()}
        return {**found, **self.statistics(first, head)}


def backward(net, parts, is_recorded):
    with autograd.record() if is_recorded else contextlib.nullcontext():
        losses = [(net(part) ** 2).sum() for part in parts]
    if is_recorded and losses:
        autograd.backward(losses)


# What the workers run.


def trainer_of(net, world):
    """With a learning rate of 0, so that statistics depend on the data alone."""
    parameters = net.collect_params() if isinstance(net, mx.gluon.Block) else net
    arguments = parameters, "sgd", {"learning_rate": 0.0}
    if world.engine == "horovod":
        return world.hvd.DistributedTrainer(*arguments)
    return mx.gluon.Trainer(*arguments, kvstore=None)


def empty_steps(world):
    for seed in SEEDS:
        count = 1 if world.engine == "horovod" else 1 + seed % 2
        devices = contexts(count)
        net = prepared(seed, devices)
        trainer = trainer_of(net, world)
        for number, (x, counts) in enumerate(batches(seed, world.size)):
            begin = sum(counts[: world.rank])
            mine = x[begin : begin + counts[world.rank]]
            used = devices[: len(mine)]
            found = {}
            with sbn.participants(used, trainer):
                if used:
                    parts = np.array_split(mine, len(used))
                    found["y"], found["dx"] = step(net, parts, used)
                trainer.step(len(x))
            world.save(f"empty {seed} {number}", **found, **values(net))


def sequences(world):
    run = Run(contexts(1), [world.rank], lambda net: trainer_of(net, world))
    for seed in SEEDS:
        run.devices = contexts(1 if world.engine == "horovod" else 1 + seed % 2)
        world.save(f"sequence {seed}", **run.sequence(seed))
        world.save(f"measurement {seed}", **run.measurement(seed))
    run.devices = contexts(1)
    world.save("adversaries", **run.adversaries())
    with mx.util.np_shape(True):  # For arrays without samples.
        for place in PLACES:
            world.save(f"head {place}", **run.head(place))


def first_step_empty(world):
    """Also without a step with samples before."""
    net = sbn.SyncBatchNorm(in_channels=2, prefix="first_")
    net.initialize()
    trainer = trainer_of(net, world)
    with sbn.participants([] if world.rank else [mx.cpu()], trainer):
        if not world.rank:
            step(net, [np.arange(8.0).reshape(4, 2)], [mx.cpu()])
        trainer.step(4)
    world.save("first empty", mean=net.running_mean.data().asnumpy())


def trains(world):
    """As docs/distributed.md says: a forward in inference before the Trainer, after which oneDNN
    has changed the layout of weights. Rank 1 has samples in every third step."""
    from gluoncv.model_zoo import get_model

    mx.random.seed(1)
    net = get_model("resnet18_v1b", pretrained=False, classes=2, norm_layer=sbn.SyncBatchNorm)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net(mx.nd.zeros((1, 3, 32, 32)))
    arguments = net.collect_params(), "sgd", {"learning_rate": 1e-3, "momentum": 0.9}
    if world.engine == "horovod":
        trainer = world.hvd.DistributedTrainer(*arguments)
    else:
        trainer = mx.gluon.Trainer(*arguments, kvstore=world.kv, update_on_kvstore=False)
    for number in range(4):
        x = np.random.default_rng(number).normal(size=(4, 3, 32, 32))
        mine = x if number % 3 else x[world.rank :: 2]
        used = [mx.cpu()] if world.rank == 0 or number % 3 == 0 else []
        with sbn.participants(used, trainer):
            if used:
                step(net, [mine], used)
            trainer.step(4 / (world.size if world.engine == "horovod" else 1))
    world.save("trained", **{name: p.data().asnumpy() for name, p in net.collect_params().items()})


def nobody_has_samples(world):
    net = sbn.SyncBatchNorm(in_channels=2, group=sbn.SyncGroup(store=world.reducer, timeout=20))
    net.initialize()
    trainer = trainer_of(net, world)

    def enter():
        with sbn.participants([], trainer):
            raise AssertionError

    world.report("nobody has samples", error_of(enter))


def none_to_measure(world):
    """In one process, which goes on after the error."""
    net = sbn.SyncBatchNorm(in_channels=2)
    net.initialize()
    trainer = trainer_of(net, world)

    def measure():
        with sbn.precise_statistics(net):
            with sbn.participants([] if world.rank else [mx.cpu()], trainer):
                net(mx.nd.ones((2, 2)))

    world.report("none to measure", error_of(measure))
    while not (world.folder / "none to measure-0.json").exists():
        time.sleep(0.02)
