"""convert_sync_batchnorm(net, fuse=True): graphs with fewer nodes and the same bits."""

import copy
import json
import pickle
import re

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn import convert_sync_batchnorm, revert_sync_batchnorm
from gluon_syncbn.graph.fusion import fuse
from gluon_syncbn.graph.symbols import Graph
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, SymbolBlock, nn
from mxnets import needs_mxnet
from runs import contexts, numpy_arrays, shards
from tolerances import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation")


class Net(HybridBlock):
    """body(F, x, ours, other, convolution) on the output of a convolution."""

    def __init__(self, body, **arguments):
        super().__init__(**arguments)
        self.body = body
        with self.name_scope():
            self.input = nn.Conv2D(4, 3, padding=1, in_channels=3)
            self.ours = nn.BatchNorm(in_channels=4)
            self.other = nn.BatchNorm(in_channels=4)
            self.convolution = nn.Conv2D(4, 3, padding=1, in_channels=4)

    def hybrid_forward(self, F, x):
        return self.body(F, self.input(x), self.ours, self.other, self.convolution)


def relu(F, x):
    return F.Activation(x, act_type="relu")


def _shortcuts(F, x, ours, other, conv):
    x = F.relu(ours(conv(x)) + x)
    return F.relu(x + other(conv(x)))


def _two_consumers(F, x, ours, other, conv):
    y = ours(x)
    return conv(F.relu(y)) + y


def _sum_used_twice(F, x, ours, other, conv):
    y = ours(conv(x)) + x
    return conv(F.relu(y)) + y


# {what: (body, what is fused, why the others are not)}
OUTPUT = "it is an output of the graph"
BODIES = {
    "Activation": (lambda F, x, ours, other, conv: conv(relu(F, ours(x))), ["relu"], []),
    "leaky": (lambda F, x, ours, other, conv: F.LeakyReLU(ours(x)), ["leaky_relu"], []),
    "shortcuts": (_shortcuts, ["residual + relu"] * 2, []),
    "leaky shortcut": (
        lambda F, x, ours, other, conv: F.LeakyReLU(ours(x) + conv(x), slope=0.1),
        ["residual + leaky_relu"],
        [],
    ),
    "addition alone": (lambda F, x, ours, other, conv: conv(x) + ours(x), ["residual"], []),
    "both operands": (
        lambda F, x, ours, other, conv: relu(F, ours(conv(x)) + other(x)),
        ["residual + relu"],
        ["its output is the residual of another"],
    ),
    "in a row": (lambda F, x, ours, other, conv: other(F.relu(ours(x))), ["relu"], [OUTPUT]),
    "a sum used twice": (_sum_used_twice, ["residual"], []),
    "two consumers": (_two_consumers, [], ["its output has 2 consumers"]),
    "added to itself": (
        lambda F, x, ours, other, conv: sum([ours(x)] * 2),
        [],
        ["its output has 2 consumers"],
    ),
    "several outputs": (
        lambda F, x, ours, other, conv: [F.relu(ours(x)), other(x), x],
        ["relu"],
        [OUTPUT],
    ),
    "another activation": (
        lambda F, x, ours, other, conv: F.Activation(ours(x), act_type="tanh"),
        [],
        ["it is followed by Activation"],
    ),
    "negative slope": (
        lambda F, x, ours, other, conv: F.LeakyReLU(ours(x), slope=-0.1),
        [],
        ["it is followed by LeakyReLU"],
    ),
    "broadcasting": (
        lambda F, x, ours, other, conv: F.broadcast_add(ours(x), x),
        [],
        ["it is followed by broadcast_add"],
    ),
}


def images(count=5):
    return np.random.default_rng(count).standard_normal((count, 3, 6, 7)).astype("float32")


def filled(net, devices):
    """Random values show where a layer is swapped or a gradient missing."""
    net.initialize(ctx=devices)
    with autograd.pause():
        net(mx.nd.array(images(1), ctx=devices[0]))
    rng = np.random.default_rng(0)
    for name, parameter in net.collect_params().items():
        low = 0.5 if name.endswith("var") else -1
        parameter.set_data(mx.nd.array(rng.uniform(low, 1, parameter.shape)))
    return net


