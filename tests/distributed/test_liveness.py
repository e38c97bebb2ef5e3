"""Liveness of processes: who has arrived, who has not and why, and that nothing disturbs it."""

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from gluon_syncbn import native
from gluon_syncbn.distributed import connections
from gluon_syncbn.distributed import liveness as module
from gluon_syncbn.distributed.answers import (
    ABSENT,
    ARRIVED,
    FAILED,
    FINISHED,
    GONE,
    SILENT,
    Answer,
)
from gluon_syncbn.distributed.liveness import Liveness
from gluon_syncbn.distributed.reducer import Reducer
from gluon_syncbn.native import shutdown

# The scripts import the folder without its __init__.py, and so without MXNet, to start quickly.
HEAD = f"""
import os, sys, time, types
sys.modules["distributed"] = types.ModuleType("distributed")
sys.modules["distributed"].__path__ = [{os.path.dirname(module.__file__)!r}]
from distributed.liveness import Liveness

rank, size = int(sys.argv[1]), int(sys.argv[2])
liveness = Liveness(rank, size, "127.0.0.1")
print(liveness.address.hex(), flush=True)
liveness.set_addresses(bytes.fromhex(word) for word in sys.stdin.readline().split())

def ready(*words):
    print("ready", *words, flush=True)
    sys.stdin.readline()
"""


