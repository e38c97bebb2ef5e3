"""python -m gluon_syncbn.launch: what it starts, prints and ends. `scripts` are the workers'."""

import contextlib
import importlib.metadata
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
import uuid

import psutil
import pytest

from gluon_syncbn.launch import __main__ as launch
from gluon_syncbn.launch import runner
from gluon_syncbn.launch.cluster import LaunchError, Cluster, Position, find_position, first_host
from gluon_syncbn.launch.processes import Launch

# What the launcher promises, and what a slow machine may need to come so far.
ENDED_SECONDS = 10
STARTED_SECONDS = 90

TRAIN = """
import json, os, signal, sys, time
import mxnet as mx

kv = mx.kv.create("dist_sync")
kv.init(0, mx.nd.zeros(2))

def step():
    x = mx.nd.ones(2) * (kv.rank + 1)
    kv.pushpull(0, x, out=x)
    return x.asnumpy().tolist()

step()
"""

needs_horovod = pytest.mark.skipif(
    not any(d.metadata["Name"] == "horovod" for d in importlib.metadata.distributions()),
    reason="Horovod is not installed: see build/horovod.log",
)


class Started:
    """A launcher, with its output as it comes. What it starts carries a mark of its own."""

    def __init__(self, arguments, folder, environment):
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gluon_syncbn.launch", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "GLUON_SYNCBN_TEST": self.mark, **environment},
            start_new_session=True,
        )
        self.output, self.errors = [], []
        self._readers = [
            threading.Thread(target=lambda s=stream, t=lines: t.extend(iter(s.readline, "")))
            for stream, lines in (
                (self.process.stdout, self.output),
                (self.process.stderr, self.errors),
            )
        ]
        for reader in self._readers:
            reader.start()

    def processes(self):
        """Those that run still, except the launcher."""
        return [
            process
            for process in psutil.process_iter()
            if process.pid != self.process.pid and self._is_ours(process)
        ]

    def _is_ours(self, process):
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            return (
                environment.get("GLUON_SYNCBN_TEST") == self.mark
                and process.status() != psutil.STATUS_ZOMBIE
            )
        return False

    def find(self, **variables):
        """The process of the launch, not a child of it, that has these variables."""
        processes = self.processes()
        numbers = {process.pid for process in processes}
        (found,) = (
            process
            for process in processes
            if process.ppid() not in numbers
            and variables.items() <= process.environ().items()
            and process.cmdline()[2:3] != ["-S"]
        )
        return found

    def wait_for(self, text, count=1):
        """Waits until `count` lines of the output hold the text. Returns them."""
        deadline = time.monotonic() + STARTED_SECONDS
        while time.monotonic() < deadline:
            found = [line for line in list(self.output) if text in line]
            if len(found) >= count:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        pytest.fail(f"no {text!r} in {self.output} {self.errors}")

    def end(self, seconds=STARTED_SECONDS):
        """Waits for the end of the launcher, and that nothing of it is left. Returns its code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher did not end: {self.output} {self.errors}")
        for reader in self._readers:
            reader.join(10)
        assert self.processes() == []
        return code

    def clean(self):
        for process in [self.process, *self.processes()]:
            with contextlib.suppress(psutil.Error, OSError):
                process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()

    @property
    def text(self):
        return "".join(self.errors)


@pytest.fixture
def start(tmp_path):
    started = []

    def start(script, *options, arguments=(), **environment):
        path = tmp_path / f"script{len(started)}.py"
        path.write_text(textwrap.dedent(script))
        started.append(Started([*options, str(path), *arguments], tmp_path, environment))
        return started[-1]

    yield start
    for one in started:
        one.clean()


def part(start, role, port, script, *options, **environment):
    """A launcher of one part of a KVStore of one worker and one server."""
    dmlc = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_ROLE": role}
    dmlc.update(DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1", **environment)
    return start(script, "--from-env", *options, **dmlc)


def alone(start, script, *options, **environment):
    """A launcher of one worker and nothing else, which starts fastest."""
    return part(start, "worker", 1, script, *options, **environment)


# What the workers are.

ARGUMENTS = ["--", "--epochs", "3", "with space", "-n", "7", "--", "--engine", "", "--help"]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of four workers of one launch told of itself, by the rank before its lines."""
    folder = tmp_path_factory.mktemp("told")
    (folder / "beside.py").write_text("")
    script = TRAIN + textwrap.dedent("""
        import beside
        names = "OMP_NUM_THREADS", "GLUON_SYNCBN_RANK", "GLUON_SYNCBN_SIZE"
        names += "GLUON_SYNCBN_LOCAL_RANK",
        told = {name: os.environ[name] for name in names}
        told.update(rank=kv.rank, sum=step(), argv=sys.argv, stdin=sys.stdin.read())
        for part in range(200):
            print("x" * 5000)
        print("a warning", file=sys.stderr)
        os.write(1, b"\\xff\\r\\nprogress 1\\rprogress 2")
        print()
        print("told", json.dumps(told))
        kv._barrier()
        os.write(1, b"no end of line")
    """)
    (folder / "script.py").write_text(script)
    plain = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "gluon_syncbn.launch", "-n", "4", "--", "script.py", *ARGUMENTS],
        capture_output=True,
        cwd=folder,
        env=plain,
        timeout=STARTED_SECONDS,
        input=b"for nobody",
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done, time.monotonic() - begin


