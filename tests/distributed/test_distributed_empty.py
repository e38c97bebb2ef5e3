"""Steps in which some processes have no samples, against one process with the whole batch."""

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from distributed_cluster import Cluster, needs_horovod
from distributed_empty import PLACES, SEEDS, Run, batches, prepared, step, values
from runs import contexts
from tolerances import assert_same_bits


@pytest.mark.parametrize("seed", SEEDS)
def test_bits_are_those_of_one_process(pair, request, seed):
    """Random nets in all modes, random counts of samples of each process, on one or two devices."""
    device = mx.cpu()
    net = prepared(seed, [device])
    for number, (x, counts) in enumerate(batches(seed, pair.workers)):
        parts = pair.arrays(f"empty {seed} {number}")
        what = f"seed {seed}, step {number}, samples {counts}"
        expected = dict(zip(("y", "dx"), step(net, [x], [device])))
        expected.update(values(net))
        for rank, part in enumerate(parts):
            assert ("y" in part) == (counts[rank] > 0), what
        for name, value in expected.items():
            each = [part[name] for part in parts if name in part]
            if name in ("y", "dx"):
                assert_same_bits(np.concatenate(each), value, f"{name}, {what}")
            elif "running" in name or "tracked" in name:
                for found in each:
                    for one in found:
                        assert_same_bits(one, value[0], f"{name}, {what}")
            else:
                is_summed = "horovod" in request.node.name
                total = each[0] if is_summed else sum(each)
                np.testing.assert_allclose(total, value, rtol=1e-4, atol=1e-4, err_msg=what)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_step_that_is_made_again(pair, seed):
    expected = Run(contexts(1), [0, 1]).sequence(seed)
    for found in pair.arrays(f"sequence {seed}"):
        for name, value in expected.items():
            assert_same_bits(found[name], value, name)


@pytest.mark.parametrize("seed", SEEDS)
def test_statistics_measured_with_more_batches_in_one_process(pair, seed):
    expected = Run(contexts(1), [0, 1]).measurement(seed)
    for found in pair.arrays(f"measurement {seed}"):
        for name, value in expected.items():
            assert_same_bits(found[name], value, f"{name}, seed {seed}")


def test_steps_of_two_trainers(pair):
    expected = Run(contexts(1), [0, 1]).adversaries()
    for found in pair.arrays("adversaries"):
        for name, value in expected.items():
            assert_same_bits(found[name], value, name)


@pytest.mark.parametrize("place", PLACES)
def test_a_head_without_samples(pair, place):
    expected = Run(contexts(1), [0, 1]).head(place)
    parts = pair.arrays(f"head {place}")
    for name, value in expected.items():
        if name.startswith(("y", "dx")):
            found = [part[name] for part in parts if name in part]
            assert_same_bits(np.concatenate(found), value, name)
        else:
            for part in parts:
                assert_same_bits(part[name], value, name)


def test_first_step_empty(pair):
    for found in pair.arrays("first empty"):
        np.testing.assert_allclose(found["mean"], [0.3, 0.4], rtol=1e-6)


def test_no_samples_to_measure(tmp_path):
    """An error of all, at once."""
    topics = ["distributed_empty:none_to_measure"]
    job = Cluster(tmp_path, 2, topics, by_hand=True, GLUON_SYNCBN_TIMEOUT="100")
    try:
        assert job.wait() == [1, 1], job.all_output()
    finally:
        job.clean()
    words = "participants got no devices within precise_statistics"
    first, second = job.reported("none to measure")
    assert first[0] == "MXNetError" and f"rank 1 (failed: {words}" in first[1]
    assert second[0] == "ValueError" and second[1].startswith(words)


@pytest.mark.parametrize("engine", ["kvstore", pytest.param("horovod", marks=needs_horovod)])
def test_training(tmp_path, engine):
    """All keep the same parameters; a step without samples anywhere is an error in all."""
    topics = ["distributed_empty:trains", "distributed_empty:nobody_has_samples"]
    job = Cluster(tmp_path, 2, topics, engine=engine, GLUON_SYNCBN_TIMEOUT="20")
    try:
        assert job.wait() == [1]
    finally:
        job.clean()
    first, second = job.arrays("trained")
    for name, value in first.items():
        assert np.isfinite(value).all()
        assert_same_bits(second[name], value, name)
    for kind, text, seconds in job.reported("nobody has samples"):
        assert kind == "MXNetError" and "no process" in text and "has samples" in text
        assert seconds < 10


@pytest.mark.parametrize("trainer", [False, True])
def test_one_process_alone(trainer):
    net = sbn.SyncBatchNorm(in_channels=1)
    net.initialize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd") if trainer else None
    with pytest.raises(ValueError, match="no layer shares statistics with other processes"):
        sbn.participants([], trainer)
