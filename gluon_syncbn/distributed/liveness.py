"""Finds out which processes have come to a meeting, and what the others do instead.

A collective that waits cannot tell for whom. So each process answers questions over TCP, on a
thread of its own that also runs while all others wait in MXNet.
"""

import collections
import errno
import fcntl
import ipaddress
import json
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import typing
import weakref

CAME = "came"
ABSENT = "absent"
SILENT = "silent"
GONE = "gone"

# What a process may tell of itself with every answer.
FAILED = "failed"
FINISHED = "finished"

# IP (IPv4 as IPv6 writes it), port, and the two halves of the token: a question shows the first
# and its answer the second, so that each side knows the other for one of its job.
_ADDRESS = struct.Struct(">16sH7s7s")
ADDRESS_SIZE = _ADDRESS.size
_MAPPED_IPV4 = bytes(10) + b"\xff\xff"

_HEAD = struct.Struct(">4s7sH")  # kind, half a token, and the size of the body that follows
_ASKER = struct.Struct(">I?")  # who asks, and whether it has come to its end
_QUESTION = b"SBQ1"
_ANSWER = b"SBA1"
_LONGEST_KEY = 256  # bytes
_LONGEST_ANSWER = 65535

_CONNECTION_LIFE = 5.0  # seconds
_MOST_AT_ONCE = 256  # so that asking stays below the usual limit of 1024 open files
_TOLD_OPEN = 3
_REMEMBERED = 16
_LONGEST_NOTICE = 4000
_BETWEEN_QUESTIONS = 0.1
_PATIENCE = 2.0
_LEAST_PATIENCE = 0.05
# The share of a timeout after which a wait is told.
WARN_AFTER = 0.1

_SIOCGIFADDR = 0x8915
_ENDED = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)

_now = time.monotonic
_log = logging.getLogger("gluon_syncbn")


class Answer(typing.NamedTuple):
    """What one process said about a meeting, or why it said nothing.

    state : CAME
            ABSENT, where it answered that it has not come
            SILENT, where it did not answer in time: stopped, or not to be reached
            GONE, where nobody, or somebody else, listens at its address
    open : its meetings under way that are oldest, each as (key, seconds since it came)
    last : the meeting that it left last, as (key, seconds since then), or None
    why : the system's message where it could not be asked, or None
    notice : what it told of itself: (FAILED, the error) or (FINISHED, ""), or None
    """

    state: str
    open: tuple = ()
    last: typing.Optional[tuple] = None
    why: typing.Optional[str] = None
    notice: typing.Optional[tuple] = None


class RollCall:
    """This process's part of the roll call.

    Parameters
    ----------
    rank, size : int
        This process's number, and how many there are.
    host : str, optional
        Where the others reach this process. By default what ``DMLC_NODE_HOST`` says, as MXNet's
        KVStore listens there too; else the address of the network interface that
        ``DMLC_INTERFACE`` or ``HOROVOD_GLOO_IFACE`` names; else the address from which this
        machine reaches ``DMLC_PS_ROOT_URI`` (the KVStore's scheduler) or
        ``HOROVOD_GLOO_RENDEZVOUS_ADDR``, which is one that the others' network knows; else, as
        nothing speaks of other machines, 127.0.0.1.
    attendance : callable, optional
        Knows of more meetings than those that `came` and `left` note: returns those under way and
        the last that ended well, two lists of (key, monotonic time). Called on another thread.

    Raises
    ------
    OSError
        Where this process cannot listen there.
    """

    def __init__(self, rank, size, host=None, attendance=None):
        self.rank = rank
        self.size = size
        self._open = {}
        self._ended = collections.deque(maxlen=_REMEMBERED)
        self._attendance = attendance or (lambda: ([], []))
        self._addresses = None
        self._notices = []
        # Who has told, in a question, that it has come to its end.
        self._finished = set()
        listener, ip = _listen(host or _own_host())
        token = secrets.token_bytes(14)
        self._address = _ADDRESS.pack(ip, listener.getsockname()[1], token[:7], token[7:])
        responder = _Responder(listener, token, self, most=size + 64)
        # Also when nobody holds this object any more, but not at exit: until it is closed, the
        # others may ask whether this process has come to its end.
        self._finalizer = weakref.finalize(self, responder.close)
        self._finalizer.atexit = False

    def close(self):
        """Stops answering. The others then take this process for gone."""
        self._finalizer()

    def address(self):
        """Where and how the others ask this process: `ADDRESS_SIZE` bytes to hand to them."""
        return self._address

    def set_addresses(self, addresses):
        """Takes what `address` gave in each process, by rank."""
        addresses = [bytes(address) for address in addresses]
        bad = [
            r
            for r, a in enumerate(addresses)
            if len(a) != ADDRESS_SIZE or not _ADDRESS.unpack(a)[1]
        ]
        if len(addresses) != self.size or bad or addresses[self.rank] != self._address:
            raise ValueError(
                f"Rank {self.rank} got {len(addresses)} addresses for {self.size} processes, those "
                f"of ranks {bad} malformed: give what address() returned in each process, by rank."
            )
        self._addresses = [_ADDRESS.unpack(address) for address in addresses]

    def came(self, key):
        """Notes that this process brings its part of the meeting `key`, a str that names this
        meeting and no later one, also where only its first and its last 126 bytes are left."""
        self._open[key] = _now()

    def left(self, key, complete=True):
        """Notes that the meeting is over for this process: that it was complete, or that this
        process gave it up and brings nothing any more."""
        if self._open.pop(key, None) is not None and complete:
            self._ended.append((key, _now()))

    def tell(self, kind, text=""):
        """Tells everyone who asks from now on: FAILED with an error, or FINISHED. The first such
        notice counts."""
        self._notices.append((kind, text[:_LONGEST_NOTICE]))

    def wait_for_the_end(self, timeout):
        """Returns when all processes have called this, as they do when their scripts end: None, or
        a sentence on those that ended otherwise, or did not answer for `timeout` seconds.

        One that answers is waited for without a limit, with a warning now and then: it may evaluate
        or save, and if it comes to a meeting, it fails there, as this process does not come.
        """
        self.tell(FINISHED)
        start = _now()
        warn_at = start + timeout * WARN_AFTER
        answered = {}
        silence = 0.0
        while True:
            answers = self.ask("", min(_PATIENCE, max(timeout - silence, _LEAST_PATIENCE)))
            # Whoever has seen all others finish is gone soon; it has told us before.
            missing = {
                rank: answer
                for rank, answer in answers.items()
                if rank not in self._finished and (answer.notice or [None])[0] != FINISHED
            }
            if not missing:
                return None
            now = _now()
            answered.update((rank, now) for rank, a in missing.items() if a.state != SILENT)
            silence = now - min(answered.get(rank, start) for rank in missing)
            waited = now - start
            lost = silence > timeout or any(a.state == GONE or a.notice for a in missing.values())
            if lost or now > warn_at:
                warn_at = now + waited
                story = (
                    f"Rank {self.rank} has come to the end of its script and has waited "
                    f"{waited:.3g} s for the other processes to come to theirs. "
                    f"{self.describe(missing, str)}"
                )
                if lost:
                    return story
                _log.warning(
                    "%s One that does not answer for %.3g s is an error; one that answers is "
                    "waited for without a limit. Should it wait for this process in turn, in its "
                    "Trainer or KVStore, then end them all.",
                    story,
                    timeout,
                )
            # Those who have come leave the last one its time.
            time.sleep(min(max(_BETWEEN_QUESTIONS, waited / 100), 1.0))

    def ask(self, key, patience=_PATIENCE):
        """Asks all other processes at once whether they have come to the meeting `key`.

        Returns
        -------
        dict from int to Answer
            By rank, without this process's own. It takes `patience` seconds at most.
        """
        if self._addresses is None:
            raise RuntimeError("The roll call has no addresses: call set_addresses first.")
        asker = _ASKER.pack(self.rank, (FINISHED, "") in self._notices)
        question = asker + _shortened(key).encode()
        others = [rank for rank in range(self.size) if rank != self.rank]
        waves = [others[i : i + _MOST_AT_ONCE] for i in range(0, len(others), _MOST_AT_ONCE)]
        answers = {}
        for wave in waves:
            addresses = {rank: self._addresses[rank] for rank in wave}
            answers.update(_ask(addresses, question, patience / len(waves)))
        return answers

    def describe(self, answers, title=repr):
        """One line on who came, this process included, and who did not and why.

        Parameters
        ----------
        answers : dict from int to Answer
            As from `ask`.
        title : callable
            Makes a readable text of a key, also of one that only another process uses.
        """
        came = [rank for rank, answer in answers.items() if answer.state == CAME]
        missing = {}
        for rank in sorted(answers):
            if answers[rank].state != CAME:
                missing.setdefault(_reason(answers[rank]), []).append(rank)
        parts = [
            f"{_ranks(ranks)} ({_excuse([answers[rank] for rank in ranks], title)})"
            for ranks in missing.values()
        ]
        return f"Came: {_ranks([*came, self.rank])}. Missing: {', '.join(parts) or 'none'}."


class _Message:
    """One end of a connection, and what of a message has passed it."""

    def __init__(self, connection, rank=None):
        self.connection = connection
        self.rank = rank
        self.ends = _now() + _CONNECTION_LIFE
        self.received = bytearray()
        self.outgoing = b""

    def send(self):
        """Sends what is still to be sent. True when that was all."""
        # MSG_NOSIGNAL: a script may have given SIGPIPE back its power to kill.
        sent = self.connection.send(self.outgoing, socket.MSG_NOSIGNAL)
        self.outgoing = self.outgoing[sent:]
        return not self.outgoing

    def receive(self, kind, token, longest):
        """The body of the message that comes in, or None while there is more to come.

        Raises ValueError where it is not of this kind, not of this job, or too long.
        """
        data = self.connection.recv(4096)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "closed before the message was complete")
        self.received += data
        expected = kind + token
        if self.received[: len(expected)] != expected[: len(self.received)]:
            raise ValueError("a stranger's message")
        if len(self.received) < _HEAD.size:
            return None
        size = _HEAD.unpack_from(self.received)[2]
        if size > longest:
            raise ValueError("a message too long")
        body = bytes(self.received[_HEAD.size : _HEAD.size + size])
        return body if len(body) == size else None


class _Responder:
    """Answers the others on a daemon thread until closed."""

    def __init__(self, listener, token, roll_call, most):
        self._listener = listener
        self._token = token
        self._open, self._ended = roll_call._open, roll_call._ended
        self._attendance = roll_call._attendance
        self._notices, self._finished = roll_call._notices, roll_call._finished
        self._most = most
        self._closed = False
        self._messages = {}  # by socket, the oldest first
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for server in (self._listener, self._wakened):
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="sbn-roll-call", daemon=True)
        _responders.add(self)
        self._thread.start()

    def close(self):
        if self._closed:
            return
        self._closed = True
        self._waker.send(b"\0")
        # The garbage collector may call this on any thread.
        if self._thread is not threading.current_thread():
            self._thread.join(_CONNECTION_LIFE)

    def release(self):
        """Closes what is open here. It takes nothing from the selector, since a forked child
        shares that with its parent."""
        self._closed = True
        for connection in (self._listener, self._waker, self._wakened, *self._messages):
            connection.close()
        self._messages.clear()
        self._selector.close()

    def _run(self):
        try:
            while not self._closed:
                oldest = next(iter(self._messages.values()), None)
                wait = None if oldest is None else max(0.0, oldest.ends - _now())
                for key, _ in self._selector.select(wait):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._messages:
                        self._serve(self._messages[key.fileobj])
                self._drop_late()
        finally:
            self.release()

    def _accept(self):
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(0.05)  # The question waits in the queue meanwhile.
            return
        connection.setblocking(False)
        if len(self._messages) >= self._most:
            self._drop(next(iter(self._messages.values())))
        self._messages[connection] = _Message(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, message):
        try:
            if not message.outgoing:
                question = message.receive(_QUESTION, self._token[:7], _ASKER.size + _LONGEST_KEY)
                if question is None:
                    return
                if len(question) < _ASKER.size:
                    raise ValueError("a question too short")
                asker, finished = _ASKER.unpack_from(question)
                if finished:
                    self._finished.add(asker)
                body = self._answer(question[_ASKER.size :].decode())
                message.outgoing = _HEAD.pack(_ANSWER, self._token[7:], len(body)) + body
                self._selector.modify(message.connection, selectors.EVENT_WRITE)
            if message.send():
                self._drop(message)
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._drop(message)

    def _answer(self, key):
        now = _now()
        more = self._attendance()
        # To copy a dict or a deque is one step under the interpreter's lock.
        under_way = sorted([*self._open.items(), *more[0]], key=_since)
        ended = sorted([*self._ended, *more[1]], key=_since)
        came = any(key == _shortened(one) for one, _ in under_way + ended)
        told = [(_shortened(one), now - since) for one, since in under_way[:_TOLD_OPEN]]
        last = ended and (_shortened(ended[-1][0]), now - ended[-1][1]) or None
        notice = self._notices[0] if self._notices else None
        return json.dumps([came, told, last, notice]).encode()

    def _drop(self, message):
        del self._messages[message.connection]
        self._selector.unregister(message.connection)
        message.connection.close()

    def _drop_late(self):
        now = _now()
        for message in list(self._messages.values()):
            if message.ends > now:
                break
            self._drop(message)


def _shortened(key):
    """As much of a meeting's key as a question holds: the front, which names the layer, and the
    end, which names the call."""
    name = key.encode()
    if len(name) <= _LONGEST_KEY:
        return key
    half = (_LONGEST_KEY - len("…".encode())) // 2
    return f"{name[:half].decode(errors='ignore')}…{name[-half:].decode(errors='ignore')}"


def _since(entry):
    return entry[1]


_responders = weakref.WeakSet()


def _release_in_child():
    # The parent answers. Did the child keep its sockets, they would outlive a parent that dies.
    for responder in list(_responders):
        responder.release()


os.register_at_fork(after_in_child=_release_in_child)


def _ask(addresses, question, patience):
    """The answers of processes, by rank; `addresses` holds each as unpacked."""
    answers = {}
    ends = _now() + patience
    with selectors.DefaultSelector() as selector:

        def settle(message, answer):
            selector.unregister(message.connection)
            message.connection.close()
            answers[message.rank] = answer

        try:
            for rank, address in addresses.items():
                ip, port, token, _ = address
                try:
                    connection = _start_connecting(ip, port)
                except OSError as error:
                    answers[rank] = _failure(error)
                    continue
                message = _Message(connection, rank)
                message.outgoing = _HEAD.pack(_QUESTION, token, len(question)) + question
                selector.register(connection, selectors.EVENT_WRITE, message)
            while selector.get_map():
                ready = selector.select(max(0.0, ends - _now()))
                for message in [key.data for key, _ in ready]:
                    try:
                        answer = _go_on(message, addresses[message.rank][3], selector)
                    except BlockingIOError:
                        continue
                    except (OSError, ValueError) as error:
                        answer = _failure(error)
                    if answer is not None:
                        settle(message, answer)
                if not ready and _now() >= ends:
                    break
        finally:
            for entry in list(selector.get_map().values()):
                settle(entry.data, Answer(SILENT))
    return answers


def _start_connecting(ip, port):
    ip = _readable(ip)
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect((str(ip), port))
    except BlockingIOError:
        pass
    except BaseException:
        connection.close()
        raise
    return connection


def _go_on(message, token, selector):
    """Sends more of the question or receives more of the answer, which it returns when whole."""
    if message.outgoing:
        if message.send():
            selector.modify(message.connection, selectors.EVENT_READ, message)
        return None
    body = message.receive(_ANSWER, token, _LONGEST_ANSWER)
    if body is None:
        return None
    came, under_way, last, notice = json.loads(body)
    under_way = tuple((key, seconds) for key, seconds in under_way)
    state = CAME if came else ABSENT
    return Answer(state, under_way, last and tuple(last), notice=notice and tuple(notice))


def _failure(error):
    # A ValueError is an answer of somebody else who got the port of a process that ended.
    if isinstance(error, ValueError) or error.errno in _ENDED:
        return Answer(GONE)
    return Answer(SILENT, why=error.strerror or str(error))


def _listen(host):
    """A listening socket, and its address in 16 bytes."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        ip = ipaddress.ip_address(address[0].partition("%")[0])
        if ip.is_unspecified:
            raise OSError(errno.EADDRNOTAVAIL, "no address that others could reach")
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(4096)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # The latter from a name that is no host's.
        raise OSError(
            getattr(error, "errno", errno.EINVAL),
            f"The roll call cannot listen on {host!r} ({getattr(error, 'strerror', error)}): set "
            "DMLC_NODE_HOST to an address of this machine that the other processes reach.",
        ) from error
    return listener, ip.packed if ip.version == 6 else _MAPPED_IPV4 + ip.packed


def _readable(ip):
    ip = ipaddress.IPv6Address(ip)
    return ip.ipv4_mapped or ip


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", name.encode()[:15])
        try:
            reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            return socket.inet_ntoa(reply[20:24])
        except OSError:
            pass  # It has no IPv4 address, or there is no such interface.
    try:
        with open("/proc/net/if_inet6") as lines:
            rows = [line.split() for line in lines]
    except OSError:
        return None
    # 20 is the scope of addresses that are good on one link only.
    found = [row[0] for row in rows if row[5] == name and row[3] != "20"]
    return str(ipaddress.IPv6Address(bytes.fromhex(found[0]))) if found else None


def _address_toward(host):
    """The address from which this machine would send to the host. It sends nothing."""
    if not host:
        return None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except (OSError, UnicodeError):
        return None


def _reason(answer):
    """Equal for answers that differ in seconds alone."""
    last = answer.last and answer.last[0]
    return answer.state, answer.why, tuple(key for key, _ in answer.open), last, answer.notice


def _excuse(answers, title):
    """Why the processes that gave these answers, of one reason, are missing."""
    one = len(answers) == 1
    first = answers[0]
    if first.notice and first.notice[0] == FAILED:
        return f"{'has' if one else 'have'} failed: {first.notice[1]}"
    if first.notice:
        return f"{'has' if one else 'have'} come to the end of the script"
    if first.state == GONE:
        return "its process is gone" if one else "their processes are gone"
    if first.why:
        return f"cannot be asked: {first.why}"
    if first.state == SILENT:
        reason = "does not answer: stopped, or its machine is unreachable"
        return reason if one else "do not answer: stopped, or their machines are unreachable"
    if first.open:
        meetings = zip(*(answer.open for answer in answers))
        parts = [f"{title(m[0][0])} for {_span([seconds for _, seconds in m])}" for m in meetings]
        return f"{'waits' if one else 'wait'} at {', '.join(parts)}"
    if first.last:
        seconds = _span([answer.last[1] for answer in answers])
        return f"last met at {title(first.last[0])} {seconds} ago"
    return f"{'has' if one else 'have'} met nobody yet"


def _span(seconds):
    least, most = f"{min(seconds):.0f}", f"{max(seconds):.0f}"
    return f"{most} s" if least == most else f"{least} to {most} s"


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
