"""Measures the time that synchronization over processes adds to a layer, compared with a bare call
of the store.

Starts workers on this machine, for each store and number of workers. Prints a Markdown table and a
list of guards, and writes all figures to a file.
"""

import functools
import importlib.util
import itertools
import time
from pathlib import Path

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import psutil
from gluon_syncbn import native
from tqdm import tqdm

import harness
import layers
from harness import positive, seconds_of

FIGURES = Path(__file__).resolve().parent.parent / "build" / "bench-distributed.json"
BARE_CALLS = {"kvstore": ["kv.pushpull"], "horovod": ["hvd.allgather", "hvd.allreduce"]}
# As between processes of one machine, and as between machines.
THROUGH = {"memory": "1", "store": "0"}
MOST = 2.5
# A layer takes almost no time on so little data, so synchronization adds only the exchange.
SAMPLES, SIDE = 2, 4
TIMEOUT = 240  # seconds
BEHIND = " behind a layer"


def main():
    args = parse_arguments()
    figures = harness.environment("gluon_syncbn", "mxnet", "numpy")
    figures["repetitions"] = args.repetitions
    start, busy = time.perf_counter(), seconds_of_others()
    figures["layers"] = []
    for run in tqdm(list(itertools.product(args.engines, args.workers, args.through))):
        figures["layers"] += measure_layers(*run, args.channels, args.repetitions)
    cores = (seconds_of_others() - busy) / (time.perf_counter() - start)
    figures["cores_taken_by_others"] = max(0.0, cores)
    figures["guards"] = harness.judge(comparisons(figures["layers"]))
    harness.finish(figures, sections(figures), args)


def parse_arguments():
    engines = list(BARE_CALLS) if importlib.util.find_spec("horovod") else ["kvstore"]
    parser = harness.options(__doc__, repetitions=200, json_file=str(FIGURES))
    many = functools.partial(parser.add_argument, nargs="+")
    many("--engines", choices=BARE_CALLS, default=engines, help="(all that are installed)")
    many("--workers", type=positive, default=[2, 4], metavar="N", help="numbers of workers (2 4)")
    many("--through", choices=THROUGH, default=list(THROUGH), help="what layers exchange through")
    many("--channels", type=positive, default=[64, 512, 2048], metavar="C", help="(64 512 2048)")
    args = parser.parse_args()
    if min(args.workers) < 2:
        parser.error(f"--workers got {args.workers}: give whole numbers of at least 2")
    return args


def seconds_of_others():
    """The processor time of other programs."""
    of_all, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy = of_all.user + of_all.nice + of_all.system + of_all.irq + of_all.softirq + of_all.steal
    return busy - own.user - own.system - own.children_user - own.children_system


def measure_layers(engine, workers, through, channels, repetitions):
    """The rows of the table for one engine, number of workers, and way of the layers' messages."""
    arguments = "bench_distributed.work", engine, channels, repetitions
    launcher = ["-m", "gluon_syncbn.launch", "-n", str(workers), "--engine", engine]
    variables = {"GLUON_SYNCBN_SHARED_MEMORY": THROUGH[through]}
    found = harness.in_new_process(*arguments, launcher=launcher, seconds=TIMEOUT, **variables)
    place = {"engine": engine, "workers": workers, "through": through}
    return [
        {**place, "channels": count, **summarize(engine, seconds)}
        for count, seconds in zip(channels, found)
    ]


def work(engine, channels, repetitions):
    """Runs a worker. Returns the times of each number of channels on rank 0."""
    if engine == "kvstore":
        store = mx.kv.create("dist_sync")
        reducer = sbn.distributed.KVStoreReducer(store)
    else:
        import horovod.mxnet as store

        store.init()
        reducer = sbn.distributed.HorovodReducer(store)
    times = [layer_times(engine, store, reducer, count, repetitions) for count in channels]
    return None if reducer.rank else times


