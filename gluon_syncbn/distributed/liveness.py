"""Finds out which processes have arrived at an exchange, and what the others do instead.

A collective that waits cannot tell for whom. So each process answers probes over TCP, on threads
that also run while all others wait in MXNet. A message is one line: a token and JSON.
"""

import collections
import contextlib
import ipaddress
import json
import logging
import math
import os
import secrets
import socket
import socketserver
import threading
import time
import typing
import weakref

ARRIVED = "arrived"
ABSENT = "absent"
SILENT = "silent"
GONE = "gone"

# The status of a process, which goes with every answer.
FAILED = "failed"
FINISHED = "finished"

ADDRESS_SIZE = 80  # bytes: "IP port token token", filled up with spaces
# The share of a timeout after which a wait is reported.
WARN_AFTER = 0.1

_LONGEST_KEY = 256  # bytes
_LONGEST_STATUS = 4000  # characters
# In bytes, with room for what JSON escapes.
_LONGEST_PROBE = 1 << 12
_LONGEST_ANSWER = 1 << 16

_CONNECTION_LIFE = 5.0  # seconds
_MOST_AT_ONCE = 256  # so that probing stays below the usual limit of 1024 open files
_MOST_IN_FLIGHT = 3
_REMEMBERED = 16
_BETWEEN_PROBES = 0.1
_PATIENCE = 2.0
_LEAST_PATIENCE = 0.05

_now = time.monotonic
_log = logging.getLogger("gluon_syncbn")


class Answer(typing.NamedTuple):
    """What one process answered about an exchange, or why it did not.

    state : ARRIVED
            ABSENT, where it answered that it has not arrived
            SILENT, where it did not answer in time: stopped, or unreachable
            GONE, where nobody, or somebody else, listens at its address
    in_flight : its oldest exchanges in flight, each as (key, seconds since it arrived)
    last : the exchange that it completed last, as (key, seconds since then), or None
    status : (FAILED, the error) or (FINISHED, ""), or None
    why : the system's message where it could not be probed, or None
    """

    state: str
    in_flight: tuple = ()
    last: typing.Optional[tuple] = None
    status: typing.Optional[tuple] = None
    why: typing.Optional[str] = None


