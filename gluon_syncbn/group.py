"""Who reduces together, and how long they wait for each other."""

import inspect
import math
import os
import threading
import weakref

import mxnet
import numpy
from mxnet.context import Context

from ._native import clear_lines

TIMEOUT_VARIABLE = "GLUON_SYNCBN_TIMEOUT"
_DEFAULT_TIMEOUT = 300.0
# What a process says of a layer at its first exchange, in bytes of UTF-8.
_INTRODUCTION = 256


class SyncGroup:
    """The devices that share their statistics.

    Parameters
    ----------
    devices : list of Context, optional
        Who takes part in this process, each in every call of a layer of this group. By default the
        contexts on which the layer's parameters live.
    store : object, optional
        What joins this process with others: a :class:`gluon_syncbn.distributed.KVStoreReducer`, a
        :class:`gluon_syncbn.distributed.HorovodReducer`, or anything that has

        - ``rank`` and ``size``, this process's number and how many there are;
        - ``all_reduce(key, array)``, which returns the sum of the float64 arrays, all of one
          shape, that the processes give for one `key` (a short str). A sum with zeros has to be
          exact: every process puts its numbers where all others have zeros. It is called on
          threads that MXNet made, for several keys at once but never twice at a time for one, and
          raises when it cannot get an answer. Where it takes ``timeout``, it gets the group's.

        With a store, every process makes its groups and layers in the same order.
    timeout : float, optional
        Seconds for which a device or a process waits for the others. A tenth of it brings a
        warning, all of it ends in an MXNetError that tells who came and who did not. By default
        the environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.
    group_size : int, optional
        Splits the devices of all processes into groups of so many, in the order of ranks and of
        devices, each with statistics of its own: 1 is batch normalization without synchronization,
        None is one group of all. It has to divide the number of devices of a process, or to be a
        multiple of it that divides the number of all devices.

    Raises
    ------
    ValueError
        Where a device is named twice, the store lacks something, or a number makes no sense.
    MXNetError
        Where a layer's result is waited for in training, when `group_size` does not fit its
        devices. In inference any number does.

    References
    ----------
    Groups smaller than the cluster: J. Peng et al., MegDet, CVPR 2018.
    """

    def __init__(self, devices=None, store=None, timeout=None, group_size=None):
        if isinstance(devices, Context):
            devices = [devices]
        if devices is not None and not (
            isinstance(devices, (list, tuple)) and all(isinstance(d, Context) for d in devices)
        ):
            raise ValueError(
                f"SyncGroup got devices={devices!r}: give a list of contexts, such as "
                "[mx.gpu(0), mx.gpu(1)]."
            )
        names = None if devices is None else tuple(str(device) for device in devices)
        if names is not None and (not names or len(set(names)) != len(names)):
            raise ValueError(
                f"SyncGroup got devices={list(names)}: name each device that takes part once, or "
                "leave devices out for those on which the parameters live."
            )
        if group_size is not None and not (is_whole(group_size) and group_size > 0):
            raise ValueError(
                f"SyncGroup got group_size={group_size!r}: give the number of devices that "
                "synchronize with each other, or None for all."
            )
        self.devices = names
        self.timeout = seconds(timeout)
        self.group_size = None if group_size is None else int(group_size)
        self.store = store
        self._exchange = None if store is None else _Exchange(store, self.timeout)

    @property
    def size(self):
        """The number of processes."""
        return 1 if self._exchange is None else self._exchange.size

    def __deepcopy__(self, memo):
        # Copies of a layer meet in the same group; a store is a connection, of which there is one.
        return self

    def __reduce__(self):
        if self.store is not None:
            raise TypeError(
                "A SyncGroup with a store is a connection to other processes and cannot be "
                "pickled: save the net's parameters, or set the group with "
                "gluon_syncbn.set_default_group in the process that loads the net."
            )
        devices = self.devices and [_context(name) for name in self.devices]
        return SyncGroup, (devices, None, self.timeout, self.group_size)

    def __repr__(self):
        devices = "those of the parameters" if self.devices is None else list(self.devices)
        text = f"SyncGroup(devices={devices}, timeout={self.timeout:g}"
        if self.group_size:
            text += f", group_size={self.group_size}"
        if self.store is not None:
            text += f", process {self.store.rank} of {self.size}"
        return text + ")"

    def _fail(self, text):
        """A step of a layer has failed here."""
        if self._exchange is not None:
            self._exchange.fail(text)

    def _configure(self, layer, devices, num_devices):
        """Tells a `_native.Layer` whom it meets."""
        here, processes = num_devices or len(devices), self.size
        in_process, ranks, misfit = 0, range(processes), ""
        k = self.group_size
        if k is not None and k < here and not devices:
            misfit = (
                f"{layer.name} runs in a graph with parameters that the layer does not know, so "
                f"groups of {k} devices cannot be formed: name the devices, as in "
                f"SyncGroup([mx.gpu(0), ...], group_size={k})."
            )
        elif k is not None and here:
            if here % k == 0:
                in_process, ranks = k, None
            elif k % here == 0 and processes % (k // here) == 0:
                span = k // here
                first = self.store.rank // span * span
                ranks = range(first, first + span)
            else:
                misfit = (
                    f"SyncGroup was made with group_size={k}, and {layer.name} has {here} devices "
                    f"in each of {processes} processes: choose a divisor of {here}, or a multiple "
                    f"of it that divides {here * processes}."
                )
        alone = ranks is None or processes == 1
        layer.set_devices(
            devices,
            num_devices,
            self.timeout,
            group_size=in_process if here > in_process else 0,
            processes=1 if alone else processes,
            ranks=range(1) if alone else ranks,
            exchange=None if alone else self._exchange.of(layer, here, k),
            misfit=misfit,
        )


class _Exchange:
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
        """The exchange of a `_native.Layer`."""
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
            sides = "; ".join(f"rank {_join(r)}: {t}" for t, r in ranks.items())
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
            layer.set_line(key, self._native_line(key), exchange)
            if self._broken:
                clear_lines()

    def _break(self, text):
        self._broken = text
        clear_lines()

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


_default = None
_users = weakref.WeakSet()


def default_group():
    """The group of all layers that were made without one."""
    return _default or SyncGroup()


def set_default_group(group):
    """Sets the group of all layers, present and future, that were made without one.

    Parameters
    ----------
    group : SyncGroup or None
        None: all devices of the layer's parameters, in this process alone.

    Raises
    ------
    ValueError
        For anything else.
    """
    global _default
    if group is not None and not isinstance(group, SyncGroup):
        raise ValueError(f"group is {group!r}: give a gluon_syncbn.SyncGroup, or None.")
    if group is not _default:
        # Calls under way are the old group's, whose other processes wait for them.
        mxnet.nd.waitall()
    _default = group
    for layer in list(_users):
        layer.configure()


def follow_default_group(layer):
    """Configures the layer again whenever the default group changes."""
    _users.add(layer)


def stop_following(layer):
    _users.discard(layer)


def is_whole(value):
    return isinstance(value, (int, numpy.integer)) and not isinstance(value, bool)


def _join(values):
    return ", ".join(map(str, values))


def _context(name):
    kind, number = name[:-1].split("(")
    return Context(kind, int(number))


def seconds(timeout):
    """A timeout as a number: of the environment where it is None."""
    source = "timeout"
    if timeout is None:
        source = TIMEOUT_VARIABLE
        timeout = os.environ.get(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT)
    try:
        number = float(timeout)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{source} is {timeout!r}: give a number of seconds above 0, such as 300.")
    return number
