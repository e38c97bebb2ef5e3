"""Connections of processes that probe each other: strangers, limits, addresses."""

import contextlib
import os
import socket
import struct
import time

import pytest
from gluon_syncbn.distributed import liveness as module
from gluon_syncbn.distributed import tcp
from gluon_syncbn.distributed.answers import ARRIVED, GONE
from gluon_syncbn.distributed.liveness import Liveness
from programs import wait_until


@pytest.fixture
def pair(simulate):
    return simulate(2)


def connect(one):
    ip, port, *_ = one.address.decode().split()
    return socket.create_connection((ip, int(port)), timeout=10)


def open_files():
    return len(os.listdir("/proc/self/fd"))


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
