"""Random nets with batch normalization of every kind, also in branches that only residuals reach.

All values in a net have the shape SHAPE, so everything can follow everything, on any axis.
"""

import random

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from devices import KIND
from mxnet.gluon import HybridBlock, nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from runs import STOCK_RELU

CHANNELS = 3
SHAPE = (4, CHANNELS, CHANNELS, CHANNELS)
DTYPES = ("float32", "float32", "float32", "float64")


def norm(rng, stock):
    """A layer with random settings."""
    settings = {
        "axis": rng.choice([1, 1, 1, 2, 3, -1]),
        "epsilon": rng.choice([1e-5, 1e-3, 0.1]),
        "scale": rng.random() < 0.8,
        "center": rng.random() < 0.8,
        "use_global_stats": rng.random() < 0.2,
        "momentum": rng.choice([0.9, 0.5, 0.0, 1.0]),
        "in_channels": CHANNELS,
    }
    kind = rng.randrange(10)
    if stock and kind == 0:
        return nn.BatchNorm(**settings)
    if stock and kind == 1 and KIND == "cpu":  # MXNet has it on the CPU alone
        return STOCK_RELU(**{**settings, "axis": 1})
    if stock and kind == 2:
        del settings["axis"]
        return ContribSyncBatchNorm(num_devices=1, **settings)
    settings["momentum"] = rng.choice([settings["momentum"]] * 3 + [None])
    settings["running_variance"] = rng.choice(["biased", "unbiased"])
    if kind == 3:
        return sbn.SyncBatchNormReLU(**settings)
    activation = rng.choice([None, None, "relu", "leaky_relu"])
    if activation == "leaky_relu":
        settings.update(slope=rng.choice([0.01, 0.3, 1.0]), inplace=rng.random() < 0.3)
    settings["activation"] = activation
    if kind == 4:
        return sbn.VirtualBatchNorm(rng.randrange(1, 4), **settings)
    return sbn.SyncBatchNorm(**settings)


class RandomNet(HybridBlock):
    """A net of random operations; `steps` are (name, arguments, what it is called with)."""

    def __init__(self, seed, training=False):
        super().__init__(prefix="net_")
        rng = random.Random(seed)
        self.dtype = "float32" if training else rng.choice(DTYPES)
        self.inputs = rng.choice([1, 1, 2])
        self.steps, values, norms = [], self.inputs, []
        # Of a gradient that BlockGrad stops MXNet adds the zeros or not, in another order then.
        known = sorted(OPERATIONS.keys() - ({"stopped"} if training else set()))
        free = list(range(values))
        with self.name_scope():
            for _ in range(rng.randrange(3, 24)):
                # Values that nothing takes yet make branches, and any value several consumers.
                given = [
                    rng.choice(free) if free and rng.random() < 0.6 else rng.randrange(values)
                    for _ in range(2)
                ]
                name = rng.choice(["norm"] * 8 + ["add"] * 6 + ["relu", "layer", *known])
                if name == "norm":
                    if not norms or rng.random() < 0.8:
                        norms.append(self._add(norm(rng, stock=self.dtype == "float32")))
                    name = rng.choice(norms)
                    layer = getattr(self, name)
                    ours = isinstance(layer, sbn.SyncBatchNorm)
                    takes_two = ours and not layer._own_settings["inplace"]
                    given = given[: 2 if takes_two and rng.random() < 0.5 else 1]
                elif name == "layer":
                    name = self._add(
                        rng.choice(
                            [
                                nn.Conv2D(CHANNELS, 3, padding=1, in_channels=CHANNELS),
                                nn.Conv2D(CHANNELS, 1, use_bias=False, in_channels=CHANNELS),
                                nn.Dense(CHANNELS, flatten=False, in_units=CHANNELS),
                            ]
                        )
                    )
                    given = given[:1]
                step = name, given if name in self._children else given[: arity(name)]
                if training and name in OPERATIONS and step in self.steps:
                    continue  # MXNet computes it once and adds gradients in another order.
                self.steps.append(step)
                free = [number for number in free if number not in self.steps[-1][1]] + [values]
                values += 1
        count = rng.choice([1, 1, 2, 3])
        self.outputs = sorted({values - 1, *(rng.randrange(values) for _ in range(count - 1))})
        # What no output needs is left out.
        needed = set(self.outputs)
        for number in reversed(range(len(self.steps))):
            name, given = self.steps[number]
            if number + self.inputs in needed:
                needed.update(given)
            else:
                self.steps[number] = None
        for name in set(self._children) - {step[0] for step in self.steps if step}:
            del self._children[name], vars(self)[name]

    def _add(self, layer):
        name = f"layer{len(self.steps)}"
        setattr(self, name, layer)
        return name

    def hybrid_forward(self, F, *values):
        values = list(values)
        for step in self.steps:
            if step is None:
                values.append(None)
                continue
            name, given = step
            call = OPERATIONS.get(name)
            arguments = [values[number] for number in given]
            values.append(call(F, *arguments) if call else getattr(self, name)(*arguments))
        # An input that is an output has no node of its own.
        outputs = [1 * values[n] if n < self.inputs else values[n] for n in self.outputs]
        return outputs if len(outputs) > 1 else outputs[0]


OPERATIONS = {
    "add": lambda F, x, y: x + y,
    "broadcast_add": lambda F, x, y: F.broadcast_add(x, y),
    "times": lambda F, x, y: F.tanh(x) * y,
    "stopped": lambda F, x, y: F.BlockGrad(x) + y,
    "relu": lambda F, x: F.relu(x),
    "activation": lambda F, x: F.Activation(x, act_type="relu"),
    "leaky": lambda F, x: F.LeakyReLU(x, slope=0.2),
    "elu": lambda F, x: F.LeakyReLU(x, act_type="elu"),
    "double": lambda F, x: 2 * x,
    "transposed": lambda F, x: F.transpose(x, axes=(0, 1, 3, 2)),
    "swapped": lambda F, x: F.SwapAxis(x, dim1=2, dim2=2),
    "dropout": lambda F, x: F.Dropout(x, p=0.3),
}


def arity(name):
    return OPERATIONS[name].__code__.co_argcount - 1


def make(seed, training=False):
    """The net of a seed with values, and its inputs as NumPy arrays."""
    net = RandomNet(seed, training)
    net.initialize()
    rng = np.random.default_rng(seed)
    for name, parameter in net.collect_params().items():
        if "num_batches" in name:
            continue
        low = 0.3 if name.endswith("var") else -1
        value = rng.uniform(low, 1, parameter.shape)
        if name.endswith("gamma"):
            value[rng.random(value.shape) < 0.1] = 1e-4
        parameter.set_data(mx.nd.array(value))
    net.cast(net.dtype)
    return net, [rng.standard_normal(SHAPE).astype(net.dtype) for _ in range(net.inputs)]
