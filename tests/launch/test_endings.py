"""How a launch ends: a worker dies, or nobody takes the output."""

import os
import random
import re
import select
import shlex
import signal
import subprocess
import sys
import time

import pytest
from distributed_cluster import needs_horovod
from launched import ALL_REDUCE, ENDED_SECONDS, SLEEP, TRAIN, alone_here, free_port
from programs import STARTED_SECONDS, wait_until

# The last line of a worker, the launcher's exit code, and what it says.
DEATHS = {
    "an exception": ("raise ValueError('bad')", 1, "ended with exit code 1"),
    "an exit code": ("os._exit(7)", 7, "ended with exit code 7"),
    "a segmentation fault": ("ctypes.string_at(0)", 139, "was killed by SIGSEGV"),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", 143, "was killed by SIGTERM"),
    "SIGKILL": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        137,
        r"was killed by SIGKILL \(by the kernel, if memory ran out\)",
    ),
}


@pytest.mark.parametrize("death", DEATHS)
def test_who_ended_first_is_named(death, start):
    """Not worker 0, which fails because of it and reports that at once."""
    script = f"""
import ctypes, os, signal, socket, time
if os.environ["GLUON_SYNCBN_RANK"] == "0":
    with socket.create_server(("127.0.0.1", 0)) as server:
        with open("part", "w") as file:
            file.write(str(server.getsockname()[1]))
        os.rename("part", "port")
        server.accept()[0].recv(1)
        raise ValueError("the other is gone")
while not os.path.exists("port"):
    pass
connection = socket.create_connection(("127.0.0.1", int(open("port").read())))
print("dies", os.getpid(), time.time(), flush=True)
{DEATHS[death][0]}
"""
    launcher = start(script, "-n", "2")
    number, when = launcher.wait_for("dies")[0].split()[2:]
    _, code, sentence = DEATHS[death]
    assert launcher.end() == code, launcher.errors
    sentence = rf"worker 1 \(process {number}\) {sentence}, so all others are ended\."
    assert re.search(sentence, launcher.errors), launcher.errors
    assert time.time() - float(when) < ENDED_SECONDS
    tail = launcher.errors.partition("Last lines of worker 1:\n")[2].splitlines()
    tail = [line for line in tail if not line.startswith("[0] ")]
    message = ["    ValueError: bad"] if death == "an exception" else []
    assert tail == [f"    dies {number} {when}", *message]


@pytest.mark.parametrize(
    "message, shown",
    [
        ("word " * 1000 + "end", "ValueError: " + "word " * 1000 + "end"),
        ("first:\n    more\n\nlast", "ValueError: first:\n        more\n    last"),
        ('Traceback:\n  File "a.cc", line 1\nMXNetError: end', "MXNetError: end"),
    ],
    ids=["long", "of several lines", "MXNet's"],
)
def test_the_message_of_an_error_is_shown_whole(message, shown, alone):
    """And its traceback only once."""
    end = "import atexit\natexit.register(print, 'line\\n' * 1000)\n"
    launcher = alone(f"{end}raise ValueError({message!r})")
    assert launcher.end() == 1
    assert launcher.errors.endswith(f"Last lines of worker 1:\n    line\n    {shown}\n")


# How a worker ends, the launcher's exit code, and what it says. The last two are no failures.
ENDS = {
    **DEATHS,
    "exit hooks": ("atexit.register(time.sleep, 1000); sys.exit(9)", 9, "ended with exit code 9"),
    "os._exit(0)": ("os._exit(0)", 1, r"ended with exit code 0 before its script did"),
    "a good end": ("sys.exit()", None, None),
    "a hang": ("while True: time.sleep(1)", None, None),
}


