"""A user's own images and masks, in the folders of Pascal VOC.

FOLDER/JPEGImages/NAME.jpg (or .jpeg, .png)
FOLDER/SegmentationClass/NAME.png             palette or grey: the value is the class, 255 ignored
FOLDER/ImageSets/Segmentation/train.txt, val.txt      one NAME a line
FOLDER/classes.txt                            optional: one class name a line, background first
"""

import concurrent.futures
import functools
import hashlib
from pathlib import Path

import numpy as np

from data import IGNORED, SPLITS, DataError
from images import SUFFIXES, opened, read_image

LIST_FOLDER = Path("ImageSets", "Segmentation")
REMEDY = "replace it, or remove its name from its list"


class VOCFolder:
    """The lists, names and checked files of such a folder; `train` and `val` give the data sets.

    The number of classes is `classes` where given, or the number of lines of classes.txt, or else
    the masks' own, which must then hold each of 0, 1, ... somewhere. Every file is read once here,
    so that a bad one ends the run at its start and not in its middle.
    """

    def __init__(self, folder, classes=None, progress=lambda items, **_: items):
        self.folder = Path(folder)
        self._require_folders()
        self.lists = {split: self._read_list(split) for split in SPLITS}
        self._require_disjoint()
        self.images = {name: self._find_image(name) for name in sum(self.lists.values(), [])}
        self.names = self._read_class_names(classes)
        # Without a number given, what the masks hold decides.
        limit = len(self.names) if self.names else IGNORED
        self.sizes, self._labelled, values = self._check_files(limit, progress)
        if not self.names:
            self._require_contiguous(values)
            self.names = _numbered_names(len(values))
        # By the images of val.txt the best are chosen.
        text = "\n".join([str(len(self.names)), *self.lists["train"], "", *self.lists["val"]])
        self.fingerprint = "voc " + hashlib.sha256(text.encode()).hexdigest()[:16]

    def train(self, seed, size, brightness=False):
        self._require_labelled("train", None)
        return VOCCrops(self, seed, size, brightness)

    def val(self, size, images=None):
        self._require_labelled("val", images)
        return VOCTiles(self, size, images)

    def read(self, name):
        """The image (H, W, 3) and the mask (H, W) of that name, uint8."""
        return self._read_image(name), _read_mask(self.mask_path(name), len(self.names))

    def _read_image(self, name):
        return read_image(self.images[name], REMEDY)

    def mask_path(self, name):
        return self.folder / "SegmentationClass" / f"{name}.png"

    def _require_folders(self):
        wanted = ["JPEGImages", "SegmentationClass", str(LIST_FOLDER)]
        missing = [part for part in wanted if not (self.folder / part).is_dir()]
        if missing:
            raise DataError(
                f"--data {self.folder} "
                f"{'lacks ' + ', '.join(missing) if self.folder.is_dir() else 'is no folder'}: a "
                f"folder with {', '.join(wanted)} was expected, as in Pascal VOC's VOC2012"
            )

    def _read_list(self, split):
        path = self.folder / LIST_FOLDER / f"{split}.txt"
        if not path.exists():
            raise DataError(
                f"there is no {path}: it should name the images of the {split} split, one a line "
                "and without suffix"
            )
        names = _lines(path)
        if not names:
            raise DataError(
                f"{path} is empty: write the names of images there, one a line and without suffix"
            )
        return names

    def _require_disjoint(self):
        both = sorted(set(self.lists["train"]) & set(self.lists["val"]))
        if both:
            raise DataError(
                f"{self.folder / LIST_FOLDER}: {len(both)} images, {both[0]} among them, are in "
                "train.txt and in val.txt: what was trained on cannot validate; remove them from "
                "one of the two"
            )

    def _find_image(self, name):
        stem = self.folder / "JPEGImages" / name
        for suffix in SUFFIXES:
            path = stem.with_name(stem.name + suffix)
            if path.exists():
                return path
        raise DataError(
            f"there is no image {stem}.jpg (or {' or '.join(SUFFIXES[1:])}), which the lists "
            f"in {self.folder / LIST_FOLDER} name: add it, or remove {name} from its list"
        )

    def _read_class_names(self, classes):
        path = self.folder / "classes.txt"
        if not path.exists():
            return _numbered_names(classes) if classes else None
        names = tuple(_lines(path))
        if not 2 <= len(names) <= IGNORED:
            raise DataError(
                f"{path} names {len(names)} classes: 2 to {IGNORED} were expected, one a line, "
                "background first"
            )
        if classes is not None and classes != len(names):
            raise DataError(
                f"--classes is {classes}, but {path} names {len(names)}: leave --classes out, or "
                "mend the file"
            )
        return names

    def _check_files(self, limit, progress):
        """({name: (height, width)}, the names with a labelled pixel, {class: the first image that
        has it})."""
        sizes, labelled, values = {}, set(), {}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            results = pool.map(functools.partial(self._check_pair, limit=limit), self.images)
            for name, (size, present) in progress(
                zip(self.images, results),
                total=len(self.images),
                desc="checking the images",
                leave=False,
            ):
                sizes[name] = size
                if present:
                    labelled.add(name)
                for value in present:
                    values.setdefault(value, name)
        return sizes, labelled, values

    def _require_labelled(self, split, images):
        """`images`: how many of the list are used, or None for all."""
        names = self.lists[split]
        used = names[:images]
        if not self._labelled.isdisjoint(used):
            return
        which = "image" if len(used) == 1 else f"{len(used)} images"
        remedy = "label some"
        if len(used) < len(names):
            which = f"first {which}"
            remedy += ", or take more with --val-images"
        raise DataError(
            f"no pixel is labelled in the {which} of {self.folder / LIST_FOLDER / split}.txt: all "
            f"are {IGNORED}, which is ignored; {remedy}"
        )

    def _check_pair(self, name, limit):
        mask = _read_mask(self.mask_path(name), limit)
        height, width = self._read_image(name).shape[:2]
        if (height, width) != mask.shape:
            raise DataError(
                f"{self.mask_path(name)} is {mask.shape[1]}x{mask.shape[0]} pixels, but its image "
                f"{self.images[name]} is {width}x{height} as one sees it: they must be of one size"
            )
        present = np.flatnonzero(np.bincount(mask.ravel(), minlength=256))
        return mask.shape, [int(value) for value in present if value != IGNORED]

    def _require_contiguous(self, values):
        count = len(values)
        if count >= 2 and max(values) == count - 1:
            return
        shown = ", ".join(map(str, sorted(values)[:8])) + (", ..." if count > 8 else "")
        largest = self.mask_path(values[max(values)]) if values else self.folder
        raise DataError(
            f"the masks hold the values {shown or 'none'} ({largest} the largest; {IGNORED} is "
            "ignored), but classes are numbered 0, 1, 2, ... without a gap: mend the masks, or "
            "give the number of classes with --classes or classes.txt"
        )


