"""The command line: arguments, their defaults, and how they go with those of a run to resume.

Imports no MXNet: what is decided here must be in the environment before MXNet starts.
"""

import argparse
import contextlib
import math
import os
import re
from pathlib import Path

import checkpoint

# These decide the parameters that come out, or by which scores the best are chosen, so a resumed
# run must not change them; so do the kind and number of devices, which are known later.
DECISIVE = (
    "norm batch steps epochs lr warmup seed data size classes brightness background_weight "
    "val_images"
).split()
RUNS = Path("runs")
CONFIG = "config.json"  # A folder that has it holds a run.


class UsageError(Exception):
    """What the user gave cannot work; the text says what came, what was expected, what to do."""


def _number(kind, least, what, most=math.inf):
    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        # A comparison with NaN is false.
        if not (least <= value <= most and value < math.inf):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return convert


COUNT = _number(int, 1, "a whole number from 1 to 2147483647", 2**31 - 1)
WHOLE = _number(int, 0, "a whole number of 0 or more")
# Of more, MXNet says itself that it is out of range, in its own words.
POSITIVE = _number(float, 1e-12, "a number from 1e-12 to 1e30", 1e30)
FRACTION = _number(float, 0, "a number of 0 or more")


def _parser():
    parser = argparse.ArgumentParser(
        description="Train a segmentation net with synchronized batch normalization.",
        epilog="Ctrl-C saves the run; a second one ends it at once.",
    )
    add = parser.add_argument
    add(
        "--norm",
        choices=("sync", "local", "builtin"),
        default="sync",
        help=(
            "gluon_syncbn.SyncBatchNorm, gluon.nn.BatchNorm or gluon.contrib.nn.SyncBatchNorm "
            "(%(default)s)"
        ),
    )
    add(
        "--devices",
        metavar="LIST",
        help=(
            "cpu:N for N CPU contexts, gpu:0,1 for these GPUs, gpu for all (all GPUs; cpu:2, or a "
            "context for each worker, where there is none)"
        ),
    )
    add(
        "--workers",
        type=COUNT,
        metavar="N",
        help="processes that share the devices evenly (2 without GPUs and --devices; else 1)",
    )
    add("--batch", type=COUNT, default=8, help="images of a step, over all devices (%(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=COUNT, metavar="N", help="length of the training (1500)")
    length.add_argument(
        "--epochs", type=COUNT, metavar="N", help="the same in passes over the data"
    )
    add("--lr", type=POSITIVE, default=5e-3, help="learning rate of Adam (%(default)s)")
    add("--warmup", type=WHOLE, default=50, metavar="N", help="steps of rising rate (%(default)s)")
    add("--seed", type=WHOLE, default=1, help="of parameters and training images (%(default)s)")
    add(
        "--size",
        type=COUNT,
        help="side of the square images in pixels, a multiple of 8 (64; 256 with --data)",
    )
    add("--brightness", action="store_true", help="vary the brightness of each image")
    add(
        "--background-weight",
        type=FRACTION,
        default=1.0,
        metavar="W",
        help="weight of class 0 in the loss (%(default)s)",
    )
    add(
        "--data",
        metavar="FOLDER",
        help="your images in Pascal VOC layout, in place of digits on photos",
    )
    add(
        "--classes",
        type=COUNT,
        metavar="N",
        help=(
            "number of classes in --data, background included (lines of FOLDER/classes.txt, or "
            "as the masks have them)"
        ),
    )
    add("--validate-every", type=COUNT, default=250, metavar="N", help="steps (%(default)s)")
    add("--log-every", type=COUNT, default=25, metavar="N", help="steps per CSV row (%(default)s)")
    add("--val-images", type=COUNT, default=200, metavar="N", help="at most (%(default)s)")
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write (the next runs/segmentation-N)",
    )
    add("--no-export", action="store_true", help="end without exporting the best checkpoint")
    add("--overwrite", action="store_true", help="replace the run that --output holds")
    add(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="continue a run: its folder or checkpoint (--output, or else the newest in runs)",
    )
    return parser


