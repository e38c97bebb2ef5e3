"""Which devices and processes share statistics, and how long they wait for each other."""

from __future__ import annotations

import os
import weakref
from typing import Any, NamedTuple, Sequence

from mxnet.context import Context

from .. import native
from ..arguments import error_for, is_whole, seconds
from ._agreement import Processes


class _Share(NamedTuple):
    """Who shares a layer's statistics: groups of this size of a process's devices, None for all of
    them, in the processes of these ranks."""

    group_size: int | None
    ranks: range


class SyncGroup:
    """The devices that share their statistics.

    Parameters
    ----------
    devices : list of Context, optional
        This process's devices, each of which takes part in every call of a layer of this group. By
        default all contexts of the layer's parameters.
    store : object, optional
        Connects this process with others: a :class:`gluon_syncbn.distributed.KVStoreReducer`, a
        :class:`gluon_syncbn.distributed.HorovodReducer`, or anything that has

        - ``rank`` and ``size``, this process's rank and the number of processes;
        - ``all_reduce(key, array)``, which returns the sum of the processes' float64 arrays for one
          `key` (a short str), all of one shape. Adding zeros must be exact: each process puts its
          numbers where all others have zeros. It is called on MXNet's threads, for several keys at
          once but never twice at a time for one key, and must raise if it gets no answer. If it has
          a parameter ``timeout``, it gets the group's;
        - ``exact_bits``, if it adds whole numbers below ``2**exact_bits`` exactly: 53 for a store
          that adds float64. The size of a message then no longer grows with the number of
          processes.

        With a store, every process must make its groups and layers in the same order.
    timeout : float, optional
        Seconds that a device or a process waits for the others. After a tenth of it comes a
        warning, after all of it an MXNetError that says who arrived and who did not. By default the
        environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.
    group_size : int, optional
        Splits the devices of all processes into groups of this size, in order of rank and device,
        each with its own statistics: 1 is batch normalization without synchronization, None is one
        group of all. It must divide the number of devices of a process, or be a multiple of it that
        divides the number of all devices.

    Raises
    ------
    ValueError
        If a device is named twice, the store lacks something or a step has failed with it, or a
        number is invalid.
    TypeError
        If `devices` are no contexts, or a number is none.
    MXNetError
        On waiting for a layer's result in training, if `group_size` does not fit its devices, or
        its parameters are on some of `devices` alone. Inference accepts any devices.

    References
    ----------
    Groups smaller than the cluster: J. Peng et al., MegDet, CVPR 2018.
    """

    # Whether the user chose this group; otherwise it is the fallback of layers without one.
    _is_chosen = True

    def __init__(
        self,
        devices: Sequence[Context] | Context | None = None,
        store: Any = None,
        timeout: float | None = None,
        group_size: int | None = None,
    ) -> None:
        if isinstance(devices, Context):
            devices = [devices]
        if devices is not None and not (
            isinstance(devices, (list, tuple)) and all(isinstance(d, Context) for d in devices)
        ):
            raise TypeError(
                f"SyncGroup got devices={devices!r}: give a list of contexts, such as "
                "[mx.gpu(0), mx.gpu(1)]."
            )
        names = None if devices is None else tuple(map(str, devices))
        if names is not None and (not names or len(set(names)) != len(names)):
            raise ValueError(
                f"SyncGroup got devices={list(names)}: name each device that takes part once, or "
                "leave devices out for those on which the parameters live."
            )
        if group_size is not None and not (is_whole(group_size) and group_size > 0):
            raise error_for(group_size)(
                f"SyncGroup got group_size={group_size!r}: give the number of devices that "
                "synchronize with each other, or None for all."
            )
        self.devices = names
        self.timeout = seconds(timeout)
        self.group_size = None if group_size is None else int(group_size)
        self.store = store
        self._processes = None if store is None else Processes(store, self.timeout)

    @property
    def size(self) -> int:
        """The number of processes."""
        return 1 if self._processes is None else self._processes.size

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncGroup:
        # Copies of a layer are in the same group, and a store cannot be copied.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.store is not None:
            raise TypeError(
                "A SyncGroup with a store is a connection to other processes and cannot be "
                "pickled: save the net's parameters, or set the group with "
                "gluon_syncbn.set_default_group in the process that loads the net."
            )
        devices = self.devices and [_context(name) for name in self.devices]
        return SyncGroup, (devices, None, self.timeout, self.group_size)

    def __repr__(self) -> str:
        devices = "those of the parameters" if self.devices is None else list(self.devices)
        text = f"SyncGroup(devices={devices}, timeout={self.timeout:.15g}"
        if self.group_size:
            text += f", group_size={self.group_size}"
        if self.store is not None:
            text += f", process {self.store.rank} of {self.size}"
        return text + ")"

    def _fail(self, text: str) -> None:
        """A step of a layer has failed here."""
        if self._processes is not None:
            self._processes.fail(text)

    def _configure(self, layer: Any, devices: Sequence[str], num_devices: int | None) -> None:
        """Gives a `native.Layer` its devices, and the ranks with which it shares statistics."""
        here = num_devices or len(devices)
        open, share, config_error = None, _Share(None, range(self.size)), ""
        try:
            share = self._share(layer.name, here, bool(devices))
        except ValueError as error:  # The layer can do anything but train.
            config_error = str(error)
        held = set(map(str, layer.contexts()))
        for each in layer.device_groups():
            absent = [device for device in each if device not in held]
            # None are: the arrays are those of a Module.
            if 0 < len(absent) < len(each):
                config_error = (
                    f"{layer.name} is in a SyncGroup of {', '.join(each)}, and has no parameters "
                    f"on {', '.join(absent)}: initialize the net there too, or leave these out."
                )
        ranks = share.ranks
        if len(ranks) > 1:
            open, ranks = self._processes.opener(layer, here, self.group_size, ranks)
        layer.set_devices(
            devices,
            num_devices,
            self.timeout,
            group_size=share.group_size or 0,
            ranks=ranks,
            open=open,
            config_error=config_error,
            notice="" if self._is_chosen else _notice(layer.name),
        )

    def _share(self, name: str, here: int, are_known: bool) -> _Share:
        """With whom a layer shares statistics that has `here` devices in this process. Raises
        ValueError if groups of this size cannot be formed."""
        k = self.group_size
        if k is None or here == 0:
            return _Share(None, range(self.size))
        if here % k == 0 and (k == here or are_known):
            return _Share(k if k < here else None, range(1))
        span = k // here
        if k % here == 0 and self.size % span == 0:
            first = self.store.rank // span * span
            return _Share(None, range(first, first + span))
        if k < here and not are_known:
            raise ValueError(
                f"{name} runs in a graph with parameters that the layer does not know, so groups "
                f"of {k} devices cannot be formed: name the devices, as in "
                f"SyncGroup([mx.gpu(0), ...], group_size={k})."
            )
        raise ValueError(
            f"SyncGroup was made with group_size={k}, and {name} has {here} devices in each of "
            f"{self.size} processes: choose a divisor of {here}, or a multiple of it that divides "
            f"{here * self.size}."
        )


