"""Train a segmentation net with synchronized batch normalization; see README.md.

The lines marked (1) to (5) are all that synchronization asks for.
"""

import argparse
import contextlib
import csv
import io
import json
import math
import os
import sys
import time
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
from data import DATASETS, IGNORED, InputError, open_data
from model import MODELS, STRIDE, get_model, initialize
from predict import Predictor, evaluate, net_scores

STEPS_IN_FLIGHT = 2  # how far the devices may lag behind Python
PICTURES = 8


def main(argv=None):
    options = parse(argv)
    processes = Processes()
    contexts = find_contexts(options, processes)
    mx.random.seed(options.seed)
    np.random.seed(options.seed)
    if options.dtype != "float32":
        amp.init(options.dtype)

    train_data, val_data = open_data(options)
    if options.steps is None:
        options.steps = options.epochs * math.ceil(len(train_data) / options.batch)
    net, criterion = get_model(options, len(train_data.names))
    if options.norm == "sync":
        sbn.convert_sync_batchnorm(net)  # (2) the statistics are those of all devices
    initialize(net, contexts, options.pretrained)
    net.hybridize(static_alloc=True)
    criterion.hybridize(static_alloc=True)
    settings = {"learning_rate": options.lr, "lr_scheduler": schedule(options), "wd": options.wd}
    if options.optimizer == "sgd":
        settings["momentum"] = 0.9
    trainer = processes.trainer(net.collect_params(), options.optimizer, settings)
    if options.dtype != "float32":
        amp.init_trainer(trainer)
    if options.accumulate > 1:
        net.collect_params().setattr("grad_req", "add")

    run = Run(options, processes, contexts, net, trainer, train_data, val_data)
    loader = gluon.data.DataLoader(
        train_data,
        batch_sampler=run.batches(),
        num_workers=options.threads,
        thread_pool=True,
    )
    batches, in_flight = iter(loader), []
    bar = tqdm(
        initial=run.step, total=options.steps, unit=" steps", disable=processes.rank > 0 or None
    )
    interrupt = checkpoint.Interrupt()
    while True:
        if run.due() or run.step == options.steps:
            run.know(in_flight, 0)
            run.validate()
        if run.step == options.steps:
            break
        passes = [next(batches) for _ in range(options.accumulate)]
        labelled = sum(int((labels != IGNORED).sum().asscalar()) for _, labels in passes)
        labelled, stop = processes.sum("step", [labelled, interrupt.requested])
        if stop:
            break
        known = []
        for images, labels in passes:
            xs = gluon.utils.split_and_load(images, contexts)
            ys = gluon.utils.split_and_load(labels, contexts)
            with autograd.record():
                # (3) call the net for every device before waiting for any result
                outputs = [as_list(net(x)) for x in xs]
                losses = [criterion(y, *out) / max(labelled, 1) for out, y in zip(outputs, ys)]
                with scaled(losses, trainer) as to_differentiate:
                    autograd.backward(to_differentiate)
            known += losses
        trainer.step(processes.step_size)
        if options.accumulate > 1:
            net.collect_params().zero_grad()
        run.step += 1
        in_flight.append(known)
        run.know(in_flight, STEPS_IN_FLIGHT, bar)
        bar.update()
    run.know(in_flight, 0)
    bar.close()
    interrupt.restore()
    return run.finish(stopped=run.step < options.steps)


def as_list(outputs):
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


def scaled(losses, trainer):
    """AMP's scaling of the loss, where the trainer has it."""
    if hasattr(trainer, "_amp_loss_scaler"):
        return amp.scale_loss(losses, trainer)
    return contextlib.nullcontext(losses)


