"""Waits of Python for other processes, with a limit."""

import threading
import time

from ..native import threads
from . import durations, exit
from .waits import bounded


class Clock:
    """The seconds, as `now`, in which this process was not stopped. Of those between two looks at
    most three count, or half of the timeout, so look every second or so."""

    def __init__(self):
        self.now, self._looked = 0.0, time.monotonic()

    def look(self, timeout):
        before, self._looked = self._looked, time.monotonic()
        self.now += min(self._looked - before, durations.LONGEST_LOOK, timeout / 2)
        return self.now


def call_within(seconds, function, otherwise):
    """The result of a function of MXNet that may never return. Raises RuntimeError(otherwise) on
    timeout; in its text, {} is the time. A process that is stopped does not wait."""
    results, failures = [], []

    def call():
        bounded.add(threading.get_ident())
        try:
            results.append(function())
        except Exception as error:
            failures.append(error)
        finally:
            bounded.discard(threading.get_ident())

    end = threads.start(call, patience=min(seconds, durations.THREAD))
    clock, period = Clock(), min(durations.WARN_AFTER * seconds, durations.PERIOD)
    try:
        while not end.wait(period) and clock.look(seconds) < seconds:
            pass
    finally:
        if not end.is_set():  # Also on Ctrl-C.
            exit.abandon()
    if failures:
        raise failures[0]
    if not results:
        raise RuntimeError(otherwise.replace("{}", durations.duration(seconds)))
    return results[0]
