"""Label images with a trained net: writes a mask and a colour overlay for each; see README.md.

Works without gluon_syncbn: with a checkpoint, with an exported symbol, and with an ONNX file.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from checkpoint import replacing
from console import reader_gone
from data import DataError, batches, readable
from images import SUFFIXES, read_image
from metrics import Confusion
from options import same_folder
from predictor import Predictor, run_config

BATCH = 20


def main(argv=None):
    options = _parser().parse_args(argv)
    try:
        if options.validate:
            return validate(options)
        if options.images is None:
            raise DataError("the folder of images is missing: predict.py IMAGES --model MODEL")
        return predict(options)
    except DataError as error:
        return f"{sys.argv[0]}: {error}"
    except BrokenPipeError:
        return reader_gone()
    except KeyboardInterrupt:
        return 130


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs="?", type=Path, help="a folder of .jpg and .png files")
    parser.add_argument(
        "--model",
        required=True,
        nargs="+",
        help="the folder of a run, best.ckpt, best.params, NAME-symbol.json or NAME.onnx",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("predictions"), help="folder to write (%(default)s)"
    )
    parser.add_argument(
        "--opacity", type=float, default=0.6, help="of the colours in overlays (%(default)s)"
    )
    parser.add_argument(
        "--validate",
        metavar="RUN",
        help="print the mean IoU of each --model over the validation images of this run instead",
    )
    return parser


def predict(options):
    """Write NAME.png, the classes as a palette image, and NAME-overlay.png for each image."""
    from plots import class_colours

    if len(options.model) > 1:
        raise DataError(f"--model names {len(options.model)} models: give one")
    if not 0 <= options.opacity <= 1:
        raise DataError(f"--opacity is {options.opacity}: give a number from 0 to 1")
    with readable(options.images):
        paths = _images_in(options.images)
    if same_folder(options.images, options.output):
        raise DataError(
            f"--output {options.output} is the folder of the photos themselves, which masks would "
            "replace: name another one"
        )
    outputs = _outputs(paths, options.output)
    predictor = Predictor(options.model[0])
    colours = class_colours(len(predictor.names))
    palette = (colours * 255).round().astype(np.uint8)
    with _writing_to(options.output):
        options.output.mkdir(parents=True, exist_ok=True)
    for path, (mask_path, overlay_path) in outputs.items():
        image = _read(path)
        [classes] = predictor.predict(image.transpose(2, 0, 1)[None])
        mask = Image.fromarray(classes, "P")
        mask.putpalette(palette.ravel().tolist())
        _save(mask, mask_path)
        strength = options.opacity * (classes > 0)[:, :, None]
        overlay = image * (1 - strength) + colours[classes] * strength
        overlay = Image.fromarray((overlay * 255).round().astype(np.uint8))
        _save(overlay, overlay_path)
        present = [predictor.names[i] for i in np.unique(classes) if i]
        print(f"{path.name}: {', '.join(present) or 'background'}")
    print(f"{len(paths)} masks and overlays in {options.output}")
    return 0


def _images_in(folder):
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder: give one with {', '.join(SUFFIXES)} files")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise DataError(f"{folder} has no {', '.join(SUFFIXES)} files: give a folder of images")
    stems = [path.stem for path in paths]
    for path in paths:
        if stems.count(path.stem) > 1:
            raise DataError(f"{folder} has several images named {path.stem}: rename all but one")
    return paths


def _outputs(paths, folder):
    """{image: (mask, overlay)}, the files to write, each of them once."""
    outputs, sources = {}, {}
    for path in paths:
        outputs[path] = folder / f"{path.stem}.png", folder / f"{path.stem}-overlay.png"
        for written in outputs[path]:
            other = sources.setdefault(written, path)
            if other != path:
                raise DataError(
                    f"{written} would be written twice, for {other.name} and for {path.name}: "
                    "rename one of the two"
                )
    return outputs


def _read(path):
    """(H, W, 3) from 0 to 1."""
    return read_image(path) / np.float32(255)


@contextlib.contextmanager
def _writing_to(folder):
    try:
        yield
    except OSError as error:
        raise DataError(
            f"--output {folder} cannot be written ({error}): name another folder, or mend it"
        ) from None


def _save(image, path):
    with _writing_to(path.parent), replacing(path) as file:
        image.save(file, format="png")


def validate(options):
    """Print a line of JSON for each model: its path and its mean IoU."""
    data = _validation_data(options.validate)
    for path in options.model:
        predictor = Predictor(path)
        confusion = Confusion(len(data.names))
        chunks = [range(i, min(i + BATCH, len(data))) for i in range(0, len(data), BATCH)]
        for images, labels in batches(data, chunks):
            confusion.add(labels, predictor.predict(images))
        print(json.dumps({"model": str(path), "mean_iou": confusion.mean_iou}), flush=True)
    return 0


def _validation_data(run):
    from setting import open_data

    config = run_config(run)
    _, data = open_data(argparse.Namespace(**config["arguments"]), lambda items, **_: items)
    return data


if __name__ == "__main__":
    sys.exit(main())
