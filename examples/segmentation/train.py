"""Train a segmentation net with synchronized batch normalization; see README.md.

The lines marked (1) to (5) are all that synchronization needs.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common

common.configure_mxnet(cpu_contexts=2)

import gluon_syncbn as sbn  # (1)
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.contrib import amp

import plots
from common import training
from common.files import InputError, count
from common.nets import initialize
from data import DATASETS, IGNORED, RUNS, open_data
from model import BACKBONES, MODELS, STRIDE, get_model
from predict import Predictor, evaluate, net_scores

PICTURES = 8


def main(argv=None):
    options = parse(argv)
    processes = training.Processes()
    small = options.model == "digits"
    contexts = training.find_contexts(options, processes, cpu_contexts=2 if small else 1)
    common.keep_apart(contexts)
    mx.random.seed(options.seed)
    if options.dtype != "float32":
        amp.init(options.dtype)
    names, train_data, val_data = open_data(options)
    training.set_steps(options, len(train_data))

    net, loss_of = get_model(options, len(names))
    if options.norm == "sync":
        sbn.set_default_group(sbn.SyncGroup(store=processes.store))  # (2) over all processes
        sbn.convert_sync_batchnorm(net)  # (3) and over all devices
    initialize(net, contexts, options.pretrained)
    net.hybridize(static_alloc=True)
    loss_of.hybridize(static_alloc=True)
    trainer, run = training.start_run(RUNS, options, names, net, processes, contexts)

    batches = processes.batches(train_data, options, run.step)
    # Unsynchronized layers keep different running statistics on each device.
    used = contexts if options.norm == "sync" else contexts[:1]
    predictor = Predictor(net_scores(net, used), options.size, options.batch)
    in_flight = []
    loop = training.steps(
        run, processes, batches, count_labelled,
        lambda: validate(run, processes, predictor, val_data), in_flight,
    )  # fmt: skip
    for passes, labelled in loop:
        losses = []
        for images, labels in passes:
            xs = gluon.utils.split_and_load(images, contexts)
            ys = gluon.utils.split_and_load(labels, contexts)
            with autograd.record():
                # (4) call the net for every device before waiting for any result
                parts = [loss_of(net(x), y) / labelled for x, y in zip(xs, ys)]
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


def count_labelled(batch):
    """The pixels of a pass that have a label."""
    _, labels = batch
    return int((labels != IGNORED).sum().asscalar())


def validate(run, processes, predictor, data):
    """Evaluate the net, save it and draw."""
    own = range(processes.rank, len(data), processes.size)
    metric = evaluate(predictor, data, own, len(run.names))
    metric.counts = processes.sum("metric", metric.counts)
    run.add_validation(*metric.get())
    if run.writes:
        chosen = np.unique(np.linspace(0, len(data) - 1, PICTURES).astype(int))
        samples = [data[int(i)] for i in chosen]
        found = predictor([image for image, _ in samples])
        path = run.folder / "predictions.png"
        plots.plot_predictions(samples, found, run.options["dataset"], run.names, path)


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Ctrl-C saves; a second one ends at once."
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="digits", help="the small net, or one of gluoncv")
    add("--backbone", choices=BACKBONES, default="resnet50", help="of gluoncv's (%(default)s)")
    add("--pretrained", action="store_true", help="backbone with ImageNet weights (a download)")
    text = "weight of auxiliary heads, 0: none (%(default)s)"
    add("--aux-weight", type=float, default=0.2, help=text)
    add("--dataset", choices=DATASETS, default="digits", help="(%(default)s)")
    add("--classes", type=count, help="for --dataset folder without classes.txt")
    training.add_options(parser, RUNS, "of the square crops (digits 64, others 480)")
    parser.set_defaults(batch=8, steps=1050, validate_every=210)
    options = training.parse(parser, argv, RUNS)
    options.size = options.size or (64 if options.dataset == "digits" else 480)
    if options.size % STRIDE:
        raise InputError(f"--size is {options.size}: give a multiple of {STRIDE}")
    return options


if __name__ == "__main__":
    training.run_main(main)
