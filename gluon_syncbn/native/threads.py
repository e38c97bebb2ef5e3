"""Threads, some of which exist before they are needed: Python 3.12 starts none once the script has
ended."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Sequence

if TYPE_CHECKING:
    # Of functions to call, with their arguments and an Event for the end of the call.
    _Queue = queue.SimpleQueue[tuple[Callable[..., Any], Sequence[Any], threading.Event]]

# How many threads wait for work. Where they are not needed, a fork has fewer threads to warn of.
_READY = 4 if sys.version_info[:2] == (3, 12) else 0
_log = logging.getLogger("gluon_syncbn")
# Where each of them takes its work.
_idle: collections.deque[_Queue] = collections.deque()
# Set when the last warning is written.
_written = threading.Event()
_written.set()


def start(function: Callable[..., Any], *arguments: Any, patience: float = 0.0) -> threading.Event:
    """Calls function(*arguments) on a daemon thread: one that waits for work, or else a new one.
    Returns an Event that is set when the call has ended. Raises RuntimeError if there is no thread
    within `patience` seconds."""
    done = threading.Event()
    _take(patience).put((function, arguments, done))
    return done


def warn(text: str) -> None:
    """Logs on another thread. The caller must end waits in time, and the thread that holds
    logging's lock may itself be waiting, for an array that it logs, or for who reads the output.
    Without a thread nothing is logged."""
    global _written
    with contextlib.suppress(RuntimeError):
        _written = start(_log.warning, "%s", text)


def wait_for_warnings(seconds: float) -> None:
    """Waits until the last warning is written, which the end of the process would cut off."""
    _written.wait(seconds)


def _take(patience: float) -> _Queue:
    ends = time.monotonic() + patience
    while True:
        with contextlib.suppress(IndexError):
            return _idle.pop()
        try:
            return _new()
        except RuntimeError:
            if time.monotonic() >= ends:
                raise
            time.sleep(0.01)


def _new() -> _Queue:
    work: _Queue = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(work,), daemon=True).start()
    return work


def _serve(work: _Queue) -> None:
    again = True
    while again:
        again = _call(work, *work.get())


def _call(
    work: _Queue, function: Callable[..., Any], arguments: Sequence[Any], done: threading.Event
) -> bool:
    """Returns whether the thread is to go on. Keeps no reference to what it has called: a KVStore
    must be gone before Python is."""
    try:
        function(*arguments)
    except Exception:
        _log.exception("An error on a thread of gluon_syncbn.")
    again = len(_idle) < _READY
    if again:
        _idle.append(work)
    done.set()
    return again


_idle.extend(_new() for _ in range(_READY))
# The child has none of them.
os.register_at_fork(after_in_child=_idle.clear)
