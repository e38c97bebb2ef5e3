"""The pictures: predictions next to the truth, and a comparison of trainings."""

import matplotlib
import numpy as np
from gluoncv.utils.viz import get_color_pallete
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from common.images import denormalize
from common.plots import save_figure

TITLES = ("truth", "prediction")
PALETTES = {"ade20k": "ade20k", "citys": "citys"}
# Black, and ten colours that are easier to tell apart than those of Pascal VOC; then "ignored".
DIGITS = np.full((256, 3), 224, np.uint8)
DIGITS[:11] = np.vstack([np.zeros(3), np.multiply(matplotlib.colormaps["tab10"].colors, 255)])


def coloured(classes, dataset):
    """A palette image of class numbers."""
    if dataset == "digits":
        picture = Image.fromarray(np.array(classes).astype(np.uint8))
        picture.putpalette(DIGITS.tobytes())
        return picture
    return get_color_pallete(np.array(classes), PALETTES.get(dataset, "pascal_voc"))


def plot_predictions(samples, probabilities, dataset, names, path, columns=2):
    """Image, truth and prediction of each sample, with a legend of the classes that occur."""
    rows = -(-len(samples) // columns)
    figure = Figure(figsize=(6 * columns, 2 * rows + 0.6), constrained_layout=True)
    grid = figure.subplots(rows, 3 * columns, squeeze=False).reshape(-1, 3)
    for axes in grid.ravel():
        axes.set_axis_off()
    present = {}
    for (image, truth), found, axes in zip(samples, probabilities, grid):
        axes[0].imshow(np.clip(denormalize(image), 0, 1).transpose(1, 2, 0))
        predicted = found.argmax(axis=0)
        for panel, title, classes in zip(axes[1:], TITLES, (truth, predicted)):
            picture = np.array(coloured(classes, dataset).convert("RGB"))
            panel.imshow(picture, interpolation="nearest")
            panel.set_title(title, fontsize=8)
            for number in np.unique(classes):
                y, x = np.argwhere(classes == number)[0]
                present[int(number)] = picture[y, x] / 255
    # A name between two $ would be drawn as a formula.
    labels = {n: names[n].replace("$", r"\$") if n >= 0 else "ignored" for n in present}
    handles = [Patch(fc=present[n], ec="black", label=labels[n]) for n in sorted(present)[:40]]
    figure.legend(handles=handles, loc="outside lower center", ncol=6, fontsize=8)
    save_figure(figure, path)


def plot_comparison(results, path):
    """Curves of the mean over seeds with their range, and the last score of every seed.

    `results` is {kind: {seed: [(step, score)]}}.
    """
    figure = Figure(figsize=(9, 4), constrained_layout=True)
    curves, ends = figure.subplots(1, 2, width_ratios=(3, 2))
    for i, (kind, runs) in enumerate(results.items()):
        steps = [step for step, _ in next(iter(runs.values()))]
        scores = np.array([[score for _, score in run] for run in runs.values()])
        # Dashed lines keep coinciding ones visible.
        style = {"color": f"C{i}", "linestyle": ("-", "--", "-.", ":")[i % 4]}
        curves.plot(steps, scores.mean(axis=0), linewidth=2, label=kind, **style)
        curves.fill_between(steps, scores.min(axis=0), scores.max(axis=0), alpha=0.15, fc=f"C{i}")
        ends.plot(scores[:, -1], [-i] * len(scores), "o", color=f"C{i}", alpha=0.7)
        ends.plot(scores[:, -1].mean(), -i, "|", color="black", markersize=18)
    curves.set(xlabel="step", ylabel="mean IoU of the validation", ylim=(0, None))
    curves.legend(loc="upper left", fontsize=9)
    ends.set(xlabel="at the end: each seed, and the mean")
    ends.set_yticks([-i for i in range(len(results))], list(results))
    for axes in (curves, ends):
        axes.grid(alpha=0.25)
    save_figure(figure, path)
