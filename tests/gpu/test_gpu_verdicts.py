"""What the outputs of nvcc, compute-sanitizer, pytest, the native tests and bench.py mean for
`make gpu-check`. The texts are those of the tools."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))
import verdicts  # noqa: E402

ABORTED = -6


def check(judge, code, text, verdict, detail):
    found, line = judge(code, text)
    assert found == verdict and detail in line, (found, line)


@pytest.mark.parametrize(
    "code, text, verdict, detail",
    [
        (0, "CUDA 13.0 for sm_90, PTX 90", "ok", "CUDA 13.0 for sm_90"),
        (0, "a warning\nCUDA 11.2 for sm_50 sm_60, PTX 86\n", "ok", "CUDA 11.2"),
        (0, "no kernels", "FAILED", "no kernels"),
        (0, "", "FAILED", "no CUDA kernels"),
        (
            1,
            "nvcc -std=c++17 -c kernels_float32.cu\n"
            'kernels.cuh(12): error: identifier "x" is undefined\n\n'
            '1 error detected in the compilation of "src/operator/cuda/kernels_float32.cu".',
            "FAILED",
            "1 error detected in the compilation",
        ),
        (1, "nvcc fatal   : Unsupported gpu architecture 'compute_50'", "FAILED", "compute_50"),
        (1, "collect2: error: ld returned 1 exit status", "FAILED", "ld returned 1"),
        (-9, "", "FAILED", "ended by SIGKILL"),
        (1, "OSError: libcuda.so.1: cannot open shared object file", "FAILED", "libcuda.so.1"),
    ],
)
def test_build(code, text, verdict, detail):
    check(verdicts.of_build, code, text, verdict, detail)


@pytest.mark.parametrize(
    "code, text, verdict, detail",
    [
        (0, "/tmp/set unpacked in 9 s", "ok", "9 s"),
        (0, "", "ok", ""),
        (1, "Traceback ...\n_lzma.LZMAError: Corrupt input data", "FAILED", "Corrupt input data"),
        (127, "bash: line 1: /no/unpack.sh: No such file or directory", "FAILED", "No such file"),
        (1, "ModuleNotFoundError: No module named 'psutil'", "FAILED", "'psutil'"),
        (1, "AssertionError: PyTorch finds no GPU", "FAILED", "PyTorch finds no GPU"),
        (-11, "1 x (2, 64, 28, 28) float32: 0.2 ms", "FAILED", "by SIGSEGV after: 1 x (2, 64"),
    ],
)
def test_exit_code(code, text, verdict, detail):
    check(verdicts.by_exit_code, code, text, verdict, detail)


NATIVE = "cuda_kernels: 2597248 passed, 0 failed"
SMALL = "cuda_kernels --small: 132585 passed, 0 failed"


@pytest.mark.parametrize(
    "code, text, verdict, detail",
    [
        (0, NATIVE, "ok", NATIVE),
        (0, SMALL, "ok", SMALL),
        (0, f"  float32 3.1 s\n{NATIVE}\n", "ok", NATIVE),
        (1, f"line 7: x: 1 and 2\n{NATIVE.replace('0 failed', '1 failed')}", "FAILED", "1 failed"),
        (0, NATIVE.replace("0 failed", "10 failed"), "FAILED", "did not end with"),
        (0, "cuda_kernels: 0 passed, 0 failed", "FAILED", "did not end with"),
        (0, "", "FAILED", "did not end with"),
        (1, NATIVE, "FAILED", ""),
        (
            ABORTED,
            "terminate called after throwing an instance of 'std::runtime_error'\n"
            "  what():  CUDA error 700",
            "FAILED",
            "by SIGABRT after:   what():  CUDA error 700",
        ),
        (-11, NATIVE, "FAILED", "by SIGSEGV"),
    ],
)
def test_native_tests(code, text, verdict, detail):
    check(verdicts.of_native_tests, code, text, verdict, detail)


def closing(text):
    return f"tests/gpu/test_x.py::test_y PASSED [100%]\n\n{f' {text} '.center(80, '=')}\n"


PASSED = closing("4 passed, 9 deselected in 1.00s")
CLOSINGS = [
    (0, PASSED, "ok", "4 passed, 9 deselected"),
    (0, closing("204 passed in 33.22s"), "ok", "204 passed"),
    (0, closing("204 passed, 2 warnings in 95.07s (0:01:35)"), "ok", "204 passed"),
    # 9 signs of equality, as before the lines of compute-sanitizer.
    (0, "========= 4 passed in 1.00s =========", "ok", "4 passed in"),
    (0, closing("2 passed, 1 skipped in 0.12s"), "skipped", "1 skipped"),
    (0, closing("2 skipped, 9 deselected in 0.12s"), "skipped", "2 skipped"),
    (0, closing("2 passed, 1 xfailed in 0.12s"), "skipped", "1 xfailed"),
    (1, closing("1 failed, 3 passed in 2.00s"), "FAILED", "1 failed, 3 passed"),
    (1, closing("3 passed, 1 error in 2.00s"), "FAILED", "3 passed, 1 error"),
    (2, closing("1 error in 0.20s"), "FAILED", "1 error"),
    (2, "!!!!! KeyboardInterrupt !!!!!\n" + closing("3 passed in 2.00s"), "FAILED", "3 passed"),
    (5, closing("no tests ran in 0.01s"), "FAILED", "no tests ran"),
    (5, closing("13 deselected in 0.01s"), "FAILED", "13 deselected"),
    (5, closing("1 skipped in 0.01s"), "FAILED", "1 skipped"),
    (0, closing("13 deselected in 0.01s"), "skipped", "13 deselected"),
    (4, "ERROR: file or directory not found: test_x.py", "FAILED", "not found"),
    (1, "/usr/bin/python3: No module named pytest", "FAILED", "No module named pytest"),
    (0, "tests/gpu/test_x.py::test_y PASSED [100%]", "FAILED", "summary of pytest is missing"),
    (0, "", "FAILED", "summary of pytest is missing"),
    # A test of pytest-timeout that hangs.
    (
        1,
        "++++ Timeout ++++\n~~~~ Stack of MainThread (1) ~~~~\n++++ Timeout ++++",
        "FAILED",
        "Timeout",
    ),
    (-11, "Fatal Python error: Segmentation fault", "FAILED", "SIGSEGV after: Fatal Python error"),
    # At the end of the process.
    (-11, PASSED, "FAILED", "SIGSEGV"),
    (1, PASSED, "FAILED", "4 passed"),
]


@pytest.mark.parametrize("code, text, verdict, detail", CLOSINGS)
def test_pytest(code, text, verdict, detail):
    check(verdicts.of_pytest, code, text, verdict, detail)


CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
JUDGES = {
    "memcheck": verdicts.of_memcheck,
    "racecheck": verdicts.of_racecheck,
    "net": verdicts.of_racecheck_of_pytest,
}


def under(program, *lines):
    return "\n".join(["========= COMPUTE-SANITIZER", program.strip(), *lines, ""])


@pytest.mark.parametrize("tool, other", [("memcheck", "racecheck"), ("racecheck", "memcheck")])
def test_clean_under_a_sanitizer(tool, other):
    judge = JUDGES[tool]
    check(judge, 0, under(SMALL, CLEAN[tool]), "ok", "132585 passed, 0 failed; ")
    check(judge, 0, under("", CLEAN[tool]), "FAILED", "did not end with")
    check(judge, 0, under(SMALL), "FAILED", "gave no")
    check(judge, 0, under(SMALL, CLEAN[other]), "FAILED", "gave no")
    check(judge, 9, under(SMALL, CLEAN[tool]), "FAILED", "")
    check(judge, ABORTED, under("", CLEAN[tool]), "FAILED", "SIGABRT")


@pytest.mark.parametrize("code, text, verdict, detail", CLOSINGS)
def test_pytest_under_racecheck(code, text, verdict, detail):
    """Whose last line is the sanitizer's."""
    detail = "" if verdict == "FAILED" else detail
    check(JUDGES["net"], code, under(text, CLEAN["racecheck"]), verdict, detail)
    hazards = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
    check(JUDGES["net"], code, under(text, hazards), "FAILED", "1 hazard")
    check(JUDGES["net"], code, under(text), verdict if verdict != "ok" else "FAILED", "")


