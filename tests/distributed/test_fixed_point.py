"""The whole numbers in which sums travel, compared with exact rational arithmetic."""

import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from gluon_syncbn.groups.store import UserStore
from gluon_syncbn.native import KVSTORE_BITS, packed_size

FLOAT64_BITS = 53
# By the bits of the store: how many bits of a sum are looked at, and travel at least.
BITS = {KVSTORE_BITS: np.float32, FLOAT64_BITS: np.float64}
each_store = pytest.mark.parametrize("exact_bits", BITS)


class Member:
    """A store of one process, which adds what all bring in a random order."""

    def __init__(self, processes, rank):
        self.processes, self.rank, self.size = processes, rank, processes.count
        self.exact_bits = processes.exact_bits

    def all_reduce(self, key, array):
        self.processes.has_sums = key.endswith(" sums")
        self.processes.brought[self.rank] = array
        self.processes.met.wait()
        return self.processes.total


class Processes:
    """Threads that exchange messages of one kind, each through a store of its own."""

    def __init__(self, count, channels, exact_bits, seed=0):
        self.count, self.sums = count, 2 * channels
        self.size = 2 + 3 * self.sums
        self.exact_bits = exact_bits
        self.random = np.random.default_rng(seed)
        self.brought, self.total = [None] * count, None
        self.met = threading.Barrier(count, self.add, timeout=60)
        self.stores = [UserStore(Member(self, rank), 60) for rank in range(count)]
        self.routes = [
            store.route("key", self.size, "title", 60, sums=True) for store in self.stores
        ]

    def exchange(self, parts, calls=None, counts=None):
        """The message of sums that all get, or None where all got the values of each. parts: of
        shape (processes, sums, 3), the doubles of each Sum3."""
        messages = np.zeros((self.count, self.size))
        messages[:, 0] = 0 if calls is None else calls
        messages[:, 1] = 1 if counts is None else counts
        messages[:, 2:] = np.reshape(parts, (self.count, -1))
        with ThreadPoolExecutor(self.count) as executor:
            exchanges = [
                executor.submit(route.exchange, "title", 60, message)
                for route, message in zip(self.routes, messages)
            ]
        found = [exchange.result() for exchange in exchanges]
        for rows in found[1:]:
            np.testing.assert_array_equal(rows.view(np.int64), found[0].view(np.int64))
        if self.has_sums:
            return found[0][0]
        np.testing.assert_array_equal(found[0], messages)
        return None

    def add(self):
        kind = BITS[self.exact_bits] if self.has_sums else np.float64
        self.total = np.zeros(self.brought[0].shape, kind)
        for rank in self.random.permutation(self.count):
            part = self.brought[rank].astype(kind)
            np.testing.assert_array_equal(part, self.brought[rank])
            if self.has_sums:
                # The store adds exactly only below this, also if all others send as much.
                assert np.abs(part).max() * self.count <= 2**self.exact_bits
            self.total += part
        self.total = self.total.astype(np.float64)


def as_sums(values):
    """Sum3 of exact values: what is left goes into the next double."""
    values = np.asarray(values, object)
    sums = np.zeros((*values.shape, 3))
    for index in np.ndindex(values.shape):
        rest = Fraction(values[index])
        for part in range(3):
            sums[(*index, part)] = float(rest)
            rest -= Fraction(sums[(*index, part)])
    return sums


def exact(parts):
    """The sums over the processes, as fractions."""
    return [sum(map(Fraction, column.ravel())) for column in np.swapaxes(parts, 0, 1)]


def high_and_low(value):
    """The nearest double, and the one nearest to the rest: what the layer reads off a sum."""
    high = float(value)
    return high, float(value - Fraction(high))


def check(message, parts):
    found = message[2:].reshape(-1, 3)
    for sum3, expected in zip(found, exact(parts)):
        assert high_and_low(sum(map(Fraction, sum3))) == high_and_low(expected)


def random_parts(random, shape, exponents, bits=159):
    """Values of so many bits, of magnitudes 2**exponents."""
    values = np.empty(shape, object)
    for index in np.ndindex(shape):
        mantissa = int.from_bytes(random.bytes(20), "little") >> (160 - bits)
        exponent = int(np.broadcast_to(exponents, shape)[index])
        values[index] = Fraction(mantissa - 2 ** (bits - 1)) * Fraction(2) ** (exponent - bits + 1)
    return as_sums(values)


