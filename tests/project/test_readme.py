"""The program of README.md runs as it stands."""

import re
from pathlib import Path

import programs
from devices import KIND

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_program(tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    # The Trainer divides by the samples, so nothing else may have done so.
    program += "assert sum(len(loss) for loss in losses) == len(data)\n"
    program = program.replace("mx.cpu(", f"mx.{KIND}(")
    (tmp_path / "program.py").write_text(program)
    environment = programs.users_environment()
    done = programs.run(["program.py"], seconds=250, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 0 < float(done.stdout.split()[-1]) < 10
