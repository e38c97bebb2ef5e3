"""python -m gluon_syncbn export, convert and doctor."""

import json
import os
import re
import shutil
from pathlib import Path

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import programs
import pytest
from gluon_syncbn import __main__ as command_line
from deploy_nets import assert_outputs, contents, forward, load, operators, ready
from gluon_syncbn.cli import doctor
from mxnet.gluon import nn
from mxnets import needs_mxnet, needs_onnx
from tolerances import EXPORTED

PACKAGE = Path(sbn.__file__).parent
two_packages = pytest.mark.cpu_only("doctor finds two packages of MXNet there")


def make():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, in_channels=3), sbn.SyncBatchNorm(in_channels=8))
        net.add(nn.Conv2D(4, 3, in_channels=8), sbn.SyncBatchNorm(in_channels=4, scale=False))
    return net


def norms():
    """With what else has a gamma and a beta, and with a count of batches."""
    net = nn.HybridSequential(prefix="norms_")
    with net.name_scope():
        net.add(nn.Conv2D(3, 1, in_channels=2), sbn.SyncBatchNorm(momentum=None, in_channels=3))
        net.add(nn.BatchNorm(in_channels=3), nn.LayerNorm(in_channels=3))
        net.add(nn.InstanceNorm(in_channels=3))
    return net


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With own-symbol.json and own-0003.params of net.export, and c.params of save_parameters."""
    folder = tmp_path_factory.mktemp("checkpoints")
    net = make()
    [x], expected = ready(net, (2, 3, 8, 8))
    np.savez(folder / "data.npz", x, *expected)
    net.hybridize()
    forward(net, x)
    net.export(str(folder / "own"), 3)
    last = mx.nd.load(str(folder / "own-0003.params"))
    # The last epoch counts.
    mx.nd.save(str(folder / "own-0001.params"), {name: a * 0 for name, a in last.items()})
    net.save_parameters(str(folder / "c.params"))
    (folder / "text.params").write_text("weights")
    (folder / "text-symbol.json").write_text("a graph")
    (folder / "nested-symbol.json").write_text("[" * 100_000)
    os.mkfifo(folder / "pipe-symbol.json")
    os.mkfifo(folder / "pipe.params")
    whole = (folder / "own-0003.params").read_bytes()
    (folder / "half-0000.params").write_bytes(whole[: len(whole) // 2])
    shutil.copy(folder / "own-symbol.json", folder / "half-symbol.json")
    text = (folder / "own-symbol.json").read_text()
    (folder / "unknown-symbol.json").write_text(text.replace('"Convolution"', '"NoSuchOperator"'))
    looped = json.loads(text)
    looped["nodes"][-1]["inputs"][0] = [len(looped["nodes"]) - 1, 0, 0]
    (folder / "looped-symbol.json").write_text(json.dumps(looped))
    (key,) = (key for key in last if key.endswith("conv0_weight"))
    mx.nd.save(str(folder / "wider.params"), {**last, key: mx.nd.ones((16, 3, 3, 3))})
    net = norms()
    ready(net, (2, 2, 3, 3))
    net.hybridize()
    forward(net, mx.nd.ones((2, 2, 3, 3)))
    net.export(str(folder / "norms"))
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys, tmp_path):
    """Runs a command in the folder and returns its output, or (exit code, output, errors)."""

    def run(text, check=True):
        monkeypatch.chdir(folder)
        try:
            code = command_line.main(text.replace("TMP", str(tmp_path)).split())
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        assert not check or code == 0, err
        return out if check else (code, out, err)

    return run


@pytest.fixture
def data(folder):
    with np.load(folder / "data.npz") as arrays:
        x, *expected = (arrays[key] for key in arrays.files)
    return x, expected


@needs_onnx
@pytest.mark.filterwarnings("ignore:.*Cannot decide type")
def test_export(run, data, tmp_path):
    x, expected = data
    parameters = []
    for source in ("own", "own-symbol.json"):
        out = run(
            f"export {source} -o TMP/m --epoch 3 --fold --onnx TMP/m.onnx --input-shape 2,3,8,8"
        )
        assert "2 layers folded, 0 not" in out
        assert out.count("differs from the net by") == 2
        files = contents(tmp_path)
        assert list(files) == ["m-0003.params", "m-symbol.json", "m.onnx"]
        parameters.append(files["m-0003.params"])
    assert parameters[0] == parameters[1]
    assert_outputs(forward(load(tmp_path / "m", epoch=3), x), expected, EXPORTED[True])
    run("export own -o TMP/plain --dtype float16")
    assert operators(tmp_path / "plain").count("BatchNorm") == 2


@needs_mxnet("1.8", "its SymbolBlock.imports takes no ignore_extra")
@pytest.mark.filterwarnings("ignore:.*Cannot decide type")
def test_a_stock_symbol_has_no_count_of_batches(run, folder, tmp_path):
    run("convert norms-symbol.json -o TMP/m-symbol.json")
    names = (str(tmp_path / "m-symbol.json"), ["data"], str(folder / "norms-0000.params"))
    mx.gluon.SymbolBlock.imports(*names, ignore_extra=True)
    for command in ("export norms -o TMP/e", "convert norms --epoch 0 -o TMP/e"):
        run(command)
        assert not any("tracked" in name for name in mx.nd.load(str(tmp_path / "e-0000.params")))
        load(tmp_path / "e")


@pytest.mark.filterwarnings("ignore:.*Cannot decide type")
@pytest.mark.parametrize("seed", range(3))
def test_epochs(run, tmp_path, seed):
    """Each command reads the epoch that it is given, or says which there are."""
    rng = np.random.default_rng(seed)
    name = str(tmp_path / rng.choice(["model", "m[0-9]*", "m-0007", "m.params", "ä+?"]))
    x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    x = sbn.convert_sync_batchnorm(mx.sym.BatchNorm(x, name="bn"))
    symbol = mx.sym.SoftmaxOutput(x, name="out")
    shapes = {"fc_weight": (2, 3), "fc_bias": 2, "bn_gamma": 2, "bn_beta": 2}
    statistics = {"bn_moving_mean": mx.nd.zeros(2), "bn_moving_var": mx.nd.ones(2)}
    there = sorted(map(int, rng.choice([0, 1, 2, 9, 10, 100, 9999, 10000, 123456], 4, False)))
    for epoch in there:
        values = {key: mx.nd.ones(shape) * epoch for key, shape in shapes.items()}
        mx.model.save_checkpoint(name, epoch, symbol, values, statistics)
    for other in ("-99.params", "-x-9998.params", "-000009998.params", "-9998.params.old", ""):
        shutil.copy(f"{name}-{there[0]:04d}.params", f"{name}{other or '9998.params'}")
    for source in (name, f"{name}-symbol.json"):
        for epoch in [None, *there, 3, 9998, 200000]:
            option = "" if epoch is None else f" --epoch {epoch}"
            for command in ("export", "convert") if option else ("export",):
                text = f"{command} {source}{option} -o TMP/{command}"
                code, out, err = run(text, check=False)
                message = f"seed {seed}: {text}, of {there}: {out}{err}"
                if epoch not in [None, *there]:
                    assert code == 2 and f"({', '.join(map(str, there))})" in err, message
                    continue
                assert code == 0, message
                wanted = there[-1] if epoch is None else epoch
                loaded, arguments, found = mx.model.load_checkpoint(
                    f"{tmp_path}/{command}", epoch or 0
                )
                assert "Custom" not in loaded.tojson(), message
                assert (arguments["bn_beta"].asnumpy() == wanted).all(), message
                assert found.keys() == statistics.keys(), message
    command = f"export {name} --epoch {there[0]} --params {name}-{there[1]:04d}.params -o TMP/both"
    assert "not allowed with" in run(command, check=False)[2]


@pytest.mark.parametrize(
    "command, text",
    [
        ("export missing -o TMP/m", "missing-symbol.json cannot be read (No such file"),
        ("export own --params text.params -o TMP/m", "text.params is not a file of parameters"),
        ("export text -o TMP/m", f"is not a graph that MXNet {mx.__version__} can load"),
        ("export nested -o TMP/m", "nested-symbol.json is not a graph"),
        ("export pipe -o TMP/m", "pipe-symbol.json cannot be read (this is a device or a pipe)"),
        ("export own --params pipe.params -o TMP/m", "pipe.params cannot be read (this is"),
        ("export unknown -o TMP/m", "unknown-symbol.json is not a graph"),
        ("export looped --params c.params -o TMP/m", "precedes its inputs"),
        ("export half -o TMP/m", "half-0000.params is not a file of parameters"),
        ("export own --params c.params -o TMP/m", "c.params lacks 12 of the 13 names in own-sym"),
        (
            "export own --params wider.params -o TMP/m",
            "own-symbol.json: net_conv0_weight is (16, 3, 3, 3), (8, 3, 3, 3) was expected",
        ),
        ("export own --inputs image -o TMP/m", "--inputs names image, which is not in own-symbol"),
        ("export c.params -o TMP/m", "c.params holds parameters and no graph"),
        ("export own -o TMP/m --epoch -1", "'-1' is not an epoch: give an integer from 0"),
        (
            "export own -o TMP/m --epoch 2",
            "There is no own-0002.params for own-symbol.json: choose",
        ),
        (
            "convert own -o TMP/m --epoch 2",
            "There is no own-0002.params for own-symbol.json: choose",
        ),
        ("export own -o TMP/m --onnx TMP/o", "onnx needs input_shape"),
        ("export own -o TMP/m --input-shape 1,x", "'1,x' is not a shape"),
        ("export own -o TMP/m --input-shape 1,0", "'1,0' is not a shape"),
        ("export own -o TMP/m --dtype int8", "invalid choice: 'int8'"),
        ("convert c.params -o TMP/c", "c.params is not a graph"),
        ("export own -o TMP/m\udcff", "m\\udcff-0000.params"),
        ("bake", "invalid choice: 'bake'"),
    ],
)
def test_errors_are_one_sentence_that_names_the_file(run, tmp_path, command, text):
    code, out, err = run(command, check=False)
    assert code == 2 and out == ""
    assert text.replace("TMP", str(tmp_path)) in err, err
    assert err.count("\n") == 1 and err.startswith("python -m gluon_syncbn")
    assert os.listdir(tmp_path) == []


def test_help(run):
    text = run("")
    for command in ("launch", "export", "convert", "doctor"):
        assert command in text and (command == "launch" or run(f"{command} --help"))
    assert re.search("choose from '?launch'?, '?export", run("bake", check=False)[2])


def test_interrupted(run, tmp_path, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(mx.nd, "load", interrupted)
    assert run("export own -o TMP/m", check=False) == (130, "", "Interrupted.\n")
    # While MXNet is imported.
    (tmp_path / "mxnet.py").write_text("raise KeyboardInterrupt")
    done = process("convert", "a", "-o", "b", path=[tmp_path])
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


def test_no_room(run, folder, tmp_path, monkeypatch):
    run("export own -o TMP/m")
    before = contents(tmp_path)

    def full(path, arrays):
        Path(path).write_bytes(b"half")

    monkeypatch.setattr(mx.nd, "save", full)
    code, _, err = run("export own -o TMP/m", check=False)
    assert code == 2 and "m-0000.params cannot be written (it is incomplete" in err
    assert contents(tmp_path) == before


def process(*arguments, run=("-m", "gluon_syncbn"), path=(), package=PACKAGE, cwd="/"):
    path = os.pathsep.join(map(str, [*path, package.parent]))
    return programs.run([*run, *arguments], cwd=cwd, env={**os.environ, "PYTHONPATH": path})


@two_packages
def test_doctor_where_all_is_well(monkeypatch):
    monkeypatch.setenv("DMLC_ROLE", "server")  # which it must not become
    done = process("doctor")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("All is well."), done.stdout
    assert "the checks run without it" in done.stdout
    assert "self-test, 2 CPU devices:   forward and backward agree with NumPy" in done.stdout
    assert re.search("processes of a machine: +meet in shared memory$", done.stdout, re.MULTILINE)
    kernels = (sbn.native.library.library.gluon_syncbn_cuda() or b"").decode()
    kernels = kernels or "not built; GPUs need them, CPUs do not"
    assert re.search(rf"^native CUDA part: +{re.escape(kernels)}$", done.stdout, re.MULTILINE)
    [(place, anchor)] = re.findall(r"^gluoncv: .*: (\S+)#(\S+)$", done.stdout, re.MULTILINE)
    assert f"\n## {anchor}\n" in (PACKAGE.parent / place).read_text("utf-8")


@pytest.mark.parametrize("role", ["server", "scheduler", "worker"])
def test_no_command_takes_the_role_of_its_environment(folder, tmp_path, monkeypatch, role):
    """In another role than a worker's `import mxnet` does not return, or fails without a job."""
    monkeypatch.setenv("DMLC_ROLE", role)
    assert doctor._run("import").result["mxnet"] == mx.__version__
    done = process("convert", "own-symbol.json", "-o", tmp_path / "m", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_without_the_native_library(tmp_path):
    package = tmp_path / "copy" / "gluon_syncbn"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "libgluon_syncbn.so").unlink()
    done = process("doctor", package=package)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "native CPU part:            missing" in done.stdout
    assert "1. The native library of gluon_syncbn is missing" in done.stdout, done.stdout
    assert "Build it again: pip install" in done.stdout
    done = process("convert", "own", "-o", "m", package=package)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "The native library of gluon_syncbn is missing" in done.stderr


