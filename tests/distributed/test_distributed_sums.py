"""Layers whose data change from step to step: sums that the store adds have the bits of one
process, and messages say when they do not fit."""

import gluon_syncbn as sbn
import numpy as np
import pytest
from distributed_bits import DTYPES, Share, data
from distributed_cluster import STORE, needs_horovod, run
from distributed_stores import added_by_store
from runs import run as run_layer
from tolerances import assert_same_bits

SHAPE = 16, 5, 4, 3
# What the values of each step are multiplied by. All statistics are NaN at last.
SCALES = {
    "float16": [1, 1, 2.0**-20, 1, 0, 1, 300, 300, np.inf, 1],
    "float32": [1, 1, 2.0**40, 2.0**40, 1, 0, 0, 1, 1e-40, 1, 1e5, np.inf, np.nan, 1, 1],
    "float64": [1, 1, 2.0**40, 2.0**40, 1, 0, 0, 1, 1e-310, 1, 1e5, 1e200, 1, np.nan, 1, 1],
}


def steps(share, dtype, group=None):
    """y, dx and running statistics in each step of a layer."""
    layer = sbn.SyncBatchNorm(in_channels=SHAPE[1], group=group, prefix=f"sums_{dtype}_")
    layer.initialize(ctx=share.devices)
    layer.cast(dtype)
    results = {}
    for step, scale in enumerate(SCALES[dtype]):
        with np.errstate(invalid="ignore", over="ignore"):
            x, dy = (
                (data(SHAPE, "float64", seed) * scale).astype(dtype)[share.part]
                for seed in (2 * step, 2 * step + 1)
            )
        found = run_layer(layer, x, dy, share.sizes, share.devices)
        for key in ("y", "dx", "running_mean", "running_var"):
            # Of NaN there are many.
            array = getattr(found, key)
            results[f"{dtype} {step} {key}"] = np.where(np.isnan(array), np.nan, array)
    return results


def all_steps(share, group=None):
    return {name: a for dtype in DTYPES for name, a in steps(share, dtype, group).items()}


# What the workers run.


def sums(world):
    before = added_by_store(world)
    count = 2 if world.size == 2 else 1
    world.save("steps", **all_steps(Share(world.rank, world.size, count)))
    world.report("added by the store", len(added_by_store(world) - before))


@pytest.fixture(scope="module")
def whole():
    return all_steps(Share())


def check_bits(parts, whole):
    assert set(parts[0]) == set(whole)
    for name in whole:
        values = [part[name] for part in parts]
        if "running" in name:
            for value in values:
                assert_same_bits(value, whole[name], name)
        else:
            assert_same_bits(np.concatenate(values), whole[name], name)


def test_bits_of_two_processes(pair, whole, request):
    check_bits(pair.arrays("steps"), whole)
    # Forward and backward. Horovod adds from 8 processes on, and shared memory never.
    added = 2 * len(SCALES) if "[two]" in request.node.name else 0
    assert pair.reported("added by the store") == [added] * 2


@pytest.mark.long
@pytest.mark.parametrize(
    "engine, workers, through",
    [
        *(("kvstore", workers, STORE) for workers in (3, 4, 8)),
        ("kvstore", 8, {}),
        *(pytest.param("horovod", workers, STORE, marks=needs_horovod) for workers in (4, 8)),
    ],
)
def test_bits_of_more_processes(tmp_path, whole, engine, workers, through):
    job = run(tmp_path, workers, ["test_distributed_sums:sums"], engine=engine, **through)
    check_bits(job.arrays("steps"), whole)
