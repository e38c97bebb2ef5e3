"""Which of several launchers one is, and at which address."""

import contextlib
import re
import socket

import psutil
import pytest
from mxnet_launch import __main__ as launch
from launched import free_port
from mxnet_launch._environment import LaunchError, Position, find_position, first_host, locate


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu3", "gpu3"),
        ("gpu[03-05,9],login", "gpu03"),
        ("a[7,9-12]b,c", "a7b"),
        ("rack[2-3]node[01-16]", "rack2node01"),
        ("node-x.example.org,node-y", "node-x.example.org"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes, first):
    assert first_host(nodes) == first


OPTIONS = dict(rank=1, size=2, master="b", port=5)
HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "a",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "20012",
    "SLURM_JOB_NODELIST": "gpu[03-05]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
SHELL = {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
BATCH = {**SLURM, "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    "options, environment, expected",
    [
        ({}, SLURM, (3, 7, "gpu03", 9091 + 12, 1, 2)),
        ({"port": 5}, {**SLURM, "MASTER_ADDR": "c"}, (3, 7, "c", 5, 1, 2)),
        ({}, HAND, (1, 2, "a", 9091, None, None)),
        ({}, {**HAND, **LOCAL, "MASTER_PORT": "23456"}, (1, 2, "a", 23456, 1, 2)),
        ({}, OMPI, (1, 2, "a", 9091, 0, 1)),
        ({}, PMI, (1, 2, "a", 9091, None, None)),
        (OPTIONS, {}, (1, 2, "b", 5, None, None)),
        # What agrees adds what it knows.
        ({}, {**HAND, **OMPI}, (1, 2, "a", 9091, 0, 1)),
        # Interactive shells of Slurm say that there is one process.
        ({}, {**SHELL, **HAND}, (1, 2, "a", 9091, None, None)),
        ({}, {**SHELL, **OMPI}, (1, 2, "a", 9091, 0, 1)),
        ({}, {**OMPI, **HAND, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, (1, 2)),
        # mpirun's processes inherit the variables of the batch script, or of its helpers.
        ({}, {**BATCH, **OMPI, **PMI, "PMI_RANK": "0"}, (1, 2, "a", 9091, 0, 1)),
        # Options end any contradiction.
        (OPTIONS, {**BATCH, **HAND, "RANK": "0"}, (1, 2, "b", 5, None, None)),
        ({}, {"RANK": "0", "WORLD_SIZE": "1", **SHELL}, (0, 1)),
    ],
)
def test_positions(options, environment, expected):
    assert find_position(environment, **options)[: len(expected)] == expected


@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({}, "--from-env finds none of RANK and WORLD_SIZE, OMPI_COMM_WORLD_RA"),
        ({"WORLD_SIZE": "2", **SHELL}, "only one of RANK and WORLD_SIZE is set: set both, or n"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected a number from 0 to 1, got '2'."),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: expected a number from 1 to"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "give --master or MASTER_ADDR."),
        ({**HAND, "MASTER_PORT": "65536"}, "MASTER_PORT: expected a number from 1 to 65535"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "(srun sets SLURM_STEP_NODELIST.)"),
        (
            {**SLURM, **HAND},
            "RANK and WORLD_SIZE say rank 1 of 2, SLURM_PROCID and SLURM_NTASKS say rank 3 of 7: "
            "unset the wrong ones, or give --rank and --size.",
        ),
        ({**SLURM, **HAND, "RANK": "0", "WORLD_SIZE": "1"}, "of 1, SLURM_PROCID and SLURM_NTASKS"),
        (
            {**SLURM, **OMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            "rank 0 of 1",
        ),
        ({**OMPI, **HAND, "RANK": "0"}, "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE say rank 1"),
    ],
)
def test_no_position(environment, sentence):
    with pytest.raises(LaunchError, match=re.escape(sentence)):
        find_position(environment)


def other_interface():
    """(the name of an interface beside the loopback, its address), or None."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return name, entry.address


@pytest.mark.parametrize(
    "position, variables, found",
    [
        # (rank 0's address, this machine's, the local rank, the local size)
        (Position(0, 1, "gpu03"), {}, ("127.0.0.1", "127.0.0.1", 0, 1)),
        (Position(1, 3, "localhost"), {}, ("127.0.0.1", "127.0.0.1", 1, 3)),
        (Position(1, 4, "127.0.0.1", 9, 0, 2), {}, ("127.0.0.1", "127.0.0.1", 0, 2)),
        (
            Position(1, 2, "127.0.0.1"),
            {"DMLC_NODE_HOST": "127.0.0.2"},
            ("127.0.0.1", "127.0.0.2", 1, 2),
        ),
        (
            Position(0, 2, "no.such.name"),
            {"DMLC_NODE_HOST": "10.0.0.1"},
            ("10.0.0.1", "10.0.0.1", 0, 1),
        ),
        (
            Position(1, 2, "10.0.0.1"),
            {"DMLC_INTERFACE": "lo", "DMLC_NODE_HOST": "10.0.0.2"},
            ("10.0.0.1", "10.0.0.2", 0, 1),
        ),
        (Position(0, 2, "10.0.0.1"), {}, ("10.0.0.1", "10.0.0.1", 0, 1)),
    ],
)
def test_addresses(position, variables, found):
    there = locate(position, variables, 0)
    assert (there.root, there.own, there.local_rank, there.local_size) == found


@pytest.mark.skipif(other_interface() is None, reason="there is only the loopback")
def test_the_address_of_an_interface_and_of_a_route():
    name, own = other_interface()
    assert locate(Position(0, 2, "10.0.0.1"), {"DMLC_INTERFACE": name}, 0).own == own
    assert locate(Position(1, 2, own, 9), {}, 0).own == own


@pytest.mark.parametrize(
    "position, variables, sentence",
    [
        (Position(1, 2, "no.such.name"), {}, "MASTER_ADDR is 'no.such.name', which has no IPv4"),
        (
            Position(1, 2),
            {"DMLC_NODE_HOST": "fe80::1"},
            "DMLC_NODE_HOST is 'fe80::1', which has no IPv4",
        ),
        (Position(1, 2, "a"), {"DMLC_INTERFACE": "none0"}, "DMLC_INTERFACE is 'none0', which has"),
        (Position(0, 2, "here"), {}, "MASTER_ADDR is here, which is 127.0.1.1 on this machine"),
    ],
)
def test_no_address(position, variables, sentence, monkeypatch):
    resolve = socket.gethostbyname
    monkeypatch.setattr(
        socket, "gethostbyname", lambda name: "127.0.1.1" if name == "here" else resolve(name)
    )
    with pytest.raises(LaunchError, match=re.escape(sentence)):
        locate(position, variables, 0)


def test_ipv6_is_refused_at_once():
    with pytest.raises(LaunchError, match="MASTER_ADDR is '::1', which has no IPv4 address"):
        locate(Position(1, 2, "::1"), {}, 1000)


def test_a_name_that_comes_later(monkeypatch):
    """As that of a machine of Kubernetes that has just started."""
    answers = iter([OSError("not yet"), "10.0.0.1"])

    def resolve(name):
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr("mxnet_launch._environment._route_to", lambda *_: "10.0.0.2")
    assert locate(Position(1, 2, "job-0"), {}, 10).root == "10.0.0.1"


def test_a_port_that_is_taken():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(LaunchError, match=f"port {port} .*: another job may use it"):
            with launch._hold(port=port):
                pass
    # Another launcher may have it, though its scheduler does not listen yet.
    with launch._hold(port=port), pytest.raises(LaunchError, match=f"port {port} "):
        with launch._hold(port=port):
            pass


def test_a_second_job_at_the_same_port():
    """None of its launchers starts anything, whose workers would take part in the first job."""
    jobs = [[Position(rank, 3, port=port) for rank in range(3)] for port in (9997, 9998)]
    with contextlib.ExitStack() as stack:
        for position in jobs[0]:
            stack.enter_context(launch._hold_job(position))
        for position in jobs[0]:
            with pytest.raises(LaunchError, match="cannot listen at port 9997 "):
                with launch._hold_job(position):
                    pass
        for position in jobs[1]:
            with launch._hold_job(position):
                pass


def test_an_address_of_another_machine():
    with pytest.raises(LaunchError, match="9997 of 192.0.2.1 .* rank 0's address"):
        with launch._hold_job(Position(0, 2, "192.0.2.1", 9997, root="192.0.2.1", own="192.0.2.1")):
            pass


def test_addresses_are_spelled_in_the_order_of_ranks():
    addresses = ["10.0.0.7", "1.2.3.4", "192.168.255.1", "127.0.0.1", "10.0.0.7"] * 30
    spelled = [launch.spell_address(address, rank) for rank, address in enumerate(addresses)]
    assert spelled == sorted(spelled, reverse=True)
    for address, text in zip(addresses, spelled):
        assert socket.gethostbyname(text.encode()) == address
