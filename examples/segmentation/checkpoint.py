"""The folder of a run, and checkpoints: NumPy archives (.npz) from which a run continues.

A checkpoint holds arrays and JSON alone, no pickle, so one from elsewhere runs no code:
`state` (JSON: step, options, rows of metrics.csv, best score), `parameter:NAME`, and
`optimizer:NAME:I`, the I-th array that the optimizer keeps for that parameter.
"""

import contextlib
import json
import os
import re
import signal
import zipfile
from pathlib import Path

import mxnet as mx
import numpy as np

from data import InputError

FORMAT = "gluon_syncbn segmentation 2"
RUNS = Path("runs")


class Interrupt:
    """The first Ctrl-C or SIGTERM sets `requested`, a second one ends the process at once."""

    def __init__(self):
        self.requested = False
        self._before = {s: signal.signal(s, self._request) for s in (signal.SIGINT, signal.SIGTERM)}

    def _request(self, *_):
        self.requested = True
        self.restore(signal.SIG_DFL)

    def restore(self, handler=None):
        for number, before in self._before.items():
            signal.signal(number, before if handler is None else handler)


def new_run(output=None):
    """Make the folder of a new run: `output`, or the next runs/segmentation-N."""
    while True:
        path = Path(output) if output else RUNS / f"segmentation-{max(_runs(), default=0) + 1}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return path
        except FileExistsError as error:
            # Another run may have taken the number in the meantime.
            if output or not path.is_dir():
                raise InputError(
                    f"--output {path} exists ({error}): name a new folder, or continue the run in "
                    f"it with --resume {path}"
                ) from None
        except OSError as error:
            raise InputError(f"{path} cannot be made ({error}): name another --output") from None


def find_checkpoint(where=None):
    """The checkpoint that --resume names: a run's folder, a checkpoint, or the newest run."""
    if not where and not _runs():
        raise InputError(f"--resume finds no {RUNS}/segmentation-N: name the folder of a run")
    path = Path(where or _runs()[max(_runs())])
    path = path / "checkpoints" / "last.npz" if path.is_dir() else path
    if not path.exists():
        raise InputError(
            f"there is no {path}: name the folder of a run that has saved a checkpoint"
        )
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
    for name, index in _indices(net, trainer):
        for i, array in enumerate(_flat(trainer._updaters[0].states.get(index))):
            arrays[f"optimizer:{name}:{i}"] = array.asnumpy()
    state = {**state, "format": FORMAT, "updates": trainer.optimizer.num_update}
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if scaler:
        state["loss_scale"] = [scaler.loss_scale, scaler._unskipped]
    with replacing(path) as file:
        np.savez(file, state=np.array(json.dumps(state)), **arrays)


def load(path):
    """(state, arrays) of a checkpoint."""
    remedy = "name the folder of a run, or its checkpoints/best.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
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
        array = arrays.get("parameter:" + name)
        # A shape of zeros is not known before the first images.
        known = parameter.shape or ()
        if (
            array is None
            or len(known) != array.ndim
            or any(ours not in (0, theirs) for ours, theirs in zip(known, array.shape))
        ):
            raise InputError(
                f"{path} has no {name} of shape {known}: it is of another net; give the --model "
                "and --backbone of its run"
            )
        parameter.shape = array.shape
        parameter.set_data(mx.nd.array(array, dtype=array.dtype))


def restore_trainer(state, arrays, net, trainer):
    """Give the trainer, none of whose steps were made, the state of a checkpoint."""
    optimizer = trainer.optimizer
    optimizer.begin_num_update = optimizer.num_update = state["updates"]
    if state["updates"]:
        for name, index in _indices(net, trainer):
            for updater, weight in zip(trainer._updaters, trainer._params[index].list_data()):
                kept = optimizer.create_state_multi_precision(index, weight)
                for i, array in enumerate(_flat(kept)):
                    array[:] = arrays[f"optimizer:{name}:{i}"]
                updater.states[index], updater.states_synced[index] = kept, True
    if "loss_scale" in state:
        scaler = trainer._amp_loss_scaler
        scaler.loss_scale, scaler._unskipped = state["loss_scale"]


def _indices(net, trainer):
    """[(name in the net, index in the trainer)] of the parameters that are trained."""
    names = {id(p): name for name, p in net._collect_params_with_prefix().items()}
    pairs = [(names[id(p)], i) for i, p in enumerate(trainer._params) if p.grad_req != "null"]
    return pairs


def _flat(kept):
    """The arrays that an optimizer keeps for a parameter: None, one, or nested tuples of them."""
    if isinstance(kept, (list, tuple)):
        return [array for part in kept for array in _flat(part)]
    return [] if kept is None else [kept]


@contextlib.contextmanager
def replacing(path):
    """A binary file to write that takes the place of `path` once it is complete."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            # The name must not point to the new file before its contents are on the disk.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error}): make room; --resume continues from the last "
            "checkpoint"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
