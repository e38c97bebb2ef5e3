"""What counts as a wait for other processes, and the exit of a process that never stops."""

import os
import subprocess
import threading

import gluon_syncbn as sbn  # noqa: F401
import mxnet as mx
import pytest
from gluon_syncbn import durations, native
from gluon_syncbn.native import waits
from gluon_syncbn.supervision.member import Member
from programs import wait_until


@pytest.fixture
def looks():
    """look(seconds, ...): the `Place` of a thread that is in the `with` of the test."""
    seen = waits.Waits()

    def look(passed=1.0, may_wait=True, goes_on=False, is_under_way=False):
        return seen.look(passed, may_wait, goes_on, is_under_way)

    return look


def test_a_thread_that_waits_for_nothing(looks):
    looks()
    place = looks(5.0)
    assert place.waited is None and place.counted == 0 and "test_waits.py:" in place.text


@pytest.mark.parametrize(
    "for_others, has_operation, share",
    [
        (True, False, 1),
        (False, True, 1),
        (False, False, durations.DOUBT),
    ],
)
def test_how_much_of_a_wait_counts(looks, for_others, has_operation, share):
    with waits.noted(for_others, "the sea"):
        assert looks().waited == 0
        place = looks(10.0, is_under_way=has_operation)
        assert (place.text, place.waited, place.counted) == ("the sea", 10.0, 10.0 * share)
        # While the process is in an exchange, which has a limit of its own.
        assert looks(5.0, may_wait=False).waited == 10.0
        # Nobody waits in vain.
        assert looks(5.0, goes_on=True).counted == 0
    assert looks().waited is None


def test_an_operation_is_under_way_from_its_inputs_to_its_outputs():
    """Not while a computation that it sends lasts, or where MXNet has skipped that."""
    ends = threading.Event()
    begun, ended = native.store_operations()

    def now():
        return native.store_operations()[0] - begun, native.store_operations()[1] - ended

    class Waits(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            ends.wait(60)
            self.assign(out_data[0], req[0], in_data[0])

    mx.operator.register("waits_for_the_test")(
        type("Prop", (mx.operator.CustomOpProp,), {"create_operator": lambda *_: Waits()})
    )
    x = mx.nd.Custom(mx.nd.ones(3), op_type="waits_for_the_test")
    y = mx.nd.zeros(3)
    native.push_for_others(lambda: mx.nd.elemwise_add(x, x, out=y), x.handle, y.handle)
    native.push_for_others(lambda: None, None, x.handle)
    assert now() == (1, 0)
    ends.set()
    wait_until(lambda: now() == (2, 2))
    native.push_for_others(lambda: None, x.handle, None)
    assert now() == (2, 2)


def test_a_wait_within_another(looks):
    with waits.noted(what="outer"):
        with waits.noted(for_others=True, what="inner"):
            looks()
            assert looks(3.0).text == "inner"
        looks()
        assert looks(3.0).text == "outer"


def test_a_new_wait_begins_anew(looks):
    for _ in range(3):
        with waits.noted():
            looks()
            assert looks(1.0).waited == 1


def test_the_thread_that_has_waited_longest_is_reported(looks):
    ends, begun = threading.Event(), threading.Event()

    def wait():
        with waits.noted(for_others=True, what="another thread"):
            begun.set()
            ends.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait(60)
    with waits.noted(what="the main thread"):
        looks()
        assert looks(1.0).text == "another thread"
        # Its own limit ends it.
        waits.bounded.add(thread.ident)
        assert looks(1.0).text == "the main thread"
    waits.bounded.discard(thread.ident)
    ends.set()
    thread.join()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.asnumpy(),
        lambda x: x.wait_to_read(),
        lambda x: mx.nd.waitall(),
        lambda x: mx.nd.contrib.boolean_mask(x, mx.nd.ones(2)),
        lambda x: x._sync_copyfrom(x.asnumpy()),
    ],
)
def test_mxnets_functions_note_that_they_wait(function, monkeypatch):
    noted = []
    monkeypatch.setattr(waits.noted, "__enter__", lambda self: noted.append(1))
    monkeypatch.setattr(waits.noted, "__exit__", lambda self, *error: None)
    x = mx.nd.ones((2, 2))
    del noted[:]
    function(x)
    assert noted


def test_writing_a_file_is_no_wait(tmp_path):
    """Which takes long, as there is no reader."""
    os.mkfifo(tmp_path / "file")
    thread = threading.Thread(target=mx.nd.save, args=[str(tmp_path / "file"), [mx.nd.ones(3)]])
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and thread.ident not in waits._waiting
    reader = subprocess.Popen(["cat", tmp_path / "file"], stdout=subprocess.DEVNULL)
    thread.join(60)
    assert not thread.is_alive() and reader.wait(60) == 0


@pytest.mark.parametrize("is_caught", [False, True])
def test_after_a_verdict_the_error_has_time_to_be_raised(is_caught):
    """And a script that has caught it the timeout to save."""
    member = Member(10.0, lambda: ([], []), None)
    with waits.noted(what="the sea"):
        member.look(1.0, True)
        member.look(5.0, True)
        member.lose("Rank 1 is gone.")
        assert member.why_it_ends(5.0) is None
        if is_caught:
            waits.note_failure()
        ends = None
        for tenths in range(51, 200):
            member.look(tenths / 10, True)
            ends = ends or member.why_it_ends(tenths / 10) and tenths / 10
    assert ends == pytest.approx(15.0 if is_caught else 5.6, abs=0.2)


def test_a_longer_timeout_of_a_call_holds_until_rank_0_is_heard_of():
    member = Member(2.0, lambda: ([], []), None)
    member.hear(0.0)
    with member.waits(600):
        member.look(3.0)
    for now in (3.0, 500.0):
        member.look(now)
        assert not member.gives_up(now)
    member.hear(500.0)
    member.look(503.0)
    assert member.gives_up(503.0)
