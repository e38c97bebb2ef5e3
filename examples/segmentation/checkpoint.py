"""The folder of a run, and checkpoints: NumPy archives (.npz) from which a run continues.

A checkpoint holds arrays and JSON alone, no pickle, so one from elsewhere runs no code:
`state` (JSON: step, options, rows of metrics.csv, best score), `parameter:NAME`, and
`optimizer:NAME:I`, the I-th array that the optimizer keeps for that parameter.
"""

import json
import math
import re
import signal
import sys
import time
import zipfile
from pathlib import Path

import mxnet as mx
import numpy as np
from tqdm import tqdm

import plots
from data import InputError, replacing

FORMAT = "gluon_syncbn segmentation 2"
RUNS = Path("runs")
COLUMNS = ("step", "seconds", "rate", "loss", "pixel_accuracy", "mean_iou")


class Interrupt:
    """The first Ctrl-C or SIGTERM sets `requested`, a second one ends the process at once."""

    def __init__(self):
        self.requested = False
        self._handle(self._request)

    def _request(self, *_):
        self.requested = True
        self._handle(signal.SIG_DFL)

    def _handle(self, handler):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handler)


class Run:
    """The folder of a run, and where it stands; only one of several processes writes.

    `state` goes into the checkpoints. Its rows are those of metrics.csv, so that after a kill the
    file has no row of a step that is made again.
    """

    def __init__(self, options, names, net, trainer, writes=True):
        self.options, self.names, self.writes = vars(options), names, writes
        self._net, self._trainer = net, trainer
        best = {"mean_iou": -1.0, "step": 0}
        self.state = {"step": 0, "validated": 0, "losses": [], "rows": [], "best": best}
        if options.resume is not None:
            path = find(options.resume)
            self.state, arrays = load(path)
            restore_net(path, arrays, net)
            restore_trainer(self.state, arrays, net, trainer)
            mx.random.seed(options.seed + self.state["step"])  # for dropout
            self.folder = path.absolute().parent.parent
        else:
            self.folder = new_folder(options.output) if writes else None
        self.state.update(options=self.options)
        self.step = self.state["step"]
        self._start = time.perf_counter() - self.state.get("seconds", 0)
        if writes:
            with replacing(self.folder / "config.json") as file:
                file.write(json.dumps({**self.options, "names": names}, indent=2).encode())
            self._write_rows()

    @property
    def seconds(self):
        return time.perf_counter() - self._start

    def due(self, every):
        """Whether a validation is."""
        now = self.step % every == 0 or self.step == self.options["steps"]
        return now and self.state["validated"] < self.step

    def say(self, text):
        if self.writes:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def add_loss(self, step, loss):
        if not math.isfinite(loss):
            raise InputError(
                f"the loss of step {step} is {loss}: start again with a lower --lr than "
                f"{self.options['lr']:g}; the last checkpoint is from before"
            )
        self.state["losses"].append(loss)
        if step % self.options["log_every"] == 0 or step == self.options["steps"]:
            losses, self.state["losses"] = self.state["losses"], []
            self._add_row(step, loss=sum(losses) / len(losses))

    def add_validation(self, accuracy, score):
        self.state["validated"] = self.step
        if score > self.state["best"]["mean_iou"]:
            self.state["best"] = {"mean_iou": score, "step": self.step}
        self._add_row(self.step, pixel_accuracy=accuracy, mean_iou=score)

    def save(self, better=False):
        """Write the checkpoints and the curves."""
        if self.writes:
            self.state.update(step=self.step, seconds=self.seconds)
            # The best first: the last one says which step that is.
            for name in ("best", "last") if better else ("last",):
                path = self.folder / "checkpoints" / f"{name}.npz"
                save(path, self.state, self._net, self._trainer)
            plots.plot_curves(self.state["rows"], self.folder / "curves.png")

    def load_best(self):
        path = self.folder / "checkpoints" / "best.npz"
        restore_net(path, load(path)[1], self._net)

    def _add_row(self, step, **values):
        row = {"step": step, "seconds": self.seconds, "rate": self._trainer.learning_rate}
        self.state["rows"].append({**row, **values})
        self._write_rows()

    def _write_rows(self):
        if self.writes:
            lines = [[row.get(name, "") for name in COLUMNS] for row in self.state["rows"]]
            text = "".join(",".join(map(str, line)) + "\n" for line in [COLUMNS, *lines])
            with replacing(self.folder / "metrics.csv") as file:
                file.write(text.encode())