class Liveness:
    """Answers the probes of other processes, and probes them.

    Parameters
    ----------
    rank, size : int
        This process's rank, and the number of processes.
    host : str, optional
        Where the others reach this process. By default the first of these that is known:
        ``DMLC_NODE_HOST``, where MXNet's KVStore listens too; the address of the network interface
        ``DMLC_INTERFACE`` or ``HOROVOD_GLOO_IFACE``; the address from which this machine reaches
        ``DMLC_PS_ROOT_URI`` (the KVStore's scheduler) or ``HOROVOD_GLOO_RENDEZVOUS_ADDR``;
        127.0.0.1.
    in_flight : callable, optional
        Knows of more exchanges than `arrive` and `leave` do. Returns those in flight and the last
        completed ones, two lists of (key, monotonic time). Called on another thread.

    Raises
    ------
    OSError
        Where this process cannot listen there.
    """

    def __init__(self, rank, size, host=None, in_flight=lambda: ([], [])):
        self.rank, self.size = rank, size
        self._in_flight, self._more = {}, in_flight
        self._completed = collections.deque(maxlen=_REMEMBERED)
        self._addresses = None
        self._status = None
        # Who has shown, in a probe, that it has finished.
        self._finished = set()
        # A probe shows the first and its answer the second, so each side knows the other.
        self._tokens = secrets.token_hex(7).encode(), secrets.token_hex(7).encode()
        self._server = _serve(host or _own_host(), self._answer, most=size + 64)
        ip, port = self._server.server_address[:2]
        fields = [ip.partition("%")[0].encode(), b"%d" % port, *self._tokens]
        self._address = b" ".join(fields).ljust(ADDRESS_SIZE)

    def close(self):
        """Stops answering. The others then take this process for gone."""
        self._server.close()

    def address(self):
        """Where and how the others probe this process: `ADDRESS_SIZE` bytes to hand to them."""
        return self._address

    def set_addresses(self, addresses):
        """Takes what `address` gave in each process, by rank."""
        addresses = [bytes(address) for address in addresses]
        fields = [address.split() for address in addresses]
        bad = [r for r, a in enumerate(addresses) if len(a) != ADDRESS_SIZE or len(fields[r]) != 4]
        if len(addresses) != self.size or bad or addresses[self.rank] != self._address:
            raise ValueError(
                f"Rank {self.rank} got {len(addresses)} addresses for {self.size} processes, those "
                f"of ranks {bad} malformed: give what address() returned in each process, by rank."
            )
        self._addresses = [((ip.decode(), int(port)), *tokens) for ip, port, *tokens in fields]

    def arrive(self, key):
        """Notes that this process brings its part of the exchange `key`, a str that names this
        exchange and no later one, also where only its first and its last 126 bytes are left."""
        self._in_flight[key] = _now()

    def leave(self, key, complete=True):
        """Notes that the exchange was completed, or else that this process gave it up."""
        if self._in_flight.pop(key, None) is not None and complete:
            self._completed.append((key, _now()))

    def set_status(self, kind, text=""):
        """What every answer shows from now on: FAILED with an error, or FINISHED. The first status
        counts."""
        self._status = self._status or (kind, text[:_LONGEST_STATUS])

    def wait_for_the_end(self, timeout):
        """Returns when all processes have called this, as they do when their scripts end: None, or
        a sentence on those that ended otherwise, or did not answer for `timeout` seconds.

        It waits without a limit for a process that answers, with a warning now and then: that one
        may evaluate or save. If it arrives at an exchange, it fails there.
        """
        self.set_status(FINISHED)
        start = _now()
        warn_at = start + timeout * WARN_AFTER
        answered = {}
        silence = 0.0
        while True:
            answers = self.probe("", min(_PATIENCE, max(timeout - silence, _LEAST_PATIENCE)))
            # A process that has seen all others finish is gone soon. Its probe showed it before.
            missing = {
                rank: answer
                for rank, answer in answers.items()
                if rank not in self._finished and (answer.status or [None])[0] != FINISHED
            }
            if not missing:
                return None
            now = _now()
            answered.update((rank, now) for rank, a in missing.items() if a.state != SILENT)
            silence = now - min(answered.get(rank, start) for rank in missing)
            waited = now - start
            lost = silence > timeout or any(a.state == GONE or a.status for a in missing.values())
            if lost or now > warn_at:
                warn_at = now + waited
                message = (
                    f"Rank {self.rank} has come to the end of its script and has waited "
                    f"{waited:.3g} s for the other processes to come to theirs. "
                    f"{self.describe(missing, str)}"
                )
                if lost:
                    return message
                _log.warning(
                    "%s One that does not answer for %.3g s is an error; one that answers is "
                    "waited for without a limit. Should it wait for this process in turn, in its "
                    "Trainer or KVStore, then end them all.",
                    message,
                    timeout,
                )
            # Processes that have finished leave the last one its time.
            time.sleep(min(max(_BETWEEN_PROBES, waited / 100), 1.0))

    def probe(self, key, patience=_PATIENCE):
        """Asks all other processes at once whether they have arrived at the exchange `key`.

        Returns
        -------
        dict from int to Answer
            By rank, without this process's own. It takes `patience` seconds at most.
        """
        if self._addresses is None:
            raise RuntimeError("Liveness has no addresses: call set_addresses first.")
        finished = self._status is not None and self._status[0] == FINISHED
        content = [_shortened(key), self.rank, finished]
        others = [rank for rank in range(self.size) if rank != self.rank]
        seconds = patience / max(1, math.ceil(len(others) / _MOST_AT_ONCE))
        ends = _now() + patience
        left, answers = iter(others), {}

        def work():
            for rank in left:
                answers[rank] = _probe(*self._addresses[rank], content, min(ends, _now() + seconds))

        # An executor's threads would not start once the script has ended.
        count = min(len(others), _MOST_AT_ONCE)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, ends - _now()))
        return {rank: answers.get(rank, Answer(SILENT)) for rank in others}

    def _answer(self, connection):
        ends = _now() + _CONNECTION_LIFE
        key, rank, finished = _receive(connection, self._tokens[0], _LONGEST_PROBE, ends)
        if finished:
            self._finished.add(rank)
        now = _now()
        in_flight, completed = self._more()
        # copy() is one step under the interpreter's lock.
        in_flight = sorted([*self._in_flight.copy().items(), *in_flight], key=_since)
        completed = sorted([*self._completed.copy(), *completed], key=_since)
        arrived = any(key == _shortened(one) for one, _ in in_flight + completed)
        ages = [(_shortened(one), now - since) for one, since in in_flight[:_MOST_IN_FLIGHT]]
        last = completed and (_shortened(completed[-1][0]), now - completed[-1][1]) or None
        state = ARRIVED if arrived else ABSENT
        _send(connection, self._tokens[1], [state, ages, last, self._status], ends)

    def describe(self, answers, title=repr):
        """One line on who has arrived, this process included, and who has not and why.

        Parameters
        ----------
        answers : dict from int to Answer
            As from `probe`.
        title : callable
            Makes a readable text of a key, also of one that only another process uses.
        """
        arrived = [rank for rank, answer in answers.items() if answer.state == ARRIVED]
        missing = {}
        for rank in sorted(answers):
            if answers[rank].state != ARRIVED:
                missing.setdefault(_kind(answers[rank]), []).append(rank)
        parts = [
            f"{_ranks(ranks)} ({_reason([answers[rank] for rank in ranks], title)})"
            for ranks in missing.values()
        ]
        return f"Came: {_ranks([*arrived, self.rank])}. Missing: {', '.join(parts) or 'none'}."


