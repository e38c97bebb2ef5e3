"""Compares the figures of bench.py with thresholds, and formats them in Markdown."""

import math

import measure

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
RATIOS = [
    ("operator", "BatchNorm"),
    ("operator", "contrib"),
    ("block", "BatchNorm"),
    ("operator", "torch"),
    ("operator_relu", "operator"),
    ("operator_relu", "BatchNorm_relu"),
    ("operator_relu", "torch_relu"),
    ("operator_last_relu", "operator_last"),
]
_LARGE = 1_500_000  # values
_16_MB = 4_000_000
CHAIN_KINDS = ("BatchNorm + LeakyReLU", "fused", "in place")
CHAIN_THRESHOLD = 0.6
# What is measured, the arguments of step.py, and the largest allowed ratio of a step's time with
# the fused layer to that with nn.BatchNorm.
STEPS = [
    ("1 context", [], 1.0),
    ("2 contexts", ["--contexts", "2"], 1.15),
    ("2 contexts, maps not resized", ["--contexts", "2", "--no-resize"], 1.05),
    ("2 processes", ["--store", "dist_sync"], 1.0),
]


def at_most(pair, shape, count):
    """The largest allowed ratio of the first's time to the second's; None if not measured there."""
    size = math.prod(shape)
    if pair == ("operator", "BatchNorm"):
        return 0.6 if count > 1 and size < _LARGE else 0.45
    if pair == ("operator", "contrib"):
        return 0.05
    if pair == ("block", "BatchNorm"):
        return 0.8
    if pair[0] == "operator_last_relu":
        return 1.2 if count == 1 else None
    if count > 1:
        return None
    if pair == ("operator", "torch"):
        return 1.0
    if pair == ("operator_relu", "torch_relu"):
        return 0.8 if size > _LARGE else 0.85
    if size < _16_MB:
        return None
    return 0.3 if pair == ("operator_relu", "BatchNorm_relu") else 1.05


# A buffer of the size of x would make it 1.25.
MEMORY_THRESHOLD = 1.05


def judge(figures):
    """Each threshold with its worst figure."""
    thresholds = []

    def add(name, threshold, values):
        worst, place = max(values)
        failed = sum(value > threshold for value, _ in values)
        thresholds.append(
            {
                "name": name,
                "threshold": threshold,
                "worst": worst,
                "where": place,
                "failed": failed,
                "of": len(values),
                "pass": failed == 0,
            }
        )

    for pair in RATIOS:
        by_threshold = {}
        for row in figures["layers"]:
            if "/".join(pair) in row["ratios"]:
                ratio = row["ratios"]["/".join(pair)]["median"]
                place = f"{row['shape']}, {contexts(row['contexts'])}"
                most = at_most(pair, row["shape"], row["contexts"])
                by_threshold.setdefault(most, []).append((ratio, place))
        for most, values in by_threshold.items():
            add(f"time, {' / '.join(TITLES[kind] for kind in pair)}", most, values)
    for step in figures["steps"]:
        name = f"training step of fcn_resnet50, fused / {TITLES['BatchNorm']}"
        add(name, step["threshold"], [(step["ratios"]["fused"][0], step["where"])])
    for where, chain in figures["chain"].items():
        add(
            f"memory of {measure.CHAIN_LENGTH} layers, in place / BatchNorm + LeakyReLU",
            CHAIN_THRESHOLD,
            [(chain["in place"] / chain["BatchNorm + LeakyReLU"], where)],
        )
    add(
        "peak memory of the operator / x, y, dy and dx",
        MEMORY_THRESHOLD,
        [
            (row["peak_over_arrays"], f"{measure.MEMORY_SHAPE}, {contexts(row['contexts'])}")
            for row in figures["memory"]
            if row["kind"] == "operator"
        ],
    )
    return thresholds


def text(figures):
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    return "\n\n".join(
        [
            f"{figures['cpu']}, {figures['cores']} cores, {figures['threads']} threads, "
            f"{versions}, {figures['date'][:10]}",
            "Milliseconds of forward + backward, medians of "
            f"{figures['repetitions']} rounds, and medians of the rounds' ratios, bold if above "
            "the threshold.",
            table(
                ["x", "contexts", "copy", *TITLES.values()],
                [_times(row) for row in figures["layers"]],
            ),
            table(
                ["x", "contexts", *[" / ".join(TITLES[kind] for kind in pair) for pair in RATIOS]],
                [_ratios(row) for row in figures["layers"]],
            ),
            *_other_figures(figures),
            table(
                ["threshold", "at most", "worst", "where", "result"],
                [threshold_row(threshold) for threshold in figures["thresholds"]],
            ),
        ]
    )


def _times(row):
    times = [
        f"{row['ms'][kind]['forward']:.2f} + {row['ms'][kind]['backward']:.2f}"
        if kind in row["ms"]
        else ""
        for kind in TITLES
    ]
    return [str(row["shape"]), str(row["contexts"]), f"{row['copy_ms']:.2f}", *times]


def _ratios(row):
    def cell(pair):
        if "/".join(pair) not in row["ratios"]:
            return ""
        ratio = row["ratios"]["/".join(pair)]["median"]
        passes = ratio <= at_most(pair, row["shape"], row["contexts"])
        return f"{ratio:.3f}" if passes else f"**{ratio:.3f}**"

    return [str(row["shape"]), str(row["contexts"]), *map(cell, RATIOS)]


def _other_figures(figures):
    if figures["steps"]:
        yield (
            "A training step of gluoncv's fcn_resnet50, 96x96, 4 images in each process, "
            "static_alloc: milliseconds of `nn.BatchNorm`, and the ratios of time and of processor "
            "time, medians."
        )
        yield table(
            ["where", TITLES["BatchNorm"], "fused: time", "processor", "block: time", "processor"],
            [_step_row(step) for step in figures["steps"]],
        )
    for where, chain in figures["chain"].items():
        held = ", ".join(f"{kind} {size / 1e6:.0f} MB" for kind, size in chain.items())
        yield (
            f"Peak memory of a training step of {measure.CHAIN_LENGTH} convolutions, batch "
            f"normalizations and leaky relus at {measure.CHAIN_SHAPE}, {where}: {held}."
        )
    for count in dict.fromkeys(row["contexts"] for row in figures["memory"]):
        peaks = [
            f"{TITLES[row['kind']]} {row['peak_over_arrays']:.2f}"
            for row in figures["memory"]
            if row["contexts"] == count
        ]
        yield (
            f"Peak memory / (x, y, dy and dx) at {measure.MEMORY_SHAPE}, {contexts(count)}: "
            f"{', '.join(peaks)}."
        )


def _step_row(step):
    ratios = [f"{value:.3f}" for kind in ("fused", "block") for value in step["ratios"][kind]]
    return [step["where"], f"{step['seconds']['BatchNorm'][0] * 1e3:.0f}", *ratios]


def threshold_row(threshold):
    result = (
        "pass" if threshold["pass"] else f"**FAIL** ({threshold['failed']} of {threshold['of']})"
    )
    return [
        threshold["name"],
        f"{threshold['threshold']:g}",
        f"{threshold['worst']:.3f}",
        threshold["where"],
        result,
    ]


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def contexts(count):
    return "1 context" if count == 1 else f"{count} contexts"
