"""Times training steps on the CPU under environment settings of OpenMP and of malloc.

Prints a Markdown table: each setting's time and peak memory / those with OMP_NUM_THREADS alone.
"""

import ctypes.util
import json
import os
import resource
import subprocess
import sys
import time

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from gluoncv.model_zoo import get_model
from tqdm import tqdm

import report
from measure import KEEP_FREED_MEMORY

CORES = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
KINDS = ("static_alloc", "hybridize", "no graph")
BATCH, SIZE = 4, 384
ROUNDS, WARM_UP, STEPS = 3, 3, 6


def main():
    settings = {"`OMP_NUM_THREADS` alone": CORES, "none": {}}
    keep = KEEP_FREED_MEMORY
    settings[" ".join(f"{name}={value}" for name, value in keep.items())] = {**CORES, **keep}
    for name in ("tcmalloc_minimal", "jemalloc"):
        library = ctypes.util.find_library(name)
        if library:
            settings[f"LD_PRELOAD={library}"] = {**CORES, "LD_PRELOAD": library}
    rows = {(name, kind): [] for name in settings for kind in KINDS}
    with tqdm(total=ROUNDS * len(rows)) as progress:
        for i in range(ROUNDS):
            order = list(rows)[:: 1 if i % 2 else -1]
            for name, kind in order:
                rows[name, kind].append(measure(kind, settings[name]))
                progress.update()
    first = next(iter(settings))
    lines = []
    for name in settings:
        ratios = [
            np.median(np.array(rows[name, kind]) / rows[first, kind], axis=0) for kind in KINDS
        ]
        lines.append([name, *(f"{ratio:.2f}" for pair in ratios for ratio in pair)])
    header = (title for kind in KINDS for title in (f"{kind}: time", "memory"))
    print(report.table(["setting", *header], lines))


def measure(kind, setting):
    """Seconds of a step and peak memory, in a new process."""
    others = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    output = subprocess.run(
        [sys.executable, __file__, kind],
        env={**others, **setting},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    return json.loads(output.splitlines()[-1])


def train(kind):
    net = get_model("resnet18_v1b", pretrained_base=False, norm_layer=sbn.SyncBatchNorm)
    net.initialize(mx.init.Xavier())
    if kind != "no graph":
        net.hybridize(static_alloc=kind == "static_alloc")
    x, y = mx.nd.random.normal(shape=(BATCH, 3, SIZE, SIZE)), mx.nd.arange(BATCH)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
    seconds = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        with mx.autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(BATCH)
        mx.nd.waitall()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([float(np.median(seconds[WARM_UP:])), peak]))


if __name__ == "__main__":
    if sys.argv[1:]:
        train(sys.argv[1])
    else:
        main()
