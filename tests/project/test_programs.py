"""What programs print, and their exit codes, which are the same on every Python."""

import os
import re
import signal

import programs
import pytest
from distributed_cluster import needs_horovod

PROGRAM = """
import os, signal, sys, time
import gluon_syncbn as sbn
import mxnet as mx

devices = [mx.cpu(0), mx.cpu(1)]
STORE
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Conv2D(4, 3), sbn.SyncBatchNorm())
net.initialize(ctx=devices)
net.hybridize()
with mx.autograd.record():
    losses = [net(mx.nd.ones((2, 3, 8, 8), ctx=device)).sum() for device in devices]
mx.autograd.backward(losses)
print("trained", flush=True)
"""
STORES = {
    "kvstore": "store = sbn.distributed.KVStoreReducer(mx.kv.create('dist_sync'))",
    "horovod": """
import horovod.mxnet as hvd
hvd.init()
store = sbn.distributed.HorovodReducer(hvd)
""",
}
TRACE = r"Traceback \(most recent call last\):\n(  .*\n)+"
# The last line, the exit code, and what is printed as an error.
ENDINGS = {
    "an export": ("sbn.export(net, 'model', input_shape=(2, 3, 8, 8))", 0, ""),
    "an exception": ("raise ValueError('bad')", 1, f"{TRACE}ValueError: bad\n"),
    "an exit code": ("sys.exit(3)", 3, ""),
    "Ctrl-C": (
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
        -signal.SIGINT,
        f"{TRACE}KeyboardInterrupt\n",
    ),
}


def check(program, code, output, errors, folder, *launcher):
    (folder / "program.py").write_text(program)
    # Without what conftest.py adds, by which any program could import mxnet first.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = programs.run([*launcher, "program.py"], cwd=folder, env=environment)
    assert done.returncode == code, done.stderr
    assert re.fullmatch(output, done.stdout) and re.fullmatch(errors, done.stderr), done


def test_an_import(tmp_path):
    check("import gluon_syncbn", 0, "", "", tmp_path)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program(ending, tmp_path):
    end, code, errors = ENDINGS[ending]
    check(PROGRAM.replace("STORE", "") + end, code, "trained\n", errors, tmp_path)
    assert (tmp_path / "model-0000.params").exists() == (ending == "an export")


# The other may be told so before the launcher says it.
FAILURE = r"(\[[01]\] .*\n)*gluon_syncbn\.launch: worker [01] .* ended with exit code 3(.*\n)+"


@pytest.mark.parametrize(
    "engine, end, code, errors",
    [
        ("kvstore", "", 0, ""),
        pytest.param("kvstore", "sys.exit(3)", 3, FAILURE, marks=pytest.mark.long),
        pytest.param("horovod", "", 0, "", marks=needs_horovod),
    ],
    ids=["kvstore", "kvstore that fails", "horovod"],
)
def test_a_job(engine, end, code, errors, tmp_path):
    store = STORES[engine] + "\nsbn.set_default_group(sbn.SyncGroup(store=store))"
    launcher = "-m", "gluon_syncbn.launch", "-n", "2", "--engine", engine
    # A worker that fails ends the other, perhaps before it prints.
    output = r"(\[[01]\] trained\n)" + ("{1,2}" if code else "{2}")
    check(PROGRAM.replace("STORE", store) + end, code, output, errors, tmp_path, *launcher)
