"""The roll call between processes: who came, who did not, and that nothing can disturb it."""

import errno
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
import timeit

import pytest

from gluon_syncbn.distributed import liveness
from gluon_syncbn.distributed.liveness import (
    ABSENT,
    CAME,
    FAILED,
    FINISHED,
    GONE,
    SILENT,
    Answer,
    RollCall,
)

# The scripts import the module by itself, without MXNet, to start quickly.
HEAD = f"""
import sys
sys.path.insert(0, {os.path.dirname(liveness.__file__)!r})
import os, time
from liveness import RollCall

rank, size = int(sys.argv[1]), int(sys.argv[2])
roll_call = RollCall(rank, size, "127.0.0.1")
print(roll_call.address().hex(), flush=True)
roll_call.set_addresses(bytes.fromhex(word) for word in sys.stdin.readline().split())

def ready(*words):
    print("ready", *words, flush=True)
    sys.stdin.readline()
"""


class Job:
    """Processes of which this one is rank 0 and each other runs a script."""

    def __init__(self, *bodies):
        self.roll_call = RollCall(0, len(bodies) + 1, "127.0.0.1")
        self.processes = [self._start(rank, body) for rank, body in enumerate(bodies, 1)]
        words = [self.roll_call.address().hex()]
        words += [process.stdout.readline().strip() for process in self.processes]
        self.roll_call.set_addresses(bytes.fromhex(word) for word in words)
        for process in self.processes:
            process.stdin.write(" ".join(words) + "\n")
            process.stdin.flush()
        self.told = []
        for process in self.processes:
            word, *told = process.stdout.readline().split()
            assert word == "ready"
            self.told.append(told)

    def _start(self, rank, body):
        script = [sys.executable, "-X", "dev", "-c", HEAD + textwrap.dedent(body)]
        return subprocess.Popen(
            [*script, str(rank), str(self.roll_call.size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.roll_call.close()
        for process in self.processes:
            process.kill()
            process.communicate()


def simulated(size, host="127.0.0.1"):
    roll_calls = [RollCall(rank, size, host) for rank in range(size)]
    addresses = [roll_call.address() for roll_call in roll_calls]
    for roll_call in roll_calls:
        roll_call.set_addresses(addresses)
    return roll_calls


@pytest.fixture
def pair():
    roll_calls = simulated(2)
    yield roll_calls
    for roll_call in roll_calls:
        roll_call.close()


def port(roll_call):
    return struct.unpack_from(">H", roll_call.address(), 16)[0]


def connect(roll_call):
    return socket.create_connection(("127.0.0.1", port(roll_call)), timeout=10)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_processes_that_came_did_not_come_stopped_and_died():
    bodies = [
        "roll_call.came('x'); ready()",
        "roll_call.came('w'); roll_call.left('w'); time.sleep(1); ready()",
        "roll_call.came('x'); ready()",
        "roll_call.came('x'); ready()",
        "roll_call.came('x'); roll_call.left('x'); roll_call.came('y'); ready()",
        "roll_call.came('other'); ready()",
    ]
    with Job(*bodies) as job:
        job.processes[2].send_signal(signal.SIGSTOP)
        # Some time may pass before it really stops.
        os.waitid(os.P_PID, job.processes[2].pid, os.WSTOPPED | os.WNOWAIT)
        job.processes[3].kill()
        job.processes[3].wait()
        begin = time.monotonic()
        answers = job.roll_call.ask("x", patience=1)
        assert 1 <= time.monotonic() - begin < 2.5
        states = {rank: answer.state for rank, answer in answers.items()}
        assert states == {1: CAME, 2: ABSENT, 3: SILENT, 4: GONE, 5: CAME, 6: ABSENT}
        assert answers[2].open == () and answers[2].last[0] == "w" and 0.9 < answers[2].last[1] < 9
        assert answers[6].open[0][0] == "other" and answers[6].last is None
        assert job.roll_call.describe(answers, title=lambda key: f"layer {key}").startswith(
            "Came: ranks 0, 1, 5. Missing: rank 2 (last met at layer w "
        )
        job.processes[2].send_signal(signal.SIGCONT)
        assert job.roll_call.ask("x")[3].state == CAME


def test_a_process_answers_while_its_main_thread_waits_in_a_c_function():
    body = """
        import ctypes
        roll_call.came("x")
        print("ready", flush=True)
        ctypes.CDLL(None).pause()
    """
    with Job(body) as job:
        assert job.roll_call.ask("x")[1].state == CAME


def test_a_forked_child_does_not_answer_for_its_parent():
    body = """
        roll_call.came("x")
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            links = [os.readlink(f.path) for f in os.scandir("/proc/self/fd") if f.is_symlink()]
            kept = [link for link in links if "socket" in link or "epoll" in link]
            os.write(sender, str(len(kept)).encode())
            roll_call.came("child's")
            roll_call.close()
            time.sleep(60)
        ready(child, os.read(receiver, 100).decode())
        os.kill(os.getpid(), 9)
    """
    with Job(body) as job:
        child, kept = map(int, job.told[0])
        try:
            assert kept == 0
            assert job.roll_call.ask("x")[1].state == CAME
            assert job.roll_call.ask("child's")[1].state == ABSENT
            print(file=job.processes[0].stdin, flush=True)
            job.processes[0].wait()
            assert job.roll_call.ask("x")[1].state == GONE
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("ending", ["", "roll_call.close(); roll_call.close()", "del roll_call"])
def test_a_script_ends_at_once_and_without_a_warning(ending):
    with Job(f"ready()\n{ending}") as job:
        begin = time.monotonic()
        _, errors = job.processes[0].communicate("\n", timeout=20)
        assert job.processes[0].returncode == 0 and errors == ""
        assert time.monotonic() - begin < 3
        assert job.roll_call.ask("x")[1].state == GONE


def test_close_gives_everything_back(pair):
    threads, files = threading.active_count(), open_files()
    more = simulated(5)
    assert [more[0].ask("x")[rank].state for rank in range(1, 5)] == [ABSENT] * 4
    for roll_call in more:
        roll_call.close()
    assert threading.active_count() == threads and open_files() == files


ASKER = struct.pack(">I?", 0, False)


def question(roll_call, key, size=None, kind=b"SBQ1", asker=ASKER):
    token = roll_call.address()[18:25]
    body = asker + key
    return kind + token + struct.pack(">H", len(body) if size is None else size) + body


STRANGERS = {
    "garbage": lambda _: os.urandom(1 << 20),
    "HTTP": lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another token": lambda r: question(r, b"x").replace(r.address()[18:25], bytes(7)),
    "another kind": lambda r: question(r, b"x", kind=b"SBQ9"),
    "too long a key": lambda r: question(r, b"x" * 5000),
    "nobody who asks": lambda r: question(r, b"", asker=b"abc"),
    "no UTF-8": lambda r: question(r, b"\xff\xfe"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_gets_no_answer_and_does_no_harm(pair, stranger):
    with connect(pair[1]) as connection:
        try:
            connection.sendall(STRANGERS[stranger](pair[1]))
            assert connection.recv(4096) == b""
        except (ConnectionResetError, BrokenPipeError):
            pass
    pair[1].came("x")
    assert pair[0].ask("x")[1].state == CAME


def test_a_stranger_who_hangs_up_or_resets(pair):
    for linger in (0, 1):
        connection = connect(pair[1])
        connection.sendall(question(pair[1], b"x", size=100))
        if linger == 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    pair[1].came("x")
    assert pair[0].ask("x")[1].state == CAME


def test_slow_clients_are_dropped_and_hold_nobody_up(pair, monkeypatch):
    monkeypatch.setattr(liveness, "_CONNECTION_LIFE", 2)
    pair[1].came("x")
    files = open_files()
    clients = [connect(pair[1]) for _ in range(20)]
    for client in clients:
        client.sendall(question(pair[1], b"x")[:12])
    begin = time.monotonic()
    assert pair[0].ask("x")[1].state == CAME
    assert time.monotonic() - begin < 1.8
    for client in clients:
        assert client.recv(1) == b""
        client.close()
    assert open_files() == files


def test_a_question_byte_by_byte(pair):
    pair[1].came("x")
    with connect(pair[1]) as connection:
        for byte in question(pair[1], b"x"):
            connection.sendall(bytes([byte]))
            time.sleep(0.002)
        assert connection.recv(4096).startswith(b"SBA1" + pair[1].address()[25:])


def test_connections_are_limited(pair):
    most = 2 + 64
    files = open_files()
    clients = [connect(pair[1]) for _ in range(most + 40)]
    pair[1].came("x")
    assert pair[0].ask("x")[1].state == CAME
    # This process holds both ends, but of the dropped ones no more than its own.
    assert open_files() - files <= len(clients) + most
    for client in clients:
        client.close()


def test_too_many_open_files_is_told(pair, monkeypatch):
    def no_socket(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(liveness.socket, "socket", no_socket)
        answers = pair[0].ask("x")
    assert pair[0].describe(answers) == (
        "Came: rank 0. Missing: rank 1 (cannot be asked: Too many open files)."
    )


@pytest.mark.parametrize(
    "reply",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SBA1" + bytes(7) + b"\0\x02{}", b"", None],
    ids=["HTTP", "another job", "nothing", "the question"],
)
def test_somebody_else_listens_where_a_process_was(pair, reply):
    """Also the question itself, which comes back where TCP connects to itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                received = connection.recv(4096)
                connection.sendall(received if reply is None else reply)

        thread = threading.Thread(target=serve)
        thread.start()
        address = bytearray(pair[1].address())
        address[16:18] = struct.pack(">H", server.getsockname()[1])
        pair[0].set_addresses([pair[0].address(), address])
        assert pair[0].ask("x")[1].state == GONE
        thread.join()


@pytest.mark.parametrize("size, at_once", [(64, 256), (64, 10)])
def test_many_ranks_ask_each_other_within_the_patience(monkeypatch, size, at_once):
    monkeypatch.setattr(liveness, "_MOST_AT_ONCE", at_once)
    roll_calls = simulated(size)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        addresses = [bytearray(roll_call.address()) for roll_call in roll_calls]
        for rank in (7, 37, 57):
            addresses[rank][16:18] = struct.pack(">H", mute.getsockname()[1])
        roll_calls[0].set_addresses([bytes(address) for address in addresses])
        roll_calls[9].close()
        for rank, roll_call in enumerate(roll_calls):
            if rank != 8:
                roll_call.came("x")
        begin = time.monotonic()
        answers = roll_calls[0].ask("x", patience=1.5)
        assert time.monotonic() - begin < 2
    expected = {rank: CAME for rank in range(1, size)}
    expected.update({7: SILENT, 8: ABSENT, 9: GONE, 37: SILENT, 57: SILENT})
    assert {rank: answer.state for rank, answer in answers.items()} == expected

    # All ask one at the same time, as they do when it is missing.
    states = []
    threads = [
        threading.Thread(target=lambda r=r: states.append(r.ask("x")[8].state))
        for r in roll_calls[:7]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == [ABSENT] * 7
    for roll_call in roll_calls:
        roll_call.close()


def test_it_knows_recent_meetings_and_forgets_old_ones(pair):
    pair[1].left("never came")
    for number in range(1000):
        pair[1].came(str(number))
        pair[1].left(str(number))
    for number in range(5):
        pair[1].came(f"open {number}")
    assert pair[0].ask("999")[1].state == CAME
    answer = pair[0].ask("0")[1]
    assert answer.state == ABSENT and answer.last[0] == "999"
    assert [key for key, _ in answer.open] == ["open 0", "open 1", "open 2"]


def test_keys_of_any_text(pair):
    key = "größe \N{SNOWMAN} " + "x" * 200
    pair[1].came(key)
    assert pair[0].ask(key)[1].state == CAME
    assert pair[0].ask("x")[1].open[0][0] == key
    pair[1].came("\N{SNOWMAN}" * 10**6)
    assert pair[0].ask("x")[1].state == ABSENT


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("word", ["a_name_of_a_layer_", "größe_"])
def test_a_layer_with_a_long_name_can_be_asked_for(word, native):
    """Of its meeting's name both sides leave out the same, and never the number at the end."""
    meeting = f"SyncBatchNorm '{word * 100}', forward call {{0}} (0 f 0 {{0}})".format
    now = time.monotonic()
    attendance = (lambda: ([(meeting(7), now)], [(meeting(6), now)])) if native else None
    asker, asked = pair = RollCall(0, 2, "127.0.0.1"), RollCall(1, 2, "127.0.0.1", attendance)
    asker.set_addresses([roll_call.address() for roll_call in pair])
    if not native:
        for number in (6, 7):
            asked.came(meeting(number))
        asked.left(meeting(6))
    answers = [asker.ask(meeting(number))[1] for number in (6, 7, 8)]
    assert [answer.state for answer in answers] == [CAME, CAME, ABSENT]
    ((told, _),) = answers[2].open
    assert told.startswith(f"SyncBatchNorm '{word}") and told.endswith(meeting(7)[-40:])
    assert 200 < len(told.encode()) <= 256
    assert answers[2].last[0].endswith("(0 f 0 6)")
    for roll_call in pair:
        roll_call.close()


def test_came_and_left_are_cheap_also_while_others_ask(pair):
    def seconds():
        return min(
            timeit.repeat("came('12 f 0 17'); left('12 f 0 17')", globals=names, number=1000)
        )

    names = {"came": pair[0].came, "left": pair[0].left}
    assert seconds() / 1000 < 4e-6  # for two calls
    stop = threading.Event()

    def keep_asking():
        while not stop.is_set():
            assert pair[1].ask("x")[0].state == ABSENT

    thread = threading.Thread(target=keep_asking)
    thread.start()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        seconds()
    stop.set()
    thread.join()


def test_somebody_else_may_know_of_meetings(pair):
    now = time.monotonic()
    meetings = [("elsewhere", now - 5), ("later", now - 1)], [("was elsewhere", now - 3)]
    knowing = RollCall(1, 2, "127.0.0.1", attendance=lambda: meetings)
    pair[0].set_addresses([pair[0].address(), knowing.address()])
    knowing.came("here")
    for key in ("elsewhere", "later", "was elsewhere", "here"):
        assert pair[0].ask(key)[1].state == CAME
    answer = pair[0].ask("nowhere")[1]
    assert answer.state == ABSENT
    assert [key for key, _ in answer.open] == ["elsewhere", "later", "here"]
    assert answer.last[0] == "was elsewhere" and 3 <= answer.last[1] < 9
    knowing.left("here")
    assert pair[0].ask("nowhere")[1].last[0] == "here"
    knowing.close()


# What a process tells of itself.


def test_everyone_who_asks_is_told_of_a_failure(pair):
    pair[1].came("x")
    assert pair[0].ask("x")[1].notice is None
    pair[1].tell(FAILED, "a bad batch " + "x" * 10**5)
    pair[1].tell(FINISHED)
    for key, state in (("x", CAME), ("y", ABSENT)):
        answer = pair[0].ask(key)[1]
        assert answer.state == state
        kind, text = answer.notice
        # The first notice counts, and as much of it as an answer holds.
        assert kind == FAILED and text.startswith("a bad batch x") and len(text) == 4000
    assert "Missing: rank 1 (has failed: a bad batch xx" in pair[0].describe(pair[0].ask("y"))


def test_everyone_who_asks_is_told_of_the_end(pair):
    pair[1].tell(FINISHED)
    answers = pair[0].ask("x")
    assert answers[1].notice == (FINISHED, "")
    assert pair[0].describe(answers) == (
        "Came: rank 0. Missing: rank 1 (has come to the end of the script)."
    )


def ends(roll_calls, timeout=20, delays=()):
    """What wait_for_the_end says in each, which then closes, and the seconds that it took."""
    told = [None] * len(roll_calls)

    def end(rank):
        time.sleep(delays[rank] if delays else 0)
        begin = time.monotonic()
        error = roll_calls[rank].wait_for_the_end(timeout)
        told[rank] = error, time.monotonic() - begin
        roll_calls[rank].close()

    threads = [threading.Thread(target=end, args=(r,)) for r in range(len(roll_calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


@pytest.mark.parametrize("size", [2, 7])
def test_the_end_comes_when_all_have_come_to_it(size):
    """Though who sees it first is gone before the others look again."""
    for _ in range(5):
        assert [error for error, _ in ends(simulated(size))] == [None] * size


def test_the_end_waits_for_the_last():
    told = ends(simulated(3), delays=[0, 0, 0.6])
    assert [error for error, _ in told] == [None] * 3
    assert all(0.5 < seconds < 5 for _, seconds in told[:2]) and told[2][1] < 5


def test_the_end_without_others_that_are_gone_or_have_failed():
    for spoil, words in (
        (lambda other: other.close(), "rank 1 (its process is gone)"),
        (lambda other: other.tell(FAILED, "a bad batch"), "rank 1 (has failed: a bad batch)"),
    ):
        roll_calls = simulated(3)
        spoil(roll_calls[1])
        roll_calls[2].tell(FINISHED)
        begin = time.monotonic()
        error = roll_calls[0].wait_for_the_end(20)
        assert time.monotonic() - begin < 2
        assert error.startswith("Rank 0 has come to the end of its script and has waited ")
        # Rank 2 has come to its end and is not missed.
        assert f"Missing: {words}." in error
        for roll_call in roll_calls:
            roll_call.close()


def silence(pair, mute):
    """From now on rank 0 asks somebody who does not answer."""
    address = bytearray(pair[1].address())
    address[16:18] = struct.pack(">H", mute.getsockname()[1])
    pair[0].set_addresses([pair[0].address(), bytes(address)])


@pytest.mark.parametrize("answers_for", [0, 1])
def test_at_the_end_one_that_does_not_answer_is_waited_for_until_the_timeout(pair, answers_for):
    """And not for as long as a question may take. The time counts from its last answer."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        timer = threading.Timer(answers_for, silence, (pair, mute))
        timer.start()
        if not answers_for:
            timer.join()
        begin = time.monotonic()
        error = pair[0].wait_for_the_end(0.5)
        assert answers_for + 0.4 <= time.monotonic() - begin < answers_for + 1.8
        assert "Missing: rank 1 (does not answer: stopped" in error


def test_at_the_end_one_that_answers_is_waited_for_without_a_limit(pair, caplog):
    """It may evaluate and save. Now and then it is told who that is."""
    told = ends(pair, timeout=0.5, delays=[0, 2])
    assert [error for error, _ in told] == [None] * 2
    assert 1.8 < told[0][1] < 5
    texts = [record.getMessage() for record in caplog.records]
    assert 2 < len(texts) < 8
    for text in texts:
        assert text.startswith("Rank 0 has come to the end of its script and has waited ")
        assert "Missing: rank 1 (has met nobody yet)." in text
    assert 0.05 < float(re.search("has waited ([0-9.]+) s", texts[0]).group(1)) < 1


def describe(answers, rank=0):
    roll_call = object.__new__(RollCall)
    roll_call.rank = rank
    return roll_call.describe(answers)


def test_describe():
    answers = {
        2: Answer(CAME),
        1: Answer(ABSENT, last=("x", 12.1)),
        3: Answer(GONE),
        4: Answer(SILENT),
    }
    assert describe(answers) == (
        "Came: ranks 0, 2. Missing: rank 1 (last met at 'x' 12 s ago), "
        "rank 3 (its process is gone), "
        "rank 4 (does not answer: stopped, or its machine is unreachable)."
    )
    assert describe({}) == "Came: rank 0. Missing: none."


def test_describe_many_ranks():
    answers = {rank: Answer(CAME) for rank in range(512)}
    assert describe(answers, rank=512) == "Came: ranks 0-512. Missing: none."
    answers.update({rank: Answer(GONE) for rank in (3, 5, 6, 9, 10, 11)})
    answers.update({rank: Answer(SILENT) for rank in (100, 101)})
    answers.update({rank: Answer(ABSENT, (("y", 3 + rank / 100),)) for rank in range(200, 300)})
    answers.update({rank: Answer(ABSENT) for rank in (20, 22)})
    assert describe(answers, rank=512) == (
        "Came: ranks 0-2, 4, 7, 8, 12-19, 21, 23-99, 102-199, 300-512. "
        "Missing: ranks 3, 5, 6, 9-11 (their processes are gone), "
        "ranks 20, 22 (have met nobody yet), "
        "ranks 100, 101 (do not answer: stopped, or their machines are unreachable), "
        "ranks 200-299 (wait at 'y' for 5 to 6 s)."
    )


VARIABLES = (
    "DMLC_NODE_HOST",
    "DMLC_INTERFACE",
    "HOROVOD_GLOO_IFACE",
    "DMLC_PS_ROOT_URI",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
)


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, "127.0.0.1"),
        ({"DMLC_NODE_HOST": "127.0.0.2", "DMLC_INTERFACE": "lo"}, "127.0.0.2"),
        ({"DMLC_INTERFACE": "lo", "DMLC_PS_ROOT_URI": "127.0.0.3"}, "127.0.0.1"),
        ({"HOROVOD_GLOO_IFACE": "lo"}, "127.0.0.1"),
        ({"DMLC_INTERFACE": "no such", "DMLC_PS_ROOT_URI": "localhost"}, "127.0.0.1"),
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}, "127.0.0.1"),
        ({"DMLC_PS_ROOT_URI": "not..a.host"}, "127.0.0.1"),
    ],
)
def test_the_address_comes_from_the_environment(monkeypatch, environment, expected):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    roll_call = RollCall(0, 1)
    assert len(roll_call.address()) == liveness.ADDRESS_SIZE == 32
    assert socket.inet_ntoa(roll_call.address()[12:16]) == expected
    assert roll_call.address()[:12] == bytes(10) + b"\xff\xff"
    roll_call.close()


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_ipv6():
    roll_calls = simulated(2, "::1")
    roll_calls[1].came("x")
    assert roll_calls[0].ask("x")[1].state == CAME
    roll_calls[1].close()
    assert roll_calls[0].ask("x")[1].state == GONE
    roll_calls[0].close()


@pytest.mark.parametrize("host", ["198.51.100.77", "not..a.host", "0.0.0.0"])
def test_an_address_that_is_not_ours(host):
    with pytest.raises(OSError, match=f"cannot listen on '{host}'.*set DMLC_NODE_HOST"):
        RollCall(0, 2, host)


def test_misuse(pair):
    own, other = (roll_call.address() for roll_call in pair)
    for addresses in (
        [own],
        [other, own],
        [own, other, other],
        [own, bytes(32)],
        [own, other[:31]],
    ):
        with pytest.raises(ValueError, match="addresses for 2 processes"):
            pair[0].set_addresses(addresses)
    alone = RollCall(0, 2, "127.0.0.1")
    with pytest.raises(RuntimeError, match="set_addresses"):
        alone.ask("x")
    alone.close()
