"""The runner: what a script finds and how it ends, without the launcher."""

import os
import signal
import time

import programs
import pytest
from mxnet_launch import runner
from launched import ENDED_SECONDS


def run(path, *arguments, **options):
    """(the ended runner, the exit code that it reported)."""
    reports, report_to = os.pipe()
    with open(reports) as reports:
        with open(report_to, "wb"):
            command = [runner.__file__, "run", f"{report_to}:5", str(path), *arguments]
            done = programs.run(command, pass_fds=[report_to], **options)
        report = [line.split() for line in reports]
    assert [index for index, _ in report] == ["5"] * len(report)
    assert len(report) < 2
    return done, int(report[0][1]) if report else None


@pytest.mark.parametrize(
    "text, seconds", [("2.5", 2.5), ("2e6", 1e6), ("inf", 300), ("0", 300), ("long", 300)]
)
def test_the_time_to_wait(text, seconds):
    assert runner.timeout_of({"GLUON_SYNCBN_TIMEOUT": text}) == seconds


@pytest.fixture
def run_text(tmp_path):
    """`run` for the text of a script."""

    def run_text(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return run(path)

    return run_text


ENDINGS = {
    "in a function": ("def f():\n    1 / 0\ntry:\n    f()\nexcept ArithmeticError:\n    f()", 1),
    "a syntax error": ("print('never')\nif True print(3)", 1),
    "a hook that raises": ("sys.excepthook = lambda *_: 1 / 0\nraise ValueError", 1),
    "a text": ("sys.exit('what was wrong')", 1),
    "none": ("sys.exit()", 0),
    "a large code": ("sys.exit(259)", 3),
    "below zero": ("sys.exit(-1)", 255),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", 130),
    "the end": ("", 0),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_with_python(ending, tmp_path):
    body, code = ENDINGS[ending]
    path = tmp_path / "script with space.py"
    text = "import atexit, os, sys\natexit.register(print, 'a hook')\nprint('buffered')\n" + body
    path.write_text(text)
    done, reported = run(path)
    plain = programs.run([path])
    assert done.returncode == code and reported == code
    assert plain.returncode == (-signal.SIGINT if code == 130 else code)
    assert done.stdout == plain.stdout
    if ending == "a hook that raises":
        # Python prints both errors; here the hook is the user's and had its turn.
        assert plain.stderr.startswith("Error in sys.excepthook")
    else:
        assert done.stderr == plain.stderr


def test_a_script_finds_what_python_gives_it(tmp_path):
    path = tmp_path / "link.py"
    real = tmp_path / "elsewhere" / "script.py"
    real.parent.mkdir()
    path.symlink_to(real)
    real.write_text(
        "import json, os, pickle, sys, threading\n"
        "class Own: pass\n"
        "def later():\n"
        "    threading.main_thread().join()\n"
        "    pickle.dumps(Own())\n"
        "    print('pickled')\n"
        "threading.Thread(target=later).start()\n"
        "names = '__name__', '__package__', '__doc__', '__spec__', '__cached__'\n"
        "print(sys.path, sys.argv, [globals().get(name) for name in names], __builtins__)\n"
        "print(os.path.abspath(__file__))\n"  # Relative before Python 3.9.
        "print(sorted(globals()), type(__loader__), 'mxnet' in sys.modules)\n"
    )
    done, _ = run("link.py", "-x", cwd=tmp_path)
    plain = programs.run(["link.py", "-x"], cwd=tmp_path)
    assert done.stdout == plain.stdout and "pickled" in done.stdout, done.stderr


@pytest.mark.long
def test_exit_hooks_find_the_exit_code(run_text):
    """They report it to other processes. It stays that of the process."""
    done, reported = run_text("""
import sys
from gluon_syncbn.supervision import exit
def leave(failure):
    print(failure)
    exit.abandon()
exit.at_exit(leave)
sys.exit(3)
""")
    assert (done.returncode, done.stdout, reported) == (3, "SystemExit: 3\n", 3), done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_of_a_script(method, run_text):
    done, _ = run_text(f"""
import multiprocessing
def square(x):
    return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        print(pool.map(square, range(4)))
""")
    assert done.stdout == "[0, 1, 4, 9]\n", done.stderr


def test_a_hook_that_waits_indefinitely_is_cut_off(run_text):
    begin = time.monotonic()
    done, _ = run_text("import atexit, time\natexit.register(time.sleep, 1000)\nraise ValueError")
    assert done.returncode == 1 and "ValueError" in done.stderr
    assert time.monotonic() - begin < ENDED_SECONDS


def test_a_forked_child_that_fails_is_not_the_worker(run_text):
    done, reported = run_text("""
import os, sys
child = os.fork()
if not child:
    raise ValueError
os._exit(os.WEXITSTATUS(os.waitpid(child, 0)[1]) + 1)
""")
    assert (done.returncode, reported) == (2, None)


def test_a_script_that_may_not_write_to_files(run_text):
    done, reported = run_text("""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
""")
    assert (done.returncode, reported) == (0, 0), done.stderr


def test_a_script_that_closes_all_files(run_text, tmp_path):
    """What it opens then may get the number of the pipe: nothing is written there."""
    done, reported = run_text(f"""
import os
os.closerange(3, 100)
files = [open({str(tmp_path / "own")!r}, "ab") for _ in range(97)]
""")
    assert (done.returncode, reported) == (0, None), done.stderr
    assert (tmp_path / "own").read_bytes() == b""
