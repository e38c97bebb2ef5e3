"""Devices that do not synchronize as they should: an informative error, and training goes on."""

import copy
import gc
import logging
import pickle
import time

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
import reference
from gluon_syncbn import native
from devices import KIND, context
from mxnet import autograd
from mxnet.gluon import nn
from runs import MODES, contexts, hybridize
from tolerances import assert_close

SHAPE = (2, 3, 8, 8)
# Also of the steps that must not fail, on a busy machine.
TIMEOUT = 2.0


def build(mode="imperative", devices=2, **arguments):
    """Two convolutions, each followed by a layer."""
    arguments.setdefault("group", sbn.SyncGroup(timeout=TIMEOUT))
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), sbn.SyncBatchNorm(**arguments), nn.Activation("relu"))
        net.add(nn.Conv2D(4, 3), sbn.SyncBatchNorm(**arguments))
    net.initialize(ctx=contexts(devices))
    hybridize(net, mode)
    return net


def batch(devices=2, seed=0):
    generator = np.random.default_rng(seed)
    return [
        mx.nd.array(generator.standard_normal(SHAPE), ctx=device) for device in contexts(devices)
    ]


def train(net, xs, backward=None):
    """Returns the losses. `backward`: the number of devices that run backward."""
    with autograd.record():
        losses = [net(x).square().mean() for x in xs]
    for loss in losses[:backward]:
        loss.backward()
    return losses


def fetch(arrays):
    return [float(array.asscalar()) for array in arrays]


def fails(call, *words, within=10.0):
    """Checks that the call raises an MXNetError with all these words, in time."""
    begin = time.time()
    with pytest.raises(mx.MXNetError) as error:
        call()
    assert time.time() - begin < within
    # Behind what MXNet puts before an error of ours.
    text = str(error.value).rpartition("MXNetError: ")[2]
    assert len(text.splitlines()) <= 6, text
    for word in words:
        assert word in text, f"{word!r} is missing in: {text}"


def clear():
    """Drops further errors of a step whose first error was raised."""
    for _ in range(3):
        try:
            mx.nd.waitall()
            return
        except mx.MXNetError:
            pass


def check_recovers(net, devices=2):
    """Checks that the net can still train and that the first layer's statistics are right."""
    clear()
    for seed in range(3):
        losses = fetch(train(net, batch(devices, seed)))
        assert np.isfinite(losses).all()
    conv, norm = net[0], net[1]
    before = norm.running_mean.data(context(0)).asnumpy()
    xs = batch(devices, 7)
    with autograd.train_mode():
        hidden = np.concatenate([conv(x).asnumpy() for x in xs])
        for x in xs:
            net(x)
    mean = reference.forward(hidden, np.ones(4), np.zeros(4)).mean
    for device in contexts(devices):
        after = norm.running_mean.data(device).asnumpy()
        assert_close(after, 0.9 * before + 0.1 * mean, "float32")


@pytest.fixture(autouse=True)
def leave_no_error():
    yield
    clear()


def prepared(mode="imperative", **arguments):
    net = build(mode, **arguments)
    fetch(train(net, batch()))
    mx.nd.waitall()
    return net


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_device_forward(mode):
    net = prepared(mode)
    begin = time.time()
    fails(
        lambda: fetch(train(net, batch()[:1], backward=0)),
        "net_syncbatchnorm0",
        "forward call 1",
        f"Arrived: {KIND}(0). Missing: {KIND}(1).",
        "has waited ",
        f"- the loop over the devices left out {KIND}(1)",
        "an exception)",
    )
    assert time.time() - begin >= TIMEOUT
    check_recovers(net)


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_device_backward(mode):
    net = prepared(mode)

    def step():
        train(net, batch(), backward=1)
        net[0].weight.grad(context(0)).wait_to_read()

    fails(
        step,
        "net_syncbatchnorm1",
        "backward call 1",
        f"Missing: {KIND}(1)",
        f"autograd.backward was not called for the loss of {KIND}(1)",
    )
    check_recovers(net)


def test_losses_that_are_summed_on_one_device():
    """MXNet fuses the operations of one device."""
    net = prepared()

    def step():
        with autograd.record():
            losses = [net(x).as_in_context(context(0)).square().mean() for x in batch()]
            total = mx.nd.add_n(*losses)
        total.backward()
        mx.nd.waitall()

    fails(step, f"Missing: {KIND}(1)", "the losses of several devices were added up", "the list")
    check_recovers(net)


