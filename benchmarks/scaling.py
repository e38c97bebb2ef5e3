"""A model of what synchronization costs in each training step, for 8 to 4096 GPUs.

It rests on the figures of bench_distributed.py, on the layers of a net, and on assumptions about a
network, which are options. The result is Markdown, on standard output; --docs writes it, the table
of bench_distributed.py and the picture to docs/.
"""

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet.gluon.model_zoo import vision
from scipy.optimize import nnls

import bench_distributed
from bench import positive
from bench_distributed import message_size
from report import table

DOCS = Path(__file__).resolve().parent.parent / "docs"
GPUS = [2**i for i in range(3, 13)]
PASSES = 2
# MXNet's KVStore spreads arrays from this size on over its servers (MXNET_KVSTORE_BIGARRAY_BOUND).
SPREAD_FROM = 10**6
TICKS = {
    **{"10 ms": 0.01, "100 ms": 0.1, "1 s": 1, "10 s": 10},
    **{"1 min": 60, "10 min": 600, "1 h": 3600, "10 h": 36000},
}
TITLES = {"kvstore": "KVStore", "horovod": "Horovod"}


def main():
    args = parse_arguments()
    channels = net_channels(args.net)
    try:
        figures = json.loads(args.figures.read_text())
        models = fit_all(figures["layers"])
        measured = bench_distributed.text(figures)
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(
            f"{args.figures} is no file of bench_distributed.py's figures ({error!r}): "
            "make bench-distributed writes it"
        )
    report = text(models, channels, args)
    print(report)
    if args.docs:
        draw(models, channels, args, DOCS / "scaling.png")
        page = DOCS / "scaling.md"
        content = page.read_text()
        for name, part in (
            ("bench_distributed.py", measured),
            ("scaling.py", report),
        ):
            content = replace_part(content, name, part)
        page.write_text(content)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])

    def add(name, default, help, **settings):
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        parser.add_argument(name, default=default, help=f"{help} ({shown})", **settings)

    add("--net", "resnet50_v1", "a net of gluon.model_zoo.vision, for its layers")
    add("--latency-us", [5.0, 25.0], "of the network: at best, at worst", type=_above_0, nargs=2)
    add("--bandwidth-gbit", 100.0, "of each machine's link", type=_above_0)
    add("--gpus-per-process", [8, 1], "GPUs that meet in a process", type=positive, nargs="+")
    add("--groups", [8, 16, 64], "GPUs that share their statistics", type=positive, nargs="+")
    add("--servers", 1, "of the KVStore", type=positive)
    add("--compute-ms", 250.0, "a training step without synchronization", type=_above_0)
    parser.add_argument(
        "--figures",
        type=Path,
        default=bench_distributed.FIGURES,
        metavar="FILE",
        help="what bench_distributed.py wrote",
    )
    parser.add_argument("--docs", action="store_true", help="write docs/scaling.md and the picture")
    args = parser.parse_args()
    if not args.figures.exists():
        parser.error(f"there is no {args.figures}: make bench-distributed writes it")
    return args


def _above_0(text):
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def net_channels(name):
    """The channels of each layer of batch normalization."""
    try:
        net = vision.get_model(name)
    except ValueError as error:
        sys.exit(f"--net: {error}")
    net.infer_shape(mx.nd.zeros((1, 3, 224, 224)))
    channels = []

    def collect(block):
        if isinstance(block, mx.gluon.nn.BatchNorm):
            channels.append(block.gamma.shape[0])

    net.apply(collect)
    return channels


@dataclass
class Network:
    latency: float  # seconds
    bandwidth: float  # bytes per second
    servers: int  # of the KVStore


