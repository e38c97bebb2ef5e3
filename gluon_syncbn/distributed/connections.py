"""The connections between rank 0 and all other processes. A message is a line of JSON."""

import asyncio
import hmac
import ipaddress
import json
import os
import secrets
import socket

_VERSION = 1
# Bytes of a message, and those that may wait for a process that does not read.
_LONGEST, _MOST_UNSENT = 1 << 17, 1 << 19
# Connections that have not shown their token yet, and the seconds that they have.
_MOST_STRANGERS, _GREETING_SECONDS = 256, 5.0
_BACKLOG = 4096
# Seconds between two attempts to connect.
_BETWEEN = 0.2
# What ends a connection. asyncio's timeout is Python's own from Python 3.11 on.
_ENDS = (OSError, ValueError, asyncio.TimeoutError)


def _send(writer, message):
    # The next message says the same, or more.
    if writer.transport.get_write_buffer_size() < _MOST_UNSENT:
        writer.write(json.dumps(message).encode() + b"\n")


def _has(message, token):
    """Whether a first message is [_VERSION, token, ...]."""
    return (
        isinstance(message, list)
        and message[:1] == [_VERSION]
        and hmac.compare_digest(str(message[1]), token)
    )


class Hub:
    """The connections of rank 0.

    receive(rank, message), disconnected(rank): called for each message, and when the connection of
    a process ends that has made no other. greeting(): the first message to a process.
    """

    def __init__(self, size, receive, disconnected, greeting):
        self._size = size
        self._receive, self._disconnected, self._greeting = receive, disconnected, greeting
        # A process shows the first and is shown the second, so each side knows the other.
        self._tokens = [secrets.token_hex(7) for _ in range(2)]
        self._writers = {}
        self._strangers = 0

    async def listen(self):
        """Returns "IP port token token", by which `Link` finds it. Raises OSError."""
        host = _own_host()
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            if ipaddress.ip_address(address[0].partition("%")[0]).is_unspecified:
                raise OSError("no address that others could reach")
            listener = socket.create_server(address, family=family)
            await asyncio.start_server(self._serve, sock=listener, limit=_LONGEST, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name.
            raise OSError(
                f"This process cannot listen on {host!r} ({error}): set DMLC_NODE_HOST to an "
                "address of this machine that the other processes reach."
            ) from error
        ip, port = listener.getsockname()[:2]
        return " ".join([ip.partition("%")[0], str(port), *self._tokens])

    @property
    def connected(self):
        return len(self._writers)

    def send(self, message):
        """Sends it to all."""
        for writer in self._writers.values():
            _send(writer, message)

    async def _serve(self, reader, writer):
        rank = None
        try:
            rank = await self._admit(reader)
            before, self._writers[rank] = self._writers.get(rank), writer
            if before:
                before.close()
            _send(writer, [_VERSION, self._tokens[1], self._greeting()])
            while True:
                line = await reader.readline()
                if not line:
                    break
                self._receive(rank, json.loads(line))
        except _ENDS:  # Also strangers that are slow, or send anything else.
            pass
        finally:
            writer.close()
            if self._writers.get(rank) is writer:
                del self._writers[rank]
                self._disconnected(rank)

    async def _admit(self, reader):
        if self._strangers >= _MOST_STRANGERS:
            raise ConnectionRefusedError
        self._strangers += 1
        try:
            message = json.loads(await asyncio.wait_for(reader.readline(), _GREETING_SECONDS))
        finally:
            self._strangers -= 1
        if not (_has(message, self._tokens[0]) and message[2] in range(1, self._size)):
            raise ValueError("a stranger's message")
        return message[2]


class Link:
    """The connection of another process to rank 0, made again when it breaks.

    address : what `Hub.listen` has returned
    receive(message) : called for each message
    refused() : called if nobody, or somebody else, listens there
    silence() : seconds without a message after which to connect again, as a new connection is
        faster than an old one when a link is back
    """

    def __init__(self, rank, address, receive, refused, silence):
        self._rank, self._receive = rank, receive
        self._refused, self._silence = refused, silence
        host, port, *self._tokens = address.split()
        self._address = host, int(port)
        self._writer = None
        # Connections that have been silent. Their end would mean that of this process, so they stay
        # open until there is a new one.
        self._silent = []
        self._task = asyncio.ensure_future(self._run())

    def send(self, message):
        if self._writer:
            _send(self._writer, message)

    def close(self):
        self._task.cancel()
        for writer in [self._writer, *self._silent]:
            if writer:
                writer.close()

    async def _run(self):
        while True:
            try:
                await self._follow()
            except ConnectionRefusedError:
                self._refused()
            except _ENDS:
                pass
            await asyncio.sleep(_BETWEEN)

    async def _follow(self):
        connecting = asyncio.open_connection(*self._address, limit=_LONGEST)
        reader, writer = await asyncio.wait_for(connecting, self._silence())
        try:
            _send(writer, [_VERSION, self._tokens[0], self._rank])
            first = json.loads(await asyncio.wait_for(reader.readline(), self._silence()))
            if not _has(first, self._tokens[1]):
                raise ConnectionRefusedError
            self._receive(first[2])
            self._writer = writer
            while self._silent:
                self._silent.pop().close()
            while True:
                line = await asyncio.wait_for(reader.readline(), self._silence())
                if not line:
                    return
                self._receive(json.loads(line))
        except asyncio.TimeoutError:
            self._silent.append(writer)
        finally:
            self._writer = None
            if writer not in self._silent:
                writer.close()


def _own_host():
    """Where other processes reach this one. MXNet's KVStore listens at ``DMLC_NODE_HOST`` too."""
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
    # Not link-local addresses.
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