@two_packages
@pytest.mark.parametrize(
    "options, program, remedy",
    [
        ([], "raise ImportError('libfoo: no')", "cannot be imported (libfoo: no"),
        ([], "import os; os.abort()", "The process died of signal 6. If python -c 'import mxnet'"),
        (["-OO"], None, "use -O or PYTHONOPTIMIZE=1."),
    ],
)
def test_doctor_where_mxnet_fails(tmp_path, options, program, remedy):
    if program:
        (tmp_path / "mxnet.py").write_text(program)
    done = process("doctor", path=[tmp_path], run=[*options, "-m", "gluon_syncbn"])
    assert done.returncode == 1, done.stderr
    assert "\n1. " in done.stdout and remedy in done.stdout, done.stdout


@two_packages
def test_doctor_knows_every_package_of_mxnet(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mxnet-cu102", "mxnet-model-server"):
        folder = tmp_path / f"{name.replace('-', '_')}-1.8.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.8.0\n")
    found = doctor._Findings()
    doctor._packages(found)
    assert re.search("^mxnet-cu102: +1.8.0$", capsys.readouterr().out, re.MULTILINE)
    (remedy,) = found.remedies
    assert "mxnet and mxnet-cu102 are installed and overwrite each other" in remedy


@two_packages
@pytest.mark.parametrize("gpus, remedies", [(0, 1), (1, 0), (8, 0)])
def test_doctor_of_gpus(monkeypatch, capsys, gpus, remedies):
    state = {"mxnet": "1.9.1", "features": ["CUDA"], "gpus": gpus, "no_shared_memory": "none here"}
    results = {"import": state, "kernels": "", "train": [1e-7, 1 if gpus > 1 else -1]}
    monkeypatch.setattr(doctor, "_run", lambda probe, *_: doctor._Done(results[probe], ""))
    assert doctor.doctor() == remedies
    out = capsys.readouterr().out
    assert ("sees no GPU" in out) == (gpus == 0)
    assert "meet in the store (none here)" in out
    assert ("self-test, 2 GPUs" in out) == (gpus == 8)
    assert ("self-test, 1 GPU:" in out) == (gpus == 1)
    assert ("GPUs read each other's memory" in out) == (gpus == 8)
    monkeypatch.setenv("MXNET_ENGINE_TYPE", "NaiveEngine")
    assert doctor.doctor() == 1
    assert "MXNET_ENGINE_TYPE=NaiveEngine runs one device after another" in capsys.readouterr().out


