"""Finds out which processes have arrived at an exchange, and what the others are doing.

A waiting collective cannot tell for whom it waits. So each process answers probes over TCP, on
threads that run even while all others wait in MXNet.
"""

import collections
import contextlib
import logging
import math
import secrets
import socket
import threading
import time

from mxnet_launch.patience import Patience

from ..arguments import WARN_AFTER, duration
from ..native import threads
from .answers import ABSENT, ARRIVED, FINISHED, GONE, SILENT, Answer, describe
from .tcp import own_host, receive, send, serve

_ADDRESS_SIZE = 80  # bytes: "IP port token token", padded with spaces
# Characters, and bytes with room for what JSON escapes.
_LONGEST_KEY, _LONGEST_STATUS = 240, 4000
_LONGEST_MESSAGE = 1 << 16
_MOST_AT_ONCE = 256  # so that probing stays below the usual limit of 1024 open files
_MOST_IN_FLIGHT, _REMEMBERED = 3, 16
# How many timeouts one process may run on after the others have finished.
_ALONE = 10
# Seconds.
_CONNECTION_LIFE = 5.0
_BETWEEN_PROBES = 0.1
_PATIENCE = 2.0

_now = time.monotonic
_log = logging.getLogger("gluon_syncbn")


class Liveness:
    """Answers the probes of other processes, and probes them.

    host: where the others reach this process. By default the first of these that is known:
    ``DMLC_NODE_HOST``, where MXNet's KVStore listens too; the address of the network interface
    ``DMLC_INTERFACE`` or ``HOROVOD_GLOO_IFACE``; the address from which this machine reaches
    ``DMLC_PS_ROOT_URI`` (the KVStore's scheduler) or ``HOROVOD_GLOO_RENDEZVOUS_ADDR``; 127.0.0.1.
    Raises OSError if this process cannot listen there.

    in_flight(): exchanges besides those that `arrive` and `leave` note: the ones in flight and the
    last completed ones, two lists of (key, monotonic time). Called on another thread.

    watch: a `Watch`, which looks at this process on the same thread.
    """

    def __init__(self, rank, size, host=None, in_flight=lambda: ([], []), watch=None):
        self.rank, self.size = rank, size
        self._in_flight, self._more = {}, in_flight
        self._completed = collections.deque(maxlen=_REMEMBERED)
        self._status = None
        # {rank: the status that its probes have shown}, also of processes that are gone by now.
        self._statuses = {}
        # A probe shows the first and its answer the second, so each side knows the other.
        self._tokens = secrets.token_hex(7).encode(), secrets.token_hex(7).encode()
        self._watch = watch
        self._server = serve(host or own_host(), self._answer, most=size + 64, watch=watch)
        ip, port = self._server.server_address[:2]
        fields = [ip.partition("%")[0].encode(), b"%d" % port, *self._tokens]
        # Where and how the others probe this process, of equal length in all processes.
        self.address = b" ".join(fields).ljust(_ADDRESS_SIZE)

    def close(self):
        """Stops answering. The others then take this process for gone."""
        self._server.close()

    def set_addresses(self, addresses):
        """Takes the `address` of each process, by rank."""
        fields = [bytes(address).split() for address in addresses]
        self._addresses = [((ip.decode(), int(port)), *tokens) for ip, port, *tokens in fields]

    def arrive(self, key):
        """Notes that this process brings its part of the exchange `key`: a str that names this
        exchange and no later one, even if cut to its first and last 120 characters."""
        self._in_flight[key] = _now()

    def leave(self, key, complete=True):
        """Notes that the exchange was completed, or else that this process gave it up."""
        if self._in_flight.pop(key, None) is not None and complete:
            self._completed.append((key, _now()))

    def set_status(self, kind, text=""):
        """Sets what every answer shows from now on: FAILED with an error, or FINISHED. The first
        status stays."""
        self._status = self._status or (kind, text[:_LONGEST_STATUS])

    @property
    def has_finished(self):
        return self._status is not None and self._status[0] == FINISHED

    def wait_for_the_end(self, timeout):
        """Returns once all processes have called this, at the end of their scripts. Raises
        RuntimeError if some ended otherwise, or did not answer for `timeout` seconds.

        It waits ten times as long for a process that answers, which may be evaluating or saving,
        with a warning now and then. If that process arrives at an exchange, it fails there.
        """
        self.set_status(FINISHED)
        patience = Patience(timeout)
        warn_at = timeout * WARN_AFTER
        answered = {}
        while True:
            answers = self.probe("", min(_PATIENCE, timeout / 2))
            missing = {
                rank: answer
                for rank, answer in answers.items()
                if (answer.status or self._statuses.get(rank) or [None])[0] != FINISHED
            }
            if not missing:
                return
            waited = patience.waited()
            answered.update((rank, waited) for rank, a in missing.items() if a.state != SILENT)
            silence = waited - min(answered.get(rank, 0.0) for rank in missing)
            lost = (
                silence > timeout
                or waited > _ALONE * timeout
                or any(a.state == GONE or a.status for a in missing.values())
            )
            if lost or waited > warn_at:
                warn_at = 2 * waited
                message = (
                    f"Rank {self.rank} has reached the end of its script and has waited "
                    f"{duration(waited)} for the other processes to reach theirs. "
                    f"{self.describe(missing)}"
                )
                if lost:
                    raise RuntimeError(message)
                _log.warning(
                    "%s One that does not answer for %s is an error, as is one that answers and "
                    "works on for %s.",
                    message,
                    duration(timeout),
                    duration(_ALONE * timeout),
                )
            # Finished processes leave processor time to the last one.
            time.sleep(min(max(_BETWEEN_PROBES, waited / 100), 1.0))

    def probe(self, key, patience=_PATIENCE, ranks=None):
        """Asks all others of `ranks`, by default all, at once whether they have arrived at the
        exchange `key`. Returns {rank: Answer} within `patience` seconds."""
        content = [_shortened(key), self.rank, self._status]
        others = [rank for rank in ranks or range(self.size) if rank != self.rank]
        ends = _now() + patience
        left, answers, ready = iter(others), {}, threading.Event()

        def work():
            ready.wait()
            for rank in left:
                answers[rank] = _probe(*self._addresses[rank], content, min(ends, _now() + seconds))

        started = []
        with contextlib.suppress(RuntimeError):  # There are no more threads.
            for _ in others[:_MOST_AT_ONCE]:
                started.append(threads.start(work))
        seconds = patience / max(1, math.ceil(len(others) / max(1, len(started))))
        ready.set()
        if not started:
            work()
        for end in started:
            end.wait(max(0.0, ends - _now()))
        found = {rank: answers.get(rank, Answer(SILENT)) for rank in others}
        for rank, answer in found.items():
            if answer.state == GONE:  # It may have told its status before.
                found[rank] = answer._replace(status=self._statuses.get(rank))
        return found

    def _answer(self, connection):
        ends = _now() + _CONNECTION_LIFE
        key, rank, status = receive(connection, self._tokens[0], _LONGEST_MESSAGE, ends)
        if status:
            self._statuses[rank] = tuple(status)
        now = _now()
        in_flight, completed = self.exchanges()
        arrived = any(key == _shortened(one) for one, _ in in_flight + completed)
        ages = [(_shortened(one), now - since) for one, since in in_flight[:_MOST_IN_FLIGHT]]
        last = completed and (_shortened(completed[-1][0]), now - completed[-1][1]) or None
        state = ARRIVED if arrived else ABSENT
        place = self._watch and self._watch.place()
        send(connection, self._tokens[1], [state, ages, last, self._status, place], ends)

    def exchanges(self):
        """Those in flight, and the last completed ones: lists of (key, monotonic time), oldest
        first."""
        in_flight, completed = self._more()
        # copy() is atomic under the interpreter's lock.
        return (
            sorted([*self._in_flight.copy().items(), *in_flight], key=_since),
            sorted([*self._completed.copy(), *completed], key=_since),
        )

    def describe(self, answers):
        """One line on who has arrived, this process included, and who has not and why."""
        return describe({**answers, self.rank: Answer(ARRIVED)})


def _probe(address, own, expected, content, ends):
    """The Answer of the process at an address. `own`: the token that a probe shows."""
    try:
        with socket.create_connection(address, max(ends - _now(), 0.001)) as connection:
            send(connection, own, content, ends)
            answer = receive(connection, expected, _LONGEST_MESSAGE, ends)
    except (ConnectionError, ValueError):
        # ValueError: somebody else got the port of a process that ended.
        return Answer(GONE)
    except OSError as error:  # A timeout has no strerror.
        return Answer(SILENT, why=error.strerror)
    state, in_flight, *others = answer
    in_flight = tuple((key, seconds) for key, seconds in in_flight)
    last, status, place = (other and tuple(other) for other in others)
    return Answer(state, in_flight, last, status, place=place)


def _shortened(key):
    """As much of an exchange's key as a probe holds: the front, which names the layer, and the end,
    which names the call."""
    return (
        key
        if len(key) <= _LONGEST_KEY
        else f"{key[: _LONGEST_KEY // 2]}…{key[-_LONGEST_KEY // 2 :]}"
    )


def _since(entry):
    return entry[1]
