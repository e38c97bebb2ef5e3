"""Train a segmentation net with synchronized batch normalization; see README.md.

The lines marked (1) to (5) are all that synchronization asks for.
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
from tqdm import tqdm

import plots
from common import runs, training
from common.files import InputError, count
from common.nets import initialize
from data import DATASETS, IGNORED, RUNS, open_data
from model import BACKBONES, MODELS, STRIDE, get_model
from predict import Predictor, evaluate, net_scores

STEPS_IN_FLIGHT = 2  # how far the devices may lag behind Python
PICTURES = 8


def main(argv=None):
    options = parse(argv)
    processes = training.Processes()
    contexts = training.find_contexts(options, processes, cpu_contexts=2)
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
    trainer = processes.trainer(net.collect_params(), options)
    run = runs.Run(RUNS, options, names, net, trainer, writes=processes.rank == 0)
    where = f"{processes.size} x ({', '.join(map(str, contexts))})"
    run.say(f"steps {run.step} to {options.steps} on {where}, into {run.folder}")

    batches = processes.batches(train_data, options, run.step)
    # Unsynchronized layers keep other running statistics on each device.
    used = contexts if options.norm == "sync" else contexts[:1]
    predictor = Predictor(net_scores(net, used), options.size, options.batch)
    in_flight, interrupt = [], runs.Interrupt()
    with tqdm(total=options.steps, initial=run.step, disable=None if run.writes else True) as bar:
        while True:
            if run.due(options.validate_every):
                training.note_losses(run, processes, in_flight, 0)
                validate(run, processes, predictor, val_data)
            if run.step == options.steps:
                break
            passes = [next(batches) for _ in range(options.accumulate)]
            labelled = sum(int((labels != IGNORED).sum().asscalar()) for _, labels in passes)
            labelled, stop = processes.sum("step", [labelled, interrupt.requested])
            if stop:
                break
            losses = []
            for images, labels in passes:
                xs = gluon.utils.split_and_load(images, contexts)
                ys = gluon.utils.split_and_load(labels, contexts)
                with autograd.record():
                    # (4) call the net for every device before waiting for any result
                    parts = [loss_of(net(x), y) / max(labelled, 1) for x, y in zip(xs, ys)]
                    with training.scaled(parts, trainer) as to_differentiate:
                        autograd.backward(to_differentiate)
                losses += parts
            trainer.step(processes.step_size)
            if options.accumulate > 1:
                net.collect_params().zero_grad()
            run.step += 1
            in_flight.append(losses)
            training.note_losses(run, processes, in_flight, STEPS_IN_FLIGHT)
            bar.update()
        training.note_losses(run, processes, in_flight, 0)
    if run.step < options.steps:
        return run.stop()
    run.say_best()
    folder, shape = run.export_folder(), (1, 3, options.size, options.size)
    if folder:
        sbn.export(net, folder / "model", input_shape=shape)  # (5) for stock MXNet
        training.export_onnx(net, folder, shape, run)
    return 0


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
    parser.set_defaults(batch=8, steps=1500, validate_every=250)
    options = training.parse(parser, argv, RUNS)
    options.size = options.size or (64 if options.dataset == "digits" else 480)
    if options.size % STRIDE:
        raise InputError(f"--size is {options.size}: give a multiple of {STRIDE}")
    return options


if __name__ == "__main__":
    training.run_main(main)
