"""Runs steps as separate processes, so that a crash, a hang or a broken device in one does not
affect the others. Writes the results to a JSON file after each step."""

import json
import os
import sys
import time
import traceback
from pathlib import Path

from verdicts import FAILED, NOT_RUN, OK, SKIPPED, by_exit_code

# Last, as benchmarks/ has a bench.py of its own.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from harness import run_process  # noqa: E402


class Pipeline:
    """path: of the JSON; limit: seconds for all steps."""

    def __init__(self, path, limit):
        self.path = Path(path)
        self.limit = limit
        self.begin = time.monotonic()
        self.result = {"verdict": "not finished", "steps": {}}
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def left(self):
        return self.limit - (time.monotonic() - self.begin)

    def end_early(self, *_):
        """A handler of signals: the step that runs ends, and no other runs."""
        self.limit = 0

    def facts(self, **facts):
        self.result.update(facts)
        self._write()

    def step(self, name, verdict, detail="", **more):
        seconds = round(time.monotonic() - self.begin, 1)
        self.result.pop("running", None)
        self.result["steps"][name] = {"verdict": verdict, "detail": detail, "at": seconds, **more}
        self._write()
        print(f"[{seconds:5.0f} s] {_line(name, verdict, detail)}", flush=True)
        return verdict

    def run(self, name, command, most, reserve=0, judge=by_exit_code, show=False, **options):
        """Runs a step for at most `most` seconds, and keeps `reserve` seconds for later steps.
        show: print its output."""
        seconds = min(most, self.left() - reserve)
        if seconds < 5:
            return self.step(name, NOT_RUN, "no time is left")
        self.facts(running=name)
        code, text, verdict, more = None, "", None, {}
        try:
            code, text = run_process(command, seconds, lambda: self.left() <= 0, **options)
            if code is not None:
                verdict, detail = judge(code, text)
        except Exception as error:
            verdict, detail = FAILED, f"{type(error).__name__}: {error}"
            more = {"traceback": traceback.format_exc()}
        if verdict is None:
            # A step that had less than its time need not be wrong.
            cut = seconds < most or self.left() <= 0
            verdict = NOT_RUN if cut else FAILED
            detail = f"did not end within {seconds:.0f} s" if self.limit else "ended by SIGTERM"
        lines = text.strip().splitlines()
        if show or verdict == FAILED:
            print("\n".join(lines))
        return self.step(name, verdict, detail, exit_code=code, output=lines, **more)

    def end(self, has_gpu):
        """Prints all verdicts again and returns the exit code. If there is a GPU, a skipped step is
        a failure, too."""
        bad = (FAILED, SKIPPED) if has_gpu else (FAILED,)
        wrong = [name for name, step in self.result["steps"].items() if step["verdict"] in bad]
        self.facts(verdict=FAILED if wrong else OK, seconds=round(time.monotonic() - self.begin, 1))
        print()
        for name, step in self.result["steps"].items():
            print(_line(name, step["verdict"], step["detail"]))
        print(f"All results are in {self.path}.")
        if wrong:
            print(f"{FAILED}: {', '.join(wrong)}")
        return 1 if wrong else 0

    def _write(self):
        # Replaced atomically, so that the file is complete if this process is killed.
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(self.result, indent=1) + "\n")
        os.replace(str(new), str(self.path))


def _line(name, verdict, detail):
    return f"{name}: {verdict}{detail and ': ' + detail}"
