"""What the CUDA kernels ask of a GPU, counted on the simulator: a table, compared with the figures
in counts.json. Exit code 1 if instructions, float64 instructions or sectors have grown by more than
5 %.

    make gpu-counts                 # builds the program, then runs this
    make gpu-counts ARGS=--write    # makes today's counts those to compare with
    make gpu-counts ARGS=--model    # prints what they would mean on some GPUs: docs/performance.md

Instructions are those of PTX, as ptxas, the compiler for the GPU, is not run: a measure of work,
not of time.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

COUNTS = Path(__file__).with_name("counts.json")
ALLOWED_GROWTH = 1.05
# By column: the numerator and denominator.
COLUMNS = {
    "instr/value": ("instructions", "values"),
    "f64/value": ("doubles", "values"),
    "load": ("load_sectors", "unique_load_sectors"),
    "store": ("store_sectors", "unique_store_sectors"),
}
# Multiprocessors, GHz, GB/s, and double-precision units of a multiprocessor, as the vendor says. A
# multiprocessor issues one instruction for each of 4 warps at a time.
GPUS = {
    "T4": (40, 1.59, 320, 2),
    "V100": (80, 1.53, 900, 32),
    "RTX 3090": (82, 1.70, 936, 2),
    "A100": (108, 1.41, 1555, 32),
    "RTX 4090": (128, 2.52, 1008, 2),
    "H100": (132, 1.76, 3350, 64),
}
ISSUED = 4 * 32
# Arrays that a pass reads or writes.
PASSES = {"sums forward": 1, "sums backward": 2, "sums backward, relu": 2, "y": 2, "dx": 3}
MODELLED = ["planes 56x56", "planes 7x7", "rows 56x56x64"]


def count(program):
    """A dictionary of rows, each with the columns' numbers."""
    output = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {
        counts["row"]: {
            name: round(counts[above] / (counts[below] or 1), 3)
            for name, (above, below) in COLUMNS.items()
        }
        for counts in map(json.loads, output.splitlines())
    }


def grouped(rows):
    """As counts.json has them, to be short: by pass and layout, then by dtype, without the columns'
    names."""
    groups = {}
    for row, numbers in rows.items():
        name, dtype, layout = row.split(" | ")
        groups.setdefault(f"{name} | {layout}", {})[dtype] = list(numbers.values())
    return groups


def ungrouped(groups):
    rows = {}
    for name, dtypes in groups.items():
        what, layout = name.split(" | ")
        for dtype, numbers in dtypes.items():
            rows[f"{what} | {dtype} | {layout}"] = dict(zip(COLUMNS, numbers))
    return rows


def nvcc_version(nvcc):
    text = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return re.search(r"V(\d+\.\d+\.\d+)", text)[1]


def print_table(rows, before):
    width = max(map(len, rows))
    print("instructions of threads per value; sectors over unique sectors.")
    print("(Counts to compare with, where they differ.)\n")
    print("".ljust(width), *(name.rjust(19) for name in COLUMNS))
    for row, numbers in rows.items():
        cells = []
        for name, number in numbers.items():
            was = before.get(row, numbers)[name]
            cells.append(f"{number:g}" + (f" ({was:g})" if was != number else ""))
        print(row.ljust(width), *(cell.rjust(19) for cell in cells))


def print_model(rows):
    """The time that each pass takes to issue its instructions, or those for double if that takes
    longer, compared with the time that memory takes."""
    columns = ["pass", "data", "bytes/value", "instr/value", "f64/value", *GPUS]
    print("|", " | ".join(columns), "|")
    print("| --- " * len(columns) + "|")
    for layout in MODELLED:
        for dtype, size in (("float32", 4), ("float16", 2)):
            for name, arrays in PASSES.items():
                row = f"{name} | {dtype} | {layout}"
                parts = [rows[part] for part in (row, f"fold, {row}") if part in rows]
                instructions, in_double = (
                    sum(part[column] for part in parts) for column in ("instr/value", "f64/value")
                )
                times = []
                for multiprocessors, ghz, bandwidth, doubles in GPUS.values():
                    memory = arrays * size / bandwidth
                    issue = instructions / (ISSUED * multiprocessors * ghz)
                    double = in_double / (doubles * multiprocessors * ghz)
                    times.append(max(issue, double) / memory)
                cells = [name, f"{dtype}, {layout}", arrays * size, f"{instructions:.1f}"]
                cells.append(f"{in_double:.2f}")
                print("|", " | ".join(map(str, cells)), "|", *(f"{t:.2f} |" for t in times))


def growth(rows, before):
    """A line for each number that has grown too much, and each row that is in one of both only."""
    lines = [f"{row}: counted, but not in {COUNTS.name}" for row in rows.keys() - before.keys()]
    lines += [f"{row}: in {COUNTS.name}, but not counted" for row in before.keys() - rows.keys()]
    for row in sorted(rows.keys() & before.keys()):
        for name in COLUMNS:
            now, was = rows[row][name], before[row][name]
            if now > was * ALLOWED_GROWTH:
                lines.append(f"{row}: {name} is {now:g}, and was {was:g}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("program", help="print_counts, as built by `make gpu-counts`")
    parser.add_argument("nvcc")
    parser.add_argument("arch", help="for which the program's PTX was compiled, such as 90")
    parser.add_argument("--write", action="store_true", help=f"write {COUNTS.name}")
    parser.add_argument("--model", action="store_true", help="print what they mean on some GPUs")
    parser.add_argument("--quiet", action="store_true", help="print only what has grown")
    options = parser.parse_args()
    version = f"{nvcc_version(options.nvcc)} for compute_{options.arch}"
    saved = json.loads(COUNTS.read_text())
    before = ungrouped(saved["rows"])
    comparable = saved["nvcc"] == version
    if options.quiet and not comparable:
        print(f"Counts of nvcc {version} are not compared with those of {saved['nvcc']}.")
        return False
    rows = count(options.program)
    if options.model:
        print_model(rows)
        return False
    if not options.quiet:
        print_table(rows, before)
    if options.write:
        groups = grouped(rows).items()
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(group)}" for name, group in groups)
        COUNTS.write_text(f'{{"nvcc": "{version}", "rows": {{\n{lines}\n}}}}\n')
        return False
    if not comparable:
        print(f"\nThese are counts of nvcc {version}, those in {COUNTS.name} of {saved['nvcc']}.")
        return False
    grown = growth(rows, before)
    if grown:
        print(
            "\nGrown by more than 5 % (make gpu-counts ARGS=--write, if it cannot be avoided):",
            *grown,
            sep="\n",
        )
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
