"""python -m gluon_syncbn.launch: what it starts, prints and ends."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from distributed_cluster import needs_horovod
from gluon_syncbn.launch import __main__ as launch
from launched import ALONE, ENDED_SECONDS, STARTED_SECONDS, Launcher, free_port, wait_until

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


# A worker that ends when a test makes its file.
SLEEP = """
import os, sys, time
print("ready", flush=True)
while not os.path.exists("die" + os.environ["GLUON_SYNCBN_RANK"]):
    time.sleep(0.01)
sys.exit(7)
"""

ARGUMENTS = ["--", "--epochs", "3", "with space", "-n", "7", "--", "--engine", "", "--help"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A launcher that has ended, its seconds, and what each of its three workers found."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "near.py").write_text("")
    (folder / "script.py").write_text(
        TRAIN
        + textwrap.dedent("""
            import near
            names = "OMP_NUM_THREADS", "GLUON_SYNCBN_RANK", "GLUON_SYNCBN_SIZE"
            names += "GLUON_SYNCBN_LOCAL_RANK",
            found = {name: os.environ[name] for name in names}
            found.update(rank=kv.rank, sum=step(), argv=sys.argv, stdin=sys.stdin.read())
            for part in range(200):
                print("x" * 5000)
            print("a warning", file=sys.stderr)
            os.write(1, b"\\xff\\r\\nprogress 1\\rprogress 2")
            print()
            print("found", json.dumps(found))
            kv._barrier()
            os.write(1, b"no end of line")
        """)
    )
    begin = time.monotonic()
    launcher = Launcher(["-n", "3", "--", "script.py", *ARGUMENTS], folder, {})
    try:
        assert launcher.end() == 0, launcher.text
    finally:
        launcher.clean()
    found = {
        rank: json.loads(line[6:])
        for rank, lines in by_rank(launcher.output).items()
        for line in lines
        if line.startswith("found ")
    }
    return launcher, time.monotonic() - begin, found


def by_rank(output):
    """{rank: lines}, of lines that begin with [rank]."""
    lines = {}
    for line in output:
        rank, text = re.fullmatch(r"\[([0-2])\] (.*)\n", line).groups()
        lines.setdefault(int(rank), []).append(text)
    return lines


def test_what_a_worker_finds(trained):
    _, seconds, found = trained
    for rank in range(3):
        assert found[rank] == {
            "rank": rank,
            "GLUON_SYNCBN_RANK": str(rank),
            "GLUON_SYNCBN_LOCAL_RANK": str(rank),
            "GLUON_SYNCBN_SIZE": "3",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 3)),
            "sum": [6, 6],
            "argv": ["script.py", *ARGUMENTS],
            "stdin": "",
        }
    # If scheduler and server did not end with the workers, it would take longer.
    assert seconds < STARTED_SECONDS / 2


def test_lines_of_different_workers_are_not_mixed(trained):
    launcher, _, _ = trained
    lines = by_rank(launcher.output)
    assert sorted(lines) == [0, 1, 2]
    for own in lines.values():
        assert own[:200] == ["x" * 5000] * 200
        assert own[200:203] == ["\ufffd", "progress 1", "progress 2"]
        assert own[204:] == ["no end of line"]
    assert by_rank(launcher.errors) == dict.fromkeys(range(3), ["a warning"])


def test_a_module_with_its_package(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "near.py").write_text("value = 5")
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nfrom .near import value\nprint(value, __name__, sys.argv[1:], flush=True)"
    )
    launcher = Launcher(["--from-env", "-m", "package", "-m", "x"], tmp_path, ALONE)
    try:
        assert launcher.end() == 0, launcher.text
        assert launcher.output == ["[worker] 5 __main__ ['-m', 'x']\n"]
    finally:
        launcher.clean()


# How a launch ends.


DEATHS = {
    "an exception": ("raise ValueError('bad')", 1, "worker 1 (process {}) ended with exit code 1"),
    "SIGKILL": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        128 + signal.SIGKILL,
        "worker 1 (process {}) was killed by SIGKILL (by the kernel, if memory ran out)",
    ),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_worker_dies_and_the_others_end(death, start):
    """The tests of gluon_syncbn.distributed have more, where the others wait in a store."""
    line, code, sentence = DEATHS[death]
    script = f"""
import os, signal, sys, time
if os.environ["GLUON_SYNCBN_RANK"] == "1":
    for number in range(30):
        print("line", number, flush=True)
    print("dies", os.getpid(), time.time(), flush=True)
    {line}
