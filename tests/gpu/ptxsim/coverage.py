"""Which instructions of the CUDA kernels the native tests run, from the files that PTXSIM_COVERAGE
named. Exit code 1 if a kernel never runs, or fewer instructions than LEAST.

What never runs is, for example, a loop's other ends, 64-bit divisions, of which numbers below 2^32
take a shorter way, and code for arguments that no caller gives, as adding to an array that is null.
"""

import argparse
import collections
import subprocess
import sys
from pathlib import Path

LEAST = 0.98


def read(paths):
    """By kernel: how often each instruction ran."""
    kernels = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            first, second = line.split(maxsplit=2)[:2]
            if first == "kernel":
                counts = kernels.setdefault(second, collections.Counter())
            else:
                counts[int(first)] += int(second)
    return {name: list(counts.values()) for name, counts in kernels.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--kernels", action="store_true", help="print the share of each kernel")
    options = parser.parse_args()
    kernels = read(options.files)
    everything = [count for counts in kernels.values() for count in counts]
    share = sum(map(bool, everything)) / len(everything)
    never = [name for name, counts in kernels.items() if not any(counts)]
    if options.kernels:
        shares = [(sum(map(bool, c)) / len(c), len(c), name) for name, c in kernels.items()]
        lines = "".join(f"{each:7.1%} of {size:5} {name}\n" for each, size, name in sorted(shares))
        subprocess.run(["c++filt", "--no-params"], input=lines, text=True)
    print(f"{share:.1%} of {len(everything)} instructions run, in {len(kernels)} kernels.")
    for name in never:
        print(f"{name} never runs.")
    if share < LEAST:
        print(f"Less than {LEAST:.0%}: coverage.py --kernels says where.")
    return bool(never) or share < LEAST


if __name__ == "__main__":
    sys.exit(main())
