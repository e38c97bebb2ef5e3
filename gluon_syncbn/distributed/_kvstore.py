"""Processes connected through MXNet's parameter server."""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable, NoReturn

import mxnet as mx
import numpy
from mxnet_launch.runner import free_stores, prepare_shutdown

from .. import durations, native
from ..arguments import seconds
from ..native import waits
from ..supervision import limits
from ..supervision.limits import call_within
from ..trainers import OF_KEYS
from ._reducer import Reducer

# Our keys. Trainers number theirs from 0, and a store's keys are all numbers or all strings.
# Beyond the last, ps-lite's 32-bit key * 9973 is negative and names a server that does not exist.
_FIRST_KEY = 10**6
_LAST_KEY = 1_076_648
# The length of what a process registers of a new key: its number in the store, size and name.
_REGISTRATION = 64


class KVStoreReducer(Reducer):
    """Connects processes through MXNet's parameter server.

    Processes of one machine meet in shared memory. Between machines, the server adds float32, so
    each sum of a layer travels as 11 whole numbers of 16 bits, which float32 adds exactly. If they
    do not fit, as in a layer's first exchange, every process puts its numbers into its own slot,
    where all others have zeros; a float64 then travels as three whole numbers of 22 bits. A new key
    needs one or two more rounds, in which the processes agree on its number in the store.

    While the reducer is in use, the store's own functions run one at a time. Some of them raise,
    and so does creating a second distributed store in the process.

    Parameters
    ----------
    kvstore : mxnet.kvstore.KVStore
        ``mx.kv.create("dist_sync")`` or ``"dist_device_sync"``: the one that the Trainer gets as
        ``kvstore=kv, update_on_kvstore=False``. Several Trainers may share it, each with an
        optimizer of its own; make them, and their first steps, in the same order in all processes.
        Keys from 10**6 on are ours.
    timeout : float
        Seconds that this call waits for the other processes, all of which must make it. By default
        the environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.

    Raises
    ------
    ValueError
        For a store of another type: one that does not connect processes, or does not wait for all.
        Later from ``mx.kv.create`` for a second store in the process, such as a Trainer's own, for
        which MXNet would wait indefinitely.
    RuntimeError
        If the other processes do not arrive.
    """

    name = "the KVStore's server"
    trainer = "gluon.Trainer(net.collect_params(), ..., kvstore=kv, update_on_kvstore=False)"

    def __init__(self, kvstore: mx.kv.KVStore, timeout: float | None = None) -> None:
        timeout = seconds(timeout)
        kind = getattr(kvstore, "type", None)
        if not (str(kind).startswith("dist") and "async" not in kind):
            raise ValueError(
                f"KVStoreReducer got {kvstore!r} of type {kind!r}: give mx.kv.create('dist_sync'), "
                "and start the processes with python -m gluon_syncbn.launch. (MXNet "
                "silently treats an unknown name as a local store.)"
            )
        if "pushpull" in vars(kvstore):
            raise ValueError(
                "This KVStore has a KVStoreReducer already: use that one for all groups."
            )
        rank, size = kvstore.rank, kvstore.num_workers
        super().__init__(rank, size, timeout)
        self._kv = kvstore
        replaced = _replace_functions(kvstore, self)
        # {key: {rank: (its size, its number in the store)}}
        self._registered: dict[str, dict[int, tuple[int, int]]] = {}
        self._changed = threading.Condition()
        self._round = threading.Lock()
        self._next_number = _FIRST_KEY + 1
        try:
            if size > 1:
                self._registration = mx.nd.zeros((size, _REGISTRATION))
                call_within(
                    timeout,
                    lambda: kvstore.init(_FIRST_KEY, self._registration),
                    f"KVStoreReducer, rank {rank}, has waited {{}} for the other "
                    "processes to make theirs. Make it in every process, before anything that only "
                    "some of them do.",
                )
            self._meet(timeout)
        except BaseException:
            for name in replaced:
                delattr(kvstore, name)
            limits.stores.discard(kvstore)
            self.watcher.close()
            raise

    def _shut_down(self, timeout: float) -> None:
        for role, wait in (("scheduler", self._kv._barrier), ("server", free_stores)):
            call_within(
                timeout,
                wait,
                f"The KVStore's {role} has not answered for {{}} at the end of the "
                "script: its process is gone, or stopped.",
            )

    def _leave(self, failure: str | None) -> None:
        super()._leave(failure)
        prepare_shutdown()

    def _open_through_store(
        self, key: str, size: int, processes: int, check: Callable[[], None], sums: bool
    ) -> native.Route:
        # MXNet has no empty arrays.
        slots = mx.nd.zeros((self.size, native.THIRDS, max(size, 1)))
        number = self._register(key, size, slots, check)
        count = native.packed_size(size, self.size, native.KVSTORE_BITS) if sums else 0
        added = None
        if count:
            array = mx.nd.zeros((count,))
            added = self._register(f"{key} sums", count, array, check), array
        return self._connection.kvstore_route(key, size, self.rank, self._kv, number, slots, added)

    def _register(
        self, key: str, size: int, array: mx.nd.NDArray, check: Callable[[], None]
    ) -> int:
        """Stores this array under a new key. Returns the key's number in the store.

        The server takes the first push of a key as its initial value, so only rank 0 may push a key
        that the server does not know. Every process registers each key, in rounds over one key that
        all know; rank 0 does so once the server has the new one. The keys of one round may differ,
        as each process registers its keys in the order in which its layers need them.
        """
        name = key.encode()
        with self._round:
            number = self._push_new(array, check) if self.rank == 0 else _FIRST_KEY
            mine = numpy.zeros(_REGISTRATION, numpy.float32)
            mine[:3] = number - _FIRST_KEY, size & 0xFFFF, size >> 16
            mine[3 : 3 + len(name)] = list(name)
            # Not written by an operator of MXNet: see _push_new.
            everyone = native.view(self._registration)
            everyone[:] = 0
            everyone[self.rank] = mine
            self._kv.pushpull(_FIRST_KEY, self._registration, out=self._registration)
            native.wait_for(self._registration, check)
            if not (everyone[self.rank] == mine).all():
                raise RuntimeError(f"The KVStore changes what is sent to it. {_UPDATES}")
            rows = everyone.astype(numpy.int64)
        with self._changed:
            for rank, row in enumerate(rows):
                text = bytes(row[3:].astype(numpy.uint8)).rstrip(b"\0").decode()
                self._registered.setdefault(text, {})[rank] = (row[1] + (row[2] << 16), row[0])
            self._changed.notify_all()
            registered = self._registered[key]
            while not self._changed.wait_for(lambda: len(registered) == self.size, durations.SLICE):
                check()
        sizes = [registered[rank][0] for rank in range(self.size)]
        if len(set(sizes)) > 1:
            raise RuntimeError(
                f"The processes bring different amounts of numbers to {key}, by rank: "
                f"{' '.join(map(str, sizes))}. Bring arrays of one size, and make the same layers "
                "in the same order, in every process."
            )
        return _FIRST_KEY + int(registered[0][1])

    def _push_new(self, array: mx.nd.NDArray, check: Callable[[], None]) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        if number > _LAST_KEY:
            raise RuntimeError(
                f"All {_LAST_KEY - _FIRST_KEY} keys of the KVStore are in use: do not make new "
                "layers in every step."
            )
        self._kv.push(number, array)
        # This write waits until the server has answered. Its operator takes none of MXNet's
        # workspaces, as steps that wait for this exchange may hold all of them.
        array[:] = 0
        native.wait_for(array, check)
        return number


