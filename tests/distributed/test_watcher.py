"""Watchers on real sockets. Most processes are simulated by threads of this one."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from gluon_syncbn import durations
from gluon_syncbn.supervision import _links as connections
from gluon_syncbn.supervision import watcher as module
from gluon_syncbn.supervision._records import FAILED
from gluon_syncbn.supervision.member import Member
from gluon_syncbn.supervision.watcher import Watcher
from programs import wait_until

ROOT = module.__file__[: module.__file__.rindex("gluon_syncbn")]
# Scripts import the folders without their __init__.py, and so without MXNet, to start quickly.
HEAD = f"""
import collections, os, sys, time, types
for part in ("", ".supervision", ".native", ".groups"):
    name = "gluon_syncbn" + part
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [{ROOT!r} + name.replace(".", "/")]
sys.modules["gluon_syncbn.native"].__dict__.update(
    warn=print, store_operations=lambda: (0, 0),
)
sys.modules["gluon_syncbn.supervision"].exit = types.SimpleNamespace(abandon=lambda: None)
from gluon_syncbn.supervision.member import Member
from gluon_syncbn.supervision.watcher import Watcher

def lost(text):
    print("lost", text, flush=True)

def meet(lost=lost):
    rank, size, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    member = Member(timeout, lambda: ([], []), None)
    one = Watcher(rank, size, "the store", member, lost)
    print(one.address.decode(), flush=True)
    one.meet(sys.stdin.readline().encode())
    return one
"""


class Job:
    """Some ranks are simulated here; each of the others is a process that runs a script."""

    def __init__(self, size, timeout, scripts):
        self.size, self.timeout = size, timeout
        self.processes = {rank: self._start(rank, text) for rank, text in scripts.items()}
        self.flying = {rank: ([], []) for rank in range(size) if rank not in scripts}
        self.watchers = {rank: self._watch(rank) for rank in self.flying}
        words = {rank: one.stdout.readline() for rank, one in self.processes.items()}
        self.address = words[0].encode() if 0 in scripts else self.watchers[0].address
        for process in self.processes.values():
            print(self.address.decode(), file=process.stdin, flush=True)
        for watcher in self.watchers.values():
            watcher.meet(self.address)
        wait_until(lambda: all(watcher._has_met for watcher in self.watchers.values()))

    def _watch(self, rank):
        about = 0, self.size, True
        member = Member(self.timeout, lambda: self.flying[rank], lambda _: about)
        return Watcher(rank, self.size, "the store", member, lambda _: None)

    def _start(self, rank, text):
        script = [sys.executable, "-c", HEAD + textwrap.dedent(text)]
        return subprocess.Popen(
            [*script, *map(str, (rank, self.size, self.timeout))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __getitem__(self, rank):
        return self.watchers[rank]

    def hub(self):
        return self[0]._hub

    def all_connected(self):
        """Waits until it is so, on both sides."""
        wait_until(lambda: self.hub().connected == self.size - 1)
        links = [watcher._link for rank, watcher in self.watchers.items() if rank]
        wait_until(lambda: all(link._writer for link in links))

    def verdict(self, within):
        """The text that all simulated processes get, which is one."""
        watchers = self.watchers.values()
        wait_until(lambda: all(watcher.member.lost for watcher in watchers), within)
        [text] = {watcher.member.lost for watcher in watchers}
        return text

    def close(self):
        with ThreadPoolExecutor(len(self.watchers) + 1) as executor:
            list(executor.map(Watcher.close, self.watchers.values()))
        for process in self.processes.values():
            os.killpg(process.pid, signal.SIGKILL)  # Also its children.
            process.communicate()


@pytest.fixture
def new_job(monkeypatch):
    monkeypatch.setattr(module, "exit", SimpleNamespace(abandon=lambda: None))
    jobs = []

    def new(size=2, timeout=10.0, scripts=()):
        jobs.append(Job(size, timeout, dict(scripts)))
        return jobs[-1]

    yield new
    for job in jobs:
        job.close()


def is_alive(job, rank=1):
    """Whether what a process says still reaches all."""
    job[rank].fail("a bad batch")
    return f"rank {rank} (failed: a bad batch)" in job.verdict(within=5)


def connect(job):
    ip, port, *_ = job.address.decode().split()
    return socket.create_connection((ip, int(port)), timeout=10)


def open_files():
    return len(os.listdir("/proc/self/fd"))


# The decisions.


@pytest.mark.parametrize("size", [2, 7])
def test_the_end(new_job, size):
    """Comes once all have reached it, and all take the same way out."""
    job, calls = new_job(size), []
    with ThreadPoolExecutor(size) as executor:
        ends = [executor.submit(job[r].leave, None, calls.append) for r in range(1, size)]
        time.sleep(0.3)
        assert not calls and not any(end.done() for end in ends)
        job[0].leave(None, calls.append)
    assert calls == [10] * size
    assert {each.member.lost for each in job.watchers.values()} == {"The process ends."}


def test_a_process_that_ends_at_once_tells_why(new_job):
    job = new_job(3)
    job.all_connected()
    one = job.watchers.pop(2)

    def fail_and_end():  # In one turn, as where the thread has had no time in between.
        one.member.end(FAILED, "a bad batch")
        one._begin_to_end()

    one._call(fail_and_end)
    assert "Missing: rank 2 (failed: a bad batch)." in job.verdict(within=2)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_rank_0_is_missing(new_job, fault):
    job = new_job(5, 2.0, {0: "meet(); time.sleep(60)"})
    begin = time.monotonic()
    job.processes[0].send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    text = job.verdict(within=6)
    if fault == "killed":
        assert text == "Missing: rank 0 (process ended)." and time.monotonic() - begin < 1.5
    else:
        assert text.startswith("Missing: rank 0 (no answer: stopped")
        assert time.monotonic() - begin > 1


def test_rank_0_is_stopped_for_less_than_the_timeout(new_job, monkeypatch):
    """The others have made many connections meanwhile, of which the last counts."""
    monkeypatch.setattr(durations, "SILENCE", 0.1)
    job = new_job(5, 6.0, {0: "meet(); time.sleep(60)"})
    wait_until(lambda: all(job[rank]._link._writer for rank in job.watchers))
    job.processes[0].send_signal(signal.SIGSTOP)
    time.sleep(3)
    job.processes[0].send_signal(signal.SIGCONT)
    time.sleep(1)
    assert not any(job[rank].member.lost for rank in job.watchers)
    assert is_alive(job)


def test_a_verdict_arrives_though_rank_0_exits(new_job):
    """With messages that it has not read, so the connections are reset."""
    for _ in range(5):
        job = new_job(12, 5.0, {0: "meet(lambda _: os._exit(1)); time.sleep(60)"})
        wait_until(lambda job=job: all(job[rank]._link._writer for rank in job.watchers))
        for rank in job.watchers:
            job[rank].fail("a bad batch")
        assert "(failed: a bad batch)" in job.verdict(within=5)


def test_a_forked_child_keeps_nothing(new_job):
    """So its parent's death is seen; and its own end ends no job."""
    script = """
        one = meet()
        sys.stdin.readline()
        if os.fork() == 0:
            sys.exit()
        os.wait()
        if os.fork() == 0:
            links = [os.readlink(f.path) for f in os.scandir("/proc/self/fd") if f.is_symlink()]
            print("kept", [link for link in links if "socket" in link or "epoll" in link])
            print("lost", one.member.lost, flush=True)
            one.fail("the child's")
            time.sleep(60)
        time.sleep(60)
    """
    job = new_job(3, 10.0, {1: script})
    job.all_connected()
    process = job.processes[1]
    print(file=process.stdin, flush=True)
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines[0].startswith("lost This process was forked")
    assert [line for line in lines if line.startswith("kept")] == ["kept []\n"], lines
    time.sleep(0.5)
    assert not job[0].member.lost
    process.kill()
    assert "Missing: rank 1 (process ended)" in job.verdict(within=4)


