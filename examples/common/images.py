"""Reading images, and the normalization that gluoncv's pretrained nets expect."""

import functools

import gluoncv.data  # noqa: F401
import numpy as np
from PIL import Image, ImageFile, ImageOps

from common.files import InputError

# gluoncv.data sets it to True, which silently turns missing parts of truncated images grey.
ImageFile.LOAD_TRUNCATED_IMAGES = False

SUFFIXES = (".jpg", ".jpeg", ".png")
MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]


def normalize(image):
    """(3, H, W) from 0 to 1, as the nets take it."""
    return (image - MEAN) / DEVIATION


def as_input(image):
    """The same for (H, W, 3) uint8."""
    return normalize(image.transpose(2, 0, 1) / np.float32(255))


def denormalize(image):
    return image * DEVIATION + MEAN


def read_image(path):
    """(H, W, 3) uint8, turned as its EXIF data say."""
    return read_by(path, lambda image: np.asarray(ImageOps.exif_transpose(image).convert("RGB")))


def read_by(path, convert):
    """convert(image) of an image file."""
    try:
        with Image.open(path) as image:
            return convert(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        remedy = "replace it, or remove it from its list"
        raise InputError(f"{path} cannot be read as an image ({error}): {remedy}") from None


def images_of(folder, output):
    """The paths of a folder's images. `output` is to hold a picture of the same name for each."""
    if not folder or not folder.is_dir():
        raise InputError(f"there is no folder {folder}: name one with images, before --model")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths or len({path.stem for path in paths}) < len(paths):
        raise InputError(f"{folder} has no images, or two of one name: {', '.join(SUFFIXES)}")
    if output.exists() and output.samefile(folder):
        raise InputError(f"--output {output} is the folder of the images: name another one")
    return paths


class Shuffled:
    """The index in a data set of `length` for each training sample 0, 1, 2, ... It depends only on
    the seed and the sample, so a run continues anywhere without the state of a generator."""

    def __init__(self, length, seed):
        self._length, self._seed = length, seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def __getitem__(self, index):
        epoch, position = divmod(index, self._length)
        return self._order(epoch)[position]

    def _shuffled(self, epoch):
        return np.random.default_rng((self._seed, epoch)).permutation(self._length)
