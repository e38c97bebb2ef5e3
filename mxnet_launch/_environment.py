"""Which of several launchers this one is, and where: from options, or from the environment."""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
import time
from typing import Any, Callable, Mapping, NamedTuple, Tuple

import psutil

LOOPBACK = "127.0.0.1"
# Names of environment variables: see `_SETS`.
_Names = Tuple[str, str, str, str]
_DEFAULT_PORT = 9091
# What schedulers call the rank and the size, and those among the processes of a machine.
_BY_HAND = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
_OMPI = "OMPI_COMM_WORLD_"
_MPIRUN = (
    (f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_SLURM = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
_SETS = _BY_HAND, *_MPIRUN, _SLURM


class LaunchError(Exception):
    """A user's mistake: what was given, what was expected, what to do."""


class Position(NamedTuple):
    """This launcher among `size` launchers. That of rank 0 has the scheduler, at `port` of
    `master`, whose address is `root`; `own` is that of this machine. `local_rank` and `local_size`:
    the position among the launchers of this machine, None where it is not known."""

    rank: int = 0
    size: int = 1
    master: str = LOOPBACK
    port: int = 0
    local_rank: int | None = None
    local_size: int | None = None
    root: str = LOOPBACK
    own: str = LOOPBACK


def between(low: int, high: int, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """The type of a command line argument that is a number from `low` to `high`."""

    def convert(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        raise argparse.ArgumentTypeError(f"expected a number from {low} to {high}, got {text!r}")

    return convert


port_number = between(1, 65535)


def _read(environment: Mapping[str, str], name: str, convert: Callable[[str], Any]) -> Any:
    try:
        return convert(environment[name])
    except argparse.ArgumentTypeError as error:
        raise LaunchError(f"{name}: {error}.") from None


def find_position(
    environment: Mapping[str, str],
    rank: int | None = None,
    size: int | None = None,
    master: str | None = None,
    port: int | None = None,
) -> Position:
    """The position of this launcher. What is given goes before the environment."""
    found = {names: _read_set(environment, names) for names in _SETS}
    found = {names: place for names, place in found.items() if place}
    chosen = None
    if rank is None:
        if ("RANK" in environment) != ("WORLD_SIZE" in environment):
            raise LaunchError("only one of RANK and WORLD_SIZE is set: set both, or neither.")
        chosen = _choose(found)
        rank, size = found[chosen]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    by_slurm = first_host(nodes) if chosen == _SLURM else ""
    master = master or environment.get("MASTER_ADDR") or by_slurm
    if size > 1 and not master:
        raise LaunchError(
            "the address of rank 0 is missing: give --master or MASTER_ADDR. (srun sets "
            "SLURM_STEP_NODELIST.)"
        )
    if port is None and "MASTER_PORT" in environment:
        port = _read(environment, "MASTER_PORT", port_number)
    if port is None and size > 1:
        # Jobs that share a machine get different ports, below the ephemeral ports.
        job = environment.get("SLURM_JOB_ID", "") if chosen == _SLURM else ""
        port = _DEFAULT_PORT + (int(job) % 20000 if job.isdigit() else 0)
    local: dict[str, int | None] = {"rank": None, "size": None}
    for names in (names for names in found if found[names] == (rank, size)):
        for key, name in zip(local, names[2:]):
            # Slurm's is a list, such as 4(x2),3: four on each of two machines, three on another.
            counts = re.findall(r"(?<![x\d])\d+", environment.get(name, ""))
            local[key] = max(map(int, counts), default=local[key])
    return Position(rank, size, master or LOOPBACK, port or 0, local["rank"], local["size"])


def _read_set(environment: Mapping[str, str], names: _Names) -> tuple[int, int] | None:
    """(rank, size), or None."""
    if names[0] in environment and names[1] in environment:
        size = _read(environment, names[1], between(1, 1 << 20))
        return _read(environment, names[0], between(0, size - 1)), size
    return None


def _choose(found: dict[_Names, tuple[int, int]]) -> _Names:
    """The variables that count. found: {variables: (rank, size)}."""
    if not found:
        sets = ", ".join(" and ".join(names[:2]) for names in _SETS)
        raise LaunchError(
            f"--from-env finds none of {sets}: start it through srun, mpirun or a training "
            "operator, give --rank and --size, or give -n without it."
        )
    chosen, *others = found
    for before, other in zip(found, others):
        if before in _MPIRUN and found[before][1] > 1:
            break  # Its processes inherit Slurm's variables, of a batch script or a helper.
        # An interactive shell of Slurm says that there is one process.
        if found[other] != found[chosen] and not found[other][1] == 1 < found[chosen][1]:
            say = [
                f"{' and '.join(names[:2])} say rank {found[names][0]} of {found[names][1]}"
                for names in (chosen, other)
            ]
            raise LaunchError(f"{', '.join(say)}: unset the wrong ones, or give --rank and --size.")
    return chosen


def first_host(nodes: str) -> str:
    """The first name in a node list of Slurm: "gpu[03-05,9],login" gives "gpu03"."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes).group()
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first)


def locate(position: Position, environment: Mapping[str, str], timeout: float) -> Position:
    """The position with the addresses at which launchers reach each other, and what follows from
    them. timeout: seconds for the name of rank 0's machine to appear."""
    own = root = LOOPBACK
    if position.size > 1:
        own = _own_address(environment)
        # Rank 0 may know its machine by another name than the others do.
        is_known = own and position.rank == 0
        root = own if is_known else _resolve("MASTER_ADDR", position.master, timeout)
        own = own or (root if position.rank == 0 else _route_to(root, position.port))
        all_here = position.master == "localhost" or position.master.startswith("127.")
        if own.startswith("127.") and not (all_here or position.local_size == position.size):
            raise LaunchError(
                f"MASTER_ADDR is {position.master}, which is {root} on this machine, where other "
                "machines cannot reach it: set DMLC_INTERFACE, such as eth0, or DMLC_NODE_HOST."
            )
    rank, size = (position.rank, position.size) if own.startswith("127.") else (0, 1)
    return position._replace(
        root=root,
        own=own,
        local_rank=rank if position.local_rank is None else position.local_rank,
        local_size=position.local_size or size,
    )


def _own_address(environment: Mapping[str, str]) -> str | None:
    """The address of this machine that the user chose, or None."""
    host, interface = environment.get("DMLC_NODE_HOST"), environment.get("DMLC_INTERFACE")
    if host:
        return _resolve("DMLC_NODE_HOST", host, 0)
    if not interface:
        return None
    for entry in psutil.net_if_addrs().get(interface, ()):
        if entry.family == socket.AF_INET:
            return entry.address
    raise LaunchError(f"DMLC_INTERFACE is {interface!r}, which has no IPv4 address here.")


def _resolve(variable: str, host: str, seconds: float) -> str:
    """The IPv4 address of this name, or address: the KVStore knows no IPv6."""
    ends = time.monotonic() + seconds
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            if time.monotonic() >= ends or error.errno == socket.EAI_ADDRFAMILY:
                text = f"{variable} is {host!r}, which has no IPv4 address: {error}."
                raise LaunchError(text) from error
        time.sleep(0.5)


def _route_to(address: str, port: int) -> str:
    """The address of this machine from which it reaches that one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise LaunchError(f"rank 0 at {address} cannot be reached: {error}.") from error
        return probe.getsockname()[0]
