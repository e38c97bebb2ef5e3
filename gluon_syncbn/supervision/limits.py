"""Gives a limit to calls of MXNet and Horovod that may wait for other processes indefinitely, such
as those by which a process joins its job."""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable

import mxnet as mx

from .. import durations
from ..arguments import seconds
from ..native import threads
from ..native.waits import Clock, bounded
from . import exit


def call_within(limit: float, function: Callable[[], Any], otherwise: str) -> Any:
    """The result of a function of MXNet that may never return. Raises RuntimeError(otherwise)
    after so many seconds; in its text, {} is the time. A process that is stopped does not wait."""
    results: list[Any] = []
    failures: list[Exception] = []

    def call() -> None:
        bounded.add(threading.get_ident())
        try:
            results.append(function())
        except Exception as error:
            failures.append(error)
        finally:
            bounded.discard(threading.get_ident())

    end = threads.start(call, patience=min(limit, durations.THREAD))
    clock, period = Clock(), min(durations.WARN_AFTER * limit, durations.PERIOD)
    try:
        while not end.wait(period) and clock.look(limit) < limit:
            pass
    finally:
        if not end.is_set():  # Also on Ctrl-C.
            exit.abandon()
    if failures:
        raise failures[0]
    if not results:
        raise RuntimeError(otherwise.replace("{}", durations.duration(limit)))
    return results[0]


# The distributed stores of this process, while a KVStoreReducer uses them.
stores: set[mx.kv.KVStore] = set()
_MISSING = "missing, stopped, or starts later than GLUON_SYNCBN_TIMEOUT allows."


def creating(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``mx.kv.create``, which waits for all processes of the job: sets a limit, and refuses a
    second distributed store."""

    @functools.wraps(create)
    def create_or_refuse(name: Any = "local") -> Any:
        distributed = isinstance(name, str) and "dist" in name.lower()
        # Third parties may have registered stores of their own.
        if not distributed or name.lower() in mx.kv.KVStoreBase.kv_registry:
            return create(name)
        if stores:
            raise ValueError(
                "There is a distributed KVStore in this process, with a KVStoreReducer, and MXNet "
                f"would wait indefinitely for another one, {name!r}: give the Trainer the store "
                "itself, as kvstore=kv, update_on_kvstore=False."
            )
        return call_within(
            seconds(None),
            lambda: create(name),
            f"mx.kv.create({name!r}) has waited {{}} for the job's other processes: one of its "
            f"workers, servers or its scheduler is {_MISSING}",
        )

    return create_or_refuse


def initializing(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``HorovodBasics.init``, which waits for all processes of the job: sets a limit."""

    @functools.wraps(init)
    def init_within(*args: Any, **kwargs: Any) -> Any:
        return call_within(
            seconds(None),
            lambda: init(*args, **kwargs),
            f"hvd.init() has waited {{}} for the job's other processes: one is {_MISSING}",
        )

    return init_within
