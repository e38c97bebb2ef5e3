"""A worker, the server or the scheduler is gone, stopped or late: all others end with an error that
says so, in time, and nothing is left running. A few jobs run at a time, each test looks at one."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from distributed_cluster import Cluster, has_horovod, needs_horovod

TIMEOUT = 6.0
# What processes may need beyond that on a machine that has other things to do.
SLACK = 8.0
# The launcher's promise, with the same allowance.
ENDED = 10.0 + SLACK
AT_A_TIME = 3


class Job:
    """A cluster from its start to its end.

    `action` is what happens to it when its workers are under way; without one, something happens to
    rank 1 by itself. Seconds are counted from then on.
    """

    def __init__(self, folder, topic, action=None, **options):
        self.topic = topic
        self.cluster = Cluster(
            folder,
            2,
            [f"distributed_failures:{topic}"],
            GLUON_SYNCBN_TIMEOUT=str(TIMEOUT),
            MXNET_CPU_TEMP_COPY="256",
            MXNET_CPU_PARALLEL_RAND_COPY="4",
            **options,
        )
        try:
            self._play(action)
        finally:
            self.cluster.clean()

    def _play(self, action):
        cluster = self.cluster
        self.pids = cluster.wait_for("ready")
        if action is None:
            begin = cluster.wait_for("left", ranks=[1])[1]
        else:
            begin = time.time()
            action(cluster, self.pids)
        running = {process.pid: process for process in cluster.processes}
        # By process: the seconds until it ended, and its exit code.
        self.ended, self.codes = {}, {}
        patience = TIMEOUT + (SLACK if cluster.services else ENDED)
        while running and time.time() < begin + patience:
            for pid, process in list(running.items()):
                if process.poll() is not None:
                    del running[pid]
                    self.ended[pid], self.codes[pid] = time.time() - begin, process.returncode
            if all(is_stopped(pid) for pid in running):
                break
            time.sleep(0.02)
        self.left = {process.pid for process in cluster.running()}
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


def is_stopped(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def kill_worker(cluster, pids):
    os.kill(pids[1], signal.SIGKILL)


def stop_worker(cluster, pids):
    os.kill(pids[1], signal.SIGSTOP)


def kill_server(cluster, pids):
    os.kill(cluster.find("server"), signal.SIGKILL)


def kill_scheduler_and_finish(cluster, pids):
    """Nobody needs it before the end."""
    os.kill(cluster.find("scheduler"), signal.SIGKILL)
    time.sleep(1)
    (cluster.folder / "stop").touch()


def by_hand(topic, action=None):
    return topic, action, {"by_hand": True}


def launched(topic, action=None, **options):
    return topic, action, options


TRAIN = "until_something_happens"
JOBS = {
    "worker killed": by_hand(TRAIN, kill_worker),
    "worker stopped": by_hand(TRAIN, stop_worker),
    "server killed": by_hand(TRAIN, kill_server),
    "scheduler killed": by_hand(TRAIN, kill_scheduler_and_finish),
    "exception": by_hand("raises"),
    "early end": by_hand("leaves_early"),
    "late end": by_hand("works_on_alone"),
    "stopped after training": by_hand("stops_after_training"),
    "other data": by_hand("one_device_has_other_data"),
    "other device": by_hand("one_device_is_not_of_the_group"),
    "launched, worker killed": launched(TRAIN, kill_worker),
    "launched, exception": launched("raises"),
}
HOROVOD_JOBS = {
    "horovod, worker killed": launched(TRAIN, kill_worker, engine="horovod"),
    "horovod, worker stopped": launched(TRAIN, stop_worker, engine="horovod"),
}
LONG = {
    "scheduler killed",
    "late end",
    "stopped after training",
    "launched, worker killed",
    "horovod, worker stopped",
}


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """Those that chosen tests look at, each as something whose result() waits for its end."""
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    chosen = {call.params.get("job") for call in calls}
    jobs = {**JOBS, **(HOROVOD_JOBS if has_horovod() else {})}
    wanted = {name: job for name, job in jobs.items() if name in chosen}
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in wanted}
    with ThreadPoolExecutor(AT_A_TIME) as executor:
        yield {
            name: executor.submit(Job, folders[name], topic, action, **options)
            for name, (topic, action, options) in wanted.items()
        }


@pytest.fixture
def job(request, jobs):
    return jobs[request.param].result()


def of(*names):
    """The jobs that a test looks at."""

    def marks(name):
        return [needs_horovod] * (name in HOROVOD_JOBS) + [pytest.mark.long] * (name in LONG)

    params = [pytest.param(name, marks=marks(name)) for name in names]
    return pytest.mark.parametrize("job", params, indirect=True)


# By hand: nobody but the workers themselves finds out.

GONE = "Came: rank 0. Missing: rank 1 (process ended)."


@of("worker killed")
def test_a_worker_is_killed(job):
    job.check_survivor(GONE)
    assert job.codes[job.pids[1]] == -signal.SIGKILL


@of("worker stopped")
def test_a_worker_is_stopped(job):
    job.check_survivor("rank 1 (no answer: stopped, or its machine is", waits=True)
    assert job.pids[1] in job.left and job.pids[0] not in job.left


@of("server killed")
def test_the_server_is_killed(job):
    for rank in range(2):
        job.check_survivor("Came: rank", rank=rank, waits=True)
    # The process that gives up last finds the other gone.
    assert "As all have come, the KVStore's server does not answer." in job.output
    assert not job.left & set(job.pids)


@of("scheduler killed")
def test_the_scheduler_is_killed(job):
    """Nobody needs it before the end."""
    assert job.errors == [None, None]
    assert f"The KVStore's scheduler has not answered for {TIMEOUT:g} s" in job.output
    for pid in job.pids:
        assert job.codes[pid] == 1 and job.ended[pid] < TIMEOUT + SLACK


@of("exception")
def test_a_worker_dies_of_an_exception(job):
    """Its status may still say so when it is probed."""
    job.check_survivor("Missing: rank 1 (")
    assert GONE in job.errors[0][1] or "failed: ArithmeticError" in job.errors[0][1]
    assert job.codes[job.pids[1]] == 1 and job.ended[job.pids[1]] < SLACK
    assert "ArithmeticError: a bad batch" in job.output


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


@of("stopped after training")
def test_a_worker_is_stopped_after_training(job):
    assert job.codes[job.pids[0]] == 1
    assert TIMEOUT * 0.9 <= job.ended[job.pids[0]] < TIMEOUT + SLACK
    assert "Missing: rank 1 (no answer: stopped, or its machine is" in job.output


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


# With the launcher, which ends all when one has died.


@of("launched, worker killed", "horovod, worker killed")
def test_the_launcher_ends_all_for_a_worker_that_is_killed(job):
    check_launcher(job, 128 + signal.SIGKILL, f"worker 1 (process {job.pids[1]}) was killed by")


@of("launched, exception")
def test_the_launcher_ends_all_for_an_exception(job):
    check_launcher(job, 1, f"worker 1 (process {job.pids[1]}) ended with exit code 1")
    assert job.output.count("ArithmeticError: a bad batch") == 2


@pytest.mark.long
@of("horovod, worker stopped")
def test_the_launcher_ends_all_when_the_others_give_up(job):
    check_launcher(job, 1, f"worker 0 (process {job.pids[0]}) ended with exit code 1", TIMEOUT)
    kind, text, seconds = job.errors[0]
    assert kind == "MXNetError" and "rank 1 (no answer: stopped, or its" in text
    assert TIMEOUT * 0.9 <= seconds < TIMEOUT + SLACK


def check_launcher(job, code, words, least=0.0):
    (launcher,) = job.codes
    assert job.codes[launcher] == code
    assert least <= job.ended[launcher] < least + ENDED
    assert f"gluon_syncbn.launch: {words}" in job.output
    assert "so all others are ended" in job.output
    assert job.left == set()
