"""Training with uneven numbers of batches per process."""

from __future__ import annotations

import contextlib
import reprlib
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, Iterable, Iterator, NoReturn

import mxnet as mx
import numpy
from mxnet.gluon import Parameter, Trainer

from .. import native
from ..groups.group import SyncGroup, default_group
from ..trainers import check_trainer, clear, fresh_gradients, set_fresh_gradients, trained

# Loops that have begun and not ended, the innermost last.
_loops: list[join] = []
# Whether this process contributes nothing to the layers.
_joined = False
# The parameters of `_set_aside`.
_aside: weakref.WeakSet[Parameter] = weakref.WeakSet()


def _follow_innermost() -> None:
    global _joined
    before, _joined = _joined, bool(_loops) and _loops[-1].absent
    if _joined != before:
        # Calls of the last step may still be on their way to their exchanges. Python drops what is
        # raised where the iterator of a loop is deleted.
        native.wait_unheard("at the end of a batch of join")
        native.set_joined(_joined)
    _set_aside()


def _absent() -> list[join]:
    """Loops whose batch is not one of this process. A loop within one that has joined has batches
    of its own."""
    return [loop for loop in _loops if _joined and loop.absent and loop._trainers]


def _set_aside() -> None:
    """Lets backward write into arrays that are dropped, where a loop is absent, what it would add
    to a gradient. The parameter keeps its own."""
    trainers = [trainer for loop in _absent() for trainer in loop._trainers]
    wanted = {p for each in trainers for p in trained(each._params) if p.grad_req == "add"}
    for parameter in trained(wanted ^ set(_aside)):
        fresh = fresh_gradients(parameter)
        gradients, request = parameter.list_grad(), parameter.grad_req
        if parameter in wanted:
            gradients, request = [gradient.copy() for gradient in gradients], "write"
        mx.autograd.mark_variables(parameter._data, gradients, request)
        # The Trainer raises where there was no backward.
        set_fresh_gradients(parameter, fresh)
    _aside.clear()
    _aside.update(wanted)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """A context in which this process counts, also within a loop in which it is absent."""
    outer, _loops[:] = _loops[:], []
    _follow_innermost()
    try:
        yield
    finally:
        _loops[:] = outer
        _follow_innermost()


