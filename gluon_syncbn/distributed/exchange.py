"""The numbers of all processes, by way of a store."""

import inspect
import threading
import weakref

import numpy

from ..native import clear_channels
from .arguments import is_whole

# What a process says of a layer at its first exchange, in bytes of UTF-8.
_INTRODUCTION = 256


class Exchange:
    """The numbers of all processes, by way of a store."""

    def __init__(self, store, timeout):
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
                f"SyncGroup got a store of rank {self.rank!r} and size {self.size!r}: rank has to "
                "be one of 0, ..., size - 1."
            )
        self._gather = _gather_of(store, timeout)
        self._locks = {}
        # Layers that the other processes know, each with its number, devices and group size.
        self._introduced = {}
        # Why no exchange can succeed any more. Of two processes one may have had its answer and the
        # other not, so a step that failed cannot be taken again.
        self._broken = None
        self._fail = getattr(store, "fail", None)
        self._native_line = getattr(store, "native_line", None)

    def of(self, layer, here, group_size):
        """The exchange of a `native.Layer`."""
        introduction = layer.number, here, group_size
        describe = weakref.ref(layer)

        def exchange(key, title, channels, mine):
            state = self._introduced.setdefault(introduction, _Introduction())
            with state.lock:
                if not state.done:
                    self._introduce(
                        layer_number=key.split()[0],
                        title=title,
                        # The name last, which may be long.
                        text=f"layer {key.split()[0]} of {channels} channels, "
                        f"{describe().dtype()}, {here} devices in each process, "
                        f"groups of {group_size or 'all'}, '{describe().name}'",
                    )
                    state.done = True
            everyone = self.all_gather(key, title, mine)
            self._shorten(describe(), key, exchange)
            return everyone

        return exchange

    def _introduce(self, layer_number, title, text):
        mine = numpy.zeros(_INTRODUCTION)
        told = text.encode()[:_INTRODUCTION]
        mine[: len(told)] = list(told)
        everyone = self.all_gather(f"{layer_number} hello", title, mine)
        told = [
            bytes(row.astype(numpy.uint8)).rstrip(b"\0").decode(errors="replace")
            for row in everyone
        ]
        if len(set(told)) > 1:
            ranks = {t: [r for r, other in enumerate(told) if other == t] for t in told}
            sides = "; ".join(f"rank {', '.join(map(str, r))}: {t}" for t, r in ranks.items())
            self._break(
                f"{title}: the processes have not built the same net. {sides}. Make the same "
                "layers in the same order in every process, also those that only one of them uses."
            )
            raise RuntimeError(self._broken)

    def all_gather(self, key, title, mine):
        if self._broken:
            raise RuntimeError(
                f"{title}: the processes have lost each other, and all have to start again from "
                f"the last checkpoint. {self._broken}"
            )
        # One key never twice at a time: the store could not tell which belongs to which.
        with self._locks.setdefault(key, threading.Lock()):
            try:
                return self._gather(key, title, mine)
            except Exception as error:
                self.fail(str(error))
                raise

    def _shorten(self, layer, key, exchange):
        """Where the store has a line for the key, the layer's messages take it without us."""
        if layer is not None and self._native_line is not None:
            layer.set_channel(key, self._native_line(key), exchange)
            if self._broken:
                clear_channels()

    def _break(self, text):
        self._broken = text
        clear_channels()

    def fail(self, text):
        """A step has failed here: the other processes wait in vain."""
        if self._broken is None:
            self._break(text)
            if self._fail is not None:
                self._fail(text)


class _Introduction:
    """One layer's, with which one of its calls begins."""

    def __init__(self):
        self.lock = threading.Lock()
        self.done = False


def _gather_of(store, timeout):
    """gather(key, title, numbers): those of all processes, shape (size, len(numbers))."""
    if hasattr(store, "all_gather"):
        return lambda key, title, mine: store.all_gather(key, mine, title=title, timeout=timeout)
    try:
        takes_timeout = "timeout" in inspect.signature(store.all_reduce).parameters
    except (TypeError, ValueError):
        takes_timeout = False
    options = {"timeout": timeout} if takes_timeout else {}

    def gather(key, title, mine):
        slots = numpy.zeros((store.size, len(mine)))
        slots[store.rank] = mine
        result = numpy.asarray(store.all_reduce(key, slots, **options))
        if result.shape != slots.shape or result.dtype != slots.dtype:
            raise ValueError(
                f"{title}: the store's all_reduce returned {result.dtype} of shape {result.shape} "
                f"for float64 of shape {slots.shape}."
            )
        return result

    return gather
