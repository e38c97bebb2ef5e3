"""Workers that train a Module."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from distributed_worker import error_of

BATCH, RATE = 8, 0.1


def train(symbol, x, y, optimizer, kvstore):
    """A few steps of a Module. Returns its parameters."""
    module = mx.mod.Module(symbol, context=mx.cpu())
    module.bind([("data", x.shape[1:])], [("softmax_label", y.shape[1:])])
    mx.random.seed(0)
    np.random.seed(0)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore=kvstore, optimizer=optimizer)
    for data, label in zip(x, y):
        module.forward_backward(mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(label)]))
        module.update()
    mx.nd.waitall()
    arguments, auxiliary = module.get_params()
    return {name: array.asnumpy() for name, array in {**arguments, **auxiliary}.items()}


def symbol():
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="first")
    x = mx.sym.BatchNorm(x, fix_gamma=False, name="norm")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=2, name="last"), name="softmax")


def batches():
    rng = np.random.default_rng(0)
    return rng.normal(1, 2, (4, BATCH, 4)), rng.integers(0, 2, (4, BATCH)).astype(float)


def sgd(samples=BATCH):
    return mx.optimizer.create("sgd", learning_rate=RATE, rescale_grad=1 / samples)


# What the workers run.


def trains(world):
    x, y = (array[:, world.rank :: world.size] for array in batches())
    converted = sbn.convert_sync_batchnorm(symbol())
    if world.engine == "horovod":
        # Its gradients are means over the processes.
        optimizer = world.hvd.DistributedOptimizer(sgd(BATCH / world.size))
        world.save("module", **train(converted, x, y, optimizer, None))
    else:
        world.report("module", error_of(lambda: train(converted, x, y, sgd(), world.kv)))
