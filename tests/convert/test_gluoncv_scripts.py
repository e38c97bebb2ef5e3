"""gluoncv's training scripts, unchanged, with our layer in contrib's place.

The scripts are in gluoncv's repository alone, in none of its packages: GLUONCV_SCRIPTS is the
folder `scripts` of a checkout.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import programs
import pytest
from mxnet_launch import runner

SCRIPTS = os.environ.get("GLUONCV_SCRIPTS")
DRIVER = Path(__file__).resolve().parents[1] / "support" / "gluoncv_script.py"
SIZE = 96

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        SCRIPTS is None, reason="GLUONCV_SCRIPTS is not set to the folder scripts of gluon-cv"
    ),
]


class Script(NamedTuple):
    path: str
    arguments: str
    whole: str  # One device with the whole batch and a stock layer.
    split: str  # Two devices with ours.
    layers: int  # Of ours that are blocks.
    # Rounding of float32 grows in the other nets, most of all in gradients: only the first step is
    # compared.
    all_steps: bool = False
    convert: bool = False
    needs_coco: bool = False


RCNN = "--batch-size 2 -j 0 --epochs 1 --log-interval 1 --kv-store local --val-interval 9"
DETECTION = "--network mobilenet0.25 --batch-size 2 -j 0 --epochs 1 --log-interval 1 --lr 1e-5"
ALL = {
    # The loss is normalized per device.
    "segmentation": Script(
        "segmentation/train.py",
        "--dataset pascal_voc --workers 0 --base-size 64 --crop-size 64 --epochs 1 --batch-size 2 "
        "--log-interval 1 --no-val --syncbn",
        "--ngpus 1 --lr 1e-3 --weight-decay 1e-4",
        "--ngpus 2 --lr 5e-4 --weight-decay 2e-4",
        56,
        all_steps=True,
    ),
    "ssd": Script(
        "detection/ssd/train_ssd.py",
        f"{DETECTION} --data-shape 300 --syncbn",
        "--gpus 0",
        "--gpus 0,1",
        27,
        convert=True,
    ),
    "yolo3": Script(
        "detection/yolo/train_yolo3.py",
        f"{DETECTION} --data-shape 96 --no-random-shape --syncbn",
        "--gpus 0",
        "--gpus 0,1",
        47,
    ),
    "faster_rcnn": Script(
        "detection/faster_rcnn/train_faster_rcnn.py",
        f"--dataset coco --use-fpn --norm-layer syncbn {RCNN}",
        "--gpus 0",
        "--gpus 0,1",
        1,  # And those of the backbone, in a graph.
        needs_coco=True,
    ),
    # With several devices it fails with any layer.
    "mask_rcnn": Script(
        "instance/mask_rcnn/train_mask_rcnn.py",
        f"--network resnet18_v1b --use-fpn --norm-layer syncbn {RCNN}",
        "--gpus 0",
        "--gpus 0",
        4,
        needs_coco=True,
    ),
    "cifar": Script(
        "classification/cifar/train_cifar10.py",
        "--model cifar_resnet20_v1 -j 0 --num-epochs 2 --lr 0.01",
        "--num-gpus 1 --batch-size 4",
        "--num-gpus 2 --batch-size 2",
        0,  # It has no option for the layer.
        all_steps=True,
        convert=True,
    ),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home folder with four images in the layouts of VOC and COCO, and some of CIFAR."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("home")
    root = folder / ".mxnet" / "datasets"
    generator = np.random.default_rng(0)
    names = [f"{i:012d}" for i in range(4)]
    voc = [root / "voc" / "VOC2007", root / "voc" / "VOC2012"]
    coco = [root / "coco" / "train2017", root / "coco" / "val2017"]
    for base in voc:
        for kind in "Main", "Segmentation":
            (base / "ImageSets" / kind).mkdir(parents=True)
            for split in "trainval", "val", "test":
                (base / "ImageSets" / kind / f"{split}.txt").write_text("\n".join(names) + "\n")
        for kind in "JPEGImages", "SegmentationClass", "Annotations":
            (base / kind).mkdir()
    for base in [*coco, root / "coco" / "annotations", root / "cifar10"]:
        base.mkdir(parents=True)
    images, boxes = [], []
    for i, name in enumerate(names):
        x, y, width, height = generator.integers((5, 5, 30, 30), (30, 30, 50, 50)).tolist()
        image = generator.integers(0, 256, (SIZE, SIZE, 3)).astype("uint8")
        image[y : y + height, x : x + width] //= 4
        mask = np.zeros((SIZE, SIZE), "uint8")
        mask[y : y + height, x : x + width] = 1 + i
        image, mask = Image.fromarray(image), Image.fromarray(mask)
        box = {"xmin": x + 1, "ymin": y + 1, "xmax": x + width, "ymax": y + height}
        box = "".join(f"<{key}>{value}</{key}>" for key, value in box.items())
        for base in voc:
            image.save(base / "JPEGImages" / f"{name}.jpg", quality=95)
            mask.save(base / "SegmentationClass" / f"{name}.png")
            (base / "Annotations" / f"{name}.xml").write_text(
                f"<annotation><size><width>{SIZE}</width><height>{SIZE}</height></size><object>"
                f"<name>cat</name><difficult>0</difficult><bndbox>{box}</bndbox></object>"
                "</annotation>"
            )
        for base in coco:
            image.save(base / f"{name}.jpg", quality=95)
        corners = [x, y, x + width, y, x + width, y + height, x, y + height]
        images.append({"id": i, "file_name": f"{name}.jpg", "width": SIZE, "height": SIZE})
        boxes.append(
            {
                "id": i + 1,
                "image_id": i,
                "category_id": i + 1,
                "bbox": [x, y, width, height],
                "area": width * height,
                "iscrowd": 0,
                "segmentation": [corners],
            }
        )
    for base in coco:
        for image, name in zip(images, names):
            image["coco_url"] = f"http://localhost/{base.name}/{name}.jpg"
        categories = [{"id": i + 1, "name": name} for i, name in enumerate(coco_names())]
        text = json.dumps({"images": images, "annotations": boxes, "categories": categories})
        (root / "coco" / "annotations" / f"instances_{base.name}.json").write_text(text)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        rows = generator.integers(0, 256, (2, 3073)).astype("uint8")
        rows[:, 0] %= 10  # The class.
        (root / "cifar10" / f"{name}.bin").write_bytes(rows.tobytes())
    return folder


def coco_names():
    """gluoncv's, read in another process, as gluoncv changes how Pillow reads damaged images."""
    code = "from gluoncv.data import COCODetection as data; print(*data.CLASSES, sep=',')"
    command = [sys.executable, "-W", "ignore", "-c", f"import mxnet_compat; {code}"]
    return subprocess.check_output(command, text=True).splitlines()[-1].split(",")


