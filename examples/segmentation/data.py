"""What is trained on: digits on photos, a folder in VOC layout, or a data set of gluoncv.

`open_data` gives the names of the classes, the training and the validation data. Both hold pairs of
an image (3, H, W) float32, normalized as gluoncv's pretrained nets expect, and its labels (H, W)
int32, where -1 is ignored. Training samples depend on the seed and their index 0, 1, 2, ... alone,
so a run continues anywhere without having stored the state of a generator.
"""

import concurrent.futures
import contextlib
import functools
import os
from pathlib import Path

import numpy as np
from gluoncv import data as gluoncv_data
from mxnet import gluon
from PIL import Image, ImageFile, ImageOps

# gluoncv.data has set it, with which the missing part of a truncated image is silently grey.
ImageFile.LOAD_TRUNCATED_IMAGES = False

DATASETS = ("digits", "folder", "voc", "ade20k", "coco", "citys")
IGNORED = -1
SUFFIXES = (".jpg", ".jpeg", ".png")
MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]
# Validation images are the same for every --seed, so that runs can be compared.
VALIDATION_SEED = 0


class InputError(Exception):
    """What the user gave cannot work; the text says what came, where, and what to do."""


def count(text):
    """A whole number from 1, for argparse."""
    if int(text) < 1:
        raise ValueError
    return int(text)


