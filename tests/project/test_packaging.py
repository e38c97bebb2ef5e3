"""The package as users get it: built, installed, loaded, and refused with a reason."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "gluon_syncbn/libgluon_syncbn.so"
VERSION = "gluon_syncbn/_version.py"
NOT_COPIED = ("*.egg-info", "*.so", "__pycache__", "build", "dist", "runs")

FORWARD = """
import gluon_syncbn, mxnet as mx
layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
layer.initialize()
x = mx.nd.random.normal(5, 2, shape=(4, 3, 6, 6))
with mx.autograd.record():
    y = layer(x)
assert abs(y.mean().asscalar()) < 1e-5 and abs(y.square().mean().asscalar() - 1) < 1e-3
print(gluon_syncbn.__version__, gluon_syncbn.__file__)
"""
PROGRAM = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]


def run(command, cwd, check=True, **environment):
    """Run a command away from this checkout and its build settings; return the finished process."""
    ours = ("CXX", "CXXFLAGS", "LDFLAGS", "PYTHONPATH", "PYTHONHOME")
    kept = (k for k in os.environ if k not in ours and not k.startswith("GLUON_SYNCBN"))
    # The kernels for GPUs take a minute; the library that other tests use has them.
    env = {**{k: os.environ[k] for k in kept}, "GLUON_SYNCBN_CUDA": "0", **environment}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert not check or done.returncode == 0, done.stdout
    return done


def pip(*arguments, cwd, **options):
    quiet = ["--no-index", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    return run([sys.executable, "-m", "pip", *arguments, *quiet], cwd, **options)


def build_wheel(source, folder, **environment):
    pip("wheel", "--wheel-dir", folder, source, cwd=folder.parent, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment_with(folder, wheel):
    """A virtual environment with the wheel, which borrows everything else from the one in use."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    run([sys.executable, *install, "--disable-pip-version-check", wheel], folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    borrowed = Path(importlib.util.find_spec("mxnet").origin).parents[1]
    # Python before 3.13 reads it as the locale says, so a path's letters are escaped.
    (site / "borrowed.pth").write_text(f"import sys; sys.path.append({ascii(str(borrowed))})\n")
    return python


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources, files unknown to git included, without anything built."""
    folder = tmp_path_factory.mktemp("checkout") / "gluon_syncbn"
    names = ".git", ".venv", ".nox", ".*_cache", ".hypothesis"
    ignored = shutil.ignore_patterns(*NOT_COPIED, *names)
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def sdist(checkout):
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    # It needs no compiler.
    run([sys.executable, "-c", code], checkout, PATH=str(checkout / "docs"))
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"), CXXFLAGS="-O0")


@pytest.fixture
def project(checkout, tmp_path):
    """The build files around a package and a native source of a line each."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(checkout / name, tmp_path)
    package, operator = tmp_path / "gluon_syncbn", tmp_path / "src" / "operator" / "numerics"
    package.mkdir()
    operator.mkdir(parents=True)
    (operator.parent / "api").mkdir()
    (package / "__init__.py").touch()
    (package / "_version.py").write_text('__version__ = "1.2.3"\n')
    (operator / "one.h").write_text("#define ONE 1\n")
    (operator / "one.cc").write_text(
        '#include "numerics/one.h"\n'
        'extern "C" __attribute__((visibility("default"))) int gluon_syncbn_one() { return ONE; }\n'
    )
    exports = Path("src", "operator", "api", "exports.map")
    shutil.copy(checkout / exports, tmp_path / exports)
    return tmp_path


def version_of(source):
    text = (source / VERSION).read_text()
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


def test_wheel_serves_every_python_version_and_holds_the_package_alone(checkout, wheel):
    version = version_of(checkout)
    assert re.fullmatch(rf"gluon_syncbn-{re.escape(version)}-py3-none-linux_\w+\.whl", wheel.name)
    packages = [checkout / "gluon_syncbn", checkout / "mxnet_compat", checkout / "mxnet_launch"]
    sources = [
        *(path for root in packages for path in root.rglob("*.py")),
        packages[0] / "py.typed",
    ]
    modules = {str(path.relative_to(checkout)) for path in sources}
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        (metadata,) = (name for name in files if name.endswith("/METADATA"))
        # Spaced by version of setuptools.
        metadata = archive.read(metadata).decode().replace(" ", "")
    assert {name for name in files if ".dist-info/" not in name} == modules | {LIBRARY}
    assert "Requires-Python:>=3.8\n" in metadata
    for extra, mxnet in (("cpu", "mxnet"), ("cu112", "mxnet-cu112")):
        assert re.search(rf"Requires-Dist:{mxnet}==1\.9\.1;.*extra==[\"']{extra}[\"']", metadata)