def parse(argv=None, started=None):
    """The options as a namespace.

    `options.checkpoint` is the Checkpoint to continue from, or None. A resumed run takes the
    arguments that are not given from its checkpoint. `started`: of how many workers this process is
    one. `options.workers` stays None where it depends on whether there are GPUs. Where
    `options.numbered`, `options.output` is the next folder as it looks now, for `claimed`.
    """
    parser = _parser()
    defaults = vars(parser.parse_args([]))
    given = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(defaults))))
    given = {name: value for name, value in given.items() if value is not None}
    if "data" in given:
        given["data"] = str(Path(given["data"]).absolute())
    if "devices" in given:
        parse_devices(given["devices"])
    resumed = _checkpoint_to_resume(given) if "resume" in given else None
    if resumed:
        _check_same(given, resumed)
        defaults.update(resumed.config["arguments"], output=resumed.folder, overwrite=False)
    options = argparse.Namespace(**{**defaults, **given})
    options.checkpoint = resumed
    options.numbered = options.output is None
    if options.numbered:
        options.output = _next_run()
    if not resumed:
        if options.size is None:
            options.size = 256 if options.data else 64
        if options.steps is None and options.epochs is None:
            options.steps = 1500
    if options.size % 8:
        raise UsageError(
            f"--size is {options.size}, but the net halves images three times: give a multiple of "
            f"8, such as {math.ceil(options.size / 8) * 8}"
        )
    if options.classes is not None and not options.data:
        raise UsageError("--classes goes with --data: digits on photos always have 11 classes")
    if options.classes is not None and not 2 <= options.classes <= 255:
        raise UsageError(f"--classes is {options.classes}: give 2 to 255, background included")
    try:
        if options.output.exists() and not options.output.is_dir():
            raise UsageError(f"--output {options.output} is a file: name a folder")
        in_place = resumed and same_folder(resumed.folder, options.output)
        if (options.output / CONFIG).exists() and not (in_place or options.overwrite):
            raise taken(options.output)
    except OSError as error:  # Of a name that is too long, say.
        raise cannot_write(options.output, error) from None
    if started:
        if given.get("workers", started) != started:
            raise UsageError(
                f"--workers is {options.workers}, but the launcher started {started}: leave "
                "--workers out"
            )
        options.workers = started
    elif options.workers is None and (options.devices or options.norm == "builtin"):
        options.workers = 1
    if options.workers:
        check_workers(options)
    return options


def taken(output):
    """The UsageError for a folder that may not be written to."""
    return UsageError(
        f"--output {output} holds a run already: continue it with --resume, name another folder, "
        "or replace it with --overwrite"
    )


def cannot_write(output, error):
    """The UsageError for an OSError where a run writes."""
    return UsageError(
        f"--output {output} cannot be written ({error}): make room, or name another folder; a run "
        "that has begun goes on from its last checkpoint with --resume"
    )


@contextlib.contextmanager
def claimed(options):
    """Make the folder of a run without --output, so that no other takes it, which may have found
    the same one to be the next. If nothing was written it goes again."""
    # Of several workers the first alone writes.
    if not options.numbered or os.environ.get("GLUON_SYNCBN_RANK", "0") != "0":
        yield
        return
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                options.output.mkdir()
                break
            except FileExistsError:
                options.output = _next_run()
    except OSError as error:
        raise cannot_write(options.output, error) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            options.output.rmdir()


def check_workers(options):
    """Raise a UsageError if `options.workers` does not go with the other options."""
    workers = options.workers
    if workers > options.batch:
        raise UsageError(
            f"--workers is {workers}, but --batch is {options.batch}, and each worker needs an "
            "image: give fewer --workers, or a larger --batch"
        )
    if workers > 1 and options.norm == "builtin":
        raise UsageError(
            f"--workers is {workers}, but the layer of --norm builtin knows the devices of one "
            "process only: give --workers 1, or another --norm"
        )
    kind, which = parse_devices(options.devices or default_devices(workers, options.batch))
    if which is not None:
        share_devices(which if kind == "cpu" else len(which), options)


def share_devices(number, options):
    """How many of the `number` devices each worker has."""
    if number % options.workers:
        raise UsageError(
            f"--workers is {options.workers}, but has to share {number} devices "
            f"({options.devices}) evenly: give a divisor of {number}, or other --devices"
        )
    return number // options.workers


def default_devices(workers, batch):
    """What --devices is where there is no GPU."""
    return f"cpu:{max(workers, min(2, batch))}"