# Connections.


def test_a_connection_that_breaks_is_made_again(new_job):
    job = new_job(3)
    for linger in (0, 1, 1):
        job.all_connected()
        before = job.hub()._writers[1]
        option = struct.pack("ii", linger, 0)  # It ends, or is reset.
        before.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        job[0]._call(before.transport.abort)
        wait_until(lambda before=before: job.hub()._writers.get(1) not in (None, before))
    time.sleep(1.5)
    assert not job[0].member.lost and is_alive(job)


@pytest.mark.parametrize("how", ["closed", "reset", "reset elsewhere", "silent, then closed"])
def test_the_end_of_a_connection_says_of_its_process(how, monkeypatch):
    """Its process has ended only if it was heard just before, and the network had no part in it. It
    resets the connection if it has not read all."""
    if how.startswith("silent"):
        monkeypatch.setattr(durations, "FRESH", 0.1)
    heard, gone = [], []

    async def run():
        receive = lambda rank, message: heard.append((rank, message))  # noqa: E731
        hub = connections.Hub(2, receive, lambda rank: None, gone.append, lambda: {})
        ip, port, token, _ = (await hub.listen()).split()
        own = ("127.0.0.2" if how == "reset elsewhere" else ip, 0)
        _, writer = await asyncio.open_connection(ip, int(port), local_addr=own)
        for message in ([connections._VERSION, token, 1], "a report"):
            writer.write(connections._line(message))
        while not heard:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2 if how.startswith("silent") else 0)
        if how.startswith("reset"):
            option = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        writer.transport.abort()
        while hub.connected:
            await asyncio.sleep(0.01)
        hub.close()

    asyncio.run(asyncio.wait_for(run(), 10))
    assert heard == [(1, "a report")] and gone == ([1] if how in ("closed", "reset") else [])