@each_store
@pytest.mark.parametrize(
    "count", [1, 2, 3, 8, 255, 256, 257, pytest.param(1000, marks=pytest.mark.long)]
)
def test_sums_are_those_of_rational_numbers(exact_bits, count):
    channels = 3 if count > 8 else 20
    processes = Processes(count, channels, exact_bits)
    random = np.random.default_rng(count)
    scales = random.integers(-300, 300, 2 * channels)
    assert processes.exchange(random_parts(random, (count, 2 * channels), scales)) is None
    for _ in range(3 if count > 8 else 30):
        # The windows follow. Each process has its own part, some far smaller.
        scales += random.integers(-14, 15, 2 * channels)
        smaller = random.integers(0, 60, (count, 2 * channels))
        smaller[random.integers(count)] = 0
        parts = random_parts(random, (count, 2 * channels), scales - smaller)
        message = processes.exchange(parts)
        assert message is not None and message[1] == count
        check(message, parts)


@each_store
def test_sums_of_few_bits_may_become_small_or_vanish(exact_bits):
    """No bit of them is dropped, so nothing has to be asked. Before its first other value, a zero
    needs no window."""
    zero, few = as_sums([[0.0, 0.0]] * 2), as_sums([[1.5, 2.5], [3.25, 1.0]])
    small = as_sums([[1.5, 2.5], [-1.5, 2.0**-100]])
    processes = Processes(2, 1, exact_bits)
    for parts, are_found in [
        (zero, False),
        (zero, True),
        (few, False),
        *((parts, True) for parts in (few, small, zero, few, zero)),
    ]:
        message = processes.exchange(parts)
        assert (message is not None) == are_found
        if are_found:
            check(message, parts)


@each_store
@pytest.mark.parametrize("jump", [40, 950, -60, -950])
def test_jumps_are_noticed_by_all(exact_bits, jump):
    processes = Processes(3, 8, exact_bits)
    random = np.random.default_rng(0)
    processes.exchange(random_parts(random, (3, 16), 0))
    parts = random_parts(random, (3, 16), 0)
    # In one sum alone, but of all processes.
    parts[:, 5] = random_parts(random, (3,), jump)
    assert processes.exchange(parts) is None
    if abs(jump) < 900:
        check(processes.exchange(parts), parts)
    else:
        assert processes.exchange(parts) is None


@each_store
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e300, 5e-324])
def test_values_without_a_window(exact_bits, value):
    """And the next step is as good as any."""
    processes = Processes(2, 2, exact_bits)
    parts = random_parts(np.random.default_rng(0), (2, 4), 3)
    processes.exchange(parts)
    other = parts.copy()
    other[1, 2] = value, 0, 0
    if value != 5e-324:
        assert processes.exchange(other) is None
    check(processes.exchange(parts), parts)


@each_store
@pytest.mark.parametrize("calls", [(5, 6), (6, 5), (4, 4), (0, 10**9), (-3, 3), (10**9, 10**9)])
def test_the_calls_of_all_are_compared(exact_bits, calls):
    processes = Processes(2, 1, exact_bits)
    parts = random_parts(np.random.default_rng(0), (2, 2), 0)
    processes.exchange(parts, calls=5)
    message = processes.exchange(parts, calls=calls)
    if calls == (4, 4):
        assert message[0] == 4
        assert processes.exchange(parts, calls=6)[0] == 6
    else:
        # From a step too long on, all follow the first process.
        assert message is None
        follows = processes.exchange(parts, calls=calls[0])
        assert follows[0] == calls[0]


@each_store
def test_counts_are_exact(exact_bits):
    processes = Processes(3, 1, exact_bits)
    parts = random_parts(np.random.default_rng(0), (3, 2), 0)
    processes.exchange(parts)
    for counts in ([1, 2, 3], [2**40 + 1, 2**51 - 1, 0], [0, 0, 0]):
        assert processes.exchange(parts, counts=counts)[1] == sum(counts)
    assert processes.exchange(parts, counts=[-1, 0, 0]) is None


@pytest.mark.parametrize("exact_bits, most", [(KVSTORE_BITS, 100), (FLOAT64_BITS, 90)])
def test_the_size_does_not_depend_on_the_number_of_processes(exact_bits, most):
    channels = 2048
    sizes = {packed_size(2 + 6 * channels, count, exact_bits) for count in (2, 4, 64, 256)}
    (size,) = sizes
    assert size * BITS[exact_bits]().itemsize <= most * channels
    # Limbs for more processes are narrower. For far too many there are none.
    assert size <= packed_size(2 + 6 * channels, 2000, exact_bits) < 2 * size
    assert packed_size(2 + 6 * channels, 10**6, KVSTORE_BITS) == 0
    assert packed_size(2 + 6 * channels, 2, 12) == 0
