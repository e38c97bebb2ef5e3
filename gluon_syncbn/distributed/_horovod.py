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

    def _open_through_store(
        self, key: str, size: int, check: Callable[[], None], sums: bool
    ) -> native.Route:
        sums = sums and self.size >= _FEWEST_FOR_SUMS
        # Calls what ``hvd.allgather`` and ``hvd.allreduce`` call, as these wait without a limit.
        return self._connection.horovod_route(key, size, self.size, self._hvd.mpi_ops, sums)