@dataclass
class Model:
    """The seconds of one exchange between N processes:

    first + per_process (N - 2) + per_byte bytes(N), of which the three constants are measured,
    + hops(N) latency + bytes(N) / bandwidth, of which the network's two are assumed.

    The measured cost of further processes holds that of waiting for a core, as they all ran on one
    machine. So it is left out at best, and all of it counts at worst.
    """

    engine: str
    first: float
    per_process: float
    per_byte: float
    misfit: float = 0.0

    def bytes(self, processes, channels):
        """What goes through the busiest place."""
        n = message_size(channels)
        if self.engine == "kvstore":
            # The server: from and to each process slots for all processes, of three float32.
            return 2 * processes * (processes * 3 * n * 4)
        # Each process: what the others have.
        return (processes - 1) * n * 8

    def hops(self, processes, steps=lambda n: n - 1):
        """Messages one after another; `steps` says how many a collective takes."""
        # The KVStore: to the server and back. Horovod: agreeing that all have come is an allreduce
        # of bits, which goes around twice, and then the numbers are gathered.
        return 2 if self.engine == "kvstore" else 3 * steps(processes)

    def measured(self, processes, channels):
        further = self.per_process * (processes - 2)
        return self.first + further + self.per_byte * self.bytes(processes, channels)

    def at_best(self, processes, channels, network, **steps):
        return self.first + self._on_network(processes, channels, network, **steps)

    def at_worst(self, processes, channels, network):
        return self.measured(processes, channels) + self._on_network(processes, channels, network)

    def _on_network(self, processes, channels, network, **steps):
        spread = 3 * message_size(channels) * processes >= SPREAD_FROM
        servers = network.servers if self.engine == "kvstore" and spread else 1
        traffic = self.bytes(processes, channels) / servers / network.bandwidth
        return self.hops(processes, **steps) * network.latency + traffic


def fit_all(layers):
    return {
        engine: fit(engine, [row for row in layers if row["engine"] == engine])
        for engine in dict.fromkeys(row["engine"] for row in layers)
    }


def fit(engine, rows):
    """The three constants, none of them negative, of the least squares of relative errors."""
    seconds = np.array([row["added_ms"]["pass"] / 1e3 for row in rows])
    one = Model(engine, 1, 1, 1)
    terms = np.array(
        [[1, r["workers"] - 2, one.bytes(r["workers"], r["channels"])] for r in rows], dtype=float
    )
    size = np.maximum(terms.max(axis=0), 1)
    constants = nnls(terms / size / seconds[:, None], np.ones(len(rows)))[0] / size
    misfit = np.abs(terms @ constants / seconds - 1).max()
    return Model(engine, *constants.tolist(), misfit=float(misfit))


def step_seconds(model, processes, channels, args):
    """(at best, at worst): what synchronization adds to a training step."""
    if processes < 2:
        return 0.0, 0.0
    best, worst = networks(args)
    return (
        PASSES * sum(model.at_best(processes, c, best) for c in channels),
        PASSES * sum(model.at_worst(processes, c, worst) for c in channels),
    )


def step_seconds_in_few_steps(model, processes, channels, args):
    """Where Horovod's collectives took log2(N) steps and not N - 1, as recursive doubling does."""
    network = networks(args)[1]
    return PASSES * sum(
        model.at_best(processes, c, network, steps=lambda n: math.ceil(math.log2(n)))
        for c in channels
    )


def networks(args):
    """(at best, at worst)."""
    bandwidth = args.bandwidth_gbit * 1e9 / 8
    return [Network(latency / 1e6, bandwidth, args.servers) for latency in args.latency_us]


