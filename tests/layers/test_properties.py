"""Any layer, on any data, split in any way, compared with the reference and with the whole batch on
one device. (See tests/native/cpu/test_kernels_bits.cc for threads.)"""

from collections import namedtuple

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import reference
from dtypes import DTYPES, numpy_dtype, parameter_dtype, rounded, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mxnet import autograd
from runs import MODES, contexts, prepare, shards
from tolerances import RELATIVE, assert_same_bits

REQUESTS = ["null", "write", "add"]
Case = namedtuple(
    "Case",
    "dtype shape axis sizes requests gamma_request beta_request mode statistics scale center "
    "momentum running_variance epsilon offset spread deferred seed",
)
Outcome = namedtuple("Outcome", "y dx dgamma dbeta running_mean running_var")


@st.composite
def cases(draw):
    rank = draw(st.integers(2, 5))
    # Small sizes, few of them powers of two. Sometimes one is longer than vectors or rows.
    shape = [draw(st.integers(1, 7)) for _ in range(rank)]
    axis = draw(st.sampled_from([1, rank - 1, draw(st.integers(0, rank - 1))]))
    longer = draw(st.sampled_from([None, None, *range(rank)]))
    if longer is not None:
        shape[longer] = draw(st.sampled_from([13, 33, 67, 130] if longer else [9, 11]))
    # The first axis is split over devices, unless it is the channel axis.
    most = 1 if axis == 0 else min(4, shape[0])
    cuts = draw(st.sets(st.integers(1, shape[0] - 1), max_size=most - 1)) if most > 1 else ()
    sizes = np.diff([0, *sorted(cuts), shape[0]]).tolist()
    scale, center = draw(st.booleans()), draw(st.booleans())
    gamma_request = draw(st.sampled_from(REQUESTS)) if scale else "null"
    beta_request = draw(st.sampled_from(REQUESTS)) if center else "null"
    requests = [draw(st.sampled_from(REQUESTS)) for _ in sizes]
    if gamma_request == beta_request == "null":
        # A device without gradients has no backward, for which the others would wait.
        requests = [requests[0] if "null" in requests else request for request in requests]
    dtype = draw(st.sampled_from(DTYPES))
    return Case(
        dtype,
        tuple(shape),
        draw(st.sampled_from([axis, axis - rank])),
        sizes,
        requests,
        gamma_request,
        beta_request,
        draw(st.sampled_from(sorted(MODES))),
        draw(st.sampled_from(["batch", "batch", "inference", "use_global_stats"])),
        scale,
        center,
        draw(st.sampled_from([0.9, 0.0, 1.0, 0.3, None])),
        draw(st.sampled_from(["biased", "unbiased"])),
        draw(st.sampled_from([1e-5, 1e-3, 1.0])),
        draw(st.sampled_from([0.0, 0.0, -3.0, 1e3, 6e4 if dtype == "float16" else 1e5])),
        draw(st.sampled_from([1.0, 1.0, 1e-3, 100.0])),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


def make(case):
    """x, dy, gamma, beta, running mean and variance."""
    generator = np.random.default_rng(case.seed)
    channels = case.shape[case.axis]
    parameters = parameter_dtype(case.dtype)

    def normal(shape, mean, std, dtype):
        return rounded(generator.standard_normal(shape) * std + mean, dtype)

    x = normal(case.shape, case.offset, case.spread, case.dtype)
    gamma = normal((channels,), 1, 0.5, parameters)
    beta = normal((channels,), 0, 2, parameters) if case.center else np.zeros(channels, parameters)
    mean = normal((channels,), case.offset, case.spread, parameters)
    variance = (case.spread * (0.5 + generator.random(channels))).astype(parameters) ** 2
    return x, normal(case.shape, 0.1, 1, case.dtype), gamma, beta, mean, variance


def outcome(case, sizes, requests, x, dy, gamma, beta, mean, variance):
    """The results for the batch, split into `sizes`. Gradients are initialized to ones."""
    devices = contexts(len(sizes))
    layer = sbn.SyncBatchNorm(
        axis=case.axis,
        momentum=case.momentum,
        epsilon=case.epsilon,
        scale=case.scale,
        center=case.center,
        use_global_stats=case.statistics == "use_global_stats",
        running_variance=case.running_variance,
        in_channels=0 if case.deferred else len(gamma),
    )
    if case.scale:
        layer.gamma.grad_req = case.gamma_request
    if case.center:
        layer.beta.grad_req = case.beta_request
    prepare(layer, devices, case.dtype, MODES[case.mode], gamma, beta)
    xs, dys = shards(x, sizes, devices), shards(dy, sizes, devices)
    ones = shards(rounded(np.ones(x.shape), case.dtype), sizes, devices)
    if case.deferred:
        layer(xs[0])
    layer.running_mean.set_data(mx.nd.array(mean, dtype=mean.dtype))
    layer.running_var.set_data(mx.nd.array(variance, dtype=variance.dtype))
    for shard, one, request in zip(xs, ones, requests):
        shard.attach_grad(request)
        if request != "null":
            one.copyto(shard.grad)
    trained = [p for p in (layer.gamma, layer.beta) if p.grad_req != "null"]
    for gradient in (gradient for parameter in trained for gradient in parameter.list_grad()):
        gradient[:] = 1
    with autograd.record(train_mode=case.statistics != "inference"):
        ys = [layer(shard) for shard in xs]
    if trained or "null" not in requests:
        autograd.backward(ys, dys)
    mx.nd.waitall()
    return Outcome(
        np.concatenate([y.asnumpy() for y in ys]),
        [None if r == "null" else shard.grad.asnumpy() for shard, r in zip(xs, requests)],
        *(
            sum(g.asnumpy().astype("float64") for g in p.list_grad()) if p in trained else None
            for p in (layer.gamma, layer.beta)
        ),
        *(
            [array.asnumpy() for array in p.list_data()]
            for p in (layer.running_mean, layer.running_var)
        ),
    )


def check_near(result, expected, size, dtype, what, rounded_before=()):
    """`size`: the magnitude of the terms of the result, to which errors are relative.
    `rounded_before`: intermediate results that were rounded to a 16-bit type."""
    compute = RELATIVE[parameter_dtype(dtype)]
    expected = np.asarray(expected, "float64")
    error = np.abs(values(result).astype("float64") - expected)
    limit = compute * np.asarray(size, "float64")
    if dtype in ("float16", "bfloat16"):
        # The spacing of the smallest numbers of float16 is 2^-24.
        for number in (expected, *rounded_before):
            limit = limit + RELATIVE[dtype] * np.abs(number) + 2.0**-25
    worst = (error - limit).max()
    assert worst <= 0, f"{what}: beyond the limit by {worst:.3g}"


def check_against_reference(case, result, x, dy, gamma, beta, mean, variance):
    # Subtracts the offset, which affects only the mean, so that the reference is exact for values
    # near the mean.
    offset = np.longdouble(case.offset)
    x, dy = values(x).astype(np.longdouble) - offset, values(dy).astype(np.longdouble)
    gamma = gamma if case.scale else np.ones_like(gamma)
    given_ones = case.statistics != "batch"
    constants = {"mean": mean - offset, "variance": variance} if given_ones else {}
    common = {"epsilon": case.epsilon, "axis": case.axis, **constants}
    forward = reference.forward(x, gamma, beta, **common)
    backward = reference.backward(dy, x, gamma, **common)

    def spread_out(vector):
        return np.asarray(vector).reshape(
            [-1 if i == case.axis % x.ndim else 1 for i in range(x.ndim)]
        )

    others = tuple(i for i in range(x.ndim) if i != case.axis % x.ndim)
    inv_std = 1 / np.sqrt(forward.variance + np.longdouble(case.epsilon))
    scale = np.abs(spread_out(gamma * inv_std))
    # Errors of the mean also affect values that are equal to it.
    spread = np.sqrt(np.asarray(forward.variance)) + np.abs(x).max() * 1e-6
    distance = np.abs(x - spread_out(forward.mean)) + spread_out(spread)
    size = distance * scale + np.abs(spread_out(beta))
    check_near(result.y, forward.y, size, case.dtype, "y")

    slope = np.abs(dy * distance).mean(axis=others, keepdims=True) * spread_out(inv_std) ** 2
    dy_mean = np.abs(dy).mean(axis=others, keepdims=True)
    size = scale * (np.abs(dy) + (0 if given_ones else dy_mean + distance * slope)) + 1
    start = 0
    for gradient, request, count in zip(result.dx, case.requests, case.sizes):
        part, start = slice(start, start + count), start + count
        if request != "null":
            already = request == "add"
            dx = backward.dx[part]
            # On the CPU the layout copy adds the rounded gradient. MXNet truncates bfloat16 instead
            # of rounding it, which doubles the error.
            steps = (dx, dx + 1) if case.dtype == "bfloat16" else (dx,)
            before = steps if already else ()
            check_near(gradient, dx + already, size[part], case.dtype, "dx", before)

    parameters = parameter_dtype(case.dtype)
    terms = np.abs(dy * distance * spread_out(inv_std)).sum(axis=others)
    checks = [
        ("dgamma", result.dgamma, backward.dgamma, terms, case.gamma_request),
        ("dbeta", result.dbeta, backward.dbeta, np.abs(dy).sum(axis=others), case.beta_request),
    ]
    for name, gradient, expected, size, request in checks:
        if gradient is not None:
            already = len(case.sizes) if request == "add" else 0
            check_near(gradient, expected + already, size + already, parameters, name)

    count = x.size // len(gamma)
    unbiased = case.running_variance == "unbiased" and count > 1
    batch_variance = forward.variance * (count / np.longdouble(count - 1) if unbiased else 1)
    # This is the first batch.
    momentum = case.momentum or 0
    for name, running, before, batch, lost in (
        ("running_mean", result.running_mean, mean, forward.mean + offset, spread),
        ("running_var", result.running_var, variance, batch_variance, 0),
    ):
        expected = before if given_ones else momentum * before + (1 - momentum) * batch
        for values_on_device in running:
            size = np.abs(expected) + np.abs(before) * momentum + lost
            check_near(values_on_device, expected, size, parameters, name)
            assert_same_bits(values_on_device, running[0], name)


COMMON = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@settings(COMMON, max_examples=400)
@given(cases())
def test_any_layer_on_any_data(case):
    arrays = make(case)
    result = outcome(case, case.sizes, case.requests, *arrays)
    assert result.y.dtype == numpy_dtype(case.dtype) and result.y.shape == case.shape
    check_against_reference(case, result, *arrays)
    whole = outcome(case, [sum(case.sizes)], ["write"], *arrays)
    assert_same_bits(result.y, whole.y, "y")
    assert_same_bits(result.running_mean[0], whole.running_mean[0], "running_mean")
    assert_same_bits(result.running_var[0], whole.running_var[0], "running_var")
    start = 0
    for gradient, request, count in zip(result.dx, case.requests, case.sizes):
        if request == "write":
            assert_same_bits(gradient, whole.dx[0][start : start + count], "dx")
        start += count
