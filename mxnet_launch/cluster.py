"""Several launchers: their positions, from the environment, and the connections between them."""

import argparse
import contextlib
import json
import re
import socket
import threading
import time
from typing import NamedTuple

from .patience import Patience
from .processes import say

_DEFAULT_PORT = 9091
_CONNECT_SECONDS = 2
_SAY_SECONDS = 10  # Until a launcher says what it waits for.
_POLL_SECONDS = 0.05
_LONGEST_MESSAGE, _LONGEST_GREETING = 1 << 20, 4096
_MOST_STRANGERS = 256  # Connections that have not identified themselves yet.
_SLURM = "SLURM_PROCID", "SLURM_NTASKS"
# The variables that say which launcher this is. Slurm's come last: its interactive shells have them
# too, as have the processes that mpirun starts through it.
_POSITIONS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    _SLURM,
)


class LaunchError(Exception):
    """A user's mistake: what was given, what was expected, what to do."""


def cannot_listen(port, error):
    return LaunchError(
        f"cannot listen at port {port} ({error}): another job may use it. Choose another with "
        "--port, MASTER_PORT or DMLC_PS_ROOT_PORT, for all launchers."
    )


class Position(NamedTuple):
    """This launcher among `size` launchers. That of rank 0 listens at `port + 1` of `master`."""

    rank: int
    size: int
    master: str
    port: int
    job: str
    host: str

    @property
    def bound_host(self):
        """Where rank 0 listens: everywhere, as the name of this machine may resolve to its loopback
        here and to its address elsewhere."""
        is_here = self.master == "localhost" or self.master.startswith("127.")
        return self.master if is_here else ""


def between(low, high, kind=int):
    """The type of a command line argument that is a number from `low` to `high`."""

    def convert(text):
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        raise argparse.ArgumentTypeError(f"expected a number from {low} to {high}, got {text!r}")

    return convert


port_number = between(1, 65534)  # The next one must exist too.


def has_dmlc_role(environment):
    """Whether another launcher has already given this process its role in the KVStore."""
    names = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
    missing = [name for name in names if name not in environment]
    role = environment.get("DMLC_ROLE")
    if role is None:
        return False
    if role not in ("worker", "server", "scheduler"):
        raise LaunchError(f"DMLC_ROLE must be worker, server or scheduler; got {role!r}.")
    if missing:
        raise LaunchError(f"DMLC_ROLE is set and {', '.join(missing)} missing: set all, or none.")
    return True


def check_ipv4(environment):
    """Refuses IPv6, of which the KVStore knows nothing."""
    for name in ("MASTER_ADDR", "DMLC_NODE_HOST", "DMLC_PS_ROOT_URI"):
        if ":" in environment.get(name, ""):
            raise LaunchError(
                f"{name} is {environment[name]!r}: give an IPv4 address, or a name that has one. "
                "MXNet's KVStore does not know IPv6."
            )


def find_position(environment, port=None):
    """The position of this launcher, from the variables of Kubernetes' training operators, mpirun
    or Slurm. `port` takes precedence over MASTER_PORT."""
    check_ipv4(environment)

    def read(name, convert):
        try:
            return convert(environment[name])
        except argparse.ArgumentTypeError as error:
            raise LaunchError(f"{name}: {error}.") from None

    sizes = {
        names: read(names[1], between(1, 1 << 20))
        for names in _POSITIONS
        if all(name in environment for name in names)
    }
    if not sizes:
        sets = ", ".join(" and ".join(names) for names in _POSITIONS)
        raise LaunchError(
            f"--from-env finds no DMLC_ROLE, and none of {sets}: start it through srun, mpirun or "
            "a training operator, or give -n without it."
        )
    # One process says little: an interactive shell is one too.
    names = next((names for names in sizes if sizes[names] > 1), next(iter(sizes)))
    size = sizes[names]
    rank = read(names[0], between(0, size - 1))
    master, job = environment.get("MASTER_ADDR", ""), ""
    if names == _SLURM:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        master = master or first_host(nodes)
        job = environment.get("SLURM_JOB_ID", "")
    if size > 1 and not master:
        raise LaunchError(
            "SLURM_STEP_NODELIST is not set: start it through srun, or give MASTER_ADDR, the "
            "address of rank 0."
            if names == _SLURM
            else "MASTER_ADDR is not set: it is the address of rank 0."
        )
    if port is None and "MASTER_PORT" in environment:
        port = read("MASTER_PORT", port_number)
    # Jobs that share a machine get different ports, below the ephemeral ports.
    default = _DEFAULT_PORT + 2 * (int(job) % 10000 if job.isdigit() else 0)
    host = environment.get("DMLC_NODE_HOST", "")
    return Position(rank, size, master or "127.0.0.1", port or default, f"{job}:{size}", host)


