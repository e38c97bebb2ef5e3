"""python -m gluon_syncbn.launch: what it starts and prints, and what it refuses."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mxnet_launch import __main__ as launch
from distributed_cluster import needs_horovod
from launched import (
    ALL_REDUCE,
    ENDED_SECONDS,
    SLEEP,
    TRAIN,
    Launcher,
    alone_here,
    free_port,
)

ARGUMENTS = ["--", "--epochs", "3", "with space", "-n", "7", "--", "--engine", "", "--help"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A launcher that has ended, its seconds, and what each of its three workers found."""
    script = """
import near
names = "OMP_NUM_THREADS", "GLUON_SYNCBN_RANK", "GLUON_SYNCBN_SIZE", "GLUON_SYNCBN_LOCAL_RANK"
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
"""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "near.py").write_text("")
    (folder / "script.py").write_text(TRAIN + script)
    launcher = Launcher(["-n", "3", "--", "script.py", *ARGUMENTS], folder, {})
    try:
        assert launcher.end() == 0, launcher.errors
    finally:
        launcher.clean()
    found = {
        rank: json.loads(lines[203].partition("found ")[2])
        for rank, lines in by_rank("".join(launcher.output)).items()
    }
    return launcher, found


def by_rank(output):
    """{rank: lines}, of lines that begin with [rank]."""
    lines = {}
    for line in output.splitlines():
        rank, text = re.fullmatch(r"\[([0-2])\] (.*)", line).groups()
        lines.setdefault(int(rank), []).append(text)
    return lines


def test_what_a_worker_finds(trained):
    _, found = trained
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


def test_lines_of_different_workers_are_not_mixed(trained):
    launcher, _ = trained
    lines = by_rank("".join(launcher.output))
    assert sorted(lines) == [0, 1, 2]
    for own in lines.values():
        assert own[:200] == ["x" * 5000] * 200
        assert own[200:203] == ["\ufffd", "progress 1", "progress 2"]
        assert own[204:] == ["no end of line"]
    assert by_rank(launcher.errors) == dict.fromkeys(range(3), ["a warning"])


@pytest.mark.parametrize(
    "options, layer",
    [
        (["script.py"], "mxnet.gluon.contrib.nn.basic_layers"),
        (["--replace-contrib", "script.py"], "gluon_syncbn.layers.batch_norm"),
        (["--replace-contrib", "-m", "script", "--help"], "gluon_syncbn.layers.batch_norm"),
    ],
)
def test_contribs_layer_is_replaced_if_asked(options, layer, command, tmp_path):
    script = "from mxnet.gluon.contrib.nn import SyncBatchNorm\nprint(SyncBatchNorm.__module__)"
    (tmp_path / "script.py").write_text(script)
    launcher = command("--from-env", *options, **alone_here())
    assert launcher.end() == 0, launcher.errors
    assert launcher.output == [f"[1] {layer}\n"]


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
        (["-n", "1", "."], ". is a folder: give a script, or -m and a module."),
        (["-n", "1", "--port", "65536", "script.py"], "argument --port: expected a number from 1"),
        (["-n", "1", "--grace", "nan", "script.py"], "argument --grace: expected a number from 0"),
        (
            ["-n", "1", "--restarts", "-1", "script.py"],
            "argument --restarts: expected a number from 0",
        ),
        (["--rank", "0", "script.py"], "--rank and --size belong together: give both, or"),
        (["--rank", "2", "--size", "2", "script.py"], "--rank is 2 and --size 2: ranks begin at 0"),
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


def test_more_workers_than_the_kvstore_takes(tmp_path, capsys):
    (tmp_path / "script.py").write_text("")
    assert launch.main(["-n", "1001", str(tmp_path / "script.py")]) == 2
    assert "the KVStore takes at most 1000 workers, not 1001: start" in capsys.readouterr().err


TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({}, "--from-env finds none of RANK and WORLD_SIZE, "),
        (
            {**TWO, "MASTER_PORT": "99999"},
            "MASTER_PORT: expected a number from 1 to 65535, got '99999'.",
        ),
        ({**TWO, "MASTER_ADDR": "::1"}, "MASTER_ADDR is '::1', which has no IPv4"),
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


