"""What is trained on: pictures and the boxes of the objects on them, read by gluoncv.

`open_data` gives the names of the classes, the training and the validation data. Both hold pairs of
an image (H, W, 3) uint8 and its boxes (objects, 6) float32: x0, y0, x1, y1 in pixels, the last one
included, the class, and whether it is too difficult to count.
"""

import concurrent.futures
import contextlib
import io
import json
import os
import random
import shutil
import tempfile
import threading
from pathlib import Path
from xml.etree import ElementTree

import mxnet as mx
import numpy as np
from gluoncv import data as gluoncv_data
from mxnet import gluon
from PIL import Image

from common.digits import VALIDATION_SEED, DigitsOnPhotos
from common.files import InputError, read_lines, require
from common.images import Shuffled, read_image
from common.runs import Kind

RUNS = Kind("detection", map_50_95="mAP 0.5 to 0.95", map_50="mAP at 0.5")
DATASETS = ("digits", "digits-coco", "folder", "voc", "coco")
DIGITS = tuple(f"digit {digit}" for digit in range(10))


def open_data(options):
    """(names, training, validation)."""
    name, root = options.dataset, options.root
    if name.startswith("digits"):
        root = digits_folder(options)
    elif name == "folder" and not root:
        raise InputError("--dataset folder needs --root: name the folder, in VOC layout")
    root = Path(root or f"~/.mxnet/datasets/{name}").expanduser()
    if name.endswith("coco"):
        names = _coco_names(root / "annotations" / "instances_val2017.json")
        train, val = (CocoPictures(root, part, names) for part in ("train2017", "val2017"))
    elif name == "voc":
        names, years = gluoncv_data.VOCDetection.CLASSES, (2007, 2012)
        train = VocPictures(root, [(f"VOC{year}", "trainval") for year in years], names, False)
        val = VocPictures(root, [("VOC2007", "test")], names, False)
    else:
        names = tuple(line.lower() for line in read_lines(root / "classes.txt"))
        train, val = (VocPictures(root, [("", part)], names) for part in ("train", "val"))
        both = sorted(set(train.paths) & set(val.paths))
        if both:
            raise InputError(f"{both[0]} is in train.txt and val.txt: remove it from one")
    train.remove_empty()
    val.cut(options.val_images)
    return names, train, val


class Pictures(gluon.data.Dataset):
    """Images and boxes; `paths` and `boxes` are lists."""

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image, boxes = read_image(self.paths[index]), self.boxes[index]
        height, width = image.shape[:2]
        if len(boxes) and (boxes[:, 2].max() > width or boxes[:, 3].max() > height):
            raise InputError(
                f"{self.paths[index]} is {width} x {height} pixels, but a box of its annotation "
                f"ends at {tuple(boxes[:, 2:4].max(axis=0))}: correct the one or the other"
            )
        return image, boxes

    def remove_empty(self):
        """Remove images without objects, as there is nothing to train on."""
        kept = [i for i, boxes in enumerate(self.boxes) if len(boxes)]
        self.paths, self.boxes = ([array[i] for i in kept] for array in (self.paths, self.boxes))
        if not kept:
            raise InputError("no image for the training has a box: annotate some")

    def cut(self, length):
        self.paths, self.boxes = self.paths[:length], self.boxes[:length]


class VocPictures(Pictures):
    """A folder in the layout of Pascal VOC; README.md shows it. Each file is read once at the
    start, so that a bad one cannot end a training halfway. Without `check`, boxes that are wrong or
    of an unknown class are left out."""

    def __init__(self, root, lists, names, check=True):
        for folder, part in lists:
            for name in ("JPEGImages", "Annotations"):
                require(root / folder / name)
            read_lines(root / folder / "ImageSets" / "Main" / f"{part}.txt")
        reader = type("Reader", (gluoncv_data.VOCDetection,), {"CLASSES": names})
        reader = reader(str(root), lists, preload_label=False)
        self.paths = [Path(reader._image_path.format(*item)) for item in reader._items]
        self.boxes = []
        for i, item in enumerate(reader._items):
            path = Path(reader._anno_path.format(*item))
            if check:
                _check_annotation(path, names)
            self.boxes.append(reader._load_label(i).reshape(-1, 6).astype(np.float32))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for _ in pool.map(self.__getitem__, range(len(self))):
                pass


def _check_annotation(path, names):
    """Reject boxes outside the image or of an unknown class, which gluoncv leaves out."""
    try:
        root = ElementTree.parse(path).getroot()
        width, height = (int(root.find(f"size/{side}").text) for side in ("width", "height"))
        for found in root.iter("object"):
            int(found.find("difficult").text)
            name = found.find("name").text.strip().lower()
            sides = ("xmin", "ymin", "xmax", "ymax")
            x0, y0, x1, y1 = (float(found.find(f"bndbox/{side}").text) for side in sides)
            if name not in names:
                expected = ", ".join(names[:20])
                raise InputError(f"{path}: the class {name} is none of {expected}: correct it")
            if not (1 <= x0 < x1 <= width and 1 <= y0 < y1 <= height):
                box = f"the box {x0:g}, {y0:g}, {x1:g}, {y1:g} of a {name}"
                size = f"1 to {width} and 1 to {height}"
                raise InputError(f"{path}: {box} is empty or not within {size}: correct it")
    except (OSError, ElementTree.ParseError, AttributeError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read as an annotation of Pascal VOC ({error}): each object needs "
            "name, difficult (0 or 1) and bndbox, and the image its size"
        ) from None


