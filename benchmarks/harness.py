"""What all benchmarks share: options, new processes, interleaved rounds, guards and tables.

It needs only Python. As a program it calls "module.function" with arguments in JSON, and prints the
result.
"""

import argparse
import contextlib
import datetime
import importlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CORES = len(os.sched_getaffinity(0))
WARM_UP = 3
# With these in its environment, a process keeps freed memory.
KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
}
_ANSWER = "answer: "
_GRACE = 5  # seconds for a process to end after a signal


def options(doc, repetitions, json_file=None):
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument(
        "--repetitions", type=positive, default=repetitions, help="rounds (%(default)s)"
    )
    parser.add_argument(
        "--json", type=file_name, default=json_file, metavar="FILE", help="write all figures there"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a guard fails")
    return parser


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def file_name(text):
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    Path(text).parent.mkdir(parents=True, exist_ok=True)
    return Path(text)


def environment(*modules):
    """The machine, and the versions of `modules`."""
    with open("/proc/cpuinfo") as info:
        models = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    versions = {name: importlib.import_module(name).__version__ for name in modules}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "versions": {**versions, "python": platform.python_version()},
    }


def machine(figures):
    """What `environment` found, in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    return f"{figures['cpu']}, {figures['cores']} cores, {versions}, {figures['date'][:10]}"


def in_new_process(function, *arguments, launcher=(), seconds=None, **variables):
    """What a function, named "module.function", returns in a new process: with these environment
    variables, of which None unsets one. With a launcher, what one of the processes returns."""
    command = [sys.executable, *launcher, __file__, function, json.dumps(arguments)]
    merged = {**os.environ, **variables}
    given = {name: value for name, value in merged.items() if value is not None}
    code, text = run_process(command, seconds, env=given)
    if code != 0 or _ANSWER not in text:
        sys.exit(f"{' '.join(command)} ended with {code}:\n{text}")
    return json.loads(text.rpartition(_ANSWER)[2].splitlines()[0])


def run_process(command, seconds, **options):
    """Returns the exit code, or None after a timeout, and the output. Also ends all processes that
    the command has started."""
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    # Not a pipe, which would stay open until all children end.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            code = process.returncode
        finally:
            _end_group(process)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _end_group(process):
    # First SIGTERM, so that launchers can end the process groups that they have started. Then
    # SIGKILL, also after the end of the process itself, for what it has left behind.
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(_GRACE)


def interleave(contestants, rounds, warm_up=WARM_UP):
    """Calls all of `contestants`, {name: function}, in each round. Returns {name: results}.

    The order changes, so that each comes right after each other one equally often (Williams).
    """
    names, n = list(contestants), len(contestants)
    zigzag = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]
    orders = [[(i + shift) % n for i in zigzag] for shift in range(n)]
    if n % 2:
        orders += [order[::-1] for order in orders]
    results = {name: [] for name in names}
    for round_ in range(-warm_up, rounds):
        for i in orders[round_ % len(orders)]:
            result = contestants[names[i]]()
            if round_ >= 0:
                results[names[i]].append(result)
    return results


def seconds_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def medians(rows, factor=1.0):
    """The median of each column."""
    return [factor * float(statistics.median(column)) for column in zip(*rows)]


def ratios(rows, others):
    """The medians over the rounds of the ratios in each column: a disturbance slows all of a
    round."""
    return medians([[a / b for a, b in zip(*pair)] for pair in zip(rows, others)])


def judge(comparisons):
    """Each guard with its worst figure, of (name, largest allowed figure, figure, where)."""
    values = {}
    for name, most, value, where in comparisons:
        values.setdefault((name, most), []).append((value, where))
    guards = []
    for (name, most), compared in values.items():
        worst, where = max(compared)
        found = {"worst": worst, "where": where, "pass": worst <= most}
        guards.append({"name": name, "at_most": most, **found})
    return guards


def row(cells):
    return f"| {' | '.join(map(str, cells))} |"


def table(header, rows):
    return "\n".join(map(row, [header, ["---"] * len(header), *rows]))


def guard_table(guards):
    def cells(one):
        limits = f"{one['at_most']:.4g}", f"{one['worst']:.3f}"
        return [one["name"], *limits, one["where"] + ("" if one["pass"] else " **FAIL**")]

    return table(["guard", "at most", "worst", "where"], map(cells, guards))


def write(figures, file):
    if file:
        file.write_text(json.dumps(figures, indent=1) + "\n")


def finish(figures, sections, args):
    """Prints the sections and the guards, and writes the figures."""
    print("\n\n".join([*sections, guard_table(figures["guards"])]))
    write(figures, args.json)
    if args.check and not all(guard["pass"] for guard in figures["guards"]):
        sys.exit(1)


if __name__ == "__main__":
    name, _, function = sys.argv[1].partition(".")
    answer = getattr(importlib.import_module(name), function)(*json.loads(sys.argv[2]))
    if answer is not None:
        print(_ANSWER + json.dumps(answer), flush=True)
