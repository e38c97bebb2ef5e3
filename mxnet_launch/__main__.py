"""Starts the processes of a distributed training and watches them.

On one machine::

    python -m gluon_syncbn.launch -n 4 train.py --epochs 3

starts four workers that run ``train.py --epochs 3`` and, for ``mx.kv.create('dist_sync')``, the
scheduler and the server of MXNet's KVStore; with ``--engine horovod`` the rendezvous server of
Horovod instead. On several machines, a scheduler such as Slurm or Kubernetes starts the launcher
once for each worker, or once for each machine with ``-n`` workers there::

    srun python -m gluon_syncbn.launch --from-env train.py --epochs 3

Output:
    Each line of a worker is printed with its rank before it, ``[1] loss 0.5``, and the lines of
    different workers are not mixed. The rank equals ``kv.rank`` and ``hvd.rank()``, and with one
    worker per launcher that of Slurm or Kubernetes too. If another launcher has set ``DMLC_ROLE``,
    the rank is not known beforehand, and the prefix is ``[worker]``. If lines cannot be written, as
    to a full disk, all processes are ended; if the output is closed (``>&-``), they are not. If
    nobody reads it, workers that print wait.

Failures:
    When a worker, a server or the scheduler dies, hangs, or ends by ``os._exit(0)`` before its
    script does, its exit code and its last lines are shown, and all others are ended within 10
    seconds, with the processes that they started. They would otherwise wait for it indefinitely.
    The launcher then ends with that exit code, or 128 plus the number of the signal. If several
    die, the first counts. Ctrl-C, SIGTERM and SIGHUP are passed on to the workers; a second one
    kills them. Under nohup a hangup does nothing.

Environment of a worker:
    The script runs as with ``python train.py`` and the launcher's own options of Python, such as
    ``-O``, except that standard input is empty and that a script which raises ends at once: its
    exit hooks run, destructors and other threads do not.
    ``GLUON_SYNCBN_RANK``, ``GLUON_SYNCBN_SIZE`` and ``GLUON_SYNCBN_LOCAL_RANK`` are set; the last
    is the index of the worker on its machine, and so of its GPU. ``OMP_NUM_THREADS`` is set unless
    the user did: the workers of a machine share its cores. None of these are set where another
    launcher has set ``DMLC_ROLE``.
"""

import argparse
import contextlib
import errno
import math
import os
import signal
import socket
import sys
import threading

import mxnet_compat

from .cluster import (
    Cluster,
    LaunchError,
    between,
    cannot_listen,
    check_ipv4,
    find_position,
    has_dmlc_role,
    port_number,
)
from .processes import Launch, is_blocked, say

_LOOPBACK = "127.0.0.1"
_MOST = 9999  # Processes of one kind. A typo should not fill the memory.
# Workers of a KVStore: see spell_address.
_MOST_WITH_KVSTORE = 1000
_HOROVOD_INSTALL = (
    "pip install 'setuptools<70' wheel cffi cloudpickle 'cmake<4' packaging psutil pyyaml && "
    "HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 "
    "HOROVOD_WITHOUT_TENSORFLOW=1 pip install --no-build-isolation horovod==0.28.1"
)


def main(arguments=None):
    """Runs the command line. Returns the exit code."""
    _open_closed_streams()
    options = _parse(arguments)
    try:
        with contextlib.ExitStack() as stack:
            code = _launch(options, stack)
    except LaunchError as error:
        say(f"error: {error}")
        code = 2
    except KeyboardInterrupt:  # While launchers wait for each other; later it is passed on.
        code = 128 + signal.SIGINT
    if is_blocked():  # Python would wait for the threads that write.
        os._exit(code)
    return code


