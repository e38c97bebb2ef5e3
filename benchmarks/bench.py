"""Measures speed and memory of SyncBatchNorm and MXNet's own layers, against thresholds.

The result is a Markdown table and a list of the thresholds, on standard output.
"""

import argparse
import datetime
import importlib.util
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from pathlib import Path
from unittest import mock

# By default MXNet uses half of the processors, as if each core had two.
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))

import gluon_syncbn
import mxnet as mx
import numpy as np
from tqdm import tqdm

import measure
import pictures
import report

SHAPES = [(4, 64, 128, 128), (2, 256, 64, 64), (2, 512, 33, 33), (4, 2048, 12, 12)]


def main():
    args = parse_arguments()
    measure.keep_freed_memory()
    figures = {**environment(), "repetitions": args.repetitions}
    figures["memory"] = measure_memory(args.contexts)
    figures["chain"] = {
        name: measure_chain(onednn) for name, onednn in (("with oneDNN", 1), ("without oneDNN", 0))
    }
    figures["layers"] = measure_layers(args.shapes, args.contexts, args.repetitions)
    rounds = (args.repetitions + 1) // 2
    figures["steps"] = [] if args.no_model else measure_steps(rounds)
    with multiprocessing.get_context("spawn").Pool(1) as fresh_process:
        figures["accuracy"] = fresh_process.apply(_accuracy)
    figures["thresholds"] = report.judge(figures)
    print(report.text(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if args.pictures:
        pictures.draw(figures, args.pictures)
    if args.check and not all(threshold["pass"] for threshold in figures["thresholds"]):
        sys.exit(1)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--repetitions",
        type=positive,
        default=40,
        help="rounds, half of them for the training step (default: 40)",
    )
    parser.add_argument(
        "--shapes", type=_shape, nargs="+", default=SHAPES, metavar="N,C,H,W", help="shapes of x"
    )
    parser.add_argument(
        "--contexts",
        type=positive,
        nargs="+",
        default=[1, 2],
        metavar="n",
        help="numbers of CPU contexts, over which x is split (default: 1 2)",
    )
    parser.add_argument("--no-model", action="store_true", help="leave the training step out")
    parser.add_argument(
        "--json", type=file_name, metavar="FILE", help="write all figures to this file"
    )
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw into this folder")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a threshold fails")
    args = parser.parse_args()
    for shape in [*args.shapes, measure.MEMORY_SHAPE]:
        for count in args.contexts:
            if shape[0] % count:
                parser.error(
                    f"{shape} does not split evenly over {count} contexts: choose other --contexts"
                )
    if not args.no_model and importlib.util.find_spec("gluoncv") is None:
        parser.error(
            "the training step needs gluoncv: pip install 'gluon_syncbn[test]', or use --no-model"
        )
    for option, folder in (("json", args.json and args.json.parent), ("pictures", args.pictures)):
        if folder and not folder.is_dir():
            parser.error(f"there is no folder {folder} for --{option} {getattr(args, option)}")
    return args


def file_name(text):
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    return Path(text)


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _shape(text):
    shape = tuple(positive(size) for size in text.split(","))
    if not 2 <= len(shape) <= 5:
        raise argparse.ArgumentTypeError(
            f"{text!r} must have 2 to 5 sizes, for example 4,64,128,128"
        )
    return shape


def environment():
    versions = {
        "gluon_syncbn": gluon_syncbn.__version__,
        "mxnet": mx.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": measure.threads(),
        "versions": versions,
    }


def _cpu_model():
    with open("/proc/cpuinfo") as info:
        models = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _accuracy():
    import accuracy  # It sets environment variables.

    return accuracy.by_mean()


def measure_memory(counts):
    results = []
    for count in counts:
        for kind in tqdm(("operator", "block"), desc=f"memory, {report.contexts(count)}"):
            with multiprocessing.get_context("spawn").Pool(1) as fresh_process:
                over = fresh_process.apply(measure.peak_memory, (kind, count))
            results.append({"kind": kind, "contexts": count, "peak_over_arrays": over})
    return results


def measure_chain(onednn):
    def peak(kind):
        with multiprocessing.get_context("spawn").Pool(1) as fresh_process:
            return fresh_process.apply(measure.chain_memory, (kind,))

    with mock.patch.dict(os.environ, MXNET_MKLDNN_ENABLED=str(int(onednn))):
        without = peak(None)
        return {kind: peak(kind) - without for kind in report.CHAIN_KINDS}


def measure_layers(shapes, counts, repetitions):
    results = []
    for shape in shapes:
        for count in counts:
            with _progress(f"{shape}, {report.contexts(count)}", repetitions) as progress:
                seconds = measure.layer_times(shape, count, repetitions, progress)
            copy = seconds.pop("copy")
            ratios = {
                pair: _ratio(seconds, *pair)
                for pair in report.RATIOS
                if set(pair) <= set(seconds) and report.at_most(pair, shape, count)
            }
            results.append(
                {
                    "shape": shape,
                    "contexts": count,
                    "copy_ms": _median(copy.sum(1) * 1e3),
                    "ms": {kind: _milliseconds(rows) for kind, rows in seconds.items()},
                    "ratios": {"/".join(pair): ratio for pair, ratio in ratios.items()},
                }
            )
    return results


def measure_steps(rounds):
    results = []
    for where, arguments, threshold in report.STEPS:
        processes = 2 if "--store" in arguments else 1
        launcher = ["-m", "gluon_syncbn.launch", "-n", "2", "--"] if processes > 1 else []
        script = str(Path(__file__).with_name("step.py"))
        command = [sys.executable, *launcher, script, "--rounds", str(rounds), *arguments]
        environment = os.environ.copy()
        if arguments:
            # Several contexts share the cores, as the launcher's workers do.
            del environment["OMP_NUM_THREADS"]
        if "--contexts" in arguments:
            # With fewer slots, convolutions of contexts and a synchronized layer between them can
            # deadlock. Each slot grows to the largest workspace, so there are no more than needed.
            environment.update(MXNET_CPU_TEMP_COPY="256", MXNET_CPU_PARALLEL_RAND_COPY="64")
        printed = subprocess.run(
            command, stdout=subprocess.PIPE, check=True, text=True, env=environment
        ).stdout
        line = next(line for line in printed.splitlines() if "{" in line)
        seconds = json.loads(line[line.index("{") :])
        rows = {kind: np.array(values) for kind, values in seconds.items()}
        ratios = {
            kind: np.median(values / rows["BatchNorm"], axis=0).tolist()
            for kind, values in rows.items()
        }
        medians = {kind: np.median(values, axis=0).tolist() for kind, values in rows.items()}
        results.append(
            {"where": where, "threshold": threshold, "seconds": medians, "ratios": ratios}
        )
    return results


def _progress(description, repetitions):
    return tqdm(total=measure.WARM_UP + repetitions, desc=description)


def _milliseconds(rows):
    forward, backward = (np.median(rows, axis=0) * 1e3).tolist()
    return {"forward": forward, "backward": backward, "both": _median(rows.sum(1) * 1e3)}


def _ratio(seconds, ours, theirs):
    """The ratio of the times of two kinds, as the median over the rounds: a disturbance slows both
    kinds of a round."""
    a, b = seconds[ours].sum(1), seconds[theirs].sum(1)
    quartiles = np.percentile(a / b, [25, 75]).tolist()
    return {"median": _median(a / b), "quartiles": quartiles, "of_medians": _median(a) / _median(b)}


def _median(values):
    return float(np.median(values))


if __name__ == "__main__":
    main()
