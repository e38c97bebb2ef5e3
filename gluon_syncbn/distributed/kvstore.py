"""Processes joined by MXNet's parameter server."""

import functools
import threading
import weakref

import mxnet as mx
import numpy

from .. import native
from .arguments import seconds
from .reducer import Reducer

# Our keys. A Trainer numbers its own from 0, and a store has either numbers or words. Beyond the
# last, key * 9973 in the 32 bits of ps-lite is negative and names a server that does not exist.
_FIRST_KEY = 10**6
_LAST_KEY = 1_076_648
# What a process says of a new key: its size, its number in the store, its name.
_NOTICE = 64


class KVStoreReducer(Reducer):
    """Joins processes by MXNet's parameter server.

    Every process puts its numbers into a slot of its own, in which all others have zeros, so that
    the server's float32 sum is exact; a float64 travels as three whole numbers of 22 bits. A new
    key needs one more round, in which the processes agree on its number in the store.

    Parameters
    ----------
    kvstore : mxnet.kvstore.KVStore
        ``mx.kv.create("dist_sync")`` or ``"dist_device_sync"``: the one that the Trainer gets as
        ``kvstore=kv, update_on_kvstore=False``. Keys from 10**6 on are ours.
    timeout : float
        Seconds for which this call waits for the other processes, all of which make it. By default
        the environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.

    Raises
    ------
    ValueError
        For a store of another type: one that does not join processes, or does not wait for all.
        Later, for what MXNet would wait for ever for: by the store's own functions for a second
        Trainer on it, as each numbers its keys from 0 and none may come again, and by
        ``mx.kv.create`` for a second store in the process, such as a Trainer's own.
    RuntimeError
        Where the other processes do not come.
    """

    engine = "the KVStore's server"

    def __init__(self, kvstore, timeout=None):
        timeout = seconds(timeout)
        kind = getattr(kvstore, "type", None)
        if not (str(kind).startswith("dist") and "async" not in kind):
            raise ValueError(
                f"KVStoreReducer got {kvstore!r} of type {kind!r}: give mx.kv.create('dist_sync'), "
                "and start the processes with python -m gluon_syncbn.launch. (MXNet takes a name "
                "that it does not know for a local store, without a word.)"
            )
        if "pushpull" in vars(kvstore):
            raise ValueError(
                "This KVStore has a KVStoreReducer already: use that one for all groups."
            )
        for name, refuse in _REFUSED.items():
            setattr(kvstore, name, refuse)
        _refuse_another(kvstore)
        self._kv = kvstore
        self._connection = native.Connection(self._look)
        # What was initialized since: for a key that comes again MXNet waits for ever.
        self._keys = set()
        # The store notes each new key in a table that calls on several threads would spoil.
        for name in _SERIALIZED:
            call = getattr(kvstore, name)
            keys = self._keys if name in _TOGETHER else None
            setattr(kvstore, name, _one_at_a_time(call, self._connection, keys))
        self._notices = {}
        self._noticed = threading.Condition()
        self._round = threading.Lock()
        self._next_key = _FIRST_KEY + 1
        rank, size = kvstore.rank, kvstore.num_workers
        if size > 1:
            self._notice = _Slots(rank, (size, _NOTICE))
            native.call_within(
                timeout,
                lambda: kvstore.init(_FIRST_KEY, mx.nd.zeros((size, _NOTICE))),
                f"KVStoreReducer, rank {rank}, has waited {timeout:g} s for the other processes to "
                "make theirs. Make it in every process, before anything that only some of them do.",
            )
        super().__init__(rank, size, timeout)

    def _say_goodbye(self, timeout):
        try:
            self.all_gather("goodbye", numpy.zeros(1), "The end of the script", timeout)
            native.call_within(
                timeout,
                self._kv._barrier,
                f"The KVStore's scheduler has not answered for {timeout:g} s at the end of the "
                "script: its process is gone, or stopped.",
            )
        except RuntimeError as error:
            return str(error)

    def _leave(self, failure):
        super()._leave(failure)
        # The script's last reference to the store is to be its last: MXNet aborts a process that
        # still has one when Python has come to its end.
        for name in (*_SERIALIZED, *_REFUSED):
            delattr(self._kv, name)
        self._kv = None

    def _open(self, key, size, wait):
        slots = mx.nd.zeros((self.size, native.LIMBS, size))
        number = self._agree(key, size, slots, wait)
        return self._connection.kvstore_channel(key, size, self.rank, self._kv, number, slots)

    def _agree(self, key, size, slots, wait):
        """The number of a new key in the store, where it has these slots.

        A key that the server does not know yet must not be pushed by anybody but rank 0: the server
        takes the first push for the value to begin with. So every process gives notice of each key,
        in rounds over one key that all know. Rank 0 does it when the server has the new one. The
        keys of one round may differ: each process gives its notices in the order in which its
        layers come to their meetings.
        """
        name = key.encode()
        if len(name) > _NOTICE - 3:
            raise ValueError(f"The key {key!r} is too long: use at most {_NOTICE - 3} bytes.")
        with self._round:
            number = 0
            if self.rank == 0:
                number, self._next_key = self._next_key, self._next_key + 1
                if number > _LAST_KEY:
                    raise RuntimeError(
                        f"All {_LAST_KEY - _FIRST_KEY} keys of the KVStore are in use: do not make "
                        "new layers in every step."
                    )
                self._kv.push(number, slots)
                # To be written, the array waits until the server has answered. By an operator that
                # takes none of MXNet's workspaces, as the net may have given all of them to steps
                # that wait for this exchange.
                slots[:] = 0
                wait.array(slots)
            mine = self._notice.clear()
            mine[:3] = number - _FIRST_KEY, size & 0xFFFF, size >> 16
            mine[3 : 3 + len(name)] = list(name)
            sent = mine.copy()
            self._kv.pushpull(_FIRST_KEY, self._notice.array, out=self._notice.array)
            wait.array(self._notice.array)
            everyone = self._notice.everyone
            if not (everyone[self.rank] == sent).all():
                raise RuntimeError(f"The KVStore changes what is sent to it. {_UPDATES}")
            notices = everyone.astype(numpy.int64)
        with self._noticed:
            for rank, row in enumerate(notices):
                text = bytes(row[3:].astype(numpy.uint8)).rstrip(b"\0").decode()
                self._notices.setdefault(text, {})[rank] = (row[1] + (row[2] << 16), row[0])
            self._noticed.notify_all()
            notices = self._notices[key]
            while len(notices) < self.size:
                if not self._noticed.wait(wait.slice()):
                    wait.look()
            sizes = [notices[rank][0] for rank in range(self.size)]
            if len(set(sizes)) > 1:
                raise RuntimeError(
                    f"The processes bring different amounts of numbers to {key!r}: {sizes}, by "
                    "rank. Make the same layers in the same order in every process."
                )
            return _FIRST_KEY + int(notices[0][1])


