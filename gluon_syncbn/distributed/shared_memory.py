"""Which processes share a machine, and the memory in which they meet."""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import Iterable, Sequence

from .. import native

_ADDRESS_SIZE = 64  # bytes: "machine PID descriptor token", padded with spaces
_NOWHERE = "-"


class SharedMemory:
    """The memory that the processes of one machine share. The store is used between others.

    address : bytes
        What the others need to know of this process. It has the same length in all processes.
    why_not : str
        Why this process shares no memory, or "".
    """

    why_not = ""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own: native.Segment | None = None
        token = secrets.token_hex(8)
        machine, descriptor = _NOWHERE, 0
        if os.environ.get("GLUON_SYNCBN_SHARED_MEMORY") == "0":
            self.why_not = "GLUON_SYNCBN_SHARED_MEMORY=0"
        else:
            try:
                self._own = native.Segment(token)
                machine, descriptor = _machine(), self._own.descriptor
            except (OSError, RuntimeError) as error:
                self.why_not = str(error)
        text = f"{machine} {os.getpid()} {descriptor} {token}"
        self.address = text.encode().ljust(_ADDRESS_SIZE)

    def open(self, addresses: Sequence[bytes]) -> bool:
        """Opens the memory of all processes of this machine. Returns whether that was possible.
        addresses: the `address` of each process, by rank."""
        fields = [address.decode().split() for address in addresses]
        self._machines = [machine for machine, *_ in fields]
        self._segments = {self._rank: self._own}
        here = self._machines[self._rank]
        try:
            for rank, (machine, process, descriptor, token) in enumerate(fields):
                if rank != self._rank and machine == here != _NOWHERE:
                    file = f"/proc/{process}/fd/{descriptor}"
                    self._segments[rank] = native.Segment(token, file)
        except RuntimeError as error:
            self.why_not = str(error)
        return not self.why_not

    def agree(self, opened: Iterable[float]) -> None:
        """Takes what `open` returned in each process. If one failed, no process of its machine
        shares memory."""
        failed = {machine for machine, done in zip(self._machines, opened) if not done}
        self._machines = [_NOWHERE if m in failed else m for m in self._machines]
        if self._own:
            self._own.close()

    def joins(self, ranks: range) -> bool:
        """Whether these processes meet in shared memory."""
        machines = {self._machines[rank] for rank in ranks}
        return len(machines) == 1 and _NOWHERE not in machines

    def route(
        self, connection: native.Connection, key: str, size: int, ranks: range, sums: bool
    ) -> native.Route:
        """The `native.Route` of a key that these processes exchange, this one among them. sums:
        see `Store.route`."""
        rank, segment = ranks.index(self._rank), self._segments[ranks[0]]
        return connection.shared_memory_route(key, size, rank, len(ranks), segment, sums)


def _machine() -> str:
    """A name of this machine, equal for processes that can share memory: those of one user in one
    container."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        parts = [file.read(), str(os.getuid())]
    parts += (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return hashlib.sha1(" ".join(parts).encode()).hexdigest()[:16]
