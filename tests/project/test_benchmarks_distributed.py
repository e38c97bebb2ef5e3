"""benchmarks/bench_distributed.py and scaling.py: that they run, and that the model is what its
page says."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NETWORK = {"latency_us": [5.0, 25.0], "bandwidth_gbit": 100.0, "servers": 1}


@pytest.fixture(scope="module")
def scaling():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        # bench.py sets these for itself; what other tests start has to find them as they were.
        for name in ("MXNET_CPU_TEMP_COPY", "MXNET_CPU_PARALLEL_RAND_COPY"):
            patch.setenv(name, os.environ[name])
        yield importlib.import_module("scaling")
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("engine", ["kvstore", "horovod"])
def test_the_fit_finds_the_constants_of_the_model(scaling, engine):
    truth = scaling.Model(engine, 5e-4, 2e-4, 3e-9)
    rows = [
        {
            "workers": workers,
            "channels": channels,
            "added_ms": {"pass": 1e3 * truth.measured(workers, channels)},
        }
        for workers in (2, 4)
        for channels in (64, 512, 2048)
    ]
    found = scaling.fit(engine, rows)
    assert (found.first, found.per_process, found.per_byte) == pytest.approx((5e-4, 2e-4, 3e-9))
    assert found.misfit < 1e-6


def test_a_step_sends_nothing_within_a_process_and_more_with_each(scaling):
    channels = scaling.net_channels("resnet50_v1")
    assert len(channels) == 53 and sum(channels) == 26560
    args = SimpleNamespace(**NETWORK)
    for engine in ("kvstore", "horovod"):
        model = scaling.Model(engine, 5e-4, 2e-4, 3e-9)
        assert scaling.step_seconds(model, 1, channels, args) == (0, 0)
        spans = [scaling.step_seconds(model, 2**i, channels, args) for i in range(1, 10)]
        assert all(best <= worst for best, worst in spans)
        assert spans == sorted(spans)


def test_a_small_measurement_becomes_tables_and_a_picture(scaling, tmp_path, monkeypatch):
    file = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "bench_distributed.py", "--engines", "kvstore"]
        + ["--workers", "2", "--channels", "4", "8", "--repetitions", "2", "--json", file],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    rows = json.loads(file.read_text())["layers"]
    assert [(row["workers"], row["channels"]) for row in rows] == [(2, 4), (2, 8)]
    assert all(row["bare"]["kv.pushpull"]["ms"] > 0 for row in rows)
    assert run.stdout.count("| `kv.pushpull` |") == 2

    (tmp_path / "scaling.md").write_text(
        "a\n<!-- bench_distributed.py -->\nlast time\n<!-- end of bench_distributed.py -->\n"
        "<!-- scaling.py -->\n<!-- end of scaling.py -->\nz\n"
    )
    monkeypatch.setattr(scaling, "DOCS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--docs", "--figures", str(file)])
    scaling.main()
    page = (tmp_path / "scaling.md").read_text()
    assert page.startswith("a\n") and page.endswith("\nz\n") and "last time" not in page
    assert run.stdout.strip() in page and "| 4096 |" in page
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.parametrize("ratio, passes", [(1.4, True), (1.6, False)])
def test_a_bar_passes_up_to_its_limit(scaling, ratio, passes):
    layers = [
        {"workers": 2, "channels": 64, "bare": {"kv.pushpull": {"ratio": r}}} for r in (1.0, ratio)
    ]
    (bar,) = scaling.bench_distributed.judge(layers)
    assert bar["pass"] == passes and bar["worst"] == ratio


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--servers", "0"], "--servers: '0' is not a whole number above 0"),
        (["--groups", "8", "-1"], "--groups: '-1' is not"),
        (["--latency-us", "5", "nan"], "--latency-us: 'nan' is not a number above 0"),
        (["--bandwidth-gbit", "0"], "--bandwidth-gbit: '0' is not"),
        (["--compute-ms", "-1"], "--compute-ms: '-1' is not"),
        (["--net", "none", "--figures", "text"], "--net: Model none is not supported"),
        (["--figures", "none.json"], "there is no none.json"),
        (["--figures", "text"], "text is no file of bench_distributed.py's figures"),
        (["--figures", "other"], "other is no file of bench_distributed.py's figures"),
        (["--figures", "."], "Is a directory"),
    ],
)
def test_wrong_arguments(scaling, arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    row = {"engine": "kvstore", "workers": 2, "channels": 64, "added_ms": {"pass": 1.0}}
    Path("text").write_text("hello")
    Path("other").write_text(json.dumps({"layers": [row]}))
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    with pytest.raises(SystemExit) as end:
        scaling.main()
    assert end.value.code and words in f"{end.value} {capsys.readouterr().err}"


@pytest.mark.parametrize("option", ["--workers", "--channels", "--repetitions"])
def test_numbers_of_the_measurement_are_above_0(scaling, option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_distributed.py", option, "0"])
    with pytest.raises(SystemExit):
        scaling.bench_distributed.parse_arguments()
    assert f"{option}: '0' is not a whole number above 0" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_the_measurement(
    scaling, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["bench_distributed.py", "--json", f"{tmp_path}/file/f.json"])
    with pytest.raises(SystemExit):
        scaling.bench_distributed.parse_arguments()
    assert "f.json cannot be written: " in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["bench_distributed.py", "--json", str(tmp_path)])
    with pytest.raises(SystemExit):
        scaling.bench_distributed.parse_arguments()
    assert f"--json: {tmp_path} is a folder: name a file in it" in capsys.readouterr().err
