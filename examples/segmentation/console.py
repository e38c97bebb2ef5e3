"""What a run shows: lines, and below them a bar."""

import contextlib
import os
import signal
import sys

from tqdm import tqdm

# Where the first of several workers finds the terminal.
TERMINAL_VARIABLE = "SEGMENTATION_TERMINAL"


def terminal():
    """The name of the terminal that standard output and standard error both are, or None."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    try:
        return os.ttyname(sys.stdout.fileno())
    except OSError:
        return None


class Console:
    """`shown=False` shows nothing: all but the first of several workers are silent."""

    def __init__(self, shown=True):
        self._shown = shown
        self._out, self._err = sys.stdout, sys.stderr
        # What a worker prints comes through the launcher in whole lines, of which a bar would make
        # one each time that it moves.
        name = os.environ.get(TERMINAL_VARIABLE)
        if shown and name:
            with contextlib.suppress(OSError):
                number = os.open(name, os.O_WRONLY | os.O_NOCTTY)
                self._out = self._err = open(number, "w", encoding=sys.stdout.encoding)

    def bar(self, items=None, **settings):
        """tqdm, which writes a line now and then where no one watches a terminal."""
        watched = self._err.isatty()
        return tqdm(
            items,
            file=self._err if watched else _Lines(self._err),
            mininterval=0.2 if watched else 10,
            dynamic_ncols=True,
            disable=not self._shown,
            **settings,
        )

    def say(self, text):
        """Print above the bar."""
        if not self._shown:
            return
        if self._err.isatty():
            tqdm.write(text, file=self._out)
        else:
            print(text, file=self._out)
        self._out.flush()


class _Lines:
    """A file in which each state of a bar becomes a line."""

    def __init__(self, file):
        self._file = file
        self.encoding = file.encoding

    def write(self, text):
        text = text.strip()
        if text:
            self._file.write(text + "\n")

    def flush(self):
        self._file.flush()


def reader_gone():
    """Whoever read the output has enough, as with `... | head`: the exit status, with which nothing
    is written any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def python():
    """This interpreter as one would type it."""
    path = os.path.relpath(sys.executable)
    return os.path.basename(sys.executable) if path.startswith("..") else path
