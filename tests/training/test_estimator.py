"""UnevenBatches, against an Estimator on one device."""

import logging

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.estimator import Estimator
from runs import contexts
from tolerances import assert_same_bits

SAMPLES = 17


def trained(count, batch_size):
    """The net's values and the metrics after two epochs on so many devices, validated each time."""
    devices = contexts(count)
    generator = np.random.default_rng(0)
    x = mx.nd.array(generator.standard_normal((SAMPLES, 5)).astype("float32") + 7)
    label = mx.nd.array(generator.integers(0, 3, SAMPLES).astype("float32"))
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(x, label), batch_size)
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(sbn.SyncBatchNorm(in_channels=5), nn.Dense(3, in_units=5))
    net.initialize(mx.init.Xavier(), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    estimator = Estimator(
        net,
        gluon.loss.SoftmaxCrossEntropyLoss(),
        context=devices,
        trainer=trainer,
        batch_processor=None if count == 1 else sbn.UnevenBatches(),
    )
    estimator.logger.setLevel(logging.ERROR)
    estimator.fit(loader, val_data=loader, epochs=2)
    values = {}
    for name, parameter in net.collect_params().items():
        values[name], *others = [each.asnumpy() for each in parameter.list_data()]
        for other in others:
            assert_same_bits(other, values[name], name)
    return values, [each.get() for each in estimator.train_metrics + estimator.val_metrics]


# Batches of 6, 6 and 5 samples, or of 8, 8 and 1, which leaves some devices idle.
@pytest.mark.parametrize("devices, batch_size", [(4, 6), (4, 8), (2, 8)])
def test_trains_and_validates_as_one_device(devices, batch_size):
    (values, metrics), (expected, of_one) = (trained(n, batch_size) for n in (devices, 1))
    for name, value in expected.items():
        if "running" in name:
            assert_same_bits(values[name], value, name)
        np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for (name, value), (also, other) in zip(metrics, of_one):
        assert name == also
        np.testing.assert_allclose(value, other, rtol=1e-5, err_msg=name)


def test_another_batch_axis():
    data, label = mx.nd.arange(6).reshape((2, 3)), mx.nd.arange(3).reshape((1, 3))
    parts = sbn.UnevenBatches()._get_data_and_label((data, label), contexts(4), batch_axis=1)
    assert [[each.shape for each in part] for part in parts] == [[(2, 1)] * 3, [(1, 1)] * 3]