FOUND = [
    (
        "memcheck",
        [
            "========= Invalid __global__ write of size 4 bytes",
            "=========     at sum_planes<float>(float *)+0x70",
            "=========     by thread (0,0,0) in block (0,0,0)",
            "========= ERROR SUMMARY: 2 errors",
        ],
        "2 errors",
    ),
    (
        "memcheck",
        [
            '========= Program hit cudaErrorInvalidValue (error 1) due to "invalid argument" on '
            "CUDA API call to cudaLaunchKernel.",
            "========= ERROR SUMMARY: 1 error",
        ],
        "1 error",
    ),
    ("memcheck", ["========= ERROR SUMMARY: 10 errors"], "10 errors"),
    (
        "racecheck",
        [
            "========= Error: Race reported between Write access at sum(float *)+0x10",
            "=========     and Read access at sum(float *)+0x20 [128 hazards]",
            "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
        ],
        "1 hazard",
    ),
    (
        "racecheck",
        [
            "========= Warning: Race reported between Read access at sum(float *)+0x10",
            "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)",
        ],
        "1 warning",
    ),
    (
        "racecheck",
        ["========= RACECHECK SUMMARY: 10 hazards displayed (0 errors, 0 warnings)"],
        "10 hazards",
    ),
]


@pytest.mark.parametrize("tool, lines, detail", FOUND)
@pytest.mark.parametrize("code", [0, 9])
def test_a_sanitizer_that_finds_something(tool, lines, detail, code):
    check(JUDGES[tool], code, under(NATIVE, *lines), "FAILED", detail)
    # Of two processes, the other is clean.
    check(JUDGES[tool], code, under(NATIVE, *lines, CLEAN[tool]), "FAILED", detail)


