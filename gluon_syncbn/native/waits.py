"""Which threads of this process wait for MXNet, a store or other processes: each says so itself."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from .. import durations

if TYPE_CHECKING:
    from types import FrameType

_THREADING = threading.__file__
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_numbers = itertools.count()
# {thread: (number of its wait, whether it ends only by another process, what it waits in)}
_waiting: dict[int, tuple[int, bool, str]] = {}
# Threads whose waits have a limit of their own.
bounded: set[int] = set()
# How many waits have raised an error.
failed = 0


class noted:
    """A thread waits within: ``with noted():``. for_others : only another process can end it, where
    a wait for MXNet may also be a long computation. what : it waits in, if no function of MXNet's
    or Horovod's says so."""

    __slots__ = ("_before", "_thread", "_what")

    def __init__(self, for_others: bool = False, what: str = "") -> None:
        self._what = for_others, what

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._before = _waiting.get(self._thread)
        _waiting[self._thread] = (next(_numbers), *self._what)

    def __exit__(self, *error: Any) -> None:
        if self._before is None:
            del _waiting[self._thread]
        else:
            _waiting[self._thread] = self._before


def noting(function: Callable[..., Any], for_others: bool = False) -> Callable[..., Any]:
    """Wraps a function in which a thread waits."""

    @functools.wraps(function)
    def wait(*args: Any, **kwargs: Any) -> Any:
        with noted(for_others):
            return function(*args, **kwargs)

    return wait


def note_failure() -> None:
    """A wait has raised an error."""
    global failed
    failed += 1


class Place(NamedTuple):
    """Where a thread is: "asnumpy, called at train.py:30", and the seconds that it has stood there;
    the seconds of these in which it has waited and nothing was completed, or None if it does not
    wait; and how many of these count as a wait for others."""

    text: str
    stood: float
    waited: float | None = None
    counted: float = 0.0


class _Seen:
    """A wait, or the line of a thread that does not wait: the seconds that it has lasted, those of
    them in which nothing was completed, and how many of these count."""

    def __init__(self, key: Any) -> None:
        self.key = key
        self.stood = self.waited = self.counted = 0.0


class Clock:
    """The seconds, as `now`, in which this process was not stopped. Of those between two looks at
    most three count, or half of the timeout, so look every second or so."""

    def __init__(self) -> None:
        self.now, self._looked = 0.0, time.monotonic()

    def look(self, timeout: float) -> float:
        before, self._looked = self._looked, time.monotonic()
        self.now += min(self._looked - before, durations.LONGEST_LOOK, timeout / 2)
        return self.now


class Waits:
    """Looks at the waits of this process now and then."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._longest: tuple[int, Any] | None = None

    def look(
        self, passed: float, may_wait: bool, goes_on: bool, is_under_way: bool = False
    ) -> Place | None:
        """The `Place` of the thread that has waited longest, or else of the main thread. passed:
        the seconds since the last look. may_wait: whether to count them. goes_on: whether an
        exchange or an operation of a store was completed in them, so that nobody waits in vain.
        is_under_way: whether an operation of a store is."""
        frames, main = sys._current_frames(), threading.main_thread().ident
        waiting = {
            t: wait for t, wait in _waiting.copy().items() if t in frames and t not in bounded
        }
        keys: dict[int, Any] = {thread: number for thread, (number, _, _) in waiting.items()}
        if main not in keys and main in frames:
            # An address alone is not enough, as it may be used again.
            keys[main] = id(frames[main]), frames[main].f_lasti
        before, self._seen = self._seen, {thread: _Seen(key) for thread, key in keys.items()}
        for thread, here in self._seen.items():
            if thread in before and before[thread].key == here.key:
                self._seen[thread] = here = before[thread]
                here.stood += passed
                if goes_on:
                    here.waited = here.counted = 0.0
                elif may_wait and thread in waiting:
                    here.waited += passed
                    is_known = waiting[thread][1] or is_under_way
                    here.counted += passed if is_known else durations.DOUBT * passed
        longest = max(waiting, key=lambda thread: self._seen[thread].counted, default=main)
        if longest not in self._seen:
            return None
        here = self._seen[longest]
        self._longest = longest, here.key
        call, line = _text(frames[longest])
        if longest not in waiting:
            return Place(line, here.stood)
        text = waiting[longest][2] or (f"{call}, called at {line}" if call else line)
        return Place(text, here.stood, here.waited, here.counted)

    def still_waits(self) -> bool:
        """Whether the thread that the last `look` has named is in the same wait."""
        if not self._longest:
            return False
        thread, key = self._longest
        return _waiting.get(thread, (None,))[0] == key


def _text(frame: FrameType) -> tuple[str | None, str]:
    """The function of MXNet's or Horovod's that a thread is in, or None, and the line of the
    script, for people."""
    found = (sys.modules.get(name) for name in ("mxnet", "horovod"))
    libraries = tuple(os.path.dirname(module.__file__) + os.sep for module in found if module)
    call = None
    while frame.f_back and frame.f_code.co_filename.startswith((*libraries, _HERE, _THREADING)):
        if call is None and frame.f_code.co_filename.startswith(libraries):
            call = frame.f_code.co_name
        frame = frame.f_back
    return call, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
