"""What a training needs besides its loop: options, devices, processes, the schedule, the export."""

import argparse
import contextlib
import math
import os
import sys
from pathlib import Path

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from gluoncv.utils import LRScheduler, LRSequential
from mxnet import gluon
from mxnet.contrib import amp

from common import runs
from common.files import InputError, count

STEPS_IN_FLIGHT = 2  # how far the devices may lag behind Python


def add_options(parser, kind, sizes):
    """Add the options that every example has. `sizes`: the help of --size."""
    add = parser.add_argument
    add("--root", help="folder of the data (gluoncv's usual one)")
    add("--size", type=count, help=sizes)
    add("--batch", type=count, help="images over all devices (%(default)s)")
    text = (
        "passes of --batch images whose gradients are added for one step (1). The statistics are "
        "those of each pass: it saves memory, but is no substitute for a larger --batch"
    )
    add("--accumulate", type=count, default=1, metavar="N", help=text)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=count, help="(%(default)s)")
    length.add_argument("--epochs", type=count, help="the same in passes over the data")
    add("--optimizer", choices=("adam", "sgd"), help="(adam for digits, else sgd)")
    add("--lr", type=float, help="(5e-3 for Adam; 0.01 * images / 16 for SGD)")
    add("--wd", type=float, help="weight decay (0 for Adam, 1e-4 for SGD)")
    add("--warmup", type=int, default=50, help="steps of rising rate (%(default)s)")
    add("--dtype", choices=("float32", "float16"), default="float32", help="float16: AMP")
    text = "sync: gluon_syncbn's layers; local: each device for itself, to compare"
    add("--norm", choices=("sync", "local"), default="sync", help=text)
    add("--devices", help="such as gpu:0,1 or cpu:1 (all GPUs; with the launcher one for each)")
    add("--threads", type=count, default=2, help="that read images (%(default)s)")
    add("--seed", type=int, default=1, help="(%(default)s)")
    add("--validate-every", type=count, metavar="STEPS", help="(%(default)s)")
    add("--log-every", type=count, default=25, metavar="STEPS", help="(%(default)s)")
    add("--val-images", type=count, help="at most (all)")
    add("--no-export", dest="export", action="store_false", help="end without exporting")
    add("--output", help=f"a new folder (the next runs/{kind.name}-N)")
    add("--resume", nargs="?", const="", metavar="RUN", help="go on with a run (the newest)")


def parse(parser, argv, kind):
    """The options. A resumed run takes those that are not given from its checkpoint."""
    options = parser.parse_args(argv)
    if options.resume is not None:
        path = kind.find(options.resume)
        saved, _ = kind.load(path)
        parser.set_defaults(**{**saved["options"], "resume": None, "output": None})
        options = parser.parse_args(argv)
        folder = path.absolute().parent.parent
        done = saved["step"] >= options.steps and saved["validated"] == saved["step"]
        # The last of its files.
        if done and ((folder / "export" / "folded-symbol.json").exists() or not options.export):
            print(f"{folder} is finished: leave --resume out, or give more --steps")
            sys.exit()
        return options
    if options.epochs:
        options.steps = None
    if options.optimizer is None:
        options.optimizer = "adam" if options.dataset.startswith("digits") else "sgd"
    adam = options.optimizer == "adam"
    if options.lr is None:
        options.lr = 5e-3 if adam else 0.01 * options.batch * options.accumulate / 16
    if options.wd is None:
        options.wd = 0.0 if adam else 1e-4
    return options