time.sleep(1000)
"""
    launcher = start(script, "-n", "2")
    number, when = launcher.wait_for("dies")[0].split()[2:]
    assert launcher.end() == code, launcher.text
    assert time.time() - float(when) < ENDED_SECONDS
    assert f"{sentence.format(number)}, so all others are ended." in launcher.text
    tail = launcher.text.partition("Its last lines:\n")[2].splitlines()
    assert 15 < len(tail) <= 20 and f"    dies {number} {when}" in tail and "    line 29" in tail
    assert ("    ValueError: bad" in tail) == (death == "an exception")


QUIET = {
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", 143, "was killed by SIGTERM"),
    "a segmentation fault": ("ctypes.string_at(0)", 139, "was killed by SIGSEGV"),
    "an exit code": ("os._exit(7)", 7, "ended with exit code 7"),
}


@pytest.mark.parametrize("death", QUIET)
def test_who_ended_first_is_named(death, start):
    """Not worker 0, which fails because of it and reports that at once."""
    line, code, sentence = QUIET[death]
    script = f"""
import ctypes, os, signal, socket
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
{line}
"""
    launcher = start(script, "-n", "2")
    assert launcher.end() == code, launcher.text
    assert re.search(
        rf"worker 1 \(process \d+\) {sentence}, so all others are ended", launcher.text
    )


@pytest.mark.long
@needs_horovod
@pytest.mark.parametrize("death", QUIET)
def test_who_ended_first_is_named_with_horovod(death, start):
    line, code, sentence = QUIET[death]
    script = f"""
step()
if hvd.rank() == 1:
    import ctypes, signal
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # That of MXNet exits with 255.
    {line}
while True:
    step()
"""
    launcher = start(ALL_REDUCE + script, "-n", "2", "--engine", "horovod")
    assert launcher.end() == code, launcher.text
    assert re.search(
        rf"worker 1 \(process \d+\) {sentence}, so all others are ended", launcher.text
    )


@pytest.mark.long
def test_launchers_that_dmlc_gave_their_roles(start):
    """MXNet serves in whatever process imports it under such a role: that must not be ours."""
    script = TRAIN + "print('trains')\nwhile True:\n    step()\n"
    with launch._free_port() as port:
        launchers = {
            role: start(
                script,
                "--from-env",
                **{**ALONE, "DMLC_ROLE": role, "DMLC_PS_ROOT_PORT": str(port)},
            )
            for role in ("scheduler", "server", "worker")
        }
        launchers["worker"].wait_for("[worker] trains")
    server = launchers["server"].find("DMLC_ROLE", "server")
    server.kill()
    assert launchers["server"].end() == 128 + signal.SIGKILL
    assert f"server (process {server.pid}) was killed by SIGKILL" in launchers["server"].text


def test_a_scheduler_that_cannot_serve(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        scheduler = {**ALONE, "DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_PORT": port}
        launcher = start("", "--from-env", **scheduler)
        assert launcher.end() == 1
    assert "scheduler (process" in launcher.text and "bind failed" in launcher.text


def test_without_mxnet(start, tmp_path):
    (tmp_path / "mxnet.py").write_text("raise ImportError('no', name='mxnet')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = start("import time; time.sleep(1000)", "-n", "1", PYTHONPATH=path)
    assert launcher.end() == 1
    assert re.search(r"(scheduler|server 0) \(process \d+\) ended with exit code 1", launcher.text)
    end = "the libraries of its CUDA (mxnet-cu112: CUDA 11) and an NVIDIA driver."
    assert launcher.text.rstrip().endswith(end) and "Traceback" not in launcher.text


@pytest.mark.parametrize("killed", ["launcher", "worker"])
def test_children_of_workers_end_too(killed, start):
    """Also one that left the session of its worker and outlived its parent."""
    children = """
