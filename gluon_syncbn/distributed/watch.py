"""Ends a process that hangs in a call without a time limit: of MXNet's engine, the Trainer, the
store or Horovod."""

import logging
import os
import sys
import threading
import time

from .. import native
from ..arguments import WARN_AFTER, duration
from ..native import shutdown, threads
from .answers import FAILED, GONE, describe_others
from .waiting import bounded

# How often to look at the threads, and seconds between: Horovod's own thread runs now and then.
_LOOKS, _BETWEEN_LOOKS = 10, 0.002
# Seconds: past the timeout, so that calls with a limit of their own end first; for an error to end
# the script's current call; for the last message.
_LATER, _RAISES, _LAST_WORDS = 0.5, 0.5, 2.0
NEEDS_TIME = (
    "If a process only needs time, as to validate or to save, give SyncGroup(timeout=...) more."
)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_now = time.monotonic
_log = logging.getLogger("gluon_syncbn")


class _Place:
    """Where a thread is. It waits for others if its innermost frame is MXNet's or Horovod's and no
    thread computes."""

    def __init__(self, thread, frame, libraries):
        # Our part of a wait for MXNet.
        if frame.f_code.co_filename == native.failures.__file__ and frame.f_back:
            frame = frame.f_back
        # A frame's address alone is not enough, as it may be reused.
        self.key = id(frame), frame.f_lasti, native.waits.returned[thread]
        self.stood = self.waited = 0.0
        call = frame.f_code.co_name if frame.f_code.co_filename.startswith(libraries) else None
        while frame.f_back and frame.f_code.co_filename.startswith((*libraries, _OURS)):
            frame = frame.f_back
        line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        self.waits = call is not None
        self.text = f"{call}, called at {line}" if self.waits else line


class Watch:
    """Looks at the threads of this process now and then: see `look`.

    peers: the `Peers` that wait for each other.
    """

    def __init__(self, peers):
        self._peers = peers
        self._places = {}
        self._time = _now()
        self._lost = False
        self._judge = None
        self._warned = None

    @property
    def period(self):
        """Seconds between two looks."""
        return min(1.0, self._peers.longest_timeout * WARN_AFTER / 2)

    def place(self):
        """Where the main thread is: a text, the seconds it has been there, and whether it waits."""
        place = self._places.get(threading.main_thread().ident)
        return place and (place.text, place.stood, place.waits)

    def look(self):
        """Notes where each thread is, and has long waits judged. Whatever this raises, as without
        free file descriptors, nothing is known of this time."""
        now = _now()
        if now - self._time < self.period / 2:
            return
        passed = now - self._time
        self._time = now
        # The time for which this process was stopped is no wait.
        passed = min(passed, 2 * self.period)
        peers, libraries = self._peers, _libraries()
        if peers.lost and not self._lost:
            self._lost, self._places = True, {}  # From here on the error has time to be raised.
        places = {}
        for thread, frame in sys._current_frames().items():
            if thread in bounded:
                continue
            place, before = _Place(thread, frame, libraries), self._places.get(thread)
            if before and before.key == place.key:
                place = before
                place.stood += passed
            places[thread] = place
        self._places = places
        waiting = [place for place in places.values() if place.waits and place.stood]
        # Exchanges have limits of their own.
        if waiting and not peers.exchanges_in_flight() and not _computes():
            for place in waiting:
                place.waited += passed
        if peers.size > 1 and (self._judge is None or self._judge.is_set()):
            thread = max(places, key=lambda thread: places[thread].waited)
            first = peers.longest_timeout * WARN_AFTER
            if places[thread].waited > (_RAISES if self._lost else first):
                # On another thread, as this one answers probes.
                self._judge = threads.start(self._judge_wait, thread, places[thread])

    def _judge_wait(self, thread, place):
        peers, timeout = self._peers, self._peers.longest_timeout
        # A script that has caught the error may save what it has.
        if peers.lost and not peers.has_raised:
            text, ends = f"{peers.lost} The script waits in {place.text}.", True
        else:
            answers = peers.probe_all(min(2.0, timeout / 4))
            text = (
                f"Rank {peers.rank} has waited {duration(place.waited)} for other processes, in "
                f"{place.text}. {describe_others(answers)}"
            )
            if all(answer.place and answer.place[2] for answer in answers.values()):
                text += f" As all of them wait, {peers.name} does not answer, or lost a message."
            else:
                text += f" {NEEDS_TIME}"
            ends = place.waited > timeout + _LATER or any(
                answer.state == GONE or (answer.status and answer.status[0] == FAILED)
                for answer in answers.values()
            )
        frame = sys._current_frames().get(thread)
        if frame is None or _Place(thread, frame, _libraries()).key != place.key:
            return
        if ends:
            peers.tell_failure(text)
            _end(f"{text} No error can be raised there, so this process ends.")
        elif self._warned is not place:
            self._warned = place
            native.warn(f"{text} After {duration(timeout)} this ends the process.")


def _libraries():
    found = (sys.modules.get(name) for name in ("mxnet", "horovod"))
    return tuple(os.path.dirname(module.__file__) + os.sep for module in found if module)


def _computes():
    """Whether, at every look, another thread of this process runs, is ready to run, or waits for a
    disk."""
    own = str(threading.get_native_id())
    for _ in range(_LOOKS):
        time.sleep(_BETWEEN_LOOKS)
        if not any(_is_busy(thread) for thread in os.listdir("/proc/self/task") if thread != own):
            return False
    return True


def _is_busy(thread):
    try:
        with open(f"/proc/self/task/{thread}/stat", "rb") as file:  # A name may be no text.
            return file.read().rpartition(b")")[2].split()[0] in b"RD"
    except OSError:  # It has ended.
        return False


def _end(text):
    """Ends this process, whatever its threads are doing."""
    shutdown.abandon()
    # Logging may block: nobody may read the output, or the hanging thread may be logging.
    try:
        threads.start(_log.error, "%s", text).wait(_LAST_WORDS)
    except RuntimeError:  # There are no more threads.
        _log.error("%s", text)
    os._exit(1)