class join:
    """Iterates over the batches of this process until no process has any left.

    ::

        for batch in (steps := sbn.distributed.join(loader, trainer)):
            with autograd.record():
                ...
            trainer.step(steps.batch_size)

    A process that runs out of batches *joins*: it repeats its last batch, so it still takes part in
    every exchange of the layers and the Trainer, but contributes nothing. Its sums count as zero
    samples, and its gradients are set to zero before the Trainer adds them; accumulated ones
    (``grad_req="add"``) stay those of its own batches. So the others get the statistics and
    gradients of the real samples, and all processes keep the same parameters. No
    batch enters running statistics twice: they do not change once all processes of a layer's group
    have joined, or once this one has if the layer exchanges nothing with others. Joining costs one
    small message per step. (``torch.distributed.algorithms.Join`` does the same for PyTorch.)

    All processes may leave a ``for`` loop early, as by ``break``: they count as usual from then on.
    Where ``next`` is called by hand, or a variable keeps a ``zip`` or a generator around the
    iterator, nothing tells that the loop was left. Then a process that has joined raises at the
    first ``trainer.step`` beyond the most that it has made with one of its own batches, and at
    least one; up to there it brings zeros. So step equally often with each batch.

    Parameters
    ----------
    batches : iterable
    trainer : mxnet.gluon.Trainer or list of them, optional
        All Trainers that step in the loop: their gradients are set to zero. Without any your loop
        must do so: see `absent`.
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
        If a process has no batch at all.
    TypeError
        If `batches` is not iterable, `trainer` is not a Trainer, or a batch has no array.
    RuntimeError
        If a process does not arrive at the step. From ``trainer.step``: see above, and for another
        Trainer than those given, in a process that has joined.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        trainer: Trainer | list[Trainer] | None = None,
        group: SyncGroup | None = None,
        early_stop: bool = False,
    ) -> None:
        trainers = trainer if isinstance(trainer, (list, tuple)) else [trainer]
        for each in trainers:
            check_trainer(each, "join")
        if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
            raise TypeError(f"join got {batches!r}: give the batches, such as a DataLoader.")
        self._batches = batches
        self._trainers = [each for each in trainers if each is not None]
        self._processes = (group or default_group())._processes
        self._early_stop = early_stop
        self.absent = False
        self.batch_size = self.processes = 0
        # How often each Trainer has stepped with this batch, and at most with one of those so far.
        self._steps: Counter[Trainer] = Counter()
        self._most_steps: Counter[Trainer] = Counter()
        # That of the current loop.
        self._token: object = None

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self)

    def _run(self, token: object) -> Iterator[Any]:
        remaining = iter(self._batches)
        nothing = last = object()
        absent = False
        try:
            while True:
                batch = nothing if absent else next(remaining, nothing)
                if not self._agree(batch is not nothing, batch):
                    return
                if batch is nothing:
                    if last is nothing:
                        raise ValueError(
                            "join: this process has no batch at all, and so none to go on with. "
                            "Give each process at least one."
                        )
                    absent, batch = True, last
                self._begin_step(token, absent)
                yield batch
                last = batch
        finally:
            self._leave(token)

    def _agree(self, have: bool, batch: Any) -> bool:
        """Whether there is a next step."""
        mine = numpy.array([have, _samples(batch) if have else 0], dtype=numpy.float64)
        everyone = mine.reshape(1, -1)
        if self._processes is not None:
            everyone = self._processes.all_gather("join", "gluon_syncbn.distributed.join", mine)
        self.processes, self.batch_size = (int(n) for n in everyone.sum(axis=0))
        return self.processes == len(everyone) if self._early_stop else self.processes > 0

    def _begin_step(self, token: object, absent: bool) -> None:
        if self in _loops:
            # Those within it were left.
            del _loops[_loops.index(self) + 1 :]
        else:
            _loops.append(self)
        if not self.absent:
            self._most_steps |= self._steps
        self._steps.clear()
        self._token, self.absent = token, absent
        _follow_innermost()

    def _leave(self, token: object) -> None:
        """A loop has ended, or goes on later."""
        if token is not self._token:  # There is another one since.
            return
        self._token, self.absent = None, False
        if self in _loops:
            _loops.remove(self)
            _follow_innermost()

    def _count_step(self, trainer: Trainer) -> None:
        """Raises RuntimeError if the Trainer steps in no loop any more, as far as can be known."""
        self._steps[trainer] += 1
        most = max(1, self._most_steps[trainer])
        if not self.absent or self._steps[trainer] <= most:
            return
        self._fail(
            f"join: the Trainer steps {self._steps[trainer]} times with one batch of a process "
            f"that has none left, and stepped at most {most} before. If the loop over join was "
            "left early, something still refers to its iterator, and the gradients would be zeros: "
            "delete it, and what is around it, where you leave the loop. Within the loop, step "
            "equally often with each batch."
        )

    def _fail(self, text: str) -> NoReturn:
        if self._processes is not None:
            self._processes.fail(text)
        raise RuntimeError(text)


class _Batches:
    """The iterator of a `join`."""

    def __init__(self, steps: join) -> None:
        self._steps, self._token = steps, object()
        self._run = steps._run(self._token)

    def __next__(self) -> Any:
        return next(self._run)

    def __iter__(self) -> Iterator[Any]:
        """An iterator for one loop, which Python deletes when the loop is left. A later loop goes
        on."""
        try:
            for batch in self._run:  # noqa: UP028 (`yield from` would close it)
                yield batch
        finally:
            self._steps._leave(self._token)


def bring_nothing(trainer: Trainer) -> None:
    """Lets a Trainer's step add nothing where this process has joined."""
    if _loops:
        _loops[-1]._count_step(trainer)
    absent = _absent()
    if absent and not any(trainer in loop._trainers for loop in absent):
        absent[-1]._fail(
            "join: a Trainer steps with a batch of a process that has none left, and is not one of "
            "those that join got, so its gradients would count: give join the list of all Trainers."
        )
    for parameter in trained(trainer._params) if absent else ():
        for gradient in parameter.list_grad() if parameter.grad_req != "add" else ():
            clear(gradient)


def _samples(batch: Any) -> int:
    for array in _arrays(batch):
        return array.shape[0]
    raise TypeError(
        f"join got a batch in which there is no array: {reprlib.repr(batch)}. Its samples are "
        "counted along the first axis of an array: let the loader give an array, an "
        "mx.io.DataBatch, or a list, tuple or dict with one in it."
    )


def _arrays(batch: Any) -> Iterator[Any]:
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
