"""Uneven numbers of batches."""

import reprlib
from collections.abc import Mapping

import mxnet as mx
import numpy

from .. import native
from ..training.trainer import before_adding_up, check_trainer, clear, trained
from .group import default_group


class join:
    """Goes through the batches of this process until no process has any left.

    ::

        for batch in (steps := sbn.distributed.join(loader, trainer)):
            with autograd.record():
                ...
            trainer.step(steps.batch_size)

    A process that runs out of batches *joins*: it goes on with its last batch, so that it still
    takes part in every exchange of the layers and the Trainer, and brings nothing. Its sums count
    for no samples, and its gradients are set to zero before the Trainer adds them. So the others
    have the statistics and the gradients of the samples that there are, and all processes keep the
    same parameters. Running statistics follow no batch twice: a layer's stay where all processes
    of its group have joined, and in this one where the layer exchanges nothing with others. It
    costs one small message per step. (``torch.distributed.algorithms.Join`` does the same for
    PyTorch.)

    Parameters
    ----------
    batches : iterable
    trainer : mxnet.gluon.Trainer, optional
        Whose gradients are set to zero. Where they are accumulated (``grad_req="add"``) that would
        lose those of earlier batches, so `early_stop` is needed. Without a Trainer the loop sets
        them to zero: see `absent`.
    group : SyncGroup, optional
        By default that of the layers: see :func:`gluon_syncbn.set_default_group`.
    early_stop : bool
        End for all processes as soon as one has no batch left.

    Attributes
    ----------
    absent : bool
        Whether this process has joined, and the batch is its last one again.
    batch_size : int
        The number of samples of all processes in this step: what ``trainer.step`` wants. A batch's
        samples are counted along the first axis of the first array in it, which may be in lists,
        tuples, dicts, and the ``data`` of an ``mx.io.DataBatch``. (Horovod's DistributedTrainer
        divides by the number of processes too: give it ``steps.batch_size / hvd.size()``.)
    processes : int
        How many processes bring a batch to this step.

    Raises
    ------
    ValueError
        Where a process has no batch at all, and for a Trainer of parameters with
        ``grad_req="add"`` without `early_stop`.
    TypeError
        For `batches` that cannot be gone through, for anything but a Trainer as `trainer`, and for
        a batch without an array.
    RuntimeError
        Where a process does not arrive at the step.
    """

    def __init__(self, batches, trainer=None, group=None, early_stop=False):
        check_trainer(trainer, "join")
        if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
            raise TypeError(f"join got {batches!r}: give the batches, such as a DataLoader.")
        for parameter in trainer._params if trainer is not None and not early_stop else ():
            if parameter.grad_req == "add":
                raise ValueError(
                    f"join got a Trainer, and {parameter.name} accumulates gradients "
                    "(grad_req='add'), of which a process without a batch could not tell what to "
                    "keep: give early_stop=True, which ends with the first process that runs out."
                )
        self._batches = batches
        self._trainer = trainer
        self._end_hook = None
        self._exchange = (group or default_group())._exchange
        self._early_stop = early_stop
        self.absent = False
        self.batch_size = self.processes = 0

    def __iter__(self):
        remaining = iter(self._batches)
        # A loop around this one may have joined.
        outer = _set_joined(False)
        nothing = last = object()
        try:
            while True:
                batch = nothing if self.absent else next(remaining, nothing)
                if not self._agree(batch is not nothing, batch):
                    return
                if batch is nothing:
                    if last is nothing:
                        raise ValueError(
                            "join: this process has no batch at all, and so none to go on with. "
                            "Give each process at least one."
                        )
                    self._join()
                    batch = last
                yield batch
                last = batch
        finally:
            self._end(outer)

    def _agree(self, have, batch):
        """Whether there is a next step."""
        mine = numpy.array([have, _samples(batch) if have else 0], dtype=numpy.float64)
        everyone = mine.reshape(1, -1)
        if self._exchange is not None:
            everyone = self._exchange.all_gather("join", "gluon_syncbn.distributed.join", mine)
        self.processes, self.batch_size = (int(n) for n in everyone.sum(axis=0))
        return self.processes == len(everyone) if self._early_stop else self.processes > 0

    def _join(self):
        if self.absent:
            return
        self.absent = True
        _set_joined(True)
        if self._trainer is not None:
            self._end_hook = before_adding_up(self._trainer, self._bring_nothing)

    def _bring_nothing(self):
        if not _joined:  # In a loop within this one.
            return
        for parameter in trained(self._trainer):
            for gradient in parameter.list_grad():
                clear(gradient)

    def _end(self, outer):
        try:
            _set_joined(outer)
        finally:
            if self.absent:
                self.absent = False
                if self._end_hook is not None:
                    self._end_hook()


_joined = False


def _set_joined(joined):
    """Whether the process brings nothing to the layers from now on. Returns what was before."""
    global _joined
    before, _joined = _joined, joined
    if joined != before:
        try:
            # Calls of the last step may still be on their way to their exchanges.
            mx.nd.waitall()
        finally:
            native.set_joined(joined)
    return before


def _samples(batch):
    for array in _arrays(batch):
        return array.shape[0]
    raise TypeError(
        f"join got a batch in which there is no array: {reprlib.repr(batch)}. Its samples are "
        "counted along the first axis of an array: let the loader give an array, an "
        "mx.io.DataBatch, or a list, tuple or dict with one in it."
    )


def _arrays(batch):
    if isinstance(batch, mx.io.DataBatch):
        batch = batch.data
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _arrays(part)
    # Numbers of NumPy's have a shape too, of no axes.
    elif getattr(batch, "shape", ()):
        yield batch
