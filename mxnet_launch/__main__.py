"""Starts the processes of a distributed training, and ends them.

On one machine::

    python -m gluon_syncbn.launch -n 4 train.py --epochs 3

starts four workers that run ``train.py --epochs 3`` and, for ``mx.kv.create('dist_sync')``, the
scheduler and the server of MXNet's KVStore; with ``--engine horovod`` the rendezvous server of
Horovod instead. On several machines, a scheduler such as Slurm or Kubernetes starts the launcher
once for each worker, or once for each machine with ``-n`` workers there::

    srun --kill-on-bad-exit python -m gluon_syncbn.launch --from-env train.py --epochs 3

These launchers do not talk to each other. That of rank 0 also starts the scheduler and the server.

Output:
    Each line of a worker is printed with its rank before it, ``[1] loss 0.5``, and the lines of
    different workers are not mixed. The rank equals ``kv.rank`` and ``hvd.rank()``, and with one
    worker per launcher that of Slurm or Kubernetes too. If lines cannot be written, as to a full
    disk, all processes are ended; if the output is closed (``>&-``), they are not. If nobody reads
    it, workers that print wait.

Failures:
    When a worker, a server or the scheduler dies, or ends by ``os._exit(0)`` before its script
    does, its exit code and its last lines, of a traceback only the message, are shown, and all
    others of this launcher are ended within 10 seconds, with the processes that they started. The
    launcher then ends with that exit code, or 128 plus the number of the signal. If several die,
    the first counts. A process that hangs is not noticed here: with a ``KVStoreReducer`` or a
    ``HorovodReducer`` those that wait for it end after the timeout. With ``--restarts`` all
    processes of this launcher then start again.

Signals:
    Ctrl-C, SIGTERM and SIGHUP, as SIGTERM, are passed on to the workers. Those that have not ended
    after ``--grace`` seconds, or at a second signal, are named and killed. Until then the scheduler
    and the server stay, also if a control group (Slurm, systemd, Docker) sends the signal to all
    processes. Under nohup a hangup does nothing. SIGUSR1 and SIGUSR2, by which Slurm announces a
    preemption, are passed on too, and end nothing.

Environment of a worker:
    The script runs as with ``python train.py`` and the launcher's own options of Python, such as
    ``-O``, except that standard input is empty, that SIGUSR1 and SIGUSR2 are ignored before the
    script has set a handler and after its end, and that a script which raises ends at once: its
    exit hooks run, destructors and other threads do not.
    ``GLUON_SYNCBN_RANK``, ``GLUON_SYNCBN_SIZE`` and ``GLUON_SYNCBN_LOCAL_RANK`` are set; the last
    is the index of the worker on its machine, and so of its GPU. ``OMP_NUM_THREADS`` is set unless
    the user did: the workers of a machine share its cores. ``GLUON_SYNCBN_RESTART`` says how often
    the processes were started again: 0 at first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from typing import Iterator, Sequence

import mxnet_compat

from . import runner
from ._children import Launch, Spec, is_blocked, say
from ._environment import (
    LOOPBACK,
    LaunchError,
    Position,
    between,
    find_position,
    locate,
    port_number,
)

# An environment variable of the workers.
RESTART = "GLUON_SYNCBN_RESTART"
_A_DAY = 24 * 60 * 60  # seconds
_ENDED_SECONDS = 10  # See Failures.
_MOST = 9999  # Processes of one kind. A typo should not fill the memory.
# Workers of a KVStore: see spell_address.
_MOST_WITH_KVSTORE = 1000
_HOROVOD_INSTALL = (
    "pip install 'setuptools<70' wheel cffi cloudpickle 'cmake<4' packaging psutil pyyaml && "
    "HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 "
    "HOROVOD_WITHOUT_TENSORFLOW=1 pip install --no-build-isolation horovod==0.28.1"
)
_ONE_MACHINE = (
    "--engine horovod is for one machine: on several, start the processes with Horovod's own "
    "launcher, such as horovodrun -np 8 -H a:4,b:4 --gloo python train.py"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code."""
    _open_closed_streams()
    runner.ignore(runner.ANNOUNCEMENTS)  # So do all that is started from here.
    options = _parse(arguments)
    try:
        code = _run(options)
    except LaunchError as error:
        say(f"error: {error}")
        code = 2
    except KeyboardInterrupt:  # Before the processes are started; later it is passed on.
        code = 128 + signal.SIGINT
    if is_blocked():  # Python would wait for the threads that write.
        os._exit(code)
    return code


