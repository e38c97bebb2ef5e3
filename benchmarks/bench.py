"""Measures speed and memory of SyncBatchNorm and MXNet's own layers.

The result is a Markdown table and a list of guards, on standard output.
"""

import argparse
import itertools
import os
from pathlib import Path

from tqdm import tqdm

import harness
import pictures
from harness import in_new_process, positive, table

SHAPES = [(4, 64, 128, 128), (2, 256, 64, 64), (2, 512, 33, 33), (4, 2048, 12, 12)]
TITLES = {
    "operator": "operator",
    "block": "block",
    "BatchNorm": "`nn.BatchNorm`",
    "contrib": "contrib `SyncBatchNorm`",
    "torch": "`torch.nn.BatchNorm2d`",
    "operator_relu": "operator with relu",
    "BatchNorm_relu": "`nn.BatchNorm` and relu",
    "torch_relu": "`torch.nn.BatchNorm2d` and relu",
    "operator_last": "operator, channels last",
    "operator_last_relu": "the same with relu",
}
# Guards, looser than what has been measured: the largest allowed ratio of the first's time to the
# second's.
RATIOS = {
    ("operator", "BatchNorm"): 1.0,
    ("operator", "contrib"): 0.15,
    ("block", "BatchNorm"): 1.5,
    ("operator", "torch"): 1.7,
    ("operator_relu", "operator"): 1.4,
    ("operator_relu", "BatchNorm_relu"): 1.0,
    ("operator_relu", "torch_relu"): 1.7,
    ("operator_last_relu", "operator_last"): 1.3,
}
# Of a training step with the fused layer to one with nn.BatchNorm.
STEP_MOST = 1.4
# Where; contexts, whether maps are resized, KVStore.
STEPS = [
    ("1 context", (1, True, None)),
    ("2 contexts", (2, True, None)),
    ("2 contexts, maps not resized", (2, False, None)),
    ("2 processes", (1, True, "dist_sync")),
]
CHAIN_SHAPE, CHAIN_LENGTH = (4, 64, 128, 128), 20
CHAINS = {"with oneDNN": ("1", 1.2), "without oneDNN": ("0", 0.6)}
CHAIN_KINDS = ("BatchNorm + LeakyReLU", "fused", "in place")
# A buffer of the size of x would make it 1.25.
MEMORY_SHAPE, MEMORY_MOST = (12, 64, 224, 224), 1.05


def main():
    args = parse_arguments()
    # By default MXNet uses half of the processors, as if each core had two.
    os.environ.setdefault("OMP_NUM_THREADS", str(harness.CORES))
    figures = harness.environment("gluon_syncbn", "mxnet", "numpy")
    figures["threads"] = int(os.environ["OMP_NUM_THREADS"])
    figures["repetitions"] = args.repetitions
    runs = {
        "memory": (measure_memory, [(count,) for count in args.contexts]),
        "chain": (measure_chain, [(where,) for where in CHAINS]),
        "layers": (measure_layers, itertools.product(args.shapes, args.contexts)),
        "steps": (measure_step, [] if args.no_model else STEPS),
    }
    for name, (measure, cases) in runs.items():
        cases = tqdm(list(cases), desc=name)
        figures[name] = [measure(args.repetitions, *case) for case in cases]
    figures["guards"] = harness.judge(comparisons(figures))
    if args.pictures:
        pictures.draw(figures, args.pictures)
    harness.finish(figures, sections(figures), args)


def parse_arguments():
    parser = harness.options(__doc__, repetitions=40)
    parser.add_argument(
        "--shapes", type=_shape, nargs="+", default=SHAPES, metavar="N,C,H,W", help="shapes of x"
    )
    parser.add_argument(
        "--contexts",
        type=positive,
        nargs="+",
        default=[1, 2],
        metavar="n",
        help="numbers of CPU contexts, over which x is split (1 2)",
    )
    parser.add_argument("--no-model", action="store_true", help="leave the training step out")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw into this folder")
    args = parser.parse_args()
    for shape, count in itertools.product([*args.shapes, MEMORY_SHAPE], args.contexts):
        if shape[0] % count:
            parser.error(f"{shape} does not split evenly over {count} contexts: choose others")
    if args.pictures and not args.pictures.is_dir():
        parser.error(f"there is no folder {args.pictures} for --pictures")
    return args


def _shape(text):
    shape = tuple(positive(size) for size in text.split(","))
    if not 2 <= len(shape) <= 5:
        raise argparse.ArgumentTypeError(f"{text!r} must have 2 to 5 sizes, such as 4,64,128,128")
    return shape


def measure_memory(_, count):
    peaks = {
        kind: in_new_process("layers.peak_memory", kind, MEMORY_SHAPE, count)
        for kind in ("operator", "block")
    }
    return {"contexts": count, "peak_over_arrays": peaks}


def measure_chain(_, where):
    onednn, _ = CHAINS[where]

    def peak(kind, length):
        arguments = "layers.chain_memory", kind, CHAIN_SHAPE, length
        return in_new_process(*arguments, MXNET_MKLDNN_ENABLED=onednn)

    without = peak(CHAIN_KINDS[0], 0)
    held = {kind: peak(kind, CHAIN_LENGTH) - without for kind in CHAIN_KINDS}
    return {"where": where, "bytes": held}


