"""Training with uneven numbers of batches per process."""

import reprlib
from collections.abc import Mapping

import mxnet as mx
import numpy

from .. import native
from ..groups.group import default_group
from ..trainers import before_adding_up, check_trainer, clear, trained

_joined = False


def _set_joined(joined):
    """Sets whether this process contributes nothing to the layers from now on. Returns the old
    value."""
    global _joined
    before, _joined = _joined, joined
    if joined != before:
        try:
            # Calls of the last step may still be on their way to their exchanges.
            mx.nd.waitall()
        finally:
            native.set_joined(joined)
    return before


class join:
    """Iterates over the batches of this process until no process has any left.

    ::

        for batch in (steps := sbn.distributed.join(loader, trainer)):
            with autograd.record():
                ...
            trainer.step(steps.batch_size)

    A process that runs out of batches *joins*: it repeats its last batch, so it still takes part in
    every exchange of the layers and the Trainer, but contributes nothing. Its sums count as zero
    samples, and its gradients are set to zero before the Trainer adds them. So the others get the
    statistics and gradients of the real samples, and all processes keep the same parameters. No
    batch enters running statistics twice: they do not change once all processes of a layer's group
    have joined, or once this one has if the layer exchanges nothing with others. Joining costs one
    small message per step. (``torch.distributed.algorithms.Join`` does the same for PyTorch.)

    Parameters
    ----------
    batches : iterable
    trainer : mxnet.gluon.Trainer, optional
        The Trainer whose gradients are set to zero. If gradients are accumulated
        (``grad_req="add"``), that would lose earlier batches, so `early_stop` is needed. Without a
        Trainer your loop must set them to zero: see `absent`.
    group : SyncGroup, optional
        By default that of the layers: see :func:`gluon_syncbn.set_default_group`.
    early_stop : bool
        End for all processes as soon as one has no batch left.

    Attributes
    ----------
    absent : bool
        Whether this process has joined, and the batch is its last one again.
    batch_size : int
        The number of samples of all processes in this step: the argument of ``trainer.step``. A
        batch's samples are counted along the first axis of the first array in it, which may be in
        lists, tuples, dicts, and the ``data`` of an ``mx.io.DataBatch``. (Horovod's
        DistributedTrainer divides by the number of processes too: give it ``steps.batch_size /
        hvd.size()``.)
    processes : int
        How many processes bring a batch to this step.

    Raises
    ------
    ValueError
        If a process has no batch at all, or a Trainer's parameters have ``grad_req="add"`` and
        `early_stop` is off.
    TypeError
        If `batches` is not iterable, `trainer` is not a Trainer, or a batch has no array.
    RuntimeError
        If a process does not arrive at the step.
    """

    def __init__(self, batches, trainer=None, group=None, early_stop=False):
        check_trainer(trainer, "join")
        if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
            raise TypeError(f"join got {batches!r}: give the batches, such as a DataLoader.")
        self._batches = batches
        self._trainer = trainer
        self._processes = (group or default_group())._processes
        self._early_stop = early_stop
        if not early_stop:
            self._check_requests()
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
        if self._processes is not None:
            everyone = self._processes.all_gather("join", "gluon_syncbn.distributed.join", mine)
        self.processes, self.batch_size = (int(n) for n in everyone.sum(axis=0))
        return self.processes == len(everyone) if self._early_stop else self.processes > 0

    def _check_requests(self):
        for parameter in self._trainer._params if self._trainer is not None else ():
            if parameter.grad_req == "add":
                raise ValueError(
                    f"join got a Trainer, and {parameter.name} accumulates gradients "
                    "(grad_req='add'), of which a process without a batch could not tell what to "
                    "keep: give early_stop=True, which ends with the first process that runs out."
                )

    def _join(self):
        if self.absent:
            return
        self._check_requests()
        self.absent = True
        _set_joined(True)
        if self._trainer is not None:
            before_adding_up.append(self._bring_nothing)

    def _bring_nothing(self, trainer):
        # A loop within this one has not joined.
        if trainer is not self._trainer or not _joined:
            return
        for parameter in trained(trainer):
            for gradient in parameter.list_grad():
                clear(gradient)

    def _end(self, outer):
        try:
            _set_joined(outer)
        finally:
            if self.absent:
                self.absent = False
                if self._trainer is not None:
                    before_adding_up.remove(self._bring_nothing)


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
    # NumPy scalars have a shape too: ().
    elif getattr(batch, "shape", ()):
        yield batch
