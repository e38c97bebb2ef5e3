"""Several processes: the bits are those of one with the whole batch. What the workers run is in
distributed_*.py."""

import types

import distributed_bits
import distributed_groups
import distributed_stores
import mxnet as mx
import numpy as np
import pytest
from distributed_bits import Share
from distributed_cluster import FOUR, STORE, TwoMachines, has_namespaces, needs_horovod, run
from gluon_syncbn.distributed import HorovodReducer, KVStoreReducer, Reducer
from tolerances import assert_same_bits


@pytest.fixture(params=["shared", "two", "four", pytest.param("horovod", marks=needs_horovod)])
def job(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def whole():
    """What one process makes of the whole batch on one device."""
    return distributed_bits.same_bits(Share())


def put_together(parts, name):
    """Statistics are the same everywhere, samples lie one after the other."""
    values = [part[name] for part in parts]
    if "running" not in name:
        return np.concatenate(values)
    for value in values[1:]:
        assert_same_bits(value, values[0], name)
    return values[0]


def check_bits(job, whole, devices):
    parts = job.arrays(f"bits {devices}")
    assert len(parts[0]) >= 42 and set(parts[0]) <= set(whole)
    for name in parts[0]:
        assert_same_bits(put_together(parts, name), whole[name], name)


@pytest.mark.parametrize("devices", [1, 2])
def test_bits_are_those_of_one_process(job, whole, devices):
    check_bits(job, whole, devices)


def test_every_bit_of_a_double_arrives(job):
    """Where float64 went through the server as it is, it would come back as float32."""
    rows = distributed_stores.rows(job.workers)
    for found in job.arrays("sums"):
        assert_same_bits(found["everyone"], rows)
        assert found["unchanged"]


def test_sums_are_added_with_their_errors(job):
    rows = distributed_stores.rows(job.workers).astype(np.longdouble)
    with np.errstate(all="ignore"):
        expected = rows.sum(axis=0).astype(np.float64)
    # NaN, where all processes have infinities of both signs or NaN.
    for found in job.arrays("sums"):
        total = found["total"].reshape(-1)
        assert found["total"].shape == (1, rows.shape[1])
        np.testing.assert_array_equal(np.isnan(total), np.isnan(expected))
        if job.workers == 4:
            assert total[0] == 2 and total[1] == 1 + 2**-52
        else:
            np.testing.assert_array_equal(total, expected)
        assert_same_bits(total, job.arrays("sums")[0]["total"].reshape(-1))


def test_arrays_that_cannot_be_added(pair):
    for reported in pair.reported("wrong arrays"):
        for name, words in {
            "metric": "all_reduce got 'accuracy': give numbers that float64 holds exactly",
            "large": "all_gather got 9007199254740993: give numbers that float64 holds exactly",
            "other size": "all_reduce got 3 numbers for the key 'list', after 2 before",
        }.items():
            kind, text, _ = reported[name]
            assert kind == "ValueError" and text.startswith(words)
        assert reported["sum"] == [0, 2, 4]
        for name, sizes in {"other sizes": "3 4", "one is empty": "0 1"}.items():
            kind, text, _ = reported[name]
            assert kind == "RuntimeError"
            assert f'different amounts of numbers to "{name}", by rank: {sizes}. Bring' in text
        for name in ("long key", "NUL", "half a character", "number"):
            kind, text, _ = reported[name]
            assert kind == "ValueError" and "printable characters, at most 40 bytes" in text


def test_sums_of_what_users_have(pair):
    for found in pair.arrays("sums of what users have"):
        expected = {"loss": [[1, 1]], "list": [2, 4], "number": 1, "count": 2**54 - 2}
        expected["gathered"] = [[[0.5, 0]], [[0.5, 1]]]
        for name, value in expected.items():
            assert_same_bits(found[name], np.array(value, np.float64), name)


ALONE = Reducer(0, 1, 60.0)
DTYPES = ["float16", "float64", "uint8", "int64"]
HALVES = np.array([[1.5, 0], [0, -3]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (2, 0), (2, 1, 2)])
def test_arrays_of_numpy_and_mxnet(dtype, shape):
    values = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    with mx.util.np_shape(True):
        given = [values, mx.np.array(values, dtype=dtype), mx.nd.array(values, dtype=dtype)]
        for each in given:
            expected = values.astype(np.float64)
            assert_same_bits(ALONE.all_reduce(f"sum {shape}", each), expected)
            assert_same_bits(ALONE.all_gather(f"all {shape}", each), expected[None])


@pytest.mark.parametrize(
    "given, expected",
    [
        (mx.nd.array(HALVES).tostype("csr"), HALVES),
        (mx.nd.array(HALVES).astype(np.dtype([("bfloat16", np.uint16)])), HALVES),
        (np.arange(12).reshape(3, 4)[::2, ::-1].T, np.arange(12.0).reshape(3, 4)[::2, ::-1].T),
        (np.longdouble([0.5, np.nan, np.inf]), [0.5, np.nan, np.inf]),
        (0.1, 0.1),
        (np.float32(0.1), np.float64(np.float32(0.1))),
        (np.uint64(2**63), 2.0**63),
        (
            [2**62, True, np.float16(3), np.array(4), mx.nd.array([5])[0].asscalar()],
            [2.0**62, 1, 3, 4, 5],
        ),
        (((1, 2**53), [0.5, -1]), [[1, 2.0**53], [0.5, -1]]),
        ([mx.nd.ones(2), np.zeros(2), [3, 4]], [[1, 1], [0, 0], [3, 4]]),
        ([], []),
    ],
    ids=range(11),
)
def test_what_else_users_have(given, expected):
    assert_same_bits(
        ALONE.all_reduce(str(np.shape(expected)), given), np.array(expected, "float64")
    )


@pytest.mark.parametrize(
    "given, what",
    [
        (2**53 + 1, "9007199254740993"),
        (np.array([1, 2**63 + 1], np.uint64), "9223372036854775809"),
        (mx.nd.array([2**62 + 1], dtype="int64"), "4611686018427387905"),
        ([0.5, 2**53 + 1], "9007199254740993"),
        (1 + np.finfo(np.longdouble).eps, r".*000001"),
        (np.ones(2, complex), "array"),
        (("accuracy", 0.5), "'accuracy'"),
        (None, "None"),
        ([np.ones(2), np.ones(3)], r"a list of arrays of shapes \(2,\), \(3,\)"),
        (mx.gluon.nn.Dense(1), "Dense"),
    ],
    ids=range(10),
)
def test_what_cannot_be_added(given, what):
    with pytest.raises(ValueError, match=f"^all_reduce got {what}.*: give "):
        ALONE.all_reduce("refused", given)


def test_one_process_checks_what_several_do():
    for options, words in [
        ({"key": 3}, "all_reduce got the key 3: give a str"),
        ({"array": np.ones(2)}, "all_reduce got 2 numbers for the key 'of three', after 3 before"),
        ({"timeout": -1}, "timeout is -1: give a number of seconds"),
    ]:
        ALONE.all_reduce("of three", np.ones(3))
        with pytest.raises(ValueError, match=words):
            ALONE.all_reduce(**{"key": "of three", "array": np.ones(3), **options})


def test_keys_may_come_in_other_orders(pair):
    assert pair.reported("keys in other orders") == [0, 0]


# Groups.


def check_groups(cluster):
    """The same comes out of a layer for each group that is a net of its own, on one device."""
    for devices, sizes in {4: [1, 2, 4], 8: [1, 2, 4, 8]}.items():
        for size in sizes:
            parts = cluster.arrays(f"groups of {size} of {devices}")
            for name, value in distributed_groups.expected(devices, size).items():
                found = np.concatenate([part[name] for part in parts])
                assert_same_bits(found, value, f"groups of {size} of {devices}: {name}")
    for rank, means in enumerate(cluster.reported("moving")):
        assert means == [*[1.5] * 3, *[0.5 + rank // 2 * 2] * 3] * 2


def test_groups_of_processes_that_share_memory(shared_four):
    check_groups(shared_four)
    assert shared_four.reported("memory") == [[True] * 3] * 4


def test_groups_through_the_kvstore(four):
    check_groups(four)
    assert four.reported("memory") == [[False] * 3] * 4
    # Only a group of all has its sums added there, forward and backward.
    for sums in four.reported("sums of groups"):
        assert {name: count for name, count in sums.items() if count} == {"4 of 4": 2, "8 of 8": 2}


@pytest.mark.long
@pytest.mark.skipif(not has_namespaces(), reason="network namespaces need root, ip and unshare")
@pytest.mark.parametrize("engine", ["kvstore", pytest.param("horovod", marks=needs_horovod)])
def test_two_machines_of_two_processes(tmp_path, whole, engine):
    job = run(tmp_path, 4, FOUR, kind=TwoMachines, engine=engine)
    check_bits(job, whole, devices=2)
    check_groups(job)
    assert job.reported("memory") == [[True, True, False]] * 4


@pytest.mark.long
@needs_horovod
def test_groups_are_process_sets_of_horovod(tmp_path):
    topics = ["distributed_groups:sizes_of_groups"]
    dynamic = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", **STORE}
    cluster = run(tmp_path, 4, topics, engine="horovod", **dynamic)
    check_groups(cluster)
    for rank, sets in enumerate(cluster.reported("sets")):
        # Beside the set of all, which is 0.
        assert sets == [[2, 1 + rank // 2]]


# What is no store.


@pytest.mark.parametrize("kind", ["local", "device", "nonsense", "dist_async", None])
def test_other_stores_are_refused(kind):
    is_made = kind in ("local", "device", "nonsense")
    store = mx.kv.create(kind) if is_made else types.SimpleNamespace(type=kind)
    with pytest.raises(ValueError, match=r"give mx\.kv\.create\('dist_sync'\)"):
        KVStoreReducer(store)
    with pytest.raises(TypeError, match="import horovod.mxnet as hvd"):
        HorovodReducer(store)


@needs_horovod
def test_horovod_before_init_is_refused():
    import horovod.mxnet as hvd

    with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
        HorovodReducer(hvd)
