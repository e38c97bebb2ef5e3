"""examples/segmentation: training, resuming, what a kill leaves, bad input, prediction, export."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from example_modules import EXAMPLES, load_example
from PIL import Image
from training_runs import Example, cut, rows_of, wait_for

example = load_example("segmentation")
programs = Example("segmentation", example)
InputError, RUNS, runs = example.train.InputError, example.data.RUNS, example.predict.runs
FOLDER = EXAMPLES / "segmentation"
# A run of some seconds: 20 steps, with a validation after each 10.
SMALL = "--size 32 --batch 4 --steps 20 --validate-every 10 --log-every 5 --val-images 6".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    programs.trained(*SMALL, "--output", folder)
    return folder


@pytest.fixture
def voc(tmp_path):
    """A small folder in VOC layout; a1 is in the training, a5 in the validation."""
    root = tmp_path / "voc"
    for part in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / part).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(7):
        image = rng.integers(0, 100, (40 + 7 * i, 52, 3)).astype(np.uint8)
        mask = np.zeros(image.shape[:2], np.uint8)
        mask[5:25, 8:30] = 1 + i % 2
        mask[0] = 255
        image[mask == 1] = 200
        Image.fromarray(image).save(root / "JPEGImages" / f"a{i}.jpg")
        Image.fromarray(mask).save(root / "SegmentationClass" / f"a{i}.png")
    (root / "classes.txt").write_text("background\none\ntwo\n")
    (root / "ImageSets/Segmentation/train.txt").write_text("a0\na1\na2\na3\na4\n")
    (root / "ImageSets/Segmentation/val.txt").write_text("a5\na6\n")
    return root


@pytest.mark.long
class TestTraining:
    def test_leaves_its_files(self, run):
        rows = programs.check_run(run, "export/model.onnx")
        scores = [float(row["mean_iou"]) for row in rows if row["mean_iou"]]
        assert len(scores) == 2 and all(0 < score < 1 for score in scores)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM], [signal.SIGKILL]]
    )
    def test_stopped_and_resumed_is_as_uninterrupted(self, run, tmp_path, numbers):
        folder = tmp_path / "run"
        process = programs.start(*SMALL, "--output", folder)
        wait_for(folder / "checkpoints" / "last.npz", process)
        for number in numbers:
            process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        step = programs.load(folder)[0]["step"]
        if number == signal.SIGKILL:
            # It may come late, after the second validation.
            assert process.returncode == -number and step in (10, 20)
        else:
            assert process.returncode == 130 and step >= 10
            command = out.split("to continue: ")[1]
            assert command.endswith(f"--resume {folder}\n")
            subprocess.run(command, shell=True, check=True)
        programs.trained("--resume", folder)
        assert programs.arrays_of(folder) == programs.arrays_of(run)
        assert rows_of(folder) == rows_of(run)

    @pytest.mark.parametrize("engine", ["kvstore", "horovod"])
    def test_two_processes(self, run, tmp_path, engine):
        if engine == "horovod":
            pytest.importorskip("horovod.mxnet", reason="Horovod is not installed")
        programs.check_two_processes(run, tmp_path / "run", *SMALL, engine=engine)

    def test_resuming_a_finished_run_does_nothing(self, run):
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        assert f"{run} is finished" in programs.trained("--resume", run).out
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before

    def test_a_run_folder_is_never_overwritten(self, run):
        before = programs.arrays_of(run)
        done = programs.train(*SMALL, "--output", run)
        assert done.status == 1 and f"--resume {run}" in done.err
        assert programs.arrays_of(run) == before

    def test_accumulation_and_local_statistics(self, tmp_path):
        folder = tmp_path / "run"
        arguments = "--steps 4 --accumulate 2 --norm local --no-export --optimizer sgd".split()
        programs.trained(*SMALL, *arguments, "--output", folder)
        assert programs.load(folder)[0]["step"] == 4

    def test_half_of_its_workspaces_would_do(self, tmp_path):
        """With too few a step never ends."""
        arguments = [*SMALL, "--steps", 4, "--no-export", "--output", tmp_path / "run"]
        programs.trained(*arguments, MXNET_CPU_TEMP_COPY="64")

    @pytest.mark.slow
    def test_mixed_precision(self, tmp_path):
        """Loss scaling and what is saved of it: on the CPU no operator is left for float16."""
        code = f"""if True:
            import functools, sys
            sys.path.insert(0, {str(FOLDER)!r})
            import train
            train.amp.init = functools.partial(train.amp.init, target_precision_ops=["Pooling"])
            train.training.find_contexts = lambda *_, **__: [train.mx.cpu(0), train.mx.cpu(1)]
            sys.exit(train.main())"""
        folder = tmp_path / "run"
        arguments = [*SMALL, "--steps", "4", "--dtype", "float16", "--output", str(folder)]
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=120)
        state, _ = programs.load(folder)
        assert state["loss_scaler"]["_unskipped"] == 4
        assert not (folder / "export").exists()
        programs.trained("--resume", folder, "--dtype", "float32")
        assert (folder / "export" / "model-symbol.json").exists()

    def test_a_net_of_gluoncv_on_a_folder(self, voc, tmp_path):
        folder = tmp_path / "run"
        arguments = "--model fastscnn --dataset folder --size 64 --batch 2 --steps 2".split()
        programs.trained(*arguments, "--root", voc, "--output", folder)
        assert (folder / "export" / "model-symbol.json").exists()
        assert any(name.startswith("optimizer:auxlayer") for name in programs.arrays_of(folder))

    def test_no_network_for_pretrained_weights(self, voc, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        arguments = "--model fcn --pretrained --dataset folder --root".split()
        done = programs.train(*arguments, voc, "--size", 32, "--output", tmp_path / "run")
        assert done.status == 1 and not (tmp_path / "run").exists()
        assert "--pretrained" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    "variable, command",
    [
        ("", f"{sys.executable} train.py --resume 'a b' --dtype float32"),
        ("MAKE_TARGET", "make train ARGS='--resume '\"'\"'a b'\"'\"' --dtype float32'"),
        ("GLUON_SYNCBN_SIZE", "the launcher's command with --resume 'a b' --dtype float32"),
    ],
)
def test_the_command_that_goes_on(monkeypatch, variable, command):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    if variable:
        monkeypatch.setenv(variable, "train")
    run = SimpleNamespace(folder="a b")
    assert runs.Run.command(run, "--dtype", "float32") == command


def test_colours_of_digits_differ():
    picture = example.plots.coloured(np.arange(-1, 11)[None], "digits").convert("RGB")
    colours = np.array(picture, int)[0]
    distances = np.abs(colours[:, None] - colours).sum(axis=2) + 1000 * np.eye(12)
    assert distances.min() > 90


@pytest.mark.filterwarnings("error")
def test_curves_before_the_first_validation(tmp_path):
    runs.plots.plot_curves([{"step": 1, "loss": 1.0}], RUNS.measures, tmp_path / "curves.png")


class TestCheckpoint:
    def test_runs_no_code(self, tmp_path):
        class Harmful:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "made"),)

        harmful = np.array([Harmful()], dtype=object)
        np.savez(tmp_path / "a.npz", state=harmful)
        (tmp_path / "b.npz").write_bytes(pickle.dumps(Harmful()))
        for name in ("a.npz", "b.npz"):
            with pytest.raises(InputError, match=name):
                RUNS.load(tmp_path / name)
        assert not (tmp_path / "made").exists()

    def test_damaged(self, tmp_path):
        path = tmp_path / "last.npz"
        np.savez(path, state=np.array(json.dumps({"format": RUNS.format})))
        RUNS.load(path)
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(InputError, match="damaged"):
            RUNS.load(path)


def small_mask(path):
    Image.fromarray(np.zeros((5, 5), np.uint8)).save(path)


def large_class(path):
    mask = np.array(Image.open(path))
    mask[3, 3] = 9
    Image.fromarray(mask).save(path)


@pytest.mark.parametrize(
    "name, damage, words",
    [
        ("JPEGImages/a1.jpg", cut, ["a1.jpg", "truncated", "replace it"]),
        ("JPEGImages/a1.jpg", os.unlink, ["a1.jpg", "add it"]),
        ("SegmentationClass/a5.png", os.unlink, ["a5.png", "No such file"]),
        ("SegmentationClass/a5.png", small_mask, ["a5.png", "(5, 5)", "(75, 52)"]),
        ("SegmentationClass/a5.png", large_class, ["a5.png", "class 9", "0 to 2"]),
        ("ImageSets/Segmentation/val.txt", lambda p: p.write_text("\n"), ["val.txt", "empty"]),
        ("ImageSets/Segmentation/val.txt", lambda p: p.write_text("a1"), ["a1", "train.txt"]),
        ("ImageSets/Segmentation/train.txt", os.unlink, ["train.txt", "one name a line"]),
        ("classes.txt", os.unlink, ["classes.txt", "--classes"]),
        ("SegmentationClass", lambda p: p.rename(p.parent / "x"), ["SegmentationClass", "--root"]),
    ],
)
def test_damaged_folder(voc, name, damage, words):
    damage(voc / name)
    with programs.refuses(words):
        programs.open_data("--dataset", "folder", "--root", voc, "--size", 32)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--size 30", ["--size is 30", "multiple of 8"]),
        ("--size 800", ["--size is 800", "160"]),
        ("--dataset folder", ["--root"]),
        ("--dataset folder --root nowhere", ["nowhere", "--root"]),
        ("--dataset voc --root nowhere", ["nowhere/VOC2012/JPEGImages"]),
        ("--dataset ade20k --root nowhere", ["nowhere/ADEChallengeData2016"]),
        ("--dataset citys --root nowhere", ["nowhere/leftImg8bit/train"]),
        ("--dataset coco --root nowhere", ["nowhere/annotations"]),
        ("--resume nowhere", ["nowhere", "name the folder of a run"]),
        ("--devices gpu:0", ["gpu:0", "0 GPUs"]),
        ("--devices two", ["two", "cpu:2"]),
        ("--batch 3", ["--batch is 3", "multiple of 2"]),
        ("--dtype float16", ["float16", "GPU"]),
    ],
)
def test_refused_arguments(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(example.train.amp, "init", lambda dtype: None)
    with programs.refuses(words):
        example.train.main(arguments.split())
    assert not list(tmp_path.iterdir())


def test_crops_of_a_folder(voc):
    names, train, val = programs.open_data("--dataset", "folder", "--root", voc, "--size", 32)
    assert names == ("background", "one", "two") and (len(train), len(val)) == (5, 2)
    samples = [train[i] for i in range(20)]
    assert all(x.shape == (3, 32, 32) and y.shape == (32, 32) for x, y in samples)
    assert set(np.unique([y for _, y in samples])) == {-1, 0, 1, 2}
    again = train[17]
    assert all((a == b).all() for a, b in zip(again, samples[17]))
    assert val[0][1].shape == (75, 52) and (val[0][1][0] == -1).all()


def test_loss_is_that_of_the_undivided_batch():
    rng = np.random.default_rng(0)
    scores, labels = rng.standard_normal((4, 3, 8, 8)), rng.integers(-1, 3, (4, 8, 8))
    scores, labels = mx.nd.array(scores), mx.nd.array(labels, dtype="int32")
    loss_of = example.model.SegmentationLoss((1, 0.5))
    whole = loss_of([scores, scores], labels).asscalar()
    parts = [loss_of([scores[i : i + 1]] * 2, labels[i : i + 1]).asscalar() for i in range(4)]
    assert sum(parts) == pytest.approx(whole, rel=1e-5)
    exact = scores.asnumpy() - np.log(np.exp(scores.asnumpy()).sum(axis=1, keepdims=True))
    picked = np.take_along_axis(exact, np.maximum(labels.asnumpy(), 0)[:, None], 1)[:, 0]
    assert whole == pytest.approx(-1.5 * picked[labels.asnumpy() >= 0].sum(), rel=1e-5)


@pytest.mark.parametrize("scales, flip", [((1,), False), ((0.5, 1, 1.5), True)])
@pytest.mark.parametrize("shape", [(16, 16), (9, 40), (33, 21)])
def test_windows_cover_every_pixel(shape, scales, flip):
    """Scores that are a pixel's own colours give, at scale 1, the softmax of the image."""
    predictor = example.predict.Predictor(lambda batch: batch, 16, 4, scales, flip)
    image = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    [found] = predictor([image])
    assert found.shape == image.shape
    np.testing.assert_allclose(found.sum(axis=0), 1, rtol=1e-5)
    if scales == (1,):
        exact = np.exp(image) / np.exp(image).sum(axis=0)
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.long
class TestPredict:
    @pytest.mark.parametrize("model", ["", "export/folded-symbol.json", "export/model.onnx"])
    def test_every_kind_of_model_evaluates_as_the_training(self, run, model, capsys):
        programs.check_evaluation(run, model, "mean IoU ", capsys)

    def test_labels_a_folder(self, run, voc, tmp_path):
        output = tmp_path / "masks"
        photos = voc / "JPEGImages"
        arguments = ["--model", run, "--output", output, "--scales", "1,1.5", "--flip"]
        example.predict.main([str(photos), *map(str, arguments)])
        assert len(list(output.iterdir())) == 14
        with Image.open(output / "a5.png") as mask:
            assert mask.mode == "P" and mask.size == (52, 75) and np.array(mask).max() < 11

    @pytest.mark.parametrize(
        "arguments, text",
        [
            ("nowhere --model RUN", "no folder nowhere"),
            ("--model nowhere --evaluate", "config.json"),
            ("--model RUN/checkpoints/none.npz --evaluate", "none.npz"),
            ("--model RUN --evaluate --scales big", "--scales"),
            ("RUN --model RUN --output RUN", "is the folder of the images"),
        ],
    )
    def test_refused(self, run, arguments, text):
        with pytest.raises(InputError, match=text):
            example.predict.main(arguments.replace("RUN", str(run)).split())


@pytest.mark.slow
@pytest.mark.long
def test_compare(tmp_path):
    arguments = "--steps 3 --seeds 1 --val-images 8 --output".split()
    command = [sys.executable, str(FOLDER / "compare.py"), *arguments, str(tmp_path)]
    subprocess.run(command, check=True, timeout=240)
    assert (tmp_path / "compare.png").exists() and (tmp_path / "table.md").exists()
    results = json.loads((tmp_path / "results.json").read_text())
    last = {kind: runs["1"][-1][1] for kind, runs in results.items()}
    synchronized, virtual = last["synchronized, 8 devices"], last["virtual, 1 device as 8"]
    assert last["whole batch, 1 device"] == pytest.approx(synchronized, abs=0.01)
    assert last["local, 8 devices"] == pytest.approx(virtual, abs=0.01)


@pytest.mark.long  # A net of resnet50's size.
def test_minimal(tmp_path):
    """It learns, and what it exports is there."""
    command = [sys.executable, str(FOLDER / "minimal.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"^epoch \d: loss (\S+)$", done.stdout, re.M))
    assert last < first
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"fcn.params", "fcn-symbol.json", "fcn-0000.params"}
