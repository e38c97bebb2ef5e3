"""Builds gluon_syncbn/libgluon_syncbn.so. All else about the package is in pyproject.toml."""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

FOLDER = "src/operator"
SOURCES = sorted(glob(f"{FOLDER}/*/*.cc"))
CUDA_SOURCES = sorted(glob(f"{FOLDER}/*/*.cu"))
EXPORTS = f"{FOLDER}/api/exports.map"

# -ffp-contract=off: no result may depend on whether the compiler fuses a multiplication with an
# addition. No -march: the binary runs on every machine of its architecture, and the sources choose
# vector code when they run.
COMPILE = "-std=c++17 -O3 -fPIC -pthread -fvisibility=hidden -ffp-contract=off".split()
COMPILE.append(f"-I{FOLDER}")

# -fmad=false: as above. IEEE division and square root are the default.
NVCC = "-std=c++17 -O3 -fmad=false -Xfatbin=-compress-all -Wno-deprecated-gpu-targets".split()
NVCC += [f"-I{FOLDER}", "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off"]

# The oldest that has C++17 and --threads.
OLDEST_NVCC = (11, 2)

# libgcc and libstdc++ stay shared, as MXNet catches this library's exceptions. A static libgcc
# would abort the process, and a static libstdc++ would treat each error as uncaught.
LINK = f"-shared -pthread -Wl,--no-undefined -Wl,--version-script={EXPORTS}".split()


def find_compiler():
    """The command of the C++ compiler: $CXX, or else the first of g++, c++ and clang++."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    came = (
        f"CXX is {named[0]}, which is not found" if named else "g++, c++ and clang++ are not found"
    )
    sys.exit(
        f"gluon_syncbn needs a C++17 compiler to build its native library, and {came}: install one "
        "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; conda: conda install gxx) "
        "or set CXX to the one you have."
    )


def is_portable():
    """Whether the library is to run on other machines (make wheel)."""
    return os.environ.get("GLUON_SYNCBN_PORTABLE") == "1"


def find_gpus():
    """The compute capabilities of this machine's GPUs, such as [80, 90], according to the
    driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, major, minor = (ctypes.c_int() for _ in range(3))
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = set()
    for gpu in range(count.value):
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
        for number, value in ((75, major), (76, minor)):
            cuda.cuDeviceGetAttribute(ctypes.byref(value), number, gpu)
        found.add(10 * major.value + minor.value)
    return sorted(found)


def find_nvcc():
    """The path of nvcc, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = os.pathsep.join([os.path.join(home, "bin"), os.environ.get("PATH", os.defpath)])
    return shutil.which(os.environ.get("NVCC", "nvcc"), path=places)


def nvcc_for_kernels():
    """The path of nvcc if CUDA kernels are to be built, or None. GLUON_SYNCBN_CUDA=0 never builds
    them, 1 always does. By default they are built if nvcc is found, and this machine has a GPU or a
    wheel is being built."""
    wanted = os.environ.get("GLUON_SYNCBN_CUDA", "")
    if wanted not in ("", "0", "1"):
        sys.exit(
            f"GLUON_SYNCBN_CUDA={wanted} is unknown: set it to 1 for CUDA kernels, to 0 for none, "
            "or unset it to have them where nvcc and a GPU are found."
        )
    if wanted == "0":
        return None
    if wanted == "" and not is_portable() and not find_gpus():
        return None
    nvcc = find_nvcc()
    if nvcc is None and wanted == "1":
        sys.exit(
            "gluon_syncbn was to be built with CUDA kernels (GLUON_SYNCBN_CUDA=1), and nvcc is not "
            "found: set NVCC or CUDA_HOME, or put it into PATH."
        )
    return nvcc


def ask(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout if done.returncode == 0 else ""


def check_nvcc(nvcc):
    found = re.search(r"release (\d+)\.(\d+)", ask(nvcc, "--version"))
    if found is None or tuple(map(int, found.groups())) < OLDEST_NVCC:
        came = f"CUDA {found[1]}.{found[2]}" if found else "no CUDA compiler"
        sys.exit(
            f"gluon_syncbn needs nvcc of CUDA {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} or newer, and "
            f"{nvcc} is {came}: set NVCC to a newer one, or GLUON_SYNCBN_CUDA=0 for a build "
            "without CUDA kernels."
        )


def known_architectures(nvcc):
    """The architectures that nvcc knows, from Maxwell on."""
    known = {int(arch) for arch in re.findall(r"compute_(\d+)\b", ask(nvcc, "--list-gpu-arch"))}
    return sorted(arch for arch in known if arch >= 50)


def cuda_architectures(nvcc):
    """The architectures for machine code, such as [70, 80, 90], and the one for PTX, which future
    GPUs use. By default, machine code is for this machine's GPUs and PTX for the newest of them.
    For a wheel, or without a GPU, machine code is for the oldest of each generation from Maxwell on
    that this nvcc knows, as it runs on the whole generation, and PTX is for the newest.
    GLUON_SYNCBN_CUDA_ARCHS="80 90" overrides this."""
    chosen = os.environ.get("GLUON_SYNCBN_CUDA_ARCHS", "").replace(",", " ").split()
    known = known_architectures(nvcc)
    unknown = [arch for arch in chosen if arch not in map(str, known)]
    if unknown:
        sys.exit(
            f"GLUON_SYNCBN_CUDA_ARCHS names {' '.join(unknown)}, and {nvcc} knows "
            f"{' '.join(map(str, known))}: choose of these, or unset it."
        )
    if chosen:
        machine = sorted(map(int, chosen))
        return machine, machine[-1]
    here = set()
    for gpu in [] if is_portable() else find_gpus():
        here.update([arch for arch in known if gpu // 10 * 10 <= arch <= gpu][-1:])
    if here:
        return sorted(here), max(here)
    oldest = {}
    for arch in known:
        oldest.setdefault(arch // 10, arch)
    return sorted(oldest.values()), known[-1]


def static_cuda_runtime(nvcc):
    """The folder of libcudart_static.a. Linked with it, the library loads without a driver, and
    next to the runtimes of other versions that MXNet and others bring."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
    for folder in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"):
        if os.path.exists(os.path.join(root, folder, "libcudart_static.a")):
            return os.path.join(root, folder)
    sys.exit(
        f"libcudart_static.a is not found near {nvcc}: install the whole CUDA toolkit, or set "
        "GLUON_SYNCBN_CUDA=0 for a build without CUDA kernels."
    )


