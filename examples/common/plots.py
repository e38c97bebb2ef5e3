"""The curves of a training."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from common.files import replacing


def plot_curves(rows, measures, path):
    """The loss above, the measures of the validation below, from the rows of metrics.csv."""
    figure = Figure(figsize=(8, 6), constrained_layout=True)
    losses, scores = figure.subplots(2, 1, sharex=True)
    lines = [(scores, name, label) for name, label in measures.items()]
    for axes, name, label in [(losses, "loss", "loss"), *lines]:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points), "o-", markersize=3, label=label)
    losses.set(ylabel="training loss", yscale="log")
    scores.set(ylabel="validation", xlabel="step", ylim=(0, 1.02))
    if scores.lines:
        scores.legend(loc="lower right")
    for axes in (losses, scores):
        axes.grid(alpha=0.25)
    save_figure(figure, path)


def save_figure(figure, path):
    FigureCanvasAgg(figure)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)
