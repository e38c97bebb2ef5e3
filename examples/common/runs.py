"""The folder of a run, and checkpoints: NumPy archives (.npz) from which a run continues.

A checkpoint holds only arrays and JSON, no pickle, so one from elsewhere runs no code: `state`
(JSON: step, options, rows of metrics.csv, best score), `parameter:NAME`, and `optimizer:NAME:I`,
the I-th array that the optimizer keeps for that parameter.
"""

import argparse
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import zipfile
from pathlib import Path

import mxnet as mx
import numpy as np

from common import plots
from common.files import InputError, replacing

RUNS = Path("runs")
DAMAGED = (zipfile.BadZipFile, OSError, EOFError, ValueError, KeyError, AttributeError)


class Interrupt:
    """Ctrl-C or SIGTERM sets `requested`; Ctrl-C after that ends the process at once. SIGTERM does
    not: a scheduler that sends it to all processes sends it to the launcher too, which passes it
    on."""

    def __init__(self):
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, *_):
        self.requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Kind:
    """The runs of one example, by default in folders runs/NAME-1, NAME-2, ...

    `measures`: the columns of metrics.csv that a validation fills, and their names. The higher the
    last, the better.
    """

    def __init__(self, name, **measures):
        self.name, self.measures = name, measures
        self.format = f"gluon_syncbn {name} 3"

    def new_folder(self, output=None):
        """Make the folder of a new run."""
        while True:
            number = max(self._folders(), default=0) + 1
            path = Path(output) if output else RUNS / f"{self.name}-{number}"
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

    def find(self, where=None):
        """The checkpoint that --resume names: a run's folder, a checkpoint, or the newest run."""
        folders = self._folders()
        if not where and not folders:
            raise InputError(f"--resume finds no {RUNS}/{self.name}-N: name the folder of a run")
        path = Path(where or folders[max(folders)])
        path = path / "checkpoints" / "last.npz" if path.is_dir() else path
        if not path.exists():
            raise InputError(
                f"there is no {path}: name the folder of a run that has saved something"
            )
        return path

    def open(self, path):
        """(file, options) of a run, a checkpoint, or a file that was exported."""
        path = Path(path)
        file = path / "checkpoints" / "best.npz" if path.is_dir() else path
        config = file.parent.parent / "config.json"
        try:
            options = argparse.Namespace(**json.loads(config.read_text()))
        except (OSError, ValueError, TypeError) as error:
            remedy = "give --model the folder of a run, or a file in its checkpoints or export"
            raise InputError(f"{config} cannot be read ({error}): {remedy}") from None
        if not file.exists():
            raise InputError(f"there is no {file}: the run has saved nothing yet")
        if getattr(options, "example", None) != self.name:
            text = f"{config} is not of a {self.name}, or of an older version"
            raise InputError(f"{text}: name another run, or take its own predict.py")
        options.pretrained = False
        return file, options

    def _folders(self):
        """{number: folder} of the runs in RUNS."""
        pattern = re.escape(self.name) + r"-(\d+)"
        matches = [(re.fullmatch(pattern, path.name), path) for path in RUNS.glob("*")]
        return {int(match.group(1)): path for match, path in matches if match}

    def load(self, path):
        """(state, arrays) of a checkpoint."""
        remedy = "name the folder of a run, or its checkpoints/best.npz"
        try:
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            state = json.loads(str(arrays.pop("state")))
        except DAMAGED as error:
            text = f"{path} is no checkpoint, or a damaged one ({error}): {remedy}"
            raise InputError(text) from None
        if not isinstance(state, dict) or state.get("format") != self.format:
            text = f"{path} is a checkpoint of another version or example: {remedy}"
            raise InputError(text)
        return state, arrays


