"""The processes of a group: they agree on a layer before its first message, and stay apart after an
error."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable

import numpy

from .. import native
from ..arguments import is_whole
from ..trainers import adds_here_alone
from .store import Store, UserStore

# Opens a layer's route to other processes: see `native.Layer.set_devices`.
_OpenRoute = Callable[[native.Key, str, int, int], native.Route]
# Size of a layer's configuration in its handshake, in bytes of UTF-8: a multiple of 4.
_CONFIGURATION = 512
# What to do about processes that have not built the same net.
_SAME_LAYERS = (
    "Make the same layers, with the same settings and in the same order, in every process, also "
    "those that only one of them uses."
)
_LOST = "the processes have lost each other, and all have to start again from the last checkpoint."
# Stores with which a step has failed, and its error: a message that only some processes have sent
# would be taken for a later one. Weak references, as a KVStore must be gone before Python is.
_failures: list[tuple[Callable[[], Any], str]] = []


class Processes:
    """Opens routes to the other processes of a group, through its store."""

    def __init__(self, store: Any, timeout: float) -> None:
        for name in ("rank", "size", "all_reduce"):
            if not hasattr(store, name):
                raise ValueError(
                    f"SyncGroup got store={store!r}, which has no {name}: give a "
                    "gluon_syncbn.distributed.KVStoreReducer or HorovodReducer, or an object with "
                    "rank, size and all_reduce(key, array)."
                )
        self.rank, self.size = store.rank, store.size
        if not (is_whole(self.rank) and is_whole(self.size) and 0 <= self.rank < self.size):
            raise ValueError(
                f"SyncGroup got a store of rank {self.rank!r} and size {self.size!r}: rank must be "
                "one of 0, ..., size - 1."
            )
        try:
            self._given: Callable[[], Any] = weakref.ref(store)
        except TypeError:  # Such as a SimpleNamespace.
            self._given = lambda: store
        failure = self._failure_of_store()
        if failure:
            raise ValueError(
                f"SyncGroup got a store with which a step has failed: {_LOST} {failure}"
            )
        self._store: Store = store if isinstance(store, Store) else UserStore(store, timeout)
        self._timeout = timeout
        self._routes: weakref.WeakSet[native.Route] = weakref.WeakSet()
        self._locks: dict[int, threading.Lock] = {}
        # {layer id: its dtype, devices and group size at the last handshake}
        self._known: dict[int, tuple[str, int, int | None]] = {}
        # Why nothing can be exchanged any more. One process may have had its answer and another
        # not, so a failed step cannot be repeated.
        self._broken: str | None = None

    def opener(
        self, layer: Any, here: int, group_size: int | None, ranks: range
    ) -> tuple[_OpenRoute, range]:
        """The function `open` of a `native.Layer` with `here` devices in this process, which shares
        statistics with these ranks. Also returns their range among the ranks that exchange."""
        members, sums, group = None, True, None
        if len(ranks) < self.size:
            group, sums = group_size, self._store.split(len(ranks))
            # Without `sums` every process receives the values of all, and adds those of its group.
            if sums:
                members, ranks = ranks, range(len(ranks))
        configuration = layer.dtype, here, group_size
        reference = weakref.ref(layer)

        def open_route(key: native.Key, title: str, channels: int, size: int) -> native.Route:
            layer = reference()
            self._check(title)
            # A call on another thread waits until the handshake is complete.
            with self._locks.setdefault(key.layer, threading.Lock()):
                if self._known.get(key.layer) != configuration:
                    failure = self._failure_of_store()
                    if failure:
                        self._break(failure)
                        self._check(title)
                    fields = {
                        "channels": channels,
                        "dtype": layer.dtype,
                        "devices": here,
                        "group_size": group_size,
                        **layer.settings(),
                        "name": layer.name,  # Comes last, as a long one is cut off.
                    }
                    self._compare(native.Key(layer.id, "handshake"), title, fields)
                    self._known[key.layer] = configuration
            self._check_trainers(layer)
            key = key._replace(group=group)
            route = self._store.route(key, size, title, self._timeout, members, sums)
            self._routes.add(route)
            if self._broken:  # Meanwhile.
                route.close(self._broken)
            return route

        return open_route, ranks

    def all_gather(self, name: str, title: str, mine: numpy.ndarray) -> numpy.ndarray:
        """The arrays of all processes, shape (size, len(mine))."""
        self._check(title)
        try:
            return self._store.exchange(native.Key(None, name), mine, title, self._timeout)
        except Exception as error:
            self.fail(str(error))
            raise

    def fail(self, text: str) -> None:
        """Notes that a step has failed here, and tells other processes, which may wait for it."""
        if self._broken is None:
            self._break(text)
            if self.size > 1:
                _failures.append((self._given, text))
            self._store.fail(text)

    def _failure_of_store(self) -> str | None:
        return next((text for store, text in _failures if store() is self._given()), None)

    def _check(self, title: str) -> None:
        if self._broken:
            raise RuntimeError(f"{title}: {self._broken}")

    def _break(self, text: str) -> None:
        self._broken = f"{_LOST} {text}"
        for route in list(self._routes):
            route.close(self._broken)

    def _compare(self, key: native.Key, title: str, fields: dict[str, Any]) -> None:
        """A handshake: all processes must give the same fields."""
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        data = text.encode()[:_CONFIGURATION].ljust(_CONFIGURATION, b"\0")
        mine = numpy.frombuffer(data, "<u4").astype(numpy.float64)
        what = f"{title}, to compare the layer's settings"
        everyone = self._store.exchange(key, mine, what, self._timeout)
        texts = [
            row.astype("<u4").tobytes().rstrip(b"\0").decode(errors="replace") for row in everyone
        ]
        if len(set(texts)) > 1:
            columns = zip(*(text.split("\n", len(fields) - 1) for text in texts))
            differ = [", ".join(row) for row in zip(*(c for c in columns if len(set(c)) > 1))]
            ranks = {t: [r for r, other in enumerate(differ) if other == t] for t in differ}
            sides = "; ".join(f"rank {', '.join(map(str, r))}: {t}" for t, r in ranks.items())
            text = f"{title}: the processes have not built the same net. {sides}. {_SAME_LAYERS}"
            # All processes see it, so none has to be told.
            self._break(text)
            raise RuntimeError(text)

    def _check_trainers(self, layer: Any) -> None:
        """Warns once of a Trainer with which the processes train different weights."""
        how = self._store.trainer
        alone = how and next(filter(adds_here_alone, layer.trainers()), None)
        if alone:
            self._store.trainer = None
            store = alone._kvstore_params["kvstore"]
            native.warn(
                f"{layer.name} shares statistics with other processes, but its Trainer (kvstore="
                f"{getattr(store, 'type', store)!r}) adds the gradients of this process alone, "
                f"so the weights of the processes drift apart. Write {how}. If your own code adds "
                "the gradients of all, give the Trainer kvstore=None."
            )
