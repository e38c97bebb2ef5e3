"""Label the images of a folder with a trained net, or evaluate it; see README.md."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import gluon_syncbn  # noqa: F401  First: it lets MXNet run on today's Python.
import mxnet as mx
import numpy as np
from gluoncv.utils.metrics import SegmentationMetric
from mxnet import gluon
from PIL import Image

from common import runs, training
from common.files import InputError, replacing
from common.images import as_input, images_of, read_image
from data import RUNS, open_data
from model import get_model
from plots import coloured


class Predictor:
    """Class probabilities (classes, H, W) of images (3, H, W) of any size.

    `scores` maps a batch (N, 3, size, size) to class scores. Larger images are cut into windows
    that overlap by a third, smaller ones are padded; what `scales` and `flip` add is averaged.
    """

    def __init__(self, scores, size, batch=8, scales=(1,), flip=False):
        self._scores, self._size, self._batch = scores, size, batch
        self._scales, self._flip = scales, flip

    def __call__(self, images):
        """The probabilities of each image."""
        totals = [0] * len(images)
        for scale in self._scales:
            sides = [[max(1, round(side * scale)) for side in x.shape[1:]] for x in images]
            resized = [_resize(x, side) for x, side in zip(images, sides)]
            found = self._at_one_scale(resized)
            if self._flip:
                mirrored = self._at_one_scale([x[:, :, ::-1] for x in resized])
                found = [one + other[:, :, ::-1] for one, other in zip(found, mirrored)]
            totals = [t + _resize(p, x.shape[1:]) for t, p, x in zip(totals, found, images)]
        return [total / total.sum(axis=0) for total in totals]

    def _at_one_scale(self, images):
        windows = [(i, y, x) for i, image in enumerate(images) for y, x in self._corners(image)]
        totals = [None] * len(images)
        for start in range(0, len(windows), self._batch):
            chunk = windows[start : start + self._batch]
            batch = np.zeros((len(chunk), 3, self._size, self._size), np.float32)
            for place, (i, y, x) in zip(batch, chunk):
                part = images[i][:, y : y + self._size, x : x + self._size]
                place[:, : part.shape[1], : part.shape[2]] = part
            for probabilities, (i, y, x) in zip(_softmax(self._scores(batch)), chunk):
                if totals[i] is None:
                    totals[i] = np.zeros((len(probabilities), *images[i].shape[1:]), np.float32)
                target = totals[i][:, y : y + self._size, x : x + self._size]
                target += probabilities[:, : target.shape[1], : target.shape[2]]
        return [total / total.sum(axis=0) for total in totals]

    def _corners(self, image):
        stride = max(1, self._size * 2 // 3)
        last = [max(0, side - self._size) for side in image.shape[1:]]
        rows, columns = ([*range(0, end, stride), end] for end in last)
        return [(y, x) for y in rows for x in columns]


def _softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def _resize(array, side):
    if array.shape[1:] == tuple(side):
        return array
    array = mx.nd.array(array[None])
    return mx.nd.contrib.BilinearResize2D(array, height=side[0], width=side[1])[0].asnumpy()


def net_scores(net, contexts):
    """`scores` of a Predictor for a Gluon block."""

    def scores(batch):
        used = contexts[: len(batch)]
        parts = gluon.utils.split_and_load(mx.nd.array(batch), used, even_split=False)
        outputs = [net(part) for part in parts]
        outputs = [y[0] if isinstance(y, (list, tuple)) else y for y in outputs]
        found = np.concatenate([y.astype("float32").asnumpy() for y in outputs])
        return np.stack([_resize(one, batch.shape[2:]) for one in found])

    return scores


class MeanIoU(SegmentationMetric):
    """gluoncv's metric, but with the mean over the classes in truth or prediction. gluoncv counts a
    class in neither as an IoU of 0."""

    def get(self):
        accuracy, _ = super().get()
        inter, union = np.asarray(self.total_inter), np.asarray(self.total_union)
        seen = union > 0
        return float(accuracy), float((inter[seen] / union[seen]).mean() if seen.any() else 0)

    @property
    def counts(self):
        zeros = np.zeros(self.nclass)
        both = [self.total_inter + zeros, self.total_union + zeros]
        return np.concatenate([[self.total_correct, self.total_label], *both])

    @counts.setter
    def counts(self, counts):
        self.total_correct, self.total_label = counts[:2]
        self.total_inter, self.total_union = np.split(counts[2:], 2)


def evaluate(predictor, data, indices, classes, chunk=8):
    """The MeanIoU of these images of a validation data set."""
    metric = MeanIoU(classes)
    for start in range(0, len(indices), chunk):
        images, masks = zip(*(data[i] for i in indices[start : start + chunk]))
        for mask, probabilities in zip(masks, predictor(images)):
            metric.update(mx.nd.array(mask[None]), mx.nd.array(probabilities[None]))
    return metric


def open_model(path):
    """(scores, the options of its run, its batch) of a run, a checkpoint, or an exported file."""
    file, options = RUNS.open(path)
    if file.suffix == ".onnx":
        return _onnx_scores(file), options, 1
    net, _ = get_model(options, len(options.names))
    return net_scores(runs.load_net(RUNS, file, net), [mx.cpu()]), options, 8


def _onnx_scores(file):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda batch: session.run(None, {name: batch})[0]


def main(argv=None):
    parser = training.predict_parser(__doc__.splitlines()[0], "mean IoU")
    add = parser.add_argument
    add("--scales", default="1", help="to average over, such as 0.75,1,1.25 (%(default)s)")
    add("--flip", action="store_true", help="average with the mirrored image")
    given = parser.parse_args(argv)
    scores, options, batch = open_model(given.model)
    try:
        scales = [float(text) for text in given.scales.split(",")]
    except ValueError:
        raise InputError(f"--scales is {given.scales}: give numbers as in 0.75,1,1.25") from None
    predictor = Predictor(scores, options.size, batch, scales, given.flip)
    if given.evaluate:
        options.root = given.root or options.root
        _, _, data = open_data(options)
        metric = evaluate(predictor, data, range(len(data)), len(options.names))
        accuracy, score = metric.get()
        print(f"pixel accuracy {accuracy:.4f}, mean IoU {score:.4f} over {len(data)} images")
        return
    predict(predictor, given.images, given.output, options)


def predict(predictor, folder, output, options):
    """Write NAME.png, the classes as a palette image, and NAME-overlay.png for each image."""
    for path in images_of(folder, output):
        image = read_image(path)
        [found] = predictor([as_input(image)])
        classes = found.argmax(axis=0)
        mask = coloured(classes, options.dataset)
        overlay = Image.blend(Image.fromarray(image), mask.convert("RGB"), 0.5)
        for name, picture in ((path.stem, mask), (f"{path.stem}-overlay", overlay)):
            with replacing(output / f"{name}.png") as file:
                picture.save(file, format="png")
        print(f"{path.name}: {', '.join(options.names[i] for i in np.unique(classes))}")


if __name__ == "__main__":
    training.run_main(main)