def _open_closed_streams():
    """Opens /dev/null for streams that are closed, as by ``>&-``. Otherwise the files that are
    opened next would get their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode, closefd=False))


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="gluon_syncbn.launch",
        usage="python -m gluon_syncbn.launch [options] -n N script.py [arguments of the script]",
        description="Start the processes of a distributed training and watch them. When one dies, "
        "all others are ended.",
        epilog="OMP_NUM_THREADS is set to the number of cores per worker, unless you set it. Lines "
        "of the workers are printed with their rank before them.",
    )
    count, seconds = between(1, _MOST), between(0, 10**6, float)
    add = parser.add_argument
    add("-n", type=count, metavar="N", help="number of workers; with --from-env by default 1")
    text = "number of KVStore servers (%(default)s)"
    add("--servers", type=count, default=1, metavar="N", help=text)
    text = "how the workers communicate: MXNet's KVStore or Horovod (%(default)s)"
    add("--engine", choices=("kvstore", "horovod"), default="kvstore", help=text)
    text = (
        "be one of several launchers that Slurm, Kubernetes or another scheduler started: the "
        "environment says which (DMLC_*, SLURM_*, mpirun's, or RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT)"
    )
    add("--from-env", action="store_true", help=text)
    text = (
        "with --from-env: rank 0 listens at ports P and P + 1 (MASTER_PORT, or else 9091 and for "
        "Slurm one that depends on the job)"
    )
    add("--port", type=port_number, metavar="P", help=text)
    text = "with --from-env: seconds that launchers wait for each other (%(default)s)"
    add("--wait", type=seconds, default=300, metavar="S", help=text)
    text = (
        "with --from-env: seconds of silence after which another machine counts as lost "
        "(%(default)s, or GLUON_SYNCBN_TIMEOUT if that is less)"
    )
    add("--lost-after", type=between(1, 10**6, float), default=10, metavar="S", help=text)
    text = (
        "seconds that the first worker waits for the others to make their stores "
        "(GLUON_SYNCBN_TIMEOUT, or 300)"
    )
    add("--start", type=seconds, metavar="S", help=text)
    text = "seconds that workers have to end after Ctrl-C or SIGTERM (%(default)s)"
    add("--grace", type=seconds, default=5, metavar="S", help=text)
    text = (
        "let gluon.contrib.nn.SyncBatchNorm be gluon_syncbn's layer in the workers, as "
        "gluon_syncbn.replace_contrib does"
    )
    add("--replace-contrib", action="store_true", help=text)
    add("-m", dest="module", action="store_true", help="the script is a module, as in python -m")
    # Script and arguments are one, because argparse would remove a "--" after the script.
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if sys.flags.optimize > 1:
        parser.error("MXNet cannot be imported under -OO or PYTHONOPTIMIZE=2: use -O or 1.")
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("the script is missing: python -m gluon_syncbn.launch -n 4 script.py")
    if options.n is None and not options.from_env:
        parser.error("the number of workers is missing: give it before the script, such as -n 4.")
    script = options.command[0]
    if not options.module and not os.path.isfile(script):
        is_folder = f"{script} is a folder: give a script, or -m and a module."
        parser.error(is_folder if os.path.isdir(script) else f"there is no script {script}.")
    options.n = options.n or 1
    return options


def _launch(options, stack):
    """Starts everything and watches it to its end. `stack` closes what must stay open."""
    environment = {"PYTHONUNBUFFERED": "1", **os.environ}
    mxnet_compat.inherit(environment)  # A script may import mxnet first.
    timeout, cluster, joining = _timeout(environment), None, tuple
    if options.from_env and has_dmlc_role(environment):
        check_ipv4(environment)
        role = environment["DMLC_ROLE"]
        if role == "scheduler":
            port = _root_port(environment["DMLC_PS_ROOT_PORT"])
            stack.enter_context(_free_port(environment["DMLC_PS_ROOT_URI"], port))
        specs = [(role, environment)]
    else:
        if options.from_env:
            position = find_position(environment, options.port)
            if position.rank == 0:
                stack.enter_context(_free_port(position.bound_host, position.port))
            lost_after = min(options.lost_after, max(1.0, timeout))
            cluster = Cluster(position, options.n, options.engine, options.wait, lost_after)
            stack.callback(cluster.close)
            hosts, first, port = cluster.hosts, position.rank * options.n, position.port
        else:
            hosts, first, port = [_LOOPBACK] * options.n, 0, stack.enter_context(_free_port())
        ranks = range(first, first + options.n)
        environment.setdefault("OMP_NUM_THREADS", str(_threads(hosts, ranks)))
        if options.engine == "horovod":
            specs, joining = _horovod_specs(hosts, ranks, port, environment, stack)
        else:
            specs = _kvstore_specs(hosts, ranks, port, environment, options.servers)
    command = (["-m"] if options.module else []) + options.command
    if options.replace_contrib:
        command[:0] = ["--first", "gluon_syncbn:replace_contrib"]
    start = timeout if options.start is None else options.start
    return Launch(specs, command, options.grace, timeout, start, joining, cluster).run()


def _timeout(environment):
    """The seconds that a process may wait for others. Workers reject invalid values."""
    with contextlib.suppress(argparse.ArgumentTypeError):
        return between(1e-3, 10**6, float)(environment.get("GLUON_SYNCBN_TIMEOUT", ""))
    return 300.0


def _root_port(text):
    try:
        return between(1, 65535)(text)
    except argparse.ArgumentTypeError as error:
        raise LaunchError(f"DMLC_PS_ROOT_PORT: {error}") from error


@contextlib.contextmanager
def _free_port(host=_LOOPBACK, port=0):
    """A free port of this machine, or this one if it is free. It is bound, so that no other process
    gets it, but nobody listens at it, so that the KVStore's scheduler can bind it too. The lock
    keeps out other launchers, which could bind it for the same reason."""
    with socket.socket() as holder, socket.socket(socket.AF_UNIX) as lock:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, port))
            port = holder.getsockname()[1]
            lock.bind(f"\0gluon_syncbn.launch {port}")
        except OSError as error:
            # Otherwise the scheduler may know better.
            if error.errno == errno.EADDRINUSE:
                raise cannot_listen(port, error) from error
        yield port


def _threads(hosts, ranks):
    """The number of cores for each worker here."""
    cores = os.sched_getaffinity(0)
    # Launchers of one machine share its cores, unless each has some of its own.
    workers = hosts.count(hosts[ranks[0]]) if len(cores) == os.cpu_count() else len(ranks)
    return max(1, len(cores) // workers)


def _worker_variables(hosts, rank):
    return {
        "GLUON_SYNCBN_RANK": str(rank),
        "GLUON_SYNCBN_SIZE": str(len(hosts)),
        "GLUON_SYNCBN_LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
    }


def _kvstore_specs(hosts, ranks, port, environment, servers):
    """[(name, environment)] of the workers here and, for rank 0, of the KVStore's processes."""
    if len(hosts) > _MOST_WITH_KVSTORE:
        raise LaunchError(
            f"the KVStore takes at most {_MOST_WITH_KVSTORE} workers, not {len(hosts)}: start "
            "fewer, or choose --engine horovod."
        )
    own = hosts[ranks[0]]
    shared = {
        **environment,
        "DMLC_PS_ROOT_URI": hosts[0],
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(len(hosts)),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NODE_HOST": own,
    }
    shared.pop("DMLC_INTERFACE", None)
    if own.startswith("127."):
        shared["DMLC_INTERFACE"] = "lo"
    specs = []
    if 0 in ranks:
        names = ["scheduler", *(f"server {server}" for server in range(servers))]
        specs = [(name, {**shared, "DMLC_ROLE": name.split()[0]}) for name in names]
    for rank in ranks:
        variables = {"DMLC_ROLE": "worker", "DMLC_NODE_HOST": spell_address(own, rank)}
        specs.append((f"worker {rank}", {**shared, **_worker_variables(hosts, rank), **variables}))
    return specs


