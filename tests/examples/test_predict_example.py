"""examples/segmentation: export.py and predict.py, and that train.py ends with them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from PIL import Image
from segmentation import EXAMPLE, SMALL, example

pytestmark = pytest.mark.long

Predictor, DataError = example.predictor.Predictor, example.predictor.DataError
KINDS = {
    "run": ".",
    "checkpoint": "checkpoints/best.ckpt",
    "parameters": "best.params",
    "symbol": "export/model-symbol.json",
    "folded": "export/folded-symbol.json",
    "onnx": "export/model.onnx",
}
WITHOUT_US = example.export.WITHOUT_US


@pytest.fixture(autouse=True)
def modules_by_their_plain_names(monkeypatch):
    """What the example imports only where it is needed."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name, module in vars(example).items():
        monkeypatch.setitem(sys.modules, name, module)


def program(name, *arguments, cwd=None, without_us=False):
    command = ["-c", WITHOUT_US] if without_us else []
    return subprocess.run(
        [sys.executable, *command, str(EXAMPLE / name), *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a small run, trained by train.py, and what that said."""
    folder = tmp_path_factory.mktemp("example") / "run"
    done = program("train.py", *SMALL, "--output", folder)
    assert done.returncode == 0, done.stderr
    (folder / "said.txt").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of images of two sizes, neither of which the net takes as it is."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for name, size in (("one.png", (45, 70)), ("two.JPG", (20, 33)), ("notes.txt", None)):
        if size:
            array = rng.integers(0, 256, (*size, 3)).astype(np.uint8)
            Image.fromarray(array).save(folder / name)
        else:
            (folder / name).write_text("no image")
    return folder


def test_training_ends_with_an_export_that_predicts_the_same(run):
    lines = (run / "said.txt").read_text().splitlines()
    assert lines[-1] == "The mean IoU is the same."
    best = json.loads(lines[-2].split("in training it was ")[1])
    assert lines[-2] == (
        f"mean IoU without gluon_syncbn: model-symbol.json {best:.4f}, folded-symbol.json "
        f"{best:.4f}, model.onnx {best:.4f}; in training it was {best:.4f}"
    )
    assert sorted(os.listdir(run / "export")) == [
        "folded-0000.params",
        "folded-symbol.json",
        "model-0000.params",
        "model-symbol.json",
        "model.onnx",
    ]
    nodes = json.loads((run / "export" / "model-symbol.json").read_text())["nodes"]
    assert "BatchNorm" in {node["op"] for node in nodes}
    nodes = json.loads((run / "export" / "folded-symbol.json").read_text())["nodes"]
    assert "BatchNorm" not in {node["op"] for node in nodes}


def test_an_export_that_predicts_otherwise_is_told(run, tmp_path):
    """With the parameters of another net in the checkpoint that says how good it was."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    best = example.checkpoint.load(copy / "checkpoints" / "best.ckpt")
    best.progress["best"]["mean_iou"] += 0.1
    best.save(copy / "checkpoints" / "best.ckpt")
    done = program("export.py", copy)
    assert done.returncode == 1
    assert "model-symbol.json does not predict as the net did" in done.stderr
    assert "is the same" not in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_labels_a_folder_of_images(run, images, tmp_path, kind):
    done = program(
        "predict.py",
        images,
        "--model",
        run / KINDS[kind],
        "--output",
        tmp_path / "out",
        without_us=True,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "out")) == [
        "one-overlay.png",
        "one.png",
        "two-overlay.png",
        "two.png",
    ]
    assert "2 masks and overlays in" in done.stdout
    colours = example.plots.class_colours(11)
    for name, size in (("one", (45, 70)), ("two", (20, 33))):
        with Image.open(tmp_path / "out" / f"{name}.png") as mask:
            assert mask.mode == "P"
            classes, shown = np.asarray(mask), np.asarray(mask.convert("RGB"))
        assert classes.shape == size and classes.max() < 11
        np.testing.assert_allclose(shown / 255, colours[classes], atol=1 / 255)
        with Image.open(tmp_path / "out" / f"{name}-overlay.png") as overlay:
            overlay = np.asarray(overlay).astype(int)
        with Image.open(next(images.glob(f"{name}.*"))) as image:
            image = np.asarray(image).astype(int)
        assert (overlay[classes == 0] == image[classes == 0]).all()
        mixed = 0.4 * image + 0.6 * 255 * colours[classes]
        assert np.abs(overlay - mixed)[classes > 0].max(initial=0) <= 1


def test_all_kinds_see_the_same(run):
    images = np.random.default_rng(1).random((3, 3, 32, 64)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        predictors = {kind: Predictor(run / path) for kind, path in KINDS.items()}
    expected = predictors["run"].predict(images)
    assert expected.shape == (3, 32, 64)
    for kind, predictor in predictors.items():
        assert predictor.names == example.data.DigitsOnPhotos.names
        if kind != "onnx":
            assert (predictor.predict(images) != expected).mean() < 1e-3, kind
    # An ONNX file takes images of one size, so larger ones are cut.
    parts = [predictors["run"].predict(images[..., i : i + 32]) for i in (0, 32)]
    output = predictors["onnx"].predict(images)
    assert (output != np.concatenate(parts, axis=2)).mean() < 1e-3


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["IMAGES", "--model", "no"], "there is no no: name the folder of a run"),
        (["IMAGES", "--model", "RUN/config.json"], "config.json is no model"),
        (["IMAGES", "--model", "RUN/text.params"], "text.params cannot be read"),
        (["IMAGES", "--model", "RUN/text.onnx"], "text.onnx cannot be loaded"),
        (["IMAGES", "--model", "RUN/lone-symbol.json"], "there is no lone-0000.params beside"),
        (["IMAGES", "--model", "RUN/text-symbol.json"], "text-0000.params cannot be loaded"),
        (["IMAGES", "--model", "RUN/other.params"], "other.params holds no net of this example"),
        (["IMAGES", "--model", "RUN/half.ckpt"], "half.ckpt is damaged"),
        (["IMAGES", "--model", "RUN", "RUN"], "--model names 2 models: give one"),
        (["IMAGES", "--model", "RUN", "--opacity", "2"], "--opacity is 2.0"),
        (["--model", "RUN"], "the folder of images is missing"),
        (["RUN/config.json", "--model", "RUN"], "config.json is no folder"),
        (["RUN/checkpoints", "--model", "RUN"], "checkpoints has no .jpg, .jpeg, .png files"),
        (["BAD", "--model", "RUN"], "bad.png cannot be read as an image"),
        (["TWICE", "--model", "RUN"], "has several images named one"),
        (["--validate", "IMAGES", "--model", "RUN"], "config.json cannot be read"),
    ],
)
def test_what_cannot_be_predicted_is_told(run, images, tmp_path, monkeypatch, arguments, text):
    for name in ("text.params", "text.onnx", "text-symbol.json", "text-0000.params"):
        (run / name).write_text("text")
    (run / "lone-symbol.json").write_text("{}")
    import mxnet as mx

    mx.nd.save(str(run / "other.params"), {"weight": mx.nd.ones(3)})
    whole = (run / "checkpoints" / "best.ckpt").read_bytes()
    (run / "half.ckpt").write_bytes(whole[: len(whole) // 2])
    for folder, names in (("bad", ["bad.png"]), ("twice", ["one.png", "one.jpg"])):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("text")
    places = {"RUN": run, "IMAGES": images, "BAD": tmp_path / "bad", "TWICE": tmp_path / "twice"}
    for word, place in places.items():
        arguments = [argument.replace(word, str(place)) for argument in arguments]
    monkeypatch.chdir(tmp_path)
    said = example.predict.main([*arguments, "--output", "out"])
    assert isinstance(said, str) and text in said, said
    assert not Path("out").exists() or not os.listdir("out")


def test_a_net_that_labels_no_pixels(tmp_path):
    import gluon_syncbn as sbn
    from mxnet.gluon import nn

    class Sum(mx.gluon.HybridBlock):
        def hybrid_forward(self, F, x, y):
            return x + y

    colour, flat = (1, 3, 8, 8), (1, 3)
    nets = {
        "fixed": (nn.Dense(5, in_units=192), [colour]),
        "free": (nn.GlobalAvgPool2D(), [colour]),
        "flat": (nn.Dense(5, in_units=3), [flat]),
        "two": (Sum(), [colour, colour]),
    }
    for name, (net, shapes) in nets.items():
        net.initialize()
        path = tmp_path / name
        sbn.export(net, path, onnx=f"{path}.onnx", input_shape=shapes)
        for file in (f"{path}.onnx", f"{path}-symbol.json"):
            with pytest.raises(DataError, match=f"{name}.*: name the folder of a run|cannot be lo"):
                Predictor(file)


def test_export_of_no_run(tmp_path, capsys):
    assert "No such file or directory" in example.export.main([str(tmp_path)])
    assert "usage" in example.export.main([])
    assert example.export.main(["--help"]) == 0
    assert "RUN" in capsys.readouterr().out


class TestOutput:
    """What predict.py writes takes the place of no photo and of no other output."""

    @pytest.fixture
    def photos(self, images, tmp_path):
        return Path(shutil.copytree(images, tmp_path / "photos"))

    def refused(self, photos, output, *words):
        before = {path.name: path.read_bytes() for path in photos.iterdir()}
        said = example.predict.main([str(photos), "--model", "no", "--output", str(output)])
        assert {path.name: path.read_bytes() for path in photos.iterdir()} == before
        assert isinstance(said, str)
        for word in words:
            assert str(word) in said, said

    def test_among_the_photos(self, photos, tmp_path):
        self.refused(photos, photos, "--output", "photos themselves")
        (tmp_path / "link").symlink_to(photos)
        self.refused(photos, tmp_path / "link" / ".." / "photos", "photos themselves")

    def test_an_overlay_named_as_a_mask(self, photos, tmp_path):
        shutil.copy(photos / "one.png", photos / "one-overlay.png")
        self.refused(photos, tmp_path / "out", "one-overlay.png", "one.png", "twice", "rename")
        assert not (tmp_path / "out").exists()


def upright_pixels():
    """(40, 24, 3): dark above, bright below, and the left half red."""
    pixels = np.zeros((40, 24, 3), np.uint8)
    pixels[20:] = 200
    pixels[:, :12, 0] = 255
    return pixels


def save_lying(path, pixels, **settings):
    """As a phone that was held upright saves a photo: on its side, with a note to turn it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = Image.fromarray(np.ascontiguousarray(np.rot90(pixels)))
    lying.save(path, exif=exif, **settings)


def folder_as_voc(folder, photos, masks, train=("a",), val=("v",)):
    """A folder in VOC layout, of {file name: function that saves it} and of arrays."""
    for part in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / part).mkdir(parents=True)
    for name, save in photos.items():
        save(folder / "JPEGImages" / name)
    for name, mask in masks.items():
        Image.fromarray(mask).save(folder / "SegmentationClass" / f"{name}.png")
    for split, names in (("train", train), ("val", val)):
        (folder / "ImageSets/Segmentation" / f"{split}.txt").write_text("\n".join(names))
    return folder


class TestImageFiles:
    """Training and prediction see a photo as a viewer shows it."""

    def read_by_both(self, folder, name, save):
        """What prediction and training read of a file; its mask is upright."""
        mask = np.tile(np.array([0, 1], np.uint8), (40, 12))
        masks = {"a": mask, "v": mask}
        photos = {f"a{name}": save, f"v{name}": save}
        data = example.voc.VOCFolder(folder_as_voc(folder / "voc", photos, masks))
        image, label = data.read("a")
        assert (label == mask).all()
        predicted = example.predict._read(data.images["a"])
        assert predicted.dtype == np.float32
        np.testing.assert_array_equal(predicted, image / np.float32(255))
        return image

    def test_turned_photo(self, tmp_path):
        pixels = upright_pixels()
        image = self.read_by_both(
            tmp_path, ".jpg", lambda path: save_lying(path, pixels, quality=95, subsampling=0)
        )
        assert image.shape == pixels.shape
        assert np.abs(image.astype(int) - pixels).mean() < 6

    def test_photo_with_illegible_exif(self, tmp_path):
        image = self.read_by_both(
            tmp_path,
            ".jpg",
            lambda path: Image.fromarray(upright_pixels()).save(path, exif=b"Exif\0\0no exif"),
        )
        assert image.shape == (40, 24, 3)

    @pytest.mark.parametrize("lying", [False, True])
    def test_grey_of_16_bits(self, tmp_path, lying):
        grey = np.linspace(0, 65535, 40 * 24).reshape(40, 24).round().astype(np.uint16)
        save = save_lying if lying else lambda path, array: Image.fromarray(array).save(path)
        image = self.read_by_both(tmp_path, ".png", lambda path: save(path, grey))
        expected = np.rint(grey / 257).astype(np.uint8)
        np.testing.assert_array_equal(image, np.stack([expected] * 3, axis=2))

    @pytest.mark.parametrize(
        "array, text",
        [
            (np.full((40, 24), 70000, np.int32), "it holds the value 70000"),
            (np.full((40, 24), -1, np.int32), "it holds the value -1"),
            (np.full((40, 24), 0.5, np.float32), "its pixels are fractions"),
        ],
    )
    def test_pixels_of_no_known_range(self, tmp_path, array, text):
        with pytest.raises(DataError, match=f"cannot be read as an image .{text}"):
            self.read_by_both(
                tmp_path, ".png", lambda path: Image.fromarray(array).save(path, format="tiff")
            )
        with pytest.raises(DataError, match=text):
            example.predict._read(tmp_path / "voc" / "JPEGImages" / "a.png")


class TestOwnData:
    """What voc.py has to refuse before a run begins."""

    @pytest.fixture
    def voc(self, tmp_path):
        rng = np.random.default_rng(0)

        def save(path):
            Image.fromarray(rng.integers(0, 256, (40, 24, 3), np.uint8)).save(path)

        masks = {name: np.tile(np.array([0, 1], np.uint8), (40, 12)) for name in "abvw"}
        photos = {f"{name}.png": save for name in masks}
        return folder_as_voc(tmp_path / "voc", photos, masks, train="ab", val="vw")

    def ignore(self, voc, *names):
        for name in names:
            mask = np.full((40, 24), 255, np.uint8)
            Image.fromarray(mask).save(voc / "SegmentationClass" / f"{name}.png")

    def test_validation_without_a_labelled_pixel(self, voc):
        self.ignore(voc, "v")
        folder = example.voc.VOCFolder(voc)
        assert len(folder.val(64)) == 2
        with pytest.raises(
            DataError, match="no pixel .* in the first image of .*val.txt.*--val-images"
        ):
            folder.val(64, images=1)
        self.ignore(voc, "w")
        with pytest.raises(
            DataError, match="no pixel .* in the 2 images of .*val.txt: all are 255"
        ):
            example.voc.VOCFolder(voc).val(64, images=200)

    def test_training_without_a_labelled_pixel(self, voc):
        self.ignore(voc, "a")
        assert len(example.voc.VOCFolder(voc).train(1, 64)) == 2
        self.ignore(voc, "b")
        with pytest.raises(DataError, match="no pixel .* in the 2 images of .*train.txt"):
            example.voc.VOCFolder(voc).train(1, 64)

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
    @pytest.mark.parametrize("name", ["classes.txt", "ImageSets/Segmentation/train.txt"])
    def test_text_in_another_encoding(self, voc, name, encoding):
        (voc / name).write_text("b\nbä\n", encoding=encoding)
        with pytest.raises(DataError, match=f"{name} is no text in UTF-8: save it as UTF-8"):
            example.voc.VOCFolder(voc)

    def test_text_with_the_mark_of_notepad(self, voc):
        (voc / "ImageSets/Segmentation/train.txt").write_text("a\r\nb\r\n", encoding="utf-8-sig")
        (voc / "classes.txt").write_text("ground\r\nkäse\r\n", encoding="utf-8-sig")
        folder = example.voc.VOCFolder(voc)
        assert folder.lists["train"] == ["a", "b"] and folder.names == ("ground", "käse")

    def test_text_that_is_a_folder(self, voc):
        (voc / "classes.txt").mkdir()
        with pytest.raises(DataError, match="classes.txt cannot be read .*directory"):
            example.voc.VOCFolder(voc)


def test_output_that_cannot_be_written(run, images, tmp_path):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "out" / "one.png").mkdir(parents=True)
    for output in ("file", "file/below", "out"):
        said = example.predict.main(
            [str(images), "--model", str(run / "best.params"), "--output", str(tmp_path / output)]
        )
        assert isinstance(said, str)
        assert f"--output {tmp_path / output} cannot be written (" in said
        assert "name another" in said


FOREIGN = ["{}", "[]", '{"data": 1, "arguments": {}}', '{"arguments": {"size": 32}}', "text"]


class TestForeignConfig:
    @pytest.fixture
    def folder(self, run, tmp_path):
        """best.params in a folder that is no run, beside the config.json of another program."""
        shutil.copy(run / "best.params", tmp_path)
        return tmp_path

    @pytest.mark.parametrize("config", FOREIGN)
    def test_names_are_numbers(self, folder, config):
        (folder / "config.json").write_text(config)
        assert Predictor(folder / "best.params").names[:2] == ("background", "class 1")

    @pytest.mark.parametrize("config", FOREIGN)
    def test_it_is_no_run(self, folder, config):
        (folder / "config.json").write_text(config)
        sentence = "config.json is not of a run of this example: name the folder of a run"
        assert sentence in example.export.main([str(folder)])
        assert sentence in example.predict.main(["--validate", str(folder), "--model", "no"])

    def test_a_run_without_its_checkpoint(self, run, folder):
        shutil.copy(run / "config.json", folder)
        said = example.export.main([str(folder)])
        assert "best.ckpt" in said and "there is no file" in said

    @pytest.mark.parametrize(
        "parameters, sentence",
        [
            ({"weight": (2, 3)}, "holds no net of this example"),
            ({"scores.weight": (2,)}, "holds no net of this example"),
            ({"scores.weight": (32, 11, 2, 2)}, "has no down1."),
            ([(2, 3)], "cannot be read"),
            (None, "cannot be read"),
        ],
    )
    def test_a_run_with_other_parameters(self, run, folder, parameters, sentence):
        shutil.copy(run / "config.json", folder)
        best = folder / "best.params"
        if parameters is None:
            best.write_bytes(best.read_bytes()[:5000])
        elif isinstance(parameters, list):
            mx.nd.save(str(best), [mx.nd.zeros(shape) for shape in parameters])
        else:
            mx.nd.save(str(best), {name: mx.nd.zeros(s) for name, s in parameters.items()})
        said = example.export.main([str(folder)])
        assert f"{best} {sentence}" in said and "\n" not in said
        assert not (folder / "export").exists()


class TestExport:
    def test_interrupted(self, run, tmp_path):
        """By Ctrl-C, which reaches the process that validates too."""
        copy = Path(shutil.copytree(run, tmp_path / "run"))
        process = subprocess.Popen(
            [sys.executable, "-u", EXAMPLE / "export.py", copy],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout.readline().startswith("exported")
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130, said
        assert "Traceback" not in said
        sentence, command = said.splitlines()
        assert sentence == "the export was stopped, the run itself is whole; to export it again:"
        assert command.endswith(f"{EXAMPLE / 'export.py'} {copy}")

    def test_without_gluon_syncbn(self, run):
        done = program("export.py", run, without_us=True)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "an export needs gluon_syncbn, which is not installed" in done.stderr
        assert "--no-export" in done.stderr


def test_class_names_are_drawn_as_they_are(tmp_path, monkeypatch):
    names = ("background", "5 $ to 6 $", "_hidden", "a$b", r"\$x\$", "$\\frac{$")
    figures = []
    save = example.plots._save
    monkeypatch.setattr(
        example.plots, "_save", lambda figure, path: (figures.append(figure), save(figure, path))
    )
    labels = np.arange(len(names), dtype=np.uint8).repeat(32)[None].repeat(192, axis=0)[None]
    example.plots.plot_predictions(
        np.zeros((1, 3, *labels.shape[1:])), labels, labels, names, tmp_path / "a.png", "title"
    )
    texts = figures[0].legends[0].get_texts()
    drawn = [text._preprocess_math(text.get_text()) for text in texts]
    assert drawn == [(name, False) for name in names]