_default: SyncGroup | None = None
# The layers, each a `SyncedLayer`, of a folder that imports this one.
_users: weakref.WeakSet[Any] = weakref.WeakSet()


def default_group() -> SyncGroup:
    """The group of all layers that have none of their own."""
    if _default:
        return _default
    group = SyncGroup()
    group._is_chosen = False
    return group


def is_first_process() -> bool:
    """Whether this process is of rank 0, as far as is known: it speaks for all of its job."""
    ranks = map(os.environ.get, ("GLUON_SYNCBN_RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"))
    store = default_group().store
    return store.rank == 0 if store is not None else next(filter(None, ranks), "0") == "0"


def _notice(name: str) -> str:
    """The notice for a layer if this process is one of several and the user has not said whether
    they share statistics; otherwise empty."""
    get = os.environ.get
    for process, variable, store in (
        ("", "DMLC_NUM_WORKER" if get("DMLC_ROLE") == "worker" else "", "KVStoreReducer(kv)"),
        (get("HOROVOD_RANK"), "HOROVOD_SIZE", "HorovodReducer(hvd)"),
        (get("OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_SIZE", "HorovodReducer(hvd)"),
    ):
        if get(variable, "1") != "1":
            return (
                f"{name} trains on the statistics of this process alone, and "
                f"{variable}={get(variable)} says that it is "
                f"{f'rank {process}' if process else 'one'} of {get(variable)} processes. For "
                "statistics over all of them write, before the first step: "
                "gluon_syncbn.set_default_group(gluon_syncbn.SyncGroup(store="
                f"gluon_syncbn.distributed.{store})). If each is to have its own: "
                "gluon_syncbn.set_default_group(gluon_syncbn.SyncGroup())."
            )
    return ""


def check_group(group: Any) -> None:
    """Raises TypeError for anything but a SyncGroup or None."""
    if group is None or isinstance(group, SyncGroup):
        return
    how = "SyncGroup, or None"
    if hasattr(group, "pushpull"):
        how = "SyncGroup(store=gluon_syncbn.distributed.KVStoreReducer(kv))"
    elif isinstance(group, (Context, list, tuple)):
        how = f"SyncGroup({group}), or None for the devices on which the parameters live"
    raise TypeError(f"group is {group!r}: give gluon_syncbn.{how}.")


def set_default_group(group: SyncGroup | None) -> None:
    """Sets the group of all layers, present and future, that have none of their own.

    Parameters
    ----------
    group : SyncGroup or None
        None: all devices of the layer's parameters, in this process alone.

    Raises
    ------
    TypeError
        For anything else.
    """
    global _default
    check_group(group)
    if group is not _default:
        # Calls in flight belong to the old group, whose other processes wait for them.
        native.finish_calls("The default group was changed.")
    _default = group
    for layer in list(_users):
        layer.configure()


def follow_default_group(layer: Any) -> None:
    """Configures the layer again whenever the default group changes."""
    _users.add(layer)


def stop_following(layer: Any) -> None:
    _users.discard(layer)


def _context(name: str) -> Context:
    kind, number = name[:-1].split("(")
    return Context(kind, int(number))
