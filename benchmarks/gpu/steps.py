"""Runs steps as separate processes, so that a crash, a hang or a broken device in one does not
affect the others. Writes the results to a JSON file after each step."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, Sequence

# Last, as benchmarks/ has a bench.py of its own.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from harness import run_process  # noqa: E402

OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"
# What compute-sanitizer prints if it finds something, or fails itself, whatever its exit code.
FAULT = r"^=+ ((?:Internal Sanitizer )?Error\b.*|\w+ SUMMARY: (?!0 ).*)$"


def judge(code: int, text: str, proofs: Sequence[str] = ()) -> tuple[str, str]:
    """The verdict on a program, and a line of detail. `code`: negative for the number of a signal.
    `proofs`: patterns of lines without which its output is not that of a success."""
    last = (text.strip().splitlines() or [""])[-1]
    if code < 0:
        return FAILED, f"ended by {signal.Signals(-code).name} after: {last}"
    fault = re.search(FAULT, text, re.MULTILINE)
    if fault or code:
        return FAILED, fault[1] if fault else last
    found = [re.findall(proof, text, re.MULTILINE) for proof in proofs]
    if not all(found):
        missing = proofs[found.index([])]
        return FAILED, f"no line of its output matches {missing}: {last}"
    return OK, "; ".join(lines[-1] for lines in found) or last


def end_on_sigterm() -> None:
    """Ends this process and the step that runs, as Ctrl-C does. The JSON names that step."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


class Steps:
    """path: of the JSON; limit: seconds for all steps."""

    def __init__(self, path: str | Path, limit: float):
        self.path = Path(path)
        self.limit = limit
        self.begin = time.monotonic()
        self.result: dict[str, Any] = {"verdict": "not finished", "steps": {}}
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def seconds(self) -> float:
        return round(time.monotonic() - self.begin, 1)

    def note(self, **facts: Any) -> None:
        self.result.update(facts)
        # Replaced atomically, so that the file is complete if this process is killed.
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(self.result, indent=1) + "\n")
        os.replace(str(new), str(self.path))

    def run(
        self,
        name: str,
        command: Sequence[str | Path],
        most: float,
        proofs: Sequence[str] = (),
        show: bool = False,
        **options: Any,
    ) -> str:
        """Runs a step for at most `most` seconds. show: print its output. Returns the verdict."""
        seconds = min(most, self.limit - self.seconds())
        self.note(running=name)
        code, text = None, ""
        try:
            if seconds >= 5:
                code, text = run_process(command, seconds, **options)
        except OSError as error:
            verdict, detail = FAILED, str(error)
        else:
            if code is None:
                # A step that had less than its time need not be wrong.
                verdict = NOT_RUN if seconds < most else FAILED
                detail = f"did not end within {max(seconds, 0):.0f} s"
            else:
                verdict, detail = judge(code, text, proofs)
        lines = text.strip().splitlines()
        if show or verdict == FAILED:
            print("\n".join(lines))
        step = {"verdict": verdict, "detail": detail, "exit_code": code, "output": lines}
        self.result["steps"][name] = {**step, "at": self.seconds()}
        del self.result["running"]
        self.note()
        print(f"[{self.seconds():5.0f} s] {name}: {verdict}: {detail}", flush=True)
        return verdict

    def end(self) -> int:
        """Prints all verdicts again and returns the exit code."""
        verdicts = {name: step["verdict"] for name, step in self.result["steps"].items()}
        wrong = [name for name, verdict in verdicts.items() if verdict == FAILED]
        self.note(verdict=FAILED if wrong else OK, seconds=self.seconds())
        print(*(f"{name}: {verdict}" for name, verdict in verdicts.items()), sep="\n")
        print(f"All results are in {self.path}.")
        if wrong:
            print(f"{FAILED}: {', '.join(wrong)}")
        return 1 if wrong else 0
