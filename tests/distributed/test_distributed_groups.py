"""Groups of devices in one process, the default group, and processes that built other nets."""

import copy
import os
import pickle
import re
import types

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import programs
import pytest
from distributed_cluster import Cluster
from distributed_groups import SIZES, expected, one_layer
from gluon_syncbn.groups.store import UserStore
from mxnet import autograd
from runs import contexts
from tolerances import assert_same_bits


class Sums:
    """A store of which this is the only process, though it says that there are more."""

    def __init__(self, rank=0, size=1):
        self.rank, self.size = rank, size

    def all_reduce(self, key, array):
        return array


@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups_in_one_process(size):
    group = sbn.SyncGroup(group_size=size)
    found = one_layer(SIZES[4], 0, contexts(4), group=group)
    for name, value in expected(4, size).items():
        assert_same_bits(found[name], value, name)


@pytest.mark.parametrize("size, processes", [(3, 1), (8, 1), (5, 2), (32, 4)])
def test_a_size_that_does_not_divide_the_devices(size, processes):
    group = sbn.SyncGroup(group_size=size, store=Sums(size=processes))
    words = f"group_size={size}, and odd has 4 devices in each of {processes} processes"
    layer = sbn.SyncBatchNorm(prefix="odd_", in_channels=3, group=group)
    layer.initialize(ctx=contexts(4))
    # In inference nothing is exchanged.
    layer(mx.nd.ones((2, 3))).wait_to_read()
    with pytest.raises(mx.MXNetError, match=words), autograd.train_mode():
        layer(mx.nd.ones((2, 3))).wait_to_read()


def store(**attributes):
    return {"store": types.SimpleNamespace(**attributes)}


WRONG = [
    *(({"group_size": size}, "group_size") for size in (1.5, True, "2")),
    (store(size=1, all_reduce=sum), "has no rank"),
    (store(rank=0, all_reduce=sum), "has no size"),
    (store(rank=0, size=1), "has no all_reduce"),
    *(
        (store(rank=0, size=1, all_reduce=sum, exact_bits=bits), "exact_bits=.* give 24 if it adds")
        for bits in ("24", 24.0, -1, 54, True)
    ),
]


@pytest.mark.parametrize("arguments, words", WRONG)
def test_wrong_arguments(arguments, words):
    kind = TypeError if arguments.get("group_size") == "2" else ValueError
    with pytest.raises(kind, match=words):
        sbn.SyncGroup(**arguments)


def test_a_store_that_returns_something_else():
    class Halves(Sums):
        def all_reduce(self, key, array):
            return array.astype(np.float32)

    layer = sbn.SyncBatchNorm(group=sbn.SyncGroup(store=Halves(size=2), timeout=5))
    layer.initialize()
    with autograd.train_mode():
        y = layer(mx.nd.ones((2, 3)))
    with pytest.raises(mx.MXNetError, match="all_reduce returned float32 of shape"):
        y.wait_to_read()


