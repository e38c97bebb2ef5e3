"""Messages of layers: how many there are, what they share with Python, and how waits are judged."""

import faulthandler
from functools import partial
from types import SimpleNamespace

import pytest
from gluon_syncbn.distributed.answers import (
    ABSENT,
    ARRIVED,
    FAILED,
    FINISHED,
    GONE,
    SILENT,
    Answer,
    describe,
)
from gluon_syncbn.distributed.peers import Peers


def test_one_message_per_layer_pass_and_process(pair):
    """Python only opens the route of a key, and passes without backward take no new keys."""
    for reported in pair.reported("messages"):
        handshake, forward, backward = (
            f"{reported['number']} {name}" for name in ("handshake", "forward -1", "backward -1")
        )
        assert reported == {
            "number": reported["number"],
            "passes": [{handshake: 1, forward: 10}, [handshake, forward], [0.5] * 10],
            "first step": [{forward: 1, backward: 1}, [backward], [0.5]],
            "steps": [{forward: 4, backward: 4}, [], [0.5] * 4],
            # A layer that has other devices is known by now.
            "moved": [{forward: 1, backward: 1}, [forward, backward], [0.5]],
        }


def test_keys_of_users_are_no_layers(pair):
    assert pair.reported("keys of users") == [[[[3.0, 3.0]] * 6, 1, 0.5]] * 2


def test_a_layer_takes_the_store_of_its_group(pair):
    for counts, means in pair.reported("another store"):
        # The handshake, and two messages in each of two steps.
        assert counts == [[5, 0], [0, 5], [4, 0]]
        assert means == [0.5] * 6


def test_a_group_that_failed_stays_so(pair):
    for kind, text, mean_of_other in pair.reported("failed"):
        assert kind == "MXNetError" and mean_of_other == 0.5
        assert "the processes have lost each other" in text and "a device was lost" in text


def test_a_probe_shows_who_has_arrived(pair):
    assert pair.reported("probed")[1] == {
        "waits": ['a title ("probed" 3)', 'a title ("probed" 2)'],
        "before": ["arrived", "arrived", "absent"],
        "after": ["arrived", "arrived", "absent"],
    }


def judge_of(answers, has_finished=False):
    """Peers.judge for these answers, by the seconds that it has waited, of 10, and the list of
    the errors with which it gives up."""
    peers = Peers.__new__(Peers)
    peers.rank, peers.name, peers._knows_others = 0, "the store", True
    peers._liveness = SimpleNamespace(
        probe=lambda *_: answers, describe=describe, has_finished=has_finished
    )
    given_up = []
    peers._give_up = given_up.append
    arguments = {"timeout": 10, "probes": 1, "members": range(2), "in_memory": True}
    return partial(peers.judge, "title", "title (key 1)", "", **arguments), given_up


@pytest.mark.parametrize("state", [ARRIVED, ABSENT, SILENT, GONE])
@pytest.mark.parametrize("status", [None, (FAILED, "a bad batch"), (FINISHED, "")])
@pytest.mark.parametrize("has_finished", [False, True])
def test_who_has_finished_may_still_come_to_the_exchange_after_the_scripts(
    state, status, has_finished
):
    """Where a link is cut, one process learns later than the other that both have finished."""
    look, given_up = judge_of({1: Answer(state, status=status)}, has_finished)
    look(1)
    ends = status and (status[0] == FAILED or not has_finished)
    assert bool(given_up) == (state != ARRIVED and bool(ends) or state == GONE)


def test_processes_that_have_all_come_are_looked_at_once_more():
    """After a suspension of all, some come before others can see it."""
    answers = {1: Answer(ARRIVED)}
    judge, given_up = judge_of(answers)
    judge(10.5)
    assert not given_up
    answers[1] = Answer(ABSENT)
    judge(10.5)
    answers[1] = Answer(ARRIVED)
    judge(11.5)
    assert len(given_up) == 2


@pytest.mark.parametrize("timeout, limit", [(5, 60), (300, 300)])
def test_a_slow_machine_has_time_for_the_shutdown_of_mxnet(timeout, limit, monkeypatch):
    """After a good end: it would end with exit code 1."""
    limits = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda s, exit: limits.append(s))

    def ignore(*_):
        pass

    liveness = SimpleNamespace(wait_for_the_end=ignore, close=ignore)
    peers = SimpleNamespace(
        lost=None, longest_timeout=timeout, _liveness=liveness, lose=ignore, close=ignore
    )
    Peers.leave(peers, None, ignore)
    assert limits == [limit]