def outcome(net, sizes=(2, 3), steps=2):
    """{what: array} of a training and of inference afterwards."""
    devices = contexts(len(sizes))
    xs = shards(images(), sizes, devices)
    for x in xs:
        x.attach_grad()
    parameters = net.collect_params()
    trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1}, kvstore="device")
    for _ in range(steps):
        with autograd.record():
            losses = [sum((y**2).mean() for y in listed(net(x))) for x in xs]
        autograd.backward(losses)
        result = {f"gradient on {x.context}": x.grad.asnumpy() for x in xs}
        for name, parameter in parameters.items():
            if parameter.grad_req != "null":
                result[f"gradient of {name}"] = parameter.grad(devices[-1]).asnumpy()
        trainer.step(1, ignore_stale_grad=True)
    mx.nd.waitall()
    result.update({name: p.data(devices[-1]).asnumpy() for name, p in parameters.items()})
    for number, y in enumerate(listed(net(xs[0]))):
        result[f"output {number}"] = y.asnumpy()
    return result


def listed(outputs):
    return outputs if isinstance(outputs, (list, tuple)) else [outputs]


def assert_equal(result, expected):
    assert result.keys() == expected.keys()
    for what, value in expected.items():
        np.testing.assert_array_equal(result[what], value, what)


def nodes(net):
    """[(operator, residual, activation)] of the nodes in the compiled graph that compute."""
    graph = json.loads(net._cached_graph[1].tojson())
    attributes = [(node["op"], node.get("attrs", {})) for node in graph["nodes"]]
    return [
        (op, attrs.get("residual") == "True", attrs.get("activation", "None"))
        for op, attrs in attributes
        if op not in ("null", "SwapAxis")
    ]


def fused_nodes(net):
    names = [
        ([r and "residual"] + [a != "None" and a]) for op, r, a in nodes(net) if op == "Custom"
    ]
    return [" + ".join(filter(None, parts)) for parts in names]


@pytest.mark.parametrize("kind", BODIES)
def test_patterns(kind):
    body, fused, reasons = BODIES[kind]
    results, names = [], []
    for fuses in (False, True):
        net = filled(Net(body, prefix="net_"), contexts(2))
        _, report = convert_sync_batchnorm(net, fuse=fuses, return_report=True)
        net.hybridize(static_alloc=True)
        results.append(outcome(net))
        # Names that MXNet counts on through a process.
        names.append([re.sub(r"\d+", "", n) for n in net._cached_graph[1].list_outputs()])
    assert [entry.after for entry in report.fused] == fused
    assert [entry.why for entry in report.not_fused] == reasons
    assert_equal(*reversed(results))
    assert sorted(filter(None, fused_nodes(net))) == sorted(fused)
    assert len(fused_nodes(net)) == len(fused) + len(reasons) and names[0] == names[1]


def imported(folder):
    return SymbolBlock.imports(
        f"{folder}/net-symbol.json", ["data"], f"{folder}/net-0000.params", contexts(2)
    )


@pytest.mark.parametrize("kind", ["shortcuts", "both operands"])
def test_the_graph_of_a_file(kind, tmp_path):
    body, fused, _ = BODIES[kind]
    net = filled(Net(body), contexts(1))
    net.hybridize()
    net(mx.nd.array(images(1)))
    net.export(str(tmp_path / "net"))
    results = []
    for fuses in (False, True):
        block = imported(tmp_path)
        before = block._cached_graph[1].tojson(), attributes(block)
        _, report = convert_sync_batchnorm(block, fuse=fuses, return_report=True)
        results.append(outcome(block))
    assert [entry.after for entry in report.fused] == fused
    assert_equal(*reversed(results))
    assert sorted(filter(None, fused_nodes(block))) == sorted(fused)
    # As a part of another net, and reverted.
    whole = nn.HybridSequential()
    whole.add(block)
    whole.hybridize()
    assert sorted(filter(None, fused_nodes_after_a_call(whole))) == sorted(fused)
    revert_sync_batchnorm(block)
    assert (block._cached_graph[1].tojson(), attributes(block)) == before


