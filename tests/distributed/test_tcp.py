"""Connections of processes that probe each other: strangers, limits, addresses."""

import contextlib
import errno
import os
import socket
import struct
import threading
import time

import pytest
from distributed_cluster import wait_until
from distributed_liveness import at_another_port
from gluon_syncbn.distributed import liveness as module
from gluon_syncbn.distributed import tcp, watch
from gluon_syncbn.distributed.answers import ABSENT, ARRIVED, GONE
from gluon_syncbn.distributed.liveness import Liveness
from gluon_syncbn.distributed.watch import Watch


@pytest.fixture
def pair(simulate):
    return simulate(2)


def connect(one):
    ip, port, *_ = one.address.decode().split()
    return socket.create_connection((ip, int(port)), timeout=10)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_close_gives_everything_back(simulate, monkeypatch):
    monkeypatch.setattr(module, "_CONNECTION_LIFE", 60)
    threads, files = threading.active_count(), open_files()
    more = simulate(5)
    assert [more[0].probe("x")[rank].state for rank in range(1, 5)] == [ABSENT] * 4
    with connect(more[1]) as slow:
        slow.sendall(b"a part of a line")
        more[0].probe("x")  # Rank 1 has taken the connection before, not only let it queue.
        for one in more:
            one.close()
        assert slow.recv(1) == b""
    wait_until(lambda: threading.active_count() <= threads and open_files() <= files)


def test_probes_need_no_new_threads(pair, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("gluon_syncbn.native.threads.start", refuse)
    pair[1].arrive("x")
    assert pair[0].probe("x")[1].state == ARRIVED


def message(one, key=b'"x"', token=None, end=b"\n"):
    token = one.address.split()[2] if token is None else token
    return token + b" [" + key + b", 0, false]" + end


STRANGERS = {
    "garbage": lambda _: os.urandom(1 << 20),
    "another token": lambda one: message(one, token=b"0" * 14),
    "too long a key": lambda one: message(one, b'"' + b"x" * 70000 + b'"'),
    "nobody who asks": lambda one: one.address.split()[2] + b' ["x"]\n',
    "no UTF-8": lambda one: message(one, b'"\xff\xfe"'),
    "nesting": lambda one: message(one, b"[" * 4000),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_gets_no_answer_and_does_no_harm(pair, stranger, capfd):
    with connect(pair[1]) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(STRANGERS[stranger](pair[1]))
            assert connection.recv(4096) == b""
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


def test_a_thread_that_answers_outlives_all_errors(monkeypatch, caplog):
    """Such as looks without a free file descriptor, and no thread left for an answer. The launcher
    hears of it all the same."""

    class Watched:
        longest_timeout, size, lost = 0.2, 1, None
        exchanges_in_flight = staticmethod(lambda: False)

    def no_files(path):
        raise OSError(errno.EMFILE, "Too many open files")

    def no_threads(thread):
        raise RuntimeError("can't start new thread")

    beats = []
    monkeypatch.setattr(watch, "beat", beats.append)
    monkeypatch.setattr(watch.os, "listdir", no_files)
    # What looks as if the main thread waited inside MXNet.
    monkeypatch.setattr(watch, "_libraries", lambda: (os.path.dirname(__file__),))
    ranks = [Liveness(0, 2, "127.0.0.1"), Liveness(1, 2, "127.0.0.1", watch=Watch(Watched()))]
    with contextlib.closing(ranks[0]), contextlib.closing(ranks[1]):
        for one in ranks:
            one.set_addresses([one.address for one in ranks])
        ranks[1].arrive("x")
        wait_until(lambda: len(beats) > 10 and caplog.records)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_threads)
            assert ranks[0].probe("x")[1].state == ARRIVED
        assert ranks[0].probe("y")[1].state == ABSENT
    (record,) = caplog.records
    assert "goes on after an error: OSError(24" in record.getMessage()


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
    assert tcp.own_host() == expected


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_ipv6(simulate):
    ranks = simulate(2, "::1")
    ranks[1].arrive("x")
    assert ranks[0].probe("x")[1].state == ARRIVED
    ranks[1].close()
    assert ranks[0].probe("x")[1].state == GONE


@pytest.mark.parametrize("host", ["198.51.100.77", "0.0.0.0"])
def test_an_address_that_is_not_ours(host):
    files = open_files()
    with pytest.raises(OSError, match=f"cannot listen on '{host}'.*set DMLC_NODE_HOST"):
        Liveness(0, 2, host)
    assert open_files() == files