@contextlib.contextmanager
def replacing(path):
    """A binary file to write that takes the place of `path` once it is complete."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            # The name must not point to the new file before its contents are on the disk.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        remedy = "make room; --resume continues a run from its last checkpoint"
        raise InputError(f"{path} cannot be written ({error}): {remedy}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def normalize(image):
    """(3, H, W) from 0 to 1, as the nets take it."""
    return (image - MEAN) / DEVIATION


def as_input(image):
    """The same for (H, W, 3) uint8."""
    return normalize(image.transpose(2, 0, 1) / np.float32(255))


def denormalize(image):
    return image * DEVIATION + MEAN


def open_data(options):
    """(names, training, validation)."""
    name, root, size = options.dataset, options.root, options.size
    if name == "digits":
        train = DigitsOnPhotos("train", options.seed, size)
        val = DigitsOnPhotos("val", VALIDATION_SEED, size, options.val_images)
        return DigitsOnPhotos.names, train, val
    if name == "folder" and not root:
        raise InputError("--dataset folder needs --root: name the folder, in VOC layout")
    if name in ("folder", "voc"):
        names = None
        if name == "voc":
            # gluoncv reads trainval.txt for the training, and so trains on the validation.
            names = gluoncv_data.VOCSegmentation.CLASSES
            root = Path(root or "~/.mxnet/datasets/voc", "VOC2012")
        train, val = (VOCFolder(root, part, names, options.classes) for part in ("train", "val"))
        both = sorted(set(train.keys) & set(val.keys))
        if both:
            raise InputError(f"{root}: {both[0]} is in train.txt and val.txt: remove it from one")
    else:
        train, val = (GluonCVPairs(name, root, part) for part in ("train", "val"))
    crops = Crops(train, options.seed, size)
    whole = val.take(options.val_images).transform(lambda image, mask: (as_input(image), mask))
    return train.names, crops, whole


class Crops:
    """Training samples: mirrored, scaled so that the longer side is 0.54 to 2.17 times the size,
    and cut at random; each epoch is shuffled.

    gluoncv's transform labels what it pads as class 0, and draws from Python's global generator,
    with which a run could not be resumed.
    """

    def __init__(self, pairs, seed, size):
        self._pairs, self._seed, self._size = pairs, seed, size
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def __len__(self):
        return len(self._pairs)

    def _shuffled(self, epoch):
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._pairs))

    def __getitem__(self, index):
        epoch, position = divmod(index, len(self._pairs))
        image, mask = self._pairs[self._order(epoch)[position]]
        # A third number keeps this generator apart from those of the shuffling.
        rng = np.random.default_rng((self._seed, index, 1))
        factor = self._size * 520 / 480 * rng.uniform(0.5, 2) / max(mask.shape)
        height, width = (max(1, round(side * factor)) for side in mask.shape)
        image = np.asarray(Image.fromarray(image).resize((width, height), Image.BILINEAR))
        mask = np.asarray(Image.fromarray(mask).resize((width, height), Image.NEAREST))
        size = self._size
        y, x = (rng.integers(max(side - size, 0) + 1) for side in mask.shape)
        mask = mask[y : y + size, x : x + size]
        label = np.full((size, size), IGNORED, np.int32)
        label[: mask.shape[0], : mask.shape[1]] = mask
        cut = np.zeros((3, size, size), np.float32)
        part = as_input(image[y : y + size, x : x + size])
        cut[:, : part.shape[1], : part.shape[2]] = part
        return (cut[:, :, ::-1].copy(), label[:, ::-1].copy()) if rng.integers(2) else (cut, label)


class VOCFolder(gluon.data.Dataset):
    """Images (H, W, 3) uint8 and masks (H, W) int32 of a folder in the layout of Pascal VOC.

    README.md shows it. Each file is read once at the start, so that a bad one ends no training in
    its middle.
    """

    def __init__(self, folder, split, names=None, classes=None):
        self._folder = Path(folder).expanduser()
        lists = self._folder / "ImageSets" / "Segmentation"
        for part in (self._folder / "JPEGImages", self._folder / "SegmentationClass", lists):
            require(part)
        self.keys = _lines(lists / f"{split}.txt")
        self.names = names or self._read_names(classes)
        self._images = [self._find_image(key) for key in self.keys]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for _ in pool.map(self.__getitem__, range(len(self))):
                pass

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        path = self._folder / "SegmentationClass" / f"{self.keys[index]}.png"
        image = read_image(self._images[index])
        mask = _read(path, np.asarray).astype(np.int32)
        mask[mask == 255] = IGNORED
        return _checked(image, mask, len(self.names), path)

    def _read_names(self, classes):
        path = self._folder / "classes.txt"
        if path.exists():
            return tuple(_lines(path))
        if not classes:
            raise InputError(f"there is no {path}: write a class name a line, or give --classes N")
        return ("background", *(f"class {number}" for number in range(1, classes)))

    def _find_image(self, key):
        paths = [self._folder / "JPEGImages" / (key + suffix) for suffix in SUFFIXES]
        found = [path for path in paths if path.exists()]
        if not found:
            raise InputError(f"there is no {paths[0]}: add it, or remove {key} from the lists")
        return found[0]


class GluonCVPairs(gluon.data.Dataset):
    """Images (H, W, 3) uint8 and masks (H, W) int32 of one of gluoncv's data sets."""

    def __init__(self, name, root, split):
        kind, default, inside = {
            "ade20k": ("ADE20KSegmentation", "ade", "ADEChallengeData2016/images/training"),
            "coco": ("COCOSegmentation", "coco", "annotations"),
            "citys": ("CitySegmentation", "citys", "leftImg8bit/train"),
        }[name]
        kind = getattr(gluoncv_data, kind)
        root = Path(root or Path("~/.mxnet/datasets", default)).expanduser()
        require(root / inside)
        try:
            self._data = kind(root=str(root), split=split, mode="testval")
        except Exception as error:  # Of many kinds, from whatever is missing.
            raise InputError(f"--dataset {name} in {root} cannot be opened: {error}") from error
        self.names = kind.CLASSES
        # They list folders in the order of the disk, which differs between machines.
        where = getattr(self._data, "images", range(len(self._data)))
        self._order = sorted(range(len(where)), key=where.__getitem__)
        self._where = f"--dataset {name} in {root}"

    def __len__(self):
        return len(self._order)

    def __getitem__(self, index):
        where = f"{self._where}: image {index} of its sorted list"
        try:
            image, mask = self._data[self._order[index]]
        except (OSError, SyntaxError, ValueError, AssertionError) as error:
            raise InputError(f"{where} or its mask cannot be read ({error}): replace it") from None
        return _checked(image.asnumpy().astype(np.uint8), mask.asnumpy(), len(self.names), where)


def read_image(path):
    """(H, W, 3) uint8, turned as its EXIF data say."""
    return _read(path, lambda image: np.asarray(ImageOps.exif_transpose(image).convert("RGB")))


def _read(path, convert):
    try:
        with Image.open(path) as image:
            return convert(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        remedy = "replace it, or remove it from its list"
        raise InputError(f"{path} cannot be read as an image ({error}): {remedy}") from None


def _checked(image, mask, classes, where):
    if image.shape[:2] != mask.shape:
        raise InputError(
            f"{where}: the mask has the shape {mask.shape}, but its image {image.shape[:2]}: save "
            "it in the size of the image, with a class, not a colour, in each pixel"
        )
    if mask.min() < IGNORED or mask.max() >= classes:
        came = f"the mask holds class {mask.max()}, but 0 to {classes - 1} were expected"
        raise InputError(f"{where}: {came}: correct it, or the number of classes")
    return image, mask


def require(folder):
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: name with --root the one that holds it")


def _lines(path):
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): write one name a line there") from None
    lines = [line for line in lines if line]
    if not lines:
        raise InputError(f"{path} is empty: write one name a line there")
    return lines


