"""Pixel accuracy and mean intersection over union, from a confusion matrix."""

import numpy as np

from data import IGNORED


class Confusion:
    """Counts of pixels by true and predicted class, `matrix[truth, prediction]`.

    Pixels whose truth is 255 are left out. The IoU of a class is
    pixels in both / pixels in either. A class in neither truth nor prediction has none (NaN) and
    does not enter the mean; a class that was only predicted has 0, and does.
    """

    def __init__(self, classes):
        self.matrix = np.zeros((classes, classes), np.int64)

    def add(self, truth, prediction):
        """Count arrays of equal shape; a class number out of range is a ValueError."""
        if truth.shape != prediction.shape:
            raise ValueError(
                f"truth has shape {truth.shape}, but prediction {prediction.shape}; "
                "they must be equal"
            )
        classes = len(self.matrix)
        valid = truth != IGNORED
        truth = truth[valid].astype(np.int64)
        prediction = prediction[valid].astype(np.int64)
        for what, array in (("truth", truth), ("prediction", prediction)):
            if array.size and not 0 <= array.min() <= array.max() < classes:
                raise ValueError(
                    f"{what} holds classes {array.min()} to {array.max()}, but there are "
                    f"{classes}: 0 to {classes - 1}, or {IGNORED} for an ignored pixel of the truth"
                )
        counts = np.bincount(truth * classes + prediction, minlength=classes * classes)
        self.matrix += counts.reshape(classes, classes)

    @property
    def pixel_accuracy(self):
        total = self.matrix.sum()
        return float(np.trace(self.matrix) / total) if total else float("nan")

    @property
    def class_iou(self):
        both = np.diag(self.matrix)
        either = self.matrix.sum(0) + self.matrix.sum(1) - both
        return np.where(either > 0, both / np.maximum(either, 1), np.nan)

    @property
    def mean_iou(self):
        iou = self.class_iou
        iou = iou[~np.isnan(iou)]
        return float(iou.mean()) if iou.size else float("nan")