def _probe(address, own, expected, content, ends):
    """The Answer of the process at an address. `own`: the token that a probe shows."""
    try:
        with socket.create_connection(address, max(ends - _now(), 0.001)) as connection:
            _send(connection, own, content, ends)
            state, in_flight, last, status = _receive(connection, expected, _LONGEST_ANSWER, ends)
    except (ConnectionError, ValueError):
        # The latter where somebody else got the port of a process that ended.
        return Answer(GONE)
    except OSError as error:  # A timeout has no strerror.
        return Answer(SILENT, why=error.strerror)
    in_flight = tuple((key, seconds) for key, seconds in in_flight)
    return Answer(state, in_flight, last and tuple(last), status and tuple(status))


def _send(connection, token, content, ends):
    connection.settimeout(max(ends - _now(), 0.001))
    # MSG_NOSIGNAL: a script may have given SIGPIPE back its power to kill.
    line = token + b" " + json.dumps(content).encode() + b"\n"
    connection.sendall(line, socket.MSG_NOSIGNAL)


def _receive(connection, token, longest, ends):
    """The content of a message. Raises ValueError where it is a stranger's."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(ends - _now(), 0.001))
        data = connection.recv(4096)
        if not data:
            raise ConnectionResetError("closed before the message was complete")
        line += data
        if len(line) > longest:
            raise ValueError("a message too long")
    shown, _, content = line.partition(b" ")
    if not secrets.compare_digest(shown, token):
        raise ValueError("a stranger's message")
    return json.loads(content)


class _Server(socketserver.ThreadingTCPServer):
    """Calls answer(connection) for each connection, on a daemon thread of its own."""

    daemon_threads, block_on_close = True, False
    request_queue_size = 4096

    def __init__(self, host, answer, most):
        self.address_family, _, _, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        )[0]
        self._answer, self._most = answer, most
        self._connections = {}  # the oldest first
        super().__init__(address, None)
        self.socket.setblocking(False)
        self._thread = threading.Thread(
            target=self.serve_forever, args=[None], name="sbn-liveness", daemon=True
        )

    def start(self):
        _servers.add(self)
        self._thread.start()

    def close(self):
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.is_alive():
            self.shutdown()
        for connection in list(self._connections):
            _hang_up(connection)
        self.server_close()

    def release_in_child(self):
        # The parent answers. If the child kept its sockets, they would outlive a parent that dies.
        for connection in [*self._connections, self.socket]:
            connection.close()

    def get_request(self):
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.01)  # The connection waits in the queue until files may be opened again.
            raise

    def process_request(self, request, client_address):
        self._connections[request] = None
        for oldest in list(self._connections)[: -self._most]:
            _hang_up(oldest)
        super().process_request(request, client_address)

    def finish_request(self, request, client_address):
        self._answer(request)

    def shutdown_request(self, request):
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        """A stranger, or one that was slow or hung up, gets no answer."""


def _hang_up(connection):
    """Ends what its thread waits for; the thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _serve(host, answer, most):
    try:
        server = _Server(host, answer, most)
        if ipaddress.ip_address(server.server_address[0].partition("%")[0]).is_unspecified:
            server.server_close()
            raise OSError("no address that others could reach")
    except (OSError, UnicodeError) as error:  # The latter from a name that is no host's.
        raise OSError(
            f"This process cannot listen on {host!r} ({error}): set DMLC_NODE_HOST to an address "
            "of this machine that the other processes reach."
        ) from error
    server.start()
    return server