def cuda_command(nvcc, compiler):
    """The nvcc command, without source and output."""
    machine, ptx = cuda_architectures(nvcc)
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in machine]
    codes.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    names = " ".join(f"sm_{arch}" for arch in machine) + f", PTX {ptx}"
    macro = f'-DGLUON_SYNCBN_CUDA_ARCHITECTURES="{names}"'
    # The files are compiled side by side already.
    threads = f"--threads={max(1, min(os.cpu_count() // len(CUDA_SOURCES), len(codes)))}"
    own = shlex.split(os.environ.get("NVCCFLAGS", ""))
    return [nvcc, "-ccbin", compiler[0], *NVCC, threads, *codes, macro, *own]


def run(command):
    """Run the compiler, show what it says, and end the build without a traceback if it fails."""
    line = " ".join(map(shlex.quote, command))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(line, done.stdout, sep="\n", end="", flush=True)
    if done.returncode:
        sys.exit(
            f"gluon_syncbn was not built: see the compiler's messages above. It ran as: {line}"
        )


def build_library(sources, version, folder, library):
    """Compile into `folder` and link. benchmarks/gpu uses this too, without setuptools."""
    compiler = find_compiler()
    define = f'-DGLUON_SYNCBN_VERSION="{version}"'
    flags = [*COMPILE, define, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    os.makedirs(folder, exist_ok=True)

    def compile_source(source, command):
        output = os.path.join(folder, re.sub(r"\W+", "_", os.path.relpath(source, FOLDER)) + ".o")
        run([*command, "-c", source, "-o", output])
        return output

    tasks, link = [(source, [*compiler, *flags]) for source in sources], [*LINK]
    nvcc = nvcc_for_kernels()
    if nvcc:
        check_nvcc(nvcc)
        # First, as they take longest.
        tasks[:0] = [(source, cuda_command(nvcc, compiler)) for source in CUDA_SOURCES]
        link += [f"-L{static_cuda_runtime(nvcc)}", "-lcudart_static", "-ldl", "-lrt"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_source, *zip(*tasks)))
    os.makedirs(os.path.dirname(library), exist_ok=True)
    link += shlex.split(os.environ.get("LDFLAGS", ""))
    # Libraries come after the objects that need them.
    run([*compiler, *objects, "-o", library, *link])
    return objects


def main():
    # Imported here, as build_library() does not need setuptools.
    from setuptools import Extension, setup
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build_ext import build_ext

    class BuildLibrary(build_ext):
        """Builds a plain shared library, independent of Python's headers, symbols and version."""

        def get_ext_filename(self, fullname):
            return os.path.join(*fullname.split(".")) + ".so"

        def build_extension(self, ext):
            version, library = self.distribution.get_version(), self.get_ext_fullpath(ext.name)
            build_library(ext.sources, version, self.build_temp, library)

    class PlatformWheel(bdist_wheel):
        """One wheel per platform serves every Python version."""

        def get_tag(self):
            return "py3", "none", super().get_tag()[2]

    library = Extension("gluon_syncbn.libgluon_syncbn", SOURCES)
    # `make` builds it itself, while pip installs other packages.
    left_out = os.environ.get("GLUON_SYNCBN_LIBRARY") == "0"
    setup(
        license="Apache-2.0",
        ext_modules=[] if left_out else [library],
        cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
    )


if __name__ == "__main__":
    main()