# The last two, which a Trainer calls at its first step, wait for all processes to call them.
_TOGETHER = ("init", "broadcast")
_SERIALIZED = ("push", "pull", "pushpull", *_TOGETHER)
_UPDATES = (
    "The Trainer has the server run the optimizer, which would run on the sums of SyncBatchNorm "
    "too: make the Trainer with update_on_kvstore=False."
)


def _refuse_updates(optimizer):
    raise ValueError(_UPDATES)


def _refuse_compression(compression_params):
    raise ValueError(
        "Gradient compression would round the sums of SyncBatchNorm too, and MXNet has none with "
        "update_on_kvstore=False: make the Trainer without compression_params."
    )


def _refuse_another(kvstore):
    """While `kvstore` lives, has mx.kv.create refuse what it would never return from."""
    create, store = mx.kv.create, weakref.ref(kvstore)

    @functools.wraps(create)
    def create_or_refuse(name="local"):
        distributed = isinstance(name, str) and "dist" in name.lower()
        # Others may have registered stores of their own.
        if store() and distributed and name.lower() not in mx.kv.KVStoreBase.kv_registry:
            raise ValueError(
                "There is a distributed KVStore in this process, with a KVStoreReducer, and MXNet "
                f"would wait for ever for another one, {name!r}: give the Trainer the store "
                "itself, as kvstore=kv, update_on_kvstore=False."
            )
        return create(name)

    mx.kv.create = create_or_refuse


# What a Trainer calls that wants its updates made by the server, or what it sends compressed.
_REFUSED = {
    "set_optimizer": _refuse_updates,
    "set_gradient_compression": _refuse_compression,
}


def _one_at_a_time(function, connection, keys=None):
    """`keys`: those that were initialized, of a function that does it."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if keys is not None:
            _note_new(keys, args[0] if args else kwargs.get("key", ()))
            # Another process may get there only after exchanges that are under way here, and their
            # threads need the lock.
            mx.nd.waitall()
        with connection:
            result = function(*args, **kwargs)
        if keys is not None:
            # The Trainer pushes gradients to the same keys next. Who had not fetched the parameters
            # by then would get the gradients' sum in their place.
            mx.nd.waitall()
        return result

    return call


def _note_new(known, keys):
    keys = keys if isinstance(keys, (list, tuple)) else [keys]
    again = sorted(known.intersection(keys), key=str)
    if again:
        raise ValueError(
            f"The KVStore has been given the key {again[0]!r} before, which MXNet would wait for "
            "ever for. Each Trainer numbers its keys from 0: make one Trainer for all parameters, "
            "and go on with it, or start the processes anew for the next one."
        )
    known.update(keys)


class _Slots:
    """A float32 NDArray with a place for each process, and NumPy's view of its memory."""

    def __init__(self, rank, shape):
        self._rank = rank
        self.array = mx.nd.zeros(shape)
        self.everyone = native.view(self.array)

    def clear(self):
        """This process's slot, to be filled, where all others hold zeros."""
        self.everyone[:] = 0
        return self.everyone[self._rank]