def new_folder(output=None):
    """Make the folder of a new run: `output`, or the next runs/segmentation-N."""
    while True:
        path = Path(output) if output else RUNS / f"segmentation-{max(_runs(), default=0) + 1}"
        try:
            path.mkdir(parents=True)
            return path
        except OSError as error:
            # Another run may have taken the number in the meantime.
            if output or not path.is_dir():
                raise InputError(
                    f"the folder {path} cannot be made ({error.strerror}): name a new one with "
                    f"--output, or continue the run in it with --resume {path}"
                ) from None


def find(where=None):
    """The checkpoint that --resume names: a run's folder, a checkpoint, or the newest run."""
    if not where and not _runs():
        raise InputError(f"--resume finds no {RUNS}/segmentation-N: name the folder of a run")
    path = Path(where or _runs()[max(_runs())])
    path = path / "checkpoints" / "last.npz" if path.is_dir() else path
    if not path.exists():
        raise InputError(f"there is no {path}: name the folder of a run that has saved something")
    return path


def _runs():
    """{number: folder} of the runs in RUNS."""
    matches = [(re.fullmatch(r"segmentation-(\d+)", path.name), path) for path in RUNS.glob("*")]
    return {int(match.group(1)): path for match, path in matches if match}


def save(path, state, net, trainer):
    """Write a checkpoint. Whatever happens meanwhile, `path` is the old file or the new, whole."""
    arrays = {}
    for name, parameter in net._collect_params_with_prefix().items():
        arrays["parameter:" + name] = parameter.list_data()[0].asnumpy()
    for name, index in _trained(net, trainer):
        for i, array in enumerate(_flat(trainer._updaters[0].states.get(index))):
            arrays[f"optimizer:{name}:{i}"] = array.asnumpy()
    state = {**state, "format": FORMAT, "updates": trainer.optimizer.num_update}
    if hasattr(trainer, "_amp_loss_scaler"):
        state["loss_scaler"] = vars(trainer._amp_loss_scaler)
    with replacing(path) as file:
        np.savez(file, state=np.array(json.dumps(state)), **arrays)


def load(path):
    """(state, arrays) of a checkpoint."""
    remedy = "name the folder of a run, or its checkpoints/best.npz"
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        state = json.loads(str(arrays.pop("state")))
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no checkpoint, or a damaged one ({error}): {remedy}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError(f"{path} is a checkpoint of another version: {remedy}")
    return state, arrays


def restore_net(path, arrays, net):
    """Give the net, which is initialized, the parameters of a checkpoint."""
    for name, parameter in net._collect_params_with_prefix().items():
        try:
            array = arrays["parameter:" + name]
            parameter.shape = array.shape
            parameter.set_data(mx.nd.array(array, dtype=array.dtype))
        except (KeyError, AssertionError):
            remedy = "it is of another net; give the --model, --backbone and --classes of its run"
            raise InputError(f"{path} has no {name} of shape {parameter.shape}: {remedy}") from None


def restore_trainer(state, arrays, net, trainer):
    """Give the trainer, none of whose steps were made, the state of a checkpoint."""
    optimizer = trainer.optimizer
    optimizer.begin_num_update = optimizer.num_update = state["updates"]
    if state["updates"]:
        for name, index in _trained(net, trainer):
            for updater, weight in zip(trainer._updaters, trainer._params[index].list_data()):
                kept = optimizer.create_state_multi_precision(index, weight)
                for i, array in enumerate(_flat(kept)):
                    array[:] = arrays[f"optimizer:{name}:{i}"]
                updater.states[index], updater.states_synced[index] = kept, True
    if hasattr(trainer, "_amp_loss_scaler"):
        vars(trainer._amp_loss_scaler).update(state.get("loss_scaler", {}))


def _trained(net, trainer):
    """[(name in the net, index in the trainer)] of the parameters that are trained."""
    names = {id(p): name for name, p in net._collect_params_with_prefix().items()}
    return [(names[id(p)], i) for i, p in enumerate(trainer._params) if p.grad_req != "null"]


def _flat(kept):
    """The arrays that an optimizer keeps for a parameter: None, one, or nested tuples of them."""
    if isinstance(kept, (list, tuple)):
        return [array for part in kept for array in _flat(part)]
    return [] if kept is None else [kept]