class CocoPictures(Pictures):
    """A folder in the layout of COCO."""

    def __init__(self, root, part, names):
        path = root / "annotations" / f"instances_{part}.json"
        require(root / part)
        reader = type("Reader", (gluoncv_data.COCODetection,), {"CLASSES": list(names)})
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                # Images without objects count in the validation.
                reader = reader(str(root), path.stem, skip_empty=False, use_crowd=False)
        except (OSError, ValueError, KeyError, AssertionError, TypeError) as error:
            raise InputError(
                f"{path} cannot be read as annotations of COCO ({type(error).__name__}: {error}): "
                f"it needs images, annotations and the categories {', '.join(names[:20])}"
            ) from None
        self.paths = [Path(item) for item in reader._items]
        self.boxes = []
        for label in reader._labels:
            label = np.array(label, np.float32)[:, :5]
            label = label[label[:, 4] >= 0]
            self.boxes.append(np.pad(label, ((0, 0), (0, 1))))
        self._check_boxes(path, reader.coco)

    def _check_boxes(self, path, coco):
        """Reject boxes outside their image, which gluoncv cuts."""
        for found in coco.anns.values():
            x, y, width, height = found["bbox"]
            image = coco.imgs.get(found["image_id"])
            if image is None:
                text = f"annotation {found['id']} is of image {found['image_id']}"
                raise InputError(f"{path}: {text}, which is not there: correct it")
            right, bottom = image["width"], image["height"]
            # COCO's own boxes exceed the edge by fractions of a pixel.
            if min(x, y) < -1 or x + width > right + 1 or y + height > bottom + 1:
                raise InputError(
                    f"{path}: the box {found['bbox']} of annotation {found['id']} is not within "
                    f"its image, {right} x {bottom}: correct it"
                )


def _coco_names(path):
    try:
        categories = json.loads(path.read_text())["categories"]
        return tuple(found["name"] for found in sorted(categories, key=lambda found: found["id"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): name with --root the folder that holds annotations, "
            "train2017 and val2017"
        ) from None


class Samples(gluon.data.Dataset):
    """What a net trains on: `sample` of the pictures, shuffled. gluoncv's augmentation draws from
    the global generators, so each sample seeds them, and one is augmented at a time."""

    _lock = threading.Lock()

    def __init__(self, pictures, seed, sample):
        self._pictures, self._seed, self._sample = pictures, seed, sample
        self._order = Shuffled(len(pictures), seed)

    def __len__(self):
        return len(self._pictures)

    def __getitem__(self, index):
        image, boxes = self._pictures[self._order[index]]
        with self._lock:
            seed = np.random.SeedSequence((self._seed, index)).generate_state(1)[0]
            random.seed(int(seed))
            np.random.seed(seed)
            return self._sample(mx.nd.array(image, dtype=np.uint8), boxes)


def digits_folder(options):
    """The folder of the digits on photos, in the layout of VOC or COCO, made when first used."""
    layout = "coco" if options.dataset.endswith("coco") else "voc"
    parent = Path(options.root or "runs/data").absolute()
    folder = parent / f"digits-{layout}-{options.size}-{options.seed}"
    if folder.is_dir():
        return folder
    train = DigitsOnPhotos("train", options.seed, options.size, images=2000)
    val = DigitsOnPhotos("val", VALIDATION_SEED, options.size)
    write = {"voc": write_voc, "coco": write_coco}[layout]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=parent))
        new.chmod(0o755)
        try:
            for part, data in (("train", train), ("val", val)):
                write(new, part, (data.sample(i) for i in range(len(data))))
            with contextlib.suppress(OSError):  # Another process was faster.
                os.rename(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error}): name another --root") from None
    return folder


def write_voc(folder, part, samples):
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("\n".join(DIGITS) + "\n")
    keys = []
    for image, label, boxes in samples:
        keys.append(f"{part}-{len(keys):05}")
        _write_image(folder / "JPEGImages" / f"{keys[-1]}.jpg", image)
        root = ElementTree.Element("annotation")
        size = ElementTree.SubElement(root, "size")
        for name, value in (("width", label.shape[1]), ("height", label.shape[0]), ("depth", 3)):
            ElementTree.SubElement(size, name).text = str(value)
        for *ends, digit in boxes:
            found = ElementTree.SubElement(root, "object")
            ElementTree.SubElement(found, "name").text = DIGITS[digit]
            ElementTree.SubElement(found, "difficult").text = "0"
            box = ElementTree.SubElement(found, "bndbox")
            for name, value in zip(("xmin", "ymin", "xmax", "ymax"), ends):
                ElementTree.SubElement(box, name).text = str(value + 1)  # Its first pixel is 1.
        path = folder / "Annotations" / f"{keys[-1]}.xml"
        ElementTree.ElementTree(root).write(path)
    (folder / "ImageSets" / "Main" / f"{part}.txt").write_text("\n".join(keys) + "\n")


def write_coco(folder, part, samples):
    part = f"{part}2017"
    images, annotations = [], []
    for path in (folder / part, folder / "annotations"):
        path.mkdir(exist_ok=True)
    for image, label, boxes in samples:
        height, width = label.shape
        name = f"{len(images):012}.jpg"
        _write_image(folder / part / name, image)
        entry = {"id": len(images), "file_name": name, "coco_url": f"{part}/{name}"}
        images.append({**entry, "width": width, "height": height})
        for x0, y0, x1, y1, digit in boxes:
            box = [x0, y0, x1 - x0 + 1, y1 - y0 + 1]
            entry = {"id": len(annotations) + 1, "image_id": images[-1]["id"], "bbox": box}
            entry.update(area=box[2] * box[3], category_id=digit + 1, iscrowd=0)
            annotations.append(entry)
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(DIGITS)]
    whole = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(whole))


def _write_image(path, image):
    image = np.round(255 * image.transpose(1, 2, 0)).astype(np.uint8)
    Image.fromarray(image).save(path, quality=95)
