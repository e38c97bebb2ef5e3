"""The two pictures of a run: its curves, and predictions beside the truth."""

import colorsys

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter, MaxNLocator

from checkpoint import replacing
from data import IGNORED

DPI = 130
BACKGROUND = (0.13, 0.13, 0.15)
IGNORED_COLOUR = (1.0, 1.0, 1.0)
# Ten colours that stay apart on a dark ground.
FIRST_COLOURS = (
    "#4e9af1 #f28e2b #59c36a #e15759 #b07aff #f7d154 #ff9da7 #8c6d4f #5fd6d0 #c9c9c9".split()
)


def class_colours(classes):
    """(256, 3) colours by label: dark background, distinct classes, white where ignored."""
    colours = np.ones((256, 3))
    colours[0] = BACKGROUND
    for number in range(1, classes):
        if number <= len(FIRST_COLOURS):
            text = FIRST_COLOURS[number - 1]
            colours[number] = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        else:
            # Steps of the golden ratio never bring a hue close to one before.
            hue = number * 0.618034 % 1
            colours[number] = colorsys.hsv_to_rgb(hue, 0.45 + 0.25 * (number % 3), 0.95)
    colours[IGNORED] = IGNORED_COLOUR
    return colours


def plot_curves(rows, path, title):
    """Loss above, pixel accuracy and mean IoU below, from the rows of metrics.csv."""
    figure = Figure(figsize=(8, 6.5), constrained_layout=True)
    losses, scores = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, fontsize=11)
    steps = [row["step"] for row in rows if row["loss"] is not None]
    losses.plot(steps, [row["loss"] for row in rows if row["loss"] is not None], color="#3b6fb6")
    losses.set_yscale("log")
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
    losses.set_ylabel("training loss")
    validated = [row for row in rows if row["mean_iou"] is not None]
    for name, label, colour in (
        ("pixel_accuracy", "pixel accuracy", "#8a8a8a"),
        ("mean_iou", "mean IoU", "#d1495b"),
    ):
        values = [row[name] for row in validated]
        steps = [row["step"] for row in validated]
        scores.plot(steps, values, "o-", markersize=4, color=colour, label=label)
        if values:
            scores.annotate(
                f"{values[-1]:.3f}",
                (steps[-1], values[-1]),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=colour,
            )
    scores.set_ylim(0, 1.02)
    scores.set_xlabel("step")
    scores.set_ylabel("validation")
    scores.legend(loc="lower left", bbox_to_anchor=(0, 1), ncol=2, frameon=False)
    scores.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (losses, scores):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.06)
    _save(figure, path)


def plot_predictions(images, truths, predictions, names, path, title, sets_per_row=2):
    """Image, truth and prediction side by side, with a legend of the classes that occur."""
    colours = class_colours(len(names))
    zoom = max(1, 192 // truths.shape[-1])
    panels = [
        np.stack([np.clip(image.transpose(1, 2, 0), 0, 1), colours[truth], colours[prediction]])
        for image, truth, prediction in zip(images, truths, predictions)
    ]
    panels = np.stack(panels).repeat(zoom, axis=2).repeat(zoom, axis=3)
    side = panels.shape[2]

    # All panels go into one picture, as many axes would take far longer to draw.
    thin, wide = 8, 32
    sets_per_row = min(sets_per_row, len(images))
    rows = -(-len(images) // sets_per_row)
    step_y, step_x, step_set = side + thin, side + thin, 3 * (side + thin) + wide - thin
    canvas = np.ones((rows * step_y - thin, sets_per_row * step_set - wide, 3))
    for i, panels_of_set in enumerate(panels):
        y, x = i // sets_per_row * step_y, i % sets_per_row * step_set
        for j, panel in enumerate(panels_of_set):
            canvas[y : y + side, x + j * step_x : x + j * step_x + side] = panel

    present = np.union1d(truths, predictions)
    shown = [
        (label, name)
        for label, name in [*enumerate(names), (IGNORED, "ignored")]
        if label in present
    ]
    handles = [
        Patch(facecolor=colours[label], edgecolor="black", linewidth=0.5, label=label)
        for label, _ in shown
    ]
    height, width = canvas.shape[:2]
    in_legend_row = min(len(handles), max(3, width // 200))
    legend = 20 + 24 * -(-len(handles) // in_legend_row)
    left, head = 16, 64
    total_width, total_height = width + 2 * left, height + head + legend
    figure = Figure(figsize=(total_width / DPI, total_height / DPI))
    axes = figure.add_axes(
        [left / total_width, legend / total_height, width / total_width, height / total_height]
    )
    axes.imshow(canvas, interpolation="nearest")
    axes.set_axis_off()
    for i in range(sets_per_row):
        for j, name in enumerate(("image", "truth", "prediction")):
            axes.text(i * step_set + j * step_x + side / 2, -thin, name, ha="center", fontsize=9)
    drawn = figure.legend(
        handles=handles, loc="lower center", ncol=in_legend_row, frameon=False, fontsize=8
    )
    # A legend leaves out what begins with _, and text between two $ would be a formula.
    for text, (_, name) in zip(drawn.get_texts(), shown):
        text.set_text(name.replace("$", r"\$"))
    figure.suptitle(title, y=1 - 8 / total_height, va="top", fontsize=9)
    _save(figure, path)


def _save(figure, path):
    FigureCanvasAgg(figure)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=DPI)
