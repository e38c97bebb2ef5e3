"""Exchanges of a group's layers with other processes, through a store."""

import inspect
import threading
import weakref

import numpy

from ..native import FixedPoint, Key, clear_channels, warn
from ..training.trainer import adds_here_alone
from .arguments import is_whole
from .reducer import Reducer

# Size of a layer's configuration in its handshake, in bytes of UTF-8: a multiple of 4.
_CONFIGURATION = 512


class Exchange:
    """Exchanges with other processes, through a store."""

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
        self._reducer = store if isinstance(store, Reducer) else _Adder(store, timeout)
        self._timeout = timeout
        self._locks = {}
        # Completed handshakes: a layer's id, its devices and group size.
        self._known = set()
        # Why no exchange can succeed any more. One process may have had its answer and another not,
        # so a failed step cannot be repeated.
        self._broken = None
        self._fail = getattr(store, "fail", None)

    def split(self, size):
        """Whether groups of `size` processes can exchange among themselves. All processes call
        it."""
        return self._reducer.split(size)

    def of(self, layer, here, group_size, ranks=None, sums=True):
        """The exchange of a `native.Layer`. ranks: those that take part, by default all. sums:
        whether the layer wants the sums over all of them."""
        configuration = layer.id, here, group_size
        group = None if sums and ranks is None else group_size
        reference = weakref.ref(layer)

        def exchange(key, title, channels, mine):
            layer = reference()
            # A call on another thread waits until the handshake is complete.
            with self._locks.setdefault(configuration, threading.Lock()):
                if configuration not in self._known:
                    fields = {
                        "channels": channels,
                        "dtype": layer.dtype,
                        "devices": here,
                        "group_size": group_size,
                        **layer.settings(),
                        "name": layer.name,  # Comes last, as a long one is cut off.
                    }
                    self._compare(Key(layer.id, "handshake"), title, fields)
                    # If earlier sums failed, processes may differ in what they know of them.
                    for known, channel in self._reducer.channels.copy().items():
                        if known.layer == layer.id:
                            channel.restart()
                    self._known.add(configuration)
            self._check_trainers(layer)
            whole = key._replace(group=group)
            everyone = self._exchange(whole, title, mine, ranks, sums)
            channel = self._reducer.channels[whole]
            if channel.handle is not None:
                # From now on the layer's messages use the channel.
                layer.set_channel(key, channel, exchange)
                if self._broken:
                    clear_channels()
            return everyone

        return exchange

    def _check_trainers(self, layer):
        """Warns once of a Trainer with which the processes train different weights."""
        how = getattr(self._reducer, "trainer", None)
        alone = how and next(filter(adds_here_alone, layer.trainers()), None)
        if alone:
            self._reducer.trainer = None
            store = alone._kvstore_params["kvstore"]
            warn(
                f"{layer.name} shares statistics with other processes, but its Trainer (kvstore="
                f"{getattr(store, 'type', store)!r}) adds the gradients of this process alone, "
                f"so the weights of the processes drift apart. Write {how}. If your own code adds "
                "the gradients of all, give the Trainer kvstore=None."
            )

    def _compare(self, key, title, fields):
        """A handshake: all processes must give the same fields."""
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        text = text.encode()[:_CONFIGURATION].ljust(_CONFIGURATION, b"\0")
        everyone = self._exchange(key, title, numpy.frombuffer(text, "<u4").astype(numpy.float64))
        texts = [
            row.astype("<u4").tobytes().rstrip(b"\0").decode(errors="replace") for row in everyone
        ]
        if len(set(texts)) > 1:
            columns = zip(*(text.split("\n", len(fields) - 1) for text in texts))
            differ = [", ".join(row) for row in zip(*(c for c in columns if len(set(c)) > 1))]
            ranks = {t: [r for r, other in enumerate(differ) if other == t] for t in differ}
            sides = "; ".join(f"rank {', '.join(map(str, r))}: {t}" for t, r in ranks.items())
            self._break(
                f"{title}: the processes have not built the same net. {sides}. Make the same "
                "layers, with the same settings and in the same order, in every process, also "
                "those that only one of them uses."
            )
            raise RuntimeError(self._broken)

    def all_gather(self, name, title, mine):
        """The arrays of all processes, shape (size, len(mine))."""
        return self._exchange(Key(None, name), title, mine)

    def _exchange(self, key, title, mine, ranks=None, sums=False):
        """The arrays of all processes, or of `ranks`. With `sums`, perhaps only the sums of a
        layer's message, shape (1, len(mine))."""
        if self._broken:
            raise RuntimeError(
                f"{title}: the processes have lost each other, and all have to start again from "
                f"the last checkpoint. {self._broken}"
            )
        # Never one key twice at a time: the store could not tell the exchanges apart.
        with self._locks.setdefault(key, threading.Lock()):
            try:
                return self._reducer.exchange(key, mine, title, self._timeout, ranks, sums)
            except Exception as error:
                self.fail(str(error))
                raise

    def _break(self, text):
        self._broken = text
        clear_channels()

    def fail(self, text):
        """Notes that a step has failed here, and tells other processes, which may wait for it."""
        if self._broken is None:
            self._break(text)
            if self._fail is not None:
                self._fail(text)


class _Adder:
    """Does the work of a `Reducer` with a store that only adds."""

    def __init__(self, store, timeout):
        self._rank, self._size, self._all_reduce = store.rank, store.size, store.all_reduce
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
        self.channels = {}

    def exchange(self, key, mine, title, timeout, ranks=None, sums=False):
        channel = self.channels.setdefault(key, _Channel())
        total = self._sums(channel, key, mine, title) if sums and self._exact_bits else None
        if total is not None:
            return total.reshape(1, -1)
        slots = numpy.zeros((self._size, len(mine)))
        slots[self._rank] = mine
        everyone = self._add(key, title, slots)
        if channel.fixed_point:
            channel.fixed_point.follow(everyone)
        return everyone

    def _sums(self, channel, key, mine, title):
        if not channel.fixed_point:
            channel.fixed_point = FixedPoint(len(mine), self._size, self._exact_bits)
        packed = channel.fixed_point.pack(mine)
        if packed is not None:
            return channel.fixed_point.unpack(self._add(f"{key} sums", title, packed))

    def _add(self, key, title, array):
        result = numpy.asarray(self._all_reduce(str(key), array, **self._options))
        if result.shape != array.shape or result.dtype != array.dtype:
            raise ValueError(
                f"{title}: the store's all_reduce returned {result.dtype} of shape {result.shape} "
                f"for float64 of shape {array.shape}."
            )
        return result

    def split(self, size):
        return False


class _Channel:
    """Takes the place of a `native.Channel`."""

    handle = fixed_point = None

    def restart(self):
        """Does nothing: each group has its own windows."""
