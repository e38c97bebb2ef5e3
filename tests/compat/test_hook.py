"""The hook is there in every process that needs it, whatever it imports first."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import mxnet_compat
import pytest
from distributed_cluster import needs_horovod

ROOT = Path(__file__).resolve().parents[2]
# A .pth file. Python before 3.13 reads it as the locale says, so a path's letters are escaped.
PACKAGES = f"import sys; sys.path += {[sysconfig.get_path('purelib'), str(ROOT)]!a}\n"
HAS_HOOK = "import sys; assert 'mxnet_compat' in sys.modules; import mxnet; mxnet.nd.ones(1)"


def run(*command, cwd, path=(), python=sys.executable):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [python, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_a_script_that_imports_mxnet_first_in_the_launcher(environment, tmp_path):
    (tmp_path / "script.py").write_text(
        f"{HAS_HOOK}\n"
        "import subprocess\n"
        f'subprocess.run([sys.executable, "-c", {HAS_HOOK!r}], check=True)\n'
        "print('fine')\n"
    )
    arguments = ["-m", "gluon_syncbn.launch", "-n", "1", "script.py"]
    code, output = run(*arguments, cwd=tmp_path, path=[ROOT], python=environment[0])
    assert code == 0 and "[0] fine" in output, output


def test_workers_of_a_data_loader_that_are_not_forked(environment, tmp_path):
    # As from a notebook: the workers do not import the main program.
    code, output = run(
        "-c",
        "import mxnet_compat, mxnet, numpy, multiprocessing\n"
        "multiprocessing.set_start_method('spawn')\n"
        "loader = mxnet.gluon.data.DataLoader(numpy.arange(8.0), 4, num_workers=1)\n"
        "print([float(batch.sum().asscalar()) for batch in loader])",
        cwd=tmp_path,
        path=[ROOT],
        python=environment[0],
    )
    assert code == 0 and "[6.0, 22.0]" in output, output


def test_a_sitecustomize_of_the_user_is_run(environment, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('of the user')")
    path = [ROOT / "mxnet_compat" / "site", tmp_path]
    code, output = run(
        "-c", f"{HAS_HOOK}; print(sys.path)", cwd=tmp_path, path=path, python=environment[0]
    )
    assert code == 0 and output.startswith("of the user\n"), output
    assert "mxnet_compat" not in output


@pytest.fixture
def environment(tmp_path):
    """The Python of a new environment with the packages of this one, where `make` has switched the
    hook on, but not its hook; and its site-packages."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "a.pth").write_text(PACKAGES)
    return str(python), site


def test_the_switch(environment, tmp_path):
    python, site = environment

    def doctor(option):
        return run("-m", "gluon_syncbn", "doctor", option, cwd=tmp_path, python=python)

    for _ in range(2):
        code, output = doctor("--enable-mxnet-on-import")
        assert code == 0, output
        code, output = run("-c", HAS_HOOK, cwd=tmp_path, python=python)
        assert code == 0, output
    code, output = run("-X", "importtime", "-c", "pass", cwd=tmp_path, python=python)
    assert "mxnet_compat" in output and "numpy" not in output and "importlib.util" not in output

    # The package is gone, the file is not.
    (site / "a.pth").unlink()
    assert run("-c", "pass", cwd=tmp_path, python=python) == (0, "")
    (site / "a.pth").write_text(PACKAGES)

    for _ in range(2):
        code, output = doctor("--disable-mxnet-on-import")
        assert code == 0, output
        assert sorted(path.name for path in site.iterdir()) == ["a.pth"]


@needs_horovod
@pytest.mark.skipif(not mxnet_compat.is_needed(), reason="horovodrun needs no switch")
def test_horovodrun_in_a_new_environment(environment, tmp_path):
    """It imports mxnet itself."""
    python, site = environment
    if sys.version_info >= (3, 12):  # Horovod needs distutils, which setuptools has.
        shim = "import _distutils_hack; _distutils_hack.add_shim()\n"
        (site / "a.pth").write_text(PACKAGES + shim)
    command = ["-m", "horovod.runner.launch", "-np", "1", "--gloo", python, "-c", "print('ran')"]
    code, output = run(*command, cwd=tmp_path, python=python)
    assert code != 0 and "Gloo support has not been built" in output, output
    packages = "from gluon_syncbn.cli.doctor import _Findings, _packages; _packages(_Findings())"
    _, output = run("-c", packages, cwd=tmp_path, python=python)
    option = "--enable-mxnet-on-import"
    assert f"; horovodrun needs doctor {option} once\n" in output, output
    run("-m", "gluon_syncbn", "doctor", option, cwd=tmp_path, python=python)
    code, output = run(*command, cwd=tmp_path, python=python)
    assert code == 0 and "ran" in output, output


def test_the_switch_where_nothing_can_be_written(environment, tmp_path):
    python, site = environment
    (site / "mxnet_compat.pth").mkdir()
    option = "--enable-mxnet-on-import"
    code, output = run("-m", "gluon_syncbn", "doctor", option, cwd=tmp_path, python=python)
    assert code == 2 and "cannot be written" in output and "import gluon_syncbn" in output
    assert sorted(path.name for path in site.iterdir()) == ["a.pth", "mxnet_compat.pth"]