def test_a_connection_may_end_long_before_the_next(new_job, monkeypatch):
    """As where a link is back, and the end of the silent one comes first."""
    job, connect_to, is_back = new_job(), asyncio.open_connection, threading.Event()
    job.all_connected()

    async def late(*arguments, **options):
        while not is_back.is_set():
            await asyncio.sleep(0.01)
        return await connect_to(*arguments, **options)

    monkeypatch.setattr(asyncio, "open_connection", late)
    job[1]._call(job[1]._link.renew)
    wait_until(lambda: not job.hub().connected)
    time.sleep(0.5)
    assert not job.hub().connected and not job[0].member.lost
    is_back.set()
    job.all_connected()
    assert is_alive(job)


def test_a_look_that_fails_is_followed_by_others(new_job, caplog):
    job = new_job(timeout=4)
    job.all_connected()
    flying = job.flying.pop(1)
    wait_until(lambda: "goes on after an error" in caplog.text)
    job.flying[1] = flying
    assert is_alive(job)
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "goes on after an error: KeyError(1)" in record.getMessage()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", b'[1, "\\u00e9", 3]\n'])
def test_somebody_else_listens_at_the_port(new_job, answer):
    """Who hears nothing waits for the timeout."""
    job = new_job(2, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ip, _, *tokens = job.address.decode().split()
        port = str(server.getsockname()[1])
        one = Watcher(1, 2, "the store", Member(1.0, lambda: ([], []), None), lambda _: None)
        one.meet(" ".join([ip, port, *tokens]).encode())
        with server.accept()[0] as connection:
            connection.sendall(answer)
            wait_until(lambda: one.member.lost)
    one.close()
    assert ("process ended" if answer else "no answer: stopped") in one.member.lost


STRANGERS = {
    "garbage": lambda _: os.urandom(1 << 20),
    "another token": lambda _: b'[1, "00000000000000", 1]\n',
    "no ASCII": lambda _: b'[1, "\\u00e9\\ud800", 1]\n',
    "no rank": lambda token: b'[1, "%s", 2]\n' % token,
    "too long": lambda token: b'[1, "%s", "%s"]\n' % (token, b"x" * (1 << 18)),
    "no UTF-8": lambda token: b'[1, "%s", "\xff\xfe"]\n' % token,
    "nesting": lambda _: b"[" * 100000 + b"\n",
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_gets_no_answer_and_does_no_harm(new_job, stranger, capfd):
    job = new_job()
    text = STRANGERS[stranger](job.address.split()[2])
    with connect(job) as connection:
        with contextlib.suppress(OSError):  # It may end at any moment.
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(4096) == b""
    assert is_alive(job)
    assert capfd.readouterr().err == "" and not job[0]._logged


def test_slow_strangers_are_dropped_and_block_nobody(new_job, monkeypatch):
    """Also those that send a byte now and then."""
    monkeypatch.setattr(durations, "GREETING", 1.0)
    job = new_job()
    job.all_connected()
    files, begin = open_files(), time.monotonic()
    clients = [connect(job) for _ in range(40)]
    for client in clients:
        client.sendall(b"[1, ")
    time.sleep(0.5)
    for client in clients:
        client.sendall(b'"')
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        client.close()
    assert 0.9 < time.monotonic() - begin < 5
    wait_until(lambda: open_files() <= files)
    assert is_alive(job)


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, "127.0.0.1"),
        ({"DMLC_NODE_HOST": "127.0.0.2", "DMLC_PS_ROOT_URI": "127.0.0.3"}, "127.0.0.2"),
        ({"DMLC_PS_ROOT_URI": "127.0.0.1"}, "127.0.0.1"),
        ({"DMLC_PS_ROOT_URI": "not..a.host"}, "127.0.0.1"),
    ],
)
def test_the_address_comes_from_the_environment(monkeypatch, environment, expected):
    monkeypatch.setattr(os, "environ", environment)
    assert connections._own_host() == expected


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_ipv6(new_job, monkeypatch):
    monkeypatch.setenv("DMLC_NODE_HOST", "::1")
    assert is_alive(new_job())


@pytest.mark.parametrize("host", ["198.51.100.77", "0.0.0.0"])
def test_an_address_that_is_not_ours(new_job, monkeypatch, host):
    monkeypatch.setenv("DMLC_NODE_HOST", host)
    with pytest.raises(OSError, match=f"cannot listen on '{host}'.*set DMLC_NODE_HOST"):
        new_job()
