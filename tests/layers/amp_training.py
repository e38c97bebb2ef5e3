"""Trains a small net under ``amp.init``, which affects the whole process, and prints the results as
JSON. Usage: amp_training.py DTYPE. test_amp.py starts it."""

import json
import re
import sys

# Imported before amp.init, as in most scripts, or after it.
if "--late" not in sys.argv:
    import gluon_syncbn as sbn

import mxnet as mx
import numpy as np
from dtypes import BFLOAT16
from mxnet import autograd, gluon
from mxnet.contrib import amp
from mxnet.gluon import nn
from runs import MODES, contexts, hybridize, shards

DTYPE = sys.argv[1]
# MXNet's convolutions do not support float16 on the CPU, so other operators replace them.
amp.init(DTYPE, target_precision_ops=["Pooling"] if DTYPE == "float16" else None)

if "--late" in sys.argv:
    import gluon_syncbn as sbn

NORMS = {"ours": sbn.SyncBatchNorm, "theirs": nn.BatchNorm}


def net_of(norm):
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(6, 3, in_channels=3), nn.AvgPool2D(), NORMS[norm](in_channels=6))
        net.add(nn.Activation("relu"), nn.GlobalAvgPool2D(), NORMS[norm](in_channels=6))
        net.add(nn.Flatten())
    return net


def type_name(dtype):
    return "bfloat16" if dtype == BFLOAT16 else np.dtype(dtype).name


def train(norm, mode, devices, sizes, steps=40):
    net = net_of(norm)
    net.initialize(mx.init.Xavier(), ctx=devices)
    hybridize(net, mode)
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.3}, update_on_kvstore=False
    )
    amp.init_trainer(trainer)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 6, 12).astype("float32")
    # The class is the brightest channel.
    x = generator.standard_normal((12, 3, 12, 12)) + labels[:, None, None, None] * [[[[1]]]]
    xs = shards(x.astype("float32"), sizes, devices)
    targets = shards(labels, sizes, devices)
    losses, scales = [], []
    for _ in range(steps):
        with autograd.record():
            ys = [net(x) for x in xs]
            # Not in float16, in which MXNet's softmax is inaccurate.
            logits = [mx.nd.amp_cast(y, dtype="float32") for y in ys]
            parts = [loss_of(y, target).sum() for y, target in zip(logits, targets)]
            with amp.scale_loss(parts, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(len(x))
        losses.append(sum(float(part.asscalar()) for part in parts) / len(x))
        scales.append(trainer._amp_loss_scaler.loss_scale)
    return {
        "losses": losses,
        "scales": scales,
        "output": type_name(ys[0].dtype),
        "inside": inside(net) if mode == "hybrid" else None,
        "parameters": sorted({type_name(p.data(devices[0]).dtype) for p in parameters(net)}),
        "finite": all(np.isfinite(p.data(devices[0]).asnumpy()).all() for p in parameters(net)),
    }


def parameters(net):
    return net.collect_params().values()


def inside(net):
    """The output dtypes of the two normalizations in the graph."""
    internals = net(mx.sym.var("data")).get_internals()
    names = internals.list_outputs()
    types = internals.infer_type(data="float32")[1]
    return [type_name(t) for name, t in zip(names, types) if re.search("norm._fwd_output$", name)]


def main():
    results = {}
    for mode in MODES:
        results[f"ours {mode}"] = train("ours", mode, contexts(2), (4, 8))
    results["ours whole"] = train("ours", "hybrid", contexts(1), (12,))
    results["theirs whole"] = train("theirs", "hybrid", contexts(1), (12,))
    json.dump(results, sys.stdout)


main()
