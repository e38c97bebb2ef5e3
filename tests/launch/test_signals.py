"""Signals that come to a launch and its workers."""

import contextlib
import functools
import os
import random
import signal
import time
import types

import psutil
import pytest
from mxnet_launch import _children, runner
from launched import free_port
from programs import wait_until


@pytest.fixture
def handles(alone):
    """Starts a worker that handles signals: it prints them, and then does what is given."""

    def handles(then, *options):
        script = f"""
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
        launcher = alone(script, *options)
        launcher.wait_for("ready")
        return launcher

    return handles


@pytest.fixture
def hangup():
    """Sets whether launchers ignore SIGHUP, which they inherit if the tests run under nohup."""
    before = signal.getsignal(signal.SIGHUP)
    yield functools.partial(signal.signal, signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("sent, code", [("SIGTERM", 0), ("SIGHUP", 5)])
def test_a_signal_is_passed_on_as_sigterm(sent, code, handles, hangup):
    """A worker that handles it and ends well makes the launch end well."""
    hangup(signal.SIG_DFL)
    launcher = handles(f"sys.exit({code})")
    launcher.process.send_signal(signal.Signals[sent])
    assert launcher.end() == (128 + signal.Signals[sent] if code else 0), launcher.errors
    assert "[1] got SIGTERM\n" in launcher.output


def test_under_nohup(handles, hangup):
    hangup(signal.SIG_IGN)
    launcher = handles("sys.exit(0)")
    launcher.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert launcher.process.poll() is None and launcher.errors == ""
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 0 and "SIGTERM is passed on" in launcher.errors


def test_a_second_ctrl_c_kills(handles):
    launcher = handles("pass", "--grace", "1000")
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_for("got SIGINT")
    time.sleep(0.6)
    assert launcher.process.poll() is None
    begin = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    assert time.monotonic() - begin < 3


# What a worker does with a signal is printed. The scheduler and the server end after the workers.
AT_MOMENTS = """
import atexit, os, signal, time

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)

def leave():
    # A handler would be gone before the process is.
    print("leaves", signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, flush=True)
    wait_for("leaves")
    open("done" + os.environ["GLUON_SYNCBN_RANK"], "w").close()

print("imports", flush=True)
wait_for("imports")
got = []
for number in NUMBERS:
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
print("ready", flush=True)
while not got and not os.path.exists("ready"):
    time.sleep(0.01)
while got and HANGS:
    time.sleep(1)
atexit.register(leave)
"""
SERVE = """
import os, time
print("serves", flush=True)
while not (os.path.exists("done0") and os.path.exists("done1")):
    time.sleep(0.01)
print("has served", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("seed", range(12))
def test_random_signals(seed, command, tmp_path, hangup):
    """One comes at any moment, to the launchers or, as from a control group, to all processes."""
    rng = random.Random(seed)
    hangup(signal.SIG_DFL)
    is_announcement = rng.random() < 0.4
    number = rng.choice(runner.ANNOUNCEMENTS if is_announcement else runner.ENDS)
    moments = ["imports", "ready", "leaves"]
    moment, machines, everyone = rng.choice(moments), rng.choice([1, 2]), rng.random() < 0.6
    hangs = moment == "ready" and not is_announcement and rng.random() < 0.4
    case = f"seed {seed}: {number!r} at {moment}, {machines=}, {everyone=}, {hangs=}"
    (tmp_path / "mxnet.py").write_text(SERVE)
    script = AT_MOMENTS.replace("NUMBERS", str([*map(int, runner.ENDS + runner.ANNOUNCEMENTS)]))
    (tmp_path / "script.py").write_text(script.replace("HANGS", str(hangs)))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    grace = "1" if hangs else "100"
    options, port = ["--grace", grace, "-n", str(2 // machines)], str(free_port())
    launchers = []
    for rank in range(machines):
        several = ["--rank", str(rank), "--size", "2", "--master", "127.0.0.1", "--port", port]
        own = [*options, *several] if machines == 2 else options
        launchers.append(command(*own, "script.py", PYTHONPATH=path))
    launchers[0].wait_for("serves", 2)
    for each in moments[: moments.index(moment) + 1]:
        for launcher in launchers:
            launcher.wait_for(each, 2 // machines)
        if each != moment:
            (tmp_path / each).touch()
    recipients = [psutil.Process(launcher.process.pid) for launcher in launchers]
    if everyone:
        recipients += [child for each in recipients for child in each.children(recursive=True)]
    for process in rng.sample(recipients, len(recipients)):
        with contextlib.suppress(psutil.NoSuchProcess):  # It may have ended with another one.
            process.send_signal(number)
    kills = hangs or moment == "imports" and not is_announcement
    if not kills:
        sentence = f"{number.name} is passed on to the workers"
        wait_until(lambda: all(sentence in launcher.errors for launcher in launchers))
        for each in moments:
            (tmp_path / each).touch()
    for rank, launcher in enumerate(launchers):
        assert launcher.end() == (128 + number if kills else 0), (case, launcher.errors)
        names = "worker 0, worker 1" if machines == 1 else f"worker {rank}"
        sentence = f": {names} had not ended 1 s after {number.name} (--grace), so all are killed."
        assert (sentence in launcher.errors) == hangs, (case, launcher.errors)
    output = "".join(line for launcher in launchers for line in launcher.output)
    for line in "has served", "leaves True":
        assert output.count(line) == (0 if kills else 2), (case, output)


def test_after_a_signal_services_stay_for_workers_of_other_machines():
    launch = _children.Launch([], [], 5, serves_others=True)
    launch._signals, launch._is_passed_on = [(signal.SIGTERM, time.monotonic())], True
    worker, scheduler = (types.SimpleNamespace(code=lambda code=code: code) for code in (0, None))
    assert launch._obey([worker], [scheduler, worker]) is None
    assert launch._obey([worker], [worker]) == 0


def test_two_signals_at_a_time_are_one(monkeypatch):
    """As `timeout` sends them."""
    launch, times = _children.Launch([], [], 5), iter([0.0, 0.1, 0.7])
    clock = types.SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(_children, "time", clock)
    for _ in range(3):
        launch._note_signal(signal.SIGINT, None)
    assert [when for _, when in launch._signals] == [0.0, 0.7]


# Output that is closed or full, or that nobody reads.