def spell_address(address, rank):
    """The IPv4 address as a hexadecimal number with `rank` zeros before it.

    The KVStore's scheduler orders the workers by the text of their addresses, the greatest first,
    and then by their ports, which are random. This spelling puts them in rank order without
    changing the address. The scheduler sends all addresses to all, so many workers would make
    these messages large.
    """
    number = int.from_bytes(socket.inet_aton(address), "big")
    return f"0x{'0' * rank}{number:x}"


def _horovod_specs(hosts, ranks, port, environment, stack):
    """[(name, environment)] of the workers here, and a function that returns the names of those
    that have called hvd.init. The launcher of rank 0 knows, as it runs Horovod's rendezvous
    server."""
    try:
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        raise LaunchError(
            f"Horovod cannot be imported ({error}). To install it: {_HOROVOD_INSTALL}"
        ) from error
    own = hosts[ranks[0]]
    if set(hosts) != {own} and not own.startswith("127."):
        _check_own_name(own)
    slots = []
    for rank, host in enumerate(hosts):
        local_rank = hosts[:rank].count(host)
        # The machines that have a worker of this local rank.
        across = [h for h in dict.fromkeys(hosts) if hosts.count(h) > local_rank]
        cross = across.index(host), len(across)
        # hostname, rank, local_rank, cross_rank, size, local_size, cross_size
        slots.append(
            SlotInfo(host, rank, local_rank, cross[0], len(hosts), hosts.count(host), cross[1])
        )
    joining = tuple
    if 0 in ranks:
        try:
            server = RendezvousHTTPServer((hosts[0], port), RendezvousHandler, verbose=0)
        except OSError as error:
            raise cannot_listen(port, error) from error
        server.init(slots)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)

        def joining():
            return [f"worker {rank}" for rank in list(server.cache.get("global", ()))]

    shared = {
        "HOROVOD_GLOO_IFACE": environment.get("HOROVOD_GLOO_IFACE") or _interface(own),
        "HOROVOD_CYCLE_TIME": "0.1",
        # Later than the error that names the missing process.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(_timeout(environment)) + 1),
        **environment,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    specs = []
    for rank in ranks:
        slot = {f"HOROVOD_{key.upper()}": str(value) for key, value in vars(slots[rank]).items()}
        specs.append((f"worker {rank}", {**shared, **_worker_variables(hosts, rank), **slot}))
    return specs, joining


def _check_own_name(address):
    """Horovod 0.28.1 uses HOROVOD_GLOO_IFACE for the rendezvous, but reduces over the address of
    the machine's name."""
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError:
        found = "unknown"
    if found == "unknown" or found.startswith("127."):
        raise LaunchError(
            f"Horovod 0.28.1 lets other machines connect to the address of this machine's name, "
            f"and that of {name} is {found} here: let /etc/hosts say {address} for it."
        )


def _interface(address):
    """The name of the network interface of this machine that has `address`."""
    import psutil  # Horovod needs it too.

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    if address.startswith("127."):
        return "lo"
    raise LaunchError(f"no network interface has {address}: name one in HOROVOD_GLOO_IFACE.")


if __name__ == "__main__":
    sys.exit(main())
