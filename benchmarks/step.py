"""Times of training steps of gluoncv's fcn_resnet50 with SyncBatchNorm, fused and not, and with
nn.BatchNorm, interleaved."""

import resource
import time

import gluon_syncbn as sbn
import mxnet as mx
from mxnet import autograd, gluon

from harness import interleave

KINDS = ["fused", "block", "BatchNorm"]
BATCH, SIZE = 4, 96  # images of a process, and their height and width


def step_times(rounds, count, resized, store):
    """{kind: the seconds of each round and the processor's}. With a KVStore only on rank 0."""
    if store:
        store = mx.kv.create(store)
        sbn.set_default_group(sbn.SyncGroup(store=sbn.distributed.KVStoreReducer(store)))
    steps = {kind: TrainingStep(kind, count, resized, store) for kind in KINDS}
    rows = interleave(steps, rounds)
    return None if store and store.rank else rows


class TrainingStep:
    """A training step of fcn_resnet50. Returns the wall-clock seconds, and the processor time of
    all threads.

    `resized`: whether the net's maps are resized to the images, which are 8 times as large. MXNet's
    gradient of BilinearResize2D is added within `omp critical`, one lock for the process.
    """

    def __init__(self, kind, count, resized, store):
        from gluoncv.loss import MixSoftmaxCrossEntropyLoss
        from gluoncv.model_zoo.segbase import get_segmentation_model

        contexts = [mx.cpu(i) for i in range(count)]
        mx.random.seed(0)
        self._net = get_segmentation_model(
            "fcn",
            dataset="pascal_voc",
            backbone="resnet50",
            pretrained_base=False,
            base_size=SIZE,
            crop_size=SIZE,
            norm_layer=sbn.SyncBatchNorm if kind == "block" else gluon.nn.BatchNorm,
        )
        self._net.initialize(mx.init.Xavier(), ctx=contexts, force_reinit=True)
        if kind == "fused":
            sbn.convert_sync_batchnorm(self._net, fuse=True)
        self._net.hybridize(static_alloc=True)
        self._loss = MixSoftmaxCrossEntropyLoss()  # cannot be hybridized
        self._trainer = gluon.Trainer(
            self._net.collect_params(),
            "sgd",
            {"learning_rate": 1e-3, "momentum": 0.9, "wd": 1e-4},
            kvstore=store or "device",
            update_on_kvstore=False,
        )
        side = SIZE if resized else SIZE // 8
        # Resizing maps to their own size takes no lock.
        self._net._up_kwargs = {"height": side, "width": side}
        self._batches = [
            (
                mx.nd.random.normal(shape=(BATCH // count, 3, SIZE, SIZE), ctx=context),
                mx.nd.random.randint(0, 21, shape=(BATCH // count, side, side), ctx=context),
            )
            for context in contexts
        ]

    def __call__(self):
        start, used = time.perf_counter(), _user_seconds()
        with autograd.record():
            losses = [self._loss(*self._net(x), labels) for x, labels in self._batches]
        autograd.backward(losses)
        self._trainer.step(BATCH)
        mx.nd.waitall()
        return time.perf_counter() - start, _user_seconds() - used


def _user_seconds():
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime
