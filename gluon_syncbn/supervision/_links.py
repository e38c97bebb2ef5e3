"""The connections between rank 0 and all other processes. A message is a line of JSON."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from typing import Any, Callable

from .. import durations

_VERSION = 1
# Bytes of a message, and those that may wait for a process that does not read.
_LONGEST, _MOST_UNSENT = 1 << 17, 1 << 19
# Connections that have not shown their token yet, beside those of the processes.
_MOST_STRANGERS = 256
_BACKLOG = 4096
# What ends a connection: an EOFError if the other process has closed it, as all do that end; an
# OSError may be the network, or the end of a process that has not read all, which on one machine it
# is. asyncio's timeout is Python's own from Python 3.11 on.
_ENDS = (EOFError, OSError, ValueError, asyncio.TimeoutError)
# The last message on a connection in place of which the process makes another.
_GOODBYE = None


def _line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _send(writer: StreamWriter, line: bytes) -> None:
    # The next message says the same, or more.
    if writer.transport.get_write_buffer_size() < _MOST_UNSENT:
        writer.write(line)


async def _message(reader: StreamReader) -> Any:
    """The next one. Raises EOFError at the end, OSError if the network ends it, and ValueError for
    anything else."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


async def _first_message(reader: StreamReader, token: str) -> Any:
    """What it carries: [_VERSION, token, ...] shows that no stranger sends it."""
    message = await _message(reader)
    if not (isinstance(message, list) and len(message) == 3 and message[0] == _VERSION):
        raise ValueError("a stranger's message")
    if not hmac.compare_digest(str(message[1]).encode(), token.encode()):
        raise ValueError("a stranger's token")
    return message[2]


class Hub:
    """The connections of rank 0.

    receive(rank, message): called for each message. connected(rank): a process has a new
    connection. disconnected(rank): it has closed its last one, soon after a message. greeting():
    the first message to a process.
    """

    def __init__(
        self,
        size: int,
        receive: Callable[[int, Any], None],
        connected: Callable[[int], None],
        disconnected: Callable[[int], None],
        greeting: Callable[[], Any],
    ) -> None:
        self._size, self._receive, self._greeting = size, receive, greeting
        self._connected, self._disconnected = connected, disconnected
        # A process shows the first and is shown the second, so each side knows the other.
        self._tokens = [secrets.token_hex(7) for _ in range(2)]
        self._writers: dict[int, StreamWriter] = {}
        self._strangers = 0

    async def listen(self) -> str:
        """Returns "IP port token token", by which `Link` finds it. Raises OSError."""
        host = _own_host()
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
                raise OSError("no address that others could reach")
            listener = socket.create_server(address, family=family)
            self._server = await asyncio.start_server(
                self._serve, sock=listener, limit=_LONGEST, backlog=_BACKLOG
            )
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name.
            raise OSError(
                f"This process cannot listen on {host!r} ({error}): set DMLC_NODE_HOST to an "
                "address of this machine that the other processes reach."
            ) from error
        ip, port = listener.getsockname()[:2]
        return " ".join([ip.partition("%")[0], str(port), *self._tokens])

    @property
    def connected(self) -> int:
        return len(self._writers)

    def send(self, message: Any) -> None:
        """Sends it to all."""
        line = _line(message)
        for writer in self._writers.values():
            _send(writer, line)

    def close(self) -> None:
        """Listens no more."""
        self._server.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        rank, heard, has_ended = None, 0.0, False
        try:
            rank, heard = await self._admit(reader), _now()
            before, self._writers[rank] = self._writers.get(rank), writer
            if before:
                before.close()
            self._connected(rank)
            _send(writer, _line([_VERSION, self._tokens[1], self._greeting()]))
            while True:
                message = await _message(reader)
                if self._writers.get(rank) is not writer:  # What it says is old.
                    break
                if message == _GOODBYE:
                    del self._writers[rank]
                    break
                heard = _now()
                self._receive(rank, message)
        except _ENDS as error:  # Also strangers that are slow, or send anything else.
            kinds = (EOFError, ConnectionResetError) if _is_here(writer) else EOFError
            has_ended = isinstance(error, kinds) and _now() - heard < durations.FRESH
        finally:
            writer.close()
            if self._writers.get(rank) is writer:
                del self._writers[rank]
                if has_ended:
                    self._disconnected(rank)

    async def _admit(self, reader: StreamReader) -> int:
        if self._strangers >= _MOST_STRANGERS + self._size:
            raise ConnectionRefusedError
        self._strangers += 1
        try:
            first = _first_message(reader, self._tokens[0])
            rank = await asyncio.wait_for(first, durations.GREETING)
        finally:
            self._strangers -= 1
        if rank not in range(1, self._size):
            raise ValueError("a stranger's rank")
        return rank


