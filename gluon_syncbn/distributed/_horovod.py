"""Processes connected through Horovod."""

from __future__ import annotations

import atexit
import functools
from typing import Any, Callable

from .. import native
from ..arguments import seconds
from ..supervision.limits import call_within
from ._reducer import Reducer

# A sum goes around Horovod's ring twice and values only once, so with few processes values arrive
# sooner.
_FEWEST_FOR_SUMS = 8


# Horovod's C functions that push an operation to MXNet.
_PUSHING = tuple(
    f"horovod_mxnet_{name}_async"
    for name in ("allreduce", "allgather", "alltoall", "broadcast", "reducescatter")
)


def _noting(push: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(push)
    def push_and_note(inputs: Any, outputs: Any, *rest: Any) -> Any:
        # Handles, references to one, or arrays of several.
        handles = [getattr(each, "_obj", each) for each in (inputs, outputs)]
        handles = [each[0] if hasattr(each, "_length_") else each for each in handles]
        return native.push_for_others(lambda: push(inputs, outputs, *rest), *handles)

    return push_and_note


class HorovodReducer(Reducer):
    """Connects processes through Horovod.

    Parameters
    ----------
    hvd : module
        ``horovod.mxnet``, after ``hvd.init()``.
    timeout : float
        Seconds that this call waits for the other processes, all of which must make it. By default
        the environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.

    Raises
    ------
    TypeError
        If `hvd` is another object.
    ValueError
        If ``hvd.init()`` was not called.
    RuntimeError
        If the other processes do not arrive.
    """

    name = "Horovod"
    trainer = "hvd.DistributedTrainer(net.collect_params(), ...)"

    def __init__(self, hvd: Any, timeout: float | None = None) -> None:
        timeout = seconds(timeout)
        if not all(hasattr(hvd, name) for name in ("allgather", "rank", "size")):
            raise TypeError(
                f"HorovodReducer got {hvd!r}: import horovod.mxnet as hvd, call hvd.init() and "
                "give hvd."
            )
        try:
            rank, size = hvd.rank(), hvd.size()
        except ValueError as error:
            raise ValueError("HorovodReducer needs hvd.init() to be called before.") from error
        super().__init__(rank, size, timeout)
        self._hvd = hvd
        functions = hvd.mpi_ops.MPI_MXNET_LIB_CTYPES
        for name in _PUSHING:
            # Only once.
            if hasattr(functions, name) and not hasattr(getattr(functions, name), "__wrapped__"):
                setattr(functions, name, _noting(getattr(functions, name)))
        # {size of a group: id of this process's Horovod process set, or None if there is none}
        self._sets: dict[int, int | None] = {}
        try:
            self._meet(timeout)
        except BaseException:
            self.watcher.close()
            raise
        if size > 1:
            # Our exit hook calls it. Any earlier, it would end exchanges of steps that are still
            # under way.
            atexit.unregister(hvd.shutdown)

    def _shut_down(self, timeout: float) -> None:
        call_within(
            timeout,
            self._hvd.shutdown,
            "Horovod's shutdown has not returned for {} at the end of the script.",
        )

    def _split(self, size: int) -> bool:
        if size not in self._sets:
            call_within(
                seconds(None),
                lambda: self._make_sets(size),
                f"Horovod, rank {self.rank}, has waited {{}} for all processes to "
                f"make groups of {size}: make the same groups and layers in every process.",
            )
        return self._sets[size] is not None

    def _make_sets(self, size: int) -> None:
        self._sets[size] = None
        for first in range(0, self.size, size):
            ranks = range(first, first + size)
            try:
                made = self._hvd.add_process_set(self._hvd.ProcessSet(ranks))
            except ValueError:
                # In all processes: Horovod runs without dynamic process sets, or the user has made
                # the same set.
                return
            if self.rank in ranks:
                number = made.process_set_id
        self._sets[size] = number

    def _open_through_store(
        self, key: str, size: int, processes: int, check: Callable[[], None], sums: bool
    ) -> native.Route:
        sums = sums and processes >= _FEWEST_FOR_SUMS
        process_set = 0 if processes == self.size else self._sets[processes]
        # Calls what ``hvd.allgather`` and ``hvd.allreduce`` call, as these wait without a limit.
        return self._connection.horovod_route(
            key, size, processes, process_set, self._hvd.mpi_ops, sums
        )
