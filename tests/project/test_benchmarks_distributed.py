"""benchmarks/bench_distributed.py: that it runs, and what it says of wrong arguments."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = str(BENCHMARKS / "bench_distributed.py")


def run(*arguments):
    return subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True)


@pytest.mark.long
def test_a_small_measurement(tmp_path):
    file = tmp_path / "figures.json"
    done = run(
        *"--engines kvstore --workers 2 --channels 16 --repetitions 9".split(), "--json", str(file)
    )
    assert done.returncode == 0, done.stderr
    memory, store = json.loads(file.read_text())["layers"]
    assert memory["added_ms"]["pass"] < store["added_ms"]["pass"]
    for through in ("memory", "store"):
        assert f"| `kv.pushpull` | 2 | {through} | 16 |" in done.stdout


@pytest.mark.parametrize("ratio, passes", [(1.4, True), (1.6, False)])
def test_a_threshold_is_kept_up_to_its_limit(ratio, passes, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    comparisons = [("added / bare", 1.5, each, "2 workers") for each in (1.0, ratio)]
    (threshold,) = importlib.import_module("harness").judge(comparisons)
    assert threshold["pass"] == passes and threshold["worst"] == ratio


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--workers", "0"], "--workers: '0' is not a whole number above 0"),
        (["--json", "{folder}"], "is a folder: name a file in it"),
    ],
)
def test_wrong_arguments(arguments, words, tmp_path):
    done = run(*(argument.format(folder=tmp_path) for argument in arguments))
    assert done.returncode == 2 and words in done.stderr
