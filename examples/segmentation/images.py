"""Image files as arrays, as one sees them: the same for training and for prediction."""

import contextlib
import struct

import numpy as np
from PIL import Image, ImageOps

from data import DataError

SUFFIXES = (".jpg", ".jpeg", ".png")


@contextlib.contextmanager
def opened(path, remedy="replace it"):
    """The image of a file; whatever fails in reading it becomes a DataError that names it."""
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image ({error}): {remedy}") from None


def read_image(path, remedy="replace it"):
    """(H, W, 3) uint8, upright; grey of 16 bits is brought to 8."""
    with opened(path, remedy) as image:
        image.load()
        image = _upright(image)
        if image.mode.startswith("I"):
            return _from_16_bits(np.asarray(image))
        if image.mode == "F":
            raise ValueError("its pixels are fractions, but integers of 8 or 16 bits were expected")
        return np.asarray(image.convert("RGB"))


def _upright(image):
    """A phone saves photos as its sensor was held, and beside them how to turn them."""
    try:
        return ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, struct.error):
        # Nothing legible is said, and so viewers do not turn it either.
        return image


def _from_16_bits(grey):
    # Pillow has these as I;16 or as I, depending on its version, and would cut off above 255.
    largest = 2**16 - 1
    if grey.min() < 0 or grey.max() > largest:
        raise ValueError(
            f"it holds the value {grey.max() if grey.max() > largest else grey.min()}, but 0 to "
            f"{largest} were expected"
        )
    grey = np.rint(grey / 257).astype(np.uint8)
    return np.stack([grey] * 3, axis=-1)
