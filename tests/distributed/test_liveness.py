"""Liveness of processes: who has arrived, who has not and why, and that nothing disturbs it."""

import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from distributed_liveness import Job, at_another_port
from gluon_syncbn.distributed import liveness as module
from gluon_syncbn.distributed.answers import ABSENT, ARRIVED, FAILED, FINISHED, GONE, SILENT, Answer


@pytest.fixture
def pair(simulate):
    return simulate(2)


def test_processes_that_arrived_are_absent_stopped_and_killed():
    bodies = [
        "liveness.arrive('x'); ready()",
        "liveness.arrive('w'); liveness.leave('w'); time.sleep(1); ready()",
        "liveness.arrive('x'); ready()",
        "liveness.arrive('x'); ready()",
        "liveness.arrive('x'); liveness.leave('x'); liveness.arrive('y'); ready()",
        "liveness.arrive('other'); ready()",
        # The main thread waits in a C function.
        "import ctypes; liveness.arrive('x'); print('ready'); ctypes.CDLL(None).pause()",
    ]
    with Job(*bodies) as job:
        job.processes[2].send_signal(signal.SIGSTOP)
        # Some time may pass before it really stops.
        os.waitid(os.P_PID, job.processes[2].pid, os.WSTOPPED | os.WNOWAIT)
        job.processes[3].kill()
        job.processes[3].wait()
        begin = time.monotonic()
        answers = job.liveness.probe("x", patience=1)
        assert 0.9 <= time.monotonic() - begin < 2.5
        states = [answers[rank].state for rank in range(1, 8)]
        assert states == [ARRIVED, ABSENT, SILENT, GONE, ARRIVED, ABSENT, ARRIVED]
        assert answers[2].in_flight == ()
        assert answers[2].last[0] == "w" and 0.9 < answers[2].last[1] < 9
        assert answers[6].in_flight[0][0] == "other" and answers[6].last is None
        text = "Arrived: ranks 0, 1, 5, 7. Missing: rank 2 (last completed w, "
        assert job.liveness.describe(answers).startswith(text)
        job.processes[2].send_signal(signal.SIGCONT)
        assert job.liveness.probe("x")[3].state == ARRIVED


def test_a_forked_child_does_not_answer_for_its_parent():
    body = """
        liveness.arrive("x")
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            links = [os.readlink(f.path) for f in os.scandir("/proc/self/fd") if f.is_symlink()]
            kept = [link for link in links if "socket" in link or "epoll" in link]
            os.write(sender, str(len(kept)).encode())
            liveness.arrive("child's")
            liveness.close()
            time.sleep(60)
        ready(child, os.read(receiver, 100).decode())
        os.kill(os.getpid(), 9)
    """
    with Job(body) as job:
        child, kept = map(int, job.reported[0])
        try:
            assert kept == 0
            assert job.liveness.probe("x")[1].state == ARRIVED
            assert job.liveness.probe("child's")[1].state == ABSENT
            print(file=job.processes[0].stdin, flush=True)
            job.processes[0].wait()
            assert job.liveness.probe("x")[1].state == GONE
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("at_once", [256, 10])
def test_many_ranks_probe_each_other_within_the_patience(simulate, monkeypatch, at_once):
    monkeypatch.setattr(module, "_MOST_AT_ONCE", at_once)
    ranks = simulate(64)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        addresses = [one.address for one in ranks]
        mute_ranks = [7, *range(20, 32)]  # more than at once
        for rank in mute_ranks:
            addresses[rank] = at_another_port(ranks[rank], mute)
        ranks[0].set_addresses(addresses)
        ranks[9].close()
        for one in ranks[:8] + ranks[9:]:
            one.arrive("x")
        begin = time.monotonic()
        answers = ranks[0].probe("x", patience=1.5)
        assert time.monotonic() - begin < 2
    expected = {**dict.fromkeys(range(1, 64), ARRIVED), **dict.fromkeys(mute_ranks, SILENT)}
    expected.update({8: ABSENT, 9: GONE})
    assert {rank: answer.state for rank, answer in answers.items()} == expected


# The status of a process.


def test_a_failure_is_reported_to_all_that_probe(pair):
    pair[1].arrive("x")
    assert pair[0].probe("x")[1].status is None
    # What JSON writes with most bytes.
    text = "a bad batch " + "\N{GRINNING FACE}" * 10**5
    pair[1].set_status(FAILED, text)
    pair[1].set_status(FINISHED)
    # The first status counts, and as much of it as an answer holds.
    answers = [pair[0].probe(key)[1] for key in "xy"]
    assert [answer.state for answer in answers] == [ARRIVED, ABSENT]
    assert [answer.status for answer in answers] == [(FAILED, text[:4000])] * 2
    assert "Missing: rank 1 (failed: a bad batch " in pair[0].describe(pair[0].probe("y"))


def test_a_process_that_tells_why_it_ends_is_not_taken_for_the_first(simulate):
    """The last to look finds both gone."""
    ranks = simulate(3)
    ranks[2].close()
    ranks[1].set_status(FAILED, "lost rank 2")
    ranks[1].probe("")
    ranks[1].close()
    text = ranks[0].describe(ranks[0].probe("x"))
    assert text == "Arrived: rank 0. Missing: rank 1 (failed: lost rank 2), rank 2 (process ended)."


