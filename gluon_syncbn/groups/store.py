"""Stores, which join processes: what they have in common, and those that a user writes."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import numpy

from .. import native
from ..arguments import is_whole


class Store:
    """Opens a `native.Route` for each key under which processes exchange values.

    rank, size : int
        This process's rank, and the number of processes.
    """

    # How messages name the Trainer that adds gradients over all processes.
    trainer: str | None = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        # {key: route}
        self.routes: dict[native.Key, native.Route] = {}
        self._opening: dict[native.Key, threading.Lock] = {}

    def route(
        self,
        key: native.Key,
        size: int,
        title: str,
        timeout: float,
        ranks: range | None = None,
        sums: bool = False,
    ) -> native.Route:
        """The route of a `native.Key`, for `size` numbers of each process. `title` names the
        exchange in messages. ranks: those that take part, by default all; see `split`. sums: they
        exchange a layer's messages, so their sum suffices if the store can add it exactly."""
        with self._opening.setdefault(key, threading.Lock()):
            if key not in self.routes:
                self.routes[key] = self._open(key, size, title, timeout, ranks, sums)
            return self.routes[key]

    def exchange(
        self, key: native.Key, array: numpy.ndarray, title: str, timeout: float
    ) -> numpy.ndarray:
        """The arrays of all processes, shape (size, n), given one of shape (n,)."""
        return self.route(key, array.size, title, timeout).exchange(title, timeout, array)

    def split(self, size: int) -> bool:
        """Whether groups of `size` processes can exchange among themselves, from here on. All
        processes call it."""
        return False

    def fail(self, text: str) -> None:
        """A step of a layer has failed in this process."""

    def _open(
        self,
        key: native.Key,
        size: int,
        title: str,
        timeout: float,
        ranks: range | None,
        sums: bool,
    ) -> native.Route:
        raise NotImplementedError


class UserStore(Store):
    """Routes through an object with ``rank``, ``size``, ``all_reduce(key, array)``, and perhaps
    ``exact_bits`` and ``fail(text)``: see `SyncGroup`."""

    def __init__(self, store: Any, timeout: float) -> None:
        super().__init__(store.rank, store.size)
        self._exact_bits = getattr(store, "exact_bits", 0)
        if not (is_whole(self._exact_bits) and 0 <= self._exact_bits <= 53):
            raise ValueError(
                f"SyncGroup got a store with exact_bits={self._exact_bits!r}: it adds whole "
                "numbers below 2**exact_bits exactly, so give 24 if it adds float32, 53 if it adds "
                "float64, and 0 or nothing otherwise."
            )
        try:
            takes_timeout = "timeout" in inspect.signature(store.all_reduce).parameters
        except (TypeError, ValueError):
            takes_timeout = False
        self._options = {"timeout": timeout} if takes_timeout else {}
        self._store = store
        self._connection = native.Connection(self._all_reduce)

    def fail(self, text: str) -> None:
        if hasattr(self._store, "fail"):
            self._store.fail(text)

    def _open(
        self,
        key: native.Key,
        size: int,
        title: str,
        timeout: float,
        ranks: range | None,
        sums: bool,
    ) -> native.Route:
        bits = self._exact_bits if sums else 0
        return self._connection.function_route(str(key), size, self.rank, self.size, bits)

    def _all_reduce(self, key: str, array: numpy.ndarray) -> numpy.ndarray:
        result = numpy.asarray(self._store.all_reduce(key, array, **self._options))
        if result.shape != array.shape or result.dtype != array.dtype:
            raise ValueError(
                f"the store's all_reduce returned {result.dtype} of shape {result.shape} for "
                f"float64 of shape {array.shape}."
            )
        return result