def measure_layers(repetitions, shape, count):
    """`ms`: of copies, or of forward, of backward and of both."""
    arguments = "layers.layer_times", shape, count, repetitions
    # Otherwise some calls allocate new pages for y, which takes as long as a fast layer.
    seconds = in_new_process(*arguments, **harness.KEEP_FREED_MEMORY)
    rows = {kind: [[*times, sum(times)] for times in found] for kind, found in seconds.items()}
    ratios = {}
    for ours, theirs in RATIOS:
        if ours in rows and theirs in rows:
            ratios[f"{ours}/{theirs}"] = harness.ratios(rows[ours], rows[theirs])[-1]
    times = {kind: harness.medians(rows[kind], 1e3) for kind in rows}
    return {"shape": shape, "contexts": count, "ms": times, "ratios": ratios}


def measure_step(repetitions, where, arguments):
    count, _, store = arguments
    variables = {}
    if count > 1 or store:
        # Several contexts share the cores, as the launcher's workers do.
        variables["OMP_NUM_THREADS"] = None
    if count > 1:
        # With fewer slots, convolutions of contexts and a synchronized layer between them can
        # deadlock. Each slot grows to the largest workspace, so there are no more than needed.
        variables.update(MXNET_CPU_TEMP_COPY="256", MXNET_CPU_PARALLEL_RAND_COPY="64")
    launcher = ["-m", "gluon_syncbn.launch", "-n", "2"] if store else []
    rounds = (repetitions + 1) // 2
    rows = in_new_process("step.step_times", rounds, *arguments, launcher=launcher, **variables)
    ratios = {kind: harness.ratios(rows[kind], rows["BatchNorm"]) for kind in rows}
    seconds = {kind: harness.medians(rows[kind]) for kind in rows}
    return {"where": where, "seconds": seconds, "ratios": ratios}


def comparisons(figures):
    """(name, largest allowed figure, figure, where) of all that have a guard."""
    for pair, most in RATIOS.items():
        name = f"time, {' / '.join(TITLES[kind] for kind in pair)}"
        for row in figures["layers"]:
            found = row["ratios"].get("/".join(pair))
            if found:
                yield name, most, found, f"{row['shape']}, {contexts(row)}"
    for step in figures["steps"]:
        name = f"training step of fcn_resnet50, fused / {TITLES['BatchNorm']}"
        yield name, STEP_MOST, step["ratios"]["fused"][0], step["where"]
    for chain in figures["chain"]:
        name = f"memory of {CHAIN_LENGTH} layers, in place / {CHAIN_KINDS[0]}"
        ratio = chain["bytes"]["in place"] / chain["bytes"][CHAIN_KINDS[0]]
        _, most = CHAINS[chain["where"]]
        yield name, most, ratio, chain["where"]
    for row in figures["memory"]:
        name, peak = "peak memory of the operator / x, y, dy and dx", row["peak_over_arrays"]
        yield name, MEMORY_MOST, peak["operator"], f"{MEMORY_SHAPE}, {contexts(row)}"


def sections(figures):
    """The text of the result."""
    yield harness.machine(figures)
    yield (
        f"Milliseconds of forward + backward with {figures['threads']} threads, medians of "
        f"{figures['repetitions']} rounds, and medians of the rounds' ratios."
    )
    yield table(["x", "contexts", "copy", *TITLES.values()], map(_times, figures["layers"]))
    pairs = [" / ".join(TITLES[kind] for kind in pair) for pair in RATIOS]
    yield table(["x", "contexts", *pairs], map(_ratios, figures["layers"]))
    if figures["steps"]:
        yield (
            "A training step of gluoncv's fcn_resnet50, 96x96, 4 images in each process, "
            "static_alloc: milliseconds of `nn.BatchNorm`, and the ratios of time and of processor "
            "time, medians."
        )
        header = ["fused: time", "processor", "block: time", "processor"]
        yield table(["where", TITLES["BatchNorm"], *header], map(_step, figures["steps"]))
    for chain in figures["chain"]:
        held = ", ".join(f"{kind} {size / 1e6:.0f} MB" for kind, size in chain["bytes"].items())
        yield (
            f"Peak memory of a training step of {CHAIN_LENGTH} convolutions, batch normalizations "
            f"and leaky relus at {CHAIN_SHAPE}, {chain['where']}: {held}."
        )
    for row in figures["memory"]:
        peaks = ", ".join(f"{kind} {peak:.2f}" for kind, peak in row["peak_over_arrays"].items())
        yield f"Peak memory / (x, y, dy and dx) at {MEMORY_SHAPE}, {contexts(row)}: {peaks}."


def _times(row):
    times = [row["ms"].get(kind) for kind in TITLES]
    cells = [f"{each[0]:.2f} + {each[1]:.2f}" if each else "" for each in times]
    return [row["shape"], row["contexts"], f"{row['ms']['copy'][0]:.2f}", *cells]


def _ratios(row):
    cells = [row["shape"], row["contexts"]]
    for pair in RATIOS:
        found = row["ratios"].get("/".join(pair))
        cells.append(f"{found:.3f}" if found else "")
    return cells


def _step(step):
    ratios = [f"{value:.3f}" for kind in ("fused", "block") for value in step["ratios"][kind]]
    return [step["where"], f"{step['seconds']['BatchNorm'][0] * 1e3:.0f}", *ratios]


def contexts(row):
    return "1 context" if row["contexts"] == 1 else f"{row['contexts']} contexts"


if __name__ == "__main__":
    main()
