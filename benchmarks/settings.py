"""Times training steps on the CPU under environment settings of OpenMP and of malloc.

Prints a Markdown table: each setting's time and peak memory / those with OMP_NUM_THREADS alone.
"""

import ctypes.util
import functools
import itertools
import resource
import statistics

from tqdm import tqdm

from harness import CORES, KEEP_FREED_MEMORY, in_new_process, interleave, ratios, seconds_of, table

KINDS = ("static_alloc", "hybridize", "no graph")
SETTINGS = {
    "`OMP_NUM_THREADS` alone": {},
    "none": {"OMP_NUM_THREADS": None},
    " ".join(f"{name}={value}" for name, value in KEEP_FREED_MEMORY.items()): KEEP_FREED_MEMORY,
}
for name in ("tcmalloc_minimal", "jemalloc"):
    library = ctypes.util.find_library(name)
    if library:
        SETTINGS[f"LD_PRELOAD={library}"] = {"LD_PRELOAD": library}
BATCH, SIZE = 4, 384
ROUNDS, WARM_UP, STEPS = 3, 3, 6


def main():
    runs = list(itertools.product(SETTINGS, KINDS))
    progress = tqdm(total=ROUNDS * len(runs))

    def measure(setting, kind):
        variables = {"OMP_NUM_THREADS": str(CORES), **SETTINGS[setting]}
        progress.update()
        return in_new_process("settings.train", kind, **variables)

    calls = {run: functools.partial(measure, *run) for run in runs}
    rows = interleave(calls, ROUNDS, warm_up=0)
    first = next(iter(SETTINGS))
    lines = []
    for setting in SETTINGS:
        cells = [setting]
        for kind in KINDS:
            found = ratios(rows[setting, kind], rows[first, kind])
            cells += [f"{ratio:.2f}" for ratio in found]
        lines.append(cells)
    header = [title for kind in KINDS for title in (f"{kind}: time", "memory")]
    print(table(["setting", *header], lines))


def train(kind):
    """Seconds of a step, and peak memory."""
    import gluon_syncbn as sbn
    import mxnet as mx
    from gluoncv.model_zoo import get_model

    net = get_model("resnet18_v1b", pretrained_base=False, norm_layer=sbn.SyncBatchNorm)
    net.initialize(mx.init.Xavier())
    if kind != "no graph":
        net.hybridize(static_alloc=kind == "static_alloc")
    x, y = mx.nd.random.normal(shape=(BATCH, 3, SIZE, SIZE)), mx.nd.arange(BATCH)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})

    def step():
        with mx.autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(BATCH)
        mx.nd.waitall()

    seconds = [seconds_of(step) for _ in range(WARM_UP + STEPS)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return statistics.median(seconds[WARM_UP:]), peak


if __name__ == "__main__":
    main()
