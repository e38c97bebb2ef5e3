"""benchmarks/bench_distributed.py runs. Its figures are judged where nothing else runs beside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_distributed.py"


@pytest.mark.long
def test_a_small_measurement(tmp_path):
    file = tmp_path / "figures.json"
    options = "--engines kvstore --workers 2 --channels 16 --repetitions 3".split()
    command = [sys.executable, PROGRAM, *options, "--json", file]
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(row["added_ms"]["pass"] > 0 for row in json.loads(file.read_text())["layers"])
    for through in ("memory", "store"):
        assert f"| `kv.pushpull` | 2 | {through} | 16 |" in done.stdout
