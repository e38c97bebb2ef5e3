"""The program of README.md runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

from devices import KIND

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_program(tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    # The Trainer divides by the samples, so nothing else may have done so.
    program += "assert sum(len(loss) for loss in losses) == len(data)\n"
    program = program.replace("mx.cpu(", f"mx.{KIND}(")
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 0 < float(done.stdout.split()[-1]) < 10
