"""Clusters that several files of tests look at, as starting processes takes most of the time."""

import pytest
from gluon_syncbn import native
from distributed_cluster import FOUR, STORE, needs_horovod, run

STORES = [
    "distributed_stores:sums",
    "distributed_stores:wrong_arrays",
    "distributed_stores:keys_in_other_orders",
    "distributed_bits:bits",
    "distributed_empty:empty_steps",
    "distributed_empty:first_step_empty",
    "distributed_empty:sequences",
    "test_distributed_module:trains",
    "test_distributed_sums:sums",
    "test_routes:messages",
    "test_routes:another_store",
    "test_routes:a_group_that_failed",
    "test_distributed_traps:trainers_that_add_here_alone",
    "test_distributed_traps:several_trainers",
]


@pytest.fixture(autouse=True)
def later_tests_run():
    """With groups of several processes, a step that has failed stays so."""
    yield
    if native.failures.failure():
        native.failures._recover()


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    return run(tmp_path_factory.mktemp("shared"), 2, STORES)


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    # The last one, as a process leaves the group.
    topics = [*STORES, "test_distributed_traps:a_group_that_is_left"]
    return run(tmp_path_factory.mktemp("two"), 2, topics, **STORE)


@pytest.fixture(scope="session")
def shared_four(tmp_path_factory):
    return run(tmp_path_factory.mktemp("shared four"), 4, [*FOUR, "distributed_join:learns_alone"])


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    return run(tmp_path_factory.mktemp("four"), 4, FOUR, **STORE)


@pytest.fixture(scope="session")
def horovod(tmp_path_factory):
    topics = [*STORES, "test_distributed_traps:ends_in_a_step"]
    return run(tmp_path_factory.mktemp("horovod"), 2, topics, engine="horovod", **STORE)


@pytest.fixture(params=["shared", "two", pytest.param("horovod", marks=needs_horovod)])
def pair(request):
    return request.getfixturevalue(request.param)
