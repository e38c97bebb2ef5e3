"""Train a segmentation net with synchronized batch normalization; see README.md.

The lines marked (1) to (5) are all that synchronization asks for.
"""

import argparse
import contextlib
import math
import os
import sys
from pathlib import Path

# MXNet reads these when it starts. Several CPU contexts share its workspaces, and a step of one
# that holds the last of them while it waits for the other would wait forever; and each context
# computes with threads of its own.
os.environ.setdefault("MXNET_CPU_TEMP_COPY", "4096")
os.environ.setdefault("MXNET_CPU_PARALLEL_RAND_COPY", "64")
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
# The same numbers always give the same sums, so that resuming is exact.
os.environ.setdefault("MXNET_ENFORCE_DETERMINISM", "1")
os.environ.setdefault("MXNET_CUDNN_AUTOTUNE_DEFAULT", "0")

import gluon_syncbn as sbn  # (1)
import mxnet as mx
import numpy as np
from gluoncv.utils import LRScheduler, LRSequential
from mxnet import autograd, gluon
from mxnet.contrib import amp
from tqdm import tqdm

import checkpoint
import plots
from data import DATASETS, IGNORED, InputError, count, open_data
from model import BACKBONES, MODELS, STRIDE, get_model, initialize
from predict import Predictor, evaluate, net_scores

STEPS_IN_FLIGHT = 2  # how far the devices may lag behind Python
PICTURES = 8


def main(argv=None):
    options = parse(argv)
    processes = Processes()
    contexts = find_contexts(options, processes)
    mx.random.seed(options.seed)
    if options.dtype != "float32":
        amp.init(options.dtype)
    names, train_data, val_data = open_data(options)
    if options.steps is None:
        each = options.batch * options.accumulate
        options.steps = math.ceil(options.epochs * len(train_data) / each)

    net, loss_of = get_model(options, len(names))
    if options.norm == "sync":
        sbn.convert_sync_batchnorm(net)  # (2) the statistics are those of all devices
    initialize(net, contexts, options.pretrained)
    net.hybridize(static_alloc=True)
    loss_of.hybridize(static_alloc=True)
    trainer = processes.trainer(net.collect_params(), options.optimizer, settings_of(options))
    if options.dtype != "float32":
        amp.init_trainer(trainer)
    if options.accumulate > 1:
        net.collect_params().setattr("grad_req", "add")

    run = checkpoint.Run(options, names, net, trainer, writes=processes.rank == 0)
    where = f"{processes.size} x ({', '.join(map(str, contexts))})"
    run.say(f"steps {run.step} to {options.steps} on {where}, into {run.folder}")
    shares = processes.shares(options, run.step)
    threads = {"num_workers": options.threads, "thread_pool": True}
    batches = iter(gluon.data.DataLoader(train_data, batch_sampler=shares, **threads))
    # Unsynchronized layers keep other running statistics on each device.
    used = contexts if options.norm == "sync" else contexts[:1]
    predictor = Predictor(net_scores(net, used), options.size, options.batch)
    in_flight, interrupt = [], checkpoint.Interrupt()
    with tqdm(total=options.steps, initial=run.step, disable=None if run.writes else True) as bar:
        while True:
            if run.due(options.validate_every):
                note_losses(run, processes, in_flight, 0)
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
                    # (3) call the net for every device before waiting for any result
                    parts = [loss_of(net(x), y) / max(labelled, 1) for x, y in zip(xs, ys)]
                    with scaled(parts, trainer) as to_differentiate:
                        autograd.backward(to_differentiate)
                losses += parts
            trainer.step(processes.step_size)
            if options.accumulate > 1:
                net.collect_params().zero_grad()
            run.step += 1
            in_flight.append(losses)
            note_losses(run, processes, in_flight, STEPS_IN_FLIGHT)
            bar.update()
        note_losses(run, processes, in_flight, 0)
    if run.step < options.steps:
        run.save()
        command = f"{sys.argv[0]} --resume {run.folder}"
        run.say(f"stopped after step {run.step}, all is saved; to continue: {command}")
        return 130
    best = "best mean IoU {mean_iou:.4f} at step {step}".format(**run.state["best"])
    run.say(f"{run.seconds:.0f} s, {best}; curves.png and predictions.png in {run.folder}")
    if run.writes and options.export and options.dtype != "float32":
        # MXNet's AMP has changed all operators of this process.
        run.say(f"to export it in float32: {sys.argv[0]} --resume {run.folder} --dtype float32")
    elif run.writes and options.export:
        run.load_best()
        export(net, run, (1, 3, options.size, options.size))
    return 0


