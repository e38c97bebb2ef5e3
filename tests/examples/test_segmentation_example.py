"""examples/segmentation: its data, metrics, files, resuming, and every input it must refuse."""

import contextlib
import csv
import errno
import fcntl
import itertools
import json
import os
import pickle
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from PIL import Image
from segmentation import EXAMPLE, ROOT, SMALL, example

pytestmark = pytest.mark.long

DataError, UsageError = example.data.DataError, example.options.UsageError


def small_run(*arguments, stop_after=None):
    """Run in this process, with Ctrl-C after so many steps; return (exit status, output folder)."""
    options = example.options.parse([*SMALL, *map(str, arguments)])
    interrupt = SimpleNamespace(requested=False)
    run = example.run.Run(options, interrupt)
    step = run._trainer.step

    def step_and_interrupt(number, *batch):
        interrupt.requested = number + 1 == stop_after
        return step(number, *batch)

    run._trainer.step = step_and_interrupt
    return run.go(), options.output


def start(*arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MXNET_", "OMP_"))}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE / "train.py"), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Wait for what `start` started; return (exit status, standard output, standard error)."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def running(folder):
    """The processes of a run that writes to `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def arrays_of(folder):
    """All that decides how a run goes on, as bytes."""
    saved = example.checkpoint.load(folder / "checkpoints" / "last.ckpt")
    states, optimizer = pickle.loads(saved.trainer)
    arrays = dict(saved.arrays)
    for index, state in states.items():
        for i, array in enumerate(state or ()):
            arrays[f"trainer:{index}:{i}"] = array.asnumpy()
    arrays["updates"] = np.array(sorted(optimizer._index_update_count.items()))
    return {name: (array.shape, array.tobytes()) for name, array in arrays.items()}


def rows_of(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def results_of(folder):
    """The rows without what depends on the time."""
    columns = ("step", "images", "learning_rate", "loss", "pixel_accuracy", "mean_iou")
    return [[row[name] for name in columns] for row in rows_of(folder)]


@contextlib.contextmanager
def refused(kind, *words):
    """The error must hold each of the words."""
    with pytest.raises(kind) as caught:
        yield
    for word in words:
        assert str(word) in str(caught.value)


class TestDigits:
    def test_sample_depends_on_seed_split_and_index_alone(self):
        make = example.data.DigitsOnPhotos
        forwards = [make("train", 5).sample(i) for i in range(4)]
        dataset = make("train", 5)
        for i in (3, 1, 0, 2):
            for ours, theirs in zip(dataset.sample(i), forwards[i]):
                assert ours.tobytes() == theirs.tobytes()
        others = [make("train", 6).sample(0), make("val", 5).sample(0), forwards[1]]
        assert all((image != forwards[0][0]).any() for image, _ in others)

    def test_train_and_validation_share_neither_digits_nor_photos(self):
        train, val = (example.data.DigitsOnPhotos(split, 0) for split in ("train", "val"))
        assert not set(train.digit_ids) & set(val.digit_ids)
        assert len(train.digit_ids) + len(val.digit_ids) == 1797
        seen = [photo.tobytes() for photo in train._photos + val._photos]
        assert len(set(seen)) == len(seen) == 8
        assert sum(photo.shape[2] for photo in train._photos + val._photos) == 2 * 640

    def test_images_and_labels_are_valid(self):
        images, labels = example.data.stack(example.data.DigitsOnPhotos("val", 0), range(100))
        assert images.shape == (100, 3, 64, 64) and images.dtype == np.float32
        assert labels.shape == (100, 64, 64) and labels.dtype == np.uint8
        assert 0 <= images.min() and images.max() <= 1
        assert set(np.unique(labels)) == set(range(11))
        # Ink is bright, and nothing else is: photos are dimmed to half.
        assert images.max(axis=1)[labels == 0].mean() < 0.4 < images.max(axis=1)[labels > 0].mean()

    def test_brightness_changes_the_image_linearly_and_no_label(self):
        plain = example.data.DigitsOnPhotos("train", 1)
        varied = example.data.DigitsOnPhotos("train", 1, brightness=True)
        factors = []
        for i in range(8):
            (image, label), (changed, same_label) = plain.sample(i), varied.sample(i)
            factor, offset = np.polyfit(image.ravel(), changed.ravel(), 1)
            np.testing.assert_allclose(changed, factor * image + offset, atol=1e-5)
            assert np.exp(-0.6) <= factor <= np.exp(0.6) and abs(offset) <= 0.18
            assert (label == same_label).all()
            factors.append(factor)
        assert max(factors) / min(factors) > 1.3

    def test_sample_is_made_in_two_milliseconds(self):
        dataset = example.data.DigitsOnPhotos("train", 1)

        def seconds():
            start = time.thread_time()
            example.data.stack(dataset, range(20))
            return time.thread_time() - start

        assert min(seconds() for _ in range(5)) / 20 < 2e-3

    @pytest.mark.parametrize("size", [24, 168])
    def test_size_without_room(self, size):
        with refused(DataError, f"--size is {size}", "32 to 160", "--data"):
            example.data.DigitsOnPhotos("train", 1, size)


class TestBatches:
    class Numbers:
        def sample(self, index):
            if index == 9:
                raise DataError("image 9")
            return np.full((3, 2, 2), index), np.full((2, 2), index)

    @pytest.mark.parametrize("threads", [1, 3])
    def test_come_in_order(self, threads):
        chunks = [range(0, 3), range(3, 6), range(6, 8)]
        found = list(example.data.batches(self.Numbers(), chunks, threads))
        assert [labels[:, 0, 0].tolist() for _, labels in found] == [list(c) for c in chunks]

    def test_error_of_a_sample_arrives(self):
        with refused(DataError, "image 9"):
            list(example.data.batches(self.Numbers(), [range(8), range(8, 10)]))

    def test_pixel_weights(self):
        labels = np.array([[0, 0, 1], [2, 255, 255]], np.uint8)
        counts = example.data.pixel_counts(labels, 3)
        assert counts.tolist() == [2, 2]
        weights = example.data.pixel_weights(labels, 3, 0.5, counts)
        np.testing.assert_allclose(weights, np.array([[0.5, 0.5, 1], [1, 0, 0]]) / 3)
        nothing = example.data.pixel_counts(labels[:, 2:], 1)
        assert nothing.tolist() == [0, 0]
        assert example.data.pixel_weights(labels[:, 2:], 1, 1.0, nothing).sum() == 0

    def test_weights_of_a_part_are_those_of_the_batch(self):
        labels = np.random.default_rng(0).choice(np.array([0, 1, 2, 255], np.uint8), size=(7, 9, 8))
        counts = example.data.pixel_counts(labels, 3)
        parts = labels[:5], labels[5:]
        assert (sum(example.data.pixel_counts(part, 3) for part in parts) == counts).all()
        weights = [example.data.pixel_weights(part, 3, 0.3, counts) for part in parts]
        whole = example.data.pixel_weights(labels, 3, 0.3, counts)
        assert np.concatenate(weights).tobytes() == whole.tobytes()


class TestConfusion:
    def test_against_counting(self):
        rng = np.random.default_rng(0)
        classes = 5
        truth = rng.choice([0, 1, 2, 255], size=(3, 8, 9)).astype(np.uint8)
        prediction = rng.choice([0, 1, 3], size=(3, 8, 9)).astype(np.uint8)
        confusion = example.metrics.Confusion(classes)
        for t, p in zip(truth, prediction):
            confusion.add(t, p)

        pixels = [(t, p) for t, p in zip(truth.ravel(), prediction.ravel()) if t != 255]
        ious = []
        for c in range(classes):
            both = sum(t == p == c for t, p in pixels)
            either = sum(c in (t, p) for t, p in pixels)
            ious.append(both / either if either else None)
        # 2 was never predicted and 3 is never true: both count as 0. Nothing is of class 4.
        assert ious[2] == ious[3] == 0 and ious[4] is None and np.isnan(confusion.class_iou[4])
        assert confusion.mean_iou == pytest.approx(sum(ious[:4]) / 4)
        assert confusion.pixel_accuracy == pytest.approx(np.mean([t == p for t, p in pixels]))

    def test_nothing_counted(self):
        confusion = example.metrics.Confusion(3)
        confusion.add(np.full((2, 2), 255, np.uint8), np.zeros((2, 2), np.uint8))
        assert np.isnan(confusion.mean_iou) and np.isnan(confusion.pixel_accuracy)

    def test_wrong_input(self):
        confusion = example.metrics.Confusion(3)
        with refused(ValueError, "(2,)", "(3,)"):
            confusion.add(np.zeros(2), np.zeros(3))
        with refused(ValueError, "truth", "0 to 3", "0 to 2"):
            confusion.add(np.array([0, 3]), np.array([0, 0]))
        with refused(ValueError, "prediction", "255"):
            confusion.add(np.array([0, 0]), np.array([0, 255]))


@pytest.fixture
def voc(tmp_path):
    """A small folder in VOC layout: 3 classes, images of two sizes, some pixels ignored."""
    folder = tmp_path / "voc"
    for part in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / part).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, shape in {"a": (40, 50), "b": (70, 40), "c": (24, 20), "v": (40, 70)}.items():
        pixels = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
        mask = rng.choice(np.array([0, 1, 2, 255], np.uint8), size=shape)
        save_mask(folder, name, mask)
    (folder / "ImageSets/Segmentation/train.txt").write_text("a\nb\nc\n")
    (folder / "ImageSets/Segmentation/val.txt").write_text("v\n")
    return folder


def save_mask(folder, name, mask, palette=True):
    image = Image.fromarray(mask)
    if palette:
        image.putpalette([value % 256 for value in range(0, 3 * 256 * 5, 5)])
    image.save(folder / "SegmentationClass" / f"{name}.png")


class TestVOC:
    def test_crops(self, voc):
        folder = example.voc.VOCFolder(voc)
        assert folder.names == ("background", "class 1", "class 2")
        dataset = folder.train(seed=3, size=32)
        assert len(dataset) == 3
        samples = [dataset.sample(i) for i in range(12)]
        for image, label in samples:
            assert image.shape == (3, 32, 32) and image.dtype == np.float32
            assert label.shape == (32, 32) and set(np.unique(label)) <= {0, 1, 2, 255}
            assert 0 <= image.min() and image.max() <= 1
        again = example.voc.VOCFolder(voc).train(seed=3, size=32)
        for i in (7, 2, 11):
            assert again.sample(i)[0].tobytes() == samples[i][0].tobytes()
        # Each epoch takes every image once; c is the one with a border of ignored pixels.
        for epoch in range(4):
            bordered = [
                (label[24:] == 255).all() for _, label in samples[3 * epoch : 3 * epoch + 3]
            ]
            assert sum(bordered) == 1

    def test_tiles_show_each_pixel_once(self, voc):
        folder = example.voc.VOCFolder(voc)
        mask = folder.read("v")[1]
        tiles = folder.val(size=32)
        assert tiles.images == 1 and len(tiles) == 6
        counts = sum(np.bincount(tiles.sample(i)[1].ravel(), minlength=256) for i in range(6))
        assert counts[:255].tolist() == np.bincount(mask.ravel(), minlength=256)[:255].tolist()

    def test_classes_come_from_argument_file_or_masks(self, voc):
        assert len(example.voc.VOCFolder(voc).names) == 3
        assert len(example.voc.VOCFolder(voc, classes=7).names) == 7
        (voc / "classes.txt").write_text("ground\ncat\ndog\nbird\n")
        assert example.voc.VOCFolder(voc).names == ("ground", "cat", "dog", "bird")
        with refused(DataError, "--classes is 7", "classes.txt", "names 4"):
            example.voc.VOCFolder(voc, classes=7)

    def test_grey_masks_and_png_images(self, voc):
        save_mask(voc, "a", folder_mask(voc, "a"), palette=False)
        image = voc / "JPEGImages" / "a.jpg"
        with Image.open(image) as opened:
            opened.save(image.with_suffix(".png"))
        image.unlink()
        assert len(example.voc.VOCFolder(voc).train(1, 32)) == 3

    def test_wrong_folder(self, voc, tmp_path):
        with refused(DataError, tmp_path / "none", "is no folder", "SegmentationClass"):
            example.voc.VOCFolder(tmp_path / "none")
        with refused(DataError, voc / "JPEGImages", "lacks", "ImageSets"):
            example.voc.VOCFolder(voc / "JPEGImages")

    def break_list(self, voc):
        (voc / "ImageSets/Segmentation/val.txt").unlink()

    def empty_list(self, voc):
        (voc / "ImageSets/Segmentation/train.txt").write_text("\n")

    def validate_on_training(self, voc):
        (voc / "ImageSets/Segmentation/val.txt").write_text("v\nb\n")

    def remove_image(self, voc):
        (voc / "JPEGImages/b.jpg").unlink()

    def remove_mask(self, voc):
        (voc / "SegmentationClass/b.png").unlink()

    def text_as_image(self, voc):
        (voc / "JPEGImages/b.jpg").write_text("no image")

    def cut_image(self, voc):
        path = voc / "JPEGImages/b.jpg"
        path.write_bytes(path.read_bytes()[:1500])

    def cut_mask(self, voc):
        path = voc / "SegmentationClass/b.png"
        path.write_bytes(path.read_bytes()[:-300])

    def other_size(self, voc):
        save_mask(voc, "b", np.zeros((70, 41), np.uint8))

    def coloured_mask(self, voc):
        save_mask(voc, "b", np.zeros((70, 40, 3), np.uint8), palette=False)

    def gap_in_classes(self, voc):
        mask = np.zeros((70, 40), np.uint8)
        mask[3, 4] = 200
        save_mask(voc, "b", mask)

    def value_of_16_bits(self, voc):
        save_mask(voc, "b", np.full((70, 40), 300, np.uint16), palette=False)

    @pytest.mark.parametrize(
        "damage, words",
        [
            (break_list, ["val.txt", "one a line"]),
            (empty_list, ["train.txt is empty"]),
            (validate_on_training, ["1 images, b among them", "val.txt", "remove"]),
            (remove_image, ["JPEGImages/b.jpg", "add it"]),
            (remove_mask, ["SegmentationClass/b.png", "add it"]),
            (text_as_image, ["JPEGImages/b.jpg", "cannot be read", "replace it"]),
            (cut_image, ["JPEGImages/b.jpg", "cannot be read", "truncated"]),
            (cut_mask, ["SegmentationClass/b.png", "cannot be read", "replace it"]),
            (other_size, ["b.png is 41x70", "b.jpg is 40x70"]),
            (coloured_mask, ["SegmentationClass/b.png", "RGB", "palette or grey"]),
            (gap_in_classes, ["0, 1, 2, 200", "b.png", "--classes"]),
            (value_of_16_bits, ["b.png holds the value 300", "255 classes"]),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_damage_is_named(self, voc, damage, words):
        damage(self, voc)
        with refused(DataError, *words):
            example.voc.VOCFolder(voc)

    def test_a_class_too_many(self, voc):
        with refused(DataError, "SegmentationClass", ".png holds the value 2", "2 classes 0 to 1"):
            example.voc.VOCFolder(voc, classes=2)

    def test_only_ignored_and_background(self, voc):
        for name in "abcv":
            mask = folder_mask(voc, name)
            save_mask(voc, name, np.where(mask > 0, 255, 0).astype(np.uint8))
        with refused(DataError, "hold the values 0 ", "255 is ignored"):
            example.voc.VOCFolder(voc)


def folder_mask(folder, name):
    with Image.open(folder / "SegmentationClass" / f"{name}.png") as image:
        return np.array(image)


class TestNet:
    def test_shape_and_size(self):
        net = example.model.SegmentationNet(11)
        net.initialize(example.model.SeededHeNormal(1))
        net.hybridize(static_alloc=True)
        assert net(mx.nd.zeros((2, 3, 32, 40))).shape == (2, 11, 32, 40)
        trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
        assert sum(int(np.prod(p.shape)) for p in trained) == pytest.approx(565_000, rel=0.02)

    def test_first_parameters_depend_on_the_seed_alone(self):
        def parameters(seed):
            net = example.model.SegmentationNet(3, channels=(4, 6, 8))
            net.initialize(example.model.SeededHeNormal(seed))
            return [p.data().asnumpy().tobytes() for p in net.collect_params().values()]

        first = parameters(1)
        mx.nd.random.normal(shape=(3,)).wait_to_read()
        assert parameters(1) == first != parameters(2)

    def test_loss_is_that_of_the_undivided_batch(self):
        """An uneven split over three devices must not change the loss beyond rounding."""
        rng = np.random.default_rng(0)
        images = rng.normal(size=(5, 3, 32, 32)).astype(np.float32)
        labels = rng.choice(np.array([0, 1, 2, 255], np.uint8), size=(5, 32, 32))
        losses = []
        for devices in (1, 3):
            options = example.options.parse([*SMALL, "--norm", "sync"])
            contexts = [mx.cpu(i) for i in range(devices)]
            trainer = example.trainer.SegmentationTrainer(options, contexts, 3)
            trainer.step(0, images, labels)
            losses += trainer.finish()
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)

    def test_learning_rate(self):
        options = example.options.parse(["--lr", "0.1", "--warmup", "10", "--steps", "100"])
        trainer = SimpleNamespace(_rate=options.lr, _warmup=options.warmup, _steps=options.steps)
        rate = [example.trainer.SegmentationTrainer.learning_rate(trainer, i) for i in range(100)]
        assert rate[0] == pytest.approx(0.01) and np.argmax(rate) == 9
        assert all(later < earlier for earlier, later in zip(rate[9:], rate[10:]))
        assert 0.001 < rate[-1] < 0.003


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The folder of a run stopped after 6 of 12 steps."""
    status, folder = small_run(
        "--output", tmp_path_factory.mktemp("interrupted") / "run", stop_after=6
    )
    assert status == 130
    return folder


class TestResume:
    @pytest.mark.parametrize("norm", ["sync", "local"])
    def test_is_exact(self, norm, tmp_path, capfd):
        status, straight = small_run("--norm", norm, "--output", tmp_path / "straight")
        assert status == 0
        status, parted = small_run("--norm", norm, "--output", tmp_path / "a part", stop_after=6)
        assert status == 130
        command = capfd.readouterr().out.splitlines()[-1]
        assert shlex.split(command)[-2:] == ["--resume", str(parted)]
        assert example.checkpoint.load(parted / "checkpoints/last.ckpt").step == 6
        status, resumed = small_run("--resume", parted)
        assert status == 0 and resumed == parted
        assert arrays_of(parted) == arrays_of(straight)
        assert results_of(parted) == results_of(straight)
        assert [row["step"] for row in rows_of(parted)] == ["4", "6", "8", "12", "12"]

    def test_into_another_folder(self, interrupted, tmp_path):
        before = arrays_of(interrupted)
        status, folder = small_run("--resume", interrupted, "--output", tmp_path / "other")
        assert status == 0 and folder == tmp_path / "other"
        assert [row["step"] for row in rows_of(folder)] == ["4", "6", "8", "12", "12"]
        assert arrays_of(interrupted) == before
        with refused(UsageError, folder, "finished", "12 steps", "--steps"):
            example.options.parse(["--resume", str(folder)])

    def test_into_another_folder_takes_the_best_net_along(self, tmp_path):
        source, other = tmp_path / "source", tmp_path / "other"
        small_run("--output", source, stop_after=7)
        small_run("--resume", source, "--output", other, stop_after=8)
        last = example.checkpoint.load(other / "checkpoints/last.ckpt")
        assert last.progress["best"]["step"] == 6
        for name in ("best.params", "checkpoints/best.ckpt"):
            assert (other / name).read_bytes() == (source / name).read_bytes()

    @pytest.mark.parametrize("fate", ["gone", "damaged", "of another step", "no folder"])
    def test_into_another_folder_without_the_best_net(self, fate, tmp_path):
        """Then the next validation is the best."""
        source, other = tmp_path / "source", tmp_path / "other"
        small_run("--output", source, stop_after=7)
        resumed, best = source, source / "checkpoints/best.ckpt"
        if fate == "gone":
            best.unlink()
        elif fate == "damaged":
            best.write_bytes(best.read_bytes()[:-100])
        elif fate == "of another step":
            saved = example.checkpoint.load(best)
            saved.step = 3
            saved.save(best)
        else:
            resumed = (source / "checkpoints/last.ckpt").rename(tmp_path / "moved.ckpt")
        small_run("--resume", resumed, "--output", other, stop_after=8)
        last = example.checkpoint.load(other / "checkpoints/last.ckpt")
        assert last.progress["best"] == {"mean_iou": -1.0, "step": 0}
        assert not (other / "best.params").exists()
        small_run("--resume", other)
        assert example.checkpoint.load(other / "checkpoints/best.ckpt").step == 12

    @pytest.mark.parametrize(
        "option, value",
        [
            ("--lr", "0.1"),
            ("--norm", "builtin"),
            ("--steps", "24"),
            ("--batch", "4"),
            ("--seed", "2"),
            ("--val-images", "5"),
        ],
    )
    def test_with_other_arguments(self, interrupted, option, value):
        with refused(UsageError, f"{option} is {value}", "run to resume has", "leave"):
            example.options.parse(["--resume", str(interrupted), option, value])

    def test_with_images_that_were_moved(self, voc, interrupted, tmp_path):
        folder, moved = tmp_path / "run", tmp_path / "moved"
        small_run("--data", voc, "--output", folder, stop_after=2)
        voc.rename(moved)
        with refused(DataError, voc, "is no folder"):
            small_run("--resume", folder)
        small_run("--resume", folder, "--data", moved / ".." / "moved", stop_after=4)
        config = json.loads((folder / "config.json").read_text())
        assert Path(config["arguments"]["data"]).samefile(moved)
        small_run("--resume", folder, stop_after=5)
        shutil.copy(moved / "JPEGImages/v.jpg", moved / "JPEGImages/w.jpg")
        shutil.copy(moved / "SegmentationClass/v.png", moved / "SegmentationClass/w.png")
        for split, text in (("train", "a\nb\n"), ("val", "v\nw\n")):
            path = moved / f"ImageSets/Segmentation/{split}.txt"
            before = path.read_text()
            path.write_text(text)
            with refused(UsageError, f"{split}.txt", "--data"):
                small_run("--resume", folder, "--data", moved)
            path.write_text(before)
        with refused(UsageError, f"--data is {moved}", "has none"):
            example.options.parse(["--resume", str(interrupted), "--data", str(moved)])

    def test_on_other_devices(self, interrupted):
        options = example.options.parse(["--devices", f"cpu:1{'0' * 21}"])
        with refused(UsageError, "--batch is 8", "fewer --devices"):
            example.run.Run(options, None)
        options = example.options.parse(["--resume", str(interrupted), "--devices", "cpu:3"])
        with refused(UsageError, "cpu:3", "2 of type cpu"):
            example.run.Run(options, None)

    def test_of_what_is_no_checkpoint(self, interrupted, tmp_path):
        def refuse(path, *words):
            with refused(UsageError, path, *words):
                example.options.parse(["--resume", str(path), "--output", str(tmp_path / "new")])

        refuse(tmp_path / "missing", "there is no file")
        refuse(tmp_path, "last.ckpt", "without --resume")
        (tmp_path / "text").write_text("hello")
        refuse(tmp_path / "text", "no checkpoint of this example")
        np.savez(tmp_path / "other.npz", x=np.zeros(3))
        refuse(tmp_path / "other.npz", "no checkpoint of this example")
        np.savez(tmp_path / "list.npz", state=np.array("[1]"), trainer=np.zeros(1, np.uint8))
        refuse(tmp_path / "list.npz", "no checkpoint of this example")

        whole = (interrupted / "checkpoints/last.ckpt").read_bytes()
        (tmp_path / "short").write_bytes(whole[: len(whole) // 2])
        refuse(tmp_path / "short", "damaged", "best.ckpt")
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        (tmp_path / "flipped").write_bytes(flipped)
        refuse(tmp_path / "flipped", "damaged", "best.ckpt")

        saved = example.checkpoint.load(interrupted / "checkpoints/last.ckpt")
        saved.arrays.popitem()
        saved.save(tmp_path / "lacking")
        options = example.options.parse(
            ["--resume", str(tmp_path / "lacking"), "--output", str(tmp_path / "new")]
        )
        with refused(UsageError, "should have an array", "of another net"):
            example.run.Run(options, None)
        assert not (tmp_path / "new").exists()

    def test_failed_write_keeps_the_old_checkpoint(self, interrupted, tmp_path, monkeypatch):
        saved = example.checkpoint.load(interrupted / "checkpoints/last.ckpt")
        saved.save(tmp_path / "last.ckpt")
        before = (tmp_path / "last.ckpt").read_bytes()

        def fail(file, **_):
            file.write(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(np, "savez", fail)
        with pytest.raises(OSError, match="disk full"):
            saved.save(tmp_path / "last.ckpt")
        assert os.listdir(tmp_path) == ["last.ckpt"]
        assert (tmp_path / "last.ckpt").read_bytes() == before

    @pytest.mark.parametrize("failing", ["best.params", "best.ckpt", "last.ckpt"])
    def test_failed_write_loses_no_best_net(self, failing, tmp_path, monkeypatch):
        """What last.ckpt says of the best net holds, whichever file could not be written."""
        folder = tmp_path / "run"
        small_run("--output", folder, stop_after=2)
        replace = os.replace

        def fail(source, target):
            if Path(target).name == failing:
                raise OSError("disk full")
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            with pytest.raises(OSError, match="disk full"):
                small_run("--resume", folder)
        last = example.checkpoint.load(folder / "checkpoints/last.ckpt")
        assert last.step == 2 and last.progress["best"]["step"] == 0
        small_run("--resume", folder, stop_after=7)
        last, best = (
            example.checkpoint.load(folder / "checkpoints" / name)
            for name in ("last.ckpt", "best.ckpt")
        )
        assert last.step == 7 and last.progress["best"]["step"] == best.step == 6


class TestArguments:
    @pytest.mark.parametrize("text", ["tpu", "cpu:0", "cpu:-1", "cpu:0,1", "gpu:", "gpu:1,1", "2"])
    def test_devices(self, text):
        with refused(UsageError, f"--devices is {text!r}", "cpu:2", "gpu:0,1"):
            example.options.parse(["--devices", text])

    def test_parsed_devices(self):
        parse = example.options.parse_devices
        assert parse("cpu") == ("cpu", 1) and parse("cpu:4") == ("cpu", 4)
        assert parse("gpu") == ("gpu", None) and parse("gpu:0,2") == ("gpu", [0, 2])

    def test_missing_gpu(self):
        options = example.options.parse(["--devices", "gpu:0,99"])
        with refused(UsageError, "gpu:0,99", "MXNet finds"):
            example.setting.find_contexts(options)

    def test_more_devices_than_images(self):
        options = example.options.parse(["--devices", "cpu:3", "--batch", "2"])
        with refused(UsageError, "--batch is 2", "3 devices"):
            example.setting.find_contexts(options)

    @pytest.mark.parametrize(
        "arguments, words",
        [
            (["--size", "60"], ["--size is 60", "multiple of 8", "64"]),
            (["--classes", "4"], ["--classes", "--data", "11"]),
            (["--data", "x", "--classes", "1"], ["--classes is 1", "2 to 255"]),
            (["--output", str(EXAMPLE / "train.py")], ["train.py is a file"]),
            (["--workers", "9"], ["--workers is 9", "--batch is 8", "fewer"]),
            (["--workers", "2", "--devices", "cpu:3"], ["--workers is 2", "3 devices", "divisor"]),
            (["--workers", "2", "--devices", "gpu:0,1,2"], ["--workers is 2", "3 devices"]),
            (["--workers", "2", "--norm", "builtin"], ["--workers is 2", "builtin", "one process"]),
        ],
    )
    def test_refused(self, arguments, words):
        with refused(UsageError, *words):
            example.options.parse(arguments)

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--batch", "0"],
            ["--batch", "1" + "0" * 21],
            ["--lr", "nan"],
            ["--lr", "1e300"],
            ["--steps", "x"],
            ["--seed", "-1"],
            ["--workers", "0"],
            ["--workers", "-1"],
        ],
    )
    def test_no_number(self, arguments, capsys):
        with pytest.raises(SystemExit):
            example.options.parse(arguments)
        assert re.search(
            f"argument {arguments[0]}: '{arguments[1]}' is not a", capsys.readouterr().err
        )

    def test_output_that_holds_a_run(self, interrupted, tmp_path):
        before = arrays_of(interrupted)
        with refused(UsageError, interrupted, "--resume", "--overwrite"):
            small_run("--output", interrupted)
        assert arrays_of(interrupted) == before
        with refused(UsageError, "--overwrite would remove"):
            example.options.parse(["--resume", str(interrupted), "--overwrite"])

    def test_overwrite_replaces_the_run_and_nothing_else(self, tmp_path):
        folder = tmp_path / "run"
        small_run("--output", folder, "--norm", "local")
        (folder / "notes.txt").write_text("mine")
        status, _ = small_run(
            "--output", folder, "--overwrite", "--norm", "local", "--seed", "2", stop_after=2
        )
        assert status == 130 and (folder / "notes.txt").read_text() == "mine"
        assert not (folder / "checkpoints/best.ckpt").exists() and not rows_of(folder)

    def test_default_folders_are_numbered(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with refused(UsageError, "--resume", "there is none"):
            example.options.parse(["--resume"])
        (tmp_path / "runs" / "segmentation-9").mkdir(parents=True)
        (tmp_path / "runs" / "segmentation-10").mkdir()
        assert example.options.parse([]).output == Path("runs/segmentation-11")
        with refused(UsageError, "segmentation-10", "last.ckpt"):
            example.options.parse(["--resume"])

    def test_runs_that_start_together_have_folders_of_their_own(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        one, two, three = (example.options.parse([]) for _ in range(3))
        claimed = example.options.claimed
        with claimed(one), claimed(two):
            assert [one.output.name, two.output.name] == ["segmentation-1", "segmentation-2"]
            (one.output / "config.json").touch()
        # The second one has written nothing.
        assert os.listdir("runs") == ["segmentation-1"]
        with claimed(three):
            assert three.output.name == "segmentation-2"
        # A worker that writes nothing claims nothing.
        four = example.options.parse([], started=2)
        monkeypatch.setenv("GLUON_SYNCBN_RANK", "1")
        with claimed(four):
            assert os.listdir("runs") == ["segmentation-1"]
        monkeypatch.delenv("GLUON_SYNCBN_RANK")
        process = start("--data", "missing")
        assert finish(process)[0] == 1 and os.listdir("runs") == ["segmentation-1"]

    def test_runs_that_is_no_folder(self, tmp_path, monkeypatch):
        """Such as a link to a disk that is not there."""
        monkeypatch.chdir(tmp_path)
        for make in (lambda: os.symlink("nowhere", "runs"), Path("runs").touch):
            make()
            with refused(UsageError, "segmentation-1 cannot be written", "name another folder"):
                with example.options.claimed(example.options.parse([])):
                    pass
            os.unlink("runs")

    def test_output_that_cannot_be_written(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        with refused(UsageError, "xx cannot be written", "name another folder"):
            example.options.parse(["--output", str(tmp_path / ("x" * 300))])
        for below in ("file", "/proc"):
            output = tmp_path / below / "run"
            options = example.options.parse([*SMALL, "--output", str(output)])
            with refused(UsageError, f"{output} cannot be written", "name another folder"):
                example.run.run(options)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        # As late as that.
        monkeypatch.setattr(example.plots, "plot_curves", full)
        options = example.options.parse([*SMALL, "--output", str(tmp_path / "run")])
        with refused(UsageError, "No space left", "make room", "--resume"):
            example.run.run(options)

    def test_what_is_read_is_not_taken_for_the_output(self, tmp_path):
        long = tmp_path / ("x" * 300)
        options = example.options.parse([*SMALL, "--data", str(long)])
        with refused(example.data.DataError, f"--data {long} cannot be read"):
            example.run.run(options)
        with refused(UsageError, f"--resume {long} cannot be read"):
            example.options.parse(["--resume", str(long)])

    def test_an_output_that_nobody_reads(self, tmp_path):
        """As with `... | head -1`."""
        process = start(*SMALL, "--output", tmp_path / "run")
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 128 + signal.SIGPIPE and "Error" not in errors, errors

    def test_no_room_at_the_start(self, tmp_path, monkeypatch):
        """Then there is no run, which would be in the way of the next one."""

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        arguments = [*SMALL, "--output", str(tmp_path / "run")]
        with monkeypatch.context() as patched:
            patched.setattr(example.folder, "replacing", full)
            with refused(UsageError, "No space left"):
                example.run.run(example.options.parse(arguments))
        assert os.listdir(tmp_path / "run") == []
        example.run.Run(example.options.parse(arguments), None)

    def test_two_runs_into_one_output(self, tmp_path):
        """The second passed its first look at the folder before the other wrote there."""
        folder = tmp_path / "run"
        late = [example.options.parse([*SMALL, "--output", str(folder)]) for _ in range(2)]
        small_run("--output", folder, stop_after=7)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with refused(UsageError, folder, "holds a run already", "--overwrite"):
            example.run.Run(late[0], None)

        class Second(example.workers.Alone):
            rank, size = 1, 2

            def gather(self, key, numbers):
                return np.array([[key == "taken"], numbers])

        with refused(UsageError, folder, "holds a run already", "--overwrite"):
            example.run.Run(late[1], None, Second())
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def test_diverged_training_says_so(self, tmp_path):
        options = example.options.parse([*SMALL, "--output", str(tmp_path / "run")])
        run = example.run.Run(options, SimpleNamespace(requested=False))
        run._trainer.step = lambda *_: [float("nan")]
        with refused(UsageError, "loss of step 1 is nan", "--lr"):
            run.go()


def test_second_interrupt_ends_at_once():
    before = signal.getsignal(signal.SIGINT)
    with example.interrupt.Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.time() + 5
        while not interrupt.requested and time.time() < deadline:
            time.sleep(0.01)
        assert interrupt.requested and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before


def test_own_data_from_the_command_line(voc, tmp_path):
    arguments = [
        "--data",
        voc,
        "--size",
        32,
        "--batch",
        2,
        "--epochs",
        2,
        "--output",
        tmp_path / "r",
    ]
    process = start(*arguments, "--devices", "cpu:2")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert config["steps"] == 4 and config["data"]["classes"] == [
        "background",
        "class 1",
        "class 2",
    ]
    assert "over 1 validation images" in out

    save_mask(voc, "b", np.full((70, 40), 7, np.uint8))
    process = start("--data", voc, "--classes", 3, "--output", tmp_path / "s")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in err
    # Both workers find it, and one says so.
    assert "[1] " not in err
    assert "SegmentationClass/b.png holds the value 7" in err and not (tmp_path / "s").exists()


def test_whole_program(whole_run):
    """Every file of a run, and what it prints. By default it has two workers without GPUs."""
    folder, out, err = whole_run
    assert re.search(r"pixel accuracy 0\.\d+, mean IoU 0\.\d+ over 4 validation images", out)
    assert re.search(r"\d+ images/s", out) and "images/s, loss" in err
    for name in ("curves.png", "predictions.png"):
        assert str(folder / name) in out
        with Image.open(folder / name) as picture:
            assert min(picture.size) > 300
    files = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]
    assert files == [
        "best.params",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "config.json",
        "curves.png",
        "export/folded-0000.params",
        "export/folded-symbol.json",
        "export/model-0000.params",
        "export/model-symbol.json",
        "export/model.onnx",
        "metrics.csv",
        "predictions.png",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["arguments"]["norm"] == "sync" and config["versions"]["mxnet"] == "1.9.1"
    if not mx.context.num_gpus():
        assert config["arguments"]["devices"] == "cpu:2" and config["arguments"]["workers"] == 2
        # One speaks for both, and then the export.
        *lines, _, _, last = out.splitlines()
        assert last == "The mean IoU is the same."
        assert all(line.startswith("[0] ") for line in lines + err.splitlines())
        assert out.count("into " + str(folder)) == 1
    net = example.model.SegmentationNet(11)
    net.load_parameters(str(folder / "best.params"))


WHOLE_RUN = (
    "--size 32 --batch 2 --steps 60 --validate-every 60 --log-every 1 --val-images 4".split()
)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """(folder, standard output, standard error) of a run by the command line."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    status, out, err = finish(start(*WHOLE_RUN, "--output", folder))
    assert status == 0, err
    return folder, out, err


@pytest.mark.parametrize("before, after", [(2, 2), (2, 1), (1, 2)])
def test_interrupted_command_continues_to_the_same_end(whole_run, before, after, tmp_path):
    """Ctrl-C; --resume with as many or other workers; the same bits as without."""
    straight, parted = whole_run[0], tmp_path / "parted"
    # As many devices as the whole run.
    devices = json.loads((straight / "config.json").read_text())["arguments"]["devices"]
    if devices.count(",") + 1 != 2 and not devices.startswith("cpu:2"):
        pytest.skip(f"two workers cannot share {devices}")
    process = start(*WHOLE_RUN, "--output", parted, "--devices", devices, "--workers", before)
    while not (parted / "metrics.csv").exists() or len(rows_of(parted)) < 3:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130, err
    assert out.count(f"--resume {parted}") == 1 and "Traceback" not in err, err
    assert not running(parted)
    step = example.checkpoint.load(parted / "checkpoints/last.ckpt").step
    assert 3 <= step < 60 and len(rows_of(parted)) == step

    status, out, err = finish(start("--resume", parted, "--workers", after))
    assert status == 0, err
    assert f"continuing after step {step}" in out
    assert ("in 2 workers" in out) == (after == 2)
    assert arrays_of(parted) == arrays_of(straight)
    assert results_of(parted) == results_of(straight)


class TestWorkers:
    @pytest.mark.parametrize("norm", ["sync", "local"])
    def test_are_as_good_as_one_process(self, norm, tmp_path):
        """Uneven shares of 3 images for 2 devices: the same bits."""
        for workers in (1, 2):
            status, _, err = finish(
                start(
                    *SMALL,
                    "--norm",
                    norm,
                    "--workers",
                    workers,
                    "--output",
                    tmp_path / f"{workers}",
                )
            )
            assert status == 0, err
        one, two = tmp_path / "1", tmp_path / "2"
        assert results_of(one) == results_of(two)
        arrays = arrays_of(two)
        assert arrays == arrays_of(one)
        # Of the second worker, whose trained parameters are compared before they are saved.
        pairs = [(n, n.replace("statistics:1:", "parameter:")) for n in arrays if "cs:1:" in n]
        assert len(pairs) == 22
        assert all(arrays[n] == arrays[first] for n, first in pairs) == (norm == "sync")

    def test_each_takes_its_part_of_the_batch(self):
        options = example.options.parse(SMALL)
        for images, workers, each in itertools.product(range(1, 9), (1, 2, 3), (1, 2)):
            shares = []
            for rank in range(workers):
                team = SimpleNamespace(rank=rank, size=workers)
                trainer = SimpleNamespace(contexts=[None] * each, _team=team)
                share = example.trainer.SegmentationTrainer.own_share(trainer, range(images))
                # What `split_and_load` makes of it.
                shares += [part.tolist() for part in np.array_split(share, each)]
            parts = np.array_split(range(images), workers * each)
            assert shares == [part.tolist() for part in parts]
        assert options.workers == 1

    def test_only_the_first_writes_and_speaks(self, tmp_path, capfd):
        class Second(example.workers.Alone):
            rank, size = 1, 2

            def gather(self, key, numbers):
                return np.array([numbers, numbers])

        options = example.options.parse([*SMALL, "--output", str(tmp_path / "run")])
        run = example.run.Run(options, SimpleNamespace(requested=False), Second())
        capfd.readouterr()
        assert run.go() == 0 and not (tmp_path / "run").exists()
        assert capfd.readouterr() == ("", "")

    def test_with_different_parameters_say_so(self, tmp_path):
        class Other(example.workers.Alone):
            size = 2

            def gather(self, key, numbers):
                other = np.array(numbers, np.float64)
                other[0] += key == "statistics"
                return np.array([numbers, other])

        options = example.options.parse([*SMALL, "--output", str(tmp_path / "run")])
        run = example.run.Run(options, SimpleNamespace(requested=False), Other())
        with refused(RuntimeError, "different parameters"):
            run.go()

    def test_all_stop_when_one_is_interrupted(self, tmp_path):
        class Other(example.workers.Alone):
            size = 2

            def gather(self, key, numbers):
                other = np.array(numbers, np.float64)
                if key.startswith("step"):
                    other[0] = run._step == 3
                return np.array([numbers, other])

        options = example.options.parse([*SMALL, "--output", str(tmp_path / "run")])
        run = example.run.Run(options, SimpleNamespace(requested=False), Other())
        assert run.go() == 130
        assert example.checkpoint.load(tmp_path / "run/checkpoints/last.ckpt").step == 3

    def test_default(self):
        parse = example.options.parse
        assert parse([]).workers is None and parse(["--devices", "cpu:2"]).workers == 1
        assert parse(["--norm", "builtin"]).workers == 1
        assert parse([], started=4).workers == 4
        devices = example.options.default_devices
        assert [devices(1, batch=1), devices(1, batch=2), devices(3, batch=8)] == [
            "cpu:1",
            "cpu:2",
            "cpu:3",
        ]
        with refused(UsageError, "--workers is 3", "started 2"):
            parse(["--workers", "3"], started=2)

    def test_first_one_draws_its_bar_on_the_terminal(self, monkeypatch, capfd):
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        monkeypatch.setenv(example.console.TERMINAL_VARIABLE, os.ttyname(slave))
        console = example.console.Console()
        with console.bar(total=3) as bar:
            bar.update(2)
            console.say("hello")
        text, words = "", ("hello\r\n", "2/3")
        # What is written comes in pieces, and some time later.
        while not all(word in text for word in words):
            assert select.select([master], [], [], 10)[0], text
            text += os.read(master, 4096).decode()
        os.close(master), os.close(slave)
        assert capfd.readouterr() == ("", "")

    def test_bar_is_lines_where_no_one_watches(self, capsys):
        console = example.console.Console()
        with console.bar(total=3) as bar:
            console.say("hello")
            bar.update(2)
        out, err = capsys.readouterr()
        assert out == "hello\n" and "\r" not in err and "2/3" in err.splitlines()[-1]