def layer_times(engine, store, reducer, channels, repetitions):
    """{name: seconds of each round, as means over the workers}, of forward and backward or of one
    call."""
    data = layers.random_arrays((SAMPLES, channels, SIDE, SIDE), [mx.cpu()])
    make = functools.partial(sbn.SyncBatchNorm, group=sbn.SyncGroup(store=reducer))
    synchronized = layers.Layer(make, channels, [mx.cpu()])
    local = layers.Layer(sbn.SyncBatchNorm, channels, [mx.cpu()])
    size = 6 * channels + 2  # values that a process sends for a layer in each pass
    message = np.random.default_rng(0).standard_normal(size)

    def all_gather():
        reducer.all_gather(f"all_gather {channels}", message)

    def behind(call):
        # So that caches, threads and other workers are as in the exchange of a layer.
        local(*data)
        return [seconds_of(call)]

    contestants = {
        "synchronized": lambda: synchronized(*data),
        "local": lambda: local(*data),
        "all_gather": lambda: [seconds_of(all_gather)],
    }
    for name in BARE_CALLS[engine]:
        # Small keys, like those of a Trainer; those of the reducer begin at 10**6.
        call = bare_call(name, store, reducer.size, size, key=channels)
        contestants[name] = lambda call=call: [seconds_of(call)]
        contestants[name + BEHIND] = functools.partial(behind, call)

    def together(run):
        # Otherwise the delay of one worker would count as time of the next call.
        reducer.all_gather("together", np.zeros(1))
        return run()

    calls = {name: functools.partial(together, run) for name, run in contestants.items()}
    times = {}
    for name, rows in harness.interleave(calls, repetitions).items():
        of_all = reducer.all_gather(f"times {name} {channels}", np.array(rows).reshape(-1))
        times[name] = of_all.mean(axis=0).reshape(repetitions, -1).tolist()
    return times


def bare_call(name, store, workers, size, key):
    """A call of the store with the numbers of a layer, and the wait for its result."""
    if name == "kv.pushpull":
        array = mx.nd.zeros((native.packed_size(size, workers, native.KVSTORE_BITS),))
        store.init(key, array)

        def call():
            store.pushpull(key, array, out=array)
            array.wait_to_read()

        return call
    function = getattr(store, name[len("hvd.") :])
    array = mx.nd.zeros((size,), dtype="float64")
    return lambda: function(array, name=f"bare {name} {size}").wait_to_read()


def summarize(engine, seconds):
    """Medians over the rounds, in milliseconds, and the ratios of what is added to a pass."""
    added = np.subtract(seconds["synchronized"], seconds["local"])
    passes = added.mean(axis=1, keepdims=True)
    ms = {name: harness.medians(rows, 1e3)[0] for name, rows in seconds.items()}
    bare = {}
    for name in BARE_CALLS[engine]:
        (ratio,) = harness.ratios(passes, seconds[name])
        bare[name] = {"ms": ms[name], "behind_ms": ms[name + BEHIND], "ratio": ratio}
    medians = harness.medians(np.hstack([added, passes]), 1e3)
    added_ms = dict(zip(("forward", "backward", "pass"), medians))
    return {"added_ms": added_ms, "all_gather_ms": ms["all_gather"], "bare": bare}


def comparisons(rows):
    for row in rows:
        where = f"{row['workers']} workers, C = {row['channels']}, through {row['through']}"
        for name, bare in row["bare"].items():
            yield f"time added to a pass / `{name}`", MOST, bare["ratio"], where


def sections(figures):
    """The text of the result."""
    yield harness.machine(figures)
    busy, cores = figures["cores_taken_by_others"], figures["cores"]
    yield f"Other programs kept {busy:.1f} of {cores} cores busy."
    yield (
        f"Milliseconds, medians of {figures['repetitions']} rounds and means over the workers. "
        "*Behind a layer*: the bare call again, right after a layer that does not synchronize. "
        "*Added*: what synchronization through shared memory or the store adds to a layer, in each "
        "pass. *Added / bare*: the mean of what was added to forward and backward, divided by the "
        "bare call; the median of the rounds."
    )
    header = ["bare call", "workers", "through", "C", "bare", "behind a layer", "`all_gather`"]
    header += ["added: forward", "backward", "added / bare"]
    yield harness.table(header, [cells for row in figures["layers"] for cells in _cells(row)])


def _cells(row):
    for name, bare in row["bare"].items():
        added = row["added_ms"]["forward"], row["added_ms"]["backward"]
        times = bare["ms"], bare["behind_ms"], row["all_gather_ms"], *added
        ratio = f"{bare['ratio']:.2f}"
        place = row["workers"], row["through"], row["channels"]
        yield [f"`{name}`", *place, *(f"{each:.2f}" for each in times), ratio]


if __name__ == "__main__":
    main()