def test_help_does_not_wait_for_mxnet(tmp_path):
    (tmp_path / "mxnet.py").write_text("raise SystemExit('imported')")
    for way in "-m gluon_syncbn", "-Bmgluon_syncbn export", "-m gluon_syncbn.launch":
        done = process("--help", run=way.split(), path=[tmp_path])
        assert done.returncode == 0 and "usage: " in done.stdout, done.stderr


def test_other_modules_find_the_package_whole(tmp_path):
    """`python -m` imports the package of a module before it runs the module, as with our own."""
    package = tmp_path / "my_gluon_syncbn"
    package.mkdir()
    (package / "launch.py").write_text(
        "import mxnet\nprint(mxnet.nd.CachedOp.__init__.__wrapped__ and __name__)\n"
    )
    for imports in ("from gluon_syncbn import SyncBatchNorm", "import gluon_syncbn"):
        (package / "__init__.py").write_text(f"{imports}\nimport mxnet\n")
        done = process("gluon_syncbn", run=["-m", "my_gluon_syncbn.launch"], path=[tmp_path])
        assert done.stdout == "__main__\n", done.stderr


@pytest.mark.parametrize(
    "program, message",
    [
        ("import time; time.sleep(60)", "it did not end within 2 s."),
        ("raise ValueError('the layer is off')", "the layer is off"),
        ("print('RESULT [0.5, -1]')", "is wrong by 0.5: please report it"),
    ],
)
def test_doctor_survives_a_self_test_that_does_not(monkeypatch, capsys, tmp_path, program, message):
    (tmp_path / "probes.py").write_text(program)
    monkeypatch.setattr(doctor, "_PROBES", str(tmp_path / "probes.py"))
    monkeypatch.setattr(doctor, "_SECONDS", 2 if "sleep" in program else 60)
    found = doctor._Findings()
    doctor._self_test(found, "2 CPU devices", ["cpu:0", "cpu:1"])
    assert message in found.remedies[0]
    assert "self-test, 2 CPU devices" in capsys.readouterr().out
