"""The worker processes of a run: how they are started, and what they tell each other.

Imports no MXNet by itself, which reads in the environment what it is: see `options`.
"""

import os
import sys
import time

import numpy as np

from console import TERMINAL_VARIABLE, terminal
from options import UsageError, check_workers

# After Ctrl-C, for the end of a step, the checkpoint and the pictures.
SECONDS_TO_SAVE = 60
SECONDS_TO_SPEAK = 2


def started():
    """How many workers the launcher started, if this process is one of them; else None."""
    size = os.environ.get("GLUON_SYNCBN_SIZE")
    return int(size) if size else None


def settle(options):
    """Give `options.workers` a number where the user did not."""
    if options.workers is None:
        from setting import count_gpus

        options.workers = 1 if count_gpus() else min(2, options.batch)
        check_workers(options)


def launch(options, arguments):
    """Run train.py with the same arguments in `options.workers` processes; return its status."""
    try:
        from gluon_syncbn.launch import __main__ as launcher
    except ModuleNotFoundError as error:
        if error.name != "gluon_syncbn":
            raise
        raise UsageError(
            f"{options.workers} workers need gluon_syncbn, which is not installed: run pip install "
            "-e . in the root of the repository, take make train, or give --workers 1 --norm local "
            "--no-export, which need none of it"
        ) from None
    screen = terminal()
    if screen:
        os.environ[TERMINAL_VARIABLE] = screen
    return launcher.main(
        ["-n", str(options.workers), "--grace", str(SECONDS_TO_SAVE), sys.argv[0], *arguments]
        # Which folder is the next or the newest may look different once the first has begun.
        + ["--output", str(options.output)]
    )


def let_the_first_speak():
    """Wait a little with an error, as all workers mostly have the same to say: the launcher ends
    the others when the first one ends."""
    if started() and os.environ["GLUON_SYNCBN_RANK"] != "0":
        time.sleep(SECONDS_TO_SPEAK)


class Alone:
    """A run in one process.

    `rank`, of `size`; `kvstore`: what the Trainer adds gradients with.
    """

    rank, size, kvstore = 0, 1, "device"

    def gather(self, key, numbers):
        """The numbers of all workers (size, n), for the n numbers that each one gives.

        All workers make the same calls in the same order, and for one `key` of one n.
        """
        return np.array([numbers], np.float64)


class Team(Alone):
    """Several workers, which MXNet's KVStore joins: as many as the launcher started.

    From here on SyncBatchNorm takes its statistics over all of them.
    """

    def __init__(self):
        import gluon_syncbn
        import mxnet as mx
        from gluon_syncbn.distributed import KVStoreReducer

        self.kvstore = mx.kv.create("dist_sync")
        self._reducer = KVStoreReducer(self.kvstore)
        group = gluon_syncbn.SyncGroup(store=self._reducer)
        gluon_syncbn.set_default_group(group)
        self._timeout = group.timeout
        self.rank, self.size = self._reducer.rank, self._reducer.size

    def gather(self, key, numbers):
        numbers = np.asarray(numbers, np.float64)
        return self._reducer.all_gather(key, numbers, timeout=self._timeout)
