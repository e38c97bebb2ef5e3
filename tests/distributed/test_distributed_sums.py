"""Sums that the store adds have the bits of one process, and messages say when they do not fit."""

import distributed_sums
import numpy as np
import pytest
from distributed_bits import Share
from distributed_cluster import STORE, needs_horovod, run
from distributed_sums import SCALES
from tolerances import assert_same_bits


@pytest.fixture(scope="module")
def whole():
    return distributed_sums.all_steps(Share())


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


def test_bits_and_calls_of_a_store_of_float64(two, whole):
    """A step after one of about the same size needs one call, of sums."""
    check_bits(two.arrays("steps of files"), whole)
    first, second = two.reported("calls of files")
    assert first == second
    for dtype, scales in SCALES.items():
        for direction in ("forward", "backward"):
            values = first[dtype][f"{direction} -1"]
            assert 3 <= values <= len(scales) - 3
            assert len(scales) - values <= first[dtype][f"{direction} -1 sums"] < len(scales)


def test_a_new_group_starts_without_windows(two):
    assert two.reported("a new group") == [[[1.5] * 3 + [2.5] * 3, 1]] * 2


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
    job = run(tmp_path, workers, ["distributed_sums:sums"], engine=engine, **through)
    check_bits(job.arrays("steps"), whole)