def schedule(options):
    """A linear rise, then polynomial decay to 1%."""
    rise = min(options.warmup, options.steps // 2)
    rising = [LRScheduler("linear", options.lr / rise, options.lr, rise)] if rise > 1 else []
    decay = LRScheduler(
        "poly", options.lr, options.lr / 100, max(2, options.steps - rise), power=0.9
    )
    sequence = LRSequential([*rising, decay])
    sequence.base_lr = options.lr
    return sequence


class Processes:
    """The processes that `python -m gluon_syncbn.launch` has started, or this one alone."""

    def __init__(self):
        self.rank, self.size, self._store, self._hvd = 0, 1, None, None
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
        sbn.set_default_group(sbn.SyncGroup(store=self._store))  # (4) and of all processes

    @property
    def step_size(self):
        """For `Trainer.step`, which divides by it. Horovod averages gradients; they are parts of
        one sum here."""
        return 1 / self.size if self._hvd else 1

    def trainer(self, parameters, optimizer, settings):
        if self._hvd:
            return self._hvd.DistributedTrainer(parameters, optimizer, settings)
        store = self._kvstore if self.size > 1 else "device"
        return gluon.Trainer(
            parameters, optimizer, settings, kvstore=store, update_on_kvstore=False
        )

    def sum(self, key, numbers):
        """The sums over all processes, which all call it with the same `key`."""
        numbers = np.asarray(numbers, np.float64)
        return self._store.all_gather(key, numbers).sum(axis=0) if self._store else numbers


class Run:
    """Where a run stands, and what it writes; only the first of several processes does."""

    def __init__(self, options, processes, contexts, net, trainer, train_data, val_data):
        self._options, self._processes, self._net = options, processes, net
        self._trainer, self._val_data, self.names = trainer, val_data, train_data.names
        # Unsynchronized layers keep other running statistics on each device.
        self._contexts = contexts if options.norm == "sync" else contexts[:1]
        self._state = {"step": 0, "validated": 0, "seconds": 0.0, "losses": [], "rows": []}
        self._state["best"] = {"mean_iou": -1.0, "step": 0}
        if options.resume is not None:
            path = checkpoint.find_checkpoint(options.resume)
            self._state, arrays = checkpoint.load(path)
            checkpoint.restore_net(path, arrays, net)
            checkpoint.restore_trainer(self._state, arrays, net, trainer)
            mx.random.seed(options.seed + self._state["step"])  # for dropout
            self.folder = path.parent.parent
        elif self._first:
            self.folder = checkpoint.new_run(options.output)
        if self._first:
            self._state["options"] = vars(options)
            config = {**vars(options), "names": list(self.names)}
            self._write("config.json", json.dumps(config, indent=2))
            self._write_rows()
            across = f" in {processes.size} processes" if processes.size > 1 else ""
            self._say(
                f"{options.model} on {options.dataset}, --norm {options.norm} on "
                f"{', '.join(map(str, contexts))}{across}, steps {self.step} to {options.steps} "
                f"of {options.batch * options.accumulate} images, into {self.folder}"
            )
        self._started = time.perf_counter() - self._state["seconds"]

    @property
    def _first(self):
        return self._processes.rank == 0

    @property
    def step(self):
        return self._state["step"]

    @step.setter
    def step(self, value):
        self._state["step"] = value

    def due(self):
        step = self.step
        return step % self._options.validate_every == 0 and self._state["validated"] < step

    def batches(self):
        """The indices of the images that this process takes, pass by pass."""
        each = self._options.batch // self._processes.size
        first = self._processes.rank * each
        starts = range(
            self.step * self._options.accumulate, self._options.steps * self._options.accumulate
        )
        return [
            range(i * self._options.batch + first, i * self._options.batch + first + each)
            for i in starts
        ]

    def know(self, in_flight, allowed, bar=None):
        """Wait for the losses of all steps but the last `allowed` ones, and note them."""
        while len(in_flight) > allowed:
            [loss] = self._processes.sum(
                "loss", [sum(float(x.asscalar()) for x in in_flight.pop(0))]
            )
            number = self.step - len(in_flight)
            if not math.isfinite(loss):
                raise InputError(
                    f"the loss of step {number} is {loss}: start again with a lower --lr than "
                    f"{self._options.lr:g}; the last checkpoint is from before"
                )
            self._state["losses"].append(loss)
            if number % self._options.log_every == 0 or number == self._options.steps:
                losses, self._state["losses"] = self._state["losses"], []
                self._add_row(number, loss=sum(losses) / len(losses))
                if bar is not None:
                    bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)

    def validate(self):
        """Evaluate the net, and save all."""
        if self._state["validated"] == self.step:
            return
        options, first, size = self._options, self._processes.rank, self._processes.size
        self._stop_clock()
        predictor = Predictor(net_scores(self._net, self._contexts), options.size, options.batch)
        own = range(first, len(self._val_data), size)
        metric = evaluate(predictor, self._val_data, own)
        metric.add_up(lambda totals: self._processes.sum("metric", totals))
        accuracy, score = metric.get()
        self._state["validated"] = self.step
        better = score > self._state["best"]["mean_iou"]
        if better:
            self._state["best"] = {"mean_iou": score, "step": self.step}
        self._add_row(self.step, pixel_accuracy=accuracy, mean_iou=score)
        self._say(
            f"step {self.step}: pixel accuracy {accuracy:.4f}, mean IoU {score:.4f}"
            + (" (the best so far)" if better else "")
        )
        self.save(better)
        if self._first:
            chosen = np.unique(np.linspace(0, len(self._val_data) - 1, PICTURES).astype(int))
            samples = [self._val_data[int(i)] for i in chosen]
            found = predictor([image for image, _ in samples])
            plots.plot_predictions(
                samples, found, options.dataset, self.names, self.folder / "predictions.png"
            )
        self._started = time.perf_counter() - self._state["seconds"]

    def save(self, better=False):
        """Write the checkpoints and the curves."""
        if not self._first:
            return
        self._stop_clock()
        # The best first: the last one says which step that is.
        for name in ("best", "last") if better else ("last",):
            path = self.folder / "checkpoints" / f"{name}.npz"
            checkpoint.save(path, self._state, self._net, self._trainer)
        plots.plot_curves(self._state["rows"], self.folder / "curves.png")

    def finish(self, stopped):
        """Save, or export the best net; return the exit status."""
        step, options = self.step, self._options
        if stopped:
            self.save()
            self._say(
                f"stopped after step {step} of {options.steps}, all is saved; to continue: "
                f"{sys.argv[0]} --resume {getattr(self, 'folder', '')}"
            )
            return 130
        seconds, best = self._state["seconds"], self._state["best"]
        images = step * options.batch * options.accumulate
        self._say(
            f"trained {step} steps in {seconds:.0f} s, {images / max(seconds, 1e-9):.0f} images/s; "
            f"best mean IoU {best['mean_iou']:.4f} at step {best['step']}\n"
            f"pictures     {self.folder}/curves.png, {self.folder}/predictions.png"
            if self._first
            else ""
        )
        if self._first and options.export:
            path = self.folder / "checkpoints" / "best.npz"
            checkpoint.restore_net(path, checkpoint.load(path)[1], self._net)
            self._export(self.folder / "export" / "model")
        return 0

    def _export(self, path):
        shape, onnx = (1, 3, self._options.size, self._options.size), path.with_suffix(".onnx")
        path.parent.mkdir(exist_ok=True)
        self._net.hybridize(static_alloc=False)
        sbn.export(self._net, path, input_shape=shape)  # (5) for stock MXNet
        self._say(f"exported     {path}-symbol.json, {path}-0000.params")
        try:
            sbn.export(self._net, path.with_name("folded"), fold=True, onnx=onnx, input_shape=shape)
            self._say(f"exported     {path.with_name('folded')}-symbol.json, {onnx}")
        except (ImportError, sbn.ExportError) as error:
            self._say(f"no ONNX file: {error}")

    def _stop_clock(self):
        mx.nd.waitall()
        self._state["seconds"] = time.perf_counter() - self._started

    def _add_row(self, step, **values):
        rate = self._trainer.learning_rate
        seconds = time.perf_counter() - self._started
        row = {"step": step, "seconds": round(seconds, 2), "learning_rate": rate, **values}
        self._state["rows"].append(row)
        if self._first:
            self._write_rows()

    def _write_rows(self):
        names = ["step", "seconds", "learning_rate", "loss", "pixel_accuracy", "mean_iou"]
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(self._state["rows"])
        self._write("metrics.csv", text.getvalue())

    def _write(self, name, text):
        with checkpoint.replacing(self.folder / name) as file:
            file.write(text.encode())

    def _say(self, text):
        if self._first:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