def ends(ranks, timeout=20, delays=()):
    """The error with which each waits for the end, or None, and the seconds that it took."""

    def end(rank):
        time.sleep(delays[rank] if delays else 0)
        begin = time.monotonic()
        try:
            ranks[rank].wait_for_the_end(timeout)
            error = None
        except RuntimeError as lost:
            error = str(lost)
        seconds = time.monotonic() - begin
        ranks[rank].close()
        return error, seconds

    with ThreadPoolExecutor(len(ranks)) as executor:
        return list(executor.map(end, range(len(ranks))))


@pytest.mark.parametrize("size", [2, 7])
def test_the_end_comes_when_all_have_reached_it(size, simulate):
    """Though the process that sees it first is gone before the others probe again."""
    for _ in range(5):
        assert [error for error, _ in ends(simulate(size))] == [None] * size
    found = ends(simulate(size), delays=[0.6, *[0] * (size - 1)])
    assert [error for error, _ in found] == [None] * size
    assert found[0][1] < 5 and all(0.5 < seconds < 5 for _, seconds in found[1:])


@pytest.mark.parametrize("why", ["process ended", "failed: a bad batch"])
def test_the_end_does_not_wait_for_those_that_are_gone_or_have_failed(why, simulate):
    ranks = simulate(3)
    if why == "process ended":
        ranks[1].close()
    else:
        ranks[1].set_status(FAILED, "a bad batch")
    ranks[2].set_status(FINISHED)
    [(error, seconds)] = ends(ranks[:1])
    assert seconds < 2
    assert error.startswith("Rank 0 has reached the end of its script and has waited ")
    # Rank 2 has reached its end and is not missed.
    assert f"Missing: rank 1 ({why})." in error


def test_at_the_end_one_that_does_not_answer_is_waited_for_until_the_timeout(pair):
    """And not for as long as a probe may take."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        pair[0].set_addresses([pair[0].address, at_another_port(pair[1], mute)])
        [(error, seconds)] = ends(pair[:1], timeout=0.5)
    assert 0.4 <= seconds < 1.8
    assert "Missing: rank 1 (no answer: stopped" in error


def test_at_the_end_one_that_answers_is_waited_for_beyond_the_timeout(pair, caplog):
    """It may evaluate and save. Warnings say who that is."""
    found = ends(pair, timeout=0.5, delays=[0, 2])
    assert [error for error, _ in found] == [None] * 2
    assert 1.8 < found[0][1] < 5
    texts = [record.getMessage() for record in caplog.records]
    assert 2 < len(texts) < 8
    for text in texts:
        assert text.startswith("Rank 0 has reached the end of its script and has waited ")
        assert "Missing: rank 1 (nothing exchanged yet)." in text
    assert 0.05 < float(re.search("has waited ([0-9.]+) s", texts[0]).group(1)) < 1


def test_time_for_which_a_process_is_stopped_is_no_wait():
    """As when a whole job is suspended."""
    with Job("ready()\nliveness.wait_for_the_end(0.3)") as job:
        print(file=job.processes[0].stdin, flush=True)
        time.sleep(1)  # of three
        job.processes[0].send_signal(signal.SIGSTOP)
        time.sleep(3)
        job.processes[0].send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert job.processes[0].poll() is None
        job.liveness.set_status(FINISHED)
        assert job.processes[0].wait(20) == 0


def test_describe(pair):
    answers = {rank: Answer(ARRIVED) for rank in range(1, 513)}
    assert pair[0].describe({}) == "Arrived: rank 0. Missing: none."
    assert pair[0].describe(answers) == "Arrived: ranks 0-512. Missing: none."
    answers.update({rank: Answer(GONE) for rank in (3, 5, 6, 9, 10, 11)})
    answers[20] = Answer(ABSENT)
    # Without the key of the layer's message.
    last = "SyncBatchNorm 'n', forward call 3 (0 forward 0 in groups of 2 3)", 12.1
    answers[30], answers[31] = Answer(ABSENT, last=last), Answer(ABSENT, status=(FINISHED, ""))
    answers.update({rank: Answer(SILENT) for rank in (100, 101)})
    answers.update({rank: Answer(ABSENT, (("y", 3 + rank / 100),)) for rank in range(200, 300)})
    assert pair[0].describe(answers) == (
        "Arrived: ranks 0-2, 4, 7, 8, 12-19, 21-29, 32-99, 102-199, 300-512. "
        "Missing: ranks 3, 5, 6, 9-11 (process ended), "
        "rank 20 (nothing exchanged yet), "
        "rank 30 (last completed SyncBatchNorm 'n', forward call 3, 12 s ago), "
        "rank 31 (reached the end of the script), "
        "ranks 100, 101 (no answer: stopped, or its machine is unreachable), "
        "ranks 200-299 (waiting in y for 5 to 5.99 s)."
    )