def run(script, arguments, options, home, folder):
    """(the numbers of the lines with losses, the number of layers of ours)."""
    folder.mkdir()
    environment = {
        **os.environ,
        "HOME": str(home),
        "MXNET_CPU_TEMP_COPY": "4096",
        "GLUON_SYNCBN_TIMEOUT": "120",
        **({"CONVERT": "1"} if script.convert and options else {}),
    }
    environment.pop(runner.LAUNCH_ID, None)
    command = ["-m", "gluon_syncbn.launch", "-n", "1", *options, DRIVER]
    command += [Path(SCRIPTS) / script.path, *script.arguments.split(), *arguments.split()]
    done = programs.run(command, seconds=600, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    text = done.stdout + done.stderr
    lines = re.findall(r"(?:Batch \d+\], .*?samples/sec,|iteration|Epoch \d\] train=).*", text)
    lines = lines if script.all_steps else lines[:1]
    losses = re.findall(r"(?:Loss|L1|Entropy|Conf|Mask|loss)[= ](\d+\.\d+)", " ".join(lines))
    layers = int(re.findall(r"layers of ours: (\d+)", text)[0])
    return np.array(losses, float), layers


@pytest.mark.parametrize("name", ALL)
def test_two_devices_match_one_with_the_whole_batch(name, home, tmp_path):
    script = ALL[name]
    if script.needs_coco and importlib.util.find_spec("pycocotools") is None:
        pytest.skip("pycocotools is not installed, which gluoncv needs for COCO")
    split, layers = run(script, script.split, ["--replace-contrib"], home, tmp_path / "split")
    assert layers == script.layers
    whole, none = run(script, script.whole, [], home, tmp_path / "whole")
    assert none == 0 and len(whole)
    # Three digits are printed.
    np.testing.assert_allclose(split, whole, rtol=1e-3, atol=2e-3)
