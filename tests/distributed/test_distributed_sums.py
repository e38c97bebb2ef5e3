"""Sums that the store adds have the bits of one process, and messages say when they do not fit."""

import distributed_sums
import numpy as np
import pytest
from distributed_bits import Share
from distributed_cluster import STORE, needs_horovod, run
from distributed_sums import LEAST, SCALES
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


def check_messages(reported, least=LEAST):
    """All processes take the same way. least: how often the store adds. Horovod does from 8
    processes on, and shared memory never."""
    first, *others = reported
    assert all(other == first for other in others)
    for dtype, scales in SCALES.items():
        for direction in ("forward", "backward"):
            sums, values = first[f"sums_{dtype} {direction}"]
            assert sums + values == len(scales)
            assert (sums >= least if least else sums == 0) and values >= 3, (dtype, direction)


def test_bits_of_two_processes(pair, whole, request):
    check_bits(pair.arrays("steps"), whole)
    least = LEAST if "[two]" in request.node.name else 0
    check_messages(pair.reported("messages of sums"), least)


def test_bits_through_a_store_of_float64(two, whole):
    check_bits(two.arrays("steps of files"), whole)
    check_messages(two.reported("messages of files"))


def test_a_new_group_starts_without_windows(two):
    for means, (sums, values) in two.reported("a new group"):
        assert (sums, values) == (4, 2)
        # The momentum is 0.9.
        mean, expected = 0, []
        for value in (1.5, 1.5, 1.5, 2.5, 2.5, 2.5):
            mean = 0.9 * mean + 0.1 * value
            expected.append(mean)
        np.testing.assert_allclose(means, expected, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "engine, workers, through, least",
    [
        ("kvstore", 3, STORE, LEAST),
        ("kvstore", 4, STORE, LEAST),
        ("kvstore", 8, STORE, LEAST),
        ("kvstore", 8, {}, 0),
        pytest.param("horovod", 4, STORE, 0, marks=needs_horovod),
        pytest.param("horovod", 8, STORE, LEAST, marks=needs_horovod),
    ],
)
def test_bits_of_more_processes(tmp_path, whole, engine, workers, through, least):
    cluster = run(tmp_path, workers, ["distributed_sums:sums"], engine=engine, **through)
    check_bits(cluster.arrays("steps"), whole)
    check_messages(cluster.reported("messages of sums"), least)
