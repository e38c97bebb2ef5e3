"""Find the objects on the images of a folder with a trained net, or evaluate it; see README.md."""

import csv
import io
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import gluon_syncbn  # noqa: F401  First: it lets MXNet run on today's Python.
import mxnet as mx
import numpy as np
from gluoncv.utils.metrics import VOCMApMetric

from common import runs, training
from common.files import replacing
from common.images import images_of, read_image
from data import RUNS, open_data
from model import get_model, tensor
from plots import plot_boxes

MOST = 100  # boxes that are kept of each image
THRESHOLDS = np.arange(0.5, 1, 0.05)


class Predictor:
    """The boxes (MOST, 6) of images (H, W, 3) uint8: class, score, x0, y0, x1, y1 in pixels,
    highest score first, then -1. `net` runs on the contexts, `resize` gives it its size."""

    def __init__(self, net, resize, contexts):
        self._net, self._resize, self._contexts = net, resize, contexts

    def __call__(self, images):
        outputs = []
        for i, image in enumerate(images):
            resized = self._resize(mx.nd.array(image, dtype=np.uint8))
            context = self._contexts[i % len(self._contexts)]
            found = self._net(tensor(resized).expand_dims(0).as_in_context(context))
            outputs.append((mx.nd.concat(*found, dim=-1)[0], resized.shape))
        return [self._boxes(*each, image) for each, image in zip(outputs, images)]

    def _boxes(self, found, size, image):
        found = found.astype("float32").asnumpy()
        found = found[np.argsort(-found[:, 1], kind="stable")[:MOST]]
        found = found[found[:, 0] >= 0]
        scale = np.array(image.shape[1::-1]) / np.array(size[1::-1])
        found[:, 2:] = found[:, 2:] * np.tile(scale, 2)
        found[:, 2:] = np.clip(found[:, 2:], 0, np.tile(image.shape[1::-1], 2))
        return np.pad(found, ((0, MOST - len(found)), (0, 0)), constant_values=-1)


def mean_precisions(found, boxes, names):
    """The mean average precision over the classes, as gluoncv counts it: the mean over the overlaps
    (intersection over union) 0.5, 0.55, ..., 0.95, and the one at 0.5."""
    scores = []
    for threshold in THRESHOLDS:
        metric = VOCMApMetric(threshold, list(names))
        for one, truth in zip(found, boxes):
            truth = truth[None]
            metric.update(
                one[None, :, 2:], one[None, :, :1], one[None, :, 1:2],
                truth[..., :4], truth[..., 4:5], truth[..., 5:],
            )  # fmt: skip
        values = np.array(metric.get()[1][:-1])
        # Classes that have no object are left out.
        scores.append(float(np.nanmean(values)) if np.isfinite(values).any() else 0.0)
    return float(np.mean(scores)), scores[0]


def evaluate(predictor, data, names, processes=None, chunk=8):
    """mean_precisions of a validation. Each process looks at its share of the images."""
    rank, size = (processes.rank, processes.size) if processes else (0, 1)
    each = -(-len(data) // size)
    own = range(rank * each, min(len(data), (rank + 1) * each))
    found = np.full((each, MOST, 6), -1.0)
    for start in range(0, len(own), chunk):
        images = [data[i][0] for i in own[start : start + chunk]]
        found[start : start + len(images)] = predictor(images)
    if processes:
        found = processes.gather("found", found).reshape(-1, MOST, 6)
    return mean_precisions(found[: len(data)], data.boxes, names)


def open_model(path):
    """(predictor, the options of its run) of a run, a checkpoint, or an exported symbol."""
    file, options = RUNS.open(path)
    detector = get_model(options, tuple(options.names))
    net = runs.load_net(RUNS, file, detector.net)
    return Predictor(net, detector.resize, [mx.cpu()]), options


def main(argv=None):
    parser = training.predict_parser(__doc__.splitlines()[0], "mAP")
    text = "the score from which boxes count (%(default)s)"
    parser.add_argument("--least", type=float, default=0.5, help=text)
    given = parser.parse_args(argv)
    predictor, options = open_model(given.model)
    if given.evaluate:
        options.root = given.root or options.root
        names, _, data = open_data(options)
        whole, half = evaluate(predictor, data, names)
        print(f"mAP 0.5 to 0.95 {whole:.4f}, mAP at 0.5 {half:.4f} over {len(data)} images")
        return
    paths = images_of(given.images, given.output)
    rows = [("image", "class", "score", "x0", "y0", "x1", "y1")]
    for path in paths:
        image = read_image(path)
        [found] = predictor([image])
        found = found[found[:, 1] >= given.least]
        sample = path.name, image, found[:, 0], found[:, 1], found[:, 2:]
        plot_boxes([sample], options.names, given.output / f"{path.stem}.png")
        for number, *numbers in found:
            rows.append((path.name, options.names[int(number)], *(f"{n:.4g}" for n in numbers)))
        print(f"{path.name}: {', '.join(options.names[int(number)] for number in found[:, 0])}")
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    with replacing(given.output / "boxes.csv") as file:
        file.write(text.getvalue().encode())


if __name__ == "__main__":
    training.run_main(main)
