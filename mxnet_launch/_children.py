"""The processes that a launcher starts, and their end."""

from __future__ import annotations

import collections
import contextlib
import errno
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from types import FrameType
from typing import Any, Callable, Dict, Iterable, Sequence, TextIO, Tuple

import psutil
from mxnet_compat import options

from . import runner

# The name of a process, and its environment.
Spec = Tuple[str, Dict[str, str]]
_TERM_SECONDS = 4
_SERVICE_SECONDS = 3  # For the KVStore's own processes, after the workers ended well.
_POLL_SECONDS = 0.05
_PF_EXITING = 4  # linux/sched.h
_SAME_SIGNAL_SECONDS = 0.5
_LONGEST_LINE = 1 << 20
_SAY_SECONDS = 2
_locks: dict[Any, threading.Lock] = {}  # By file. Each is held while somebody writes to the file.


def say(text: str) -> None:
    """Prints a sentence of the launcher itself. If nobody reads the output, this soon goes on."""
    arguments = sys.stderr, f"gluon_syncbn.launch: {text}\n"
    words = threading.Thread(target=_write, args=arguments, daemon=True)
    with contextlib.suppress(RuntimeError):  # The system may have no thread left.
        words.start()
        words.join(_SAY_SECONDS)


def is_blocked() -> bool:
    """Whether somebody writes, perhaps because nobody reads."""
    return any(lock.locked() for lock in list(_locks.values()))


