"""The processes that a launcher starts, and its watch over them."""

import collections
import contextlib
import errno
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid

from . import runner

_TERM_SECONDS = 4
_HELPER_SECONDS = 3
_POLL_SECONDS = 0.05
_SAME_SIGNAL_SECONDS = 0.5
_TAIL_LINES = 20
_TAIL_COLUMNS = 400
_LONGEST_LINE = 1 << 20
_PIPE_SIZE = 1 << 16
# Progress bars rewrite their line after a carriage return. One at the end may be half of a "\r\n".
_LINE_END = re.compile(rb"\r?\n|\r(?!\Z)")
_screen = threading.Lock()


def say(text):
    """Prints a sentence of the launcher itself."""
    with _screen:
        try:
            print(f"gluon_syncbn.launch: {text}", file=sys.stderr, flush=True)
        except OSError:
            _silence(sys.stderr)


def _silence(stream):
    """What cannot be written would make Python fail at exit, where it tries once more."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Child:
    """A process of the launch, with a session of its own and the thread that prints its lines."""

    def __init__(self, name, command, environment, news):
        self.name = name
        role, _, number = name.partition(" ")
        self.is_worker = role == "worker"
        self.announced = None  # The exit code with which a worker said that it would end.
        # "worker 1" prints as [1], "server 0" and "scheduler" as they are.
        self.prefix = f"[{number if self.is_worker and number else name}] ".encode()
        self.tail = collections.deque(maxlen=_TAIL_LINES)
        self.unheard = None  # Why its output could not be written.
        self.process = subprocess.Popen(
            [
                sys.executable,
                runner.__file__,
                "run" if self.is_worker else "serve",
                str(os.getpid()),
                *([str(news)] if self.is_worker else []),
                *command,
            ],
            env=environment,
            pass_fds=[news] if self.is_worker else [],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._relay, daemon=True)
        self._reader.start()

    def code(self):
        """The exit code, negative for a signal, None while it runs."""
        return self.process.poll()

    def signal(self, number):
        if self.code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def drain(self, seconds):
        """Waits for what is left of the output."""
        self._reader.join(seconds)

    def failed(self):
        """The exit code where it is not 0, known before the end if it was announced. An exit hook
        may end with another."""
        return self.announced or self.code()

    def ending(self):
        name = f"{self.name} (process {self.process.pid})"
        code = self.failed()
        if code > 0:
            return f"{name} ended with exit code {code}"
        hint = " (by the kernel, if memory ran out)" if code == -signal.SIGKILL else ""
        return f"{name} was killed by {_signal_name(-code)}{hint}"

    def _relay(self):
        # Asked about its errors first and read last, a child's errors come after what it said
        # before them.
        pipes = [(self.process.stderr, sys.stderr), (self.process.stdout, sys.stdout)]
        streams = {pipe.fileno(): (pipe, target) for pipe, target in pipes}
        poll = select.poll()
        for number in streams:
            poll.register(number, select.POLLIN)
        rests = dict.fromkeys(streams, b"")
        while rests:
            for number, _ in reversed(poll.poll()):
                pipe, target = streams[number]
                data = pipe.read(_PIPE_SIZE)
                *lines, rest = _LINE_END.split(rests[number] + data)
                if rest and (not data or len(rest) > _LONGEST_LINE):
                    lines, rest = [*lines, rest], b""
                self._print(lines, target)
                rests[number] = rest
                if not data:
                    poll.unregister(number)
                    pipe.close()
                    del rests[number]

    def _print(self, lines, target):
        self.tail.extend(line[:_TAIL_COLUMNS] for line in lines)
        with _screen:
            try:
                data = b"".join(self.prefix + line + b"\n" for line in lines)
                if hasattr(target, "buffer"):
                    target.buffer.write(data)
                    target.buffer.flush()
                else:  # As where a notebook or io.StringIO stands in its place.
                    target.write(data.decode(errors="replace"))
                    target.flush()
            except (OSError, ValueError) as error:
                self.unheard = self.unheard or error
                _silence(target)


class Launch:
    """The processes here, from their start to their end.

    Parameters
    ----------
    plan : list of (name, environment)
        The processes to start.
    command : list of str
        The script, or "-m" and a module, and its arguments.
    grace : float
        Seconds that the workers have after a signal was passed on to them.
    meeting : Meeting, optional
        The connection to the launchers of other machines.
    """

    def __init__(self, plan, command, grace, meeting):
        self._plan, self._command, self._grace = plan, command, grace
        self._meeting = meeting
        self._children = []
        self._failed = []
        self._signals = []
        self._passed_on = None

    def run(self):
        """Returns the exit code, when nothing runs any more."""
        mark = uuid.uuid4().hex
        with self._guard(mark), self._handle_signals(), self._open_news() as news:
            try:
                for name, environment in self._plan:
                    # A launcher started by a worker of a launcher belongs to both.
                    marks = [environment.get(runner.MARK), mark]
                    environment[runner.MARK] = ":".join(filter(None, marks))
                    self._children.append(Child(name, self._command, environment, news))
                code = self._watch()
            finally:
                self._end()
                runner.kill_marked(mark)
                for child in self._children:
                    child.process.wait()
                    child.drain(1)
            # Its last lines may have come after all had ended.
            return code or self._tell_unheard() or 0

    @contextlib.contextmanager
    def _guard(self, mark):
        """A process that notices when this one is gone, and then ends the others."""
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", runner.__file__, "guard", mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with guard:  # Closes its input, which it waits for, and waits for it.
            yield

    @contextlib.contextmanager
    def _open_news(self):
        """A pipe into which workers write that they fail, so it is known which was the first."""
        self._news, news = os.pipe()
        os.set_blocking(self._news, False)
        try:
            yield news
        finally:
            os.close(self._news)
            os.close(news)

    @contextlib.contextmanager
    def _handle_signals(self):
        def note(number, frame):
            now = time.monotonic()
            # `timeout`, for one, sends a signal to a process and to its group, so twice.
            if not self._signals or now > self._signals[-1][1] + _SAME_SIGNAL_SECONDS:
                self._signals.append((number, now))

        handled = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        # Under nohup, SIGHUP stays ignored.
        handled = [number for number in handled if signal.getsignal(number) != signal.SIG_IGN]
        previous = [signal.signal(number, note) for number in handled]
        try:
            yield
        finally:
            for number, handler in zip(handled, previous):
                signal.signal(number, handler)

    def _watch(self):
        """Waits until all workers have ended, or one process failed. Returns the exit code."""
        watched = [child for child in self._children if child.is_worker] or self._children
        while True:
            finished = all(child.code() == 0 for child in watched)
            failure = None
            if self._meeting:
                if finished:
                    self._meeting.tell_done()
                failure = self._meeting.poll()
                finished = self._meeting.everyone_done
            # What becomes of the KVStore after the last worker has ended well spoils nothing.
            failed = [c for c in self._failures() if c in watched or not finished]
            if self._signals:
                code = self._obey(watched)
            elif failed:
                code = self._report(self._cause(failed))
            elif failure:
                say(f"{failure}, so the processes here are ended.")
                code = 1
            else:
                code = self._tell_unheard() or (0 if finished else None)
            if code is not None:
                return code
            time.sleep(_POLL_SECONDS)

    def _tell_unheard(self):
        """The exit code where output could not be written, None where all was."""
        unheard = [child for child in self._children if child.unheard]
        if not unheard:
            return None
        error = unheard[0].unheard
        # Whoever read it has enough, as with `... | head`.
        if getattr(error, "errno", None) == errno.EPIPE:
            return 128 + signal.SIGPIPE
        text = (
            f"the output of {unheard[0].name} cannot be written "
            f"({getattr(error, 'strerror', None) or error})"
        )
        if self._meeting:
            self._meeting.tell_failed(text)
        say(f"{text}, so all processes are ended.")
        return 1

    def _failures(self):
        """The processes that failed: who announced it, in that order, before who just ended."""
        ended = [child for child in self._children if child.code()]
        by_number = {child.process.pid: child for child in self._children}
        announced = []
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._news, 1 << 16).splitlines():
                number, code = map(int, line.split())
                child = by_number[number]
                child.announced = code
                announced.append(child)
        for child in [*announced, *ended]:
            if child not in self._failed:
                self._failed.append(child)
        return self._failed

    def _cause(self, failed):
        """Which of those that failed did so first. Who was killed announced nothing, and is rather
        the cause than the effect; the others, whose connections end, may notice it sooner than the
        system lets it be known here."""
        time.sleep(_POLL_SECONDS)
        killed = [child for child in self._children if child.code() == -signal.SIGKILL]
        return (killed or failed)[0]

    def _obey(self, workers):
        """Passes a signal on and waits for what becomes of it."""
        number, when = self._signals[0]
        if self._passed_on is None:
            self._passed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            say(f"{_signal_name(number)} is passed on to the workers; a second one kills them.")
            for child in workers:
                child.signal(self._passed_on)
        codes = [child.code() for child in workers]
        if all(code == 0 for code in codes):
            return 0
        if None not in codes or len(self._signals) > 1 or time.monotonic() > when + self._grace:
            if self._meeting:
                self._meeting.tell_failed(f"got {_signal_name(number)}")
            return 128 + number
        return None

    def _report(self, child):
        """Ends the others for the one that failed, and shows it. Returns its exit code."""
        for other in self._children:
            if other is not child:
                other.signal(signal.SIGTERM)
        if self._meeting:
            self._meeting.tell_failed(child.ending())
        self._wait(runner.EXIT_HOOKS_SECONDS + 1, [child])
        child.drain(0.5)
        said = "".join(f"\n    {line.decode(errors='replace')}" for line in list(child.tail))
        say(
            f"{child.ending()}, so all others are ended."
            + (f" Its last lines:{said}" if said else " It had printed nothing.")
        )
        code = child.failed()
        return code if code > 0 else 128 - code

    def _end(self):
        """Ends what still runs: the parts of the KVStore by themselves where all went well."""
        if all(child.code() == 0 for child in self._children if child.is_worker):
            self._wait(_HELPER_SECONDS, self._children)
        for child in self._children:
            child.signal(signal.SIGTERM)
        self._wait(_TERM_SECONDS, self._children)
        for child in self._children:
            child.signal(signal.SIGKILL)

    def _wait(self, seconds, children):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(self._signals) < 2:
            if all(child.code() is not None for child in children):
                return
            time.sleep(_POLL_SECONDS)
