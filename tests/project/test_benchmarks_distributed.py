"""benchmarks/bench_distributed.py runs. Its figures are judged where nothing else runs beside."""

import json
from pathlib import Path

import programs
import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_distributed.py"


@pytest.mark.long
def test_a_small_measurement(tmp_path):
    file = tmp_path / "figures.json"
    options = "--engines kvstore --workers 2 --channels 16 --repetitions 3".split()
    done = programs.run([PROGRAM, *options, "--json", file])
    assert done.returncode == 0, done.stderr
    # Of so few rounds the sign is chance.
    assert all(row["added_ms"]["pass"] for row in json.loads(file.read_text())["layers"])
    for through in ("memory", "store"):
        assert f"| `kv.pushpull` | 2 | {through} | 16 |" in done.stdout