def text(models, channels, args):
    places = [(model, per) for per in args.gpus_per_process for model in models.values()]
    header = [title(model, per) for model, per in places]

    def row(name, gpus):
        spans = [step_seconds(model, gpus // per, channels, args) for model, per in places]
        return [name, *(_span(*span, args) for span in spans)]

    constants = [
        [
            TITLES[model.engine],
            f"{model.first * 1e3:.2f} ms",
            f"{model.per_process * 1e3:.2f} ms",
            f"{model.per_byte * 1e9:.2f} ms",
            f"{model.misfit:.0%}",
        ]
        for model in models.values()
    ]
    best, worst = args.latency_us
    return "\n\n".join(
        [
            f"{args.net}: {len(channels)} layers with {sum(channels)} channels together, "
            f"{PASSES} passes. Measured, and how far the model is from what was measured at most:",
            table(["engine", "first", "per_process", "per_byte, of 1 MB", "misfit"], constants),
            f"Assumed: {best:g} us (at best) to {worst:g} us (at worst) from one process to "
            f"another, {args.bandwidth_gbit:g} Gbit/s, KVStore servers: {args.servers}, and "
            f"{args.compute_ms:g} ms for the rest of a training step; what takes longer than that "
            "at best is bold.",
            "**Added to each training step, as it is done today**, by one group of all GPUs, or by "
            "groups of any size that is more than a process:",
            table(["GPUs", *header], [row(str(gpus), gpus) for gpus in GPUS]),
            "**If only the processes of a group exchanged**, for any number of GPUs:",
            table(["GPUs in a group", *header], [row(str(size), size) for size in args.groups]),
        ]
    )


def title(model, per):
    return f"{TITLES[model.engine]}, {per} GPU{'s' if per > 1 else ''} in a process"


def _span(best, worst, args):
    if worst == 0:
        return "0"
    span = f"{duration(best)} - {duration(worst)}"
    return f"**{span}**" if best * 1e3 > args.compute_ms else span


def duration(seconds):
    for least, size, unit in (
        (7200, 3600, "h"),
        (100, 60, "min"),
        (0.9995, 1, "s"),
        (0, 1e-3, "ms"),
    ):
        if seconds >= least:
            number = seconds / size
            return f"{number:.0f} {unit}" if number >= 9.95 else f"{number:.1f} {unit}"


def draw(models, channels, args, file):
    figure, axes = plt.subplots(
        len(args.gpus_per_process),
        len(models),
        figsize=(5.5 * len(models), 3.8 * len(args.gpus_per_process)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for row, per in zip(axes, args.gpus_per_process):
        for plot, model in zip(row, models.values()):
            _draw_one(plot, model, per, channels, args)
    for plot in axes[:, 0]:
        plot.set_ylabel("added to a training step")
    for plot in axes[-1]:
        plot.set_xlabel("GPUs")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _draw_one(plot, model, per, channels, args):
    gpus = [g for g in GPUS if g > per]
    spans = [step_seconds(model, g // per, channels, args) for g in gpus]
    plot.fill_between(
        gpus, *zip(*spans), alpha=0.35, color="C0", label="today: all GPUs, or groups"
    )
    if model.engine == "horovod":
        few = [step_seconds_in_few_steps(model, g // per, channels, args) for g in gpus]
        plot.plot(gpus, few, "--", color="C0", label="all GPUs, in log2 N steps")
    for number, size in enumerate(args.groups, start=1):
        if size > per:
            for seconds in step_seconds(model, size // per, channels, args):
                plot.hlines(seconds, size, GPUS[-1], f"C{number}")
            plot.plot([], f"C{number}", label=f"groups of {size} that exchange on their own")
    plot.axhline(args.compute_ms / 1e3, color="black", linestyle=":", label="the rest of the step")
    plot.set(
        xscale="log",
        yscale="log",
        title=title(model, per),
        xlim=(GPUS[0], GPUS[-1]),
        ylim=(0.02, 2e5),
    )
    plot.set_xticks(GPUS, [str(g) for g in GPUS])
    plot.set_yticks(list(TICKS.values()), list(TICKS))
    plot.minorticks_off()
    plot.grid(alpha=0.3)
    plot.legend(loc="upper left", fontsize=8)


def replace_part(content, name, part):
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    if not re.search(pattern, content, re.DOTALL):
        sys.exit(f"docs/scaling.md has no {begin} ... {end}")
    return re.sub(pattern, lambda _: f"{begin}\n\n{part}\n\n{end}", content, flags=re.DOTALL)


if __name__ == "__main__":
    main()