@pytest.mark.parametrize("first", ENDS)
def test_the_first_failure_counts(first, command, tmp_path):
    """Workers of random ranks end one after the other: some well or never, then one in this way,
    then others in any way."""
    rng = random.Random(first)
    good = ["a good end", "a hang"]
    before = rng.choices(good, k=rng.randrange(3))
    ends = [*before, first, *rng.choices(good if first in good else [*ENDS], k=rng.randrange(1, 3))]
    order = rng.sample(range(len(ends)), len(ends))  # The ranks, in the order of ends.
    failed = [rank for rank, end in zip(order, ends) if ENDS[end][2]]
    ignores = rng.random() < 0.3
    # The scheduler and the server.
    (tmp_path / "mxnet.py").write_text("import signal\nsignal.pause()\n")
    for number, (rank, end) in enumerate(zip(order, ends)):
        (tmp_path / f"end{rank}.py").write_text(f"""
import atexit, ctypes, os, signal, sys, time
if {ignores}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.system("sleep 1000 &")
print("ready", flush=True)
while not os.path.exists("turn{number}"):
    time.sleep(0.01)
time.sleep({0.7 * bool(number)})
open("turn{number + 1}", "w").close()
{ENDS[end][0]}
""")
    script = "import os, runpy\nrunpy.run_path(f'end{os.environ[\"GLUON_SYNCBN_RANK\"]}.py')\n"
    (tmp_path / "script.py").write_text(script)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = command("-n", str(len(ends)), "script.py", PYTHONPATH=path)
    launcher.wait_for("ready", len(ends))
    (tmp_path / "turn0").touch()
    if failed:
        _, code, sentence = ENDS[first]
        text = rf"launch: worker {failed[0]} \(process \d+\) {sentence}"
    elif "a hang" in ends:
        time.sleep(0.7 * len(ends))
        launcher.process.send_signal(signal.SIGINT)
        code, text = 128 + signal.SIGINT, "SIGINT is passed on"
    else:
        code, text = 0, ""
    assert launcher.end() == code, (ends, order, launcher.errors)
    assert re.search(text, launcher.errors), (ends, order, launcher.errors)
    assert launcher.errors.count("launch: worker ") == bool(failed)


def test_a_worker_that_ended_before_it_met_the_others(start):
    script = """
import os, sys, time
if os.environ["GLUON_SYNCBN_RANK"] == "0":
    with open("part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("part", "pid")
    sys.exit(0)
while not os.path.exists("pid") or os.path.exists(f"/proc/{open('pid').read()}"):
    time.sleep(0.01)
raise RuntimeError("nobody else came")
"""
    launcher = start(script, "-n", "2")
    assert launcher.end() == 1
    assert "Ended well before: worker 0. Last lines of worker 1:" in launcher.errors


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("engine", ["kvstore", pytest.param("horovod", marks=needs_horovod)])
def test_processes_that_were_connected_end_well(engine, number, start):
    """One, too, which has no other to wait for."""
    script = {
        "kvstore": f"{TRAIN}make, connected = 'KVStoreReducer', kv",
        "horovod": f"{ALL_REDUCE}make, connected = 'HorovodReducer', hvd",
    }[engine]
    script += """
import gluon_syncbn as sbn
print(getattr(sbn.distributed, make)(connected).all_reduce("x", [1.0]))
"""
    launcher = start(script, "-n", str(number), "--engine", engine)
    assert launcher.end() == 0, launcher.errors
    assert sorted(launcher.output) == [f"[{rank}] [{number}.]\n" for rank in range(number)]
    assert "Traceback" not in launcher.errors


RESTARTED = """
import os, signal, sys, time
number = int(os.environ["GLUON_SYNCBN_RESTART"])
print("run", number, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end, code, runs",
    [
        ("sys.exit(3 if number < 1 else 0)", 0, 2),
        ("sys.exit(3 + number)", 5, 3),
        ("time.sleep(100)", 130, 1),
    ],
    ids=["a failure", "too many failures", "Ctrl-C"],
)
def test_restarts(end, code, runs, alone):
    launcher = alone(RESTARTED.format(end=end), "--restarts", "2")
    launcher.wait_for(f"run {runs - 1}")
    if code == 130:
        launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == code
    assert launcher.output == [f"[1] run {number}\n" for number in range(runs)]
    assert launcher.errors.count("all processes start again") == runs - 1


@pytest.mark.long
def test_restarts_of_two_launchers(start, tmp_path):
    """One of which has the worker that dies, and both the restart. It dies with unread messages,
    so its connection is reset."""
    failing = "signal.alarm(3); ctypes.PyDLL(None).sleep(60)"  # It holds the GIL.
    script = f"""{TRAIN}
import ctypes
import gluon_syncbn as sbn
store = sbn.distributed.KVStoreReducer(kv)
if kv.rank == 1 and os.environ["GLUON_SYNCBN_RESTART"] == "0":
    {failing}
print(store.all_reduce("x", [kv.rank + 1]))
"""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    options = ["--from-env", "--restarts", "1"]
    launchers = [start(script, *options, **variables, RANK=str(rank)) for rank in range(2)]
    for rank, launcher in enumerate(launchers):
        assert launcher.end() == 0, launcher.errors
        assert launcher.output == [f"[{rank}] [3.]\n"]
        assert "all processes start again, restart 1 of 1." in launcher.errors


def test_without_mxnet(start, tmp_path):
    (tmp_path / "mxnet.py").write_text("raise ImportError('no', name='mxnet')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = start("import time; time.sleep(1000)", "-n", "1", PYTHONPATH=path)
    assert launcher.end() == 1
    assert re.search(
        r"(scheduler|server 0) \(process \d+\) ended with exit code 1", launcher.errors
    )
    end = "MXNet cannot be imported: no. python -m gluon_syncbn doctor says why."
    assert launcher.errors.rstrip().endswith(end) and "Traceback" not in launcher.errors


@pytest.mark.parametrize("killed", ["launcher", "worker"])
def test_children_of_workers_end_too(killed, start):
    """Also one that left the session of its worker and outlived its parent."""
    children = """
