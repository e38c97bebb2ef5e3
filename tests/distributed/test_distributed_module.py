"""Modules in several processes."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from distributed_cluster import needs_horovod
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


@needs_horovod
def test_with_horovod_it_is_one_module_with_the_whole_batch(horovod):
    x, y = batches()
    expected = train(symbol(), x, y, sgd(), None)
    for found in horovod.arrays("module"):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_kvstore_with_a_reducer_takes_no_names(shared):
    for kind, text, _ in shared.reported("module"):
        assert kind == "ValueError" and "A Module in several processes needs Horovod" in text
