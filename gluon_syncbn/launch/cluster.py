"""Several launchers: where the environment puts this one, and their connection to each other."""

import json
import re
import select
import shutil
import socket
import subprocess
import time
from typing import NamedTuple

_DMLC = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
_DEFAULT_PORT = 9091
_MOST_MESSAGE = 1 << 20
_CONNECT_SECONDS = 2
_NOTICE_SECONDS = 10


class LaunchError(Exception):
    """What the user can mend: one sentence that says what came and what was expected."""


class Place(NamedTuple):
    """Where this launcher stands among `size` launchers. They meet at `port + 1` of `master`."""

    rank: int
    size: int
    master: str
    port: int
    job: str
    host: str


def as_dmlc_says(environment):
    """Whether another launcher has already said what this process is."""
    if "DMLC_ROLE" not in environment:
        return False
    missing = [name for name in _DMLC if name not in environment]
    if missing:
        raise LaunchError(f"DMLC_ROLE is set and {', '.join(missing)} missing: set all, or none.")
    if environment["DMLC_ROLE"] not in ("worker", "server", "scheduler"):
        raise LaunchError(
            f"DMLC_ROLE is {environment['DMLC_ROLE']}: it must be worker, server or scheduler."
        )
    return True


def find_place(environment, port=None):
    """The place of this launcher, from Slurm's variables or those of Kubernetes' training
    operators.

    `port` takes precedence over what the environment says.
    """
    if "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment:
        rank, size = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
        master = environment.get("MASTER_ADDR") or _first_slurm_node(environment)
        # So two jobs that share a machine do not meet, below the ports that systems give away.
        job = environment.get("SLURM_JOB_ID", "")
        default = _DEFAULT_PORT + 2 * (int(job) % 10000 if job.isdigit() else 0)
    elif "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        master = environment.get("MASTER_ADDR")
        job, default = "", _DEFAULT_PORT
    else:
        raise LaunchError(
            "--from-env finds no DMLC_ROLE, no SLURM_PROCID and SLURM_NTASKS, and no RANK and "
            "WORLD_SIZE: start it through srun or a training operator, or give -n without it."
        )
    if not 0 <= rank < size:
        raise LaunchError(f"this launcher has rank {rank} of {size}: ranks go from 0 to size - 1.")
    if not master:
        if size > 1:
            raise LaunchError("MASTER_ADDR is not set: it is the address of rank 0.")
        master = "127.0.0.1"
    if port is None and "MASTER_PORT" in environment:
        port = check_port("MASTER_PORT", _number(environment, "MASTER_PORT"))
    job = f"{job}:{size}"
    return Place(rank, size, master, port or default, job, environment.get("DMLC_NODE_HOST", ""))


def check_port(name, port):
    """Launchers meet at the next one, so that there has to be one."""
    if not 0 < port < 65535:
        raise LaunchError(f"{name} is {port}: give a port from 1 to 65534.")
    return port


def _number(environment, name):
    try:
        return int(environment[name])
    except ValueError:
        raise LaunchError(f"{name} is {environment[name]!r}: it must be a number.") from None


def _first_slurm_node(environment):
    """The machine of task 0, the first of the list.

    SLURM_LAUNCH_NODE_IPADDR comes last, as it is where srun was called, such as a login node.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        return environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if shutil.which("scontrol"):
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], stdout=subprocess.PIPE, text=True
        )
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    return first_host(nodes)


def first_host(nodes):
    """The first name in a list of Slurm's: "gpu[03-05,9],login" gives "gpu03"."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes).group()
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first)


