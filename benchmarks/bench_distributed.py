"""Measures the time that synchronization over processes adds to a layer, compared with a bare call
of the store.

Starts workers on this machine, for each store and number of workers. Prints a Markdown table and a
list of thresholds, and writes all figures to a file.
"""

import argparse
import functools
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from gluon_syncbn import native
from tqdm import tqdm

import bench
import measure
import report

FIGURES = Path(__file__).resolve().parent.parent / "build" / "bench-distributed.json"
THRESHOLD = 1.5
# A layer takes almost no time on so little data, so synchronization adds only the exchange.
SAMPLES, SIDE = 2, 4
TIMEOUT = 240  # seconds
BEHIND = " behind a layer"
# As between processes of one machine, and as between machines.
THROUGH = {"memory": "1", "store": "0"}


def main():
    args = parse_arguments()
    if args.worker:
        work(args.worker, args.engines[0], args.channels, args.repetitions)
        return
    figures = {**bench.environment(), "repetitions": args.repetitions}
    cores = Cores()
    runs = list(itertools.product(args.engines, args.workers, args.through))
    figures["layers"] = [row for run in tqdm(runs) for row in measure_layers(*run, args)]
    figures["cores_taken_by_others"] = cores.taken_by_others()
    figures["thresholds"] = judge(figures["layers"])
    print(text(figures))
    args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if args.check and not all(threshold["pass"] for threshold in figures["thresholds"]):
        sys.exit(1)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES,
        default=installed_engines(),
        help="how workers communicate (all that are installed)",
    )
    parser.add_argument(
        "--workers",
        type=bench.positive,
        nargs="+",
        default=[2, 4],
        metavar="N",
        help="numbers of workers (2 4)",
    )
    parser.add_argument(
        "--through",
        nargs="+",
        choices=THROUGH,
        default=list(THROUGH),
        help="what layers exchange through (memory store)",
    )
    parser.add_argument(
        "--channels",
        type=bench.positive,
        nargs="+",
        default=[64, 512, 2048],
        metavar="C",
        help="64 512 2048",
    )
    parser.add_argument("--repetitions", type=bench.positive, default=200, help="rounds (200)")
    parser.add_argument(
        "--json", type=bench.file_name, default=FIGURES, metavar="FILE", help="where all figures go"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a threshold fails")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.workers) < 2:
        parser.error(f"--workers got {args.workers}: give whole numbers of at least 2")
    try:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--json {args.json} cannot be written: {error}")
    return args


def installed_engines():
    try:
        import horovod.mxnet  # noqa: F401  It may be installed without support for MXNet.
    except ImportError:
        return ["kvstore"]
    return list(ENGINES)


def message_size(channels):
    """How many float64 values a process sends for a layer in each pass."""
    return 6 * channels + 2


class KVStore:
    """A worker that communicates through MXNet's KVStore. Bare calls include the wait for their
    result."""

    def __init__(self):
        self._kv = mx.kv.create("dist_sync")
        self.reducer = sbn.distributed.KVStoreReducer(self._kv)
        # Like those of a Trainer, these keys begin at 0; those of the reducer begin at 10**6.
        self._keys = iter(range(1000))

    def bare_calls(self, channels):
        values, bits = message_size(channels), native.KVSTORE_BITS
        return {
            "kv.pushpull": self._pushpull((native.packed_size(values, self.reducer.size, bits),))
        }

    def _pushpull(self, shape):
        key, array = next(self._keys), mx.nd.zeros(shape)
        self._kv.init(key, array)

        def call():
            self._kv.pushpull(key, array, out=array)
            array.wait_to_read()

        return call


class Horovod:
    """A worker that communicates through Horovod. Bare calls include the wait for their result."""

    def __init__(self):
        import horovod.mxnet as hvd

        hvd.init()
        self._hvd = hvd
        self.reducer = sbn.distributed.HorovodReducer(hvd)

    def bare_calls(self, channels):
        names = ("allgather", "allreduce")
        return {f"hvd.{name}": self._call(name, message_size(channels)) for name in names}

    def _call(self, name, size):
        function, array = getattr(self._hvd, name), mx.nd.zeros((size,), dtype="float64")
        return lambda: function(array, name=f"bare {name} {size}").wait_to_read()


ENGINES = {"kvstore": KVStore, "horovod": Horovod}


def work(file, engine, channels, repetitions):
    """Runs a worker. Rank 0 writes the times to the file."""
    engine = ENGINES[engine]()
    group = sbn.SyncGroup(store=engine.reducer)
    measure.LAYERS["synchronized"] = functools.partial(sbn.SyncBatchNorm, group=group)
    layers = [{"channels": c, "seconds": layer_times(engine, c, repetitions)} for c in channels]
    if engine.reducer.rank == 0:
        file.write_text(json.dumps({"threads": measure.threads(), "layers": layers}))


def layer_times(engine, channels, repetitions):
    """{name: seconds of each round, as means over the workers}, of forward and backward or of one
    call."""
    shape = (SAMPLES, channels, SIDE, SIDE)
    x, dy = mx.nd.random.normal(shape=shape), mx.nd.random.normal(shape=shape)
    x.attach_grad()
    synchronized = measure.Layer("synchronized", channels, [mx.cpu()])
    local = measure.Layer("block", channels, [mx.cpu()])
    message = np.random.default_rng(0).standard_normal(message_size(channels))
    calls = {
        "all_gather": lambda: engine.reducer.all_gather(f"all_gather {channels}", message),
        **engine.bare_calls(channels),
    }
    contestants = {
        "synchronized": lambda: synchronized([x], [dy]),
        "local": lambda: local([x], [dy]),
        **{name: functools.partial(_seconds, call) for name, call in calls.items()},
        **{
            # So that caches, threads and other workers are as in the exchange of a layer.
            f"{name}{BEHIND}": lambda call=call: (local([x], [dy]), _seconds(call))[1]
            for name, call in engine.bare_calls(channels).items()
        },
    }
    results = measure.interleave(
        {name: functools.partial(_together, engine, run) for name, run in contestants.items()},
        repetitions,
        progress=SimpleNamespace(update=lambda: None),
    )
    return {
        name: engine.reducer.all_gather(f"times {name} {channels}", rows.reshape(-1))
        .mean(axis=0)
        .reshape(rows.shape)
        .tolist()
        for name, rows in results.items()
    }


def _together(engine, run):
    # Otherwise the delay of one worker would count as time of the next call.
    engine.reducer.all_gather("together", np.zeros(1))
    return run()


def _seconds(call):
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start,)


