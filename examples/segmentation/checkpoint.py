"""Checkpoints: one file each, which holds all that a run needs to continue bit for bit.

The file is a NumPy archive (.npz), so its checksums tell whether it is whole:

- ``state``: JSON with the format, the step, the configuration and the progress so far;
- ``parameter:NAME``: a parameter as the first device has it (all have the same);
- ``statistics:I:NAME``: running statistics as device I = 1, 2, ... has them, which unsynchronized
  layers let differ;
- ``trainer``: what `Trainer.save_states` writes, the optimizer's state.

There is no random state beyond seed and step: images depend on seed and index (`data`), the first
parameters on the seed (`model`), and nothing else is drawn.
"""

import contextlib
import json
import os
import zipfile
from pathlib import Path

import numpy as np

FORMAT = "gluon_syncbn segmentation example, checkpoint 1"


class CheckpointError(Exception):
    """A file that cannot be continued from; the text says why and what to do."""


class Checkpoint:
    """A checkpoint in memory.

    `step` counts the steps done; `config` and `progress` are what the run wants to find again;
    `arrays` holds parameters by the names above; `trainer` is bytes. `folder` is that of the run it
    was read from, if any.
    """

    def __init__(self, step, config, progress, arrays, trainer):
        self.step = step
        self.config = config
        self.progress = progress
        self.arrays = arrays
        self.trainer = trainer
        self.folder = None

    def save(self, path):
        """Write to `path`: whatever happens meanwhile, it is the old file or the new one, whole."""
        state = {
            "format": FORMAT,
            "step": self.step,
            "config": self.config,
            "progress": self.progress,
        }
        with replacing(path) as file:
            np.savez(
                file,
                state=np.array(json.dumps(state)),
                trainer=np.frombuffer(self.trainer, np.uint8),
                **self.arrays,
            )


def load(path):
    """The Checkpoint in a file, or a CheckpointError."""
    path = Path(path)
    remedy = "name the folder of a run or its checkpoints/last.ckpt"
    foreign = f"{path} is no checkpoint of this example; {remedy}"
    try:
        with np.load(path, allow_pickle=False) as file:
            if not {"state", "trainer"} <= set(file.files):
                raise CheckpointError(foreign)
            arrays = {name: file[name] for name in file.files}
        state = json.loads(str(arrays.pop("state")))
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}; {remedy}") from None
    except (zipfile.BadZipFile, EOFError, OSError, json.JSONDecodeError, ValueError) as error:
        # An OSError without a number is NumPy's, of what a file holds.
        if isinstance(error, OSError) and error.errno:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); {remedy}") from None
        if not _looks_like_zip(path):
            raise CheckpointError(foreign) from None
        raise CheckpointError(
            f"{path} is damaged ({error}); train.py can continue from the other checkpoint beside "
            f"it, {'last' if path.name == 'best.ckpt' else 'best'}.ckpt"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(foreign)
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has the format {state.get('format')!r}, but {FORMAT!r} was expected; "
            "continue with the version of this example that wrote it"
        )
    return Checkpoint(
        state["step"], state["config"], state["progress"], arrays, arrays.pop("trainer").tobytes()
    )


def _looks_like_zip(path):
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


@contextlib.contextmanager
def replacing(path):
    """A binary file to write that takes the place of `path` once it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            # The name must not point to the new file before its contents are on the disk.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
