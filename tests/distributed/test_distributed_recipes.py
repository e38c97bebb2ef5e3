"""The guide's recipes for several processes. What the workers run is in distributed_recipes.py."""

import itertools

import numpy as np
import pytest
from distributed_recipes import SAMPLES, batch, one_layer, samples_of
from tolerances import assert_same_bits


@pytest.fixture(params=["shared_four", "four"])
def job(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("ranks", [(0, 2), (1, 3)])
def test_groups_of_any_ranks(job, ranks):
    """They have the bits of one process with the samples of just these ranks."""
    expected = one_layer(sum(map(samples_of, ranks), []))
    parts = job.arrays("even or odd")
    for name in ("y", "dx"):
        found = np.concatenate([parts[rank][name] for rank in ranks])
        assert_same_bits(found, expected[name], name)
    for rank in ranks:
        assert job.reported("ranks")[rank] == list(ranks)
        for name in ("running_mean", "running_var"):
            assert_same_bits(parts[rank][name], expected[name], f"{name} of rank {rank}")


@pytest.mark.parametrize("ranks", [(0, 2), (1, 3)])
def test_groups_of_any_ranks_join(job, ranks):
    means = []
    for step in range(max(ranks) + 1):
        present = [batch(rank, step) for rank in ranks if step <= rank]
        means.append(np.concatenate(present).mean(axis=0, dtype="float64"))
    for rank in ranks:
        found = job.arrays("even or odd, joined")[rank]["mean"]
        np.testing.assert_allclose(found, np.mean(means, axis=0), rtol=1e-5, atol=1e-6)


def test_all_skip_a_batch_that_is_bad_in_one(job):
    assert job.reported("stepped") == [[True, False, False, False, True]] * 4
    for found, expected in zip(job.arrays("with bad batches"), job.arrays("without")):
        assert len(expected) == 10
        for name, value in expected.items():
            assert np.isfinite(value).all()
            assert_same_bits(found[name], value, name)


def test_parts_of_a_data_set(job):
    reported = job.reported("parts")
    parts = [list(itertools.chain(*(samples for _, samples in found))) for found in reported]
    assert [len(part) for part in parts] == [7, 7, 6, 6]
    assert sorted(itertools.chain(*parts)) == list(range(SAMPLES))
    assert [[size for size, _ in found] for found in reported] == [[16, 10]] * 4
