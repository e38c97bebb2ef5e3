"""The positions of launchers, and their cluster: here its launchers are threads of the test."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest
from mxnet_launch import __main__ as launch
from launched import free_port
from mxnet_launch.cluster import Cluster, LaunchError, Position, find_position, first_host
from programs import wait_until


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


def test_positions():
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "20012"}
    slurm["SLURM_JOB_NODELIST"] = "gpu[03-05]"
    operator = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}
    assert find_position(slurm) == Position(3, 8, "gpu03", 9091 + 24, "20012:8", "")
    assert find_position({**slurm, "MASTER_ADDR": "job-0"}, port=5)[:4] == (3, 8, "job-0", 5)
    assert find_position(operator) == Position(0, 2, "job-0", 23456, ":2", "")
    del operator["MASTER_PORT"]
    assert find_position({**operator, "DMLC_NODE_HOST": "10.0.0.1"})[3:] == (9091, ":2", "10.0.0.1")


SHELL = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7", "MASTER_ADDR": "a"}


@pytest.mark.parametrize(
    "names",
    [
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ],
)
@pytest.mark.parametrize("tasks", ["1", "3"])
def test_slurm_comes_last(names, tasks):
    """Its interactive shells, and what mpirun starts, have its variables too."""
    given = dict(zip(names, "12"))
    assert find_position({**SHELL, "SLURM_NTASKS": tasks, **given})[:4] == (1, 2, "a", 9091)
    assert find_position({**SHELL, **given}).job == ":2"


def test_variables_of_one_process_do_not_hide_those_of_several():
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    assert find_position({**SHELL, **alone, "SLURM_NTASKS": "3"}).size == 3
    assert find_position({**SHELL, **alone}).size == 1


@pytest.mark.parametrize(
    "environment, sentence",
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected a number from 0 to 1, got '2'."),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "65535"}, "MASTER_PORT: expected a"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_STEP_NODELIST is not set"),
        ({**SHELL, "MASTER_ADDR": "::1"}, "MASTER_ADDR is '::1': give an IPv4 address"),
        ({**SHELL, "DMLC_NODE_HOST": "fe80::1"}, "DMLC_NODE_HOST is 'fe80::1': give an IPv4"),
    ],
)
def test_no_position(environment, sentence):
    with pytest.raises(LaunchError, match=re.escape(sentence)):
        find_position(environment)


@contextlib.contextmanager
def connected(positions, options=None, wait=30, delay=0):
    """The result for each position: its Cluster, or the sentence of its error. All but the first
    come after `delay` seconds."""
    found = [None] * len(positions)

    def connect(index):
        time.sleep(delay if index else 0)
        workers, engine = options[index] if options else (1, "kvstore")
        try:
            found[index] = Cluster(positions[index], workers, engine, wait)
        except LaunchError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=connect, args=(i,)) for i in range(len(positions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    try:
        yield found
    finally:
        for cluster in found:
            if isinstance(cluster, Cluster):
                cluster.close()


def errors(ranks, size, port=None, **settings):
    port = port or free_port()
    with connected([position(rank, size, port) for rank in ranks], **settings) as found:
        return found


def position(rank, size, port, job=""):
    return Position(rank, size, "127.0.0.1", port, job, "")


def sends_slowly(address, stop):
    """It never comes to the end of the line."""
    with socket.create_connection(address, 1) as connection, contextlib.suppress(OSError):
        while not stop.wait(0.1):
            connection.send(b" ")


def message(**changes):
    own = {"job": "", "rank": 1, "host": "", "options": {"workers": 1, "engine": "kvstore"}}
    return json.dumps({**own, **changes}).encode() + b"\n"


WRONG = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[]\n",
    b'{"job": ""}\n',
    message(job="other"),
    *(message(rank=rank) for rank in ("1", True, 3, 0, 1.0, None)),
    message(host=5),
    *(message(options=options) for options in ([], {"workers": 1})),
    b"[" * 4000 + b"\n",
    b"x" * 100_000,
    b"\xff\xfe\n",
]


def sends_what_is_wrong(address, stop):
    """Returns what it is answered."""
    answers = b""
    while not stop.wait(0.1):
        for data in WRONG:
            with contextlib.suppress(OSError), socket.create_connection(address, 1) as connection:
                connection.sendall(data)
                answers += connection.recv(100)
    return answers


@pytest.mark.parametrize("stranger", [sends_slowly, sends_what_is_wrong])
def test_strangers_get_no_answer_and_delay_nobody(stranger):
    port, stop, answers = free_port(), threading.Event(), []
    address = "127.0.0.1", port + 1

    def disturb():
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(address):
                break
        answers.append(stranger(address, stop))

    thread = threading.Thread(target=disturb)
    thread.start()
    begin = time.monotonic()
    positions = [position(rank, 3, port) for rank in range(3)]
    try:
        with connected(positions, [(2, "kvstore")] * 3, delay=1) as found:
            assert time.monotonic() - begin < 5
            # The text of an error where there is one.
            assert [getattr(each, "hosts", each) for each in found] == [["127.0.0.1"] * 6] * 3
    finally:
        stop.set()
        thread.join()
    assert not any(answers)


@pytest.mark.parametrize(
    "ranks, options, sentence",
    [
        ([0, 1], [(1, "kvstore"), (2, "kvstore")], "workers is 1 at rank 0 and 2 at rank 1"),
        ([0, 1], [(1, "kvstore"), (1, "horovod")], "engine is kvstore at rank 0 and horovod at ra"),
        ([0, 1, 1], None, "are of rank 1: each needs a rank of its own"),
    ],
)
def test_launchers_that_do_not_fit_together(ranks, options, sentence):
    for text in errors(ranks, len(ranks), options=options):
        assert sentence in text


def test_a_missing_launcher(capfd, monkeypatch):
    monkeypatch.setattr("mxnet_launch.cluster._SAY_SECONDS", 0.1)
    for text in errors([0, 2], 4, wait=0.5):
        assert "launchers 1, 3 of 4 did not connect" in text
    (text,) = errors([1], 2, wait=0.5)
    assert "rank 0 did not answer at 127.0.0.1:" in text and "MASTER_ADDR" in text
    printed = capfd.readouterr().err
    assert re.search(r"launch: launchers .* did not connect to port \d+, waiting\.", printed)
    assert re.search(r"launch: rank 0 did not answer at .*, waiting\.", printed)


def test_a_port_that_is_taken():
    port = free_port()
    with socket.create_server(("127.0.0.1", port + 1)):
        (text,) = errors([0], 2, port)
    assert f"cannot listen at port {port + 1}" in text
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(LaunchError, match=f"port {port} .*: another job may use it"):
            with launch._free_port(port=port):
                pass
    # Another launcher may have it, though its scheduler does not listen yet.
    with launch._free_port(port=port), pytest.raises(LaunchError, match=f"port {port} "):
        with launch._free_port(port=port):
            pass


def test_rank_0_waits_for_all_others():
    """It has the scheduler and the servers."""
    port = free_port()
    with connected([position(rank, 3, port) for rank in range(3)]) as (first, *others):
        first.report_done()
        for other in others:
            assert not other.everyone_done and not first.everyone_done
            other.report_done()
            assert other.everyone_done
            other.close()  # As it ends.
        wait_until(lambda: first.everyone_done)
        assert first.failure is None


def test_all_launchers_learn_that_all_shut_down():
    """Those that are done have done so too."""
    port = free_port()
    with connected([position(rank, 3, port) for rank in range(3)]) as (first, *others):
        for _ in range(2):
            assert not first.report_shutdown() and not others[0].report_shutdown()
        others[1].report_done()
        wait_until(first.report_shutdown)
        wait_until(others[0].report_shutdown)


def test_addresses_are_spelled_in_the_order_of_ranks():
    addresses = ["10.0.0.7", "1.2.3.4", "192.168.255.1", "127.0.0.1", "10.0.0.7"] * 30
    spelled = [launch.spell_address(address, rank) for rank, address in enumerate(addresses)]
    assert spelled == sorted(spelled, reverse=True)
    for address, text in zip(addresses, spelled):
        assert socket.gethostbyname(text.encode()) == address


@pytest.mark.parametrize("found, is_right", [("127.0.1.1", False), ("10.0.0.1", True)])
def test_horovod_needs_a_name_that_others_can_reach(found, is_right, monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: found)
    if is_right:
        launch._check_own_name("10.0.0.1")
    else:
        with pytest.raises(LaunchError, match="is 127.0.1.1 here: let /etc/hosts say 10.0.0.1"):
            launch._check_own_name("10.0.0.1")