def test_a_layer_that_is_fused_in_one_of_two_places_is_one_layer(tmp_path):
    def twice(F, x, ours, other, conv):
        return ours(F.relu(ours(x))) * 2

    net = filled(Net(twice), contexts(1))
    convert_sync_batchnorm(net, fuse=True)
    net.hybridize()
    net(mx.nd.array(images(1)))
    assert sorted(fused_nodes(net)) == ["", "relu"]
    net.export(str(tmp_path / "net"))
    block = imported(tmp_path)
    _, report = convert_sync_batchnorm(block, return_report=True)
    assert len(report.replaced) == 1
    # Readers that take a stock operator's defaults are not misled.
    graph = json.loads((tmp_path / "net-symbol.json").read_text())
    for attrs in (node["attrs"] for node in graph["nodes"] if node["op"] == "Custom"):
        assert float(attrs["epsilon"]) == 1e-5 and attrs["fix_gamma"] == "False"


@needs_mxnet("1.8", "its relu gives -0.0 for 0.0")
def test_a_fused_graph_in_a_file(tmp_path):
    """Its nodes are taken apart where layers are put in."""
    net = filled(Net(BODIES["shortcuts"][0]), contexts(1))
    convert_sync_batchnorm(net, fuse=True)
    net.hybridize()
    expected = net(mx.nd.array(images())).asnumpy()
    net.export(str(tmp_path / "net"))
    for fuses in (False, True):
        block = imported(tmp_path)
        _, report = convert_sync_batchnorm(block, fuse=fuses, return_report=True)
        assert len(report.fused) == (2 if fuses else 0)
        assert_same_bits(block(mx.nd.array(images())).asnumpy(), expected)


def _shared(F, x, layer):
    return F.relu(layer(x) + layer(2 * x))


def _shared_late(F, x, layer):
    return F.relu(layer(x) + F.tanh(layer(2 * x)))


def _dropout(F, x, layer):
    return F.Dropout(x) + layer(F.Dropout(x))


ORDER = "a residual would change the order"


@pytest.mark.parametrize(
    "body, fused, why",
    [
        (_shared, ["residual + relu"], "its output is the residual of another"),
        (_shared_late, [], ORDER),
        (_dropout, [], ORDER),
    ],
)
def test_fusing_keeps_the_order_of_states_and_random_numbers(body, fused, why):
    results = []
    for fuses in (False, True):
        layer = sbn.SyncBatchNorm(in_channels=3, prefix="layer_")
        net = Wrapped(layer, body)
        net.initialize()
        _, report = convert_sync_batchnorm(net, fuse=fuses, return_report=True)
        net.hybridize()
        mx.random.seed(1)
        results.append(outcome(net, (5,)))
    assert [entry.after for entry in report.fused] == fused
    assert why in [entry.why[: len(why)] for entry in report.not_fused]
    assert_equal(*reversed(results))


class Wrapped(HybridBlock):
    def __init__(self, layer, body):
        super().__init__(prefix="net_")
        self.layer, self.body = layer, body

    def hybrid_forward(self, F, x):
        return self.body(F, x, self.layer)


def attributes(block):
    # Before MXNet 1.9 a block has this one once it has run.
    return sorted(set(vars(block)) - {"_cached_op_args"})


def unlike(net):
    """Everything that must be as before."""
    found = []
    net.apply(lambda block: found.append((id(block), type(block), attributes(block))))
    return found


def test_reverting_and_converting_twice():
    net = filled(Net(BODIES["shortcuts"][0]), contexts(2))
    net.hybridize()
    before, plain = unlike(net), nodes_after_a_call(net)
    convert_sync_batchnorm(net)
    _, first = convert_sync_batchnorm(net, fuse=True, return_report=True)
    assert len(first.fused) == 2 and not first.replaced
    assert set(filter(None, fused_nodes_after_a_call(net))) == {"residual + relu"}
    compiled = net._cached_op
    _, second = convert_sync_batchnorm(net, fuse=True, return_report=True)
    assert second == first and net._cached_op is compiled
    convert_sync_batchnorm(net)
    assert net._cached_op is compiled
    revert_sync_batchnorm(net)
    assert unlike(net) == before and nodes_after_a_call(net) == plain


def nodes_after_a_call(net):
    net(mx.nd.array(images(1)))
    return nodes(net)


def fused_nodes_after_a_call(net):
    nodes_after_a_call(net)
    return fused_nodes(net)


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))]
)
def test_copies_are_fused_as_well(way):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"))
    convert_sync_batchnorm(net, fuse=True)
    other = way(net)
    filled(other, contexts(1))
    other.hybridize()
    assert fused_nodes_after_a_call(other) == ["relu"]
    # The attribute of the copy belongs to the copy.
    assert not net._cached_graph
    revert_sync_batchnorm(other)
    assert "BatchNorm" in [op for op, *_ in nodes_after_a_call(other)]


