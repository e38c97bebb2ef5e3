r"""Joins the processes of a SyncGroup: MXNet's KVStore ``dist_sync`` and Horovod.

::

    kv = mx.kv.create("dist_sync")
    sbn.set_default_group(sbn.SyncGroup(store=sbn.distributed.KVStoreReducer(kv)))
    net = ...                                          # layers meet all processes from here on
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {...}, kvstore=kv,
                               update_on_kvstore=False)

Every process sends its sums once per layer and pass, gets those of all, and adds them in the order
of ranks as a single process would: the results are the same, bit for bit.

Nobody waits for ever. A process that waits asks all others after a tenth of the timeout whether
they have come. Where one has ended or has failed, the wait ends at once with an error, and
otherwise with the timeout.
"""

import functools
import logging
import os
import threading
import time

import mxnet as mx
import numpy

from . import _ending, _native
from ._roll_call import CAME, FAILED, GONE, RollCall
from ._trainer import before_adding_up, check_trainer, trained
from .group import default_group, seconds

__all__ = ["HorovodReducer", "KVStoreReducer", "Reducer", "join"]

_log = logging.getLogger("gluon_syncbn")

# Our keys. A Trainer numbers its own from 0, and a store has either numbers or words. Beyond the
# last, key * 9973 in the 32 bits of ps-lite is negative and names a server that does not exist.
_FIRST_KEY = 10**6
_LAST_KEY = 1_076_648
# What a process says of a new key: its size, its number in the store, its name.
_NOTICE = 64
_WARN_AFTER = 0.1
# How long the KVStore may take for a parting message when all have come to their end.
_PARTING_SECONDS = 30.0
_CAUSES = (
    "Usual causes: a process has ended, hangs or is much slower; it called the net less often (an "
    "uneven number of batches: see gluon_syncbn.distributed.join), or it built another net."
)


class Reducer:
    """What the stores of this module have in common: an exact sum of float64 over all processes,
    a time limit, and a story of who is missing.

    rank, size : int
        This process's number, and how many there are.
    """

    # What carries the numbers, as a message names it.
    engine = "the store"

    def __init__(self, rank, size, timeout):
        self.rank, self.size = rank, size
        self._process = os.getpid()
        # By key, from its first meeting on, of which there is one at a time.
        self._lines = {}
        self._first_meetings = {}
        # Why no exchange can succeed any more.
        self._lost = None
        self._roll_call = None
        if size > 1:
            roll_call = RollCall(rank, size, attendance=self._connection.attendance)
            address = numpy.frombuffer(roll_call.address(), numpy.uint8).astype(numpy.float64)
            everyone = self.all_gather("hello", address, timeout=timeout)
            roll_call.set_addresses([row.astype(numpy.uint8).tobytes() for row in everyone])
            self._roll_call = roll_call
        _ending.at_exit(self._leave)

    def all_reduce(self, key, array, timeout=None):
        """The sum of `array` over all processes.

        Added in the order of ranks with an error term of its own for every sum (Ogita, Rump and
        Oishi 2005, Sum2), so that it is as good as one in twice the precision.

        Parameters
        ----------
        key : str
            Names the sum: equal in all processes, and used for arrays of one shape. A call waits
            for an earlier one of the same key on another thread. At most 40 bytes.
        array : numpy.ndarray
            float64, of one shape in all processes. Any value: infinities and NaN are summed too.
        timeout : float, optional
            Seconds. By default the environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.

        Raises
        ------
        RuntimeError
            When a process does not come: at once where it has ended or failed, and otherwise after
            `timeout`.
        """
        array = numpy.asarray(array)
        rows = self.all_gather(key, array.reshape(-1), timeout=timeout)
        total, error = numpy.zeros(array.size), numpy.zeros(array.size)
        with numpy.errstate(invalid="ignore"):
            for row in rows:
                new = total + row
                part = new - total
                rest = (total - (new - part)) + (row - part)
                error += numpy.where(numpy.isfinite(new), rest, 0)
                total = new
            return (total + error).reshape(array.shape)

    def all_gather(self, key, array, title=None, timeout=None):
        """The arrays of all processes, shape (size, n), for one of shape (n,) here: `all_reduce`
        says the rest. `title` names the sum in what is told to the user."""
        array = numpy.asarray(array)
        if array.dtype != numpy.float64 or array.ndim != 1:
            raise ValueError(
                f"all_gather got {array.dtype} of shape {array.shape}: give float64 of shape (n,)."
            )
        if self.size == 1:
            return array.reshape(1, -1).copy()
        if self._lost or os.getpid() != self._process:
            raise RuntimeError(self._lost or "This process was forked from one of the group's.")
        title, timeout = title or repr(key), seconds(timeout)
        line = self._lines.get(key) or self._meet_first(key, array.size, title, timeout)
        if line.size != array.size:
            raise ValueError(
                f"{title} gives {array.size} numbers after {line.size} before: give every sum of "
                "another size a key of its own."
            )
        return line.exchange(title, timeout, array)

    def native_line(self, key):
        """The `_native.Line` of a key that has met."""
        return self._lines[key]

    def fail(self, text):
        """Tells the other processes, when they ask, that a step has failed in this one."""
        if self._roll_call is not None:
            self._roll_call.tell(FAILED, text)

    def _meet_first(self, key, size, title, timeout):
        with self._first_meetings.setdefault(key, threading.Lock()):
            if key not in self._lines:
                wait = _Wait(self, title, f"{title} ({key} 1)", timeout)
                with mx.autograd.pause(), wait:
                    self._lines[key] = self._open(key, size, wait)
            return self._lines[key]

    def _open(self, key, size, wait):
        """The `_native.Line` of a new key, when all processes know that it is used."""
        raise NotImplementedError

    def _look(self, title, meeting, error, waited, timeout, looks):
        """See `_native.Connection`."""
        wait = _Wait(self, title, meeting, timeout, waited, warned=looks > 0)
        if error:
            wait.fail(error)
        wait.look()

    def _lose(self, text):
        self._lost = self._lost or text
        # Layers come here again, and are told.
        _native.clear_lines()

    def _leave(self, failure):
        """At the end of the process: MXNet's own end waits for all processes, without a limit, so
        it may begin only when all have come to theirs. `failure`: what the script died of."""
        if self._roll_call is None:
            return
        if failure is not None:
            self.fail(failure)
            _ending.abandon()
        elif not self._lost:
            timeout = default_group().timeout
            error = self._roll_call.wait_for_the_end(timeout) or self._say_goodbye(
                min(timeout, _PARTING_SECONDS)
            )
            if error:
                _log.error("%s", error)
                _ending.abandon()
        self._lose("The process ends.")
        self._roll_call.close()

    def _say_goodbye(self, timeout):
        """Goes through what MXNet's own end needs, now that all have come to theirs. Returns what
        went wrong, or None."""