import os, signal, time
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
    # The guard, the scheduler, the server, two workers, and two children of each.
    assert len(launcher.processes()) >= 3 + 2 * 3
    begin = time.monotonic()
    if killed == "launcher":
        launcher.process.kill()
        wait_until(lambda: not launcher.processes())
    else:
        launcher.find("GLUON_SYNCBN_RANK", "1").kill()
        assert launcher.end() == 128 + signal.SIGKILL, launcher.text
    assert time.monotonic() - begin < ENDED_SECONDS


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # An open pipe.
def test_a_stream_of_text_and_a_store_that_no_worker_uses(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print('out ü'); print('err', file=sys.stderr)")
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        assert launch.main(["-n", "2", str(tmp_path / "script.py")]) == 0
    assert sorted(output.getvalue().splitlines()) == ["[0] out ü", "[1] out ü"]
    assert sorted(errors.getvalue().splitlines()) == ["[0] err", "[1] err"]


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
    launcher = start(TRAIN + script, "-n", "2", "--grace", "1")
    launcher.wait_for("sleeps")
    begin = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    assert time.monotonic() - begin < ENDED_SECONDS
    assert "SIGINT is passed on" in launcher.text and "[1] KeyboardInterrupt" in launcher.text


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


@pytest.mark.parametrize("sent, code", [("SIGTERM", 0), ("SIGHUP", 5)])
def test_a_signal_is_passed_on_as_sigterm(sent, code, alone):
    """A worker that handles it and ends well makes the launch end well."""
    launcher = alone(HANDLER.format(then=f"sys.exit({code})"))
    launcher.wait_for("ready")
    launcher.process.send_signal(signal.Signals[sent])
    assert launcher.end() == (128 + signal.Signals[sent] if code else 0), launcher.text
    assert "[worker] got SIGTERM\n" in launcher.output


@pytest.mark.long
def test_a_worker_that_ignores_signals_is_killed(alone):
    launcher = alone(HANDLER.format(then="pass"), "--grace", "0.5")
    launcher.wait_for("ready")
    begin = time.monotonic()
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 128 + signal.SIGTERM
    assert time.monotonic() - begin < ENDED_SECONDS


def test_a_second_ctrl_c_kills(alone):
    launcher = alone(HANDLER.format(then="pass"), "--grace", "1000")
    launcher.wait_for("ready")
    # Two at a time are one, as `timeout` sends them.
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_for("got SIGINT")
    time.sleep(0.6)
    assert launcher.process.poll() is None
    begin = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    assert time.monotonic() - begin < 3


# Output that is closed or full.


@pytest.fixture
def redirected(tmp_path):
    """Launches one worker from a shell that redirects the launcher's output."""

    def run(script, how):
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        environment = {name: os.environ[name] for name in os.environ if "BUFFERED" not in name}
        return subprocess.run(
            f"exec {sys.executable} -m gluon_syncbn.launch --from-env script.py {how}",
            shell=True,
            capture_output=True,
            cwd=tmp_path,
            env={**environment, **ALONE},
            text=True,
            timeout=STARTED_SECONDS,
        )

    return run


def test_the_reader_of_the_output_ends(alone):
    """As with `... | head -n 1`."""
    launcher = alone("while True: print('line')")
    launcher.wait_for("line")
    launcher.stop_reading()
    assert launcher.end() == 128 + signal.SIGPIPE


@pytest.mark.parametrize("how, code", [(">&-", 0), ("<&- >&- 2>&-", 3)])
def test_closed_output(how, code, redirected):
    """More lines than a pipe holds."""
    script = """
        import sys
        for number in range(5000):
            print("line", number, "x" * 50)
            print("warning", number, file=sys.stderr)
    """
    done = redirected(textwrap.dedent(script) + f"sys.exit({code})", how)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.count("[worker] warning") == (5000 if how == ">&-" else 0)
    assert "launch: " not in done.stderr


def test_output_that_cannot_be_written(redirected):
    done = redirected("while True: print('line')", "> /dev/full")
    assert (done.returncode, done.stderr) == (
        1,
        "gluon_syncbn.launch: the output of worker cannot be written (No space left on device), "
        "so all processes are ended.\n",
    )


# What is refused.


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["-n", "2"], "the script is missing"),
        (["script.py"], "the number of workers is missing"),
        (["-n", "0", "script.py"], "argument -n: expected a number from 1 to 9999, got '0'"),
        (["-n", "1", "--servers", "0", "script.py"], "argument --servers: expected a number"),
        (["-n", "1", "--engine", "mpi", "script.py"], "argument --engine: invalid choice: 'mpi'"),
        (["-n", "1", "no such.py"], "there is no script no such.py."),
        (["-n", "1", "--port", "65535", "script.py"], "argument --port: expected a number from 1"),
        (["-n", "1", "--grace", "nan", "script.py"], "argument --grace: expected a number from 0"),
        (["-n", "1", "--start", "-1", "script.py"], "argument --start: expected a number from 0"),
        (["-n", "1", "--lost-after", "0", "script.py"], "argument --lost-after: expected a number"),
    ],
)
def test_wrong_arguments(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    with pytest.raises(SystemExit) as end:
        launch.main(arguments)
    output, errors = capsys.readouterr()
    assert end.value.code == 2 and not output
    usage, error = errors.splitlines()
    assert usage.startswith("usage: python -m gluon_syncbn.launch [options] -n N script.py")
    assert error.startswith(f"gluon_syncbn.launch: error: {sentence}")


@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({}, "--from-env finds no DMLC_ROLE"),
        (
            {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1"},
            "DMLC_ROLE is set and DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER, DMLC_NUM_SERVER missing",
        ),
        ({**ALONE, "DMLC_ROLE": "boss"}, "DMLC_ROLE must be worker, server or scheduler"),
    ],
)
def test_a_wrong_environment(environment, sentence, tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr(os, "environ", environment)
    assert launch.main(["--from-env", str(tmp_path / "script.py")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"gluon_syncbn.launch: error: {sentence}") and errors.count("\n") == 1


def test_a_missing_horovod_and_how_to_install_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text("")
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)
    assert launch.main(["-n", "2", "--engine", "horovod", str(tmp_path / "script.py")]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_MPI=1" in errors
    assert "pip install --no-build-isolation horovod==0.28.1" in errors


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


# Several launchers.


def start_several(start, script, size, *options, slurm):
    """`size` launchers with different addresses, in the least convenient order."""
    port = free_port()
    names = ("SLURM_PROCID", "SLURM_NTASKS") if slurm else ("RANK", "WORLD_SIZE")
    launchers = {}
    for rank in reversed(range(size)):
        environment = dict(zip(names, (str(rank), str(size))))
        environment.update(MASTER_ADDR="127.0.0.1", DMLC_NODE_HOST=f"127.0.0.{1 + rank}")
        launchers[rank] = start(
            script, "--from-env", "--port", str(port), "--wait", "60", *options, **environment
        )
    return launchers


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_several_launchers_are_one_training(workers, start):
    script = TRAIN + "print(kv.rank, os.environ['GLUON_SYNCBN_LOCAL_RANK'], step())"
    launchers = start_several(start, script, 2, "-n", str(workers), slurm=True)
    total = float(sum(range(1, 2 * workers + 1)))
    for rank, launcher in launchers.items():
        assert launcher.end() == 0, launcher.text
        here = range(workers * rank, workers * (rank + 1))
        assert sorted(launcher.output) == [
            f"[{w}] {w} {w % workers} {[total, total]}\n" for w in here
        ]


@pytest.mark.long
@needs_horovod
def test_several_launchers_with_horovod(start):
    launchers = start_several(start, ALL_REDUCE, 2, "-n", "2", "--engine", "horovod", slurm=True)
    for rank, launcher in launchers.items():
        assert launcher.end() == 0, launcher.text
        for worker in (2 * rank, 2 * rank + 1):
            expected = [str(worker), worker, 4, worker % 2, 2, rank, 2, [10.0, 10.0]]
            assert f"[{worker}] {json.dumps(expected)}\n" in launcher.output


@pytest.mark.parametrize(
    "kill, victim",
    [("worker", 2), ("launcher", 0), pytest.param("launcher", 2, marks=pytest.mark.long)],
)
def test_one_fails_and_all_launchers_end(kill, victim, start, tmp_path):
    launchers = start_several(start, SLEEP, 3, slurm=False)
    for launcher in launchers.values():
        launcher.wait_for("ready")
    begin = time.monotonic()
    if kill == "worker":
        (tmp_path / f"die{victim}").touch()
        sentence = f"launcher {victim} ({socket.gethostname()}) says: worker {victim} (process "
        assert launchers[victim].end() == 7
    else:
        launchers[victim].process.kill()
        sentence = f"the launcher of rank {victim} is gone"
        wait_until(lambda: not launchers[victim].processes())
    for rank in {0, 1, 2} - {victim}:
        assert launchers[rank].end() == 1, launchers[rank].text
        assert sentence in launchers[rank].text
    assert time.monotonic() - begin < ENDED_SECONDS


CONTRIB = """
from mxnet.gluon.contrib.nn import SyncBatchNorm
print(SyncBatchNorm.__module__)
"""


@pytest.mark.parametrize("options", [[], ["--replace-contrib"]])
def test_contribs_layer_is_replaced_if_asked(alone, options):
    launcher = alone(CONTRIB, *options)
    assert launcher.end() == 0, launcher.text
    ours = "gluon_syncbn.layers.batch_norm"
    stock = "mxnet.gluon.contrib.nn.basic_layers"
    assert launcher.output == [f"[worker] {ours if options else stock}\n"]


def test_contribs_layer_is_replaced_for_modules(tmp_path):
    (tmp_path / "script.py").write_text(CONTRIB)
    options = ["--from-env", "--replace-contrib", "-m", "script", "--help"]
    launcher = Launcher(options, tmp_path, ALONE)
    assert launcher.end() == 0, launcher.text
    assert launcher.output == ["[worker] gluon_syncbn.layers.batch_norm\n"]
