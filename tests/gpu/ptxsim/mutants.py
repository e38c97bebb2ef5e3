"""Changes one instruction of the CUDA kernels at a time, among those that the native test runs, and
asks whether the test sees it. Prints what it missed; exit code 1 if that is more than a fifth.

Some change nothing that a test could see: the last errors of a Sum3 that two doubles hold exactly,
the rounded sum of a TwoSum (its error term then holds the rest),
conditions under which a loop takes a shorter way, and those that always hold (the first value of a
batch exists).

    make ptx-mutants                        # 100 of them; takes 15 minutes on 2 cores
    make ptx-mutants ARGS="--count 20 --seed 7"
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# What an instruction becomes.
SWAPS = {
    "add.rn.f32": "sub.rn.f32",
    "sub.rn.f32": "add.rn.f32",
    "mul.rn.f32": "add.rn.f32",
    "add.rn.f64": "sub.rn.f64",
    "sub.rn.f64": "add.rn.f64",
    "mul.rn.f64": "add.rn.f64",
    "fma.rn.f32": "mul.rn.f32",
    "fma.rn.f64": "mul.rn.f64",
    "add.s64": "sub.s64",
    "add.s32": "sub.s32",
    "mul.lo.s32": "add.s32",
    "shr.u32": "shl.b32",
    "and.b32": "or.b32",
    "setp.ge.s32": "setp.gt.s32",
    "setp.lt.s32": "setp.le.s32",
    "setp.ge.s64": "setp.gt.s64",
    "setp.lt.s64": "setp.le.s64",
    "setp.gt.f32": "setp.lt.f32",
    "selp.f32": "selp.f32, with the operands swapped",
    "selp.b32": "selp.b32, with the operands swapped",
    "shfl.sync.bfly.b32": "nothing",
    "bar.sync": "nothing",
    "bar.warp.sync": "nothing",
    "st.shared.f64": "nothing",
}
# A failed check is printed to stderr, and the simulator stops there.
SEEN = ("line ", "ptxsim:")
SECONDS = "400"  # For one mutant.


def ptx_of(program):
    """The text in the program, of all its modules. Of a kernel that is in several of them, the
    simulator takes the last."""
    data = Path(program).read_bytes()
    starts = [found.start() for found in re.finditer(rb"\.version \d", data)]
    parts = [data[data.rindex(b"\0", 0, at) + 1 : data.index(b"\0", at)] for at in starts]
    return b"\n".join(parts).decode()


def run(program, ptx, arguments):
    """Whether the test sees an error, or does not end."""
    environment = dict(os.environ, PTXSIM_PTX=str(ptx))
    process = subprocess.Popen(
        ["timeout", SECONDS, program, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = any(line.startswith(SEEN) for line in process.stderr)
    if seen:  # The rest would only be more of the same.
        process.terminate()
    process.communicate()
    return seen or process.returncode != 0


def executed(program, ptx, folder):
    """The numbers of the lines that the whole test runs."""
    path = Path(folder, "coverage")
    environment = dict(os.environ, PTXSIM_COVERAGE=str(path), PTXSIM_PTX=str(ptx))
    subprocess.run([program], env=environment, stdout=subprocess.DEVNULL, check=True)
    lines = [line.split(maxsplit=2) for line in path.read_text().splitlines()]
    return {int(line[0]) for line in lines if line[0] != "kernel" and line[1] != "0"}


def type_of(lines, index):
    """Of the data of the kernel that has this line; those of 16-bit data share some with
    float."""
    while ".entry" not in lines[index]:
        index -= 1
    match = re.search(r"4Half|8BFloat16|I[a-z]?d", lines[index])
    names = {"4Half": "Half", "8BFloat16": "BFloat16", None: "float"}
    return names.get(match and match[0], "double")


def mutate(line, name, new):
    operands = [
        each.strip() for each in line[line.index(name) + len(name) :].strip(" \t;").split(",")
    ]
    start = line[: line.index(name)]
    if new == "nothing" and name.startswith("shfl"):
        return f"{start}mov.b32 {operands[0].split('|')[0]}, {operands[1]};"
    if new == "nothing":
        return ""
    if new.endswith("swapped"):
        operands[1], operands[2] = operands[2], operands[1]
        return f"{start}{name} {', '.join(operands)};"
    if name.startswith("fma"):
        return f"{start}{new} {', '.join(operands[:3])};"
    return line.replace(name, new)


def sites(lines, numbers):
    """By instruction: the indices of lines."""
    found = {}
    for index, line in enumerate(lines):
        match = re.match(r"\s*(?:@!?%p\d+\s+)?([\w.]+)\s", line)
        if match and match[1] in SWAPS and index + 1 in numbers and line.count(";") == 1:
            found.setdefault(match[1], []).append(index)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("program", help="test_cuda_kernels, as built by `make run-ptx`")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    lines = ptx_of(options.program).split("\n")
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole.ptx")
        whole.write_text("\n".join(lines))
        found = sites(lines, executed(options.program, whole, folder))
        names = sorted(found)
        chosen = [(n, names[n % len(names)]) for n in range(options.count)]
        chosen = [(n, name, chance.choice(found[name])) for n, name in chosen]

        def is_seen(mutant):
            n, name, index = mutant
            path = Path(folder, f"{n}.ptx")
            changed = mutate(lines[index], name, SWAPS[name])
            path.write_text("\n".join([*lines[:index], changed, *lines[index + 1 :]]))
            # Most are seen by the small test, which takes a tenth of the time.
            kind = f"--type={type_of(lines, index)}"
            seen = any(
                run(options.program, path, arguments) for arguments in (["--small", kind], [kind])
            )
            path.unlink()
            print("seen  " if seen else "MISSED", index + 1, lines[index].strip(), flush=True)
            return seen

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            seen = sum(pool.map(is_seen, chosen))
    print(f"{seen} of {len(chosen)} are seen.")
    return seen < 0.8 * len(chosen)


if __name__ == "__main__":
    sys.exit(main())
