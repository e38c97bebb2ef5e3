"""Leaves out one wait, record or synchronization at a time, by the place in the library that calls
it, and asks if the native test of passes notices: python dropped_calls.py PROGRAM"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FUNCTIONS = ("cudaStreamSynchronize", "cudaStreamWaitEvent", "cudaEventRecord")
# The test calls some functions itself.
OURS = "in (GpuPass|GpuForward|GpuBackward|clear_on_gpu)"
# Of a demangled name.
NOISE = r"\(anonymous namespace\)::|gluon_syncbn::|(?<!anonymous)\((?!anonymous).*"
# At once, where a race shows, or late, where a wait that is missing changes results.
ORDERS = ("", "late")
SECONDS = 120  # A run takes fewer than 20.


def run(program, **environment):
    try:
        return subprocess.run(
            [program],
            env=dict(os.environ, **environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def place_of(program, addresses):
    command = ["addr2line", "-C", "-f", "-e", program, *addresses]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return " in ".join(re.sub(NOISE, "", line) for line in lines.splitlines()[::2])


program = sys.argv[1]
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "sites")
    if run(program, PTXSIM_SITES=str(file), PTXSIM_STREAMS="late"):
        sys.exit("The test fails as it is.")
    sites = [line.split() for line in file.read_text().splitlines()]
missed = tried = 0
for function, *addresses in sites:
    place = place_of(program, addresses)
    if function not in FUNCTIONS or not re.search(OURS, place):
        continue
    drop = " ".join([function, *addresses])
    noticed = next((o for o in ORDERS if run(program, PTXSIM_DROP=drop, PTXSIM_STREAMS=o)), None)
    tried += 1
    missed += noticed is None
    result = "NOT NOTICED" if noticed is None else f"noticed ({noticed or 'at once'})"
    print(f"{function}, {place}: {result}", flush=True)
print(f"{tried - missed} of {tried} are noticed")
sys.exit(missed > tried // 10 or not tried)
