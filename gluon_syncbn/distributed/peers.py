"""The other processes of a store: whether it is of use to wait for them, and the common end."""

import contextlib
import faulthandler
import logging
import os
import weakref

from mxnet_launch.runner import SHUTDOWN_SECONDS

from .. import native
from ..arguments import WARN_AFTER, duration
from ..groups.store import SAME_LAYERS
from ..native import shutdown
from .answers import ARRIVED, FAILED, GONE, built_another_net, describe_others
from .liveness import Liveness
from .watch import NEEDS_TIME, Watch

_log = logging.getLogger("gluon_syncbn")

# How long the shutdown handshake may take once all processes have reached their end.
_SHUTDOWN_SECONDS = 30.0
# How long a process that ends because of an error takes to tell the others.
_TELL_SECONDS = 0.5
_CAUSES = (
    "Usual causes: a process has ended, hangs or is much slower; it called the net less often (an "
    "uneven number of batches: see gluon_syncbn.distributed.join), it built another net, or "
    "hybridized it at another step, which matters where a net calls one layer several times. "
    + NEEDS_TIME
)


class Peers:
    """Judges the waits of a store, and tells the other processes how this one fares.

    name: of the store, in messages. in_flight(): its exchanges, see `Liveness`. close(text): no
    exchange of it can succeed any more.
    """

    # Why no exchange can succeed any more.
    lost = None

    def __init__(self, rank, size, name, timeout, in_flight, close):
        self.rank, self.size, self.name = rank, size, name
        self._close_store = close
        # All timeouts asked for. The end of the process takes the longest.
        self._timeouts = {timeout}
        # How many of Python's waits for MXNet had failed before `lost`.
        self._failed_before = 0
        self._liveness, self._knows_others = None, False
        if size > 1:
            self._liveness = Liveness(rank, size, in_flight=in_flight, watch=Watch(self))
        _all.add(self)

    @property
    def address(self):
        """What the others need to know of this process: see `Liveness`."""
        return self._liveness.address

    def set_addresses(self, addresses):
        self._liveness.set_addresses(addresses)
        self._knows_others = True

    def close(self):
        if self._liveness is not None:
            self._liveness.close()

    def note_timeout(self, timeout):
        self._timeouts.add(timeout)

    @property
    def longest_timeout(self):
        return max(self._timeouts)

    @property
    def has_raised(self):
        """Whether an error has been raised by one of Python's waits for MXNet since `lost`."""
        return native.waits.failed > self._failed_before

    def exchanges_in_flight(self):
        return not self._knows_others or bool(self._liveness.exchanges()[0])

    @contextlib.contextmanager
    def arrives(self, exchange):
        """Shows probes that this process is at an exchange, whose route is being opened."""
        if not self._knows_others:
            yield exchange
            return
        self._liveness.arrive(exchange)
        complete = False
        try:
            yield exchange
            complete = True
        finally:
            self._liveness.leave(exchange, complete)

    def probe_all(self, patience):
        """What the other processes do, as {rank: Answer}."""
        return self._liveness.probe("", patience)

    def fail(self, text):
        """Reports to the other processes, when they probe, that a step has failed in this one."""
        if self._knows_others:
            self._liveness.set_status(FAILED, text)

    def tell_failure(self, text):
        """`fail` for a process that ends: the others know it even once this one is gone."""
        self.fail(text)
        self.probe_all(_TELL_SECONDS)

    def judge(self, title, exchange, error, waited, timeout, probes, members, in_memory):
        """Raises RuntimeError if waiting is of no use: see `native.Connection`. members: the ranks
        that take part in the exchange. in_memory: whether they meet in shared memory."""
        message = f"{title}: rank {self.rank} "
        if error:
            others = describe_others(self.probe_all(1.0)) if self._knows_others else ""
            self._give_up(f"{message}lost the other processes: {error} {others}")
        message += f"has waited {duration(waited)} for other processes. "
        lost = waited > timeout
        if self._knows_others:
            patience = min(2.0, timeout / 4, max(timeout - waited, 0.1))
            answers = self._liveness.probe(exchange, patience, members)
            message += f"{self._liveness.describe(answers)} "
            if all(answer.state == ARRIVED for answer in answers.values()):
                # They may have arrived just now, as after a suspension of all.
                lost = waited > timeout * (1 + WARN_AFTER)
                if not in_memory:
                    message += f"All have arrived, so {self.name} does not answer. "
            elif built_another_net(
                exchange, answers.values(), self._reached(), timeout * WARN_AFTER / 2
            ):
                self._give_up(f"{message}The processes have not built the same net. {SAME_LAYERS}")
            lost = lost or any(map(self._cannot_arrive, answers.values()))
        if lost:
            self._give_up(f"{message}{_CAUSES}")
        if probes == 0:
            native.warn(f"{message}After {duration(timeout)} this is an error. {_CAUSES}")

    def _reached(self):
        return [name for exchanges in self._liveness.exchanges() for name, _ in exchanges]

    def _cannot_arrive(self, answer):
        if answer.state in (ARRIVED, GONE) or not answer.status:
            return answer.state == GONE
        # All meet once more after their scripts, and some learn later than others that all have
        # finished.
        return answer.status[0] == FAILED or not self._liveness.has_finished

    def _give_up(self, text):
        # The store still waits, so a process that waited for it at exit would never end.
        self.lose(text)
        shutdown.abandon()
        raise RuntimeError(text)

    def lose(self, text):
        """No exchange can succeed any more. The first text stays."""
        if not self.lost:
            self._failed_before = native.waits.failed
            self.lost = text
        self._close_store(self.lost)

    def leave(self, failure, handshake):
        """Runs at exit. MXNet's own shutdown waits for all processes, even for those that are gone
        or stopped, so it may begin only once all have reached their end. failure: what the script
        died of. handshake(timeout): what the store needs before that, raises RuntimeError."""
        if self._liveness is None:
            return
        if failure is not None:
            self.tell_failure(failure)
            shutdown.abandon()
        elif self.lost:
            self.tell_failure(self.lost)
            # The script may have ended without waiting for its last step.
            _log.error("%s", self.lost)
        else:
            timeout = self.longest_timeout
            try:
                self._liveness.wait_for_the_end(timeout)
                handshake(min(timeout, _SHUTDOWN_SECONDS))
            except RuntimeError as error:
                _log.error("%s", error)
                shutdown.abandon()
        self.lose("The process ends.")
        self.close()
        # MXNet's own shutdown waits for the other processes too, when no Python thread runs any
        # more. (This limit needs a file for standard error.)
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
            limit = max(self.longest_timeout, SHUTDOWN_SECONDS)
            faulthandler.dump_traceback_later(limit, exit=True)


_all = weakref.WeakSet()


def _lose_in_child():
    for peers in list(_all):
        peers.lose("This process was forked from one of the group's.")


os.register_at_fork(after_in_child=_lose_in_child)
