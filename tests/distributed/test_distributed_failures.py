"""A worker fails or is late: the errors of the others name it and say why. chaos.py tries all other
kinds of failures. A few jobs run at a time, each test looks at one."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from distributed_cluster import Cluster

TIMEOUT = 6.0
# What processes may need beyond that on a machine that has other things to do.
SLACK = 8.0
AT_A_TIME = 3


class Job:
    """A cluster without a launcher from its start to its end. Something happens to rank 1 by
    itself; seconds are counted from then on."""

    def __init__(self, folder, topic):
        self.cluster = Cluster(
            folder,
            2,
            [f"distributed_failures:{topic}"],
            by_hand=True,
            GLUON_SYNCBN_TIMEOUT=str(TIMEOUT),
            MXNET_CPU_TEMP_COPY="256",
            MXNET_CPU_PARALLEL_RAND_COPY="4",
        )
        try:
            self._watch()
        finally:
            self.cluster.clean()

    def _watch(self):
        cluster = self.cluster
        self.pids = cluster.wait_for("ready")
        begin = cluster.wait_for("left", ranks=[1])[1]
        running = {process.pid: process for process in cluster.processes}
        # By process: the seconds until it ended, and its exit code.
        self.ended, self.codes = {}, {}
        while running and time.time() < begin + 2 * TIMEOUT + SLACK:
            for pid, process in list(running.items()):
                if process.poll() is not None:
                    del running[pid]
                    self.ended[pid], self.codes[pid] = time.time() - begin, process.returncode
            time.sleep(0.02)
        self.errors = [e and (e[0], e[1], e[2] - begin) for e in cluster.reported("error")]
        self.output = cluster.output()

    def check_survivor(self, *words, rank=0, waits=False):
        """It has raised an error with all these words, before the time is up or when it is, and
        ended soon after."""
        kind, text, seconds = self.errors[rank]
        assert kind == "MXNetError", text
        least, most = (TIMEOUT * 0.9, TIMEOUT + SLACK) if waits else (0, TIMEOUT * 0.9)
        assert least <= seconds < most, text
        for word in ("SyncBatchNorm 'n", f"rank {rank} has waited", *words):
            assert word in text
        assert self.codes[self.pids[rank]] == 1
        assert self.ended[self.pids[rank]] < seconds + SLACK
        assert "terminate called" not in self.output


JOBS = {
    "early end": "leaves_early",
    "late end": "works_on_alone",
    "other data": "one_device_has_other_data",
    "other device": "one_device_is_not_of_the_group",
    "long computation": "computes",
}
LONG = {"late end", "long computation"}


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """Those that chosen tests look at, each as something whose result() waits for its end."""
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    chosen = {call.params.get("job") for call in calls}
    wanted = {name: topic for name, topic in JOBS.items() if name in chosen}
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in wanted}
    with ThreadPoolExecutor(AT_A_TIME) as executor:
        yield {name: executor.submit(Job, folders[name], topic) for name, topic in wanted.items()}


@pytest.fixture
def job(request, jobs):
    return jobs[request.param].result()


def of(*names):
    """The jobs that a test looks at."""

    params = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in names]
    return pytest.mark.parametrize("job", params, indirect=True)


@of("early end")
def test_a_worker_has_one_batch_less(job):
    job.check_survivor("rank 1 (reached the end of the script)", "gluon_syncbn.distributed.join")
    assert job.codes[job.pids[1]] == 1
    assert "Rank 1 has come to the end of its script and has waited" in job.output


@of("late end")
def test_a_worker_works_on_after_training_for_longer_than_the_timeout(job):
    """As one that evaluates and saves."""
    assert job.errors == [None, None]
    for pid in job.pids:
        assert job.codes[pid] == 0, job.output
    assert job.ended[job.pids[0]] > 1.2 * TIMEOUT
    assert "Rank 0 has come to the end of its script and has waited 0." in job.output
    assert "Missing: rank 1 (last completed SyncBatchNorm 'n" in job.output


@of("other data")
def test_a_worker_dies_of_the_error_of_one_device(job):
    job.check_survivor("Missing: rank 1 (")
    assert "Shape inconsistent" in job.errors[1][1]


@of("other device")
def test_the_error_of_one_device_reaches_the_other_processes(job):
    """Though the process goes on."""
    why = "SyncBatchNorm 'norm' was called on cpu(2), but its devices are 2 (cpu(0), cpu(1))"
    job.check_survivor(f"Missing: rank 1 (failed: {why}")
    assert why in job.errors[1][1]


@of("long computation")
def test_a_computation_of_all_that_is_longer_than_the_timeout(job):
    """No process waits for another, so none is ended."""
    assert job.errors == [None, None]
    for pid in job.pids:
        assert job.codes[pid] == 0 and job.ended[pid] > 1.3 * TIMEOUT, job.output
    assert "for other processes, in" not in job.output
