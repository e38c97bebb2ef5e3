"""Which processes share memory, and what happens where it cannot be shared."""

import pytest
from gluon_syncbn.distributed.shared_memory import SharedMemory

OTHER_MACHINE = b"0123456789abcdef 1 3 0123456789abcdef".ljust(64)


def opened(memories, addresses):
    """Lets each process take the addresses of all, and what came of it in the others."""
    done = [memory.open(addresses) for memory in memories]
    done += [True] * (len(addresses) - len(done))
    for memory in memories:
        memory.agree(done)
    return done


def test_processes_of_a_machine_share_memory_and_others_do_not():
    memories = [SharedMemory(rank) for rank in range(3)]
    addresses = [*(memory.address for memory in memories), OTHER_MACHINE]
    assert {len(address) for address in addresses} == {64}
    assert opened(memories, addresses) == [True] * 4
    for memory in memories:
        assert memory.joins(range(3)) and memory.joins([1, 2])
        assert not memory.joins(range(4)) and not memory.joins([2, 3])


@pytest.mark.parametrize("how", ["another token", "no such process", "no such file"])
def test_where_one_cannot_open_it_nobody_of_the_machine_does(how):
    memories = [SharedMemory(rank) for rank in range(2)]
    machine, process, file, token = memories[1].address.split()
    bad = {
        "another token": [machine, process, file, token[::-1]],
        "no such process": [machine, b"999999999", file, token],
        "no such file": [machine, process, b"99999", token],
    }[how]
    for_first = [memories[0].address, b" ".join(bad).ljust(64), OTHER_MACHINE]
    done = [memories[0].open(for_first), memories[1].open([m.address for m in memories])]
    assert done == [False, True] and memories[0].why_not
    memories[0].agree([*done, True])
    assert not memories[0].joins([0, 1]) and memories[0].joins([2])


def test_the_environment_switches_it_off(monkeypatch):
    monkeypatch.setenv("GLUON_SYNCBN_SHARED_MEMORY", "0")
    memories = [SharedMemory(rank) for rank in range(2)]
    opened(memories, [memory.address for memory in memories])
    for memory in memories:
        assert memory.why_not == "GLUON_SYNCBN_SHARED_MEMORY=0" and not memory.joins(range(2))