class _Wait:
    """One process's wait for the others in one exchange."""

    def __init__(self, reducer, title, meeting, timeout, waited=0.0, warned=False):
        self._reducer = reducer
        self._roll_call = reducer._roll_call
        self._title = title
        self._meeting = meeting
        self._timeout = timeout
        self._start = time.monotonic() - waited
        self._warned = warned

    def __enter__(self):
        if self._roll_call is not None:
            self._roll_call.came(self._meeting)
        return self

    def __exit__(self, kind, error, trace):
        if self._roll_call is not None:
            self._roll_call.left(self._meeting, complete=kind is None)

    def array(self, array):
        """Waits until MXNet has written the array. Raises RuntimeError when it is no use."""
        with _native.watch(array) as watch:
            while not watch.wait(self.slice()):
                self.look()
        array.wait_to_read()

    def slice(self):
        """Seconds to wait before the next look()."""
        waited = time.monotonic() - self._start
        first = self._timeout * _WARN_AFTER
        return max(0.01, first - waited) if waited < first else min(1.0, first)

    def look(self):
        """Finds out whether it is of any use to go on. Raises RuntimeError where it is not."""
        waited = time.monotonic() - self._start
        rank = self._reducer.rank
        story = f"{self._title}: rank {rank} has waited {waited:.3g} s for other processes. "
        if self._roll_call is None:
            if waited > self._timeout:
                self._give_up(story + _CAUSES)
            return
        answers = self._roll_call.ask(self._meeting, patience=min(2.0, self._timeout / 4))
        story += self._roll_call.describe(answers, str)
        if all(answer.state == CAME for answer in answers.values()):
            story += f" As all have come, {self._reducer.engine} does not answer."
        lost = [
            rank
            for rank, answer in answers.items()
            if answer.state == GONE or answer.notice and answer.state != CAME
        ]
        if lost or waited > self._timeout:
            self._give_up(f"{story} {_CAUSES}")
        if not self._warned:
            self._warned = True
            _log.warning("%s After %.3g s this is an error. %s", story, self._timeout, _CAUSES)

    def fail(self, error):
        """The store says itself that it cannot go on."""
        self._give_up(f"{self._title}: rank {self._reducer.rank} lost the other processes: {error}")

    def _give_up(self, text):
        # The store still waits, and whoever waits for the store at the end of the process would do
        # so for ever.
        self._reducer._lose(text)
        _ending.abandon()
        raise RuntimeError(text)


