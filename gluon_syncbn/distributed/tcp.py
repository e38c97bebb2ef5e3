"""Messages between processes over TCP, each a line of a token and JSON, and their server."""

import contextlib
import ipaddress
import json
import logging
import os
import secrets
import socket
import socketserver
import threading
import time
import weakref

from ..native import threads

_now = time.monotonic
_log = logging.getLogger("gluon_syncbn")
# Seconds.
_CLOSED_WITHIN, _AFTER_ERROR = 1.0, 0.01


def send(connection, token, content, ends):
    connection.settimeout(max(ends - _now(), 0.001))
    # MSG_NOSIGNAL: a script may have restored the default of SIGPIPE, which kills.
    line = token + b" " + json.dumps(content).encode() + b"\n"
    connection.sendall(line, socket.MSG_NOSIGNAL)


def receive(connection, token, longest, ends):
    """The content of a message. Raises ValueError if it is a stranger's."""
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


class _Closed(Exception):
    """Ends `serve_forever` once the server is closed."""


class Server(socketserver.ThreadingTCPServer):
    """Calls answer(connection) for each connection, on a thread of its own, and
    ``watch.look()`` every ``watch.period`` seconds."""

    block_on_close = False
    request_queue_size = 4096

    def __init__(self, host, answer, most, watch=None):
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        self.address_family, _, _, _, address = found[0]
        self._answer, self._most, self._watch = answer, most, watch
        self._connections = {}  # the oldest first
        self._closed = self._logged = False
        super().__init__(address, None)
        self.socket.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="sbn-liveness", daemon=True)

    def start(self):
        _servers.add(self)
        self._thread.start()

    def close(self):
        self._closed = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        # If memory is short, it may be stuck starting another thread.
        self._thread.join(_CLOSED_WITHIN)
        for connection in list(self._connections):
            _hang_up(connection)
        self.server_close()

    def release_in_child(self):
        # Only the parent answers. Sockets kept by the child would outlive a parent that dies.
        for connection in [*self._connections, self.socket]:
            connection.close()

    def get_request(self):
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.01)  # The connection stays queued until files can be opened again.
            raise

    def process_request(self, request, client_address):
        self._connections[request] = None
        for oldest in list(self._connections)[: -self._most]:
            _hang_up(oldest)
        try:
            threads.start(self.process_request_thread, request, client_address)
        except RuntimeError:  # There are no more threads. Without an answer we would seem gone.
            self.process_request_thread(request, client_address)

    def _serve(self):
        while not self._closed:
            try:
                self.serve_forever(self._watch and self._watch.period)
            except Exception as error:
                # What failed, such as a look without free file descriptors, may succeed next time.
                if not self._closed:
                    self._log_once(error)
                    time.sleep(_AFTER_ERROR)

    def _log_once(self, error):
        if not self._logged:
            text = "The thread that answers other processes goes on after an error: %r"
            # On another thread, as nobody may read the output.
            with contextlib.suppress(RuntimeError):  # There are no more threads.
                threads.start(_log.warning, text, error)
                self._logged = True

    def service_actions(self):
        if self._closed:
            raise _Closed
        if self._watch:
            self._watch.look()

    def finish_request(self, request, client_address):
        self._answer(request)

    def shutdown_request(self, request):
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        """Strangers, and clients that were slow or hung up, get no answer."""


def _hang_up(connection):
    """Ends the wait of the connection's thread, which then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def serve(host, answer, most, watch=None):
    try:
        server = Server(host, answer, most, watch)
        if ipaddress.ip_address(server.server_address[0].partition("%")[0]).is_unspecified:
            server.server_close()
            raise OSError("no address that others could reach")
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name.
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


def own_host():
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