class DigitsOnPhotos:
    """Real handwritten digits on crops of real photos; labels: 0 background, digit + 1.

    Both come with scikit-learn. Two to five bright digits of 20 to 32 pixels lie anywhere on a crop
    dimmed to half; from the third on, a digit that finds no free place is left out. A fifth of the
    digits and a quarter of each photo are kept for validation.
    """

    names = ("background",) + tuple(f"digit {digit}" for digit in range(10))
    DIGIT_SIZES = range(20, 33)
    DIGITS_PER_IMAGE = range(2, 6)
    EPOCH = {"train": 1000, "val": 200}
    PLACES = 20  # that are tried for each digit
    INK = 0.3  # of full strength: what is fainter stays background

    def __init__(self, split, seed, size=64, images=None):
        from sklearn.datasets import load_digits, load_sample_images

        self._key = (seed, list(self.EPOCH).index(split))
        self._images = images or self.EPOCH[split]
        self._size = size

        digits = load_digits()
        # The file goes writer by writer, so a fifth of each stretch is held back.
        held_back = np.arange(len(digits.images)) % 5 == 0
        chosen = held_back if split == "val" else ~held_back
        self._digits = digits.images[chosen].astype(np.float32) / 16
        self._classes = digits.target[chosen].astype(np.int32) + 1
        self._enlarge = {n: _interpolation(8, n) for n in self.DIGIT_SIZES}

        self._photos = []
        for photo in load_sample_images().images:
            dimmed = photo.transpose(2, 0, 1) / np.float32(510)
            quarters = np.array_split(dimmed, 4, axis=2)
            self._photos += [quarters[1]] if split == "val" else quarters[:1] + quarters[2:]
        largest = min(min(photo.shape[1:]) for photo in self._photos)
        if not max(self.DIGIT_SIZES) <= size <= largest:
            raise InputError(
                f"--size is {size}, but digits on photos come in {max(self.DIGIT_SIZES)} to "
                f"{largest} pixels: choose a size in between"
            )

    def __len__(self):
        return self._images

    def __getitem__(self, index):
        rng = np.random.default_rng(self._key + (index,))
        photo = self._photos[rng.integers(len(self._photos))]
        y, x = (rng.integers(side - self._size + 1) for side in photo.shape[1:])
        image = photo[:, y : y + self._size, x : x + self._size]
        image = (image[:, :, ::-1] if rng.integers(2) else image).copy()
        label = np.zeros((self._size, self._size), np.int32)
        pasted = 0
        for _ in range(rng.choice(self.DIGITS_PER_IMAGE)):
            pasted += self._paste(rng, image, label, anywhere=pasted < min(self.DIGITS_PER_IMAGE))
        return normalize(image), label

    def _paste(self, rng, image, label, anywhere):
        """Draw a digit where it covers no other; without `anywhere` leave out one with no room."""
        which = rng.integers(len(self._digits))
        side = rng.choice(self.DIGIT_SIZES)
        colour = rng.uniform(0.7, 1, (3, 1, 1)).astype(np.float32)
        places = rng.integers(self._size - side + 1, size=(self.PLACES, 2))
        covered = [(label[y : y + side, x : x + side] > 0).sum() for y, x in places]
        best = np.argmin(covered)
        if covered[best] and not anywhere:
            return False
        y, x = places[best]
        enlarge = self._enlarge[side]
        # In 256 steps, so that no library's rounding changes the data.
        ink = np.round(256 * (enlarge @ self._digits[which] @ enlarge.T)) / 256
        region = image[:, y : y + side, x : x + side]
        region += (colour - region) * ink
        label[y : y + side, x : x + side][ink > self.INK] = self._classes[which]
        return True


def _interpolation(old, new):
    """The matrix (new, old) that enlarges a line of `old` pixels linearly, edges held."""
    positions = (np.arange(new) + 0.5) * old / new - 0.5
    columns = [np.interp(positions, np.arange(old), unit) for unit in np.eye(old)]
    return np.stack(columns, axis=1).astype(np.float32)