class _Caller:
    """A connection to another launcher, over which messages of one line of JSON go."""

    def __init__(self, connection):
        self.socket = connection
        self.rank = None
        self.done = False
        self._data = b""
        connection.settimeout(_CONNECT_SECONDS)
        # A machine that goes down says nothing: the kernel finds out, within 6 s.
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 6000),
        ):
            connection.setsockopt(level, option, value)

    def fileno(self):
        return self.socket.fileno()

    def send(self, **message):
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # The connection is lost, which receiving finds out.

    def receive(self):
        """The messages that came, or None where the connection is lost or speaks otherwise."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        *lines, self._data = (self._data + data).split(b"\n")
        if not data or len(self._data) > _MOST_MESSAGE:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None


class Meeting:
    """The connection of this launcher to the others: of rank 0 to all, of all others to rank 0.

    As the KVStore does, it trusts the network that it is in.

    Parameters
    ----------
    place : Place
        Where this launcher stands.
    workers, engine : int, str
        What must be equal at all launchers.
    patience : float
        Seconds to wait for the others.
    say : callable
        Prints a sentence.

    Attributes
    ----------
    hosts : list of str
        The IPv4 address of each worker's machine, in the order of their ranks.
    everyone_done : bool
        Whether this launcher may end.
    """

    def __init__(self, place, workers, engine, patience, say):
        self._place = place
        self._terms = {"job": place.job, "workers": workers, "engine": engine}
        self._callers = []
        self._failure = None
        self._done = False
        self._deadline = time.monotonic() + patience
        self._patience = patience
        self._say = say
        try:
            hosts = self._gather() if place.rank == 0 else self._join()
        except BaseException:
            self.close()
            raise
        self.hosts = [host for host in hosts for _ in range(workers)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        for caller in self._callers:
            caller.socket.close()

    @property
    def everyone_done(self):
        return self._done and (self._place.rank > 0 or all(c.done for c in self._callers))

    def tell_done(self):
        """All workers of this launcher ended well."""
        if not self._done:
            self._done = True
            if self._place.rank > 0:
                self._callers[0].send(done=True)

    def tell_failed(self, text):
        """Has all others end."""
        self._spread(f"launcher {self._place.rank} ({socket.gethostname()}) says: {text}")

    def poll(self):
        """What failed elsewhere, or None."""
        for caller in select.select(self._callers, [], [], 0)[0]:
            messages = caller.receive()
            if messages is None:
                self._callers.remove(caller)
                caller.socket.close()
                if not caller.done and not self._done_at_root():
                    self._fail(f"the launcher of rank {caller.rank} is gone")
            for message in messages or ():
                caller.done |= bool(message.get("done"))
                if "failed" in message:
                    self._fail(str(message["failed"]))
        return self._failure

    def _done_at_root(self):
        # Rank 0 waits for all others, so it only leaves before them where it failed.
        return self._place.rank > 0 and self._done

    def _fail(self, text):
        if self._failure is None:
            self._failure = text
            if self._place.rank == 0:
                self._spread(text)

    def _spread(self, text):
        for caller in self._callers:
            caller.send(failed=text)

    def _gather(self):
        """Rank 0: waits for all others and tells them who is where."""
        place = self._place
        hosts = {}
        own = place.host
        with self._listen() as listener:
            notice = time.monotonic() + _NOTICE_SECONDS
            while len(hosts) < place.size - 1:
                missing = self._missing(hosts)
                if time.monotonic() > self._deadline:
                    raise self._refuse(
                        f"launchers {missing} of {place.size} did not come to port "
                        f"{place.port + 1} within {self._patience:g} s: start one launcher for "
                        "each rank, such as through srun, and let this port through."
                    )
                if time.monotonic() > notice:
                    self._say(f"waiting for launchers {missing} of {place.size}.")
                    notice = self._deadline
                for ready in select.select([listener, *self._callers], [], [], 0.2)[0]:
                    if ready is listener:
                        self._callers.append(_Caller(listener.accept()[0]))
                        continue
                    messages = ready.receive()
                    if messages is None or not self._welcome(ready, messages, hosts):
                        self._callers.remove(ready)
                        ready.socket.close()
                        # It may come again, as a restarted pod does.
                        hosts.pop(ready.rank, None)
        # Not those that connected and said nothing.
        for caller in [caller for caller in self._callers if caller.rank is None]:
            self._callers.remove(caller)
            caller.socket.close()
        own = own or self._own_address()
        # A launcher on this machine came over its loopback, where those elsewhere cannot find it.
        known = {
            rank: own if host.startswith("127.") and not is_chosen else host
            for rank, (host, is_chosen) in hosts.items()
        }
        known[0] = own
        hosts = [_numeric(known[rank]) for rank in range(place.size)]
        for caller in self._callers:
            caller.send(hosts=hosts)
        return hosts

    def _listen(self):
        place = self._place
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The name of this machine may stand for its loopback here and for its address elsewhere.
        local = place.master == "localhost" or place.master.startswith("127.")
        try:
            listener.bind((place.master if local else "", place.port + 1))
            listener.listen(place.size)
        except OSError as error:
            listener.close()
            raise LaunchError(
                f"port {place.port + 1} cannot be listened at ({error}): choose another with "
                "--port or MASTER_PORT, for all launchers."
            ) from error
        return listener

    def _missing(self, hosts):
        missing = [str(rank) for rank in range(1, self._place.size) if rank not in hosts]
        return ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")

    def _welcome(self, caller, messages, hosts):
        """Takes the first message of a launcher. Returns whether it is one of this job."""
        for message in messages:
            rank, host = message.get("rank"), message.get("host")
            if message.get("job") != self._terms["job"] or not isinstance(host, str):
                return False
            if not isinstance(rank, int) or not 0 < rank < self._place.size:
                return False
            differing = [name for name in self._terms if message.get(name) != self._terms[name]]
            if differing:
                raise self._refuse(
                    f"{differing[0]} is {self._terms[differing[0]]} at rank 0 and "
                    f"{message.get(differing[0])} at rank {rank} of the launchers: start all with "
                    "the same options."
                )
            if rank in hosts:
                raise self._refuse(
                    f"two launchers, at {hosts[rank][0]} and {host}, are of rank {rank}: each "
                    "needs a rank of its own."
                )
            caller.rank = rank
            hosts[rank] = host, bool(message.get("is_chosen"))
        return True

    def _refuse(self, text):
        self._spread(text)
        return LaunchError(text)

    def _own_address(self):
        """The address of this machine at which others reached it."""
        addresses = [caller.socket.getsockname()[0] for caller in self._callers]
        elsewhere = [address for address in addresses if not address.startswith("127.")]
        return next(iter(elsewhere), "127.0.0.1")

    def _join(self):
        """All others: connect to rank 0 and learn who is where."""
        place = self._place
        caller = _Caller(self._connect())
        caller.rank = 0
        self._callers.append(caller)
        caller.send(
            **self._terms,
            rank=place.rank,
            host=place.host or caller.socket.getsockname()[0],
            is_chosen=bool(place.host),
        )
        # Rank 0 says who is missing, and it began to wait at another time.
        while time.monotonic() < self._deadline + self._patience:
            if not select.select([caller], [], [], 0.2)[0]:
                continue
            messages = caller.receive()
            if messages is None:
                raise LaunchError(
                    f"rank 0 at {place.master}:{place.port + 1} closed the connection: it ended, "
                    f"or serves another job than {place.job!r}."
                )
            for message in messages:
                if "failed" in message:
                    raise LaunchError(str(message["failed"]))
                return message["hosts"]
        raise LaunchError(f"rank 0 said nothing within {2 * self._patience:g} s.")

    def _connect(self):
        address = (self._place.master, self._place.port + 1)
        notice = time.monotonic() + _NOTICE_SECONDS
        while True:
            try:
                connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
                # Without a listener, a port of this machine may be connected to itself.
                if connection.getsockname() != connection.getpeername():
                    return connection
                connection.close()
                error = "nobody listens"
            except OSError as failure:
                error = failure
            if time.monotonic() > self._deadline:
                raise LaunchError(
                    f"rank 0 did not answer at {address[0]}:{address[1]} within "
                    f"{self._patience:g} s ({error}): see that its launcher runs, and that "
                    "MASTER_ADDR and the port are the same everywhere and let through."
                )
            if time.monotonic() > notice:
                self._say(f"waiting for rank 0 at {address[0]}:{address[1]} ({error}).")
                notice = self._deadline
            time.sleep(0.3)


def _numeric(host):
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise LaunchError(f"DMLC_NODE_HOST is {host!r}, which has no address: {error}.") from error