def _open_closed_streams() -> None:
    """Opens /dev/null for streams that are closed, as by ``>&-``. Otherwise the files that are
    opened next would get their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode, closefd=False))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gluon_syncbn.launch",
        usage="python -m gluon_syncbn.launch [options] -n N script.py [arguments of the script]",
        description="Start the processes of a distributed training. When one dies, all others here "
        "are ended. Lines of the workers are printed with their rank before them.",
    )
    count, add = between(1, _MOST), parser.add_argument
    add("-n", type=count, metavar="N", help="workers here; with --from-env or --rank by default 1")
    text = "number of KVStore servers (%(default)s)"
    add("--servers", type=count, default=1, metavar="N", help=text)
    text = "how the workers communicate: MXNet's KVStore or Horovod (%(default)s)"
    add("--engine", choices=("kvstore", "horovod"), default="kvstore", help=text)
    text = (
        "be one of several launchers that Slurm, Kubernetes or another scheduler started: the "
        "environment says which (RANK and WORLD_SIZE, mpirun's, or Slurm's)"
    )
    add("--from-env", action="store_true", help=text)
    text = "be the launcher of this number, from 0, whatever the environment says"
    add("--rank", type=between(0, _MOST), metavar="R", help=text)
    add("--size", type=count, metavar="N", help="with --rank: the number of launchers")
    text = "machine of the launcher of rank 0 (MASTER_ADDR, or Slurm's first)"
    add("--master", metavar="HOST", help=text)
    text = "port of the KVStore's scheduler there (MASTER_PORT, or 9091 plus the job's under Slurm)"
    add("--port", type=port_number, metavar="P", help=text)
    text = "seconds after Ctrl-C or SIGTERM until workers are killed (%(default)s)"
    add("--grace", type=between(0, 10**6, float), default=5, metavar="S", help=text)
    text = (
        "after a failure, start all processes of this launcher again, up to N times (%(default)s); "
        f"{RESTART} says how often they were, and the script goes on from its checkpoint"
    )
    add("--restarts", type=between(0, _MOST), default=0, metavar="N", help=text)
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
    if (options.rank is None) != (options.size is None):
        parser.error("--rank and --size belong together: give both, or neither.")
    if options.rank is not None and options.rank >= options.size:
        parser.error(f"--rank is {options.rank} and --size {options.size}: ranks begin at 0.")
    if options.n is None and options.rank is None and not options.from_env:
        parser.error("the number of workers is missing: give it before the script, such as -n 4.")
    script = options.command[0]
    if not options.module and not os.path.isfile(script):
        is_folder = f"{script} is a folder: give a script, or -m and a module."
        parser.error(is_folder if os.path.isdir(script) else f"there is no script {script}.")
    options.n = options.n or 1
    return options


def _run(options: argparse.Namespace) -> int:
    """Starts everything, and once more after each failure, up to --restarts times."""
    for number in range(options.restarts + 1):
        with contextlib.ExitStack() as stack:
            launch, rank = _launch(options, number, stack)
            code = launch.run()
        if not code or launch.was_told_to_end:
            break
        if number < options.restarts:
            say(f"all processes start again, restart {number + 1} of {options.restarts}.")
            # By then the launcher of rank 0 has ended the scheduler, which knows the old ones.
            time.sleep(_ENDED_SECONDS if rank else 0)
    return code


def _launch(
    options: argparse.Namespace, number: int, stack: contextlib.ExitStack
) -> tuple[Launch, int]:
    """The `Launch` of everything, and the rank of this launcher. number: of the restart. `stack`
    closes what must stay open."""
    environment = {"PYTHONUNBUFFERED": "1", **os.environ, RESTART: str(number)}
    mxnet_compat.inherit(environment)  # A script may import mxnet first.
    position = Position(port=options.port or 0)
    if options.from_env or options.rank is not None:
        given = options.rank, options.size, options.master, options.port
        position = find_position(environment, *given)
    if position.size > 1 and options.engine == "horovod":
        raise LaunchError(_ONE_MACHINE)
    position = locate(position, environment, runner.timeout_of(environment))
    port = stack.enter_context(_hold_job(position))
    cores = os.sched_getaffinity(0)
    # Launchers of one machine share its cores, unless each has some of its own.
    launchers = position.local_size if len(cores) == os.cpu_count() else 1
    threads = max(1, len(cores) // (options.n * launchers))
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    if options.engine == "horovod":
        specs = _horovod_specs(position, options.n, port, environment, stack)
    else:
        specs = _kvstore_specs(position, options.n, port, environment, options.servers)
    command = (["-m"] if options.module else []) + options.command
    if options.replace_contrib:
        command[:0] = ["--first", "gluon_syncbn:replace_contrib"]
    serves_others = position.rank == 0 and position.size > 1
    return Launch(specs, command, options.grace, serves_others), position.rank


def _hold_job(position: Position) -> contextlib.AbstractContextManager[int]:
    """Holds the port of rank 0. Another launcher only keeps out a second one of its rank here, as
    of a second job, whose workers would take part in the first one."""
    if position.rank == 0:
        return _hold(position.own, position.port)
    return _hold(None, position.port, f"{position.root}:{position.port} {position.rank}")


@contextlib.contextmanager
def _hold(host: str | None = LOOPBACK, port: int = 0, name: str | None = None) -> Iterator[int]:
    """Holds this port, or any free one. It is bound, so that no other process gets it, but nobody
    listens at it, so that the KVStore's scheduler can bind it too. The lock keeps out other
    launchers, which could bind it for the same reason. host: None for the lock alone."""
    with socket.socket() as holder, socket.socket(socket.AF_UNIX) as lock:
        try:
            if host is not None:
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind((host, port))
                port = holder.getsockname()[1]
            lock.bind(f"\0gluon_syncbn.launch {name or port}")
        except OSError as error:
            raise LaunchError(
                f"cannot listen at port {port} of {host or 'this machine'} ({error}): another job "
                "may use it, or a launcher of the same rank. Give all launchers another --port "
                "(MASTER_PORT, DMLC_PS_ROOT_PORT), and rank 0's address as --master (MASTER_ADDR)."
            ) from error
        yield port


def _workers(
    position: Position, count: int, environment: dict[str, str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """(rank, environment) of each worker here."""
    for index in range(count):
        rank = position.rank * count + index
        yield (
            rank,
            {
                **environment,
                "GLUON_SYNCBN_RANK": str(rank),
                "GLUON_SYNCBN_SIZE": str(position.size * count),
                "GLUON_SYNCBN_LOCAL_RANK": str(position.local_rank * count + index),
            },
        )


def _kvstore_specs(
    position: Position, count: int, port: int, environment: dict[str, str], servers: int
) -> list[Spec]:
    """[(name, environment)] of the workers here and, for rank 0, of the KVStore's processes."""
    size = position.size * count
    if size > _MOST_WITH_KVSTORE:
        raise LaunchError(
            f"the KVStore takes at most {_MOST_WITH_KVSTORE} workers, not {size}: start fewer, or "
            "use Horovod."
        )
    shared = {
        **environment,
        "DMLC_PS_ROOT_URI": position.root,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(size),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NODE_HOST": position.own,
    }
    shared.pop("DMLC_INTERFACE", None)
    if position.own.startswith("127."):
        shared["DMLC_INTERFACE"] = "lo"
    specs = []
    if position.rank == 0:
        names = ["scheduler", *(f"server {server}" for server in range(servers))]
        specs = [(name, {**shared, "DMLC_ROLE": name.split()[0]}) for name in names]
    for rank, own in _workers(position, count, shared):
        own.update(DMLC_ROLE="worker", DMLC_NODE_HOST=spell_address(position.own, rank))
        specs.append((f"worker {rank}", own))
    return specs


