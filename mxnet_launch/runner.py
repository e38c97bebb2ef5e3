"""What the processes of `gluon_syncbn.launch` run: a script, a part of the KVStore, or the guard.

This file is started by its path and imports neither MXNet nor gluon_syncbn, so that a script finds
the interpreter as `python script.py` leaves it. Only `first`, a MODULE:FUNCTION that
is called before the script, may import both.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import importlib.machinery
import io
import math
import os
import runpy
import signal
import sys
import threading
import time
import types

TYPE_CHECKING = False  # As in `typing`, which a script may not need.
if TYPE_CHECKING:
    from typing import Any, Iterable, Mapping, NoReturn, Sequence

# An environment variable of all processes of a launch and their children: the launch's id.
LAUNCH_ID = "GLUON_SYNCBN_LAUNCH"
# Where this process, and none that it forks, reports the end of its script: a pipe, what fstat says
# of it, and the number under which the launcher knows the process.
_pipe: int | None = None
_pipe_status: os.stat_result | None = None
_index: int | None = None
_process = os.getpid()
# What a scheduler, systemd or Docker may send to all processes of a job: to end it, and to announce
# its end.
ENDS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
ANNOUNCEMENTS = signal.SIGUSR1, signal.SIGUSR2
EXIT_HOOKS_SECONDS = 2  # For the exit hooks of a worker that failed.
KILL_SECONDS = 5


def ignore(signals: Iterable[int]) -> None:
    for number in signals:
        signal.signal(number, signal.SIG_IGN)


def kill_launch(launch_id: str) -> None:
    """Kills the processes whose environment has `launch_id`, until none is left. Process groups,
    sessions and parents do not suffice, as a child may leave them."""
    deadline = time.monotonic() + KILL_SECONDS
    found = True
    while found and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # As without a free file descriptor: it looks again.
            pids = map(int, filter(str.isdigit, os.listdir("/proc")))
            found = any([_kill_of(launch_id, pid) for pid in pids])  # Of a list: all of them.
        time.sleep(0.02)


def _kill_of(launch_id: str, pid: int) -> bool:
    # It may be gone, or another user's.
    with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
        with open(f"/proc/{pid}/environ", "rb") as file:
            is_ours = launch_id.encode() in file.read()
        if is_ours:
            os.kill(pid, signal.SIGKILL)
        return is_ours
    return False


def timeout_of(environment: Mapping[str, str]) -> float:
    """The seconds that a process may wait for others, at most 10**6: what else waits for so long
    does not take more. Workers refuse what is no number above 0."""
    with contextlib.suppress(ValueError):
        seconds = float(environment.get("GLUON_SYNCBN_TIMEOUT", ""))
        if 0 < seconds < math.inf:
            return min(seconds, 10**6)
    return 300.0


def _report(code: int) -> None:
    """Reports that the script has ended with this exit code."""
    # The script may have closed all files and opened others.
    with contextlib.suppress(OSError):
        if _process == os.getpid() and os.path.samestat(os.fstat(_pipe), _pipe_status):
            os.write(_pipe, f"{_index} {code}\n".encode())


def _guard(launch_id: str) -> None:
    """Waits until the launcher is gone, for whatever reason, and kills what is left of the
    launch."""
    ignore(ENDS)
    sys.stdin.buffer.read()
    kill_launch(launch_id)


def _run(command: Sequence[str], first: str | None) -> None:
    """Runs the script or module, and reports how it ended. If it fails, the process exits at once.

    A worker that raises and then ends as Python does would never end: the destructor of MXNet's
    distributed KVStore waits for all other workers to reach their end too.
    """
    try:
        if first:
            # The package may not be installed, but started from its folder.
            sys.path.append(os.path.abspath(f"{__file__}/../.."))
            module, function = first.split(":")
            getattr(importlib.import_module(module), function)()
        if command[0] == "-m":
            sys.argv[:] = command[1:]
            _new_main()
            # What `python -m` calls, of which the types do not tell.
            runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        else:
            sys.argv[:] = command
            _run_script(os.path.abspath(command[0]))
    except SystemExit as end:  # While it is handled, exit hooks see it in sys.exc_info().
        code = 0 if end.code is None else end.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        if code & 0xFF:
            _leave(code & 0xFF)
    except BaseException as error:
        trace = _keep(error)
        try:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        finally:
            interrupted = isinstance(error, KeyboardInterrupt)
            _leave(128 + signal.SIGINT if interrupted else 1)
    _report(0)
    if _process == os.getpid():
        # Python gives a handler's signal back its default, which kills, before MXNet has ended.
        ignore(ANNOUNCEMENTS)
        prepare_shutdown()


class FreedKVStore:
    """What a KVStore becomes: it has no functions, and no destructor."""


def free_stores() -> None:
    """Frees MXNet's distributed stores, in which workers wait for each other, the server and the
    scheduler.

    Python would free a store later, or not at all where a thread still runs or something refers to
    it, and MXNet then aborts the process. It would also drop pending operations, such as a push for
    which other workers wait, so they end first.
    """
    library, kind = sys.modules["mxnet.base"]._LIB, sys.modules["mxnet.kvstore"].KVStore
    gc.unfreeze()
    stores = [each for each in gc.get_objects() if type(each) is kind and "dist" in each.type]
    for store in stores:
        store.__class__ = FreedKVStore
    library.MXNDArrayWaitAll()
    for store in stores:
        library.MXKVStoreFree(vars(store).pop("handle"))


def prepare_shutdown() -> None:
    """Has MXNet's exit hook free the stores first, if there is MXNet."""
    if "mxnet.kvstore" not in sys.modules:
        return
    library = sys.modules["mxnet.base"]._LIB
    shut_down = library.MXNotifyShutdown

    def free_first() -> Any:
        free_stores()
        return shut_down()

    library.MXNotifyShutdown = free_first


