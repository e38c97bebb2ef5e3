"""Pictures of images with their boxes."""

from gluoncv.utils.viz import plot_bbox
from matplotlib.figure import Figure

from common.plots import save_figure


def plot_boxes(samples, names, path, columns=4):
    """Samples: (title, image, classes, scores or None, boxes)."""
    columns = min(columns, len(samples))
    rows = -(-len(samples) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.2 * rows), constrained_layout=True)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    # A name between two $ would be drawn as a formula.
    names = [name.replace("$", r"\$") for name in names]
    colours = {number: f"C{number % 10}" for number in range(len(names))}
    style = {"class_names": names, "colors": colours, "linewidth": 2, "fontsize": 7, "thresh": 0}
    for axes in grid:
        axes.set_axis_off()
    for axes, (title, image, classes, scores, boxes) in zip(grid, samples):
        plot_bbox(image, boxes, scores, classes, ax=axes, **style)
        axes.set_title(title, fontsize=8)
    save_figure(figure, path)
