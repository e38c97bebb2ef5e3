"""What the processes of `gluon_syncbn.launch` run: a script, a part of the KVStore, or the guard.

This file is started by its path and imports neither MXNet nor gluon_syncbn, so a script finds the
interpreter as `python script.py` would hand it over.
"""

import atexit
import builtins
import contextlib
import ctypes
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import threading
import time
import types

# The environment variable that all processes of a launch carry, their children too: the identities
# of the launches that they belong to.
MARK = "GLUON_SYNCBN_LAUNCH"
# What the exit hooks of a worker that failed may take.
EXIT_HOOKS_SECONDS = 2

_PR_SET_PDEATHSIG = 1
_KILL_SECONDS = 5


def kill_marked(mark):
    """Kills every process that carries `mark`, until there is none.

    Groups and sessions would not do: a child may have left them, and it may outlive its parent.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        found = [pid for pid in os.listdir("/proc") if pid.isdigit() and _carries(pid, mark)]
        if not found:
            return
        for pid in found:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(0.02)


def _carries(pid, mark):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark.encode() in file.read()
    except OSError:  # Of another user, or gone.
        return False


def _guard(mark):
    """Waits until the launcher is gone, however it went, and then leaves nothing of it behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_marked(mark)


def _die_with(launcher):
    """Has the kernel kill this process when the launcher, its parent, is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGKILL)


def _run(news, *command):
    """Runs `command`, a script or "-m" and a module, then its arguments. Exits at once where it
    fails, and says so to the file descriptor `news`.

    A worker that raises and then ends as Python does would never end: the destructor of MXNet's
    distributed KVStore waits for all other workers to come to their end as well.
    """
    worker = os.getpid()
    news = int(news)
    os.set_inheritable(news, False)
    try:
        if command[0] == "-m":
            _run_module(command[1:])
        else:
            _run_script(command)
    except SystemExit as end:
        code = _exit_code(end.code)
        if code:
            # Python does not: there, an exit hook takes this for a good end.
            _note(end)
            _leave(code, worker, news)
    except BaseException as error:
        trace = _note(error)
        try:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        finally:
            interrupted = isinstance(error, KeyboardInterrupt)
            _leave(128 + signal.SIGINT if interrupted else 1, worker, news)


def _note(error):
    """Lets exit hooks find what the script died of, where Python puts it. Returns the traceback
    without the frames of this file, as Python itself would show it."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    return trace


def _run_script(command):
    path = os.path.abspath(command[0])
    sys.argv[:] = command
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    main = _new_main()
    main.__file__ = path
    main.__cached__ = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run_module(command):
    sys.argv[:] = command
    _set_first_path(os.getcwd())
    _new_main()
    runpy._run_module_as_main(command[0])  # What `python -m` calls.


def _new_main():
    """The module `__main__` that the script is. It stays until the interpreter ends, as other
    threads, exit hooks and multiprocessing look for it there."""
    main = types.ModuleType("__main__")
    main.__annotations__ = {}
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    return main


def _set_first_path(folder):
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _exit_code(code):
    """The exit code of `sys.exit(code)`, after the message that it may be."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _leave(code, worker, news):
    """Ends this process without the destructors, after the exit hooks."""
    try:
        _flush()
        if os.getpid() == worker:
            # First, as a hook such as Horovod's may make other workers fail too.
            with contextlib.suppress(OSError):
                os.write(news, b"%d %d\n" % (worker, code))
            # A hook may wait for what the other workers do not do any more.
            timer = threading.Timer(EXIT_HOOKS_SECONDS, os._exit, (code,))
            timer.daemon = True
            timer.start()
            atexit._run_exitfuncs()
            _flush()
    finally:
        os._exit(code)


def _flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass


def _serve(*command):
    """Is the scheduler or a server, as the environment says, until the workers have ended."""
    # A server unpickles the optimizer, whose class may lie beside the script.
    module = command[0] == "-m"
    _set_first_path(os.getcwd() if module else os.path.dirname(os.path.realpath(command[0])))
    try:
        import mxnet  # noqa: F401  It serves inside this import, and ends the process there.
    except (ImportError, OSError, AttributeError):  # Not MXNetError, of one that cannot serve.
        sys.path.append(
            os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        )
        try:
            import gluon_syncbn  # noqa: F401
        except ImportError as error:  # It says what is wrong with MXNet.
            sys.exit(str(error))
        raise


if __name__ == "__main__":
    role, first, *rest = sys.argv[1:]
    if role == "guard":
        _guard(first)
    else:
        _die_with(int(first))
        {"run": _run, "serve": _serve}[role](*rest)