def by_rank(output):
    """{rank: lines}, of lines that begin with [rank]."""
    lines = {}
    for line in output.decode(errors="replace").splitlines():
        rank, text = re.fullmatch(r"\[([0-3])\] (.*)", line).groups()
        lines.setdefault(int(rank), []).append(text)
    return lines


def stories(told):
    return {
        rank: json.loads(next(line[5:] for line in lines if line.startswith("told ")))
        for rank, lines in by_rank(told[0].stdout).items()
    }


def test_the_rank_before_a_line_is_that_of_the_kvstore(told):
    for rank, story in stories(told).items():
        assert story["rank"] == rank
        assert story["GLUON_SYNCBN_RANK"] == story["GLUON_SYNCBN_LOCAL_RANK"] == str(rank)
        assert story["GLUON_SYNCBN_SIZE"] == "4"
        assert story["sum"] == [10, 10]


def test_arguments_and_standard_input(told):
    for story in stories(told).values():
        assert story["argv"] == ["script.py", *ARGUMENTS]
        assert story["stdin"] == ""


def test_the_cores_are_shared_out(told):
    cores = len(os.sched_getaffinity(0))
    for story in stories(told).values():
        assert story["OMP_NUM_THREADS"] == str(max(1, cores // 4))


def test_lines_of_different_workers_are_not_mixed(told):
    lines = by_rank(told[0].stdout)
    assert sorted(lines) == [0, 1, 2, 3]
    for own in lines.values():
        assert own[:200] == ["x" * 5000] * 200
        assert own[200:203] == ["\ufffd", "progress 1", "progress 2"]
        assert own[204:] == ["no end of line"]
    errors = by_rank(told[0].stderr)
    assert errors == dict.fromkeys(range(4), ["a warning"])


def test_scheduler_and_server_end_with_the_workers(told):
    # Were they waited for in vain, this would print nothing, but take its time.
    assert told[1] < STARTED_SECONDS / 2


def test_a_module_with_its_package(start, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "near.py").write_text("value = 5")
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nfrom .near import value\nprint(value, __name__, sys.argv[1:], flush=True)"
    )
    dmlc = {name: "1" for name in ("URI", "PORT")}
    environment = {f"DMLC_PS_ROOT_{name}": value for name, value in dmlc.items()}
    environment.update(DMLC_ROLE="worker", DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1")
    started = Started(["--from-env", "-m", "package", "-m", "x"], tmp_path, environment)
    try:
        assert started.end() == 0, started.text
        assert started.output == ["[worker] 5 __main__ ['-m', 'x']\n"]
    finally:
        started.clean()


# What a script finds, run by the launcher's runner without the launcher.


def run(path, *arguments, **options):
    """(what the runner does, what it announced)."""
    news, write = os.pipe()
    with os.fdopen(news) as news:
        try:
            done = subprocess.run(
                [sys.executable, runner.__file__, "run", str(write)]
                + [str(path), *arguments],
                capture_output=True,
                text=True,
                pass_fds=[write],
                timeout=60,
                **options,
            )
        finally:
            os.close(write)
        return done, [int(line.split()[1]) for line in news]


ENDINGS = {
    "an exception": ("raise ValueError('bad')", 1),
    "in a function": ("def f():\n    1 / 0\ntry:\n    f()\nexcept ArithmeticError:\n    f()", 1),
    "a syntax error": ("print('never')\nif True print(3)", 1),
    "a hook that raises": ("sys.excepthook = lambda *_: 1 / 0\nraise ValueError", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "a text": ("sys.exit('what was wrong')", 1),
    "none": ("sys.exit()", 0),
    "zero": ("sys.exit(0)", 0),
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
    done, announced = run(path)
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == code and announced == ([code] if code else [])
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
        "import json, pickle, sys, threading\n"
        "class Own: pass\n"
        "def later():\n"
        "    threading.main_thread().join()\n"
        "    pickle.dumps(Own())\n"
        "    print('pickled')\n"
        "threading.Thread(target=later).start()\n"
        "names = '__name__', '__file__', '__package__', '__doc__', '__spec__', '__cached__'\n"
        "print(sys.path, sys.argv, [globals().get(name) for name in names], __builtins__)\n"
        "print(sorted(globals()), type(__loader__), 'mxnet' in sys.modules)\n"
    )
    done, _ = run("link.py", "-x", cwd=tmp_path)
    plain = subprocess.run(
        [sys.executable, "link.py", "-x"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == plain.stdout and "pickled" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "line, failure, code",
    [("sys.exit(3)", "SystemExit: 3", 3), ("sys.exit('bad')", "SystemExit: bad", 1)],
)
def test_other_processes_are_told_of_an_exit_code(line, failure, code, tmp_path):
    """And it stays that of the process."""
    path = tmp_path / "script.py"
    path.write_text(f"""
import sys
from gluon_syncbn.native import shutdown
def leave(failure):
    print(failure)
    shutdown.abandon()
shutdown.at_exit(leave)
{line}
""")
    done, announced = run(path)
    assert (done.returncode, done.stdout, announced) == (code, f"{failure}\n", [code])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_of_a_script(method, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(f"""
import multiprocessing
def square(x):
    return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        print(pool.map(square, range(4)))
""")
    done, _ = run(path)
    assert done.stdout == "[0, 1, 4, 9]\n", done.stderr


def test_a_hook_that_waits_for_ever_is_cut_off(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import atexit, time\natexit.register(time.sleep, 1000)\nraise ValueError")
    begin = time.monotonic()
    done, _ = run(path)
    assert done.returncode == 1 and "ValueError" in done.stderr
    assert time.monotonic() - begin < ENDED_SECONDS


def test_a_forked_child_that_fails_is_not_the_worker(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("""
import os, sys
child = os.fork()
if not child:
    raise ValueError
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    done, announced = run(path)
    assert (done.returncode, done.stdout, announced) == (0, "1\n", [])


# How a launch ends.

DEATHS = {
    "sys.exit": ("sys.exit(3)", 3, "worker 1 (process {}) ended with exit code 3"),
    "an exception": ("raise ValueError('bad')", 1, "worker 1 (process {}) ended with exit code 1"),
    "SIGKILL": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        128 + signal.SIGKILL,
        "worker 1 (process {}) was killed by SIGKILL (by the kernel, if memory ran out)",
    ),
}


def test_who_was_killed_is_the_cause():
    """The others' connections to it end, and they fail, before its end can be seen."""

    def child(*codes):
        return types.SimpleNamespace(code=iter(codes).__next__)

    failed, running, killed = child(1, 1), child(None, None), child(-signal.SIGKILL)
    launched = Launch([], [], 1, None)
    launched._children = [failed, running, killed]
    assert launched._cause([failed]) is killed
    launched._children = [failed, running]
    assert launched._cause([failed]) is failed


@pytest.mark.parametrize("death", DEATHS)
def test_a_worker_dies_and_the_others_end(death, start):
    line, code, sentence = DEATHS[death]
    started = start(
        TRAIN
        + f"""
if kv.rank == 1:
    for number in range(30):
        print("line", number, flush=True)
    print("dies", os.getpid(), time.time(), flush=True)
    {line}
while True:
    step()
""",
        "-n",
        "3",
    )
    number, when = started.wait_for("dies")[0].split()[2:]
    assert started.end() == code, started.text
    assert time.time() - float(when) < ENDED_SECONDS
    assert f"{sentence.format(number)}, so all others are ended." in started.text
    tail = started.text.partition("Its last lines:\n")[2].splitlines()
    assert 15 < len(tail) <= 20 and f"    dies {number} {when}" in tail and "    line 29" in tail
    assert ("    ValueError: bad" in tail) == (death == "an exception")


def test_a_worker_of_a_group_ends_with_its_exit_code(start):
    script = """
import numpy
import gluon_syncbn as sbn
reducer = sbn.distributed.KVStoreReducer(kv)
reducer.all_reduce("sum", numpy.zeros(1))
if kv.rank == 1:
    sys.exit(3)
time.sleep(1000)
"""
    started = start(TRAIN + script, "-n", "2")
    assert started.end() == 3, started.text
    assert "ended with exit code 3, so all others are ended. It had printed no" in started.text


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_a_part_of_the_kvstore_dies_and_all_end(role, start):
    started = start(TRAIN + "print('trains')\nwhile True:\n    step()\n", "-n", "2")
    started.wait_for("trains", 2)
    found = started.find(DMLC_ROLE=role)
    begin = time.monotonic()
    found.kill()
    assert started.end() == 128 + signal.SIGKILL, started.text
    assert time.monotonic() - begin < ENDED_SECONDS
    name = "server 0" if role == "server" else role
    assert f"{name} (process {found.pid}) was killed by SIGKILL" in started.text


def test_launchers_that_dmlc_gave_their_parts(start):
    """MXNet serves in whatever process imports it under such a role: that must not be ours."""
    script = TRAIN + "print('trains')\nwhile True:\n    step()\n"
    with launch._free_port() as port:
        parts = {
            role: part(start, role, port, script) for role in ("scheduler", "server", "worker")
        }
        parts["worker"].wait_for("[worker] trains")
    server = parts["server"].find(DMLC_ROLE="server")
    server.kill()
    assert parts["server"].end() == 128 + signal.SIGKILL
    assert f"server (process {server.pid}) was killed by SIGKILL" in parts["server"].text


def test_a_scheduler_that_cannot_serve(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        started = part(start, "scheduler", taken.getsockname()[1], "")
        assert started.end() == 1
    assert "scheduler (process" in started.text and "bind failed" in started.text


def test_without_mxnet(start, tmp_path):
    (tmp_path / "mxnet.py").write_text("raise ImportError('no', name='mxnet')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = start("import time; time.sleep(1000)", "-n", "1", PYTHONPATH=path)
    assert started.end() == 1
    assert re.search(r"(scheduler|server 0) \(process \d+\) ended with exit code 1", started.text)
    assert started.text.rstrip().endswith(
        "mxnet-cu112 needs the CUDA 11 libraries and an NVIDIA driver."
    )
    assert "Traceback" not in started.text


@pytest.mark.parametrize("killed", ["launcher", "worker"])
def test_workers_of_data_loaders_end_too(killed, start):
    started = start(
        TRAIN
        + """
import numpy as np
dataset = mx.gluon.data.ArrayDataset(np.ones((64, 2), "float32"))
loader = mx.gluon.data.DataLoader(dataset, batch_size=1, num_workers=2)
for batch in loader:
    pass
left = os.fork()  # One that left the session of its worker.
if not left:
    os.setsid()
    time.sleep(1000)
print("trains", flush=True)
while True:
    step()
""",
        "-n",
        "2",
    )
    started.wait_for("trains", 2)
    running = started.processes()
    # The guard, the scheduler, the server and, for each worker, two loaders and the one that left.
    assert len(running) >= 3 + 2 * 4
    begin = time.monotonic()
    if killed == "launcher":
        started.process.kill()
        while started.processes():
            assert time.monotonic() - begin < ENDED_SECONDS
            time.sleep(0.02)
    else:
        started.find(GLUON_SYNCBN_RANK="1").kill()
        assert started.end() == 128 + signal.SIGKILL, started.text
    assert time.monotonic() - begin < ENDED_SECONDS


def test_a_worker_ends_when_launcher_and_guard_are_killed(start):
    started = alone(start, "import time\nprint('ready')\ntime.sleep(1000)")
    started.wait_for("ready")
    guard = next(p for p in started.processes() if p.cmdline()[2] == "-S")
    guard.kill()
    begin = time.monotonic()
    started.process.kill()
    while started.processes():
        assert time.monotonic() - begin < ENDED_SECONDS
        time.sleep(0.02)


def test_what_the_workers_never_called_is_ended(start):
    started = start("print('nothing to train')", "-n", "2")
    assert started.end() == 0, started.text
    assert sorted(started.output) == ["[0] nothing to train\n", "[1] nothing to train\n"]


def test_ctrl_c_while_the_workers_wait_inside_mxnet(start):
    """One is interrupted, and what the others wait for does not come any more."""
    script = """
if kv.rank == 1:
    print("sleeps", flush=True)
    time.sleep(1000)
step()
"""
    started = start(TRAIN + script, "-n", "2", "--grace", "1")
    started.wait_for("sleeps")
    begin = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    assert started.end() == 128 + signal.SIGINT
    assert time.monotonic() - begin < ENDED_SECONDS
    assert "SIGINT is passed on" in started.text and "[1] KeyboardInterrupt" in started.text


HANDLER = """
import signal, sys, time
def handle(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    {then}
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, handle)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    "sent, passed, code",
    [("SIGINT", "SIGINT", 5), ("SIGTERM", "SIGTERM", 0), ("SIGHUP", "SIGTERM", 5)],
)
def test_a_signal_is_passed_on(sent, passed, code, start):
    """A worker that handles it and ends well makes the launch end well."""
    started = alone(start, HANDLER.format(then=f"sys.exit({code})"))
    started.wait_for("ready")
    started.process.send_signal(signal.Signals[sent])
    assert started.end() == (128 + signal.Signals[sent] if code else 0), started.text
    assert f"[worker] got {passed}\n" in started.output


def test_a_worker_that_heeds_no_signal_is_killed(start):
    started = alone(start, HANDLER.format(then="pass"), "--grace", "0.5")
    started.wait_for("ready")
    begin = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == 128 + signal.SIGTERM
    assert time.monotonic() - begin < ENDED_SECONDS


def test_a_second_ctrl_c_kills(start):
    started = alone(start, HANDLER.format(then="pass"), "--grace", "1000")
    started.wait_for("ready")
    # Sent twice at a time, as `timeout` does, it is one.
    started.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    started.process.send_signal(signal.SIGINT)
    started.wait_for("got SIGINT")
    time.sleep(0.6)
    assert started.process.poll() is None
    begin = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    assert started.end() == 128 + signal.SIGINT
    assert time.monotonic() - begin < 3


def test_nobody_reads_the_output(tmp_path):
    """As with `... | head -n 1`."""
    path = tmp_path / "script.py"
    path.write_text("import time\nwhile True:\n    print('line')\n    time.sleep(0.01)")
    process = subprocess.Popen(
        ["sh", "-c", redirected(path)], stdout=subprocess.PIPE, env=ALONE, text=True
    )
    try:
        assert process.stdout.readline() == "[worker] line\n"
        process.stdout.close()
        assert process.wait(STARTED_SECONDS) == 128 + signal.SIGPIPE
    finally:
        process.kill()


def redirected(path, how=""):
    """A shell's line that launches the script."""
    return f"exec {sys.executable} -m gluon_syncbn.launch --from-env {path} {how}"


# One worker and nothing else. The launcher's own output is buffered, as it is for most.
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
ALONE.update(DMLC_ROLE="worker", DMLC_PS_ROOT_URI="x", DMLC_PS_ROOT_PORT="1")
ALONE.update(DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1")


def launch_redirected(path, how):
    return subprocess.run(
        ["sh", "-c", redirected(path, how)],
        capture_output=True,
        env=ALONE,
        text=True,
        timeout=STARTED_SECONDS,
    )


@pytest.mark.parametrize("how", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("code", [0, 3])
def test_closed_output(how, code, tmp_path):
    """More lines than a pipe holds."""
    path = tmp_path / "script.py"
    path.write_text(f"""
import sys
for number in range(5000):
    print("line", number, "x" * 50)
    print("warning", number, file=sys.stderr)
sys.exit({code})
""")
    done = launch_redirected(path, how)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("\n") == (5000 if how == "2>&-" else 0)
    if how == ">&-":
        assert done.stderr.count("[worker] warning") == 5000
        assert done.stderr.count("launch: ") == (code > 0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("body", ["print('one line')", "while True: print('line')"])
def test_output_that_cannot_be_written(body, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(body)
    done = launch_redirected(path, "> /dev/full")
    assert done.returncode == 1
    assert done.stderr == (
        "gluon_syncbn.launch: the output of worker cannot be written (No space left on device), "
        "so all processes are ended.\n"
    )
    # Nobody can be told.
    assert launch_redirected(path, "> /dev/full 2> /dev/full").returncode == 1


# What is refused.


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["-n", "2"], "the script is missing"),
        (["script.py"], "the number of workers is missing"),
        (["-n", "0", "script.py"], "-n is 0: give a number of workers from 1 to 9999."),
        (["-n", "1" + "0" * 21, "script.py"], "-n is 1000000000000000000000: give a number"),
        (["-n", "two", "script.py"], "argument -n: invalid int value: 'two'"),
        (["-n", "1", "--servers", "0", "script.py"], "--servers is 0"),
        (["-n", "1", "--engine", "mpi", "script.py"], "argument --engine: invalid choice: 'mpi'"),
        (["-n", "1", "no such.py"], "there is no script no such.py."),
        (["-n", "1", "--port", "65535", "script.py"], "--port is 65535"),
        (["-n", "1", "--grace", "nan", "script.py"], "--grace is nan: give a number of seconds"),
        (["-n", "1", "--wait", "-1", "script.py"], "--wait is -1: give a number of seconds"),
        (["--from-env", "script.py"], "--from-env finds no DMLC_ROLE"),
    ],
)
def test_wrong_arguments(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    for name in ("DMLC_ROLE", "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as end:
        launch.main(arguments)
    output, errors = capsys.readouterr()
    assert end.value.code == 2 and not output
    assert errors.startswith(f"gluon_syncbn.launch: error: {sentence}")
    assert errors.count("\n") == 1 and errors.endswith("\n")


# A pipe that is left open is such a warning.
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_lines_go_to_a_stream_of_text_alone(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print('out ü'); print('err', file=sys.stderr)")
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        assert launch.main(["-n", "1", str(tmp_path / "script.py")]) == 0
    assert (output.getvalue(), errors.getvalue()) == ("[0] out ü\n", "[0] err\n")


def test_a_missing_horovod_is_told_with_how_to_install_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text("")
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(SystemExit) as end:
        launch.main(["-n", "2", "--engine", "horovod", str(tmp_path / "script.py")])
    errors = capsys.readouterr().err
    assert end.value.code == 2 and errors.count("\n") == 1
    assert "HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_MPI=1" in errors
    assert "pip install --no-build-isolation horovod==0.28.1" in errors


# Horovod.

ALL_REDUCE = """
import json, os, sys
import mxnet as mx
import horovod.mxnet as hvd
hvd.init()
def step():
    x = mx.nd.ones(2, dtype="float64") * (hvd.rank() + 1)
    return hvd.allreduce(x, average=False, name="x").asnumpy().tolist()
print(json.dumps([os.environ["GLUON_SYNCBN_RANK"], hvd.rank(), hvd.size(), hvd.local_rank(),
    hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), step()]), flush=True)
"""


@needs_horovod
def test_a_worker_of_horovod_dies_and_is_named(start):
    """The others raise at once, so the one that was first has to be found."""
    script = ALL_REDUCE + "for number in range(10**6):\n    step()\n"
    script += "    if number == 20 and hvd.rank() == 1:\n        sys.exit(3)\n"
    started = start(script, "-n", "3", "--engine", "horovod")
    started.wait_for("6.0", 3)
    for rank in range(3):
        expected = json.dumps([str(rank), rank, 3, rank, 3, 0, 1, [6.0, 6.0]])
        assert f"[{rank}] {expected}\n" in started.output
    assert started.end() == 3, started.text
    assert re.search(r"launch: worker 1 \(process \d+\) ended with exit code 3", started.text)


@pytest.mark.parametrize("found, is_right", [("127.0.1.1", False), ("10.0.0.1", True)])
def test_horovod_needs_a_name_that_others_can_reach(found, is_right, monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: found)
    if is_right:
        launch._check_own_name("10.0.0.1")
    else:
        with pytest.raises(LaunchError, match="is 127.0.1.1 here: let /etc/hosts say 10.0.0.1"):
            launch._check_own_name("10.0.0.1")


# Several launchers.


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu3", "gpu3"),
        ("gpu3,gpu1", "gpu3"),
        ("gpu[03-05,9],login", "gpu03"),
        ("a[7,9-12]b,c", "a7b"),
        ("rack[2-3]node[01-16]", "rack2node01"),
        ("node-x.example.org,node-y", "node-x.example.org"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes, first):
    assert first_host(nodes) == first


def test_places(monkeypatch):
    monkeypatch.setenv("PATH", "")
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "20012"}
    slurm["SLURM_LAUNCH_NODE_IPADDR"] = "10.0.0.9"
    operator = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}
    assert find_position(slurm) == Position(3, 8, "10.0.0.9", 9091 + 24, "20012:8", "")
    slurm["SLURM_JOB_NODELIST"] = "gpu[03-05]"
    assert find_position(slurm).master == "gpu03"
    assert find_position({**operator, **slurm}, port=5).port == 5
    assert find_position({**operator, **slurm}).rank == 3
    assert find_position(operator) == Position(0, 2, "job-0", 23456, ":2", "")
    del operator["MASTER_PORT"]
    assert find_position({**operator, "DMLC_NODE_HOST": "10.0.0.1"}).port == 9091


@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({}, "finds no DMLC_ROLE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x': it must be a number."),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "has rank 2 of 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "65535"}, "MASTER_PORT is 65535: give a"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}, "MASTER_PORT is 0: give a port"),
    ],
)
def test_no_place(environment, sentence):
    with pytest.raises(LaunchError, match=re.escape(sentence)):
        find_position(environment)


def test_incomplete_variables_of_another_launcher(monkeypatch, tmp_path, capsys):
    (tmp_path / "script.py").write_text("")
    monkeypatch.setenv("DMLC_ROLE", "worker")
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")
    with pytest.raises(SystemExit):
        launch.main(["--from-env", str(tmp_path / "script.py")])
    assert "DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER, DMLC_NUM_SERVER missing" in capsys.readouterr().err


def free_port():
    """One of two free ports in a row. Below those that the system chooses from, and the KVStore's
    processes: 10000 to 49999."""
    while True:
        port = random.randrange(5000, 9999)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def start_several(start, script, size, *options, slurm):
    """`size` launchers with addresses of their own, in the least convenient order."""
    port = free_port()
    names = ("SLURM_PROCID", "SLURM_NTASKS") if slurm else ("RANK", "WORLD_SIZE")
    started = {}
    for rank in reversed(range(size)):
        environment = dict(zip(names, (str(rank), str(size))))
        environment.update(MASTER_ADDR="127.0.0.1", DMLC_NODE_HOST=f"127.0.0.{1 + rank}")
        started[rank] = start(
            script, "--from-env", "--port", str(port), "--wait", "60", *options, **environment
        )
    return started


def test_several_launchers_are_one_training(start):
    script = TRAIN + "print(kv.rank, os.environ['GLUON_SYNCBN_LOCAL_RANK'], step())"
    started = start_several(start, script, 2, "-n", "2", slurm=True)
    for rank, one in started.items():
        assert one.end() == 0, one.text
        workers = [2 * rank, 2 * rank + 1]
        assert sorted(one.output) == [f"[{w}] {w} {w % 2} [10.0, 10.0]\n" for w in workers]


@needs_horovod
def test_several_launchers_with_horovod(start):
    started = start_several(start, ALL_REDUCE, 2, "-n", "2", "--engine", "horovod", slurm=True)
    for rank, one in started.items():
        assert one.end() == 0, one.text
        for worker in (2 * rank, 2 * rank + 1):
            expected = [str(worker), worker, 4, worker % 2, 2, rank, 2, [10.0, 10.0]]
            assert f"[{worker}] {json.dumps(expected)}\n" in one.output


SLEEP = """
import os, sys, time
print("ready", flush=True)
while not os.path.exists(sys.argv[1] + os.environ["GLUON_SYNCBN_RANK"]):
    time.sleep(0.01)
sys.exit(7)
"""


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("kill", ["worker", "launcher"])
def test_one_fails_and_all_launchers_end(kill, victim, start, tmp_path):
    path = str(tmp_path / "die")
    script = SLEEP.replace("sys.argv[1]", repr(path))
    started = start_several(start, script, 3, slurm=False)
    for one in started.values():
        one.wait_for("ready")
    begin = time.monotonic()
    if kill == "worker":
        open(f"{path}{victim}", "w").close()
    else:
        started[victim].process.kill()
    for rank, one in started.items():
        if rank != victim:
            assert one.end() == 1, one.text
            sentence = (
                f"launcher {victim} ({socket.gethostname()}) says: worker {victim} (process "
                if kill == "worker"
                else f"the launcher of rank {victim} is gone"
            )
            if kill == "worker" or rank == 0 or victim == 0:
                assert sentence in one.text
            else:  # Rank 0 told it.
                assert f"the launcher of rank {victim} is gone" in one.text
    if kill == "worker":
        assert started[victim].end() == 7
    while started[victim].processes():
        assert time.monotonic() - begin < ENDED_SECONDS
        time.sleep(0.02)
    assert time.monotonic() - begin < ENDED_SECONDS


# Meetings of launchers, as threads of the test.


@contextlib.contextmanager
def met(places, terms, patience=5, delay=0):
    """What comes of each meeting: the Meeting, or the sentence of its error. All but the first come
    after `delay` seconds."""
    found = [None] * len(places)

    def one(index):
        time.sleep(delay if index else 0)
        try:
            found[index] = Cluster(places[index], *terms[index], patience)
        except LaunchError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    try:
        yield found
    finally:
        for meeting in found:
            if isinstance(meeting, Cluster):
                meeting.close()


def meet(*arguments, **options):
    with met(*arguments, **options) as found:
        return found


def place(rank, size, port, job="", host=""):
    return Position(rank, size, "127.0.0.1", port, job, host)


def test_launchers_of_one_machine_and_strangers_at_the_door():
    port = free_port()
    answers = []

    def knock():
        time.sleep(0.3)
        other = b'{"job": "other", "rank": 1, "host": "127.0.0.1"}\n'
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", other, b"\xff\n"):
            with socket.create_connection(("127.0.0.1", port + 1), timeout=5) as stranger:
                stranger.sendall(text)
                stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    answers.append(stranger.recv(100))

    stranger = threading.Thread(target=knock)
    stranger.start()
    places = [place(rank, 3, port) for rank in range(3)]
    found = meet(places, [(2, "kvstore")] * 3, delay=1)
    stranger.join()
    assert [meeting.hosts for meeting in found] == [["127.0.0.1"] * 6] * 3
    assert not any(answers)


@pytest.mark.parametrize(
    "terms, sentence",
    [
        ([(1, "kvstore"), (2, "kvstore")], "workers is 1 at rank 0 and 2 at rank 1"),
        ([(1, "kvstore"), (1, "horovod")], "engine is kvstore at rank 0 and horovod at rank 1"),
    ],
)
def test_launchers_with_different_options(terms, sentence):
    port = free_port()
    for text in meet([place(0, 2, port), place(1, 2, port)], terms):
        assert sentence in text


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rank_0_waits_for_all_others():
    """It has the scheduler and the servers."""
    port = free_port()
    with met([place(rank, 3, port) for rank in range(3)], [(1, "kvstore")] * 3) as (first, *others):
        first.report_done()
        assert first.failure is None and not first.everyone_done
        for other in others:
            assert not other.everyone_done and not first.everyone_done
            other.report_done()
            assert other.everyone_done
            other.close()  # As it ends.
            assert first.failure is None
        wait_until(lambda: first.failure is None and first.everyone_done)


def test_two_launchers_of_one_rank():
    port = free_port()
    places = [place(0, 3, port), place(1, 3, port), place(1, 3, port)]
    found = meet(places, [(1, "kvstore")] * 3)
    assert all("are of rank 1: each needs a rank of its own" in text for text in found)


def test_a_launcher_that_does_not_come():
    port = free_port()
    found = meet([place(0, 4, port), place(2, 4, port)], [(1, "kvstore")] * 2, patience=1)
    assert all("launchers 1, 3 of 4 did not come" in text for text in found)


def test_a_rank_0_that_does_not_come():
    (text,) = meet([place(1, 2, free_port())], [(1, "kvstore")], patience=1)
    assert "rank 0 did not answer at 127.0.0.1:" in text and "MASTER_ADDR" in text


def test_a_port_that_is_taken():
    port = free_port()
    with socket.create_server(("127.0.0.1", port + 1)):
        (text,) = meet([place(0, 2, port)], [(1, "kvstore")])
    assert f"port {port + 1} cannot be listened at" in text


def test_addresses_are_spelled_in_the_order_of_ranks():
    addresses = ["10.0.0.7", "1.2.3.4", "192.168.255.1", "127.0.0.1", "10.0.0.7"] * 30
    spelled = [launch.spell_address(address, rank) for rank, address in enumerate(addresses)]
    assert spelled == sorted(spelled, reverse=True)
    for address, text in zip(addresses, spelled):
        assert socket.gethostbyname(text.encode()) == address