class Both(Sums):
    """Two processes that bring the same."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.names = []

    def all_reduce(self, key, array):
        self.names.append(key.split()[1])
        return np.stack([array[0]] * 2)


def layer_of(store):
    layer = sbn.SyncBatchNorm(in_channels=2, group=sbn.SyncGroup(store=store, timeout=5))
    layer.initialize()
    return layer


class Unprintable(Exception):
    def __str__(self):
        raise KeyboardInterrupt("in __str__")


# What a store raises, and what comes of it.
RAISED = {
    "plain": (ValueError("no answer"), "no answer$"),
    "not UTF-8": (OSError("/data/b\udce9.jpg"), r"/data/b\\udce9\.jpg$"),
    "unprintable": (Unprintable(), "Unprintable$"),
    "empty": (KeyError(), "KeyError$"),
    "zero": (ValueError("\0 begins"), r"\\0 begins$"),
    "exit": (SystemExit(3), "3$"),
    "interrupt": (KeyboardInterrupt(), "KeyboardInterrupt$"),
    **{f"cut at {k}": (ValueError("." * k + "\U0001f600" * 3000), "\U0001f600$") for k in range(4)},
    "shape": (None, r"all_reduce returned float64 of shape \(3,\) for float64 of shape \(2, "),
}


@pytest.mark.parametrize("case", RAISED)
@pytest.mark.parametrize("at", ["handshake", "forward 0", "forward 2", "backward 0"])
def test_whatever_a_store_raises_is_the_error_of_the_call(case, at):
    error, words = RAISED[case]
    where, _, number = at.partition(" ")

    class Raises(Both):
        def all_reduce(self, key, array):
            everyone = super().all_reduce(key, array)
            if where in key and self.names.count(where) > int(number or 0):
                if error is None:
                    return np.zeros(3)
                raise error
            return everyone

    layer = layer_of(Raises(size=2))
    x = mx.nd.array([[1, 2], [3, 4]])
    x.attach_grad()

    def step():
        with autograd.record():
            loss = (layer(x) ** 2).sum()
        loss.backward()
        mx.nd.waitall()

    for _ in range(int(number or 0)):
        step()
    call = "backward" if where == "backward" else "forward"
    with pytest.raises(mx.MXNetError, match=f"(?s){call} call {number or 0}.*: .*{words}"):
        step()


class Fails(Sums):
    def all_reduce(self, key, array):
        raise ValueError("no answer")

    def fail(self, text):
        raise OSError("no way to the others \udce9")


def test_a_store_that_cannot_pass_an_error_on(caplog):
    layer = layer_of(Fails(size=2))
    for _ in range(2):
        with pytest.raises(
            mx.MXNetError, match="call 0, to compare the layer's settings: no answer"
        ), autograd.train_mode():
            layer(mx.nd.ones((2, 2))).wait_to_read()
    programs.wait_until(lambda: r"other processes: no way to the others \udce9" in caplog.text)


def test_nothing_new_begins_with_a_store_after_a_failed_step():
    """A process may have sent what the others have not: they would take it for a later message."""
    store = Both(size=2)
    layer, other = layer_of(store), layer_of(store)
    layer._layer.group._fail("a bad batch")
    with pytest.raises(ValueError, match="a store with which a step has failed: .* a bad batch"):
        sbn.SyncGroup(store=store)
    with pytest.raises(mx.MXNetError, match="lost each other.* a bad batch"), autograd.train_mode():
        other(mx.nd.ones((2, 2))).wait_to_read()
    layer_of(Both(size=2))


def test_processes_compare_a_layer_that_is_cast():
    layer = layer_of(Both(size=2))

    def compares(*dtypes):
        layer._layer.group.store.names.clear()
        for dtype in dtypes:
            layer.cast(dtype)
        with autograd.train_mode():
            layer(mx.nd.ones((2, 2), dtype=dtypes[-1])).wait_to_read()
        return layer._layer.group.store.names == ["handshake", "forward"]

    assert compares("float32") and compares("float64") and not compares("float32", "float64")
    # The other processes may have gone on with float64.
    assert compares("float32") and not compares("float16")


def test_a_route_that_is_closed_with_what_utf_8_lacks():
    """As the last words of another process may be."""
    route = UserStore(Sums(), timeout=5).route("key", 1, "title", 5)
    route.close("lost b\udce9")
    with pytest.raises(RuntimeError, match=r"a \\udce9 title: lost b\\udce9$"):
        route.exchange("a \udce9 title", 5, np.ones(1))


# The default group.


@pytest.fixture
def default_group():
    yield
    sbn.set_default_group(None)


def share_statistics(layer, devices=4):
    """How many devices share theirs, by what comes out for data of one value each."""
    xs = [mx.nd.full((1, 1), i, ctx=device) for i, device in enumerate(contexts(devices))]
    with autograd.train_mode():
        for x in xs:
            layer(x)
    mx.nd.waitall()
    means = [float(array.asscalar()) for array in layer.running_mean.list_data()]
    return [means.count(mean) for mean in means]


def test_the_default_group_is_that_of_layers_which_exist(default_group):
    layer, own = (
        sbn.SyncBatchNorm(in_channels=1, momentum=0, group=group)
        for group in (None, sbn.SyncGroup(group_size=2))
    )
    for one in (layer, own):
        one.initialize(ctx=contexts(4))
    assert share_statistics(layer) == [4] * 4
    sbn.set_default_group(sbn.SyncGroup(group_size=1))
    assert share_statistics(layer) == [1] * 4
    assert share_statistics(own) == [2] * 4
    later = sbn.SyncBatchNorm(in_channels=1, momentum=0)
    later.initialize(ctx=contexts(4))
    assert share_statistics(later) == [1] * 4
    sbn.set_default_group(None)
    assert share_statistics(layer) == share_statistics(later) == [4] * 4


# Copies.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_of_a_layer_are_in_its_group(copied):
    group = sbn.SyncGroup(devices=contexts(4), group_size=2, timeout=7)
    assert repr(copied(group)) == repr(group)
    layer = sbn.SyncBatchNorm(in_channels=1, momentum=0, group=group)
    layer.initialize(ctx=contexts(4))
    other = copied(layer)
    assert share_statistics(other) == share_statistics(layer) == [2] * 4


def test_a_group_with_a_store_is_not_pickled():
    group = sbn.SyncGroup(store=Sums())
    assert copy.deepcopy(group) is group
    with pytest.raises(TypeError, match="set_default_group in the process that loads the net"):
        pickle.dumps(group)


# Processes with different nets.


@pytest.fixture(scope="module")
def other_nets(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("nets"), 2, ["distributed_groups:other_nets"])
    try:
        # They have lost each other in the end.
        assert cluster.wait() == [1], cluster.all_output()[-4000:]
        assert cluster.running() == []
        return cluster.reported("other nets")
    finally:
        cluster.clean()


# What the error says of rank 0, and of rank 1.
SIDES = {
    "name": ("name=norm", "name=other"),
    "channels": ("channels=3", "channels=4"),
    "group size": ("group_size=None", "group_size=2"),
    "dtype": ("dtype=float32", "dtype=float64"),
    "axis": ("axis=1", "axis=-1"),
    "momentum": ("momentum=0.9", "momentum=0.5"),
    "activation": ("activation=None", "activation=relu"),
    "changed later": ("momentum=0.9", "momentum=0.5"),
    "graph": ("momentum=0.9", "momentum=0.5"),
}


@pytest.mark.parametrize("what", SIDES)
def test_other_nets_are_an_error_in_every_process(other_nets, what):
    first, second = SIDES[what]
    for reported in other_nets:
        kind, text, seconds = reported[what][0]
        assert kind == "MXNetError" and seconds < 5
        told = f"not built the same net. rank 0: {first}; rank 1: {second}. Make the same layers, "
        assert told in text
        # And from then on.
        kind, text, seconds = reported[what][1]
        assert kind == "MXNetError" and "the processes have lost each other" in text and seconds < 5


EQUAL = ["nothing", "timeout", "frozen", "nothing again"]


@pytest.mark.parametrize("what", EQUAL)
def test_what_need_not_be_equal_is_no_error(other_nets, what):
    for reported in other_nets:
        assert [kind for kind, _, _ in reported[what]] == [None, None], reported[what]


def test_another_number_of_layers_is_an_error_in_every_process(other_nets):
    """Each waits for the other at another layer."""
    names = "net_syncbatchnorm2', forward call 0", "net_syncbatchnorm1', backward call 0"
    for rank, reported in enumerate(other_nets):
        kind, text, seconds = reported["layers"]
        assert kind == "MXNetError" and seconds < 10
        assert text.startswith(f"MXNetError: SyncBatchNorm '{names[rank]}")
        # Who waits where, in one text for all.
        assert all(name in text for name in names) and " has waited " in text
        assert "Missing: rank " in text and "it built another net" in text


# What the environment says, and of what a warning must tell.
OTHERS = {
    "kvstore": (
        {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "3"},
        r"DMLC_NUM_WORKER=3 .* one of 3 .*KVStoreReducer\(kv\)",
    ),
    "horovod": (
        {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"},
        r"HOROVOD_SIZE=2 .* rank 1 of 2 .*HorovodReducer\(hvd\)",
    ),
    "alone": ({"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "HOROVOD_SIZE": "1"}, None),
}
TRAINS_ALONE = """
import logging, sys, time, gluon_syncbn as sbn, mxnet as mx

# The script has ended before the warning is written.
logging.getLogger("gluon_syncbn").addFilter(lambda record: time.sleep(1) or True)

def call(training):
    net = sbn.SyncBatchNorm(in_channels=2)
    net.initialize()
    with mx.autograd.record(train_mode=training):
        net(mx.nd.ones((2, 2))).wait_to_read()

call(training=False)
sbn.set_default_group(sbn.SyncGroup())
call(training=True)
sbn.set_default_group(None)
print("no warning before", file=sys.stderr)
call(training=True)
call(training=True)
"""


@pytest.mark.parametrize("case", OTHERS)
def test_a_process_that_trains_alone_among_others_says_so_once(case):
    variables, told = OTHERS[case]
    done = programs.run(["-c", TRAINS_ALONE], env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    before, after = done.stderr.split("no warning before")
    assert "statistics of this process alone" not in before
    assert after.count("statistics of this process alone") == (told is not None), after
    assert told is None or re.search(told, after), after