def measure_layers(engine, workers, through, args):
    """The rows of the table for one engine, number of workers, and way of the layers' messages."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        command = [
            *(sys.executable, "-m", "gluon_syncbn.launch", "-n", str(workers), "--engine", engine),
            *(__file__, "--worker", str(file), "--engines", engine, "--channels"),
            *(*map(str, args.channels), "--repetitions", str(args.repetitions)),
        ]
        launcher = subprocess.Popen(
            command,
            env={**os.environ, "GLUON_SYNCBN_SHARED_MEMORY": THROUGH[through]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = launcher.communicate(timeout=TIMEOUT)
        finally:
            launcher.terminate()
            launcher.wait()
        if launcher.returncode != 0 or not file.exists():
            sys.exit(f"{' '.join(command)} ended with {launcher.returncode}:\n{output}")
        times = json.loads(file.read_text())
    return [
        {
            "engine": engine,
            "workers": workers,
            "through": through,
            "threads": times["threads"],
            **summarize(layer),
        }
        for layer in times["layers"]
    ]


def summarize(layer):
    """Medians over the rounds, in milliseconds, and medians of the ratios in each round: a
    disturbance affects all calls of a round."""
    seconds = {name: np.array(rows) for name, rows in layer["seconds"].items()}
    added = seconds["synchronized"] - seconds["local"]
    each = added.mean(axis=1)
    bare_calls = [name for name in seconds if name + BEHIND in seconds]
    return {
        "channels": layer["channels"],
        "added_ms": {
            "forward": _milliseconds(added[:, 0]),
            "backward": _milliseconds(added[:, 1]),
            "pass": _milliseconds(each),
        },
        "local_ms": _milliseconds(seconds["local"].mean(axis=1)),
        "all_gather_ms": _milliseconds(seconds["all_gather"]),
        "bare": {
            name: {
                "ms": _milliseconds(seconds[name]),
                "behind_ms": _milliseconds(seconds[name + BEHIND]),
                **_ratio(each, seconds[name][:, 0]),
            }
            for name in bare_calls
        },
    }


def _ratio(added, bare):
    return {
        "ratio": float(np.median(added / bare)),
        "quartiles": np.percentile(added / bare, [25, 75]).tolist(),
        "of_medians": float(np.median(added) / np.median(bare)),
    }


def _milliseconds(seconds):
    return float(np.median(seconds) * 1e3)


class Cores:
    """Measures how many cores other processes have kept busy since it was created."""

    def __init__(self):
        self._start = time.perf_counter(), self._seconds_of_others()

    def taken_by_others(self):
        start, seconds = self._start
        return max(0.0, self._seconds_of_others() - seconds) / (time.perf_counter() - start)

    @staticmethod
    def _seconds_of_others():
        with open("/proc/stat") as stat:
            user, nice, system, _, _, irq, soft, steal = map(int, stat.readline().split()[1:9])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return busy - sum(usage.ru_utime + usage.ru_stime for usage in usages)


def judge(layers):
    """Each threshold with its worst figure."""
    figures = {}
    for row in layers:
        place = f"{row['workers']} workers, C = {row['channels']}, through {row['through']}"
        for name, bare in row["bare"].items():
            figures.setdefault(name, []).append((bare["ratio"], place))
    thresholds = []
    for name, values in figures.items():
        worst, place = max(values)
        failed = sum(value > THRESHOLD for value, _ in values)
        thresholds.append(
            {
                "name": f"time added to a pass / `{name}`",
                "threshold": THRESHOLD,
                "worst": worst,
                "where": place,
                "failed": failed,
                "of": len(values),
                "pass": failed == 0,
            }
        )
    return thresholds


def text(figures):
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    header = ["bare call", "workers", "through", "C", "bare", "behind a layer", "`all_gather`"]
    return "\n\n".join(
        [
            f"{figures['cpu']}, {figures['cores']} cores, {versions}, {figures['date'][:10]}",
            load(figures),
            f"Milliseconds, medians of {figures['repetitions']} rounds and means over the workers. "
            "*Behind a layer*: the bare call again, right after a layer that does not synchronize. "
            "*Added*: by synchronization to a layer, in each pass, *through* shared memory or the "
            "store. *Added / bare*: the median of "
            "the rounds' ratios of what was added to a pass, the mean of both, to the bare call.",
            report.table(
                [*header, "added: forward", "backward", "added / bare"],
                [
                    _row(row, name, bare)
                    for row in figures["layers"]
                    for name, bare in row["bare"].items()
                ],
            ),
            report.table(
                ["threshold", "at most", "worst", "where", "result"],
                [report.threshold_row(threshold) for threshold in figures["thresholds"]],
            ),
        ]
    )


def load(figures):
    """The load of the machine."""
    cores = figures["cores"]
    crowds = [
        f"{ENGINES[engine].__name__} with {workers} workers"
        for engine, workers in dict.fromkeys((r["engine"], r["workers"]) for r in figures["layers"])
        if workers + (engine == "kvstore") > cores
    ]
    text = f"Other programs kept {figures['cores_taken_by_others']:.1f} of {cores} cores busy."
    if crowds:
        text += (
            " There were more workers (and, with the KVStore, a server) than cores, so they "
            f"waited for a core: {', '.join(crowds)}."
        )
    if not any(row["engine"] == "horovod" for row in figures["layers"]):
        text += " Horovod was not measured."
    return text


def _row(row, name, bare):
    ratio = f"{bare['ratio']:.2f}"
    return [
        f"`{name}`",
        str(row["workers"]),
        row["through"],
        str(row["channels"]),
        f"{bare['ms']:.2f}",
        f"{bare['behind_ms']:.2f}",
        f"{row['all_gather_ms']:.2f}",
        f"{row['added_ms']['forward']:.2f}",
        f"{row['added_ms']['backward']:.2f}",
        # Bold if it fails its threshold.
        ratio if bare["ratio"] <= THRESHOLD else f"**{ratio}**",
    ]


if __name__ == "__main__":
    main()