class Link:
    """The connection of another process to rank 0, made again when it breaks.

    address : what `Hub.listen` has returned
    receive(message) : called for each message
    gone() : called if the process of rank 0 has ended: nobody, or a stranger, listens there, and
        no firewall can have refused, as it is on this machine, or it has closed the connection
        before
    """

    def __init__(
        self, rank: int, address: str, receive: Callable[[Any], None], gone: Callable[[], None]
    ) -> None:
        self._rank, self._receive, self._gone = rank, receive, gone
        host, port, *self._tokens = address.split()
        self._address = host, int(port)
        self._is_here = _address_toward(host) == host
        self._has_ended = False
        self._writer: StreamWriter | None = None
        self._task = asyncio.ensure_future(self._run())

    def send(self, message: Any) -> None:
        if self._writer:
            _send(self._writer, _line(message))

    def renew(self) -> None:
        """Connects again: a new connection is faster than an old one when a link is back."""
        if self._writer:
            _replace(self._writer)
            self._writer = None

    async def _run(self) -> None:
        while True:
            try:
                await self._follow(*await asyncio.wait_for(self._connect(), durations.ATTEMPT))
            except (ConnectionRefusedError, ValueError):  # Nobody listens there, or a stranger.
                if self._is_here or self._has_ended:
                    self._gone()
                await asyncio.sleep(durations.BETWEEN_ATTEMPTS)
            except _ENDS:
                await asyncio.sleep(durations.BETWEEN_ATTEMPTS)

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._address, limit=_LONGEST)
        try:
            _send(writer, _line([_VERSION, self._tokens[0], self._rank]))
            self._receive(await _first_message(reader, self._tokens[1]))
            return reader, writer
        except BaseException:  # Also if it takes too long.
            _replace(writer)
            raise

    async def _follow(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._writer, heard = writer, _now()
        try:
            while True:
                self._receive(await _message(reader))
                heard = _now()
        except _ENDS as error:  # Connects again at once.
            by_other = isinstance(error, EOFError) and self._writer is writer
            self._has_ended = by_other and _now() - heard < durations.FRESH
        finally:
            self._writer = None
            writer.close()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_here(writer: StreamWriter) -> bool:
    """Whether the other end of the connection is on this machine."""
    ends = [writer.get_extra_info(name) for name in ("peername", "sockname")]
    return None not in ends and ends[0][0] == ends[1][0]


def _replace(writer: StreamWriter) -> None:
    """Ends a connection for another one."""
    _send(writer, _line(_GOODBYE))
    writer.transport.abort()


def _own_host() -> str:
    """Where other processes reach this one. MXNet's KVStore listens at ``DMLC_NODE_HOST`` too."""
    get = os.environ.get
    return (
        get("DMLC_NODE_HOST")
        or _address_toward(get("DMLC_PS_ROOT_URI") or get("HOROVOD_GLOO_RENDEZVOUS_ADDR"))
        or "127.0.0.1"
    )


def _address_toward(host: str | None) -> str | None:
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
