"""Puts simulated GPUs into an unpacked MXNet for CUDA: libraries in place of CUDA's, operators of
the host, and the layer's library. Needs no make.

    python install.py FOLDER [--driver] [--layer OBJECT... --simulator OBJECT...]

FOLDER has mxnet/. --driver: keep the real libcuda.so.1. The objects of the layer's library and of
the simulator are compiled unless they are given.
"""

import argparse
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SIMULATOR = HERE.parent / "ptxsim"
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import build  # noqa: E402

CUDART = "libcudart.so.11.0"
# All else that libmxnet.so is linked with, the driver first.
LIBRARIES = (
    "libcuda.so.1 libcublas.so.11 libcudnn.so.8 libcufft.so.10 libcurand.so.10 libcusolver.so.11 "
    "libnccl.so.2 libnvrtc.so.11.2 libnvToolsExt.so.1"
).split()
HALF_AND_FMA = ["-mfma", "-mf16c"] if platform.machine() == "x86_64" else []


def compile_simulator(compiler, pool):
    flags = "-std=c++20 -O3 -pthread -fPIC -fvisibility=hidden -ffp-contract=off".split()
    command = [*compiler, *flags, *HALF_AND_FMA, "-c"]
    folder = build.FOLDER / "ptxsim"
    return [
        pool.submit(build.run_once, [*command, source, "-o", folder / f"{source.stem}.o"])
        for source in sorted(SIMULATOR.glob("*.cc"))
        if source.stem not in ("print_counts", "test_ptxsim")
    ]


def install(folder, driver, layer, simulator):
    folder, compiler = Path(folder).resolve(), build.setup_py().find_compiler()
    mxnet, stubs = folder / "mxnet", folder / "stubs"
    ours = [*compiler, "-std=c++17", "-O2", "-pthread", "-fPIC", "-ffp-contract=off"]
    ours += [f"-I{ROOT / 'src/operator'}", f"-I{SIMULATOR}"]
    # With the headers of the wheel, and without their warnings.
    for_mxnet = [*compiler, "-std=c++17", "-fPIC", "-w", "-DMSHADOW_STAND_ALONE=1"]
    for_mxnet += ["-DMXNET_USE_CUDA=0", f"-I{mxnet / 'include'}", f"-I{SIMULATOR}"]

    def compile_source(command, source, *more):
        output = folder / f"{Path(source).stem}.o"
        return build.run_once([*command, "-c", ROOT / source, "-o", output], *more)

    def compile_map_plans():
        script = [sys.executable, HERE / "write_map_plans.py", mxnet / "libmxnet.so"]
        plans = folder / "map_plans.inc"
        plans.write_bytes(subprocess.run(script, stdout=subprocess.PIPE, check=True).stdout)
        flags = ["-O1", *HALF_AND_FMA, "-fvisibility=hidden", f"-I{folder}"]
        return compile_source([*for_mxnet, *flags], HERE / "map_plans.cc", plans)

    def link(output, *parts):
        command = [*compiler, "-shared", "-fPIC", "-pthread", *parts, "-ldl", "-o", output]
        return build.run_once(command)

    def link_in_place_of_cuda(name, *parts):
        names = f"-Wl,--no-as-needed,-soname,{name},--version-script={stubs / name}.map"
        return link(mxnet / name, names, "-xc", f"{stubs / name}.c", "-xnone", *parts)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # What takes longest comes first.
        old_abi = [*for_mxnet, "-D_GLIBCXX_USE_CXX11_ABI=0"]
        operators = pool.submit(compile_source, old_abi, HERE / "operators.cc")
        map_plans = pool.submit(compile_map_plans)
        runtime = pool.submit(compile_source, ours, HERE / "mxnet_runtime.cc")
        extra = [
            pool.submit(compile_source, [*ours, "-fvisibility=hidden"], source)
            for source in build.EXTRA
        ]
        simulator = simulator or [each.result() for each in compile_simulator(compiler, pool)]
        # The last two of them are the others here.
        layer = layer or build.build()[: -len(extra)]
        kernel_api, cards = (each.result() for each in extra)
        write = [sys.executable, HERE / "write_stubs.py", mxnet / "libmxnet.so", stubs]
        subprocess.run([*write, *simulator, runtime.result()], check=True)
        static = ["-static-libgcc", "-static-libstdc++"]
        parts = [*simulator, runtime.result(), map_plans.result(), *static]
        cudart = link_in_place_of_cuda(CUDART, *parts)
        libraries = LIBRARIES[driver:]
        for _ in pool.map(link_in_place_of_cuda, libraries, [cudart] * len(libraries)):
            pass
        links = [f"-L{mxnet}", "-l:libmxnet.so", cudart, "-Wl,--allow-shlib-undefined"]
        link(mxnet / "libsimgpu_operators.so", operators.result(), *links)
        link(folder / "libgluon_syncbn.so", kernel_api, *layer, cudart)
        # With a simulator of its own, in place of the CUDA of real GPUs.
        own = [*layer, *simulator, "-Wl,-Bsymbolic"]
        link(folder / "libcards.so", kernel_api, cards, *own)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--driver", action="store_true")
    parser.add_argument("--layer", nargs="*", type=os.path.abspath)
    parser.add_argument("--simulator", nargs="*", type=os.path.abspath)
    install(**vars(parser.parse_args()))
