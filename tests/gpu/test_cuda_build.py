"""The CUDA build of setup.py, and its errors."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import build  # noqa: E402

pytestmark = pytest.mark.long

nvcc = build.setup_py().find_nvcc()
needs_nvcc = pytest.mark.skipif(nvcc is None, reason="nvcc is not found")


def fake_nvcc(folder, version, architectures=()):
    folder.mkdir(exist_ok=True)
    path = folder / "nvcc"
    names = " ".join(f"compute_{arch}" for arch in architectures)
    path.write_text(
        f'#!/bin/sh\ncase "$1" in --version) echo "Cuda compilation tools, release {version}, V";;'
        f" --list-gpu-arch) echo {names};; esac\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def setup(monkeypatch):
    for name in ("CUDA", "CUDA_ARCHS", "PORTABLE"):
        monkeypatch.delenv(f"GLUON_SYNCBN_{name}", raising=False)
    for name in ("NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    return build.setup_py()


def test_an_old_nvcc_is_refused_with_its_version(setup, tmp_path):
    with pytest.raises(SystemExit, match=r"nvcc of CUDA 11\.2 or newer.* is CUDA 10\.2.*CUDA=0"):
        setup.check_nvcc(str(fake_nvcc(tmp_path, "10.2")))
    for version in ("11.2", "12.9", "13.0"):
        setup.check_nvcc(str(fake_nvcc(tmp_path, version)))


@pytest.fixture
def driver(setup, tmp_path, monkeypatch):
    """Makes setup.py find GPUs of these compute capabilities, in a driver's library."""
    load = ctypes.CDLL

    def install(*gpus):
        source = tmp_path / "cuda.c"
        source.write_text(
            f"static int gpus[] = {{{', '.join(map(str, [*gpus, 0]))}}};\n"
            "int cuInit(unsigned flags) { return flags; }\n"
            f"int cuDeviceGetCount(int* count) {{ *count = {len(gpus)}; return 0; }}\n"
            "int cuDeviceGetAttribute(int* value, int which, int gpu) {\n"
            "  *value = which == 75 ? gpus[gpu] / 10 : which == 76 ? gpus[gpu] % 10 : -1;\n"
            "  return 0;\n}\n"
        )
        library = tmp_path / f"libcuda-{len(gpus)}.so"
        command = [*setup.find_compiler(), "-xc", "-shared", "-fPIC", source, "-o", library]
        subprocess.run(command, check=True)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: load({"libcuda.so.1": library}[name]))

    def none(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", none)
    return install


KNOWN = [75, 80, 86, 89, 90]
ALL = [75, 80, 90], 90


@pytest.mark.parametrize(
    "asked, gpus, architectures",
    [
        ("", None, None),
        ("", (), None),
        ("CUDA=1", None, ALL),
        ("", (86, 75, 86), ([75, 86], 86)),
        ("CUDA=0", (86, 75, 86), None),
        # As for a wheel.
        ("PORTABLE=1", (), ALL),
        ("PORTABLE=1", (86,), ALL),
    ],
)
def test_kernels_are_built_where_nvcc_and_a_gpu_are(
    setup, driver, tmp_path, monkeypatch, asked, gpus, architectures
):
    path = str(fake_nvcc(tmp_path, "12.0", KNOWN))
    monkeypatch.setenv("NVCC", path)
    if asked:
        monkeypatch.setenv(*f"GLUON_SYNCBN_{asked}".split("="))
    if gpus is not None:
        driver(*gpus)
    assert setup.nvcc_for_kernels() == (path if architectures else None)
    if architectures:
        assert setup.cuda_architectures(path) == architectures


def test_kernels_that_cannot_be_built(setup, tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC", str(tmp_path / "no-such-nvcc"))
    monkeypatch.setenv("GLUON_SYNCBN_CUDA", "1")
    with pytest.raises(SystemExit, match="CUDA=1.*nvcc is not found.*CUDA_HOME"):
        setup.nvcc_for_kernels()


@pytest.mark.parametrize(
    "arguments, built",
    [
        (["MXNET=cpu"], "0"),
        (["MXNET=cpu", "GLUON_SYNCBN_CUDA=1"], "1"),
        (["MXNET=cu112"], "1"),
        (["MXNET=cu112", "NVCC=/no/nvcc"], "0"),
        (["MXNET=cu112", "GLUON_SYNCBN_CUDA=0"], "0"),
    ],
)
def test_make_builds_kernels_for_mxnet_with_gpus(setup, tmp_path, monkeypatch, arguments, built):
    monkeypatch.setenv("NVCC", str(fake_nvcc(tmp_path, "12.0", [80])))
    command = ["make", "--always-make", "--dry-run", "environment", *arguments]
    # `make` may run this test.
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MXNET", "MFL"))
    }
    environment.update(each.split("=") for each in arguments)
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert f"export GLUON_SYNCBN_CUDA={built};" in done.stdout, done


@pytest.mark.parametrize(
    "gpu, offered, machine, ptx",
    [
        # This machine gets code for its GPU.
        (86, KNOWN, [86], 86),
        (87, KNOWN, [86], 86),  # Unknown to this nvcc, but of a generation that it knows.
        (120, KNOWN, [75, 80, 90], 90),  # Newer: the driver compiles PTX.
        # Where there is none, each generation gets some.
        (None, [35, 37, 50, 52, 60, 61, 70, 72, 75, 80, 86], [50, 60, 70, 80], 86),  # CUDA 11.2
        (None, [50, 52, 60, 61, 70, 75, 80, 86, 89, 90], [50, 60, 70, 80, 90], 90),  # CUDA 12.0
        (None, [75, 80, 86, 89, 90, 100, 103, 120, 121], [75, 80, 90, 100, 120], 121),
    ],
)
def test_every_generation_gets_machine_code(setup, driver, tmp_path, gpu, offered, machine, ptx):
    if gpu:
        driver(gpu)
    path = fake_nvcc(tmp_path, "12.0", offered)
    assert setup.cuda_architectures(str(path)) == (machine, ptx)


def test_unknown_settings_are_refused(setup, driver, tmp_path, monkeypatch):
    path = fake_nvcc(tmp_path, "12.0", [70, 80, 90])
    for archs in ("foo", "80 10"):
        monkeypatch.setenv("GLUON_SYNCBN_CUDA_ARCHS", archs)
        with pytest.raises(SystemExit, match=f"names {archs[-3:].strip()}, and .* knows 70 80 90"):
            setup.cuda_architectures(str(path))
    for archs in ("80, 90", "90 80"):
        monkeypatch.setenv("GLUON_SYNCBN_CUDA_ARCHS", archs)
        assert setup.cuda_architectures(str(path)) == ([80, 90], 90)
    monkeypatch.setenv("GLUON_SYNCBN_CUDA", "maybe")
    with pytest.raises(SystemExit, match="GLUON_SYNCBN_CUDA=maybe is unknown: set it to 1"):
        setup.nvcc_for_kernels()


def test_only_what_changed_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    source, header, output = (tmp_path / name for name in ("a.cc", "src/a.h", "out/a.o"))
    header.parent.mkdir()
    made = tmp_path / "made"
    compiler = ["sh", "-c", f'! grep wrong "$1" && touch "$3" && echo "$4" >>{made}', "sh"]

    def run(flag="-O2"):
        before = made.read_text() if made.exists() else ""
        assert build.run_once([*compiler, source, "-o", output, flag]) == str(output)
        assert output.exists()
        return made.read_text() != before

    source.write_text("int a;")
    assert run() and not run()
    for change in (source, header):
        change.write_text("int b;")
        assert run() and not run()
    assert run("-O3") and not run("-O3")
    output.unlink()
    assert run("-O3") and not run("-O3")
    # Nothing is left of what failed.
    source.write_text("wrong")
    for _ in range(2):
        with pytest.raises(SystemExit, match="wrong"):
            run("-O3")
        assert not output.exists()


@needs_nvcc
@pytest.mark.timeout(600)
def test_kernels_spill_no_registers_and_access_whole_vectors():
    # Those of most servers; `make cuda-report` has all.
    known = build.setup_py().known_architectures(nvcc)
    kernels = build.report([max(arch for arch in known if arch <= 90)])
    assert len(kernels) > 50
    assert [kernel for kernel in kernels if kernel["spilled_bytes"]] == []
    assert build.narrow(kernels) == []
    # Half of the kernels are for other vectors, or for small arrays.
    none = {"vector_loads": 0, "vector_stores": 0}
    assert len(build.narrow([{**kernel, **none} for kernel in kernels])) > 50
    # Two blocks of 256 threads at a time, to hide the latency of memory.
    assert max(kernel["registers"] for kernel in kernels) <= 128


@needs_nvcc
@pytest.mark.skipif(
    os.environ.get("GLUON_SYNCBN_CUDA") != "1",
    reason="kernels are not asked for: GLUON_SYNCBN_CUDA=1",
)
def test_the_library_holds_the_kernels_and_needs_no_driver():
    library = ROOT / "gluon_syncbn" / "libgluon_syncbn.so"
    code = (
        f"import ctypes; library = ctypes.CDLL({str(library)!r}); "
        "library.gluon_syncbn_cuda.restype = ctypes.c_char_p; print(library.gluon_syncbn_cuda())"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert re.search(r"CUDA \d+\.\d+ for sm_", done.stdout), done
    if shutil.which("readelf"):
        text = subprocess.run(
            ["readelf", "-d", library], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        assert "libcuda" not in text
