"""The net on its devices: training steps, predictions, and its state for a checkpoint."""

import collections
import tempfile
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from checkpoint import Checkpoint, CheckpointError, replacing
from data import pixel_weights
from model import SeededHeNormal, SegmentationLoss, SegmentationNet
from options import UsageError

# How many steps the devices may lag behind Python: enough that none waits for the next batch.
STEPS_IN_FLIGHT = 2


def normalization(name, contexts):
    """(norm_layer, norm_kwargs) of --norm."""
    if name == "sync":
        try:
            from gluon_syncbn import SyncBatchNorm
        except ModuleNotFoundError as error:
            if error.name != "gluon_syncbn":
                raise
            raise UsageError(
                "--norm sync needs gluon_syncbn, which is not installed: run pip install -e . in "
                "the root of the repository, or take make train"
            ) from None
        return SyncBatchNorm, {}
    if name == "builtin":
        return gluon.contrib.nn.SyncBatchNorm, {"num_devices": len(contexts)}
    return gluon.nn.BatchNorm, {}


class SegmentationTrainer:
    """Ordinary Gluon training on several devices: the batch is split, each device calls the net."""

    def __init__(self, options, contexts, classes):
        self.contexts = contexts
        self._classes = classes
        self._background_weight = options.background_weight
        self._rate, self._warmup, self._steps = options.lr, options.warmup, options.steps
        self._norm = options.norm
        norm_layer, norm_kwargs = normalization(options.norm, contexts)
        self.net = SegmentationNet(classes, norm_layer, norm_kwargs)
        self.net.initialize(SeededHeNormal(options.seed), ctx=contexts)
        self.net.hybridize(static_alloc=True)
        self._loss = SegmentationLoss()
        self._loss.hybridize(static_alloc=True)
        self._trainer = gluon.Trainer(
            self.net.collect_params(), "adam", kvstore="device", update_on_kvstore=False
        )
        self._in_flight = collections.deque()

    def learning_rate(self, step):
        """Linear warm-up times polynomial decay, to 1% at the end."""
        warmup = min(1, (step + 1) / self._warmup) if self._warmup else 1
        return self._rate * warmup * (0.01 + 0.99 * (1 - step / self._steps) ** 0.9)

    def step(self, step, images, labels):
        """Start the training step; return the losses of earlier steps that are known by now."""
        weights = pixel_weights(labels, self._classes, self._background_weight)
        shares = zip(
            self._split(images), self._split(labels.astype(np.int32)), self._split(weights)
        )
        with autograd.record():
            losses = [self._loss(self.net(x), label, weight) for x, label, weight in shares]
        autograd.backward(losses)
        self._trainer.set_learning_rate(self.learning_rate(step))
        self._trainer.step(1)  # the weights have divided the loss by the batch already
        self._in_flight.append(losses)
        return self._finished(STEPS_IN_FLIGHT)

    def finish(self):
        """Wait for all steps; return the losses that `step` has not returned."""
        return self._finished(0)

    def _finished(self, still_in_flight):
        done = []
        while len(self._in_flight) > still_in_flight:
            done.append(sum(float(loss.asscalar()) for loss in self._in_flight.popleft()))
        return done

    def _split(self, array, contexts=None):
        contexts = contexts or self.contexts
        array = mx.nd.array(array, dtype=array.dtype)
        return gluon.utils.split_and_load(array, contexts, even_split=False)

    def predict(self, batches):
        """Yield (labels, predicted classes) of each batch (images, labels), one batch late."""
        # Unsynchronized layers keep other running statistics on each device, and a checkpoint's
        # parameters are those of the first.
        contexts = self.contexts[:1] if self._norm == "local" else self.contexts
        before = None
        for images, labels in batches:
            shares = self._split(images, contexts[: len(images)])
            outputs = [self.net(x).argmax(axis=1) for x in shares]
            if before:
                yield self._fetched(*before)
            before = labels, outputs
        if before:
            yield self._fetched(*before)

    @staticmethod
    def _fetched(labels, outputs):
        return labels, np.concatenate([y.asnumpy() for y in outputs]).astype(np.uint8)

    def checkpoint(self, step, config, progress):
        """The state after `step` steps. Wait for them with `finish` first."""
        arrays = {}
        for name, parameter in self._parameters():
            for i, context in enumerate(self._own_contexts(parameter)):
                prefix = f"statistics:{i}:" if i else "parameter:"
                arrays[prefix + name] = parameter.data(context).asnumpy()
        trainer = _written(self._trainer.save_states)
        return Checkpoint(step, config, progress, arrays, trainer)

    def restore(self, checkpoint):
        """Take up the state of a checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trainer")
            path.write_bytes(checkpoint.trainer)
            # First, because the trainer starts by giving all devices the first one's parameters.
            self._trainer.load_states(str(path))
        for name, parameter in self._parameters():
            for i, context in enumerate(self._own_contexts(parameter)):
                prefix = f"statistics:{i}:" if i else "parameter:"
                array = checkpoint.arrays.get(prefix + name)
                if array is None or array.shape != parameter.shape:
                    came = "none" if array is None else f"one of shape {array.shape}"
                    raise CheckpointError(
                        f"the checkpoint should have an array {prefix}{name} of shape "
                        f"{parameter.shape}, but has {came}: it is of another net; continue with "
                        "the version of this example that wrote it"
                    )
                if i:
                    parameter.data(context)[:] = array
                else:
                    parameter.set_data(mx.nd.array(array, dtype=array.dtype))

    def save_parameters(self, path):
        """Write a file for `SegmentationNet.load_parameters`, with the first device's values."""
        first = self.contexts[0]
        values = {name: parameter.data(first) for name, parameter in self._parameters()}
        with replacing(path) as file:
            file.write(_written(lambda name: mx.nd.save(name, values)))

    def _parameters(self):
        return self.net._collect_params_with_prefix().items()

    def _own_contexts(self, parameter):
        """The contexts on which a parameter may have values of its own."""
        return self.contexts if parameter.grad_req == "null" else self.contexts[:1]


def _written(save):
    """The bytes that `save(file name)` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        save(str(path))
        return path.read_bytes()
