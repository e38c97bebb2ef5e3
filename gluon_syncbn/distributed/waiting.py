"""Waits of Python for other processes, with a limit."""

import threading

from mxnet_launch.patience import Patience

from ..arguments import WARN_AFTER
from ..native import ArrayWait, shutdown, threads

# The threads that run functions with a time limit.
bounded = set()


def call_within(seconds, function, otherwise):
    """The result of a function of MXNet that may never return. Raises RuntimeError(otherwise) on
    timeout."""
    results, failures = [], []

    def call():
        bounded.add(threading.get_ident())
        try:
            results.append(function())
        except Exception as error:
            failures.append(error)
        finally:
            bounded.discard(threading.get_ident())

    end = threads.start(call, patience=min(seconds, 1.0))
    patience = Patience(seconds)
    try:
        while not end.wait(min(seconds / 10, 1.0)) and patience.waited() < seconds:
            pass
    finally:
        if not end.is_set():  # Also on Ctrl-C.
            shutdown.abandon()
    if failures:
        raise failures[0]
    if not results:
        raise RuntimeError(otherwise)
    return results[0]


class RouteWait:
    """A wait for the other processes, until all know a new key.

    probe(title, exchange, error, seconds, timeout, probes): see `native.Connection`.
    """

    def __init__(self, probe, title, exchange, timeout):
        self._probe, self._title, self._exchange = probe, title, exchange
        self._timeout, self._first = timeout, timeout * WARN_AFTER
        self._patience = Patience(timeout)
        self._probes = 0

    def array(self, array):
        """Waits until MXNet has written the array."""
        with ArrayWait(array) as written:
            self.until(written.wait)
        array.wait_to_read()

    def until(self, done):
        """Calls done(seconds), which waits as long, until it is true. Raises RuntimeError if
        waiting is of no use."""
        while not done(self._slice()):
            waited = self._patience.waited()
            if waited > self._first:
                self._probe(self._title, self._exchange, "", waited, self._timeout, self._probes)
                self._probes += 1

    def _slice(self):
        """Seconds until the next probe is due: the first one and the last are in time."""
        waited = self._patience.waited()
        left = (self._first if waited < self._first else self._timeout) - waited
        return max(0.01, min(1.0, self._first, left if left > 0 else 1.0))
