"""Uneven numbers of batches."""

import mxnet as mx
import numpy

from . import _native
from ._trainer import before_adding_up, check_trainer, trained
from .group import default_group


class join:
    """Goes through the batches of this process until no process has any left.

    ::

        for batch in (steps := sbn.distributed.join(loader, trainer)):
            with autograd.record():
                ...
            trainer.step(steps.batch_size)

    A process that runs out of batches goes on with its last one, so that it still meets the others
    in every layer and in the Trainer. It brings nothing: its sums count for no samples, and its
    gradients are set to zero before the Trainer adds them. So the others have the statistics and
    the gradients of the samples that there are, and all processes keep the same parameters.
    (``torch.distributed.algorithms.Join`` does the same for PyTorch.) It costs one small message
    per step.

    Parameters
    ----------
    batches : iterable
    trainer : mxnet.gluon.Trainer, optional
        Whose gradients are set to zero; with ``grad_req="add"``, to what they were before the step.
        Without one, that is left to the loop: see `absent`.
    group : SyncGroup, optional
        By default that of the layers: see :func:`gluon_syncbn.set_default_group`.
    early_stop : bool
        End for all processes as soon as one has no batch left.

    Attributes
    ----------
    absent : bool
        Whether this process has run out of batches, and the present one is one that it had before.
    batch_size : int
        The number of samples of all processes in this step: what ``trainer.step`` wants. A batch's
        samples are counted along the first axis of the first array in it. (Horovod's
        DistributedTrainer divides by the number of processes too: give it ``steps.batch_size /
        hvd.size()``.)
    processes : int
        How many processes bring a batch to this step.

    Raises
    ------
    ValueError
        Where a process has no batch at all.
    TypeError
        For anything but a Trainer as `trainer`.
    RuntimeError
        Where a process does not come to the step.
    """

    def __init__(self, batches, trainer=None, group=None, early_stop=False):
        check_trainer(trainer, "join")
        self._batches = batches
        self._trainer = trainer
        self._end_hook = None
        # What gradients that are added to held before a step in which this process is absent.
        self._kept = []
        self._exchange = (group or default_group())._exchange
        self._early_stop = early_stop
        self.absent = False
        self.batch_size = self.processes = 0

    def __iter__(self):
        remaining = iter(self._batches)
        nothing = object()
        last = nothing
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
                    self._become_absent()
                    batch = last
                    self._keep_sums()
                yield batch
                self._restore_sums()
                last = batch
        finally:
            self._come_back()

    def _agree(self, have, batch):
        """Whether there is a next step."""
        mine = numpy.array([have, _samples(batch) if have else 0], dtype=numpy.float64)
        everyone = mine.reshape(1, -1)
        if self._exchange is not None:
            everyone = self._exchange.all_gather("join", "gluon_syncbn.distributed.join", mine)
        self.processes, self.batch_size = (int(n) for n in everyone.sum(axis=0))
        return self.processes == len(everyone) if self._early_stop else self.processes > 0

    def _become_absent(self):
        if self.absent:
            return
        # Calls of the last step may still be on their way to their meetings.
        mx.nd.waitall()
        self.absent = True
        _native.set_absent(True)
        if self._trainer is not None:
            self._end_hook = before_adding_up(self._trainer, self._bring_nothing)

    def _bring_nothing(self):
        for parameter in trained(self._trainer):
            if parameter.grad_req != "add":
                parameter.zero_grad()
        self._restore_sums()

    def _keep_sums(self):
        if self._trainer is not None:
            self._kept = [
                (gradient, gradient.copy())
                for parameter in trained(self._trainer)
                if parameter.grad_req == "add"
                for gradient in parameter.list_grad()
            ]

    def _restore_sums(self):
        for gradient, before in self._kept:
            before.copyto(gradient)
        self._kept = []

    def _come_back(self):
        if not self.absent:
            return
        mx.nd.waitall()
        self.absent = False
        _native.set_absent(False)
        if self._end_hook is not None:
            self._end_hook()


def _samples(batch):
    while isinstance(batch, (list, tuple)) and batch:
        batch = batch[0]
    return len(batch) if hasattr(batch, "__len__") else 1