@pytest.mark.long
@needs_horovod
def test_ranks_of_horovod(start):
    script = """
print(os.environ["GLUON_SYNCBN_RANK"], hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(),
    hvd.cross_rank(), hvd.cross_size(), step())
"""
    launcher = start(ALL_REDUCE + script, "-n", "2", "--engine", "horovod")
    assert launcher.end() == 0, launcher.errors
    assert sorted(launcher.output) == [
        f"[{rank}] {rank} {rank} 2 {rank} 2 0 1 [3.0, 3.0]\n" for rank in range(2)
    ]


def test_horovod_on_several_machines_is_horovodruns(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text("")
    options = ["--rank", "1", "--size", "2", "--engine", "horovod"]
    assert launch.main([*options, str(tmp_path / "script.py")]) == 2
    errors = capsys.readouterr().err
    assert "--master" in errors
    options += ["--master", "127.0.0.1"]
    assert launch.main([*options, str(tmp_path / "script.py")]) == 2
    errors = capsys.readouterr().err
    assert "--engine horovod is for one machine: " in errors and "such as horovodrun" in errors


# Several launchers.


# The command of the job script in docs/distributed.md.
SRUN = re.search(
    r"^srun .*python -m gluon_syncbn\.launch (.+) train\.py$",
    (Path(__file__).parents[2] / "docs" / "distributed.md").read_text("utf-8"),
    re.MULTILINE,
)


def start_several(start, script, size, *options):
    """`size` launchers with different addresses, in the least convenient order, as srun does."""
    variables = {
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})",
        "SLURM_JOB_ID": str(free_port() - 9091),
    }
    launchers = {}
    for rank in reversed(range(size)):
        own = {"SLURM_PROCID": str(rank), "DMLC_NODE_HOST": f"127.0.0.{1 + rank}"}
        launchers[rank] = start(script, *SRUN[1].split(), *options, **variables, **own)
    return launchers


RENAMED = "import sys; sys.argv[0] = 'renamed'; import mxnet_launch; mxnet_launch.gluon_syncbn()"


@pytest.mark.parametrize(
    "command",
    [["-m", "gluon_syncbn.launch"], ["-m", "gluon_syncbn", "launch"], ["-c", RENAMED, "launch"]],
)
def test_the_launcher_becomes_no_server(command, tmp_path):
    """As it would by importing MXNet: then it would wait for the scheduler."""
    environment = {**os.environ, **alone_here(), "DMLC_ROLE": "server"}
    run = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=tmp_path,
        env=environment,
        timeout=60,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert run.returncode == 0 and run.stdout.startswith("usage: ")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_several_launchers_are_one_training(workers, start):
    script = TRAIN + "print(kv.rank, os.environ['GLUON_SYNCBN_LOCAL_RANK'], step())"
    launchers = start_several(start, script, 2, "-n", str(workers))
    total = float(sum(range(1, 2 * workers + 1)))
    for rank, launcher in launchers.items():
        assert launcher.end() == 0, launcher.errors
        here = range(workers * rank, workers * (rank + 1))
        assert sorted(launcher.output) == [
            f"[{w}] {w} {w % workers} {[total, total]}\n" for w in here
        ]


def test_rank_0_stays_until_the_scheduler_and_the_server_end(start, tmp_path):
    """Workers of other launchers need them."""
    (tmp_path / "mxnet.py").write_text(
        "import sys, time\ntime.sleep(5)\nprint('served', flush=True)\nsys.exit()\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["--rank", "0", "--size", "2", "--master", "127.0.0.1", "--port", str(free_port())]
    launcher = start("", *options, PYTHONPATH=path)
    assert launcher.end() == 0, launcher.errors
    assert sorted(launcher.output) == ["[scheduler] served\n", "[server 0] served\n"]


@pytest.mark.parametrize("taken", ["by another program", "by another launcher"])
def test_a_second_job_at_a_port_ends_before_it_starts(taken, start):
    """And the first one goes on."""
    variables = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    port, first = free_port(), []
    options = ["--from-env", "--port", str(port)]
    with socket.socket() as server:
        if taken == "by another launcher":
            first = [start(SLEEP, *options, RANK=str(rank), **variables) for rank in range(2)]
            for launcher in first:
                launcher.wait_for("ready")
        else:
            server.bind(("127.0.0.1", port))
            server.listen()
        for rank in range(2 if first else 1):
            launcher = start("print('starts')", *options, RANK=str(rank), **variables)
            assert launcher.end(ENDED_SECONDS) == 2
            assert f"cannot listen at port {port} of " in launcher.errors
            assert launcher.output == []
        assert all(launcher.process.poll() is None for launcher in first)
