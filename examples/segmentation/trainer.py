"""The net on its devices: training steps, predictions, and its state for a checkpoint."""

import collections
import tempfile
import zlib
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from checkpoint import Checkpoint, CheckpointError, replacing
from data import pixel_counts, pixel_weights
from model import SeededHeNormal, SegmentationLoss, SegmentationNet
from options import UsageError
from workers import Alone

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
    """Ordinary Gluon training on several devices: the batch is split, each device calls the net.

    `contexts` are those of this process. In a `team` of several, each has as many, and they stand
    in the order of ranks; the Trainer adds the gradients of all.
    """

    def __init__(self, options, contexts, classes, team=None):
        self.contexts = contexts
        self._team = team or Alone()
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
            self.net.collect_params(), "adam", kvstore=self._team.kvstore, update_on_kvstore=False
        )
        self._in_flight = collections.deque()

    def learning_rate(self, step):
        """Linear warm-up times polynomial decay, to 1% at the end."""
        warmup = min(1, (step + 1) / self._warmup) if self._warmup else 1
        return self._rate * warmup * (0.01 + 0.99 * (1 - step / self._steps) ** 0.9)

    def own_share(self, indices):
        """The part of a batch that the devices of this process take."""
        own, rank = len(self.contexts), self._team.rank
        each, more = divmod(len(indices), own * self._team.size)

        def start(device):
            return device * each + min(device, more)

        return indices[start(rank * own) : start((rank + 1) * own)]

    def own_share_to_predict(self, indices):
        """The same for `predict`."""
        # Unsynchronized layers keep other running statistics on each device, and a checkpoint's
        # parameters are those of the first.
        if self._norm == "local":
            return indices if self._team.rank == 0 else indices[:0]
        return self.own_share(indices)

    def step(self, step, images, labels, counts=None):
        """Start the training step; return the losses of earlier steps that are known by now.

        The loss is the mean over the pixels of the whole batch, whose `pixel_counts` are `counts`;
        `images` and `labels` are this process's part of it. So are the losses returned: the sum of
        all workers' is the loss.
        """
        if counts is None:
            counts = pixel_counts(labels, self._classes)
        weights = pixel_weights(labels, self._classes, self._background_weight, counts)
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
        """The state after `step` steps. Wait for them with `finish` first. All workers call it."""
        trained = {
            "parameter:" + name: parameter.data(self.contexts[0]).asnumpy()
            for name, parameter in self._parameters()
            if parameter.grad_req != "null"
        }
        arrays = {**trained, **self._gather_statistics(trained.values())}
        trainer = _written(self._trainer.save_states)
        return Checkpoint(step, config, progress, arrays, trainer)

    def _gather_statistics(self, trained):
        """The running statistics of all devices of all workers, by their names in a checkpoint."""
        checksum = 0
        for array in trained:
            checksum = zlib.crc32(array, checksum)
        statistics = [(n, p) for n, p in self._parameters() if p.grad_req == "null"]
        own = [p.data(c).asnumpy() for c in self.contexts for _, p in statistics]
        everyone = self._team.gather("statistics", np.concatenate([[checksum], *own]))
        if len(set(everyone[:, 0])) > 1:
            raise RuntimeError(
                f"the workers have different parameters after the same steps: {everyone[:, 0]}"
            )
        rest = everyone[:, 1:].ravel()
        arrays = {}
        for i in range(self._team.size * len(self.contexts)):
            for name, parameter in statistics:
                values, rest = np.split(rest, [parameter.shape[0]])
                arrays[_prefix(i) + name] = values.astype(parameter.dtype)
        return arrays

    def restore(self, checkpoint):
        """Take up the state of a checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trainer")
            path.write_bytes(checkpoint.trainer)
            # First, because the trainer starts by giving all devices the first one's parameters.
            self._trainer.load_states(str(path))
        # The optimizer counts its updates for each device, but only for those of the process that
        # wrote the checkpoint.
        self._trainer.optimizer.begin_num_update = checkpoint.step
        first = self._team.rank * len(self.contexts)
        for name, parameter in self._parameters():
            for i, context in enumerate(self.contexts, first):
                key = _prefix(0 if parameter.grad_req != "null" else i) + name
                array = checkpoint.arrays.get(key)
                if array is None or array.shape != parameter.shape:
                    came = "none" if array is None else f"one of shape {array.shape}"
                    raise CheckpointError(
                        f"the checkpoint should have an array {key} of shape {parameter.shape}, "
                        f"but has {came}: it is of another net; continue with the version of this "
                        "example that wrote it"
                    )
                parameter.data(context)[:] = array

    def save_parameters(self, path):
        """Write a file for `SegmentationNet.load_parameters`, with the first device's values."""
        first = self.contexts[0]
        values = {name: parameter.data(first) for name, parameter in self._parameters()}
        with replacing(path) as file:
            file.write(_written(lambda name: mx.nd.save(name, values)))

    def _parameters(self):
        return self.net._collect_params_with_prefix().items()


def _prefix(device):
    """Of the names of a device's arrays in a checkpoint, counted over all workers."""
    return f"statistics:{device}:" if device else "parameter:"


def _written(save):
    """The bytes that `save(file name)` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        save(str(path))
        return path.read_bytes()