def test_a_warning_comes_first(caplog):
    net = prepared()
    # On a busy machine the first step may warn too. Warnings have a thread of their own.
    native.threads.wait_for_warnings(10)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="gluon_syncbn"):
        fails(lambda: fetch(train(net, batch()[:1], backward=0)), "Missing")
        native.threads.wait_for_warnings(10)
    [text] = [record.getMessage() for record in caplog.records]
    missing = f"Arrived: {KIND}(0). Missing: {KIND}(1)."
    for word in ("net_syncbatchnorm0", missing, f"After {TIMEOUT:g} s this is an error"):
        assert word in text


def test_the_timeout_from_the_environment(monkeypatch):
    monkeypatch.setenv("GLUON_SYNCBN_TIMEOUT", "2")
    net = prepared(group=None)
    begin = time.time()
    fails(lambda: fetch(train(net, batch()[:1], backward=0)), "has waited ", within=5)
    assert time.time() - begin >= 2


@pytest.mark.parametrize(
    "num_devices, named, which", [(2, None, [1, 2]), (None, contexts(2), [0, 1])]
)
def test_fewer_devices_than_contexts(num_devices, named, which):
    group = sbn.SyncGroup(devices=named, timeout=TIMEOUT)
    net, xs = build(devices=3, num_devices=num_devices, group=group), batch(3)
    for _ in range(3):
        assert np.isfinite(fetch(train(net, [xs[i] for i in which]))).all()


@pytest.mark.parametrize(
    "count, num_devices, named, which, words",
    [
        (2, 3, None, [0, 1], ["num_devices=3", f"2 ({KIND}(0), {KIND}(1))"]),
        # Otherwise the pairs would depend on the order of arrival.
        (3, 2, None, [0, 1, 2], ["num_devices=2", "arrived after as many others", "SyncGroup"]),
        (
            3,
            None,
            contexts(2),
            [0, 2],
            [f"was called on {KIND}(2)", f"its devices are 2 ({KIND}(0), {KIND}(1))"],
        ),
        (
            1,
            None,
            contexts(2),
            [0],
            [f"a SyncGroup of {KIND}(0), {KIND}(1)", f"no parameters on {KIND}(1)"],
        ),
    ],
)
def test_other_devices_than_expected_fail_at_once(count, num_devices, named, which, words):
    group = sbn.SyncGroup(devices=named, timeout=20)
    net, xs = build(devices=count, num_devices=num_devices, group=group), batch(count)
    fails(lambda: fetch(train(net, [xs[i] for i in which], backward=0)), *words, within=5)


def test_moving_to_other_contexts():
    """The participants are the current devices of the parameters, also in a graph traced before."""
    net = prepared("static_alloc")
    for count in (1, 3, 2):
        net.collect_params().reset_ctx(contexts(count))
        assert native._layer._layers[net[1]._layer.id].devices == tuple(map(str, contexts(count)))
        check_recovers(net, count)


def test_the_graph_of_another_process_does_not_train(tmp_path):
    """On two devices, of which each has an error."""
    net = prepared("hybrid")
    net.export(str(tmp_path / "net"))
    symbol = (tmp_path / "net-symbol.json").read_text().replace(native.PROCESS, "another")
    (tmp_path / "net-symbol.json").write_text(symbol)
    loaded = mx.gluon.SymbolBlock.imports(
        str(tmp_path / "net-symbol.json"),
        ["data"],
        str(tmp_path / "net-0000.params"),
        ctx=contexts(2),
    )
    xs = batch()
    np.testing.assert_array_equal(loaded(xs[0]).asnumpy(), net(xs[0]).asnumpy())
    words = "does not exist in this process", "convert_sync_batchnorm", "load its parameters"
    fails(lambda: fetch(train(loaded, xs)), *words)
    sbn.convert_sync_batchnorm(loaded)
    assert np.isfinite(fetch(train(loaded, xs))).all()


def test_an_output_that_one_device_does_not_use():
    """It has gone there, so there is no backward of it, and no other device waits for one."""
    trunk = nn.Dense(3, in_units=2)
    heads = [sbn.SyncBatchNorm(in_channels=3, group=sbn.SyncGroup(timeout=60)) for _ in range(2)]
    for block in (trunk, *heads):
        block.initialize(ctx=contexts(2))
    xs = [mx.nd.random.normal(shape=(4, 2), ctx=device) for device in contexts(2)]

    def step(weight):
        losses = []
        with autograd.record():
            for number, x in enumerate(xs):
                a, b = (head(trunk(x)) ** 3 for head in heads)
                losses.append(a.sum() + b.sum() if number else a.sum())
                if weight is not None:
                    losses[-1] = losses[-1] + weight * b.sum()
        autograd.backward(losses)
        mx.nd.waitall()

    words = f"'{heads[1].name}', backward call 0", f"Missing: {KIND}(0)", "times 0 where it"
    fails(lambda: step(None), *words)
    clear()
    step(0)