class KVStoreReducer(Reducer):
    """Joins processes by MXNet's parameter server.

    Every process puts its numbers into a slot of its own, in which all others have zeros, so that
    the server's float32 sum is exact; a float64 travels as three whole numbers of 22 bits. A new
    key needs one more round, in which the processes agree on its number in the store.

    Parameters
    ----------
    kvstore : mxnet.kvstore.KVStore
        ``mx.kv.create("dist_sync")`` or ``"dist_device_sync"``: the one that the Trainer gets as
        ``kvstore=kv, update_on_kvstore=False``, as a second one in a process hangs. Keys from
        10**6 on are ours.
    timeout : float
        Seconds for which this call waits for the other processes, all of which make it. By default
        the environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.

    Raises
    ------
    ValueError
        For a store of another type: one that does not join processes, or does not wait for all.
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
        # What a Trainer calls that wants its updates made by the server.
        kvstore.set_optimizer = _refuse_updates
        self._kv = kvstore
        self._connection = _native.Connection(self._look)
        # The store notes each new key in a table that calls on several threads would spoil.
        for name in _SERIALIZED:
            call = getattr(kvstore, name)
            setattr(kvstore, name, _one_at_a_time(call, self._connection, name in _TOGETHER))
        self._notices = {}
        self._noticed = threading.Condition()
        self._round = threading.Lock()
        self._next_key = _FIRST_KEY + 1
        rank, size = kvstore.rank, kvstore.num_workers
        if size > 1:
            self._notice = _Slots(rank, (size, _NOTICE))
            _native.call_within(
                timeout,
                lambda: kvstore.init(_FIRST_KEY, mx.nd.zeros((size, _NOTICE))),
                f"KVStoreReducer, rank {rank}, has waited {timeout:g} s for the other processes to "
                "make theirs. Make it in every process, before anything that only some of them do.",
            )
        super().__init__(rank, size, timeout)

    def _say_goodbye(self, timeout):
        try:
            self.all_gather("goodbye", numpy.zeros(1), "The end of the script", timeout)
            _native.call_within(
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
        for name in (*_SERIALIZED, "set_optimizer"):
            delattr(self._kv, name)
        self._kv = None

    def _open(self, key, size, wait):
        slots = mx.nd.zeros((self.size, _native.PARTS, size))
        number = self._agree(key, size, slots, wait)
        return self._connection.kvstore_line(key, size, self.rank, self._kv, number, slots)

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


def _one_at_a_time(function, connection, together=False):
    @functools.wraps(function)
    def call(*args, **kwargs):
        if together:
            # Another process may get there only after exchanges that are under way here, and their
            # threads need the lock.
            mx.nd.waitall()
        with connection:
            result = function(*args, **kwargs)
        if together:
            # The Trainer pushes gradients to the same keys next. Who had not fetched the parameters
            # by then would get the gradients' sum in their place.
            mx.nd.waitall()
        return result

    return call


class _Slots:
    """A float32 NDArray with a place for each process, and NumPy's view of its memory."""

    def __init__(self, rank, shape):
        self._rank = rank
        self.array = mx.nd.zeros(shape)
        self.everyone = _native.view(self.array)

    def clear(self):
        """This process's slot, to be filled, where all others hold zeros."""
        self.everyone[:] = 0
        return self.everyone[self._rank]


class HorovodReducer(Reducer):
    """Joins processes by Horovod.

    Parameters
    ----------
    hvd : module
        ``horovod.mxnet``, after ``hvd.init()``.
    timeout : float
        Seconds for which this call waits for the other processes, all of which make it. By default
        the environment variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.

    Raises
    ------
    ValueError
        For anything else, and before ``hvd.init()``.
    RuntimeError
        Where the other processes do not come.
    """

    engine = "Horovod"

    def __init__(self, hvd, timeout=None):
        timeout = seconds(timeout)
        if not all(hasattr(hvd, name) for name in ("allgather", "rank", "size")):
            raise ValueError(
                f"HorovodReducer got {hvd!r}: import horovod.mxnet as hvd, call hvd.init() and "
                "give hvd."
            )
        try:
            rank, size = hvd.rank(), hvd.size()
        except ValueError as error:
            raise ValueError("HorovodReducer needs hvd.init() to be called before.") from error
        self._hvd = hvd
        self._connection = _native.Connection(self._look)
        super().__init__(rank, size, timeout)

    def _open(self, key, size, wait):
        # What ``hvd.allgather`` calls, which then waits for the result without a limit.
        allgather = self._hvd.mpi_ops.MPI_MXNET_LIB_CTYPES.horovod_mxnet_allgather_async
        return self._connection.horovod_line(key, size, self.size, allgather)


