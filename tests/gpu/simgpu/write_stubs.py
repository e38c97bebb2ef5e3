"""Writes what takes the place of the CUDA libraries that libmxnet.so is linked with: a stub for
each of their functions that it calls and the simulator lacks.

    python write_stubs.py libmxnet.so FOLDER OBJECT...

In FOLDER, NAME.c and NAME.map (for the linker) for each library. OBJECTs are the simulator's. A
stub refuses, and says so, unless it has nothing to do here.
"""

import collections
import re
import subprocess
import sys
from pathlib import Path

CREATE = {"cublasCreate_v2", "cudnnCreate", "cusolverDnCreate", "curandCreateGenerator"}
# Handles are made with each stream, and never used.
SUCCEED = re.compile(r"(cublas|cudnn|cusolverDn|curand)(Destroy|SetStream).*|curandSet.*|nvtx.*")
NAME = re.compile(r"(__)?(cuda|cublas|cudnn|cufft|curand|cusolver|nccl|nvrtc|nvtx|cu[A-Z])")

REFUSE = """#include <stdio.h>
static int refuse(const char* name) {
  fprintf(stderr, "simgpu: %s is not simulated\\n", name);
  return 1;
}
"""


def symbols(file, *options):
    names = subprocess.run(["nm", *options, file], stdout=subprocess.PIPE, text=True, check=True)
    return [line.split()[-1] for line in names.stdout.splitlines()]


def stub(name):
    if name in CREATE:
        return f"int {name}(void** handle) {{ static char it; *handle = &it; return 0; }}"
    if name.endswith("GetErrorString"):
        return f'const char* {name}(void) {{ return "not simulated"; }}'
    if name == "cudnnGetVersion":
        return f"unsigned long {name}(void) {{ return 8101; }}"
    if SUCCEED.fullmatch(name):
        return f"int {name}(void) {{ return 0; }}"
    return f'int {name}(void) {{ return refuse("{name}"); }}'


library, folder, objects = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
simulated = {name for each in objects for name in symbols(each, "--defined-only", "--extern-only")}
stubs = collections.defaultdict(list)
for symbol in symbols(library, "--dynamic", "--undefined-only"):
    name, _, version = symbol.partition("@")
    if NAME.match(name) and name not in simulated:
        # The version is the library's name, where there is one.
        unversioned = "libnccl.so.2" if name.startswith("nccl") else "libcuda.so.1"
        stubs[version.strip("@") or unversioned].append(name)
folder.mkdir(parents=True, exist_ok=True)
for soname, names in stubs.items():
    text = "\n".join([REFUSE, *map(stub, sorted(names)), ""])
    (folder / f"{soname}.c").write_text(text)
    version = "" if soname in ("libnccl.so.2", "libcuda.so.1") else soname
    exported = "cu*; __cuda*; ptxsim_*; local: *" if soname.startswith("libcudart") else "*"
    (folder / f"{soname}.map").write_text(f"{version} {{ global: {exported}; }};\n")