def loaded(net, folder, process=native.PROCESS):
    """A net from a file, as written by this or another process."""
    net.save(str(folder / "net"))
    file = folder / "net-model.json"
    file.write_text(file.read_text().replace(native.PROCESS, process))
    other = build("hybrid")
    other.load(str(folder / "net"))
    return other


WAYS_TO_COPY = {
    "file": loaded,
    "file of another process": lambda net, folder: loaded(net, folder, "another"),
    "deepcopy": lambda net, _: copy.deepcopy(net),
    "pickle": lambda net, _: pickle.loads(pickle.dumps(net)),
}


@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_a_graph_that_came_with_a_copy_is_traced_again(way, tmp_path):
    net = prepared()
    # MXNet cannot copy what has run in a graph.
    hybridize(net, "hybrid")
    net.infer_shape(batch()[0])
    other = WAYS_TO_COPY[way](net, tmp_path)
    other.collect_params().reset_ctx(contexts(2))
    assert np.isfinite(fetch(train(other, batch()))).all()
    used = {attrs.get("layer") for attrs in other._cached_graph[1].attr_dict().values()} - {None}
    assert used == {str(other[i]._layer.id) for i in (1, 4)}


def graph_of(net, **params):
    data = mx.sym.var("data")
    return mx.gluon.SymbolBlock(net(data), data, **params)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_devices", [None, 2])
def test_a_graph_that_outlives_its_net(num_devices, mode):
    """As in gluoncv's SSD, which keeps the graph and the parameters of a net but not the net. It
    fails and recovers as the net would."""
    net = build(num_devices=num_devices)
    xs, graph = batch(), graph_of(net, params=net.collect_params())
    del net
    gc.collect()
    graph.initialize(mx.init.Xavier(), ctx=contexts(2), force_reinit=True)
    hybridize(graph, mode)
    before = fetch(train(graph, xs))
    fails(lambda: fetch(train(graph, xs[:1])), f"Arrived: {KIND}(0). Missing: {KIND}(1).")
    clear()
    assert fetch(train(graph, xs)) == before


@pytest.mark.parametrize(
    "arguments, count, words",
    [
        ({}, 1, None),
        ({"num_devices": 2}, 2, None),
        ({}, 2, "parameters of its own"),
        ({"num_devices": 2}, 3, "after as many others"),
        ({"num_devices": 4, "group": sbn.SyncGroup(group_size=2)}, 4, "name the devices"),
    ],
)
def test_a_graph_with_parameters_of_its_own(arguments, count, words):
    """The layer knows neither these parameters nor their devices."""
    net = graph_of(sbn.SyncBatchNorm(in_channels=3, **arguments))
    net.initialize(ctx=contexts(count))
    if words:
        fails(lambda: [train(net, batch(count)), mx.nd.waitall()], words)
        clear()
        sbn.convert_sync_batchnorm(net)
    fetch(train(net, batch(count)))


@pytest.mark.parametrize("mode", MODES)
def test_the_next_call_in_training_raises_the_error(mode):
    """Before anything is read. Calls in inference go on."""
    net, xs = prepared(mode), batch()
    fetch(train(net, xs))
    native.library.library.gluon_syncbn_fail(b"some reason")
    net(xs[0])
    with pytest.raises(mx.MXNetError, match="some reason"), autograd.record():
        net(xs[0])
    fetch(train(net, xs))


def test_an_error_in_inference_ends_no_step():
    """Such as a graph that was traced for GPUs, or no memory. Of another layer, as MXNet skips what
    reads the running statistics of the operator."""
    group = sbn.SyncGroup(timeout=20)
    layer, other = (sbn.SyncBatchNorm(in_channels=3, group=group) for _ in range(2))
    other._layer.contexts = lambda: [mx.gpu(0)]
    graph = other(mx.sym.var("data"))
    del other._layer.contexts
    for each in (layer, other):
        each.initialize(ctx=contexts(2))
    for_gpus = mx.gluon.SymbolBlock(graph, mx.sym.var("data"), params=other.collect_params())
    x = np.random.default_rng(1).standard_normal((8, 3)).astype("float32")
    xs = [mx.nd.array(part, ctx=device) for part, device in zip(x.reshape(2, 4, 3), contexts(2))]
    with autograd.record():
        ys = [layer(xs[0])]
        with autograd.pause():
            fails(for_gpus(xs[1]).wait_to_read, "traced for GPUs")
        ys.append(layer(xs[1]))
        losses = [y.square().sum() for y in ys]
    autograd.backward(losses)
    mx.nd.waitall()
    y = np.concatenate([y.asnumpy() for y in ys])
    assert_close(y, reference.forward(x, np.ones(3), np.zeros(3)).y, "float32")
