"""How exports write their files: whole or not at all, whatever fails."""

import itertools
import os
from pathlib import Path

import gluon_syncbn as sbn
import mxnet as mx
import programs
import pytest
from deploy_nets import contents, sequential
from gluon_syncbn.deploy import files
from mxnet.gluon import nn


def small(path, value):
    """Exports a small net whose weights have this value: 2 kB of symbol, 360 kB of parameters."""
    net = sequential(nn.Dense(300, in_units=300), sbn.SyncBatchNorm())
    net.initialize(mx.init.Constant(value))
    net(mx.nd.ones((2, 300)))
    sbn.export(net, path)


def test_no_folder_device_or_pipe_is_replaced(tmp_path):
    with pytest.raises(sbn.FileError, match=f"the folder {tmp_path}/no/such does not exist"):
        small(tmp_path / "no" / "such" / "m", 1)
    for name, make, why in (
        ("m-0000.params", os.mkdir, "a folder has"),
        ("m-0000.params", os.mkfifo, "this is a device"),
        ("m-symbol.json", lambda path: os.symlink("/dev/null", path), "this is a device"),
    ):
        make(tmp_path / name)
        kind = os.lstat(tmp_path / name).st_mode
        with pytest.raises(sbn.FileError, match=f"{name} cannot be written .{why}"):
            small(tmp_path / "m", 1)
        assert os.listdir(tmp_path) == [name] and os.lstat(tmp_path / name).st_mode == kind
        os.rmdir(tmp_path / name) if make is os.mkdir else os.unlink(tmp_path / name)


# Writes files, and ends before the n-th one is renamed.
KILLED = """
import itertools, os, sys
from gluon_syncbn.deploy import files

call, *paths = sys.argv[1:]
calls = itertools.count(1)

def replace(*args, rename=os.replace):
    if next(calls) == int(call):
        os._exit(9)
    rename(*args)

os.replace = replace
files.write_all({path: files.bytes_writer(b"new") for path in paths})
"""


@pytest.mark.long
def test_an_export_that_is_killed_leaves_no_mixed_files(tmp_path):
    """Its first file, the symbol, is missing where the others are not all old, or all new."""
    paths = [str(tmp_path / name) for name in ("m-symbol.json", "m-0000.params", "m.onnx")]
    found = []
    for call in itertools.count(1):
        for path in paths:
            Path(path).write_bytes(b"old")
        done = programs.run(["-c", KILLED, call, *paths])
        was_killed = done.returncode == 9
        assert was_killed or done.returncode == 0
        values = [Path(path).read_bytes() if os.path.exists(path) else None for path in paths]
        assert values[0] is None or len(set(values)) == 1, (call, values)
        found.append(values[0])
        assert was_killed == any(name.endswith("tmp") for name in os.listdir(tmp_path))
        for name in os.listdir(tmp_path):
            if name.endswith("tmp"):
                os.unlink(tmp_path / name)
        if not was_killed:
            break
    assert found[0] == b"old" and found[-1] == b"new" and None in found


@pytest.mark.parametrize(
    "function, name", [("fsync", ""), ("replace", "m-symbol.json"), ("replace", "m-0000.params")]
)
def test_an_error_leaves_the_old_files(function, name, tmp_path, monkeypatch):
    """When a file is made durable, and between two renames."""
    small(tmp_path / "m", 1)
    before, call = contents(tmp_path), getattr(os, function)

    def fail(source, target=""):
        if target.endswith(name) and not str(source).endswith(".old.tmp"):
            raise OSError(28, "No space left on device")
        call(source, target)

    monkeypatch.setattr(files.os, function, fail)
    with pytest.raises(sbn.FileError, match=f"{name} cannot be written .No space left on device."):
        small(tmp_path / "m", 2)
    assert contents(tmp_path) == before


def test_files_have_the_usual_rights_or_keep_theirs(tmp_path):
    small(tmp_path / "m", 1)
    (tmp_path / "plain").write_text("")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    rights = {"m-0000.params": 0o640, "m-symbol.json": 0o444}
    for name, mode in rights.items():
        (tmp_path / name).chmod(mode)
    small(tmp_path / "m", 2)
    assert {name: (tmp_path / name).stat().st_mode & 0o777 for name in rights} == rights
