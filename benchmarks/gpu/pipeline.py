"""Steps that are programs of their own, so that a crash, a hang or a broken device in one leaves
the others be. What they found is in one JSON file after each of them."""

import json
import os
import signal
import subprocess
import tempfile
import time
import traceback
from pathlib import Path

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
# Without consequences: a missed threshold of speed, a step that the command line left out, and one
# that no program could do on this machine.
MISSED, LEFT_OUT, IMPOSSIBLE = "missed", "left out", "cannot work here"

_HEAD, _TAIL = 200, 100  # lines of output that the JSON keeps
_SHOWN = 3000  # characters of output that are printed after a failure
_PATIENCE = 5  # seconds that a process has to end by itself


def run_process(command, seconds, **options):
    """Its exit code, or None where the time was up, and all that it printed. Whatever it started is
    ended with it."""
    # A file: a pipe would stay open as long as anybody holds it.
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
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _end_group(process):
    # First politely, as launchers then end what they started in groups of their own.
    for sign in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _PATIENCE
        try:
            os.killpg(process.pid, sign)
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.02)
        except ProcessLookupError:
            return


def shorten(lines):
    """As many as the JSON keeps: causes mostly come first, and results last."""
    left_out = len(lines) - _HEAD - _TAIL
    if left_out <= 0:
        return lines
    return [*lines[:_HEAD], f"... {left_out} lines ...", *lines[-_TAIL:]]


def by_exit_code(code, text):
    """A judge of `Pipeline.run`: what a step has come to, what to tell of it, and more for the
    JSON."""
    lines = text.strip().splitlines() or [""]
    return OK if code == 0 else FAILED, lines[-1], {}


class Pipeline:
    """path: of the JSON; limit: seconds for all steps together."""

    def __init__(self, path, limit):
        self.path = Path(path)
        self.limit = limit
        self.begin = time.monotonic()
        self.result = {"verdict": "not finished", "steps": {}}
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def left(self):
        return self.limit - (time.monotonic() - self.begin)

    def facts(self, **facts):
        self.result.update(facts)
        self._write()

    def step(self, name, verdict, detail="", **more):
        seconds = round(time.monotonic() - self.begin, 1)
        self.result["steps"][name] = {"verdict": verdict, "detail": detail, "at": seconds, **more}
        self._write()
        print(f"[{seconds:5.0f} s] {_line(name, verdict, detail)}", flush=True)
        return verdict

    def run(self, name, command, most, reserve=0, judge=by_exit_code, show=False, **options):
        """A step with `most` seconds at most, and never those that later steps need. show: print
        what it prints."""
        seconds = min(most, self.left() - reserve)
        if seconds < 5:
            return self.step(name, SKIPPED, "no time is left")
        code, text = None, ""
        try:
            code, text = run_process(command, seconds, **options)
            verdict, detail, more = judge(code, text)
        except Exception as error:
            verdict, detail = FAILED, f"{type(error).__name__}: {error}"
            more = {"traceback": traceback.format_exc()}
        if code is None and "traceback" not in more:
            verdict, detail = FAILED, f"no end within {seconds:.0f} s"
        lines = text.strip().splitlines()
        if show:
            print("\n".join(shorten(lines)))
        elif verdict == FAILED:
            print(_excerpt(text.strip()))
        return self.step(name, verdict, detail, exit_code=code, output=shorten(lines), **more)

    def end(self, has_gpu):
        """Prints all verdicts once more. Returns the exit code: where there is a GPU, what was to
        be checked and was not is a failure, too."""
        bad = (FAILED, SKIPPED) if has_gpu else (FAILED,)
        wrong = [name for name, step in self.result["steps"].items() if step["verdict"] in bad]
        self.facts(verdict=FAILED if wrong else OK, seconds=round(time.monotonic() - self.begin, 1))
        print()
        for name, step in self.result["steps"].items():
            print(_line(name, step["verdict"], step["detail"]))
        print(f"Everything is in {self.path}.")
        if wrong:
            print(f"{FAILED}: {', '.join(wrong)}")
        return 1 if wrong else 0

    def _write(self):
        # Whoever ends this process finds a whole file.
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(self.result, indent=1) + "\n")
        os.replace(str(new), str(self.path))


def _line(name, verdict, detail):
    return f"{name}: {verdict}{detail and ': ' + detail}"


def _excerpt(text):
    if len(text) <= _SHOWN:
        return text
    return f"{text[: _SHOWN // 2]}\n...\n{text[-_SHOWN // 2 :]}"