def find_contexts(options, processes):
    """The devices of this process. Each process of a launcher has one."""
    gpus = mx.context.num_gpus()
    if processes.size > 1:
        contexts = [mx.gpu(int(os.environ["GLUON_SYNCBN_LOCAL_RANK"])) if gpus else mx.cpu()]
    elif options.devices:
        kind, _, which = options.devices.partition(":")
        if kind == "cpu":
            contexts = [mx.cpu(i) for i in range(int(which or 1))]
        else:
            contexts = [mx.gpu(int(i)) for i in which.split(",")]
    else:
        contexts = [mx.gpu(i) for i in range(gpus)] or [mx.cpu(0), mx.cpu(1)]
    kinds = contexts[0].device_type
    if kinds == "gpu" and max(c.device_id for c in contexts) >= gpus:
        raise InputError(
            f"--devices {options.devices}: MXNet finds {gpus} GPUs; use cpu:2, or others"
        )
    devices = processes.size * len(contexts)
    if options.batch % devices:
        raise InputError(
            f"--batch is {options.batch}, which {devices} devices cannot share evenly: give a "
            f"multiple of {devices}, or other --devices"
        )
    if options.dtype == "float16" and kinds == "cpu":
        raise InputError("--dtype float16 needs a GPU: MXNet's convolutions on the CPU lack it")
    return contexts


