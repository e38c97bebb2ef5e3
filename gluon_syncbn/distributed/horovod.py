"""Processes joined by Horovod."""

import atexit

from .. import native
from .arguments import seconds
from .reducer import Reducer


class HorovodReducer(Reducer):
    """Joins processes by Horovod.

    Parameters
    ----------
    hvd : module
        ``horovod.mxnet``, after ``hvd.init()``.
    timeout : float
        Seconds for which this call waits for the other processes, all of which make it. By default
        the environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.

    Raises
    ------
    ValueError
        Where `hvd` is another object, or ``hvd.init()`` was not called.
    RuntimeError
        Where the other processes do not arrive.
    """

    name = "Horovod"

    def __init__(self, hvd, timeout=None):
        timeout = seconds(timeout)
        if not all(hasattr(hvd, name) for name in ("allgather", "rank", "size")):
            raise ValueError(
                f"HorovodReducer got {hvd!r}: import horovod.mxnet as hvd, call hvd.init() and "
                "give hvd."
            )
        try:
            rank, size = hvd.rank(), hvd.size()
        except ValueError as error:
            raise ValueError("HorovodReducer needs hvd.init() to be called before.") from error
        self._hvd = hvd
        self._connection = native.Connection(self._probe)
        super().__init__(rank, size, timeout)
        if size > 1:
            # Called before our exit hook, which calls it, it would end exchanges of steps that are
            # still under way.
            atexit.unregister(hvd.shutdown)

    def _shutdown_handshake(self, timeout):
        native.call_within(
            timeout,
            self._hvd.shutdown,
            f"Horovod's shutdown has not returned for {timeout:g} s at the end of the script.",
        )

    def _open(self, key, size, wait):
        # What ``hvd.allgather`` calls, which then waits for the result without a limit.
        allgather = self._hvd.mpi_ops.MPI_MXNET_LIB_CTYPES.horovod_mxnet_allgather_async
        return self._connection.horovod_channel(key, size, self.size, allgather)