class VOCCrops:
    """Crops of random place, half of them mirrored; each epoch has an order of its own."""

    def __init__(self, folder, seed, size, brightness):
        self.names, self.fingerprint = folder.names, folder.fingerprint
        self._folder = folder
        self._images = folder.lists["train"]
        self._key = (seed, SPLITS["train"])
        self._size = size
        self._brightness = brightness
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def __len__(self):
        return len(self._images)

    def _shuffled(self, epoch):
        # A third number keeps this generator apart from those of the samples.
        return np.random.default_rng((*self._key, epoch, 1)).permutation(len(self._images))

    def sample(self, index):
        epoch, position = divmod(index, len(self._images))
        image, mask = self._folder.read(self._images[self._order(epoch)[position]])
        rng = np.random.default_rng((*self._key, index))
        y, x = (rng.integers(max(side - self._size, 0) + 1) for side in mask.shape)
        image, mask = _cut(image, mask, y, x, self._size)
        if rng.integers(2):
            image, mask = image[:, :, ::-1], mask[:, ::-1]
        if self._brightness:
            image = image * np.float32(np.exp(rng.uniform(-0.6, 0.6)))
            image += np.float32(0.3 * rng.uniform(-0.6, 0.6))
        return image, mask


class VOCTiles:
    """The validation images in squares, so that each of their pixels is judged, and once."""

    def __init__(self, folder, size, images=None):
        self.names, self.fingerprint = folder.names, folder.fingerprint
        self._folder = folder
        self._size = size
        self.images = len(folder.lists["val"][:images])
        self._tiles = [
            (name, y, x)
            for name in folder.lists["val"][:images]
            for y in range(0, folder.sizes[name][0], size)
            for x in range(0, folder.sizes[name][1], size)
        ]
        # The tiles of an image follow each other.
        self._read = functools.lru_cache(maxsize=2)(folder.read)

    def __len__(self):
        return len(self._tiles)

    def sample(self, index):
        name, y, x = self._tiles[index]
        image, mask = self._read(name)
        # A last square that would reach over the edge is moved back, over pixels of another.
        top, left = (max(0, min(at, side - self._size)) for at, side in zip((y, x), mask.shape))
        image, label = _cut(image, mask, top, left, self._size)
        label[: y - top] = IGNORED
        label[:, : x - left] = IGNORED
        return image, label


def _cut(image, mask, y, x, size):
    """A square as float32 (3, size, size) and labels; beyond the edge lie ignored pixels."""
    image, mask = image[y : y + size, x : x + size], mask[y : y + size, x : x + size]
    cut = np.full((3, size, size), 0.5, np.float32)
    cut[:, : mask.shape[0], : mask.shape[1]] = image.transpose(2, 0, 1) / np.float32(255)
    label = np.full((size, size), IGNORED, np.uint8)
    label[: mask.shape[0], : mask.shape[1]] = mask
    return cut, label


def _lines(path):
    """The lines of a text that are not empty."""
    try:
        # Editors on Windows begin a text with a mark that is no part of its first line.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}): mend it") from None
    except UnicodeDecodeError:
        text = None
    # UTF-16 without its mark is UTF-8 full of zeros.
    if text is None or "\0" in text:
        raise DataError(f"{path} is no text in UTF-8: save it as UTF-8")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _numbered_names(count):
    return ("background", *(f"class {number}" for number in range(1, count)))


def _read_mask(path, classes):
    if not path.exists():
        raise DataError(
            f"there is no mask {path}, whose image is in a list: add it, or remove {path.stem} "
            "from its list"
        )
    with opened(path, REMEDY) as image:
        mask, mode = np.asarray(image), image.mode
    if mask.ndim != 2 or mask.dtype.kind not in "bui":
        raise DataError(
            f"{path} has the mode {mode}, but a palette or grey mask was expected, with the class "
            "as each pixel's value: save its palette's indices in place of its colours"
        )
    wrong = ((mask >= classes) & (mask != IGNORED)) | (mask < 0)
    if wrong.any():
        raise DataError(
            f"{path} holds the value {mask[wrong][0]}, but with {classes} classes 0 to "
            f"{classes - 1} were expected, and {IGNORED} for pixels to ignore: mend the mask, or "
            "give the number of classes with --classes or classes.txt"
        )
    return mask.astype(np.uint8)
