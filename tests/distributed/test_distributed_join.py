"""Workers that run out of batches before the others, and a long training."""

import gc
import itertools
import operator
import os
import random
import re

import gluon_syncbn as sbn
import distributed_join
import mxnet as mx
import numpy as np
import pytest
from distributed_cluster import Cluster, needs_horovod, run
from runs import numpy_arrays
from tolerances import assert_same_bits

FIRST_LAYER = "net_syncbatchnorm0_running_mean", "net_syncbatchnorm0_running_var"


HOROVOD = pytest.param("horovod", marks=[needs_horovod, pytest.mark.long])


@pytest.fixture(scope="module", params=["kvstore", HOROVOD])
def joined(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return run(folder, 3, ["distributed_join:trains"], engine=request.param)


def train_alone():
    """What one process makes of the same samples, after each epoch."""
    training = distributed_join.Training(kvstore=None)
    found = []
    for epoch, early_stop in enumerate((False, True, False)):
        for data, labels, _ in distributed_join.steps_of_all(epoch, early_stop):
            training.step(data, labels, len(data))
        found.append(training.values())
    training.split()
    for number, (data, labels, _) in enumerate(distributed_join.steps_of_all(epoch=3)):
        training.accumulate(number, data, labels, len(data))
    training.finish()
    return [*found, training.values()]


@pytest.fixture(scope="module")
def alone():
    return train_alone()


@pytest.mark.parametrize("epoch", range(3))
def test_a_training(joined, alone, epoch):
    """As many steps as the longest process has batches, or the shortest."""
    expected = [
        [len(data), processes]
        for data, _, processes in distributed_join.steps_of_all(epoch, early_stop=epoch == 1)
    ]
    for rank, reported in enumerate(joined.reported("steps")):
        assert [row[:2] for row in reported[epoch]] == expected
        absent = [number >= distributed_join.BATCHES[rank] for number in range(len(expected))]
        assert [row[2] for row in reported[epoch]] == absent
    check_values(joined.arrays(f"epoch {epoch}"), alone[epoch])


def check_values(of_processes, alone, rtol=0):
    first, *others = of_processes
    for name, value in first.items():
        for other in others:
            assert_same_bits(other[name], value, name)
        np.testing.assert_allclose(value, alone[name], rtol, atol=1e-6, err_msg=name)
    for name in FIRST_LAYER:
        assert_same_bits(first[name], alone[name], name)


def test_gradients_of_several_batches(joined, alone):
    """Of which a process without a batch has those of earlier ones."""
    check_values(joined.arrays("accumulated"), alone[3], rtol=1e-6)


@pytest.mark.long
def test_numpy_arrays(tmp_path):
    """Parameter.zero_grad() refuses those of MXNet."""
    with numpy_arrays():
        alone = train_alone()
    job = run(tmp_path, 3, ["distributed_join:trains_numpy_arrays"])
    check_values(job.arrays("epoch 2"), alone[2])
    check_values(job.arrays("accumulated"), alone[3], rtol=1e-6)


@pytest.mark.parametrize("layer", distributed_join.lonely_layers(None))
def test_statistics_where_nobody_has_data(shared_four, layer):
    """They follow no batch that was there before; y and dx are those of some statistics."""
    counts = distributed_join.BATCHES_OF_LONELY
    steps = [shared_four.arrays(f"step {number}") for number in range(max(counts))]
    for rank, count in enumerate(counts):
        # Who has data in the group goes on with it.
        learned = max(counts[rank // 2 * 2 :][:2]) if layer.startswith("group") else count
        for number in range(1, max(counts)):
            before, found = steps[number - 1][rank], steps[number][rank]
            assert found["absent"] == (number >= count)
            names = [name for name in found if name.startswith(f"{layer}: ")]
            assert {f"{layer}: {name}" for name in ("y", "dx", "running_mean")} < set(names)
            for name in names:
                assert np.isfinite(found[name]).all(), (rank, number, name)
                if number >= learned and not name.endswith((": y", ": dx")):
                    assert_same_bits(found[name], before[name], name)
            mean = f"{layer}: running_mean"
            assert (found[mean] == before[mean]).all() == (number >= learned), (rank, number)
            if "all batches" in layer:
                assert found[f"{layer}: num_batches_tracked"] == min(number + 1, learned)


@pytest.mark.parametrize(
    "topic, kind, words",
    [
        ("one_has_no_batch", "ValueError", "this process has no batch at all"),
        ("one_leaves_a_loop", "RuntimeError", "the loop over join was left early"),
    ],
)
def test_an_error_of_one_process(tmp_path, topic, kind, words):
    """It says so, and the others notice that it has failed."""
    timeout = {"GLUON_SYNCBN_TIMEOUT": "100"}
    cluster = Cluster(tmp_path, 2, [f"distributed_join:{topic}"], by_hand=True, **timeout)
    try:
        assert cluster.wait() == [1, 1]
    finally:
        cluster.clean()
    kind_of_error, text = cluster.reported(topic)[1]
    assert kind_of_error == kind and words in text
    # By what it told while it ended, or by its absence.
    missing = rf"Missing: rank 1 \((failed: .*{words}|process ended)"
    assert re.search(missing, cluster.all_output())


X, LABELS = mx.nd.ones((8, 3)), mx.nd.ones(2)
EIGHT_SAMPLES = {
    "numpy": np.ones((8, 3)),
    "sparse": X.tostype("row_sparse"),
    "nested": (([[X]], LABELS), LABELS),
    "named": ("train", 3, X),
    "dict": {"name": "train", "data": X, "label": LABELS},
    "list of DataBatch": [mx.io.DataBatch([X], [LABELS])],
}


@pytest.mark.parametrize("what", EIGHT_SAMPLES)
def test_samples_of_a_batch_in_one_process(what):
    batch = EIGHT_SAMPLES[what]
    steps = sbn.distributed.join([batch, batch])
    assert [(given is batch, steps.batch_size) for given in steps] == [(True, 8)] * 2
    assert (steps.processes, steps.batch_size) == (0, 0)
    assert list(sbn.distributed.join([])) == []


class _OneMore:
    """Stands for a group with another process."""

    def __init__(self, batches=3):
        self._left, self.failure = batches, None

    def all_gather(self, key, title, mine):
        self._left -= 1
        return np.array([mine, [self._left >= 0, 8]])

    def fail(self, text):
        self.failure = text


def test_a_loop_within_a_loop():
    """The inner loop's batches are real ones, also where the outer loop has none left."""
    layer = sbn.SyncBatchNorm(in_channels=3)
    layer.initialize()

    def learns():
        before = layer.running_mean.data().asnumpy()
        with mx.autograd.record():
            layer(X).wait_to_read()
        return bool((layer.running_mean.data().asnumpy() != before).all())

    outer = sbn.distributed.join([X])
    outer._processes = _OneMore()
    learned = [(learns(), [learns() for _ in sbn.distributed.join([X, X])]) for _ in outer]
    assert learned == [(True, [True, True]), (False, [True, True]), (False, [True, True])]
    assert learns()


class _Leaves(Exception):
    pass


class _Training:
    """Each step changes weights and statistics, unless it brings nothing."""

    def __init__(self):
        self.layer = sbn.SyncBatchNorm(in_channels=3)
        self.layer.initialize()
        self.trainer = mx.gluon.Trainer(self.layer.collect_params(), "sgd", {"learning_rate": 1})

    def learns(self, leaves=None):
        """Makes a step, or a part of it. Returns whether statistics and weights changed."""
        arrays = self.layer.running_mean, self.layer.beta
        before = [array.data().asnumpy() for array in arrays]
        for place in PLACES:
            if place == "forward":
                with mx.autograd.record():
                    loss = self.layer(X + 5).sum()
            elif place == "backward":
                loss.backward()
            elif place == "step":
                self.trainer.step(8)
            if place == leaves:
                raise _Leaves
        return [(a.data().asnumpy() != b).all() for a, b in zip(arrays, before)]


PLACES = ["begin", "forward", "backward", "step"]
AROUND = {
    "nothing": lambda it: it,
    "enumerate": lambda it: map(operator.itemgetter(1), enumerate(it)),
    "zip": lambda it: map(operator.itemgetter(0), zip(it, itertools.count())),
    "islice": lambda it: itertools.islice(it, 100),
    "generator": lambda it: (x for x in it),
    "next": lambda it: iter(it.__next__, None),
}


@pytest.mark.parametrize("seed", range(int(os.environ.get("CASES", 24))))
def test_a_loop_that_is_left(seed):
    """At a random moment, in a random way. What follows learns from every step, or is an error of
    the second one at the latest."""
    chance = random.Random(seed)
    mine, others, count = chance.randint(1, 3), chance.randint(1, 6), chance.choice([1, 1, 2])
    leaves, place = chance.randint(0, 5), chance.choice(PLACES)
    around, keeps_around = chance.choice(list(AROUND)), chance.random() < 0.5
    way, has_trainer = chance.choice(["break", "return", "raise"]), chance.random() < 0.7
    training, group, kept = _Training(), _OneMore(others), []
    steps = sbn.distributed.join([[X]] * mine, training.trainer if has_trainer else None)
    steps._processes = group

    def loop():
        iterator = iter(steps)
        if keeps_around:
            iterator = AROUND[around](iterator)
        kept.append(iterator)
        for number, _ in enumerate(iterator if keeps_around else AROUND[around](iterator)):
            assert steps.absent == (number >= mine)
            try:
                for part in range(count):
                    is_last = number == leaves and part == count - 1
                    learned = training.learns(place if is_last else None)
                    # Without a Trainer the loop would have to clear gradients.
                    assert learned == [number < mine, number < mine or not has_trainer]
            except _Leaves:
                if way == "raise":
                    raise
                if way == "return":
                    return
                break

    try:
        loop()
    except _Leaves as error:
        kept.append(error)
    is_absent = mine <= leaves < others
    is_unseen = around == "next" or keeps_around and around != "nothing"
    if chance.random() < 0.3:  # A later loop has batches of its own.
        assert [training.learns() for _ in sbn.distributed.join([X] * 2)] == [[True, True]] * 2
    if is_absent and is_unseen:
        with pytest.raises(RuntimeError, match="the loop over join was left early") as raised:
            if place != "step":
                assert training.learns() == [False, not has_trainer]
            training.learns()
        assert str(raised.value) == group.failure
    else:
        assert [training.learns() for _ in range(3)] == [[True, True]] * 3
    # What kept it is deleted.
    kept.clear()
    raised = None
    gc.collect()
    assert training.learns() == [True, True]


def test_a_loop_that_goes_on():
    training = _Training()
    steps = sbn.distributed.join(range(3), training.trainer)
    steps._processes, steps._agree = None, lambda have, batch: next(agreed)
    agreed = iter([True] * 7 + [False])
    iterator, found = iter(steps), []
    while parts := [
        (number, steps.absent, training.learns()) for number in itertools.islice(iterator, 2)
    ]:
        found += parts
        assert training.learns() == [True, True] and not steps.absent
    expected = [(number, False, [True, True]) for number in range(3)]
    assert found == expected + [(2, True, [False, False])] * 4


def test_a_trainer_that_join_did_not_get():
    """Its gradients would be those of a repeated batch."""
    training, other = _Training(), _Training()
    steps = sbn.distributed.join([X], training.trainer)
    steps._processes = _OneMore()
    for _ in steps:
        if not steps.absent:
            other.learns()
            continue
        with pytest.raises(RuntimeError, match="give join the list of all Trainers") as raised:
            other.learns()
        assert str(raised.value) == steps._processes.failure
        break


def test_an_earlier_loop_is_deleted_in_a_later_one():
    training = _Training()
    steps = sbn.distributed.join([X], training.trainer)
    earlier = iter(steps)
    next(earlier)
    steps._processes, found = _OneMore(), []
    for _ in steps:
        found.append([steps.absent, *training.learns()])
        if steps.absent:
            earlier = None
    assert found == [[False, True, True], [True, False, False], [True, False, False]]


def test_statistics_are_measured_while_absent():
    training = _Training()
    steps = sbn.distributed.join([X], training.trainer)
    steps._processes, found = _OneMore(), []
    for number, _ in enumerate(steps):
        with sbn.precise_statistics(training.layer):
            training.layer(X * number)
        means = training.layer.running_mean.data().asnumpy()
        found.append([steps.absent, *means, *training.learns()])
    assert found == [[number > 0, *[number] * 3, *[number == 0] * 2] for number in range(3)]


def test_an_error_that_is_found_where_a_loop_is_left():
    """Python drops what is raised there."""
    training = _Training()
    steps = sbn.distributed.join([X], training.trainer)
    steps._processes = _OneMore()
    for _ in steps:
        training.learns()
        if steps.absent:
            wrong = mx.nd.random.normal(0, -1, shape=(2, 2))
            break
    with pytest.raises(mx.MXNetError, match="scale"):
        wrong.asnumpy()
    assert training.learns() == [True, True]


def test_samples_of_an_iterator():
    data = mx.io.NDArrayIter(np.ones((16, 3)), np.ones(16), batch_size=8)
    steps = sbn.distributed.join(data)
    assert [steps.batch_size for _ in steps] == [8, 8]


NO_ARRAY = "join got a batch in which there is no array: "
NO_BATCHES = "join got {}: give the batches, such as"
WRONG = [
    *(
        ([x], NO_ARRAY)
        for x in ("text", None, np.float32(2), [], {"size": 3}, mx.io.DataBatch(None))
    ),
    *((batches, NO_BATCHES.format(batches)) for batches in (5, None)),
]


@pytest.mark.parametrize("batches, words", WRONG, ids=range(len(WRONG)))
def test_what_are_no_batches(batches, words):
    with pytest.raises(TypeError, match=words):
        next(iter(sbn.distributed.join(batches)))


@pytest.mark.long
def test_a_long_training(tmp_path):
    """GLUON_SYNCBN_TEST_STEPS says how long, by default 300 steps."""
    job = run(tmp_path, 2, ["distributed_join:many_steps"], MXNET_CPU_TEMP_COPY="256")
    for count, messages, sizes in job.reported("memory"):
        assert messages == [count] * 20
        # Of the worker and the server from step 100 on. MXNet keeps 8 bytes of each of its 80
        # requests per step.
        for of_one in zip(*sizes[5:]):
            assert max(of_one) - of_one[0] < 2e6 + 1500 * count, of_one