BROKEN = [
    "Error: Target application terminated before first instrumented API call",
    "Error: process didn't terminate successfully",
    "Error: No attachable process found. compute-sanitizer timed-out.",
    "Internal Sanitizer Error: The Sanitizer encountered an error while instrumenting code",
]


@pytest.mark.parametrize("error", BROKEN)
@pytest.mark.parametrize("tool", JUDGES)
@pytest.mark.parametrize("code", [0, 1, 9])
def test_a_sanitizer_that_fails(error, tool, code):
    """It may give a clean summary all the same."""
    clean = CLEAN.get(tool, CLEAN["racecheck"])
    program = PASSED if tool == "net" else NATIVE
    for lines in ([f"========= {error}"], [f"========= {error}", clean]):
        check(JUDGES[tool], code, under(program, *lines), "FAILED", error)
        check(JUDGES[tool], code, under("", *lines), "FAILED", error)


@pytest.mark.parametrize("tool", JUDGES)
def test_a_device_that_the_sanitizer_does_not_support(tool):
    text = under("", "========= Error: Device not supported. Please refer to the documentation")
    check(JUDGES[tool], 1, text, "not supported", "Device not supported")
    # Not the sanitizer's words.
    check(JUDGES[tool], 1, "RuntimeError: Device not supported", "FAILED", "")


def guard(holds):
    return {"name": "a pass / a copy", "at_most": 1.18, "worst": 1.25, "where": "dx", "pass": holds}


@pytest.mark.parametrize(
    "code, result, verdict, detail",
    [
        (0, {"finished": True, "failed": [], "guards": [guard(True)]}, "ok", "all guards held"),
        (
            0,
            {"finished": True, "failed": [], "guards": [guard(True), guard(False)]},
            "missed",
            "1.25 above 1.18: a pass / a copy, dx",
        ),
        (
            1,
            {"finished": True, "failed": ["(2, 3): TypeError: x"], "guards": []},
            "FAILED",
            "TypeError",
        ),
        (
            0,
            {"finished": True, "failed": ["(2, 3): TypeError: x"], "guards": []},
            "FAILED",
            "TypeError",
        ),
        (1, {"finished": True, "failed": [], "guards": []}, "FAILED", "the last line"),
        (-6, {"finished": False, "failed": []}, "FAILED", "SIGABRT after: the last line"),
        (0, {"finished": False, "failed": []}, "FAILED", "the last line"),
        (1, {}, "FAILED", "the last line"),
        (0, {}, "FAILED", "the last line"),
    ],
)
def test_speed(code, result, verdict, detail):
    check(
        lambda *said: verdicts.of_speed(*said, result),
        code,
        "| x |\nthe last line",
        verdict,
        detail,
    )
