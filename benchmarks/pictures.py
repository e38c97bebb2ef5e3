"""Draws the figures of bench.py for docs/performance.md."""

import math

from matplotlib.figure import Figure

# A copy reads x and writes y; forward and backward together access arrays of that size 8 times.
COPIES = 4
LAYERS = {
    "copy": (f"{COPIES} copies of x", "0.75"),
    "operator": ("ours, operator", "C0"),
    "block": ("ours, block", "#8cbcdc"),
    "torch": ("torch.nn.BatchNorm2d", "C1"),
    "BatchNorm": ("nn.BatchNorm", "C2"),
    "contrib": ("contrib SyncBatchNorm", "C3"),
}


def draw(figures, folder):
    for picture in (layers, steps):
        figure = picture(figures)
        if figure is not None:
            figure.savefig(folder / f"performance-{picture.__name__}.png", dpi=110)


def layers(figures):
    """Forward + backward of each shape, on one context."""
    rows = [row for row in figures["layers"] if row["contexts"] == 1]
    label = "milliseconds of forward + backward, on one context (bars with a gap are longer)"
    figure, grid = panels([row["shape"] for row in rows], label)
    for axes, row in zip(grid, rows):
        times = {kind: ms[-1] for kind, ms in row["ms"].items()}
        times["copy"] *= COPIES
        # Without a limit the others would be too short to be told apart.
        bars = [(*LAYERS[kind], times[kind]) for kind in LAYERS if kind in times]
        draw_bars(axes, bars, limit=1.2 * times["BatchNorm"])
    return figure


def steps(figures):
    """A training step, relative to that with nn.BatchNorm."""
    if not figures["steps"]:
        return None
    figure, (axes,) = panels([""], "a training step of fcn_resnet50 / the same with nn.BatchNorm")
    bars = [
        (f"{step['where']}, {name}", LAYERS[kind][1], step["ratios"][name][0])
        for step in figures["steps"]
        for name, kind in (("fused", "operator"), ("block", "block"))
    ]
    draw_bars(axes, bars)
    axes.axvline(1, color="black", linewidth=0.8)
    return figure


def panels(shapes, label):
    """A figure with a panel for each shape of x, or one alone."""
    rows, columns = -(-len(shapes) // 2), min(len(shapes), 2)
    figure = Figure(figsize=(9, 3.2 if len(shapes) == 1 else 5.5), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, shape in zip(grid, shapes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_title(shape and f"x of {tuple(shape)}", fontsize=9)
    figure.supxlabel(label, fontsize=9)
    return figure, grid


def draw_bars(axes, values, limit=math.inf):
    """(label, color, length) from top to bottom. Bars longer than `limit` end there, with a gap."""
    labels, colors, lengths = zip(*values)
    bars = axes.barh(labels, [min(length, limit) for length in lengths], color=colors)
    for bar, length in zip(bars, lengths):
        if length > limit:
            left, bottom = 0.9 * limit, bar.get_y()
            edges = [left, left + 0.03 * limit], [bottom + bar.get_height(), bottom]
            axes.plot(*edges, color="white", linewidth=4, solid_capstyle="butt")
    digits = [f"{length:#.3g}".rstrip(".") for length in lengths]
    axes.bar_label(bars, digits, padding=2, fontsize=8)
    axes.margins(x=0.12)
    axes.invert_yaxis()