def test_before_the_initialization_and_in_part():
    """Only children are hybridized, and nothing is known of shapes."""
    results = []
    for fuses in (False, True):
        net = nn.Sequential(prefix="net_")
        with net.name_scope():
            for number in range(2):
                net.add(nn.HybridSequential(prefix=f"part{number}_"))
                with net[number].name_scope():
                    net[number].add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.LeakyReLU(0.1))
        _, report = convert_sync_batchnorm(net, fuse=fuses, return_report=True)
        assert [entry.after for entry in report.fused] == ["leaky_relu"] * (2 * fuses)
        net[1].hybridize()
        results.append(outcome(filled(net, contexts(2))))
        assert fused_nodes(net[1]) == (["leaky_relu"] if fuses else [""])
    assert_equal(*results)


def test_without_layout_copies(monkeypatch):
    monkeypatch.setattr("gluon_syncbn.native.HAS_ONEDNN", False)
    body, fused, _ = BODIES["both operands"]
    results = []
    for fuses in (False, True):
        # Without oneDNN's operators.
        net = Net(
            lambda F, x, ours, other, conv: body(F, x, ours, other, lambda x: 2 * x), prefix="net_"
        )
        vars(net)["input"] = lambda x: mx.sym.repeat(x, repeats=2, axis=1).slice_axis(1, 0, 4)
        convert_sync_batchnorm(net, fuse=fuses)
        net.hybridize()
        filled(net, contexts(2))
        results.append(outcome(net))
        assert "SwapAxis" not in net._cached_graph[1].tojson()
    assert list(filter(None, fused_nodes(net))) == fused
    assert_equal(*results)


def test_a_relu_of_the_mean():
    layer = sbn.SyncBatchNorm(in_channels=3)
    outputs = layer(mx.sym.var("data")).get_internals()
    [mean] = [name for name in outputs.list_outputs() if name.endswith("fwd_mean")]
    graph = Graph(mx.sym.relu(outputs[mean]))
    assert fuse(graph) == ([], [(mean[: -len("_mean")], "only its mean or variance is used")])


class Untraceable(HybridBlock):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.parts = nn.HybridSequential()
        self.parts.add(nn.BatchNorm(in_channels=3), nn.Activation("relu"))
        self.two = Two()

    def hybrid_forward(self, F, x):
        return self.two(self.parts(x), x) if x.shape[0] else x


class Two(HybridBlock):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.norm = nn.BatchNorm(in_channels=3)

    def hybrid_forward(self, F, x, y, scale=1):
        return F.relu(self.norm(x) + y)


def test_nets_that_cannot_be_traced():
    net = Untraceable()
    _, report = convert_sync_batchnorm(net, fuse=True, return_report=True)
    assert [entry.after for entry in report.fused] == ["relu", "residual + relu"]
    [(name, *_, why)] = report.not_fused
    assert name == "the net itself"
    assert why.startswith("it cannot be traced") and "shape" in why
    assert "2 fused (1 relu, 1 residual + relu)" in str(report) and why in str(report)


def test_numpy_arrays():
    with numpy_arrays():
        net, results = nn.HybridSequential(prefix="net_"), []
        with net.name_scope():
            net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"))
        net.initialize(mx.init.One())
        for fuses in (False, True):
            convert_sync_batchnorm(net, fuse=fuses)
            net.hybridize()
            x = mx.np.array(images())
            x.attach_grad()
            with autograd.record():
                y = net(x)
                loss = (y**2).sum()
            loss.backward()
            assert type(y) is mx.np.ndarray
            results.append({"y": y.asnumpy(), "dx": x.grad.asnumpy()})
        assert fused_nodes(net) == ["relu"]
    assert_equal(*results)


def test_a_synchronized_layer_keeps_its_own_activation():
    net = nn.HybridSequential()
    net.add(sbn.SyncBatchNorm(activation="relu", in_channels=3), sbn.VirtualBatchNorm(2))
    net.add(nn.Activation("relu"))
    _, report = convert_sync_batchnorm(net, fuse=True, return_report=True)
    assert [entry.after for entry in report.fused] == ["relu"] and not report.not_fused
    net.initialize()
    net.hybridize()
    assert fused_nodes_after_a_call(net) == ["relu", "relu"]
