"""Raises the error of a step that has failed, wherever Python waits for MXNet, calls a layer in
training or steps a Trainer, and recovers once nothing of the step is left.

src/operator/rendezvous/failures.cc says when a step fails. From then on its calls end with zeros,
so no value may be read before the error has been raised.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from typing import Any, Callable, Iterable, NoReturn

from . import _layer, waits
from .callbacks import decoded, encoded, text_of
from .library import library as _library
from .library import mxnet

# What has called layers in training: graphs, and layers by themselves; and the threads that have.
# Nobody waits while it holds this lock.
_callers: weakref.WeakSet[Any] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_callers_lock = threading.Lock()
# Those callers that each thread has called.
_own = threading.local()
_has_failed = ctypes.c_int.from_address(_library.gluon_syncbn_has_failed())
_lock = threading.RLock()
# Whether this process has called a layer in training.
_has_trained = False
# What has been raised since the step failed, and of the last one that is over.
_raised: tuple[Exception, str] | None = None
_last: tuple[Exception, str] | None = None
# Whether nothing of the failed step was left when it failed.
_is_unheard = False
_holds_error = _library.gluon_syncbn_holds_error
# Without our part.
wait_all, _wait_to_read = (
    mxnet.base._LIB[name] for name in ("MXNDArrayWaitAll", "MXNDArrayWaitToRead")
)
_wait_to_read.argtypes = [ctypes.c_void_p]


def begin_training(caller: Any = None) -> None:
    """This thread calls `caller.layers` in training."""
    check_step()
    global _has_trained
    called = getattr(_own, "called", None)
    if called is None:
        _has_trained = True
        called = _own.called = weakref.WeakSet()
        thread = threading.current_thread()
        if not _layer.is_of_mxnet(thread):
            with _callers_lock:
                _threads.add(thread)
    if caller is not None and caller not in called:
        called.add(caller)
        with _callers_lock:
            _callers.add(caller)


def callers() -> set[Any]:
    with _callers_lock:
        return set(_callers)


def _own_layers() -> set[_layer.Layer]:
    """Those that this thread has called in training."""
    return _layers_of(getattr(_own, "called", ()))


def _layers_of(called: Iterable[Any]) -> set[_layer.Layer]:
    return {layer for caller in called for layer in caller.layers}


def check_step(_trainer: Any = None) -> None:
    """Raises the error of a step that has failed."""
    # Custom operators run on threads of MXNet's: what they raise, others may get.
    if _has_failed.value and not _layer.is_of_mxnet(threading.current_thread()):
        raise_failure()


def raise_failure(error: Exception | None = None) -> NoReturn:
    """Raises the first error of the step that has failed. error: what MXNet has just raised."""
    global _raised
    if error is None:
        waits.note_failure()
    with _lock:
        # Unless another thread has recovered meanwhile.
        if _raised is None and _has_failed.value:
            if error is None and not _layer.spans_processes():
                error = error_of(wait_all())
            _raised = error or mxnet.MXNetError(""), failure()
        error, text = _raised or _last
        message = str(error) if text in str(error) else f"{error}\n{text}".strip()
        if _may_recover():
            if _raised:
                _recover()
        elif not _layer.spans_processes():
            message += (
                "\nSeveral threads have called layers in training: stop them, and call "
                "gluon_syncbn.recover()."
            )
    raise type(error)(message)


def recover() -> None:
    """Lets training go on after a failed step, in a program in which several threads train.

    A step that fails on one device fails as a whole: from then on its calls end, and whatever waits
    for a result, saves, calls a layer in training or steps a Trainer raises its first error, in
    every thread. Where only one living thread has called layers in training, raising the error
    recovers. Otherwise others may still be in the step: stop them, and call this. It waits until
    nothing of the step is left.

    What may hold a part of the failed step: results other than the one that raised the error;
    running statistics, which may have followed the batch on some devices; and weights, if the
    Trainer's step was called. So continue from the last checkpoint, or from values that you kept.

    Raises
    ------
    RuntimeError
        If layers share statistics with other processes, which cannot recover: start the job again.
    """
    if _layer.spans_processes():
        raise RuntimeError(
            "recover was called where layers share statistics with other processes, which cannot "
            "know what this one leaves out: start the job again, from its last checkpoint."
        )
    with _lock:
        _recover()


def _recover() -> None:
    """Waits until nothing of the step is left, and forgets it."""
    global _raised, _last, _is_unheard
    _last = _raised or (mxnet.MXNetError(""), failure())
    # It ends what is still queued, and then clears the errors of all arrays.
    error_of(wait_all())
    _library.gluon_syncbn_recover()
    _raised, _is_unheard = None, False


def after_fork() -> None:
    """In the child, where no call is under way."""
    global _raised, _lock, _callers_lock, _own, _has_trained
    _raised, _own, _has_trained = None, threading.local(), False
    _lock, _callers_lock = threading.RLock(), threading.Lock()
    _threads.clear()
    _library.gluon_syncbn_after_fork()


def _may_recover() -> bool:
    """Whether this thread alone can have calls under way."""
    if _layer.spans_processes():
        return _is_unheard
    with _callers_lock:
        living = {thread for thread in _threads if thread.is_alive()}
    thread = threading.current_thread()
    return living <= {thread} and (bool(living) or thread is threading.main_thread())


def failure() -> str:
    """Why the step has failed, or ""."""
    return decoded(_library.gluon_syncbn_failure())


def unraised() -> str:
    """The same, or "" if it has been raised."""
    return "" if _raised else failure()


def error_of(status: int) -> Exception | None:
    try:
        mxnet.base.check_call(status)
    except mxnet.MXNetError as error:
        return error
    return None


def wait_for_all() -> str:
    """Waits for MXNet. Returns the error that nothing had waited for, or ""."""
    text = str(error_of(wait_all()) or "")
    return unraised() or text


def wait_unheard(when: str) -> None:
    """Waits for MXNet `when` nobody would hear an error, and MXNet raises none twice: the next wait
    raises it."""
    global _is_unheard
    with waits.noted(what=f"the wait {when}"):
        text = wait_for_all()
    if text and not _has_failed.value:
        _library.gluon_syncbn_fail(encoded(f"A step had failed {when}. {text}"))
        _is_unheard = True


def give_up(error: BaseException) -> None:
    """This thread leaves a step because of an error, which the user sees. The step has failed if a
    call waits for one that the thread has not made."""
    layers = _own_layers()
    if layers and not _has_failed.value:
        _layer.settle(layers, f"The step was given up: {type(error).__name__}: {text_of(error)}")
    if _has_failed.value and _may_recover():
        _recover()


def finish_calls(why: str) -> None:
    """Waits for all calls so far. The step fails if one waits for a call that this thread has not
    made."""
    _layer.settle(_own_layers(), why)
    mxnet.nd.waitall()


def leaving(leave: Callable[..., Any]) -> Callable[..., None]:
    """Wraps ``__exit__`` of the scopes of ``autograd``."""

    @functools.wraps(leave)
    def leave_and_give_up(scope: Any, kind: Any, error: BaseException | None, trace: Any) -> None:
        leave(scope, kind, error, trace)
        if error is not None and scope._enter_is_record:
            give_up(error)

    return leave_and_give_up


def _settle_all() -> None:
    # An error in inference marks the running statistics of a layer too.
    trained = [each for each in _layers_of(callers()) if len(each.devices) > 1]
    _layer.settle(trained, after_error=True)


def waiting(
    function: Callable[..., Any], arrays: Callable[..., Any], then_writes: bool = False
) -> Callable[..., Any]:
    """Wraps one of MXNet's C functions by which Python waits. arrays(*arguments): for which arrays;
    None: it does not wait. then_writes: it writes a file behind the wait."""

    @functools.wraps(function)
    def wait(*arguments: Any) -> Any:
        waited_for = arrays(*arguments)
        if waited_for is None or _layer.is_of_mxnet(threading.current_thread()):
            return function(*arguments)
        try:
            with waits.noted():
                check_step()
                # Looked at first: once MXNet has raised an error, what is still queued would run,
                # with what was never written. Where other processes take part, nothing goes on
                # after one.
                may_fail = _has_trained and not _layer.spans_processes()
                if may_fail and any([_holds_error(array) for array in waited_for]):
                    _settle_all()
                    check_step()
                if then_writes:
                    status = next(filter(None, map(_wait_to_read, waited_for)), 0)
                else:
                    status = function(*arguments)
            if then_writes and status == 0:
                status = function(*arguments)
            error = error_of(status) if status else None
            if error:
                waits.note_failure()
            # MXNet raises the first error of several.
            if error and may_fail and not waited_for:
                _settle_all()
            if _has_failed.value:
                raise_failure(error)
            return status
        except KeyboardInterrupt:
            # That is what the user sees of a step that was interrupted.
            if _has_failed.value and _may_recover():
                _recover()
            raise

    return wait
