"""examples/detection: both layouts, training, resuming, bad input, prediction, export."""

import json
import os
import xml.etree.ElementTree as ElementTree

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from example_modules import load_example
from mxnet import autograd
from PIL import Image
from runs import contexts
from training_runs import Example, cut, rows_of

example = load_example("detection")
programs = Example("detection", example)
InputError = example.train.InputError
SMALL = "--backbone mobilenet0.25 --size 64 --batch 4 --steps 20 --validate-every 10".split()
SMALL += "--log-every 5 --val-images 6 --lr 0.002".split()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of digits in both layouts, with few images."""
    folder = tmp_path_factory.mktemp("digits")
    digits = example.data.DigitsOnPhotos
    for layout, write in (("voc", example.data.write_voc), ("coco", example.data.write_coco)):
        new = folder / f"digits-{layout}-64-1"
        new.mkdir()
        for part, seed in (("train", 1), ("val", 0)):
            data = digits(part, seed, 64, images=12)
            write(new, part, (data.sample(i) for i in range(len(data))))
    return folder


def three_images(folder, write):
    """To be damaged. In VOC layout train-00001 and val-00001 are in the lists."""
    data = example.data.DigitsOnPhotos("train", 1, 64, images=3)
    for part in ("train", "val"):
        write(folder, part, (data.sample(i) for i in range(3)))
    return folder


@pytest.fixture
def voc(tmp_path):
    return three_images(tmp_path, example.data.write_voc)


@pytest.fixture
def coco(tmp_path):
    return three_images(tmp_path, example.data.write_coco)


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    programs.trained(*SMALL, "--root", root, "--output", folder)
    return folder


def test_both_layouts_hold_the_same_boxes(root):
    digits = example.data.DigitsOnPhotos("val", 0, 64, images=12)
    for name in ("digits", "digits-coco"):
        names, _, val = programs.open_data("--dataset", name, "--root", root, "--size", 64)
        assert names == example.data.DIGITS and len(val) == 12
        for i in range(12):
            image, _, boxes = digits.sample(i)
            found, ends = val[i]
            np.testing.assert_array_equal(ends[:, :5], boxes)
            difference = found.transpose(2, 0, 1) / 255 - image
            assert np.abs(difference).mean() < 0.03


# After nets of this size MXNet's threads ask for as much workspace in every convolution, hundreds
# of gigabytes in the tests together. They are never touched, but Python 3.8 could not fork.
@pytest.mark.long
@pytest.mark.parametrize("model", example.train.MODELS)
def test_losses_are_those_of_the_undivided_batch(root, model, monkeypatch):
    """The normalization takes its statistics from all devices, so the parts' losses add up."""
    # What Faster R-CNN samples is random.
    monkeypatch.setattr(mx.nd.random, "uniform", lambda low, high, shape: mx.nd.arange(shape[0]))
    arguments = ["--model", model, "--size", 64, "--root", root, "--seed", 1]
    given = programs.options(*arguments)
    names, train, _ = example.data.open_data(given)
    totals, counts = [], []
    for each, devices in ((4, 1), (2, 2)):
        detector = example.model.get_model(given, names, each)
        mx.random.seed(3)
        example.train.initialize(detector.net, [mx.cpu()])
        detector.net.collect_params().reset_ctx(contexts(devices))
        sbn.convert_sync_batchnorm(detector.net)
        samples = example.data.Samples(train, 1, detector.sample)
        samples = [samples[i] for i in range(4)]
        parts = []
        for i, context in enumerate(contexts(devices)):
            part = detector.batchify(samples[i * each : (i + 1) * each])
            parts.append([array.as_in_context(context) for array in part])
        with autograd.record():
            losses = detector.losses(parts)
        autograd.backward(losses)
        totals.append(sum(loss.asscalar() for loss in losses))
        counts.append(detector.count(parts))
    assert counts[0] == counts[1] > 0
    # The proposals that Faster R-CNN keeps hang on the last digits of their scores: an input scaled
    # by 1 + 1e-7 changes its loss by a hundredth.
    close = 0.03 if model == "faster_rcnn" else 1e-4
    assert totals[0] == pytest.approx(totals[1], rel=close)


@pytest.mark.long
class TestTraining:
    def test_leaves_its_files(self, run):
        programs.check_run(run)

    def test_two_processes(self, run, root, tmp_path):
        # Training amplifies rounding.
        arguments = [*SMALL, "--root", root]
        programs.check_two_processes(run, tmp_path / "run", *arguments, later=0.1)

    @pytest.mark.slow
    @pytest.mark.parametrize("model", ["yolo3", "faster_rcnn"])
    def test_other_nets_on_augmented_images(self, voc, tmp_path, model):
        folder = tmp_path / "run"
        arguments = "--dataset folder --size 64 --batch 2 --steps 2 --log-every 1".split()
        programs.trained(*arguments, "--model", model, "--root", voc, "--output", folder)
        assert (folder / "export" / "model-symbol.json").exists()
        losses = [float(row["loss"]) for row in rows_of(folder) if row["loss"]]
        assert np.isfinite(losses).all()