class Run:
    """The folder of a run, and its progress; only one of several processes writes.

    `state` goes into the checkpoints. It includes the rows of metrics.csv, so that after a kill the
    file has no row of a step that is repeated.
    """

    def __init__(self, kind, options, names, net, trainer, writes=True):
        self.options, self.names, self.writes = vars(options), names, writes
        self._kind, self._net, self._trainer = kind, net, trainer
        best = {"score": -1.0, "step": 0}
        self.state = {"step": 0, "validated": 0, "losses": [], "rows": [], "best": best}
        if options.resume is not None:
            path = kind.find(options.resume)
            self.state, arrays = kind.load(path)
            restore_net(path, arrays, net)
            restore_trainer(self.state, arrays, net, trainer)
            mx.random.seed(options.seed + self.state["step"])  # for dropout
            self.folder = path.absolute().parent.parent
        else:
            self.folder = kind.new_folder(options.output) if writes else None
        self.state.update(options=self.options)
        self.step = self.state["step"]
        self._start = time.perf_counter() - self.state.get("seconds", 0)
        if writes:
            with replacing(self.folder / "config.json") as file:
                content = {"example": kind.name, "names": names, **self.options}
                file.write(json.dumps(content, indent=2).encode())
            self._write_rows()

    @property
    def seconds(self):
        return time.perf_counter() - self._start

    def due(self, every):
        """Whether a validation is due."""
        now = self.step % every == 0 or self.step == self.options["steps"]
        return now and self.state["validated"] < self.step

    def say(self, text):
        if self.writes:
            print(text, flush=True)

    def add_loss(self, step, loss):
        if not math.isfinite(loss):
            raise InputError(
                f"the loss of step {step} is {loss}: start again with a lower --lr than "
                f"{self.options['lr']:g}; the last checkpoint is from before"
            )
        losses, steps = self.state["losses"], self.options["steps"]
        losses.append(loss)
        ends_row = step % self.options["log_every"] == 0 or step == steps
        if ends_row or step == 1:
            mean, minutes = sum(losses) / len(losses), self.seconds / step * (steps - step) / 60
            # The first step takes much longer than the others.
            left = f", about {minutes:.0f} minutes left" if 1 < step < steps else ""
            self.say(f"step {step} of {steps}: loss {mean:.4f}{left}")
        if ends_row:
            self.state["losses"] = []
            self._add_row(step, loss=mean)

    def add_validation(self, *scores):
        """Print the values of the measures. The state keeps the step of the best."""
        self.state["validated"] = self.step
        values = dict(zip(self._kind.measures, scores))
        better = scores[-1] > self.state["best"]["score"]
        if better:
            self.state["best"] = {"score": scores[-1], "step": self.step}
        self._add_row(self.step, **values)
        pairs = zip(self._kind.measures.values(), scores)
        text = ", ".join(f"{name} {value:.4f}" for name, value in pairs)
        self.say(f"step {self.step}: {text}{' (the best so far)' if better else ''}")
        self.save(better)

    def save(self, better=False):
        """Write the checkpoints and the curves."""
        if self.writes:
            self.state.update(step=self.step, seconds=self.seconds)
            # The best first: the last one says which step that is.
            for name in ("best", "last") if better else ("last",):
                path = self.folder / "checkpoints" / f"{name}.npz"
                save(path, {**self.state, "format": self._kind.format}, self._net, self._trainer)
            curves = self.folder / "curves.png"
            plots.plot_curves(self.state["rows"], self._kind.measures, curves)

    def stop(self):
        """Save all before the end, and say how to go on. Returns the exit status."""
        self.save()
        self.say(f"stopped after step {self.step}, all is saved; to continue: {self.command()}")
        return 130

    def command(self, *options):
        """The command that goes on with the run."""
        options = shlex.join(["--resume", str(self.folder), *options])
        if target := os.environ.get("MAKE_TARGET"):
            return f"make {target} ARGS={shlex.quote(options)}"
        if "GLUON_SYNCBN_SIZE" in os.environ:
            return f"the launcher's command with {options}"
        return f"{shlex.join([sys.executable, sys.argv[0]])} {options}"

    def say_best(self):
        best, name = self.state["best"], list(self._kind.measures.values())[-1]
        text = f"{self.seconds:.0f} s, best {name} {best['score']:.4f} at step {best['step']}"
        self.say(f"{text}; curves.png and predictions.png in {self.folder}")

    def export_folder(self):
        """Give the net its best parameters for an export. The new folder, or None."""
        if not self.writes or not self.options["export"]:
            return None
        if self.options["dtype"] != "float32":
            # MXNet's AMP has changed all operators of this process.
            self.say(f"to export it in float32: {self.command('--dtype', 'float32')}")
            return None
        path = self.folder / "checkpoints" / "best.npz"
        restore_net(path, self._kind.load(path)[1], self._net)
        self._net.hybridize(static_alloc=False)
        folder = self.folder / "export"
        folder.mkdir(exist_ok=True)
        return folder

    def _add_row(self, step, **values):
        row = {"step": step, "seconds": self.seconds, "rate": self._trainer.learning_rate}
        self.state["rows"].append({**row, **values})
        self._write_rows()

    def _write_rows(self):
        if self.writes:
            columns = ("step", "seconds", "rate", "loss", *self._kind.measures)
            lines = [[row.get(name, "") for name in columns] for row in self.state["rows"]]
            text = "".join(",".join(map(str, line)) + "\n" for line in [columns, *lines])
            with replacing(self.folder / "metrics.csv") as file:
                file.write(text.encode())


def save(path, state, net, trainer):
    """Write a checkpoint. Whatever happens, `path` is the complete old or new file."""
    arrays = {}
    for name, parameter in net._collect_params_with_prefix().items():
        arrays["parameter:" + name] = parameter.list_data()[0].asnumpy()
    for name, index in _trained(net, trainer):
        for i, array in enumerate(_flat(trainer._updaters[0].states.get(index))):
            arrays[f"optimizer:{name}:{i}"] = array.asnumpy()
    state = {**state, "updates": trainer.optimizer.num_update}
    if hasattr(trainer, "_amp_loss_scaler"):
        state["loss_scaler"] = vars(trainer._amp_loss_scaler)
    with replacing(path) as file:
        np.savez(file, state=np.array(json.dumps(state)), **arrays)


def load_net(kind, file, net):
    """The net with the parameters of a checkpoint, or the graph of an exported file."""
    if file.name.endswith("-symbol.json"):
        parameters = str(file).replace("-symbol.json", "-0000.params")
        net = mx.gluon.SymbolBlock.imports(str(file), ["data"], parameters)
    else:
        net.initialize(force_reinit=True)
        restore_net(file, kind.load(file)[1], net)
    net.hybridize(static_alloc=True)
    return net


def restore_net(path, arrays, net):
    """Give an initialized net the parameters of a checkpoint."""
    for name, parameter in net._collect_params_with_prefix().items():
        try:
            array = arrays["parameter:" + name]
            parameter.shape = array.shape
            parameter.set_data(mx.nd.array(array, dtype=array.dtype))
            if parameter._deferred_init:  # Its shape was unknown: MXNet would wait for a forward.
                parameter._finish_deferred_init()
        except (KeyError, AssertionError):
            remedy = "it is of another net; give the --model, --backbone and --classes of its run"
            raise InputError(f"{path} has no {name} of shape {parameter.shape}: {remedy}") from None


def restore_trainer(state, arrays, net, trainer):
    """Give a trainer that has made no step the state of a checkpoint."""
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
