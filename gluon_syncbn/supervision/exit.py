"""Ends waits in the library at the end of the process, before a fork, and on Ctrl-C."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from typing import Callable

from .. import durations
from ..native import failures, threads, waits
from ..native.callbacks import encoded, text_of
from ..native.library import CLOSED, library

_log = logging.getLogger("gluon_syncbn")
_leaving: list[Callable[[str | None], None]] = []


def abandon() -> None:
    """Notes that something in MXNet waits in vain, so the process cannot exit as usual."""
    library.gluon_syncbn_abandon()


def is_abandoned() -> bool:
    return library.gluon_syncbn_is_abandoned()


def at_exit(leave: Callable[[str | None], None]) -> None:
    """Calls leave(failure) when the process ends and all results are computed. failure: None, or
    the exception that ended the script, as text."""
    _leaving.append(leave)


def _last_error() -> RuntimeError | None:
    """The end of the script counts as a wait. Returns the error of a step that nothing has waited
    for, after which the exit code is 1."""
    text = failures.unraised()
    if not text:
        return None
    _log.error("A step has failed, and nothing waited for it: %s", text)
    abandon()
    return RuntimeError(text)


def _wait_and_log() -> None:
    text = failures.wait_for_all()
    # A script may end before its last step does.
    if text and CLOSED not in text and not failures.failure():
        _log.warning("An error of MXNet that no operation had waited for: %s", text)


def _before_fork() -> None:
    # MXNet ends its threads for a fork, in no better order than at exit. Python only prints what is
    # raised here.
    failures.wait_unheard("before a fork")


def _after_fork() -> None:
    failures.after_fork()
    # The parent calls them.
    _leaving.clear()


def _error_of_script() -> BaseException | None:
    """The exception that ended the script, or None. sys.last_value may also be one that it has
    survived, in a prompt or a test runner, whose traceback begins where it was caught."""
    # The launcher's runner ends the process while it handles the error.
    error, trace = sys.exc_info()[1], getattr(sys, "last_traceback", None)
    if error is None and trace and not trace.tb_frame.f_back and not sys.flags.inspect:
        # Only a prompt of Python itself has this file, and no frame below. `code` leaves ps1 too.
        typed = hasattr(sys, "ps1") and trace.tb_frame.f_code.co_filename == "<stdin>"
        error = None if typed else sys.last_value
    return error


def _at_exit() -> None:
    last_step = None
    try:
        failure = _error_of_script()
        if failure is None and not is_abandoned():
            last_step = _let_the_last_step_end()
            failure = _last_error()
        text = None if failure is None else f"{type(failure).__name__}: {text_of(failure)}"
        for leave in reversed(_leaving):
            try:
                leave(text)
            except Exception:  # The others leave all the same.
                abandon()
                _log.exception("The process could not leave the others as usual.")
    except KeyboardInterrupt as interrupt:
        # Otherwise MXNet would wait too.
        _log.error(
            "Interrupted at the end of the script, in the wait for its last step or for other "
            "processes."
        )
        failure = interrupt
        abandon()
    library.gluon_syncbn_close(encoded(CLOSED))
    threads.wait_for_warnings(durations.WARNINGS)
    if is_abandoned():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code(failure))
    # MXNet first ends the threads of custom operators and then waits for all pending operations,
    # indefinitely if one is a custom operator. So none may be left.
    if last_step is not None:
        last_step.wait()
    _wait_and_log()
    library.gluon_syncbn_release()


def _exit_code(failure: BaseException | None) -> int:
    """The exit code of a script that `failure` ended, or whose normal exit was abandoned."""
    if isinstance(failure, KeyboardInterrupt):
        return 128 + signal.SIGINT
    # Only the launcher's runner shows it: Python hides it from exit hooks.
    if isinstance(failure, SystemExit) and isinstance(failure.code, int):
        return failure.code & 0xFF
    return 1


def _let_the_last_step_end() -> threading.Event | None:
    """Waits for the last step, which other processes may need, unless a call waits here for a
    device that never arrives. Returns an Event that is set at its end, or None."""
    try:
        end = threads.start(_wait_and_log, patience=durations.THREAD)
    except RuntimeError:  # As in a forked process, whose last step no other needs.
        return None
    with waits.noted(what="the wait for its last step"):
        while not end.wait(durations.SLICE):
            if is_abandoned() or library.gluon_syncbn_stuck_seconds() > durations.PATIENCE:
                break
    return end


def install() -> None:
    """Installs the hooks. The operator is registered by then."""
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    # Registered later, called earlier: before MXNet's own hook.
    atexit.register(_at_exit)
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        # A main thread that waits inside MXNet does not see Ctrl-C until MXNet returns. A script
        # with its own handler is left alone: it wants to finish its step.
        library.gluon_syncbn_catch_interrupts()
