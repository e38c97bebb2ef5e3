"""What a step's exit code and output mean: functions that return a verdict and a line of detail.
A negative exit code is the number of a signal."""

import re
import signal

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
# No failures: a missed guard of speed, a step that the command line left out, one that this machine
# does not support, and one that had no time.
MISSED, LEFT_OUT, IMPOSSIBLE, NOT_RUN = "missed", "left out", "not supported", "not run"


def by_exit_code(code, text):
    last = (text.strip().splitlines() or [""])[-1]
    if code < 0:
        last = f"ended by {signal.Signals(-code).name}{last and ' after: ' + last}"
    return OK if code == 0 else FAILED, last


def of_build(code, text):
    """The last line is the library's description of its kernels."""
    verdict, last = by_exit_code(code, text)
    if verdict == OK and not re.match(r"CUDA [\d.]+ for sm_", last):
        return FAILED, f"the library has no CUDA kernels: {last}"
    return verdict, last


def of_native_tests(code, text):
    verdict, last = by_exit_code(code, text)
    found = re.findall(r"^.+: \d+ passed, \d+ failed$", text, re.MULTILINE)
    if verdict == OK and (not found or not re.search(": [1-9].* 0 failed", found[-1])):
        return FAILED, f"the tests did not end with N passed, 0 failed: {last}"
    return verdict, found[-1] if verdict == OK else last


def of_pytest(code, text):
    """Nothing may be skipped. Other tests of the file may be deselected."""
    verdict, last = by_exit_code(code, text)
    found = re.findall(r"^=+ (.+ in [\d.]+s.*?) =+$", text, re.MULTILINE)
    if verdict != OK:
        return verdict, found[-1] if found and code > 0 else last
    if not found:
        return FAILED, f"the summary of pytest is missing: {last}"
    kinds = set(re.findall(r"\d+ ([a-z]+)\b", found[-1].rpartition(" in ")[0]))
    whole = "passed" in kinds and kinds <= {"passed", "deselected", "warning", "warnings"}
    return OK if whole else SKIPPED, found[-1]


def _under_sanitizer(kind, clean, judge, code, text):
    """kind: of the summary, which must be `clean`; judge: of the program that ran under it."""
    errors = re.findall(r"^=+ ((?:Internal Sanitizer )?Error\b.*)$", text, re.MULTILINE)
    summaries = re.findall(rf"^=+ {kind} SUMMARY: (.*)$", text, re.MULTILINE)
    for error in errors:
        if "Device not supported" in error:
            return IMPOSSIBLE, f"compute-sanitizer: {error}"
    for found in summaries:
        if found != clean:
            return FAILED, f"{kind} SUMMARY: {found}"
    verdict, detail = judge(code, text)
    if errors:
        return FAILED, f"compute-sanitizer: {errors[0]}"
    if verdict == OK and not summaries:
        return FAILED, f"compute-sanitizer gave no {kind} SUMMARY"
    return verdict, f"{detail}; {kind} SUMMARY: {clean}" if verdict == OK else detail


def of_memcheck(code, text):
    return _under_sanitizer("ERROR", "0 errors", of_native_tests, code, text)


def of_racecheck(code, text, judge=of_native_tests):
    clean = "0 hazards displayed (0 errors, 0 warnings)"
    return _under_sanitizer("RACECHECK", clean, judge, code, text)


def of_racecheck_of_pytest(code, text):
    return of_racecheck(code, text, of_pytest)


def of_speed(code, text, result):
    """result: the figures of bench.py, which a program that dies does not finish."""
    if not result.get("finished") or (code != 0 and not result["failed"]):
        return FAILED, by_exit_code(code, text)[1]
    if result["failed"]:
        return FAILED, result["failed"][-1]
    missed = [
        f"{one['worst']:.3g} above {one['at_most']:.3g}: {one['name']}, {one['where']}"
        for one in result["guards"]
        if not one["pass"]
    ]
    return MISSED if missed else OK, "; ".join(missed) or "all guards held"
