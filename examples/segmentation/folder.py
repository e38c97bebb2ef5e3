"""The output folder of a run: what is in it, and the rows of its metrics.csv."""

import contextlib
import csv
import json
from pathlib import Path

from checkpoint import CheckpointError, load, replacing
from options import CONFIG, taken

COLUMNS = (
    "step",
    "images",
    "seconds",
    "learning_rate",
    "loss",
    "images_per_second",
    "pixel_accuracy",
    "mean_iou",
)
INTEGERS = ("step", "images")


class RunFolder:
    """Paths and records of a run. `rows` holds the rows of metrics.csv as dictionaries.

    With `writes=False`, as all workers but the first have it, no file is touched.
    """

    def __init__(self, path, writes=True):
        self.path = Path(path)
        self.writes = writes
        self.config = self.path / CONFIG
        self.metrics = self.path / "metrics.csv"
        self.curves = self.path / "curves.png"
        self.predictions = self.path / "predictions.png"
        self.best_parameters = self.path / "best.params"
        self.last = self.path / "checkpoints" / "last.ckpt"
        self.best = self.path / "checkpoints" / "best.ckpt"
        names = ("model-symbol.json", "model-0000.params", "model.onnx")
        names += ("folded-symbol.json", "folded-0000.params")
        self.exported = [self.path / "export" / name for name in names]
        self.rows = []

    def start(self, config, overwrite=False):
        """Begin a run here: remove the files of an earlier one, and no others.

        Without `overwrite` the folder must hold none; of runs that start together one gets it.
        """
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            if not overwrite:
                try:
                    self.config.open("x").close()
                except FileExistsError:
                    raise taken(self.path) from None
                # Of a run that found no room at its start nothing may say that there is one.
                undo.callback(self.config.unlink)
            self._begin(config)
            undo.pop_all()

    def _begin(self, config):
        for path in (
            self.metrics,
            self.curves,
            self.predictions,
            self.best_parameters,
            self.last,
            self.best,
            *self.exported,
        ):
            if path.exists():
                path.unlink()
        self.write_config(config)
        self._write_rows()

    def write_config(self, config):
        if not self.writes:
            return
        with replacing(self.config) as file:
            file.write(json.dumps(config, indent=2).encode() + b"\n")

    def best_step(self):
        """Of which step the best net is kept here; 0 if of none."""
        try:
            return load(self.best).step if self.best_parameters.exists() else 0
        except CheckpointError:
            return 0

    def take_best(self, source):
        """Take the best net of the folder `source`."""
        if not self.writes:
            return
        for ours, theirs in (
            (self.best_parameters, source.best_parameters),
            (self.best, source.best),
        ):
            with replacing(ours) as file:
                file.write(theirs.read_bytes())

    def continue_from(self, source, step):
        """Take the rows of the folder `source` (it may be this one) up to `step`."""
        if not self.writes:
            return
        if source.metrics.exists():
            with open(source.metrics, newline="") as file:
                rows = [
                    {name: _parse(name, row) for name in COLUMNS} for row in csv.DictReader(file)
                ]
            self.rows = [row for row in rows if row["step"] is not None and row["step"] <= step]
        self._write_rows()

    def add_row(self, **values):
        if not self.writes:
            return
        row = {name: values.get(name) for name in COLUMNS}
        self.rows.append(row)
        with open(self.metrics, "a", newline="") as file:
            csv.writer(file).writerow(_format(row))

    def _write_rows(self):
        with replacing(self.metrics) as file:
            lines = [",".join(COLUMNS)] + [",".join(_format(row)) for row in self.rows]
            file.write(("\r\n".join(lines) + "\r\n").encode())


def _parse(name, row):
    text = row.get(name)
    if not text:
        return None
    return int(text) if name in INTEGERS else float(text)


def _format(row):
    values = (row[name] for name in COLUMNS)
    return ["" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v) for v in values]