def parse(argv=None):
    """The options. A resumed run takes those that are not given from its checkpoint."""

    def whole(text):
        if int(text) < 1:
            raise ValueError
        return int(text)

    whole.__name__ = "whole number from 1"
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Ctrl-C saves; a second one ends at once."
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="digits", help="the small net, or one of gluoncv")
    add("--backbone", default="resnet50", help="of gluoncv's nets (%(default)s)")
    add("--pretrained", action="store_true", help="backbone with ImageNet weights (a download)")
    text = "weight of auxiliary heads, 0: none (%(default)s)"
    add("--aux-weight", type=float, default=0.2, help=text)
    add("--dataset", choices=DATASETS, default="digits", help="(%(default)s)")
    add("--root", help="folder of the data (gluoncv's usual one)")
    add("--classes", type=whole, help="for --dataset folder without classes.txt")
    add("--size", type=whole, help="of the square crops (digits 64, others 480)")
    add("--base-size", type=whole, help="longest side before scaling by 0.5 to 2 (size * 520/480)")
    add("--batch", type=whole, default=8, help="images over all devices (%(default)s)")
    text = (
        "passes of --batch images whose gradients are added for one step (1). The statistics are "
        "those of each pass: it saves memory, but is no substitute for a larger --batch"
    )
    add("--accumulate", type=whole, default=1, metavar="N", help=text)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=whole, help="(1500)")
    length.add_argument("--epochs", type=whole, help="the same in passes over the data")
    add("--optimizer", choices=("adam", "sgd"), help="(adam for digits, else sgd)")
    add("--lr", type=float, help="(5e-3 for Adam; 0.01 * images / 16 for SGD)")
    add("--wd", type=float, help="weight decay (0 for Adam, 1e-4 for SGD)")
    add("--warmup", type=int, default=50, help="steps of rising rate (%(default)s)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="AMP")
    text = "sync: gluon_syncbn's layers; local: each device for itself, to compare"
    add("--norm", choices=("sync", "local"), default="sync", help=text)
    add("--devices", help="cpu:2, gpu:0,1 (all GPUs, or cpu:2); one a process with the launcher")
    add("--threads", type=whole, default=2, help="that read images (%(default)s)")
    add("--seed", type=int, default=1, help="(%(default)s)")
    add("--validate-every", type=whole, default=250, metavar="STEPS", help="(%(default)s)")
    add("--log-every", type=whole, default=25, metavar="STEPS", help="(%(default)s)")
    add("--val-images", type=whole, help="at most (all)")
    add("--no-export", dest="export", action="store_false", help="end without exporting")
    add("--output", help="a new folder (the next runs/segmentation-N)")
    add("--resume", nargs="?", const="", metavar="RUN", help="go on with a run (the newest)")
    options = parser.parse_args(argv)
    if options.resume is not None:
        saved, _ = checkpoint.load(checkpoint.find_checkpoint(options.resume))
        parser.set_defaults(**{**saved["options"], "output": None, "resume": None})
        options = parser.parse_args(argv)
    own = options.model == "digits"
    options.size = options.size or (64 if options.dataset == "digits" else 480)
    if options.size % STRIDE:
        raise InputError(f"--size is {options.size}: give a multiple of {STRIDE}")
    if options.steps is None and options.epochs is None:
        options.steps = 1500
    options.optimizer = options.optimizer or ("adam" if own else "sgd")
    adam = options.optimizer == "adam"
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
