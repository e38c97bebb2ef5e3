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
    different workers are not mixed. The rank is that of ``kv.rank`` and ``hvd.rank()``, and on
    several machines that of Slurm or Kubernetes too. Where another launcher has set ``DMLC_ROLE``,
    the rank is not known beforehand, and ``[worker]`` stands there. Where lines cannot be written,
    as to a full disk, all processes are ended; where the output is closed (``>&-``), they are not.

Failures:
    When a worker, a server or the scheduler dies, its exit code and its last lines are shown, and
    all others are ended within 10 seconds, with the processes that they started. Without that they
    would wait for it for ever. The launcher then ends with that exit code, or 128 and the number of
    the signal. Ctrl-C, SIGTERM and SIGHUP are passed on to the workers, a second one kills them.

What a worker finds:
    The script is run as ``python train.py`` does, except that standard input is empty and that a
    script which raises ends at once: its exit hooks run, destructors and other threads do not.
    ``GLUON_SYNCBN_RANK``, ``GLUON_SYNCBN_SIZE`` and ``GLUON_SYNCBN_LOCAL_RANK`` are set; the last
    is the number of the worker among those of its machine, so that of its GPU.
    ``OMP_NUM_THREADS`` is set where the user has not: the cores of a machine are shared out among
    its workers.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading

from .cluster import LaunchError, Meeting, as_dmlc_says, check_port, find_place
from .processes import Launch, say

_LOOPBACK = "127.0.0.1"
_MOST = 9999  # Processes of one kind here. A slip of the keys should not fill the memory.
_HOROVOD_INSTALL = (
    "HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 "
    "HOROVOD_WITHOUT_TENSORFLOW=1 pip install --no-build-isolation horovod==0.28.1"
)


def main(arguments=None):
    """Runs the command line. Returns the exit code."""
    _open_closed_streams()
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    try:
        _check(options)
        with contextlib.ExitStack() as stack:
            return _launch(options, stack)
    except LaunchError as error:
        parser.error(str(error))
    except KeyboardInterrupt:  # While launchers wait for each other, later it is passed on.
        return 128 + signal.SIGINT


def _open_closed_streams():
    """Those that whoever started this has closed, as with ``>&-``. Their numbers are given to what
    is opened next, so they go to that which takes all and says nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, mode, closefd=False))


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser():
    parser = _Parser(
        prog="gluon_syncbn.launch",
        usage="python -m gluon_syncbn.launch [options] -n N script.py [arguments of the script]",
        description="Start the processes of a distributed training and watch them. When one dies, "
        "all others are ended.",
        epilog="OMP_NUM_THREADS is set to the number of cores divided by that of the workers, "
        "unless you set it. Lines of the workers are printed with their rank before them.",
    )
    parser.add_argument(
        "-n", type=int, metavar="N", help="the number of workers; with --from-env by default 1"
    )
    parser.add_argument(
        "--servers", type=int, default=1, metavar="N", help="the number of KVStore servers, 1"
    )
    parser.add_argument(
        "--engine",
        choices=("kvstore", "horovod"),
        default="kvstore",
        help="what the workers reach each other with, MXNet's KVStore or Horovod (kvstore)",
    )
    parser.add_argument(
        "--from-env",
        action="store_true",
        help="be one of several launchers that Slurm, Kubernetes or another scheduler started: the "
        "environment says which (DMLC_*, SLURM_* or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT)",
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="P",
        help="with --from-env: launchers meet at ports P and P + 1 of rank 0 (MASTER_PORT, or else "
        "9091 and for Slurm one that depends on the job)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=300,
        metavar="S",
        help="with --from-env: how many seconds launchers wait for each other (300)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5,
        metavar="S",
        help="how many seconds workers have to end by themselves after Ctrl-C or SIGTERM (5)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the script is a module, as in python -m"
    )
    # In one, as argparse would take "--" behind the script for its own.
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _check(options):
    if not options.command:
        raise LaunchError("the script is missing: python -m gluon_syncbn.launch -n 4 script.py")
    if options.n is None:
        if not options.from_env:
            raise LaunchError(
                "the number of workers is missing: give it before the script, such as -n 4."
            )
        options.n = 1
    if not 1 <= options.n <= _MOST:
        raise LaunchError(f"-n is {options.n}: give a number of workers from 1 to {_MOST}.")
    if not 1 <= options.servers <= _MOST:
        raise LaunchError(f"--servers is {options.servers}: give a number from 1 to {_MOST}.")
    if options.port is not None:
        check_port("--port", options.port)
    for name, number in (("--wait", options.wait), ("--grace", options.grace)):
        # A comparison with NaN is false.
        if not number >= 0:
            raise LaunchError(f"{name} is {number:g}: give a number of seconds of 0 or more.")
    if not options.module and not os.path.isfile(options.command[0]):
        raise LaunchError(f"there is no script {options.command[0]}.")


def _launch(options, stack):
    """Starts everything and watches it to its end. `stack` closes what has to stay open."""
    environment = dict(os.environ)
    environment.setdefault("PYTHONUNBUFFERED", "1")
    command = (["-m"] if options.module else []) + options.command
    meeting = None
    if options.from_env and as_dmlc_says(environment):
        role = environment["DMLC_ROLE"]
        plan = [(role, environment)]
    else:
        if options.from_env:
            place = find_place(environment, options.port)
            meeting = stack.enter_context(
                Meeting(place, options.n, options.engine, options.wait, say)
            )
            hosts, first, port = meeting.hosts, place.rank * options.n, place.port
        else:
            hosts, first, port = [_LOOPBACK] * options.n, 0, stack.enter_context(_free_port())
        ranks = range(first, first + options.n)
        environment.setdefault("OMP_NUM_THREADS", str(_threads(hosts, ranks)))
        make = _horovod_plan if options.engine == "horovod" else _kvstore_plan
        plan = make(hosts, ranks, port, options.servers, environment, stack)
    return Launch(plan, command, options.grace, meeting).run()


@contextlib.contextmanager
def _free_port():
    """A free port of this machine. It is bound, so that nobody else gets it, but not listened at,
    so that the KVStore's scheduler can bind it too."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((_LOOPBACK, 0))
        yield holder.getsockname()[1]


