"""Raises the error of a step that has failed, when Python next waits for MXNet.

src/operator/rendezvous/failures.cc says when a step fails. Its calls have ended with zeros, so no
value may be read before the error has been raised. Once it has, everything is as before the step:
no call is under way, and no array holds an error.
"""

import collections
import ctypes
import functools
import threading
import types
import weakref

from . import layer
from .callbacks import decoded, encoded, text_of
from .library import library as _library
from .library import mxnet

_MAX_SIZE = 1 << 14
# How many of Python's waits for MXNet have ended, by thread, and how many of all with an error.
waits = types.SimpleNamespace(returned=collections.Counter(), failed=0)
# The threads that have called a layer in training.
_training_threads = weakref.WeakSet()
# Without our part.
wait_all = mxnet.base._LIB["MXNDArrayWaitAll"]


def note_training():
    """This thread has called a layer in training."""
    _training_threads.add(threading.current_thread())


def trains():
    return threading.current_thread() in _training_threads


def training_threads():
    """The ids of those threads."""
    return {thread.ident for thread in _training_threads.copy()}


def failure():
    """Why the step has failed, or ""."""
    text = ctypes.create_string_buffer(_MAX_SIZE)
    _library.gluon_syncbn_failure(text, _MAX_SIZE)
    return decoded(text.value)


def error_of(status):
    try:
        mxnet.base.check_call(status)
    except mxnet.MXNetError as error:
        return error
    return None


def wait_for_all():
    """Waits for MXNet. Returns the error that nothing had waited for, or ""."""
    text = str(error_of(wait_all()) or "")
    return failure() or text


def wait_unheard(when):
    """Waits for MXNet `when` nobody would hear an error, and MXNet raises none twice: the next wait
    raises it."""
    text = wait_for_all()
    if text:
        _library.gluon_syncbn_fail(encoded(f"A step had failed {when}. {text}"))


def give_up(why):
    """Ends a step in which a device may not have been called, without an error of its own."""
    _end_step(why)


def waiting(function, arrays, reads):
    """Wraps one of MXNet's C functions by which Python waits. arrays(*arguments): for which arrays.
    reads: whether it gives their values to the caller."""

    @functools.wraps(function)
    def wait(*arguments):
        # Where other processes take part, nothing goes on after an error.
        if trains() and not layer.spans_processes():
            # Looked at first: once MXNet has raised an error, what is still queued would run, with
            # what was never written.
            if any([_library.gluon_syncbn_holds_error(array) for array in arrays(*arguments)]):
                _raise(None)
        status = function(*arguments)
        waits.returned[threading.get_ident()] += 1
        waits.failed += status != 0
        if status != 0 or _library.gluon_syncbn_failure(None, 0):
            if trains():
                _raise(error_of(status))
            elif status == 0 and reads:
                # Other threads, such as a DataLoader's, know of no step, but must not read what it
                # has left.
                raise mxnet.MXNetError(failure())
        return status

    return wait


def _raise(error):
    """Ends the step, if it has failed, and raises its first error: later nobody could tell which
    calls MXNet has skipped. error: what MXNet is about to raise."""
    try:
        text, cause = _end_step()
    except BaseException as interrupt:  # The next wait comes here again.
        _library.gluon_syncbn_fail(encoded(text_of(interrupt)))
        raise
    if not text:
        return
    waits.failed += error is None
    first = error or cause
    if first is None:
        raise mxnet.MXNetError(text)
    raise first if text in str(first) else type(first)(f"{first}\n{text}")


def _end_step(why=""):
    """Returns why the step has failed, or "", and the first error that MXNet still knew of it."""
    layer.flush(why)
    text, cause = failure(), None
    # Where other processes take part, an array may wait for them.
    if text and not layer.spans_processes():
        cause = error_of(wait_all())
        wait_all()
    if text:
        _library.gluon_syncbn_resume()
    return text, cause