def spell_address(address: str, rank: int) -> str:
    """The IPv4 address as a hexadecimal number with `rank` zeros before it.

    The KVStore's scheduler orders the workers by the text of their addresses, the greatest first,
    and then by their ports, which are random. This spelling puts them in rank order without
    changing the address. The scheduler sends all addresses to all, so many workers would make
    these messages large.
    """
    number = int.from_bytes(socket.inet_aton(address), "big")
    return f"0x{'0' * rank}{number:x}"


def _horovod_specs(
    position: Position,
    count: int,
    port: int,
    environment: dict[str, str],
    stack: contextlib.ExitStack,
) -> list[Spec]:
    """[(name, environment)] of the workers. The launcher runs Horovod's rendezvous server."""
    try:
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        raise LaunchError(
            f"Horovod cannot be imported ({error}). To install it: {_HOROVOD_INSTALL}"
        ) from error
    # hostname, rank, local_rank, cross_rank, size, local_size, cross_size
    slots = [SlotInfo(LOOPBACK, rank, rank, 0, count, count, 1) for rank in range(count)]
    server = RendezvousHTTPServer((LOOPBACK, port), RendezvousHandler, verbose=0)
    server.init(slots)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    shared = {
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_CYCLE_TIME": "0.1",
        # In real time, also while a job is suspended. With a HorovodReducer, hangs end before.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(_A_DAY),
        **environment,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    specs = []
    for rank, own in _workers(position, count, shared):
        slot = {f"HOROVOD_{key.upper()}": str(value) for key, value in vars(slots[rank]).items()}
        specs.append((f"worker {rank}", {**own, **slot}))
    return specs


if __name__ == "__main__":
    sys.exit(main())