@pytest.mark.long
class TestPredict:
    @pytest.mark.parametrize("model", ["", "export/model-symbol.json", "export/folded-symbol.json"])
    def test_every_kind_of_model_evaluates_as_the_training(self, run, model, capsys):
        programs.check_evaluation(run, model, "mAP at 0.5 ", capsys)

    def test_finds_on_a_folder(self, run, voc, tmp_path):
        output = tmp_path / "found"
        photos = str(voc / "JPEGImages")
        example.predict.main([photos, "--model", str(run), "--output", str(output), "--least", "0"])
        assert len(list(output.glob("*.png"))) == 6
        header, *rows = (output / "boxes.csv").read_text().splitlines()
        assert header == "image,class,score,x0,y0,x1,y1" and rows


def test_samples_depend_on_the_seed_and_the_index_alone(root):
    """So a run that was stopped goes on as it would have."""
    given = programs.options("--root", root, "--size", 64, "--seed", 1)
    names, train, _ = example.data.open_data(given)
    given.augment = True
    detector = example.model.get_model(given, names, 1)
    samples = example.data.Samples(train, 1, detector.sample)
    first = [array.asnumpy() for array in samples[17]]
    samples[3]
    for array, expected in zip(samples[17], first):
        np.testing.assert_array_equal(array.asnumpy(), expected)


def test_mean_precision_of_perfect_and_of_no_boxes(root):
    names, _, val = programs.open_data("--root", root, "--size", 64)
    perfect = np.full((len(val), example.predict.MOST, 6), -1.0)
    for found, boxes in zip(perfect, val.boxes):
        found[: len(boxes)] = np.column_stack([boxes[:, 4], np.ones(len(boxes)), boxes[:, :4]])
    assert example.predict.mean_precisions(perfect, val.boxes, names) == pytest.approx((1, 1))
    nothing = np.full_like(perfect, -1)
    assert example.predict.mean_precisions(nothing, val.boxes, names) == (0, 0)
    shifted = perfect.copy()
    shifted[..., 2] += 0.3 * (perfect[..., 4] - perfect[..., 2])
    whole, half = example.predict.mean_precisions(shifted, val.boxes, names)
    assert half == pytest.approx(1) and whole < 0.6


def small(path):
    Image.new("RGB", (5, 5)).save(path)


def change(name, value):
    def damage(path):
        tree = ElementTree.parse(path)
        tree.find(f".//{name}").text = value
        tree.write(path)

    return damage


@pytest.mark.parametrize(
    "name, damage, words",
    [
        ("JPEGImages/train-00001.jpg", cut, ["train-00001.jpg", "truncated", "replace it"]),
        ("JPEGImages/train-00001.jpg", os.unlink, ["train-00001.jpg", "No such file"]),
        ("JPEGImages/val-00001.jpg", small, ["val-00001.jpg", "5 x 5", "ends at"]),
        ("Annotations/val-00001.xml", os.unlink, ["val-00001.xml", "No such file"]),
        ("Annotations/val-00001.xml", change("name", "dog"), ["val-00001.xml", "dog", "digit 0"]),
        ("Annotations/val-00001.xml", change("xmax", "90"), ["val-00001.xml", "90", "1 to 64"]),
        ("Annotations/val-00001.xml", change("xmin", "x"), ["val-00001.xml", "'x'", "bndbox"]),
        ("ImageSets/Main/val.txt", lambda p: p.write_text("train-00001"), ["00001", "train.txt"]),
        ("ImageSets/Main/train.txt", os.unlink, ["train.txt", "one name a line"]),
        ("Annotations", lambda p: p.rename(p.parent / "x"), ["Annotations", "--root"]),
    ],
)
def test_damaged_folder(voc, name, damage, words):
    damage(voc / name)
    with programs.refuses(words):
        programs.open_data("--dataset", "folder", "--root", voc, "--size", 64)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda d: d["annotations"][0].update(bbox=[60, 5, 30, 10]), ["[60, 5, 30, 10]", "64"]),
        (lambda d: d["annotations"][0].update(category_id=77), ["instances_train", "77"]),
        (lambda d: d["images"][0].update(coco_url="train2017/no.jpg"), ["train2017/no.jpg"]),
        (lambda d: d["images"].pop(), ["instances_train", "is of image 2"]),
        (lambda d: d.pop("annotations"), ["no image for the training has a box"]),
        (lambda d: d["categories"].pop(), ["instances_train", "digit 9"]),
    ],
)
def test_damaged_coco(coco, damage, words):
    path = coco / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with programs.refuses(words):
        programs.open_data("--dataset", "coco", "--root", coco, "--size", 64)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--size 100", ["--size is 100", "multiple of 32"]),
        ("--dataset folder", ["--root"]),
        ("--dataset folder --root nowhere", ["nowhere/classes.txt"]),
        ("--dataset voc --root nowhere", ["nowhere/VOC2007/JPEGImages"]),
        ("--dataset coco --root nowhere", ["nowhere/annotations", "--root"]),
        ("--devices cpu:2", ["cpu:2", "gluon_syncbn.launch"]),
        ("--model yolo3 --backbone resnet50_v1", ["resnet50_v1", "darknet53"]),
    ],
)
def test_refused_arguments(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with programs.refuses(words):
        example.train.main(arguments.split())
