"""Builds the library and the native tests with the commands of setup.py, and reads the compiler's
report on the kernels. Needs nvcc and a C++ compiler, but neither make nor a GPU.

    python benchmarks/gpu/build.py            # registers; exit code 1 if any spill, or if memory is
                                              # not accessed 16 bytes at a time
    python benchmarks/gpu/build.py 80 90      # only for these architectures
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu"
LIBRARY = FOLDER / "libgluon_syncbn.so"
TESTS = ["test_cuda_kernels", "test_cuda_passes"]
# Of the library, beside setup.py's.
EXTRA = ["benchmarks/gpu/kernel_api.cc", "tests/gpu/simgpu/cards.cc"]
HEADERS = ["h", "inc", "cuh", "map"]
# Bytes of a value.
SIZES = {"Half": 2, "BFloat16": 2, "float": 4, "double": 8}


def setup_py():
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("gluon_syncbn_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        spec.loader.exec_module(module)
    finally:
        os.chdir(before)
    return module


def _quiet(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def run_once(command, *more):
    """Runs a compiler or linker, unless it has made its output from the same files before: those
    that it names, `more`, and all headers. Returns the output's path."""
    command = [str(part) for part in command]
    output = command[command.index("-o") + 1]
    headers = (f"{folder}/**/*.{ext}" for folder in ("src", "tests") for ext in HEADERS)
    files = sorted(str(path) for pattern in headers for path in ROOT.glob(pattern))
    files += [*more, *(part for part in command if part != output and os.path.isfile(part))]
    key = hashlib.sha256(repr(command).encode())
    for file in files:
        key.update(Path(file).read_bytes())
    made = Path(f"{output}.made")
    if not (os.path.exists(output) and made.exists() and made.read_text() == key.hexdigest()):
        made.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.remove(output)
        _quiet(command)
        made.write_text(key.hexdigest())
    return output


def build():
    """Builds the library and the native tests, for the architectures that setup.py chooses. Returns
    the library's objects, whose PTX is not compressed, so that the simulator can read it."""
    os.chdir(ROOT)
    os.environ["GLUON_SYNCBN_CUDA"] = "1"
    setup = setup_py()
    setup.run = run_once
    setup.NVCC = [flag for flag in setup.NVCC if not flag.startswith("-Xfatbin")] + [
        "--no-compress"
    ]
    version = re.search(r'"(.+)"', (ROOT / "gluon_syncbn/_version.py").read_text())[1]
    flags = ["-std=c++17", "-O2", "-pthread", "-ffp-contract=off", "-DSBN_REAL_CUDA"]
    compile_test = [*setup.find_compiler(), *flags, "-Isrc/operator", "-Itests/native", "-c"]
    with ThreadPoolExecutor(len(TESTS)) as pool:
        tests = [
            pool.submit(
                run_once,
                [*compile_test, f"tests/native/cuda/{test}.cc", "-o", f"{FOLDER / test}.o"],
            )
            for test in TESTS
        ]
        objects = setup.build_library([*setup.SOURCES, *EXTRA], version, str(FOLDER), str(LIBRARY))
        runtime = [
            f"-L{setup.static_cuda_runtime(setup.find_nvcc())}",
            "-lcudart_static",
            "-ldl",
            "-lrt",
        ]
        tested = [each for each in objects if not each.endswith("api_layers_cc.o")]
        for test in tests:
            own = test.result()
            run_once([*setup.find_compiler(), "-pthread", own, *tested, "-o", own[:-2], *runtime])
    return objects


def report(architectures=()):
    """The report of ptxas: a dictionary for each kernel and architecture."""
    os.chdir(ROOT)
    setup = setup_py()
    nvcc = setup.find_nvcc()
    if nvcc is None:
        sys.exit("nvcc is not found: set NVCC or CUDA_HOME, or put it into PATH.")
    setup.check_nvcc(nvcc)
    FOLDER.mkdir(parents=True, exist_ok=True)
    flags = [flag for flag in setup.NVCC if not flag.startswith("-Xfatbin")]
    flags += ["-ccbin", setup.find_compiler()[0]]

    def compile_for(arch, source):
        name = f"{Path(source).stem}_{arch}"
        kept = FOLDER / f"kept_{name}"
        kept.mkdir(exist_ok=True)
        command = [nvcc, *flags, f"-arch=sm_{arch}", "-Xptxas=-v", "-cubin", source]
        text = _quiet([*command, "--keep", "--keep-dir", str(kept), "-o", str(kept / "cubin")])
        return arch, text, "".join(each.read_text() for each in kept.glob("*.ptx"))

    kernels = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wanted = architectures or setup.known_architectures(nvcc)
        tasks = [(arch, source) for source in setup.CUDA_SOURCES for arch in wanted]
        for arch, text, ptx in pool.map(compile_for, *zip(*tasks)):
            accesses = _accesses(ptx)
            for kernel in _parse(arch, text):
                # Some are in several files.
                kernels[arch, kernel["kernel"]] = {**kernel, **accesses[kernel["kernel"]]}
    return list(kernels.values())