def first_host(nodes):
    """The first name in a node list of Slurm: "gpu[03-05,9],login" gives "gpu03"."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes).group()
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first)


class _Peer:
    """The connection to another launcher. Each message is one line of JSON."""

    def __init__(self, connection, address):
        self.socket = connection
        self.address = address[0]
        self.host = ""  # If the user named one.
        self.done = self.shuts_down = False
        self._until = time.monotonic() + _CONNECT_SECONDS
        connection.settimeout(_CONNECT_SECONDS)
        self._lines = connection.makefile("rb")

    def end_after(self, seconds):
        """Makes the kernel end the connection once the other machine has been unreachable for that
        long. It probes every second, so it may notice up to two seconds late that the machine is
        back."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        milliseconds = int(1000 * (seconds + 2))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def send(self, **message):
        with contextlib.suppress(OSError):  # The receiving thread notices lost connections.
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def _peek(self):
        """The data that has arrived and was not received: None for nothing, b"" for the end."""
        self.socket.settimeout(0)
        try:
            return self.socket.recv(_LONGEST_GREETING, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        finally:
            self.socket.settimeout(_CONNECT_SECONDS)

    def greeting(self):
        """The first message, or None before it is complete."""
        data = self._peek()
        if data and b"\n" in data:
            return self.receive()
        may_arrive = data is None or 0 < len(data) < _LONGEST_GREETING
        return None if may_arrive and time.monotonic() < self._until else {}

    def receive(self):
        """The next message, empty if the connection is lost or not a launcher's."""
        try:
            message = json.loads(self._lines.readline(_LONGEST_MESSAGE))
        except (OSError, ValueError, RecursionError):
            return {}
        return message if isinstance(message, dict) else {}

    def has_left(self):
        """Whether a launcher that has nothing to send has closed the connection."""
        return self._peek() is not None

    def close(self):
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Cluster:
    """The connections between launchers: rank 0 has one to each of the others.

    All must have the same number of `workers` and the same `engine`, and wait for each other up to
    `wait` seconds. A machine that is silent for `lost_after` seconds is gone. Like the KVStore,
    they trust their network.

    `hosts` are the IPv4 addresses of the workers' machines, in the order of their ranks. `failure`
    is what failed at another launcher, or None.
    """

    def __init__(self, position, workers, engine, wait, lost_after=10):
        self.failure = None
        self._position, self._wait = position, wait
        self._options = {"workers": workers, "engine": engine}
        self._port = position.port + 1
        self._patience, self._said = Patience(wait), False
        self._done = self._shuts_down = False
        self._peers = {}
        try:
            hosts = self._gather() if position.rank == 0 else self._join()
        except BaseException as error:
            self._spread(failure=str(error))
            self.close()
            raise
        self.hosts = [host for host in hosts for _ in range(workers)]
        for rank, peer in self._peers.items():
            peer.socket.settimeout(None)
            peer.end_after(lost_after)
            threading.Thread(target=self._follow, args=(rank, peer), daemon=True).start()

    def close(self):
        self.failure = self.failure or "the connections are closed"
        for peer in self._peers.values():
            peer.close()

    @property
    def everyone_done(self):
        """Whether this launcher may end. Rank 0 waits for all, as it runs the scheduler."""
        return self._done and (self._position.rank > 0 or all(p.done for p in self._peers.values()))

    def report_done(self):
        """Reports that all workers of this launcher ended well."""
        if not self._done:
            self._done = True
            self._spread(done=True)

    def report_shutdown(self):
        """Reports that all workers of this launcher have ended or shut down. Returns whether those
        of all launchers have, which the others learn from rank 0."""
        others = all(peer.done or peer.shuts_down for peer in self._peers.values())
        if not self._shuts_down and (others or self._position.rank > 0):
            self._shuts_down = True
            self._spread(shuts_down=True)
        return others

    def report_failure(self, text):
        """Ends all other launchers."""
        text = f"launcher {self._position.rank} ({socket.gethostname()}) says: {text}"
        self._spread(failure=text)

    def _spread(self, **message):
        for peer in self._peers.values():
            peer.send(**message)

    def _fail(self, text):
        if not self.failure:
            self.failure = text
            if self._position.rank == 0:
                self._spread(failure=text)

    def _follow(self, rank, peer):
        """Receives from one launcher until the connection ends."""
        for message in iter(peer.receive, {}):
            peer.done |= "done" in message
            peer.shuts_down |= "shuts_down" in message
            if "failure" in message:
                self._fail(str(message["failure"]))
        # Rank 0 waits for all others, so it leaves a launcher that is done only on a failure.
        if not peer.done and not (self._done and rank == 0):
            self._fail(f"the launcher of rank {rank} is gone, or its machine cannot be reached")

    def _check_wait(self, missing, remedy):
        """Raises when the time to wait is over, and says once what is missing."""
        seconds = self._patience.waited()
        if seconds > self._wait:
            raise LaunchError(f"{missing} after {self._wait:.7g} s: {remedy}")
        if seconds > _SAY_SECONDS and not self._said:
            self._said = True
            say(f"{missing}, waiting.")

    def _gather(self):
        """Rank 0: waits for all others and sends them the addresses of all."""
        size, strangers = self._position.size, []
        with self._listen() as listener, contextlib.ExitStack() as stack:
            stack.callback(lambda: [stranger.close() for stranger in strangers])
            while True:
                # A launcher that ended while it waited may connect again, as a restarted pod does.
                for rank in [rank for rank, peer in self._peers.items() if peer.has_left()]:
                    self._peers.pop(rank).close()
                missing = [rank for rank in range(1, size) if rank not in self._peers]
                if not missing:
                    break
                names = ", ".join(map(str, missing[:8])) + (", ..." if missing[8:] else "")
                self._check_wait(
                    f"launchers {names} of {size} did not connect to port {self._port}",
                    "start one launcher for each rank, such as through srun, and open this port.",
                )
                self._admit(listener, strangers)
                time.sleep(_POLL_SECONDS)
        local = [peer.socket.getsockname()[0] for peer in self._peers.values()]
        remote = [address for address in local if not address.startswith("127.")]
        hosts = {0: self._position.host or (remote or ["127.0.0.1"])[0]}
        for rank, peer in self._peers.items():
            # A launcher of this machine connected over the loopback, where others cannot reach it.
            is_here = peer.address.startswith("127.")
            hosts[rank] = peer.host or (hosts[0] if is_here else peer.address)
        hosts = [_resolve(hosts[rank]) for rank in range(size)]
        self._spread(hosts=hosts)
        return hosts

    def _listen(self):
        address = self._position.bound_host, self._port
        try:
            listener = socket.create_server(address, backlog=4096)
        except OSError as error:
            raise cannot_listen(self._port, error) from error
        listener.setblocking(False)
        return listener

    def _admit(self, listener, strangers):
        """Admits launchers of this job among the new connections, without waiting. Closes all other
        connections, and those that are slow or too many."""
        with contextlib.suppress(OSError):  # No more have connected, or no more files may be open.
            for _ in range(_MOST_STRANGERS):
                strangers.append(_Peer(*listener.accept()))
        for peer in strangers[:]:
            message = peer.greeting()
            if message is not None:
                strangers.remove(peer)
                self._welcome(peer, message)
        while len(strangers) > _MOST_STRANGERS:
            strangers.pop(0).close()

    def _welcome(self, peer, message):
        job, rank, host, options = map(message.get, ("job", "rank", "host", "options"))
        kinds = type(rank), type(host), type(options)
        if kinds != (int, str, dict) or options.keys() != self._options.keys():
            return peer.close()
        if job != self._position.job or rank not in range(1, self._position.size):
            return peer.close()
        peer.host = host
        other = self._peers.get(rank)
        is_second = other is not None and not other.has_left()
        # From here on it gets the errors too.
        self._peers["second" if is_second else rank] = peer
        for name, value in self._options.items():
            if options[name] != value:
                raise LaunchError(
                    f"{name} is {value} at rank 0 and {options[name]} at rank {rank} of the "
                    "launchers: start all with the same options."
                )
        if is_second:
            raise LaunchError(
                f"two launchers, at {other.address} and {peer.address}, are of rank {rank}: each "
                "needs a rank of its own."
            )

    def _join(self):
        """All others: connect to rank 0 and receive the addresses of all."""
        position = self._position
        address = position.master, self._port
        peer = self._peers[0] = _Peer(self._connect(address), address)
        peer.send(job=position.job, rank=position.rank, host=position.host, options=self._options)
        # Rank 0 reports who is missing, and it may have begun to wait later.
        peer.socket.settimeout(2 * self._wait + _CONNECT_SECONDS)
        message = peer.receive()
        if "hosts" in message:
            return message["hosts"]
        raise LaunchError(
            message.get("failure")
            or f"rank 0 at {position.master}:{self._port} gave no answer: it ended, waits too long "
            f"for others, or serves another job than {position.job!r}."
        )

    def _connect(self, address):
        while True:
            try:
                connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
                # Without a listener, a connection within this machine may connect to itself.
                if connection.getsockname() != connection.getpeername():
                    return connection
                connection.close()
                error = "nobody listens"
            except OSError as failure:
                error = failure
            self._check_wait(
                f"rank 0 did not answer at {address[0]}:{address[1]} ({error})",
                "see that its launcher runs, that MASTER_ADDR and the port are the same everywhere "
                "and that the port is open.",
            )
            time.sleep(0.3)


def _resolve(host):
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise LaunchError(f"DMLC_NODE_HOST is {host!r}, which has no address: {error}.") from error
