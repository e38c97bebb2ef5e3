"""Where the threads of this process are, and whether they wait for other processes."""

import os
import sys
import threading
import time

from .. import native
from .reports import Place
from .waiting import bounded

# How often to look at the threads, and seconds between: Horovod's own thread runs now and then.
_LOOKS, _BETWEEN_LOOKS = 10, 0.002
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class _Seen:
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

    def place(self):
        return Place(self.text, self.stood, self.waited if self.waits else None)


class Places:
    """Looks at the main thread, and at those that have called a layer in training, now and then."""

    def __init__(self):
        self._seen = {}

    def forget(self):
        self._seen = {}

    def look(self, passed, may_wait):
        """The `Place` of the thread that has waited longest, or else of the main thread. passed:
        the seconds since the last look. may_wait: whether to count them as a wait."""
        libraries, main = _libraries(), threading.main_thread().ident
        looked_at = {main, *native.training_threads()} - bounded
        seen = {}
        for thread, frame in sys._current_frames().items():
            if thread not in looked_at:
                continue
            here, before = _Seen(thread, frame, libraries), self._seen.get(thread)
            if before and before.key == here.key:
                here = before
                here.stood += passed
            seen[thread] = here
        self._seen = seen
        waiting = [here for here in seen.values() if here.waits and here.stood]
        if waiting and may_wait and not _computes():
            for here in waiting:
                here.waited += passed
        longest = max(waiting, key=lambda here: here.waited, default=None)
        if longest is None or not longest.waited:
            longest = seen.get(main, longest)
        return longest and longest.place()

    def is_still_at(self, place):
        """Whether a thread waits where the last `look` has seen it."""
        frames, libraries = sys._current_frames(), _libraries()
        return any(
            here.text == place.text
            and thread in frames
            and _Seen(thread, frames[thread], libraries).key == here.key
            for thread, here in self._seen.items()
        )


def _libraries():
    found = (sys.modules.get(name) for name in ("mxnet", "horovod"))
    return tuple(os.path.dirname(module.__file__) + os.sep for module in found if module)


def _computes():
    """Whether, at every look, another thread of this process runs, is ready to run, or waits for a
    disk. So it seems where that cannot be seen."""
    own = str(threading.get_native_id())
    try:
        for _ in range(_LOOKS):
            time.sleep(_BETWEEN_LOOKS)
            threads = os.listdir("/proc/self/task")
            if not any(_is_busy(thread) for thread in threads if thread != own):
                return False
    except OSError:  # Without /proc, or free file descriptors.
        pass
    return True


def _is_busy(thread):
    try:
        with open(f"/proc/self/task/{thread}/stat", "rb") as file:  # A name may be no text.
            return file.read().rpartition(b")")[2].split()[0] in b"RD"
    except (FileNotFoundError, ProcessLookupError):  # It has ended.
        return False