def _keep(error: BaseException) -> types.TracebackType | None:
    """Sets sys.last_value and the like, as Python does for the error that ends a script. Returns
    the traceback without the frames of this file."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    return trace


def _run_script(path: str) -> None:
    main: Any = _new_main()
    main.__file__ = path
    main.__cached__ = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _new_main() -> types.ModuleType:
    """The module `__main__` that the script is. It stays until the interpreter ends, as other
    threads, exit hooks and multiprocessing look for it there."""
    main: Any = types.ModuleType("__main__")
    main.__annotations__ = {}
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    return main


def _leave(code: int) -> NoReturn:
    """Ends this process without the destructors, after the exit hooks."""
    try:
        _flush()
        # First, as a hook such as Horovod's may make other workers fail too.
        _report(code)
        if _process == os.getpid():
            # A hook may wait for other workers indefinitely.
            timer = threading.Timer(EXIT_HOOKS_SECONDS, os._exit, (code,))
            timer.daemon = True
            timer.start()
            atexit._run_exitfuncs()
            _flush()
    finally:
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _serve() -> None:
    """Runs as the scheduler or a server, as the environment says, until the workers have ended.
    It ignores signals, as workers may still need it to save together; the launcher kills it after
    them."""
    ignore(ENDS)
    try:
        import mxnet  # noqa: F401  It serves inside this import, and ends the process there.
    except (ImportError, OSError, AttributeError) as error:  # Not MXNetError, which says enough.
        sys.exit(f"MXNet cannot be imported: {error}. python -m gluon_syncbn doctor says why.")


def _main(task: str, argument: str, *command: str) -> None:
    if task == "guard":
        return _guard(argument)
    first = command[1] if command[0] == "--first" else None
    command = command[2 if first else 0 :]
    global _pipe, _pipe_status, _index
    _pipe, _index = map(int, argument.split(":"))
    _pipe_status = os.fstat(_pipe)
    os.set_inheritable(_pipe, False)
    if not getattr(sys.flags, "safe_path", False):
        # A server needs it too: it unpickles the optimizer, whose class may be the user's.
        is_module = command[0] == "-m"
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    return _run(command, first) if task == "run" else _serve()


if __name__ == "__main__":
    _main(*sys.argv[1:])