class join:
    """Goes through the batches of this process until no process has any left.

    ::

        for batch in (steps := sbn.distributed.join(loader, trainer)):
            with autograd.record():
                ...
            trainer.step(steps.batch_size)

    A process that runs out of batches goes on with its last one, so that it still meets the others
    in every layer and in the Trainer. It brings nothing: its sums count for no samples, and its
    gradients are set to zero before the Trainer adds them. So the others have the statistics and
    the gradients of the samples that there are, and all processes keep the same parameters.
    (``torch.distributed.algorithms.Join`` does the same for PyTorch.) It costs one small message
    per step.

    Parameters
    ----------
    batches : iterable
    trainer : mxnet.gluon.Trainer, optional
        Whose gradients are set to zero; with ``grad_req="add"``, to what they were before the step.
        Without one, that is left to the loop: see `absent`.
    group : SyncGroup, optional
        By default that of the layers: see :func:`gluon_syncbn.set_default_group`.
    early_stop : bool
        End for all processes as soon as one has no batch left.

    Attributes
    ----------
    absent : bool
        Whether this process has run out of batches, and the present one is one that it had before.
    batch_size : int
        The number of samples of all processes in this step: what ``trainer.step`` wants. A batch's
        samples are counted along the first axis of the first array in it. (Horovod's
        DistributedTrainer divides by the number of processes too: give it ``steps.batch_size /
        hvd.size()``.)
    processes : int
        How many processes bring a batch to this step.

    Raises
    ------
    ValueError
        Where a process has no batch at all.
    TypeError
        For anything but a Trainer as `trainer`.
    RuntimeError
        Where a process does not come to the step.
    """

    def __init__(self, batches, trainer=None, group=None, early_stop=False):
        check_trainer(trainer, "join")
        self._batches = batches
        self._trainer = trainer
        self._end_hook = None
        # What gradients that are added to held before a step in which this process is absent.
        self._kept = []
        self._exchange = (group or default_group())._exchange
        self._early_stop = early_stop
        self.absent = False
        self.batch_size = self.processes = 0

    def __iter__(self):
        remaining = iter(self._batches)
        nothing = object()
        last = nothing
        try:
            while True:
                batch = nothing if self.absent else next(remaining, nothing)
                if not self._agree(batch is not nothing, batch):
                    return
                if batch is nothing:
                    if last is nothing:
                        raise ValueError(
                            "join: this process has no batch at all, and so none to go on with. "
                            "Give each process at least one."
                        )
                    self._become_absent()
                    batch = last
                    self._keep_sums()
                yield batch
                self._restore_sums()
                last = batch
        finally:
            self._come_back()

    def _agree(self, have, batch):
        """Whether there is a next step."""
        mine = numpy.array([have, _samples(batch) if have else 0], dtype=numpy.float64)
        everyone = mine.reshape(1, -1)
        if self._exchange is not None:
            everyone = self._exchange.all_gather("join", "gluon_syncbn.distributed.join", mine)
        self.processes, self.batch_size = (int(n) for n in everyone.sum(axis=0))
        return self.processes == len(everyone) if self._early_stop else self.processes > 0

    def _become_absent(self):
        if self.absent:
            return
        # Calls of the last step may still be on their way to their meetings.
        mx.nd.waitall()
        self.absent = True
        _native.set_absent(True)
        if self._trainer is not None:
            self._end_hook = before_adding_up(self._trainer, self._bring_nothing)

    def _bring_nothing(self):
        for parameter in trained(self._trainer):
            if parameter.grad_req != "add":
                parameter.zero_grad()
        self._restore_sums()

    def _keep_sums(self):
        if self._trainer is not None:
            self._kept = [
                (gradient, gradient.copy())
                for parameter in trained(self._trainer)
                if parameter.grad_req == "add"
                for gradient in parameter.list_grad()
            ]

    def _restore_sums(self):
        for gradient, before in self._kept:
            before.copyto(gradient)
        self._kept = []

    def _come_back(self):
        if not self.absent:
            return
        mx.nd.waitall()
        self.absent = False
        _native.set_absent(False)
        if self._end_hook is not None:
            self._end_hook()


def _samples(batch):
    while isinstance(batch, (list, tuple)) and batch:
        batch = batch[0]
    return len(batch) if hasattr(batch, "__len__") else 1