_UPDATES = (
    "The Trainer has the server run the optimizer, which would run on the sums of SyncBatchNorm "
    "too: make the Trainer with update_on_kvstore=False. (A Module in several processes needs "
    "Horovod: see docs/module.md.)"
)


_COMPRESSION = (
    "Gradient compression would round the sums of SyncBatchNorm too, and MXNet has none with "
    "update_on_kvstore=False: make the Trainer without compression_params."
)


def _last_handle(arrays: Any) -> Any:
    while isinstance(arrays, (list, tuple)) and arrays:
        arrays = arrays[-1]
    return getattr(arrays, "handle", None)


def _refusing(text: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(text)

    return refuse


def _replace_functions(kvstore: mx.kv.KVStore, reducer: KVStoreReducer) -> list[str]:
    """Replaces functions of a store that has a KVStoreReducer, and returns their names:

    - ``push``, ``pull`` and ``pushpull`` run one at a time: the store notes each new key in a table
      without a lock;
    - ``init`` and ``broadcast``, for which all processes wait, also leave nothing under way;
    - ``set_optimizer`` and ``set_gradient_compression`` raise: a Trainer calls them to have the
      server make updates, or to compress what it sends.

    From now on `limits.creating` refuses a second distributed store.
    """
    replaced = {name: _locked(name, getattr(kvstore, name), reducer) for name in OF_KEYS}
    replaced.update((name, _initializing(replaced[name])) for name in _INITIALIZE)
    if hasattr(kvstore, "_barrier"):
        replaced["_barrier"] = waits.noting(kvstore._barrier, for_others=True)
    replaced["set_optimizer"] = _refusing(_UPDATES)
    replaced["set_gradient_compression"] = _refusing(_COMPRESSION)
    vars(kvstore).update(replaced)
    limits.stores.add(kvstore)
    return list(replaced)


def _locked(name: str, function: Callable[..., Any], reducer: KVStoreReducer) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if reducer.member.lost:
            waits.note_failure()
            raise RuntimeError(reducer.member.lost)
        given = dict(zip(_FETCH.get(name, ()), args), **kwargs)
        sent, fetched = map(_last_handle, (given.get("value"), given.get("out")))
        # pushpull may fetch what it has sent.
        arrays = (sent, fetched or sent) if name in _FETCH else (None, None)
        with waits.noted(for_others=True), reducer._connection:
            return native.push_for_others(lambda: function(*args, **kwargs), *arrays)

    return call


def _initializing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Another process may get there only after exchanges that are under way here, whose threads
        # need the lock.
        mx.nd.waitall()
        _restore_layouts(dict(zip(("key", "value"), args), **kwargs).get("value", ()))
        result = function(*args, **kwargs)
        # The Trainer pushes gradients to the same keys next. A process that has not fetched the
        # parameters by then would get the sum of the gradients instead.
        mx.nd.waitall()
        return result

    return call


_INITIALIZE = ("init", "broadcast")
# Those that fetch arrays, and their arguments.
_FETCH = {
    "pull": ("key", "out"),
    "pushpull": ("key", "value", "out"),
    "broadcast": ("key", "value", "out"),
}


def _restore_layouts(arrays: mx.nd.NDArray | list[mx.nd.NDArray]) -> None:
    """Gives arrays their usual layout in memory. A forward in inference may have given weights one
    of oneDNN's, of which MXNet sends a copy, and does not wait until the server has it: then the
    other processes ask for a key too early, and the server aborts ("init 0 first")."""
    for array in arrays if isinstance(arrays, (list, tuple)) else [arrays]:
        if array.context.device_type != "gpu" and array.stype == "default":
            native.restore_layout(array)