def _file(stream: TextIO) -> Any:
    """Equal for streams that go to one file or pipe, such as after 2>&1."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return stream
    return found.st_dev, found.st_ino


def _write(stream: TextIO, text: str) -> Exception | None:
    """Writes whole lines. Returns the error if they cannot be written."""
    data = text.encode(errors="surrogateescape")
    with _locks.setdefault(_file(stream), threading.Lock()):
        try:
            stream.buffer.write(data)
            stream.flush()
        except (OSError, ValueError) as error:
            # Python would try once more at exit, and fail.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
            return error
    return None


class Child:
    """A process of the launch, with its own session and the threads that print its lines.

    It is number `index`, under which it reports its script's end to the pipe `report_to`.
    """

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], report_to: int, index: int
    ) -> None:
        self.name = name
        role, _, number = name.partition(" ")
        self.is_worker = role == "worker"
        self.reported: int | None = None  # The exit code with which its script ended.
        self.ended = math.inf  # When the script failed, or else the process ended, as we learn it.
        self.write_error: Exception | None = None
        # The last lines of stdout and of stderr, which says why it ended.
        self.tails: tuple[collections.deque[str], ...]
        self.tails = collections.deque(maxlen=1), collections.deque(maxlen=20)
        # "worker 1" prints as [1], "server 0" and "scheduler" as they are.
        self._prefix = f"[{number if self.is_worker else name}] "
        task = "run" if self.is_worker else "serve"
        self.process = subprocess.Popen(
            [sys.executable, *options(), runner.__file__, task, f"{report_to}:{index}", *command],
            env=environment,
            pass_fds=[report_to],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            start_new_session=True,
        )
        pipes, targets = (self.process.stdout, self.process.stderr), (sys.stdout, sys.stderr)
        self.relays = [
            threading.Thread(target=self._relay, args=arguments, daemon=True)
            for arguments in zip(pipes, targets, self.tails)
        ]
        for relay in [*self.relays, threading.Thread(target=self._note_end, daemon=True)]:
            relay.start()

    def _note_end(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.ended = min(self.ended, time.monotonic())

    def _relay(self, pipe: TextIO, target: TextIO, tail: collections.deque[str]) -> None:
        """Prints each line with the rank before it. A carriage return ends a line too, so that each
        update of a progress bar is one."""
        with pipe:
            for line in iter(lambda: pipe.readline(_LONGEST_LINE), ""):
                line = line.rstrip("\n")
                # Of a traceback only the message, which comes after the indented frames.
                if line.startswith('  File "'):
                    tail.clear()
                elif line.strip() and (tail or not line.startswith(" ")):
                    tail.append(line)
                error = _write(target, f"{self._prefix}{line}\n")
                self.write_error = self.write_error or error

    def code(self) -> int | None:
        """The exit code, negative for a signal, None while it runs."""
        return self.process.poll()

    def failed(self) -> int:
        """The exit code if it is not 0, or 1 if the process ended before its script. A reported
        code takes precedence, as an exit hook may end with another."""
        unfinished = self.is_worker and self.code() == 0 and self.reported is None
        return self.reported or self.code() or int(unfinished)

    def is_ending(self) -> bool:
        """Whether it has ended, or the kernel is about to close its connections or has done so."""
        with contextlib.suppress(OSError), open(f"/proc/{self.process.pid}/stat", "rb") as file:
            return bool(int(file.read().rpartition(b")")[2].split()[6]) & _PF_EXITING)
        return self.code() is not None

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        with contextlib.suppress(psutil.Error, OSError):
            status = psutil.Process(self.process.pid).status()
            return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def signal(self, number: int) -> None:
        if self.code() is None:
            if number == signal.SIGTERM and self.is_stopped():
                number = signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def ending(self) -> str:
        name, code = f"{self.name} (process {self.process.pid})", self.failed()
        if self.code() == 0:
            return f"{name} ended with exit code 0 before its script did, as by os._exit(0)"
        if code > 0:
            return f"{name} ended with exit code {code}"
        hint = " (by the kernel, if memory ran out)" if code == -signal.SIGKILL else ""
        return f"{name} was killed by {_signal_name(-code)}{hint}"


def _signal_name(number: int) -> str:
    return next((s.name for s in signal.Signals if s == number), f"signal {number}")


def _wait(seconds: float, is_over: Callable[[], bool]) -> None:
    # Counted, as the time for which the launcher is stopped is no wait.
    for _ in range(int(seconds / _POLL_SECONDS)):
        if is_over():
            break
        time.sleep(_POLL_SECONDS)


def _drain(children: Iterable[Child]) -> None:
    """Waits for the rest of their output, but not for a reader."""
    relays = [relay for child in children for relay in child.relays]
    _wait(1, lambda: not any(relay.is_alive() for relay in relays))


class Launch:
    """The processes of this launcher, from their start to their end.

    `specs` are their names and environments, `command` is the script, or "-m" and a module, with
    its arguments. The workers have `grace` seconds to end after a signal. serves_others: whether
    workers of other launchers need the scheduler and the servers, so that these end by themselves.
    """

    def __init__(
        self, specs: list[Spec], command: list[str], grace: float, serves_others: bool = False
    ) -> None:
        self._specs, self._command, self._grace = specs, command, grace
        self._serves_others = serves_others
        self._children: list[Child] = []
        self._signals: list[tuple[int, float]] = []  # And when they came.
        self._announced: set[int] = set()  # Signals by which no launch ends.
        self._is_passed_on = False
        self._rest = b""  # Of the reports: the line that has not been read to its end.

    def run(self) -> int:
        """Returns the exit code, once nothing runs any more."""
        launch_id = uuid.uuid4().hex
        # Ends all others when this process is gone, even by SIGKILL: its input is closed then.
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", runner.__file__, "guard", launch_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reports, report_to = os.pipe()
        os.set_blocking(self._reports, False)
        before = {
            number: signal.getsignal(number) for number in (*runner.ENDS, *runner.ANNOUNCEMENTS)
        }
        for number in runner.ENDS:
            if before[number] != signal.SIG_IGN:  # As SIGHUP is under nohup.
                signal.signal(number, self._note_signal)
        with guard, open(self._reports, "rb"), open(report_to, "wb"):
            try:
                for index, (name, environment) in enumerate(self._specs):
                    # A launcher started by a worker of another launcher belongs to both.
                    ids = environment.get(runner.LAUNCH_ID, "") + ":" + launch_id
                    environment = {**environment, runner.LAUNCH_ID: ids}
                    child = Child(name, self._command, environment, report_to, index)
                    self._children.append(child)
                # Only now: children inherit that a signal is ignored, and no handler.
                for number in runner.ANNOUNCEMENTS:
                    signal.signal(number, lambda number, frame: self._announced.add(number))
                code = self._watch()
            finally:
                self._end()
                runner.kill_launch(launch_id)
                for child in self._children:
                    child.process.wait()
                _drain(self._children)
            # After a good end the reader may be slow, as a pager is. A signal ends the wait for it.
            while not code and not self._signals and is_blocked():
                _drain(self._children)
            # The last lines may have come after the end of their process.
            code = code or self._check_output() or 0
        for number, handler in before.items():
            signal.signal(number, handler)
        return code

    @property
    def was_told_to_end(self) -> bool:
        """By a signal, or as nobody reads its output."""
        return bool(self._signals) or any(child.write_error for child in self._children)

    @property
    def _workers(self) -> list[Child]:
        return [child for child in self._children if child.is_worker]

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # `timeout`, for one, signals a process and its group, so one process twice.
        if not self._signals or now > self._signals[-1][1] + _SAME_SIGNAL_SECONDS:
            self._signals.append((number, now))

    def _watch(self) -> int:
        """Waits until all workers have ended, or one process failed. Returns the exit code."""
        watched = self._workers
        needed = self._children if self._serves_others else watched
        code = None
        while code is None:
            select.select([self._reports], [], [], _POLL_SECONDS)
            finished = all(child.code() == 0 for child in needed)
            # A failure of the KVStore after the last worker ended well does no harm.
            failed = [child for child in self._failures() if child in watched or not finished]
            self._announce(watched)
            if self._signals:
                code = self._obey(watched, needed)
            elif failed:
                self._wait_for([child for child in self._children if child.is_ending()], 1)
                code = self._report(self._failures()[0])
            else:
                code = self._check_output() or (0 if finished else None)
        return code

    def _check_output(self) -> int | None:
        """The exit code if output could not be written, else None."""
        for child in self._children:
            if child.write_error:
                # The reader has enough, as with `... | head`.
                if getattr(child.write_error, "errno", None) == errno.EPIPE:
                    return 128 + signal.SIGPIPE
                reason = getattr(child.write_error, "strerror", None) or child.write_error
                text = f"the output of {child.name} cannot be written ({reason})"
                say(f"{text}, so all processes are ended.")
                return 1
        return None

    def _failures(self) -> list[Child]:
        """The processes that failed, the first one first."""
        for child in self._children:
            child.code()  # Before the reports, because a process reports first and then ends.
        begin = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            while True:
                *lines, self._rest = (self._rest + os.read(self._reports, 4096)).split(b"\n")
                for index, code in map(bytes.split, lines):
                    child = self._children[int(index)]
                    child.reported = int(code)
                    if child.reported:
                        child.ended = time.monotonic()
        failed = [child for child in self._children if child.failed()]
        # Who ends without a report has ended before these: others notice when its connections
        # close, also in their exit hooks. And they report before they close their own.
        in_hooks = [child.ended for child in failed if child.reported == 0]
        for child in self._children if failed else ():
            if child.reported is None and child.is_ending():
                child.ended = min(child.ended, begin, *in_hooks)
        return sorted(failed, key=lambda child: (child.ended, child.reported == 0))

    def _announce(self, workers: Sequence[Child]) -> None:
        while self._announced:
            number = self._announced.pop()
            for child in workers:
                child.signal(number)
            name = _signal_name(number)
            say(f"{name} is passed on to the workers, which ignore it unless they have a handler.")

    def _obey(self, workers: Sequence[Child], needed: Sequence[Child]) -> int | None:
        """Passes a signal on. Returns the exit code once the workers have ended, or must. After a
        good end of those here, others may still need the scheduler and the servers."""
        number, when = self._signals[0]
        name = _signal_name(number)
        if not self._is_passed_on:
            self._is_passed_on = True
            for child in workers:
                child.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            say(f"{name} is passed on to the workers; a second one kills them.")
        running = [child for child in needed if child.code() is None]
        left = [child for child in workers if child in running] or running
        is_over = time.monotonic() > when + self._grace
        if left and (is_over or len(self._signals) > 1):
            why = (
                f"{self._grace:g} s after {name} (--grace)" if is_over else "before a second signal"
            )
            names = ", ".join(child.name for child in left)
            say(f"{names} had not ended {why}, so all are killed.")
            for child in left:
                child.signal(signal.SIGKILL)
            return 128 + number
        codes = [child.code() for child in workers]
        if not left or None not in codes and any(codes):
            return 128 + number if any(codes) else 0
        return None

    def _report(self, child: Child) -> int:
        """Ends all others because one failed, and reports it. Returns its exit code."""
        states = {
            "Stopped by a signal": [each.name for each in self._children if each.is_stopped()],
            # It may never have met the others.
            "Ended well before": [
                each.name for each in self._workers if each.code() == 0 and not each.failed()
            ],
        }
        for other in self._children:
            if other is not child:
                other.signal(signal.SIGTERM)
        self._wait_for([child], runner.EXIT_HOOKS_SECONDS + 1)
        _drain([child])
        also = "".join(f"{state}: {', '.join(names)}. " for state, names in states.items() if names)
        lines = "".join(f"\n    {line}" for tail in child.tails for line in list(tail)) or " none"
        also += f"Last lines of {child.name}:{lines}"
        say(f"{child.ending()}, so all others are ended. {also}")
        code = child.failed()
        return code if code > 0 else 128 - code

    def _end(self) -> None:
        """Ends what still runs. If all went well, the KVStore's processes may first end by
        themselves."""
        if all(child.code() == 0 for child in self._workers):
            self._wait_for(self._children, _SERVICE_SECONDS)
        for child in self._workers:
            child.signal(signal.SIGTERM)
        self._wait_for(self._workers, _TERM_SECONDS)
        for child in self._children:
            child.signal(signal.SIGKILL)

    def _wait_for(self, children: Sequence[Child], seconds: float) -> None:
        """Waits until these have ended, but no longer than until a second signal."""
        _wait(seconds, lambda: len(self._signals) > 1 or None not in [c.code() for c in children])
