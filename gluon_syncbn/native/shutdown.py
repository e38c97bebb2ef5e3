"""The end of the process, a fork, and Ctrl-C: what waits in the library is released."""

import atexit
import logging
import os
import signal
import sys
import threading

from .library import library, mxnet

CLOSED = "The process ends, and devices do not meet any more."
# Seconds without anything happening after which a call at the end is taken for one that waits for
# nothing. A device's operators before its next call may take so long.
_PATIENCE, _PATIENCE_ALONE = 2.0, 0.5
_log = logging.getLogger("gluon_syncbn")
_abandoned = False
_leaving = []


def abandon():
    """Something in MXNet waits for what will never come, so the process cannot end as usual."""
    global _abandoned
    _abandoned = True


def at_exit(leave):
    """Has leave(failure) called when the process ends and all that was to be computed is; failure
    is None, or what the script died of."""
    _leaving.append(leave)


def _wait_for_all():
    """Waits for MXNet. Returns the error that nobody had waited for, if there is one."""
    try:
        mxnet.nd.waitall()
    except mxnet.MXNetError as error:
        # A script may end before its last step has.
        if CLOSED not in str(error):
            _log.warning("An error of MXNet that nobody had waited for: %s", error)
        return error
    return None


def _before_fork():
    # MXNet ends its threads for a fork, in no better order than at exit. What is raised here,
    # Python only prints, and what was waited for once, MXNet does not raise again.
    error = _wait_for_all()
    if error is not None:
        library.gluon_syncbn_tell_next(str(error).encode())


def _after_fork():
    library.gluon_syncbn_after_fork()
    # The parent leaves the others, when it ends.
    _leaving.clear()


def _at_exit():
    waiter = threading.Thread(target=_wait_for_all, daemon=True)
    try:
        failure = getattr(sys, "last_value", None)
        if failure is None and not _abandoned:
            _let_the_last_step_end(waiter)
        for leave in reversed(_leaving):
            leave(None if failure is None else f"{type(failure).__name__}: {failure}")
    except KeyboardInterrupt as interrupt:
        # MXNet's own end would wait too.
        _log.error(
            "Interrupted at the end of the script, in the wait for its last step or for other "
            "processes."
        )
        sys.last_value = interrupt
        abandon()
    library.gluon_syncbn_close(CLOSED.encode())
    if _abandoned:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code(getattr(sys, "last_value", None)))
    # MXNet first ends the threads of custom operators and then waits for all that is left, for ever
    # where that is a custom operator. So nothing may be left; what depends on a released call is
    # not computed any more.
    if waiter.is_alive():
        waiter.join()
    _wait_for_all()
    library.gluon_syncbn_release()


def _exit_code(failure):
    """That of a script which died of `failure`, or whose end was abandoned."""
    if isinstance(failure, KeyboardInterrupt):
        return 128 + signal.SIGINT
    # Only the launcher's runner notes these: Python does not tell its exit hooks.
    if isinstance(failure, SystemExit) and isinstance(failure.code, int):
        return failure.code & 0xFF
    return 1


def _let_the_last_step_end(waiter):
    """A script may end before its last step has, for which other processes may wait. Waits for it,
    but not for a call that waits here for a device that never comes."""
    patience = _PATIENCE if _leaving else _PATIENCE_ALONE
    waiter.start()
    while waiter.is_alive() and not _abandoned and library.gluon_syncbn_stuck_seconds() < patience:
        waiter.join(0.1)


def release_at_the_end():
    """Once the operator is registered: from now on nothing waits beyond the end."""
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    # Later registered, earlier called: before MXNet's own.
    atexit.register(_at_exit)
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        # A main thread that waits inside MXNet does not see Ctrl-C before MXNet returns. A script
        # with a handler of its own is left alone: it means to finish its step.
        library.gluon_syncbn_catch_interrupts()
