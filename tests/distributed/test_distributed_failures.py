"""A worker fails or is late: the errors of the others name it and say why. chaos.py tries all other
kinds of failures."""

import time

import pytest
from distributed_cluster import Cluster

TIMEOUT = 6.0
# What processes may need until they end, on a machine that has other things to do.
SLACK = 8.0


@pytest.fixture
def ended(tmp_path):
    """Runs a topic to its end, without a launcher. Something happens to rank 1."""

    def ended(topic, codes):
        topics, timeout = [f"distributed_failures:{topic}"], str(TIMEOUT)
        cluster = Cluster(tmp_path, 2, topics, by_hand=True, GLUON_SYNCBN_TIMEOUT=timeout)
        try:
            assert cluster.wait() == codes, cluster.output()
        finally:
            cluster.clean()
        return cluster

    return ended


def check_survivor(cluster, *words):
    """Rank 0 has raised an error with all these words before the time was up, and ended soon."""
    kind, text, when = cluster.reported("error")[0]
    assert kind == "MXNetError", text
    assert when - cluster.reported("left")[1] < 0.9 * TIMEOUT
    assert time.time() - when < SLACK
    for word in ("SyncBatchNorm 'norm', ", "rank 0 has waited", *words):
        assert word in text
    assert "terminate called" not in cluster.output()


def test_a_worker_has_one_batch_less(ended):
    cluster = ended("leaves_early", [1, 1])
    words = "rank 1 (reached the end of the script)", "gluon_syncbn.distributed.join"
    check_survivor(cluster, *words)
    assert "Rank 1 has reached the end of its script and has waited" in cluster.output()


def test_the_error_of_one_device_reaches_the_other_processes(ended):
    """Though the process goes on."""
    cluster = ended("one_device_is_not_of_the_group", [1, 1])
    why = "SyncBatchNorm 'norm' was called on cpu(2), but its devices are 2 (cpu(0), cpu(1))"
    check_survivor(cluster, f"Missing: rank 1 (failed: {why}")
    assert why in cluster.reported("error")[1][1]


@pytest.mark.long
def test_a_computation_of_all_that_is_longer_than_the_timeout(ended):
    """No process waits for another, so none is ended."""
    cluster = ended("computes", [0, 0])
    assert time.time() - cluster.reported("left")[1] > 1.3 * TIMEOUT
    assert cluster.reported("error") == [None, None]
    assert "for other processes, in" not in cluster.output()
