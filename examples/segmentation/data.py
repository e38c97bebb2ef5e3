"""What is trained on: digits on photos, a folder in VOC layout, or a data set of gluoncv.

`open_data` gives the names of the classes, the training and the validation data. Both hold pairs of
an image (3, H, W) float32, normalized as gluoncv's pretrained nets expect, and its labels (H, W)
int32, where -1 is ignored. Training samples depend only on the seed and their index 0, 1, 2, ...,
so a run continues anywhere without the state of a generator.
"""

import concurrent.futures
from pathlib import Path

import numpy as np
from gluoncv import data as gluoncv_data
from mxnet import gluon
from PIL import Image

from common.digits import VALIDATION_SEED, DigitsOnPhotos
from common.files import InputError, read_lines, require
from common.images import SUFFIXES, Shuffled, as_input, read_by, read_image
from common.runs import Kind

RUNS = Kind("segmentation", pixel_accuracy="pixel accuracy", mean_iou="mean IoU")
DATASETS = ("digits", "folder", "voc", "ade20k", "coco", "citys")
IGNORED = -1


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
            # gluoncv reads trainval.txt for the training, and so trains on validation images.
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

    gluoncv's transform labels padding as class 0. It also draws from Python's global generator, so
    a run could not be resumed.
    """

    def __init__(self, pairs, seed, size):
        self._pairs, self._seed, self._size = pairs, seed, size
        self._order = Shuffled(len(pairs), seed)

    def __len__(self):
        return len(self._pairs)

    def __getitem__(self, index):
        image, mask = self._pairs[self._order[index]]
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

    README.md shows it. Each file is read once at the start, so that a bad one cannot end a training
    halfway.
    """

    def __init__(self, folder, split, names=None, classes=None):
        self._folder = Path(folder).expanduser()
        lists = self._folder / "ImageSets" / "Segmentation"
        for part in (self._folder / "JPEGImages", self._folder / "SegmentationClass", lists):
            require(part)
        self.keys = read_lines(lists / f"{split}.txt")
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
        mask = read_by(path, np.asarray).astype(np.int32)
        mask[mask == 255] = IGNORED
        return _checked(image, mask, len(self.names), path)

    def _read_names(self, classes):
        path = self._folder / "classes.txt"
        if path.exists():
            return tuple(read_lines(path))
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