def parse_devices(text):
    """("cpu", n) or ("gpu", list of ids or None for all) of "cpu:2", "gpu:0,1", "gpu"."""
    match = re.fullmatch(r"cpu(?::(\d+))?", text)
    if match and match.group(1) != "0":
        return "cpu", int(match.group(1) or 1)
    match = re.fullmatch(r"gpu(?::(\d+(?:,\d+)*))?", text)
    if match:
        ids = [int(i) for i in match.group(1).split(",")] if match.group(1) else None
        if ids is None or len(set(ids)) == len(ids):
            return "gpu", ids
    raise UsageError(
        f"--devices is {text!r}, but was expected as cpu:2 (two CPU contexts), gpu:0,1 (these "
        "GPUs, each once) or gpu (all)"
    )


def prepare_environment(options):
    """Set what MXNet reads when it starts; what the user has set stays."""
    # Resuming is exact only where the same numbers always give the same sums, which the fastest
    # algorithms of cuDNN do not promise; and measuring which is the fastest may end differently.
    os.environ.setdefault("MXNET_ENFORCE_DETERMINISM", "1")
    os.environ.setdefault("MXNET_CUDNN_AUTOTUNE_DEFAULT", "0")
    workers = options.workers or min(2, options.batch)
    kind, number = parse_devices(options.devices or default_devices(workers, options.batch))
    if kind == "gpu" or number == 1:
        return
    if number > workers:
        # All CPU contexts of a process share MXNet's workspaces, and a step of one that holds the
        # last of them while it waits for the other would wait for ever.
        os.environ.setdefault("MXNET_CPU_TEMP_COPY", "4096")
        os.environ.setdefault("MXNET_CPU_PARALLEL_RAND_COPY", "64")
    # Each context computes with threads of its own, and more of them than cores hinder each other.
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // number)))


def same_folder(one, other):
    return one is not None and one.resolve() == other.resolve()


def _checkpoint_to_resume(given):
    where = given["resume"] or given.get("output") or _newest_run()
    path = Path(where)
    try:
        if path.is_dir():
            path = path / "checkpoints" / "last.ckpt"
            if not path.exists():
                raise UsageError(
                    f"--resume {where}: there is no {path}, so no run has saved anything there "
                    "yet; name the folder of a run or a checkpoint file, or start anew without "
                    "--resume"
                )
        resumed = checkpoint.load(path)
    except checkpoint.CheckpointError as error:
        raise UsageError(f"--resume {where}: {error}") from None
    except OSError as error:
        raise UsageError(
            f"--resume {where} cannot be read ({error}): name the folder of a run or a checkpoint "
            "file"
        ) from None
    if resumed.progress["validated"] >= resumed.config["steps"]:
        raise UsageError(
            f"--resume {where}: this run is finished, with all of its {resumed.step} steps; "
            "for a longer one start a new run with --steps, as the learning rate depends on it"
        )
    resumed.folder = path.parent.parent if path.parent.name == "checkpoints" else None
    output = given.get("output", resumed.folder)
    if output is None:
        raise UsageError(
            f"--resume {where}: this file lies in no folder of a run; say with --output where to "
            "go on"
        )
    if given.get("overwrite") and same_folder(resumed.folder, output):
        raise UsageError(
            "--overwrite would remove the run that --resume continues: leave one of the two out, "
            "or continue in another --output"
        )
    return resumed


def _check_same(given, resumed):
    before = resumed.config["arguments"]
    for name in DECISIVE:
        if name not in given or given[name] == before[name]:
            continue
        # A folder may have moved; what is in it is compared when it has been read.
        if name == "data" and before[name] is not None:
            continue
        if name == "steps" and given[name] == resumed.config["steps"]:
            continue
        option = "--" + name.replace("_", "-")
        raise UsageError(
            f"{option} is {given[name]}, but the run to resume has "
            f"{'none' if before[name] is None else before[name]}, and the same result as "
            f"without interruption needs the same: leave {option} out, or start a new run with "
            "another --output"
        )


def _runs():
    """{number: folder} of the default output folders."""
    matches = (
        (re.fullmatch(r"segmentation-(\d+)", p.name), p) for p in RUNS.glob("segmentation-*")
    )
    return {int(match.group(1)): path for match, path in matches if match}


def _next_run():
    return RUNS / f"segmentation-{max(_runs(), default=0) + 1}"


def _newest_run():
    runs = _runs()
    if not runs:
        raise UsageError(
            f"--resume without a path continues the newest {RUNS}/segmentation-N, but there is "
            "none: name the folder of a run or a checkpoint file"
        )
    return runs[max(runs)]
