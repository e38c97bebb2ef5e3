"""Train the same net on the same batches of 8 images with six kinds of batch statistics.

Writes a picture, a table and the scores of every run, by default into runs/compare.
"""

import argparse
import functools
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common

common.configure_mxnet(cpu_contexts=8)

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from common import training
from common.digits import VALIDATION_SEED, DigitsOnPhotos
from common.files import InputError, count, replacing
from common.nets import initialize
from data import IGNORED
from model import DigitsNet, SegmentationLoss
from plots import plot_comparison
from predict import Predictor, evaluate, net_scores

BATCH, SIZE = 8, 64
# Kind: the devices, and the layer.
KINDS = {
    "whole batch, 1 device": (1, gluon.nn.BatchNorm),
    "synchronized, 8 devices": (8, sbn.SyncBatchNorm),
    "groups of 4": (8, functools.partial(sbn.SyncBatchNorm, group=sbn.SyncGroup(group_size=4))),
    "groups of 2": (8, functools.partial(sbn.SyncBatchNorm, group=sbn.SyncGroup(group_size=2))),
    "local, 8 devices": (8, gluon.nn.BatchNorm),
    "virtual, 1 device as 8": (1, functools.partial(sbn.VirtualBatchNorm, 8)),
}


def train(kind, seed, options):
    """[(step, mean IoU)] of one training. It evaluates the net that MXNet saves."""
    devices, norm_layer = KINDS[kind]
    contexts = [mx.cpu(i) for i in range(devices)]
    data = DigitsOnPhotos("train", seed, SIZE)
    validation = DigitsOnPhotos("val", VALIDATION_SEED, SIZE, options.val_images)
    mx.random.seed(seed)
    first = DigitsNet(len(data.names))
    initialize(first, [mx.cpu(0)])
    net, saved = DigitsNet(len(data.names), norm_layer=norm_layer), options.output / "last.params"
    first.save_parameters(str(saved))
    net.load_parameters(str(saved), ctx=contexts)
    net.hybridize(static_alloc=True)
    loss_of = SegmentationLoss()
    settings = training.settings_of(options)
    trainer = gluon.Trainer(net.collect_params(), "adam", settings, update_on_kvstore=False)
    scores = []
    for step in range(1, options.steps + 1):
        samples = [data[i] for i in range((step - 1) * BATCH, step * BATCH)]
        images, labels = (mx.nd.array(np.stack(arrays)) for arrays in zip(*samples))
        xs, ys = (gluon.utils.split_and_load(array, contexts) for array in (images, labels))
        labelled = sum(int((label != IGNORED).sum()) for _, label in samples)
        with autograd.record():
            losses = [loss_of(out, y) / labelled for out, y in zip([net(x) for x in xs], ys)]
        autograd.backward(losses)
        trainer.step(1)
        if step % options.validate_every == 0 or step == options.steps:
            net.save_parameters(str(saved))
            first.load_parameters(str(saved), ctx=mx.cpu(0))
            predictor = Predictor(net_scores(first, [mx.cpu(0)]), SIZE, BATCH)
            metric = evaluate(predictor, validation, range(len(validation)), len(data.names))
            scores.append((step, metric.get()[1]))
    saved.unlink()
    return scores


def distances(results):
    """{kind: mean distance of its last scores from the whole batch's with the same seed}."""
    last = {kind: np.array([runs[seed][-1][1] for seed in runs]) for kind, runs in results.items()}
    whole = next(iter(last.values()))
    return {kind: np.abs(scores - whole).mean() for kind, scores in last.items()}


def table(results):
    """Markdown: the last scores of each kind, with mean and standard deviation."""
    lines = [
        "| statistics | mean IoU | deviation | each seed | distance from whole batch, same seed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (kind, runs), distance in zip(results.items(), distances(results).values()):
        last = [scores[-1][1] for scores in runs.values()]
        each = ", ".join(f"{score:.3f}" for score in last)
        spread = f"{np.std(last, ddof=1):.3f}" if len(last) > 1 else "-"
        lines.append(f"| {kind} | {np.mean(last):.3f} | {spread} | {each} | {distance:.3f} |")
    return "\n".join(lines) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=400, help="(%(default)s)")
    parser.add_argument("--seeds", type=count, default=3, help="(%(default)s)")
    parser.add_argument("--validate-every", type=count, default=100, metavar="STEPS")
    parser.add_argument("--val-images", type=count, default=100, help="(%(default)s)")
    text = "folder, whose results are replaced (%(default)s)"
    parser.add_argument("--output", type=Path, default=Path("runs/compare"), help=text)
    parser.set_defaults(optimizer="adam", lr=5e-3, wd=0.0, warmup=50)
    options = parser.parse_args(argv)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the folder {options.output} cannot be made ({error.strerror}): name another one "
            "with --output"
        ) from None
    common.keep_apart([mx.cpu(i) for i in range(8)])
    results = {kind: {} for kind in KINDS}
    for seed in range(1, options.seeds + 1):
        for kind in KINDS:
            start = time.perf_counter()
            results[kind][seed] = train(kind, seed, options)
            score, seconds = results[kind][seed][-1][1], time.perf_counter() - start
            print(f"seed {seed}, {kind}: mean IoU {score:.4f} in {seconds:.0f} s", flush=True)
        with replacing(options.output / "results.json") as file:
            file.write(json.dumps(results, indent=1).encode())
        with replacing(options.output / "table.md") as file:
            file.write(table(results).encode())
        plot_comparison(results, options.output / "compare.png")
    print(f"\n{table(results)}\nresults.json, table.md and compare.png are in {options.output}")
    return 0


if __name__ == "__main__":
    training.run_main(main)