def _short(name):
    name = re.sub(r"\(.*", "", name, flags=re.DOTALL).replace("gluon_syncbn::", "")
    return name.replace("void ", "")


def _accesses(ptx):
    """The number of instructions in each kernel that load 16 bytes of global memory, store 16
    bytes, and store less. (ptxas neither splits nor joins them.)"""
    found = {}
    for part in re.split(r"\.entry ", _quiet_filter(ptx))[1:]:
        found[_short(part)] = {
            "vector_loads": len(re.findall(r"\bld(?:\.global)?(?:\.nc)?\.v(?:4|2\.[bu]64)", part)),
            "vector_stores": len(re.findall(r"\bst(?:\.global)?\.v(?:4|2\.[bu]64)", part)),
            "narrow_stores": len(re.findall(r"\bst(?:\.global)?\.[bufs]\d", part)),
        }
    return found


def narrow(kernels):
    """Kernels for vectors of 16 bytes that do not access large arrays in whole ones: sums load the
    eight vectors of a run from each array, and what writes y or dx has no narrow stores."""
    missed = []
    for kernel in kernels:
        found = re.match(r"(map|sum_chunks)<(\w+), (.+), (\d+), \w+>$", kernel["kernel"])
        if not found or SIZES[found[2]] * int(found[4]) < 16:
            continue
        if found[1] == "map":
            whole = kernel["vector_stores"] >= 2 and kernel["narrow_stores"] == 0
        else:
            whole = kernel["vector_loads"] >= 8 * int(found[3])
        if not whole:
            missed.append(kernel)
    return missed


def _parse(arch, text):
    names = _quiet_filter(text) if "_Z" in text else text
    pattern = (
        r"Compiling entry function '(?P<name>.+?)' for.*?"
        r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
        r"Used (?P<registers>\d+) registers"
    )
    for found in re.finditer(pattern, names, re.DOTALL):
        yield {
            "kernel": _short(found["name"]),
            "arch": arch,
            "registers": int(found["registers"]),
            "spilled_bytes": int(found["stores"]) + int(found["loads"]),
        }


def _quiet_filter(text):
    # cu++filt is part of CUDA.
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if not tool:
        return text
    done = subprocess.run([tool], input=text, stdout=subprocess.PIPE, text=True)
    return done.stdout if done.returncode == 0 else text


def print_report(kernels):
    architectures = sorted({kernel["arch"] for kernel in kernels})
    print("Registers of each kernel; !n: n bytes are spilled.")
    width = max(len(kernel["kernel"]) for kernel in kernels)
    print("".ljust(width), *(f"sm_{arch}".rjust(8) for arch in architectures))
    table = {(kernel["kernel"], kernel["arch"]): kernel for kernel in kernels}
    for name in sorted({kernel["kernel"] for kernel in kernels}):
        cells = []
        for arch in architectures:
            kernel = table[name, arch]
            spilled = f"!{kernel['spilled_bytes']}" if kernel["spilled_bytes"] else ""
            cells.append(f"{spilled} {kernel['registers']}".rjust(8))
        print(name.ljust(width), *cells)
    spilled = [kernel for kernel in kernels if kernel["spilled_bytes"]]
    thin = narrow(kernels)
    for kernel in thin:
        print(f"{kernel['kernel']} for sm_{kernel['arch']} does not access whole vectors.")
    print(f"{len(table)} kernels, {len(spilled)} of which spill.")
    return not spilled and not thin


if __name__ == "__main__":
    sys.exit(not print_report(report([int(arch) for arch in sys.argv[1:]])))