def test_library_needs_system_libraries_alone_and_knows_no_folder(checkout, wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(LIBRARY, tmp_path))
    dynamic = run(["readelf", "--dynamic", library], tmp_path, LC_ALL="C").stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", dynamic))
    assert needed <= {"libc", "libgcc_s", "libm", "libpthread", "libstdc++"} | {
        name for name in needed if name.startswith("ld-linux")
    }
    # MXNet catches this library's exceptions, so both must unwind with the one libgcc.
    assert "libgcc_s" in needed
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    symbols = run(["nm", "--dynamic", "--defined-only", library], tmp_path).stdout.split()[2::3]
    assert all(name.startswith("gluon_syncbn_") for name in symbols)
    for folder in (checkout, ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        assert os.fsencode(folder) not in library.read_bytes()


def test_installed_wheel_runs_the_program_of_readme(checkout, wheel, tmp_path):
    python = environment_with(tmp_path / "environment", wheel)
    version, path = run([python, "-c", FORWARD], tmp_path).stdout.split()[-2:]
    assert version == version_of(checkout)
    assert tmp_path in Path(path).parents
    assert run([python, "-c", PROGRAM], tmp_path).stdout.startswith("loss ")
    command = Path(python).with_name("gluon-syncbn")
    assert run([command, "--version"], tmp_path).stdout == f"gluon_syncbn {version}\n"
    (tmp_path / "script.py").write_text("import gluon_syncbn; print('ran')")
    lines = run([command, "launch", "-n", "2", "script.py"], tmp_path).stdout.splitlines()
    assert sorted(lines) == ["[0] ran", "[1] ran"]
    blank = "import gluon_syncbn, mxnet as mx; mx.sym.var('x').save('a-symbol.json')"
    run([python, "-c", blank], tmp_path)
    output = run([command, "convert", "a-symbol.json", "-o", "b-symbol.json"], tmp_path).stdout
    assert "none became BatchNorm" in output


def test_compiler_and_flags_of_the_user_are_used(project):
    compiler = project / "compiler"
    compiler.write_text('#!/bin/sh\nprintf "<%s>" "$@" >>calls\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    flags = {"CXXFLAGS": "-O1 '-DTEXT=two words'", "LDFLAGS": "-Wl,-z,now"}
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    run(build, project, CXX=f"{compiler} -g0", **flags)
    calls = (project / "calls").read_text()
    wanted = ["-g0", "-O1", "-DTEXT=two words", '-DGLUON_SYNCBN_VERSION="1.2.3"', "-Wl,-z,now"]
    assert [flag for flag in wanted if f"<{flag}>" not in calls] == []
    assert calls.index("<-O3>") < calls.index("<-O1>")


@pytest.mark.parametrize("named", [None, "no-such-compiler -m64"])
def test_missing_compiler_is_one_sentence(project, named):
    empty = project / "empty"
    empty.mkdir()
    done = pip(
        *("wheel", "--wheel-dir", project / "wheel", project),
        cwd=project,
        check=False,
        PATH=str(empty),
        **({"CXX": named} if named else {}),
    )
    assert done.returncode != 0
    (line,) = (line for line in done.stdout.splitlines() if "C++17 compiler" in line)
    assert ("CXX is no-such-compiler" if named else "g++, c++ and clang++ are not found") in line
    assert "apt install g++" in line and "set CXX" in line
    assert "Traceback" not in done.stdout


@pytest.fixture
def package(wheel, tmp_path):
    """A folder with the package alone, as the wheel holds it, to be damaged."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "package")
    return tmp_path / "package"


def refusal(folder, prelude="", flag="-s"):
    """Import the package in the folder, and return the sentence it ends with."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{prelude}\nimport gluon_syncbn"
    done = run([sys.executable, flag, "-c", code], folder, check=False)
    assert done.returncode == 1, done.stdout
    kind, _, sentence = done.stdout.splitlines()[-1].partition(": ")
    assert kind == "ImportError", done.stdout
    return sentence


NO_LIBRARY = "raise OSError('libcudart.so.11.0: cannot open shared object file')\n"
PACKAGES = f"sys.path.append({str(Path(importlib.util.find_spec('mxnet').origin).parents[1])!r})"
INSTALL = r"pip install (.*\[cpu\]|--no-deps mxnet==1\.9\.1)"


@pytest.mark.parametrize(
    "text, prelude, sentence",
    [
        (None, "", rf"needs MXNet 1\.7 to 1\.9\.1, which is not installed: {INSTALL}"),
        ("import numpy", "", "needs numpy, which is not installed: pip install numpy"),
        (
            "__version__ = '1.6.0'",
            PACKAGES,
            r"needs MXNet 1\.7 to 1\.9\.1.*found 1\.6\.0.*==1\.9\.1",
        ),
        (NO_LIBRARY, PACKAGES, r"cannot be imported \(libcudart.*reinstall.*CUDA 11"),
    ],
)
def test_what_mxnet_needs_is_named(package, text, prelude, sentence):
    """In a Python without any packages but this one, and an MXNet of the given text."""
    if text:
        (package / "mxnet.py").write_text(text)
    assert re.search(sentence, refusal(package, prelude, flag="-S"))


def for_another_machine(package):
    binary = bytearray((package / LIBRARY).read_bytes())
    binary[18:20] = (0x2A).to_bytes(2, sys.byteorder)  # A SuperH.
    (package / LIBRARY).write_bytes(binary)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (
            lambda package: (package / LIBRARY).unlink(),
            r"is missing \(.*libgluon_syncbn\.so\).*pip",
        ),
        (for_another_machine, r"cannot be loaded \(.*\).*pip install"),
        (
            lambda package: (package / VERSION).write_text('__version__ = "9.9.9"\n'),
            r"\d\.\d.*9\.9\.9.*pip install",
        ),
    ],
)
def test_a_library_that_does_not_fit(package, damage, sentence):
    damage(package)
    assert re.search(sentence, refusal(package))