def _threads(hosts, ranks):
    """The cores of this machine for each of its workers."""
    cores = os.sched_getaffinity(0)
    # Where another launcher runs on this machine and has no cores of its own, they are shared.
    workers = hosts.count(hosts[ranks[0]]) if len(cores) == os.cpu_count() else len(ranks)
    return max(1, len(cores) // workers)


def _local(hosts, rank):
    """(number of this worker among those of its machine, how many these are)."""
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def _ranked(hosts, ranks, environment):
    """The part of the workers' environment that does not depend on the engine."""
    for rank in ranks:
        yield (
            rank,
            {
                **environment,
                "GLUON_SYNCBN_RANK": str(rank),
                "GLUON_SYNCBN_SIZE": str(len(hosts)),
                "GLUON_SYNCBN_LOCAL_RANK": str(_local(hosts, rank)[0]),
            },
        )


def _kvstore_plan(hosts, ranks, port, servers, environment, stack):
    """[(name, environment)] of the processes here: the KVStore's in the launcher of rank 0, and the
    workers."""
    environment = {
        **environment,
        "DMLC_PS_ROOT_URI": hosts[0],
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(len(hosts)),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NODE_HOST": hosts[ranks[0]],
    }
    environment.pop("DMLC_INTERFACE", None)
    if hosts[ranks[0]].startswith("127."):
        environment["DMLC_INTERFACE"] = "lo"
    plan = []
    if 0 in ranks:
        plan.append(("scheduler", {**environment, "DMLC_ROLE": "scheduler"}))
        for server in range(servers):
            plan.append((f"server {server}", {**environment, "DMLC_ROLE": "server"}))
    for rank, variables in _ranked(hosts, ranks, environment):
        variables.update(DMLC_ROLE="worker", DMLC_NODE_HOST=spell_address(hosts[rank], rank))
        plan.append((f"worker {rank}", variables))
    return plan


def spell_address(address, rank):
    """The IPv4 address as a hexadecimal number with `rank` zeros before it.

    The scheduler of the KVStore numbers the workers after the text of their addresses, the greatest
    first, and then after their ports, which are random. Spelled so, they are in the order of their
    ranks, and the address is the same.
    """
    number = int.from_bytes(socket.inet_aton(address), "big")
    return f"0x{'0' * rank}{number:x}"


def _horovod_plan(hosts, ranks, port, _, environment, stack):
    """[(name, environment)] of the workers here. The launcher of rank 0 is the rendezvous server of
    Horovod itself."""
    try:
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        raise LaunchError(
            f"Horovod cannot be imported ({error}). To install it: pip install 'setuptools<70' "
            f"wheel cffi cloudpickle 'cmake<4' packaging psutil pyyaml && {_HOROVOD_INSTALL}"
        ) from error
    own = hosts[ranks[0]]
    if any(host != own for host in hosts) and not own.startswith("127."):
        _check_own_name(own)
    slots = []
    for rank, host in enumerate(hosts):
        local_rank, local_size = _local(hosts, rank)
        # The machines that have a worker of this local rank.
        across = [h for h in dict.fromkeys(hosts) if hosts.count(h) > local_rank]
        slots.append(
            SlotInfo(
                hostname=host,
                rank=rank,
                size=len(hosts),
                local_rank=local_rank,
                local_size=local_size,
                cross_rank=across.index(host),
                cross_size=len(across),
            )
        )
    if 0 in ranks:
        try:
            server = RendezvousHTTPServer((hosts[0], port), RendezvousHandler, verbose=0)
        except OSError as error:
            raise LaunchError(f"port {port} of {hosts[0]} cannot be had: {error}.") from error
        server.init(slots)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
    plan = []
    for rank, variables in _ranked(hosts, ranks, environment):
        for key, value in vars(slots[rank]).items():
            variables[f"HOROVOD_{key.upper()}"] = str(value)
        variables.update(
            HOROVOD_GLOO_RENDEZVOUS_ADDR=hosts[0],
            HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
            HOROVOD_CONTROLLER="gloo",
            HOROVOD_CPU_OPERATIONS="gloo",
        )
        variables.setdefault("HOROVOD_GLOO_IFACE", _interface(hosts[rank]))
        variables.setdefault("HOROVOD_CYCLE_TIME", "0.1")
        plan.append((f"worker {rank}", variables))
    return plan


def _check_own_name(address):
    """Horovod 0.28.1 heeds HOROVOD_GLOO_IFACE where processes first meet, but what it reduces goes
    over the address of the machine's name."""
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError:
        found = "unknown"
    if found == "unknown" or found.startswith("127."):
        raise LaunchError(
            f"Horovod 0.28.1 has other machines come to the address of this machine's name, and "
            f"that of {name} is {found} here: let /etc/hosts say {address} for it."
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
