"""Compares the figures of bench.py with thresholds, and formats them in Markdown."""

import measure

TITLES = {
    "operator": "operator",
    "block": "block",
    "BatchNorm": "`nn.BatchNorm`",
    "contrib": "contrib `SyncBatchNorm`",
}
RATIO_THRESHOLDS = {
    ("operator", "BatchNorm"): 0.45,
    ("operator", "contrib"): 0.05,
    ("block", "BatchNorm"): 0.8,
}
STEP_THRESHOLD = 1.25
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

    for (ours, theirs), threshold in RATIO_THRESHOLDS.items():
        add(
            f"time, {TITLES[ours]} / {TITLES[theirs]}",
            threshold,
            [
                (
                    row["ratios"][f"{ours}/{theirs}"]["median"],
                    f"{row['shape']}, {contexts(row['contexts'])}",
                )
                for row in figures["layers"]
            ],
        )
    if figures["step"]:
        add(
            f"training step of fcn_resnet50, block / {TITLES['BatchNorm']}",
            STEP_THRESHOLD,
            [(figures["step"]["ratio"]["median"], contexts(measure.STEP_CONTEXTS))],
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
    ratios = [f"{TITLES[ours]} / {TITLES[theirs]}" for ours, theirs in RATIO_THRESHOLDS]
    return "\n\n".join(
        [
            f"{figures['cpu']}, {figures['cores']} cores, {figures['threads']} threads, "
            f"{versions}, {figures['date'][:10]}",
            "Milliseconds of forward + backward, medians of "
            f"{figures['repetitions']} rounds. The last columns are medians of the rounds' ratios.",
            table(
                ["x", "contexts", "copy", *TITLES.values(), *ratios],
                [_layer_row(row) for row in figures["layers"]],
            ),
            *_other_figures(figures),
            table(
                ["threshold", "at most", "worst", "where", "result"],
                [threshold_row(threshold) for threshold in figures["thresholds"]],
            ),
        ]
    )


def _layer_row(row):
    times = [
        f"{row['ms'][kind]['forward']:.2f} + {row['ms'][kind]['backward']:.2f}" for kind in TITLES
    ]
    ratios = [
        # Bold if it fails its threshold.
        f"{ratio['median']:.3f}" if ratio["median"] <= threshold else f"**{ratio['median']:.3f}**"
        for ratio, threshold in zip(row["ratios"].values(), RATIO_THRESHOLDS.values())
    ]
    return [str(row["shape"]), str(row["contexts"]), f"{row['copy_ms']:.2f}", *times, *ratios]


def _other_figures(figures):
    if figures["step"]:
        yield (
            f"Training step of fcn_resnet50, {measure.STEP_SIZE}x{measure.STEP_SIZE}, "
            f"{contexts(measure.STEP_CONTEXTS)} of {measure.STEP_BATCH} images, static_alloc, "
            f"medians of {figures['step']['repetitions']} rounds: {_step(figures['step'])}. "
            "Without resizing its maps to the size of the images (in MXNet, the gradient of "
            "resizing has one lock for all contexts): "
            f"{_step(figures['step_without_resize'])}."
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


def _step(figures):
    ms, ratio = figures["ms"], figures["ratio"]["median"]
    return (
        f"{ms['block']:.0f} ms with the block, {ms['BatchNorm']:.0f} ms with "
        f"{TITLES['BatchNorm']}, ratio {ratio:.3f}"
    )


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