import ctypes, os, signal, time
ctypes.CDLL(None).prctl(15, b"\\xff")  # A name that is no text.
def child():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
if not os.fork():
    if not os.fork():
        os.setsid()
        child()
    os._exit(0)
os.wait()
if not os.fork():
    child()
"""
    launcher = start(children + SLEEP, "-n", "2")
    launcher.wait_for("ready", 2)
    # The launcher, the guard, the scheduler, the server, two workers, and two children of each.
    assert len(launcher.running()) >= 4 + 2 * 3
    begin = time.monotonic()
    if killed == "launcher":
        launcher.process.kill()
        wait_until(lambda: not launcher.running())
    else:
        launcher.find("GLUON_SYNCBN_RANK", "1").kill()
        assert launcher.end() == 128 + signal.SIGKILL, launcher.errors
    assert time.monotonic() - begin < ENDED_SECONDS


# Signals.


@pytest.mark.long
def test_ctrl_c_while_the_workers_wait_inside_mxnet(start):
    """One is interrupted, and what the others wait for does not come any more."""
    script = """
if kv.rank == 1:
    print("sleeps", flush=True)
    time.sleep(1000)
step()
"""
    launcher = start(TRAIN + script, "-n", "2")
    launcher.wait_for("sleeps")
    begin = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    assert time.monotonic() - begin < ENDED_SECONDS
    assert "SIGINT is passed on" in launcher.errors and "[1] KeyboardInterrupt" in launcher.errors


MANY_LINES = """
import sys
for number in range(5000):  # More than a pipe holds.
    print("line", number, "x" * 50)
    print("warning", number, file=sys.stderr)
"""
ENDLESS = "while True: print('line')"
NO_SPACE = (
    "gluon_syncbn.launch: the output of worker 1 cannot be written (No space left on device), so "
    "all processes are ended.\n"
)


@pytest.mark.parametrize(
    "script, how, code, output, errors",
    [
        (MANY_LINES, ">&-", 0, "", r"(\[1\] warning \d+\n){5000}"),
        (MANY_LINES + "sys.exit(3)", "<&- >&- 2>&-", 3, "", ""),
        (ENDLESS, "| head -n 1", 128 + signal.SIGPIPE, r"\[1\] line\n", ".*"),
        (ENDLESS, "> /dev/full", 1, "", re.escape(NO_SPACE)),
    ],
    ids=["closed output", "all closed", "a reader that ends", "a full disk"],
)
def test_output_that_nobody_takes(script, how, code, output, errors, tmp_path):
    (tmp_path / "script.py").write_text(script)
    environment = {name: os.environ[name] for name in os.environ if "BUFFERED" not in name}
    command = f"{shlex.quote(sys.executable)} -m gluon_syncbn.launch --from-env script.py {how}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        cwd=tmp_path,
        env={**environment, **alone_here()},
        text=True,
        timeout=STARTED_SECONDS,
    )
    assert done.returncode == code, done.stderr[-1000:]
    assert re.fullmatch(output, done.stdout)
    assert re.fullmatch(errors, done.stderr, re.DOTALL), done.stderr[-1000:]


BLOCKED = ENDLESS.replace("while", "import os; print(os.getpid(), flush=True)\nwhile")


@pytest.mark.parametrize(
    "how, code", [("SIGTERM", 143), ("SIGINT", 130), ("a death", 137), ("a good end", 0)]
)
def test_output_that_nobody_reads(how, code, tmp_path):
    """A signal and a death end the launch all the same. A reader that is slow gets all."""
    (tmp_path / "script.py").write_text(MANY_LINES if how == "a good end" else BLOCKED)
    process = subprocess.Popen(
        [sys.executable, "-m", "gluon_syncbn.launch", "--from-env", "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
        env={**os.environ, **alone_here()},
        text=True,
    )
    with process:
        assert select.select([process.stdout], [], [], STARTED_SECONDS)[0]
        time.sleep(3)
        begin = time.monotonic()
        if how == "a good end":
            assert process.poll() is None
            assert process.stdout.read().count("\n") == 10000
        elif how == "a death":
            os.kill(int(process.stdout.readline().split()[1]), signal.SIGKILL)
        else:
            process.send_signal(signal.Signals[how])
        assert process.wait(STARTED_SECONDS) == code
        assert time.monotonic() - begin < ENDED_SECONDS
