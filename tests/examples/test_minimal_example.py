"""examples/segmentation/minimal.py learns, and what it exports is there."""

import re
import subprocess
import sys

import pytest
from example_modules import EXAMPLES


@pytest.mark.long  # A net of resnet50's size.
def test_it_runs(tmp_path):
    command = [sys.executable, str(EXAMPLES / "segmentation" / "minimal.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"^epoch \d: loss (\S+)$", done.stdout, re.M))
    assert last < first
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"fcn.params", "fcn-symbol.json", "fcn-0000.params"}
