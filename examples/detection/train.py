"""Train a detection net with synchronized batch normalization; see README.md.

The lines marked (1) to (5) are all that synchronization needs.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common

common.configure_mxnet(cpu_contexts=1)

import gluon_syncbn as sbn  # (1)
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.contrib import amp

from common import training
from common.files import InputError
from common.nets import initialize
from data import DATASETS, RUNS, Samples, open_data
from model import MODELS, get_model
from plots import plot_boxes
from predict import Predictor, evaluate

PICTURES = 4
STRIDE = 32  # of all these nets


def main(argv=None):
    options = parse(argv)
    processes = training.Processes()
    contexts = training.find_contexts(options, processes, cpu_contexts=1)
    mx.random.seed(options.seed)
    if options.dtype != "float32":
        amp.init(options.dtype)
    names, train_data, val_data = open_data(options)
    training.set_steps(options, len(train_data))

    each = options.batch // processes.size // len(contexts)
    detector = get_model(options, names, each)
    net = detector.net
    if options.norm == "sync":
        sbn.set_default_group(sbn.SyncGroup(store=processes.store))  # (2) over all processes
        sbn.convert_sync_batchnorm(net)  # (3) and over all devices
    initialize(net, contexts, options.pretrained)
    net.hybridize(static_alloc=True)
    trainer, run = training.start_run(RUNS, options, names, net, processes, contexts)

    def shards(samples):
        parts = [samples[i : i + each] for i in range(0, len(samples), each)]
        return [detector.batchify(part) for part in parts]

    samples = Samples(train_data, options.seed, detector.sample)
    batches = processes.batches(samples, options, run.step, batchify_fn=shards)
    # Unsynchronized layers keep different running statistics on each device.
    used = contexts if options.norm == "sync" else contexts[:1]
    predictor = Predictor(net, detector.resize, used)
    in_flight = []
    loop = training.steps(
        run, processes, batches, detector.count,
        lambda: validate(run, processes, predictor, val_data, net), in_flight,
    )  # fmt: skip
    for passes, counted in loop:
        losses = []
        for parts in passes:
            pairs = zip(parts, contexts)
            parts = [[array.as_in_context(c) for array in part] for part, c in pairs]
            with autograd.record():
                # (4) it calls the net for every device before waiting for any result
                parts = [loss / counted for loss in detector.losses(parts)]
                with training.scaled(parts, trainer) as to_differentiate:
                    autograd.backward(to_differentiate)
            losses += parts
        trainer.step(processes.step_size)
        if options.accumulate > 1:
            net.collect_params().zero_grad()
        in_flight.append(losses)
    if run.step < options.steps:
        return run.stop()
    run.say_best()
    folder, shape = run.export_folder(), (1, 3, options.size, options.size)
    if folder:
        sbn.export(net, folder / "model", input_shape=shape)  # (5) for stock MXNet
        training.export_onnx(net, folder, shape, run)
    return 0


def validate(run, processes, predictor, data, net):
    """Evaluate the net, save it and draw."""
    # gluoncv's detectors have different graphs in training and in inference.
    net.hybridize(static_alloc=True)
    run.add_validation(*evaluate(predictor, data, run.names, processes))
    if run.writes:
        samples = []
        for i in np.unique(np.linspace(0, len(data) - 1, PICTURES).astype(int)):
            image, boxes = data[int(i)]
            samples.append(("truth", image, boxes[:, 4], None, boxes[:, :4]))
            found = predictor([image])[0]
            found = found[found[:, 1] >= 0.5]
            samples.append(("prediction", image, found[:, 0], found[:, 1], found[:, 2:]))
        plot_boxes(samples, run.names, run.folder / "predictions.png")
    net.hybridize(static_alloc=True)


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Ctrl-C saves; a second one ends at once."
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="ssd", help="(%(default)s)")
    text = "; ".join(f"{name}: {', '.join(kind.backbones)}" for name, kind in MODELS.items())
    add("--backbone", help=f"{text} (the first of each)")
    add("--pretrained", action="store_true", help="backbone with ImageNet weights (a download)")
    add("--dataset", choices=DATASETS, default="digits", help="(%(default)s)")
    text = "train without gluoncv's augmentation (digits do)"
    add("--no-augment", dest="augment", action="store_false", default=None, help=text)
    training.add_options(parser, RUNS, "of the images (digits 128, others 512)")
    parser.set_defaults(batch=16, steps=700, validate_every=100)
    options = training.parse(parser, argv, RUNS)
    digits = options.dataset.startswith("digits")
    options.backbone = options.backbone or MODELS[options.model].backbones[0]
    options.size = options.size or (128 if digits else 512)
    if options.augment is None:
        options.augment = not digits
    if options.size % STRIDE:
        raise InputError(f"--size is {options.size}: give a multiple of {STRIDE}")
    return options


if __name__ == "__main__":
    training.run_main(main)
