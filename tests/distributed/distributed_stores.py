"""What a store has to do, whichever it is."""

import collections
import os
import time
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
from distributed_worker import error_of

LARGEST = np.finfo(np.float64).max
# One row for each process. Their sums, exact or not, are in each column of its own kind.
SPECIAL = np.array(
    [
        # cancels, halves of ulps, denormals, overflows, infinities, NaN, zeros, all bits in use
        [1e300, 1.0, 5e-324, LARGEST, np.inf, np.inf, np.nan, -0.0, 0.0, np.pi, 1 + 2**-52],
        [1.0, 2**-53, 5e-324, LARGEST, 1.0, -np.inf, 1.0, -0.0, -0.0, 1 / 3, 2**-22],
        [-1e300, 2**-53, -5e-324, 0.0, 1.0, 1.0, 1.0, -0.0, 0.0, 0.1, -(2**-22)],
        [1.0, 0.0, 1e-310, 0.0, 1.0, 1.0, 1.0, -0.0, 0.0, 1e-300, 1e22],
    ]
)


def rows(size):
    """What each of `size` processes brings: the above, and random bits of doubles."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**64, (4, 500), dtype=np.uint64)
    return np.concatenate([SPECIAL, bits.view(np.float64)], axis=1)[:size]


def sums(world):
    """Random finite numbers, of any size, so that exact sums differ from rounded ones."""
    mine = rows(world.size)[world.rank]
    kept = mine.copy()
    everyone = world.reducer.all_gather("special", mine)
    with np.errstate(over="ignore"):
        total = world.reducer.all_reduce("special sum", mine.reshape(1, -1))
    unchanged = np.array_equal(mine.view(np.uint64), kept.view(np.uint64))
    world.save("sums", everyone=everyone, total=total, unchanged=unchanged)


def wrong_arrays(world):
    reducer = world.reducer
    calls = {
        "metric": lambda: reducer.all_reduce("metric", ("accuracy", 0.5)),
        "large": lambda: reducer.all_gather("large", [2**53 + 1]),
        "other size": lambda: reducer.all_reduce("list", np.ones(3)),
        "other sizes": lambda: reducer.all_reduce("other sizes", np.ones(3 + world.rank)),
        "one is empty": lambda: reducer.all_reduce("one is empty", np.ones(world.rank)),
    }
    keys = {"long key": "k" * 41, "NUL": "a\0b", "half a character": "\ud800", "number": 3}
    for name, key in keys.items():
        calls[name] = lambda key=key: reducer.all_reduce(key, np.ones(3))
    loss = mx.nd.array([[0.5, world.rank]])
    given = {"loss": loss, "list": [loss.sum(), 2], "number": np.float32(0.5), "count": 2**53 - 1}
    found = {name: reducer.all_reduce(name, value) for name, value in given.items()}
    world.save("sums of what users have", **found, gathered=reducer.all_gather("loss all", loss))
    reported = {name: error_of(call) for name, call in calls.items()}
    # All of this was noticed by all processes, and they go on.
    reported["sum"] = reducer.all_reduce("after errors", np.arange(3.0)).tolist()
    world.report("wrong arrays", reported)


def calls(world):
    """How often each key has been exchanged."""
    routes = world.reducer.routes
    return collections.Counter({str(key): route.calls for key, route in routes.items()})


def added_by_store(world):
    """The keys whose messages the KVStore's server adds up."""
    return {key for key in getattr(world.reducer, "_registered", ()) if key.endswith(" sums")}


class FileStore:
    """A store that anybody could write: adds the files in which processes lay down arrays."""

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size = folder, rank, size
        self.calls = collections.Counter()

    def all_reduce(self, key, array):
        self.calls[key] += 1
        name = f"store {key} {self.calls[key]}"
        paths = [self.folder / f"{name} {rank}.npy" for rank in range(self.size)]
        part = f"{paths[self.rank]}.part"
        with open(part, "wb") as file:
            np.save(file, array)
        os.replace(part, paths[self.rank])
        total = np.zeros_like(array)
        for path in paths:
            while not path.exists():
                time.sleep(0.001)
            total += np.load(path)
        return total


def keys_in_other_orders(world, threads=4, rounds=15):
    """Each thread with a key of its own, the first time too in another order in each process.
    Reports how many answers were wrong."""

    def work(thread):
        # Rank 0 comes to the first key first, the last rank to the last key.
        place = thread if world.rank % 2 == 0 else threads - 1 - thread
        time.sleep(0.03 * place)
        generator = np.random.default_rng(thread)
        wrong = 0
        for _ in range(rounds):
            values = generator.standard_normal((world.size, 20 + thread))
            everyone = world.reducer.all_gather(f"thread {thread}", values[world.rank])
            wrong += not np.array_equal(everyone, values)
        return wrong

    with ThreadPoolExecutor(threads) as executor:
        world.report("keys in other orders", sum(executor.map(work, range(threads))))