def scaled(losses, trainer):
    """AMP's scaling of the loss, where the trainer has it."""
    has_it = hasattr(trainer, "_amp_loss_scaler")
    return amp.scale_loss(losses, trainer) if has_it else contextlib.nullcontext(losses)


def settings_of(options):
    """Of the optimizer. The rate rises linearly, then decays to 1% by a polynomial."""
    rise, low = min(options.warmup, options.steps // 2), options.lr / 100
    rising = [LRScheduler("linear", options.lr / rise, options.lr, rise)] if rise > 1 else []
    decay = LRScheduler("poly", options.lr, low, max(2, options.steps - rise), power=0.9)
    schedule = LRSequential([*rising, decay])
    schedule.base_lr = options.lr
    momentum = {"momentum": 0.9} if options.optimizer == "sgd" else {}
    return {"learning_rate": options.lr, "lr_scheduler": schedule, "wd": options.wd, **momentum}


def note_losses(run, processes, in_flight, allowed):
    """Wait for the losses of all steps but the last `allowed` ones."""
    while len(in_flight) > allowed:
        own = sum(float(part.asscalar()) for part in in_flight.pop(0))
        run.add_loss(run.step - len(in_flight), *processes.sum("loss", [own]))


def validate(run, processes, predictor, data):
    """Evaluate the net, save it and draw."""
    own = range(processes.rank, len(data), processes.size)
    metric = evaluate(predictor, data, own, len(run.names))
    metric.counts = processes.sum("metric", metric.counts)
    accuracy, score = metric.get()
    better = score > run.state["best"]["mean_iou"]
    run.add_validation(accuracy, score)
    mark = " (the best so far)" if better else ""
    run.say(f"step {run.step}: pixel accuracy {accuracy:.4f}, mean IoU {score:.4f}{mark}")
    run.save(better)
    if run.writes:
        chosen = np.unique(np.linspace(0, len(data) - 1, PICTURES).astype(int))
        samples = [data[int(i)] for i in chosen]
        found = predictor([image for image, _ in samples])
        path = run.folder / "predictions.png"
        plots.plot_predictions(samples, found, run.options["dataset"], run.names, path)


def export(net, run, shape):
    """Write the net for stock MXNet and, where its converter and onnx are there, for ONNX."""
    folder = run.folder / "export"
    folder.mkdir(exist_ok=True)
    net.hybridize(static_alloc=False)
    sbn.export(net, folder / "model", input_shape=shape)  # (5)
    try:
        onnx = folder / "model.onnx"
        sbn.export(net, folder / "folded", fold=True, onnx=onnx, input_shape=shape)
    except (ImportError, ValueError, sbn.ExportError) as error:
        run.say(f"no ONNX file: {error}")
    run.say(f"exported: {', '.join(map(str, sorted(folder.iterdir())))}")


class Processes:
    """The processes that `python -m gluon_syncbn.launch` has started, or this one alone."""

    def __init__(self):
        self.rank, self.size, self._store, self._hvd, self._kvstore = 0, 1, None, None, "device"
        # What `Trainer.step` divides by: the devices' losses add up to the mean already.
        self.step_size = 1
        if int(os.environ.get("GLUON_SYNCBN_SIZE", 1)) == 1:
            return
        if "HOROVOD_RANK" in os.environ:
            import horovod.mxnet as hvd

            hvd.init()
            self._hvd, self._store = hvd, sbn.distributed.HorovodReducer(hvd)
        else:
            self._kvstore = mx.kv.create("dist_sync")
            self._store = sbn.distributed.KVStoreReducer(self._kvstore)
        self.rank, self.size = self._store.rank, self._store.size
        self.step_size = 1 / self.size if self._hvd else 1  # Horovod averages, in place of adding.
        sbn.set_default_group(sbn.SyncGroup(store=self._store))  # (4) and of all processes

    def trainer(self, parameters, *optimizer):
        if self._hvd:
            return self._hvd.DistributedTrainer(parameters, *optimizer)
        return gluon.Trainer(parameters, *optimizer, self._kvstore, update_on_kvstore=False)

    def sum(self, key, numbers):
        """The sums over all processes, which all call it with the same `key`."""
        numbers = np.asarray(numbers, np.float64)
        return self._store.all_gather(key, numbers).sum(axis=0) if self._store else numbers

    def shares(self, options, step):
        """The images that this process takes, for each pass from a step on."""
        each, images = options.batch // self.size, options.batch * options.accumulate
        first = step * images + self.rank * each
        starts = range(first, options.steps * images, options.batch)
        return [range(start, start + each) for start in starts]


def find_contexts(options, processes):
    """The devices of this process. With the launcher each process has one."""
    gpus = mx.context.num_gpus()
    default = f"gpu:{','.join(map(str, range(gpus)))}" if gpus else "cpu:2"
    if processes.size > 1:
        default = f"gpu:{os.environ['GLUON_SYNCBN_LOCAL_RANK']}" if gpus else "cpu:1"
    kind, _, which = (options.devices or default).partition(":")
    try:
        ids = list(range(int(which)) if kind == "cpu" else map(int, which.split(",")))
        contexts = [mx.Context(kind, i) for i in ids]
    except (ValueError, KeyError):
        contexts = []
    if not contexts or kind == "gpu" and max(ids) >= gpus:
        found = f"--devices is {options.devices}, and MXNet finds {gpus} GPUs"
        raise InputError(f"{found}: give cpu:2, or gpu:0,1")
    if options.dtype == "float16" and kind == "cpu":
        raise InputError("--dtype float16 needs GPUs: on the CPU MXNet's convolutions lack it")
    devices = processes.size * len(contexts)
    if options.batch % devices:
        raise InputError(
            f"--batch is {options.batch}, which {devices} devices cannot share evenly: give a "
            f"multiple of {devices}, or other --devices"
        )
    return contexts


def parse(argv=None):
    """The options. A resumed run takes those that are not given from its checkpoint."""
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
    add("--root", help="folder of the data (gluoncv's usual one)")
    add("--classes", type=count, help="for --dataset folder without classes.txt")
    add("--size", type=count, help="of the square crops (digits 64, others 480)")
    add("--batch", type=count, default=8, help="images over all devices (%(default)s)")
    text = (
        "passes of --batch images whose gradients are added for one step (1). The statistics are "
        "those of each pass: it saves memory, but is no substitute for a larger --batch"
    )
    add("--accumulate", type=count, default=1, metavar="N", help=text)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=count, help="(1500)")
    length.add_argument("--epochs", type=count, help="the same in passes over the data")
    add("--optimizer", choices=("adam", "sgd"), help="(adam for digits, else sgd)")
    add("--lr", type=float, help="(5e-3 for Adam; 0.01 * images / 16 for SGD)")
    add("--wd", type=float, help="weight decay (0 for Adam, 1e-4 for SGD)")
    add("--warmup", type=int, default=50, help="steps of rising rate (%(default)s)")
    add("--dtype", choices=("float32", "float16"), default="float32", help="float16: AMP")
    text = "sync: gluon_syncbn's layers; local: each device for itself, to compare"
    add("--norm", choices=("sync", "local"), default="sync", help=text)
    add("--devices", help="cpu:2, gpu:0,1 (all GPUs, or cpu:2); one a process with the launcher")
    add("--threads", type=count, default=2, help="that read images (%(default)s)")
    add("--seed", type=int, default=1, help="(%(default)s)")
    add("--validate-every", type=count, default=250, metavar="STEPS", help="(%(default)s)")
    add("--log-every", type=count, default=25, metavar="STEPS", help="(%(default)s)")
    add("--val-images", type=count, help="at most (all)")
    add("--no-export", dest="export", action="store_false", help="end without exporting")
    add("--output", help="a new folder (the next runs/segmentation-N)")
    add("--resume", nargs="?", const="", metavar="RUN", help="go on with a run (the newest)")
    options = parser.parse_args(argv)
    if options.resume is not None:
        saved, _ = checkpoint.load(checkpoint.find(options.resume))
        parser.set_defaults(**{**saved["options"], "resume": None, "output": None})
        return parser.parse_args(argv)
    options.size = options.size or (64 if options.dataset == "digits" else 480)
    if options.size % STRIDE:
        raise InputError(f"--size is {options.size}: give a multiple of {STRIDE}")
    if options.epochs is None and options.steps is None:
        options.steps = 1500
    adam = (options.optimizer or ("adam" if options.model == "digits" else "sgd")) == "adam"
    options.optimizer = "adam" if adam else "sgd"
    if options.lr is None:
        options.lr = 5e-3 if adam else 0.01 * options.batch * options.accumulate / 16
    if options.wd is None:
        options.wd = 0.0 if adam else 1e-4
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as problem:
        sys.exit(f"{Path(sys.argv[0]).name}: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
