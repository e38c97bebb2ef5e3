"""benchmarks/bench_distributed.py runs. Its figures are judged where nothing else runs beside."""

import json
from pathlib import Path

import numpy as np
import programs
import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_distributed.py"


@pytest.mark.long
def test_a_small_measurement(tmp_path):
    file = tmp_path / "figures.json"
    options = "--engines kvstore --workers 2 --channels 16 --repetitions 3".split()
    done = programs.run([PROGRAM, *options, "--json", file])
    assert done.returncode == 0, done.stderr
    # What is added may be negative in so few rounds.
    for row in json.loads(file.read_text())["layers"]:
        assert np.isfinite(list(row["added_ms"].values())).all()
        assert row["all_gather_ms"] > 0 and row["bare"]["kv.pushpull"]["behind_ms"] > 0
    for through in ("memory", "store"):
        assert f"| `kv.pushpull` | 2 | {through} | 16 |" in done.stdout