def run_main(main):
    """Run a program. An InputError ends it with one line and no traceback."""
    try:
        sys.exit(main())
    except InputError as problem:
        sys.exit(f"{Path(sys.argv[0]).name}: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)


def predict_parser(description, measure):
    """A parser with the options that every predict.py has."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("images", nargs="?", type=Path, help="a folder of .jpg and .png files")
    add("--model", required=True, help="a run, or a file in its checkpoints or export folder")
    add("--output", type=Path, default=Path("predictions"), help="folder to write (%(default)s)")
    add(
        "--evaluate",
        action="store_true",
        help=f"print the {measure} on the run's validation images",
    )
    add("--root", help="folder of the run's data set, where it was moved")
    return parser


def set_steps(options, images):
    """Turn --epochs into --steps."""
    if options.steps is None:
        options.steps = math.ceil(options.epochs * images / (options.batch * options.accumulate))


def scaled(losses, trainer):
    """AMP's scaling of the loss, if the trainer has it."""
    has_it = hasattr(trainer, "_amp_loss_scaler")
    return amp.scale_loss(losses, trainer) if has_it else contextlib.nullcontext(losses)


def settings_of(options):
    """The settings of the optimizer. The rate rises linearly, then decays to 1% by a polynomial."""
    rise, low = min(options.warmup, options.steps // 2), options.lr / 100
    rising = [LRScheduler("linear", options.lr / rise, options.lr, rise)] if rise > 1 else []
    decay = LRScheduler("poly", options.lr, low, max(2, options.steps - rise), power=0.9)
    schedule = LRSequential([*rising, decay])
    schedule.base_lr = options.lr
    momentum = {"momentum": 0.9} if options.optimizer == "sgd" else {}
    return {"learning_rate": options.lr, "lr_scheduler": schedule, "wd": options.wd, **momentum}


def start_run(kind, options, names, net, processes, contexts):
    """(trainer, run)."""
    trainer = processes.trainer(net.collect_params(), options)
    run = runs.Run(kind, options, names, net, trainer, writes=processes.rank == 0)
    where = f"{processes.size} x ({', '.join(map(str, contexts))})"
    run.say(f"steps {run.step} to {options.steps} on {where}, into {run.folder}")
    return trainer, run


def steps(run, processes, batches, count, validate, in_flight):
    """For each step, its passes and the divisor of their losses, which is the sum of `count` over
    all processes. The caller makes the step and appends its losses to `in_flight`. Validates when
    that is due, and ends early when interrupted."""
    options, interrupt = argparse.Namespace(**run.options), runs.Interrupt()
    while True:
        if run.due(options.validate_every):
            note_losses(run, processes, in_flight, 0)
            validate()
        if run.step >= options.steps:
            break
        passes = [next(batches) for _ in range(options.accumulate)]
        own = sum(count(each) for each in passes)
        counted, stop = processes.sum("step", [own, interrupt.requested])
        if stop:
            break
        yield passes, max(counted, 1)
        run.step += 1
        note_losses(run, processes, in_flight, STEPS_IN_FLIGHT)
    note_losses(run, processes, in_flight, 0)


def note_losses(run, processes, in_flight, allowed):
    """Wait for the losses of all steps but the last `allowed` ones."""
    while len(in_flight) > allowed:
        own = sum(float(part.asscalar()) for part in in_flight.pop(0))
        run.add_loss(run.step - len(in_flight), *processes.sum("loss", [own]))


def export_onnx(net, folder, shape, run):
    """Write the net with normalization folded into convolutions, also as ONNX where MXNet can."""
    folded, onnx = folder / "folded", folder / "model.onnx"
    try:
        sbn.export(net, folded, fold=True, onnx=onnx, input_shape=shape)
    except (ImportError, ValueError, sbn.ExportError) as error:
        run.say(f"no ONNX file: {error}")
        sbn.export(net, folded, fold=True, input_shape=shape)
    run.say(f"exported: {', '.join(map(str, sorted(folder.iterdir())))}")


class Processes:
    """The processes that `python -m gluon_syncbn.launch` has started, or this one alone."""

    def __init__(self):
        self.rank, self.size, self.store, self._hvd, self._kvstore = 0, 1, None, None, "device"
        # What `Trainer.step` divides by: the devices' losses add up to the mean already.
        self.step_size = 1
        if int(os.environ.get("GLUON_SYNCBN_SIZE", 1)) == 1:
            return
        if "HOROVOD_RANK" in os.environ:
            import horovod.mxnet as hvd

            hvd.init()
            self._hvd, self.store = hvd, sbn.distributed.HorovodReducer(hvd)
        else:
            self._kvstore = mx.kv.create("dist_sync")
            self.store = sbn.distributed.KVStoreReducer(self._kvstore)
        self.rank, self.size = self.store.rank, self.store.size
        self.step_size = 1 / self.size if self._hvd else 1  # Horovod averages instead of adding.

    def trainer(self, parameters, options):
        if options.accumulate > 1:
            parameters.setattr("grad_req", "add")
        arguments = parameters, options.optimizer, settings_of(options)
        if self._hvd:
            trainer = self._hvd.DistributedTrainer(*arguments)
        else:
            trainer = gluon.Trainer(*arguments, self._kvstore, update_on_kvstore=False)
        if options.dtype != "float32":
            amp.init_trainer(trainer)
        return trainer

    def gather(self, key, numbers):
        """The numbers of all processes, (processes, ...). All call it with the same `key`."""
        numbers = np.asarray(numbers, np.float64)
        if not self.store:
            return numbers[None]
        return self.store.all_gather(key, numbers.ravel()).reshape(-1, *numbers.shape)

    def sum(self, key, numbers):
        return self.gather(key, numbers).sum(axis=0)

    def batches(self, data, options, step, **settings):
        """The batches of this process, for each pass from a step on."""
        each, images = options.batch // self.size, options.batch * options.accumulate
        first = step * images + self.rank * each
        starts = range(first, options.steps * images, options.batch)
        shares = [range(start, start + each) for start in starts]
        settings.update(num_workers=options.threads, thread_pool=True)
        return iter(gluon.data.DataLoader(data, batch_sampler=shares, **settings))


def find_contexts(options, processes, cpu_contexts):
    """The devices of this process: all GPUs or `cpu_contexts`; with the launcher it has one."""
    gpus = mx.context.num_gpus()
    default = f"gpu:{','.join(map(str, range(gpus)))}" if gpus else f"cpu:{cpu_contexts}"
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
        raise InputError(f"{found}: give cpu:{cpu_contexts}, or gpu:0,1")
    most = cpu_contexts if processes.size == 1 else 1
    if kind == "cpu" and len(contexts) > most:
        raise InputError(
            f"--devices is {options.devices}, but {most} CPU contexts in a process are the most: "
            "start processes with python -m gluon_syncbn.launch -n"
        )
    if options.dtype == "float16" and kind == "cpu":
        raise InputError("--dtype float16 needs GPUs: on the CPU MXNet's convolutions lack it")
    devices = processes.size * len(contexts)
    if options.batch % devices:
        raise InputError(
            f"--batch is {options.batch}, which {devices} devices cannot share evenly: give a "
            f"multiple of {devices}, or other --devices"
        )
    return contexts