_servers = weakref.WeakSet()


def _release_in_child():
    for server in list(_servers):
        server.release_in_child()


os.register_at_fork(after_in_child=_release_in_child)


def _own_host():
    get = os.environ.get
    return (
        get("DMLC_NODE_HOST")
        or _address_of_interface(get("DMLC_INTERFACE") or get("HOROVOD_GLOO_IFACE"))
        or _address_toward(get("DMLC_PS_ROOT_URI") or get("HOROVOD_GLOO_RENDEZVOUS_ADDR"))
        or "127.0.0.1"
    )


def _address_of_interface(name):
    if not name:
        return None
    import psutil  # Only here, as most jobs name no interface.

    found = psutil.net_if_addrs().get(name, ())
    ipv4 = [one.address for one in found if one.family == socket.AF_INET]
    # Not what is good on one link only.
    ipv6 = [one.address for one in found if one.family == socket.AF_INET6]
    return next(iter(ipv4 + [address for address in ipv6 if "%" not in address]), None)


def _address_toward(host):
    """The address from which this machine would send to the host. It sends nothing."""
    if not host:
        return None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as unused:
            unused.connect(address)
            return unused.getsockname()[0]
    except (OSError, UnicodeError):
        return None


def _shortened(key):
    """As much of an exchange's key as a probe holds: the front, which names the layer, and the end,
    which names the call."""
    name = key.encode()
    if len(name) <= _LONGEST_KEY:
        return key
    half = (_LONGEST_KEY - len("…".encode())) // 2
    return f"{name[:half].decode(errors='ignore')}…{name[-half:].decode(errors='ignore')}"


def _since(entry):
    return entry[1]


def _kind(answer):
    """Equal for answers that differ in seconds alone."""
    last = answer.last and answer.last[0]
    return answer.state, answer.why, tuple(key for key, _ in answer.in_flight), last, answer.status


def _reason(answers, title):
    """Why the processes that gave these answers, of one kind, are missing."""
    one = len(answers) == 1
    first = answers[0]
    if first.status and first.status[0] == FAILED:
        return f"{'has' if one else 'have'} failed: {first.status[1]}"
    if first.status:
        return f"{'has' if one else 'have'} come to the end of the script"
    if first.state == GONE:
        return "its process is gone" if one else "their processes are gone"
    if first.why:
        return f"cannot be probed: {first.why}"
    if first.state == SILENT:
        reason = "does not answer: stopped, or its machine is unreachable"
        return reason if one else "do not answer: stopped, or their machines are unreachable"
    if first.in_flight:
        calls = zip(*(answer.in_flight for answer in answers))
        parts = [f"{title(call[0][0])} for {_span(call)}" for call in calls]
        return f"{'waits' if one else 'wait'} in {', '.join(parts)}"
    if first.last:
        span = _span([answer.last for answer in answers])
        return f"last completed {title(first.last[0])} {span} ago"
    return f"{'has' if one else 'have'} exchanged nothing yet"


def _span(entries):
    ends = [f"{pick(seconds for _, seconds in entries):.0f}" for pick in (min, max)]
    return f"{' to '.join(dict.fromkeys(ends))} s"


def _ranks(ranks):
    """Such as "ranks 0, 2, 5-511"."""
    runs = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = []
    for first, last in runs:
        few = last - first < 2
        parts += map(str, range(first, last + 1)) if few else [f"{first}-{last}"]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
