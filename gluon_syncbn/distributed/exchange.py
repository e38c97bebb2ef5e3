"""Exchanges of a group's layers with other processes, by way of a store."""

import inspect
import threading
import weakref

import numpy

from ..native import clear_channels
from .arguments import is_whole

# A layer's configuration in its handshake, in bytes of UTF-8.
_CONFIGURATION = 256


class Exchange:
    """Exchanges with other processes, by way of a store."""

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
                f"SyncGroup got a store of rank {self.rank!r} and size {self.size!r}: rank must be "
                "one of 0, ..., size - 1."
            )
        self._gather = _gather_of(store, timeout)
        self._locks = {}
        # The handshakes that were made: a layer's id, its devices and group size.
        self._known = set()
        # Why no exchange can succeed any more. Of two processes one may have had its answer and the
        # other not, so a step that failed cannot be taken again.
        self._broken = None
        self._fail = getattr(store, "fail", None)
        self._native_channel = getattr(store, "native_channel", None)

    def of(self, layer, here, group_size):
        """The exchange of a `native.Layer`."""
        configuration = layer.id, here, group_size
        reference = weakref.ref(layer)

        def exchange(key, title, channels, mine):
            layer = reference()
            handshake = f"{key.split()[0]} handshake"
            # A call on another thread waits until the handshake is made.
            with self._locks.setdefault(configuration, threading.Lock()):
                if configuration not in self._known:
                    # The name last, which may be long.
                    text = (
                        f"layer {key.split()[0]} of {channels} channels, {layer.dtype}, {here} "
                        f"devices in each process, groups of {group_size or 'all'}, '{layer.name}'"
                    )
                    self._compare(handshake, title, text)
                    self._known.add(configuration)
            everyone = self.all_gather(key, title, mine)
            if self._native_channel is not None:
                # From now on the layer's messages take the channel.
                layer.set_channel(key, self._native_channel(key), exchange)
                if self._broken:
                    clear_channels()
            return everyone

        return exchange

    def _compare(self, key, title, text):
        """A handshake: all processes must give the same text."""
        text = text.encode()[:_CONFIGURATION].ljust(_CONFIGURATION, b"\0")
        everyone = self.all_gather(key, title, numpy.array(list(text), dtype=numpy.float64))
        texts = [
            bytes(row.astype(numpy.uint8)).rstrip(b"\0").decode(errors="replace")
            for row in everyone
        ]
        if len(set(texts)) > 1:
            ranks = {t: [r for r, other in enumerate(texts) if other == t] for t in texts}
            sides = "; ".join(f"rank {', '.join(map(str, r))}: {t}" for t, r in ranks.items())
            self._break(
                f"{title}: the processes have not built the same net. {sides}. Make the same "
                "layers in the same order in every process, also those that only one of them uses."
            )
            raise RuntimeError(self._broken)

    def all_gather(self, key, title, mine):
        """The arrays of all processes, shape (size, len(mine))."""
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

    def _break(self, text):
        self._broken = text
        clear_channels()

    def fail(self, text):
        """A step has failed here, and other processes may wait for it."""
        if self._broken is None:
            self._break(text)
            if self._fail is not None:
                self._fail(text)


def _gather_of(store, timeout):
    """gather(key, title, mine): the arrays of all processes, shape (size, len(mine))."""
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
