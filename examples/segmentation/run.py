"""A whole run: data, net, the loop over steps, validation, records and checkpoints."""

import math
import os
import shlex
import sys
import time

import numpy as np

import plots
import workers
from checkpoint import CheckpointError
from console import Console, python
from data import DataError, batches, pixel_counts, stack
from folder import RunFolder
from interrupt import Interrupt
from metrics import Confusion
from options import UsageError, cannot_write, same_folder, taken
from setting import describe, find_contexts, open_data
from trainer import SegmentationTrainer

PICTURES = 8
NO_BEST = {"mean_iou": -1.0, "step": 0}


def run(options):
    """Train as the options say; return the exit status: 0, or 130 after Ctrl-C."""
    team = workers.Team() if workers.started() else workers.Alone()
    try:
        with Interrupt() as interrupt:
            return Run(options, interrupt, team).go()
    except BrokenPipeError:
        raise
    except OSError as error:  # What is read has errors of its own.
        raise cannot_write(options.output, error) from None


class Run:
    """All workers of a `team` do the same, each with its part of every batch, and come to the same
    decisions. The first alone writes and speaks."""

    def __init__(self, options, interrupt, team=None):
        self._options = options
        self._interrupt = interrupt
        self._team = team = team or workers.Alone()
        options.workers = team.size
        self._console = Console(shown=team.rank == 0)
        self._say = self._console.say
        resumed = options.checkpoint
        self._folder = RunFolder(options.output, writes=team.rank == 0)
        in_place = resumed is not None and same_folder(resumed.folder, options.output)
        contexts = find_contexts(options, resumed)
        self._train_data, self._val_data = open_data(options, self._console.bar)
        if options.steps is None:
            options.steps = options.epochs * math.ceil(len(self._train_data) / options.batch)
        self._names = self._train_data.names
        each = len(contexts) // team.size
        own = contexts[team.rank * each : (team.rank + 1) * each]
        self._trainer = SegmentationTrainer(options, own, len(self._names), team)
        self._config = describe(options, contexts, self._train_data)
        self._step = 0  # how many steps have been started
        self._known = 0  # of how many the loss is known
        self._own_losses = []  # of the next steps: what this worker knows of them
        # What a checkpoint holds besides the trainer's state.
        self._progress = {
            "seconds": 0.0,  # spent in training steps
            "losses": [],  # since the last row of metrics.csv
            "row_seconds": 0.0,  # `seconds` at that row
            "validated": 0,  # at this step
            "best": dict(NO_BEST),
        }
        if resumed:
            self._restore(resumed)
        # From here on files are written; all else that can be wrong has been looked at, by all.
        team.gather("ready", [1])
        if in_place:
            # Its images may lie elsewhere now, and the export looks for them.
            self._folder.write_config(self._config)
        else:
            self._start_folder()
        if resumed:
            source = RunFolder(resumed.folder or options.output)
            if not in_place:
                self._take_best(source)
            self._folder.continue_from(source, self._step)

    def _start_folder(self):
        refusal = None
        try:
            self._folder.start(self._config, self._options.overwrite)
        except (UsageError, OSError) as error:
            refusal = error
        # Only the first worker sees it, and all have to end.
        if self._team.gather("taken", [refusal is not None]).any():
            raise refusal or taken(self._options.output)

    def _restore(self, resumed):
        if resumed.config["data"] != self._config["data"]:
            raise UsageError(
                "train.txt, val.txt or the classes of --data are not those of the run to resume: "
                "put them back, name the folder that has them with --data, or start a new run with "
                "another --output"
            )
        try:
            self._trainer.restore(resumed)
        except CheckpointError as error:
            raise UsageError(f"--resume: {error}") from None
        self._step = self._known = resumed.step
        self._progress = resumed.progress

    def _take_best(self, source):
        """The best net so far comes along, or there is none if `source` no longer has it."""
        step = self._progress["best"]["step"]
        if step and source.best_step() == step:
            self._folder.take_best(source)
        else:
            self._progress["best"] = dict(NO_BEST)

    def go(self):
        """Train from the current step on; return the exit status."""
        options = self._options
        self._say(
            f"--norm {options.norm} on {self._places()}, {options.steps} steps of {options.batch} "
            f"images, into {options.output}"
        )
        if self._step:
            self._say(f"continuing after step {self._step}")
        try:
            confusion = self._train()
        except (UsageError, DataError):
            # No device may be left waiting for another when the process ends.
            self._trainer.finish()
            raise
        if confusion is None:
            self._save()
            command = shlex.join([python(), sys.argv[0], "--resume", str(options.output)])
            self._say(
                f"stopped after step {self._step} of {options.steps}, all is saved; to continue:\n"
                f"  {command}"
            )
        else:
            self._summarize(confusion)
        # Nobody ends while another still saves.
        self._team.gather("end", [1])
        return 130 if confusion is None else 0

    def _train(self):
        """Train and validate; return the last validation, or None after an interrupt."""
        steps, batch = self._options.steps, self._options.batch
        chunks = (range(i * batch, (i + 1) * batch) for i in range(self._step, steps))
        chunks = map(self._trainer.own_share, chunks)
        # Reading photos from a disk takes longer than making digits.
        threads = min(4, os.cpu_count() or 1) if self._options.data else 1
        loader = batches(self._train_data, chunks, threads)
        confusion = None
        self._clock = time.perf_counter()
        sizes = {"initial": self._step * batch, "total": steps * batch}
        with self._console.bar(unit=" images", **sizes) as bar:
            while True:
                # A run may have been interrupted between a step and its validation.
                if self._due(self._step, self._options.validate_every):
                    if self._progress["validated"] < self._step:
                        confusion = self._validate()
                if self._step == steps:
                    break
                images, labels = next(loader)
                stop, counts, losses = self._agree(labels)
                self._record(losses)
                if stop:
                    break
                self._own_losses = self._trainer.step(self._step, images, labels, counts)
                self._step += 1
                bar.set_description_str(f"step {self._step}/{steps}", refresh=False)
                if losses:
                    bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
                bar.update(batch)
            loader.close()
            self._finish()
        return confusion if self._step == steps else None

    def _agree(self, labels):
        """What all workers have to know of each other before a step, in one message: whether one
        was interrupted, the pixel counts of the batch, and the losses known since the last step."""
        counts = pixel_counts(labels, len(self._names))
        losses, self._own_losses = self._own_losses, []
        # Of all steps but the first two there is one.
        message = [self._interrupt.requested, *counts, *losses]
        everyone = self._team.gather(f"step, {len(losses)} losses", message)
        stop, background, others, *losses = everyone.sum(axis=0).tolist()
        return stop > 0, (background, others), losses

    def _finish(self):
        """Wait for all steps that were started."""
        losses = self._own_losses + self._trainer.finish()
        self._own_losses = []
        if losses:
            everyone = self._team.gather(f"last {len(losses)} losses", losses)
            self._record(everyone.sum(axis=0).tolist())

    def _due(self, step, interval):
        return step > 0 and (step % interval == 0 or step == self._options.steps)

    def _record(self, losses):
        """Take note of the losses of the next steps, which come in some steps late."""
        if not losses:
            return
        now = time.perf_counter()
        seconds = (now - self._clock) / len(losses)
        self._clock = now
        for loss in losses:
            self._known += 1
            self._progress["seconds"] += seconds
            self._progress["losses"].append(loss)
            if not math.isfinite(loss):
                raise UsageError(
                    f"the loss of step {self._known} is {loss}: start again with a lower --lr than "
                    f"{self._options.lr:g}; {self._folder.last.parent} has what was saved before"
                )
            if self._due(self._known, self._options.log_every):
                self._add_loss_row()

    def _add_loss_row(self):
        progress, batch = self._progress, self._options.batch
        losses = progress["losses"]
        seconds = progress["seconds"] - progress["row_seconds"]
        self._folder.add_row(
            step=self._known,
            images=self._known * batch,
            seconds=progress["seconds"],
            learning_rate=self._trainer.learning_rate(self._known - 1),
            loss=sum(losses) / len(losses),
            images_per_second=len(losses) * batch / seconds,
        )
        progress.update(losses=[], row_seconds=progress["seconds"])

    def _validate(self):
        """Validate, write all files and return the Confusion, or None if interrupted."""
        self._finish()
        confusion = self._evaluate()
        # The time since then is none of training.
        self._clock = time.perf_counter()
        if confusion is None:
            return None
        progress, score = self._progress, confusion.mean_iou
        progress["validated"] = self._step
        self._folder.add_row(
            step=self._step,
            images=self._step * self._options.batch,
            seconds=progress["seconds"],
            pixel_accuracy=confusion.pixel_accuracy,
            mean_iou=score,
        )
        better = score > progress["best"]["mean_iou"]
        if better:
            progress["best"] = {"mean_iou": score, "step": self._step}
        self._save(better)
        self._say(
            f"step {self._step}: pixel accuracy {confusion.pixel_accuracy:.4f}, mean IoU "
            f"{score:.4f}" + (" (the best so far)" if better else "")
        )
        self._clock = time.perf_counter()
        return confusion

    def _evaluate(self):
        confusion = Confusion(len(self._names))
        count, batch = len(self._val_data), self._options.batch
        chunks = [range(i, min(i + batch, count)) for i in range(0, count, batch)]
        shares = [self._trainer.own_share_to_predict(chunk) for chunk in chunks]
        loader = batches(self._val_data, filter(len, shares))
        predictions = self._trainer.predict(loader)
        for share in shares:
            if share:
                confusion.add(*next(predictions))
            if self._team.gather("go on", [self._interrupt.requested]).any():
                loader.close()
                return None
        everyone = self._team.gather("confusion", confusion.matrix.ravel())
        confusion.matrix = everyone.sum(axis=0).astype(int).reshape(confusion.matrix.shape)
        return confusion

    def _save(self, better=False):
        """Write checkpoints and pictures."""
        checkpoint = self._trainer.checkpoint(self._step, self._config, self._progress)
        if self._team.rank > 0:
            return
        # The last one says which step was the best, so it must not be there before that is: what is
        # lost before then is trained again.
        if better:
            self._trainer.save_parameters(self._folder.best_parameters)
            checkpoint.save(self._folder.best)
        checkpoint.save(self._folder.last)
        self._draw()

    def _draw(self):
        plots.plot_curves(self._folder.rows, self._folder.curves, self._title())
        count = len(self._val_data)
        chosen = np.unique(np.linspace(0, count - 1, PICTURES).astype(int))
        images, labels = stack(self._val_data, chosen.tolist())
        [(_, predictions)] = self._trainer.predict([(images, labels)])
        plots.plot_predictions(
            images, labels, predictions, self._names, self._folder.predictions, self._title()
        )

    def _title(self):
        options = self._options
        return f"--norm {options.norm} on {self._places()}, step {self._step} of {options.steps}"

    def _places(self):
        devices, count = self._options.devices, self._options.workers
        return devices if count == 1 else f"{devices} in {count} workers"

    def _summarize(self, confusion):
        options, folder, best = self._options, self._folder, self._progress["best"]
        seconds = self._progress["seconds"]
        speed = self._step * options.batch / seconds
        classes = ", ".join(
            f"{name} {iou:.3f}" for name, iou in zip(self._names, confusion.class_iou) if iou == iou
        )
        self._say(
            f"IoU of the classes: {classes}\n"
            f"trained {self._step} steps in {seconds:.0f} s, {speed:.0f} images/s\n"
            f"pixel accuracy {confusion.pixel_accuracy:.4f}, mean IoU {confusion.mean_iou:.4f} "
            f"over {self._val_data.images} validation images (best {best['mean_iou']:.4f} at step "
            f"{best['step']})\n"
            f"pictures     {folder.curves}, {folder.predictions}\n"
            f"checkpoints  {folder.last}, {folder.best}; best parameters: {folder.best_parameters}"
        )