class Job:
    """Processes of which this one is rank 0 and each other runs a script."""

    def __init__(self, *bodies):
        self.liveness = Liveness(0, len(bodies) + 1, "127.0.0.1")
        self.processes = [self._start(rank, body) for rank, body in enumerate(bodies, 1)]
        words = [self.liveness.address.hex()]
        words += [process.stdout.readline().strip() for process in self.processes]
        self.liveness.set_addresses(bytes.fromhex(word) for word in words)
        for process in self.processes:
            process.stdin.write(" ".join(words) + "\n")
            process.stdin.flush()
        self.reported = []
        for process in self.processes:
            word, *reported = process.stdout.readline().split()
            assert word == "ready"
            self.reported.append(reported)

    def _start(self, rank, body):
        script = [sys.executable, "-X", "dev", "-c", HEAD + textwrap.dedent(body)]
        return subprocess.Popen(
            [*script, str(rank), str(self.liveness.size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.liveness.close()
        for process in self.processes:
            process.kill()
            process.communicate()


def simulated(size, host="127.0.0.1"):
    ranks = [Liveness(rank, size, host) for rank in range(size)]
    addresses = [one.address for one in ranks]
    for one in ranks:
        one.set_addresses(addresses)
    return ranks


@pytest.fixture
def pair():
    ranks = simulated(2)
    yield ranks
    for one in ranks:
        one.close()


def connect(one):
    ip, port, *_ = one.address.decode().split()
    return socket.create_connection((ip, int(port)), timeout=10)


def at_another_port(one, server):
    """Its address, with the port of somebody else."""
    ip, _, *tokens = one.address.decode().split()
    port = str(server.getsockname()[1])
    return " ".join([ip, port, *tokens]).encode().ljust(module._ADDRESS_SIZE)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_that_arrived_are_absent_stopped_and_killed():
    bodies = [
        "liveness.arrive('x'); ready()",
        "liveness.arrive('w'); liveness.leave('w'); time.sleep(1); ready()",
        "liveness.arrive('x'); ready()",
        "liveness.arrive('x'); ready()",
        "liveness.arrive('x'); liveness.leave('x'); liveness.arrive('y'); ready()",
        "liveness.arrive('other'); ready()",
        # The main thread waits in a C function.
        """
        import ctypes
        liveness.arrive("x")
        print("ready", flush=True)
        ctypes.CDLL(None).pause()
        """,
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
        states = {rank: answer.state for rank, answer in answers.items()}
        expected = [ARRIVED, ABSENT, SILENT, GONE, ARRIVED, ABSENT, ARRIVED]
        assert states == dict(enumerate(expected, 1))
        assert answers[2].in_flight == ()
        assert answers[2].last[0] == "w" and 0.9 < answers[2].last[1] < 9
        assert answers[6].in_flight[0][0] == "other" and answers[6].last is None
        assert job.liveness.describe(answers).startswith(
            "Came: ranks 0, 1, 5, 7. Missing: rank 2 (last completed w, "
        )
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


def test_a_script_ends_at_once_and_without_a_warning():
    """Also with a connection that is being answered."""
    endings = ["", "liveness.close(); liveness.close()", "del liveness", "liveness.probe('x')"]
    with Job(*(f"ready()\n{ending}" for ending in endings)) as job:
        # The last one asks the others, which are gone by then.
        for rank, process in enumerate(job.processes, 1):
            with socket.create_connection(job.liveness._addresses[rank][0]):
                begin = time.monotonic()
                _, errors = process.communicate("\n", timeout=20)
            assert process.returncode == 0 and errors == ""
            assert time.monotonic() - begin < 3
            assert job.liveness.probe("x")[rank].state == GONE


def test_close_gives_everything_back(pair, monkeypatch):
    monkeypatch.setattr(module, "_CONNECTION_LIFE", 60)
    threads, files = threading.active_count(), open_files()
    more = simulated(5)
    assert [more[0].probe("x")[rank].state for rank in range(1, 5)] == [ABSENT] * 4
    with connect(more[1]) as slow:
        slow.sendall(b"a part of a line")
        more[0].probe("x")  # Rank 1 has taken the connection before, not only let it queue.
        for one in more:
            one.close()
        assert slow.recv(1) == b""
    wait_until(lambda: threading.active_count() <= threads and open_files() <= files)


def message(one, key=b'"x"', token=None, end=b"\n"):
    token = one.address.split()[2] if token is None else token
    return token + b" [" + key + b", 0, false]" + end


STRANGERS = {
    "garbage": lambda _: os.urandom(1 << 20),
    "another token": lambda one: message(one, token=b"0" * 14),
    "too long a key": lambda one: message(one, b'"' + b"x" * 5000 + b'"'),
    "nobody who asks": lambda one: one.address.split()[2] + b' ["x"]\n',
    "no UTF-8": lambda one: message(one, b'"\xff\xfe"'),
    "nesting": lambda one: message(one, b"[" * 4000),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_gets_no_answer_and_does_no_harm(pair, stranger, capfd):
    with connect(pair[1]) as connection:
        try:
            connection.sendall(STRANGERS[stranger](pair[1]))
            assert connection.recv(4096) == b""
        except (ConnectionResetError, BrokenPipeError):
            pass
    for linger in (0, 1):  # One that hangs up, and one that resets.
        with connect(pair[1]) as connection:
            connection.sendall(message(pair[1], end=b""))
            option = struct.pack("ii", linger, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
    pair[1].arrive("x")
    assert pair[0].probe("x")[1].state == ARRIVED
    assert capfd.readouterr().err == ""


def test_slow_clients_are_dropped_and_block_nobody(pair, monkeypatch):
    """Also those that send a byte now and then."""
    monkeypatch.setattr(module, "_CONNECTION_LIFE", 1)
    pair[1].arrive("x")
    files = open_files()
    clients = [connect(pair[1]) for _ in range(20)]
    for client in clients:
        client.sendall(message(pair[1])[:12])
    begin = time.monotonic()
    assert pair[0].probe("x")[1].state == ARRIVED
    assert time.monotonic() - begin < 0.9
    time.sleep(0.5)
    clients[0].sendall(b"x")
    for client in clients:
        assert client.recv(1) == b""
        client.close()
    assert 0.9 < time.monotonic() - begin < 4
    wait_until(lambda: open_files() <= files)


def test_connections_are_limited(pair, monkeypatch):
    monkeypatch.setattr(module, "_CONNECTION_LIFE", 60)
    most = 2 + 64
    threads, files = threading.active_count(), open_files()
    clients = [connect(pair[1]) for _ in range(most + 40)]
    pair[1].arrive("x")
    assert pair[0].probe("x")[1].state == ARRIVED
    # This process holds both ends of all but those that were dropped.
    wait_until(lambda: threading.active_count() - threads <= most)
    wait_until(lambda: open_files() - files <= len(clients) + most)
    for client in clients:
        client.close()
    wait_until(lambda: threading.active_count() <= threads and open_files() <= files)


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"0" * 14 + b" {}\n", None])
def test_somebody_else_listens_where_a_process_was(pair, reply):
    """Also the probe itself (None), which comes back where TCP connects to itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.sendall(reply or connection.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        pair[0].set_addresses([pair[0].address, at_another_port(pair[1], server)])
        assert pair[0].probe("x")[1].state == GONE
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize("at_once", [256, 10])
def test_many_ranks_probe_each_other_within_the_patience(monkeypatch, at_once):
    monkeypatch.setattr(module, "_MOST_AT_ONCE", at_once)
    ranks = simulated(64)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        addresses = [one.address for one in ranks]
        mute_ranks = [7, *range(20, 32)]  # more than at once
        for rank in mute_ranks:
            addresses[rank] = at_another_port(ranks[rank], mute)
        ranks[0].set_addresses(addresses)
        ranks[9].close()
        for rank, one in enumerate(ranks):
            if rank != 8:
                one.arrive("x")
        begin = time.monotonic()
        answers = ranks[0].probe("x", patience=1.5)
        assert time.monotonic() - begin < 2
    expected = {rank: ARRIVED for rank in range(1, len(ranks))}
    expected.update({8: ABSENT, 9: GONE, **dict.fromkeys(mute_ranks, SILENT)})
    assert {rank: answer.state for rank, answer in answers.items()} == expected
    # All probe one at the same time, as they do when it is missing.
    with ThreadPoolExecutor(7) as executor:
        states = list(executor.map(lambda one: one.probe("x")[8].state, ranks[:7]))
    assert states == [ABSENT] * 7
    for one in ranks:
        one.close()


def test_it_knows_recent_exchanges_and_forgets_old_ones(pair):
    """Of its own, and of the native channels."""
    now = time.monotonic()
    pair[1]._more = lambda: ([("native", now - 5)], [("native before", now - 3)])
    for number in range(1000):
        pair[1].arrive(str(number))
        pair[1].leave(str(number))
    for key in ("native", "native before", "999"):
        assert pair[0].probe(key)[1].state == ARRIVED
    for number in range(5):
        pair[1].arrive(f"in flight {number}")
    answer = pair[0].probe("0")[1]
    assert answer.state == ABSENT and answer.last[0] == "999"
    assert [key for key, _ in answer.in_flight] == ["native", "in flight 0", "in flight 1"]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("word", ["größe_\N{SNOWMAN}", '\0\n"'])
def test_keys_of_any_text_and_length(pair, word, native):
    """Both sides shorten a long name alike and keep the number at the end."""
    name = f"SyncBatchNorm '{word * 1000}', forward call {{0}} (0 f 0 {{0}})".format
    now = time.monotonic()
    if native:
        pair[1]._more = lambda: ([(name(7), now)], [(name(6), now)])
    else:
        pair[1].arrive(name(6))
        pair[1].leave(name(6))
        pair[1].arrive(name(7))
    answers = [pair[0].probe(name(number))[1] for number in (6, 7, 8)]
    assert [answer.state for answer in answers] == [ARRIVED, ARRIVED, ABSENT]
    ((key, _),) = answers[2].in_flight
    assert key.startswith(f"SyncBatchNorm '{word}") and key.endswith(name(7)[-40:])
    assert len(key) == 241 and answers[2].last[0].endswith("(0 f 0 6)")


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


def end_error(one, timeout):
    """What wait_for_the_end raises, or None."""
    try:
        one.wait_for_the_end(timeout)
    except RuntimeError as error:
        return str(error)


def ends(ranks, timeout=20, delays=()):
    """The end_error of each, which then closes, and the seconds that it took."""

    def end(rank):
        time.sleep(delays[rank] if delays else 0)
        begin = time.monotonic()
        error = end_error(ranks[rank], timeout)
        seconds = time.monotonic() - begin
        ranks[rank].close()
        return error, seconds

    with ThreadPoolExecutor(len(ranks)) as executor:
        return list(executor.map(end, range(len(ranks))))


@pytest.mark.parametrize("size", [2, 7])
def test_the_end_comes_when_all_have_reached_it(size):
    """Though the process that sees it first is gone before the others probe again."""
    for _ in range(5):
        assert [error for error, _ in ends(simulated(size))] == [None] * size
    found = ends(simulated(size), delays=[0.6, *[0] * (size - 1)])
    assert [error for error, _ in found] == [None] * size
    assert found[0][1] < 5 and all(0.5 < seconds < 5 for _, seconds in found[1:])


def test_the_end_in_an_exit_hook():
    """There, Python starts no threads of an executor any more."""
    body = "import atexit; atexit.register(lambda: print(liveness.wait_for_the_end(9))); ready()"
    with Job(body, body) as job:
        for process in job.processes:
            print(file=process.stdin, flush=True)
        assert job.liveness.wait_for_the_end(9) is None
        for process in job.processes:
            assert process.communicate(timeout=20) == ("None\n", "")


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda other: other.close(), "rank 1 (process ended)"),
        (lambda other: other.set_status(FAILED, "a bad batch"), "rank 1 (failed: a bad batch)"),
    ],
)
def test_the_end_does_not_wait_for_those_that_are_gone_or_have_failed(spoil, words):
    ranks = simulated(3)
    spoil(ranks[1])
    ranks[2].set_status(FINISHED)
    begin = time.monotonic()
    error = end_error(ranks[0], 20)
    assert time.monotonic() - begin < 2
    assert error.startswith("Rank 0 has come to the end of its script and has waited ")
    # Rank 2 has come to its end and is not missed.
    assert f"Missing: {words}." in error
    for one in ranks:
        one.close()


@pytest.mark.parametrize("answers_for", [0, 1])
def test_at_the_end_one_that_does_not_answer_is_waited_for_until_the_timeout(pair, answers_for):
    """And not for as long as a probe may take. The time counts from its last answer."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        addresses = [pair[0].address, at_another_port(pair[1], mute)]
        timer = threading.Timer(answers_for, pair[0].set_addresses, [addresses])
        timer.start()
        if not answers_for:
            timer.join()
        begin = time.monotonic()
        error = end_error(pair[0], 0.5)
        assert answers_for + 0.4 <= time.monotonic() - begin < answers_for + 1.8
        assert "Missing: rank 1 (no answer: stopped" in error


def test_at_the_end_one_that_answers_is_waited_for_ten_times_as_long(pair):
    found = ends(pair, timeout=0.2, delays=[0, 4])
    assert 1.9 < found[0][1] < 3.5
    assert "Missing: rank 1 (nothing exchanged yet)." in found[0][0]


def test_at_the_end_one_that_answers_is_waited_for_beyond_the_timeout(pair, caplog):
    """It may evaluate and save. Warnings say who that is."""
    found = ends(pair, timeout=0.5, delays=[0, 2])
    assert [error for error, _ in found] == [None] * 2
    assert 1.8 < found[0][1] < 5
    texts = [record.getMessage() for record in caplog.records]
    assert 2 < len(texts) < 8
    for text in texts:
        assert text.startswith("Rank 0 has come to the end of its script and has waited ")
        assert "Missing: rank 1 (nothing exchanged yet)." in text
    assert 0.05 < float(re.search("has waited ([0-9.]+) s", texts[0]).group(1)) < 1


def test_describe(pair):
    answers = {rank: Answer(ARRIVED) for rank in range(1, 513)}
    assert pair[0].describe({}) == "Came: rank 0. Missing: none."
    assert pair[0].describe(answers) == "Came: ranks 0-512. Missing: none."
    answers.update({rank: Answer(GONE) for rank in (3, 5, 6, 9, 10, 11)})
    answers.update({rank: Answer(SILENT) for rank in (100, 101)})
    answers.update({rank: Answer(ABSENT, (("y", 3 + rank / 100),)) for rank in range(200, 300)})
    answers[20] = answers[22] = Answer(ABSENT)
    # Without the key of the layer's message.
    call = "SyncBatchNorm 'n', forward call 3"
    answers[30] = Answer(ABSENT, last=(f"{call} (0 forward 0 in groups of 2 3)", 12.1))
    answers[31] = Answer(ABSENT, status=(FINISHED, ""))
    assert pair[0].describe(answers) == (
        "Came: ranks 0-2, 4, 7, 8, 12-19, 21, 23-29, 32-99, 102-199, 300-512. "
        "Missing: ranks 3, 5, 6, 9-11 (process ended), "
        "ranks 20, 22 (nothing exchanged yet), "
        "rank 30 (last completed SyncBatchNorm 'n', forward call 3, 12 s ago), "
        "rank 31 (reached the end of the script), "
        "ranks 100, 101 (no answer: stopped, or its machine is unreachable), "
        "ranks 200-299 (waiting in y for 5 to 6 s)."
    )


@pytest.mark.parametrize(
    "seconds, text",
    [(0.05, "0.05 s"), (12.345, "12.3 s"), (99.96, "100 s"), (3600, "3600 s"), (1e6, "1000000 s")],
)
def test_seconds_in_messages(seconds, text, monkeypatch):
    warnings = []
    monkeypatch.setattr(native, "warn", warnings.append)
    monkeypatch.setattr(shutdown, "abandon", lambda: None)
    reducer = Reducer(0, 1, 300)
    reducer._probe("title", "title (key 1)", "", seconds / 2, seconds, probes=0)
    assert f" After {text} this is an error. " in warnings[0]
    with pytest.raises(RuntimeError, match=f"title: rank 0 has waited {text} for other processes"):
        reducer._probe("title", "title (key 1)", "", seconds, 0, probes=1)


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, "127.0.0.1"),
        ({"DMLC_NODE_HOST": "127.0.0.2", "DMLC_INTERFACE": "lo"}, "127.0.0.2"),
        ({"DMLC_INTERFACE": "lo", "DMLC_PS_ROOT_URI": "127.0.0.3"}, "127.0.0.1"),
        ({"HOROVOD_GLOO_IFACE": "lo"}, "127.0.0.1"),
        ({"DMLC_INTERFACE": "no such", "DMLC_PS_ROOT_URI": "not..a.host"}, "127.0.0.1"),
    ],
)
def test_the_address_comes_from_the_environment(monkeypatch, environment, expected):
    monkeypatch.setattr(os, "environ", environment)
    assert connections.own_host() == expected


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_ipv6():
    ranks = simulated(2, "::1")
    ranks[1].arrive("x")
    assert ranks[0].probe("x")[1].state == ARRIVED
    ranks[1].close()
    assert ranks[0].probe("x")[1].state == GONE
    ranks[0].close()


@pytest.mark.parametrize("host", ["198.51.100.77", "0.0.0.0"])
def test_an_address_that_is_not_ours(host):
    files = open_files()
    with pytest.raises(OSError, match=f"cannot listen on '{host}'.*set DMLC_NODE_HOST"):
        Liveness(0, 2, host)
    assert open_files() == files
