"""Builds gluon_syncbn/libgluon_syncbn.so. All else about the package stands in pyproject.toml."""

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = sorted(glob("src/operator/*.cc"))
EXPORTS = "src/operator/exports.map"
HEADERS = sorted(glob("src/operator/*.h") + glob("src/operator/*.inc"))

# -ffp-contract=off: no result may depend on whether the compiler fuses a multiplication with an
# addition. No -march: the binary runs on every machine of its architecture, and the sources choose
# vector code when they run.
COMPILE = "-std=c++17 -O3 -fPIC -pthread -fvisibility=hidden -ffp-contract=off".split()

# libgcc and libstdc++ stay shared, as MXNet catches this library's exceptions. Of static ones the
# first would abort the process, and the second would take each error for one that nobody caught.
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


def run(command):
    """Run the compiler, show what it says, and end the build without a traceback if it fails."""
    line = " ".join(map(shlex.quote, command))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(line, done.stdout, sep="\n", end="", flush=True)
    if done.returncode:
        sys.exit(
            f"gluon_syncbn was not built: see the compiler's messages above. It ran as: {line}"
        )


class BuildLibrary(build_ext):
    """Builds a plain shared library: no Python header, symbol or version has a part in it."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        compiler = find_compiler()
        version = f'-DGLUON_SYNCBN_VERSION="{self.distribution.get_version()}"'
        flags = [*COMPILE, version, *shlex.split(os.environ.get("CXXFLAGS", ""))]
        os.makedirs(self.build_temp, exist_ok=True)

        def compile_source(source):
            output = os.path.join(self.build_temp, os.path.basename(source) + ".o")
            run([*compiler, *flags, "-c", source, "-o", output])
            return output

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_source, ext.sources))

        library = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(library), exist_ok=True)
        flags = [*LINK, *shlex.split(os.environ.get("LDFLAGS", ""))]
        run([*compiler, *objects, "-o", library, *flags])


class PlatformWheel(bdist_wheel):
    """One wheel per platform serves every Python version."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


if {"bdist_wheel", "build_ext", "editable_wheel", "install"} & set(sys.argv):
    find_compiler()  # here, so that its message does not end a page of other output

setup(
    license="Apache-2.0",
    ext_modules=[Extension("gluon_syncbn.libgluon_syncbn", SOURCES, depends=[*HEADERS, EXPORTS])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
