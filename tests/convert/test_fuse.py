"""convert_sync_batchnorm(net, fuse=True): which nodes of graphs are fused, and which are not. (That
the values stay, test_random_nets.py says; test_activation.py, on several devices.)"""

import copy
import json
import pickle
import re

import gluon_syncbn as sbn
import mxnet as mx
import pytest
from gluon_syncbn import convert_sync_batchnorm, revert_sync_batchnorm
from mxnet.gluon import HybridBlock, nn

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


X = mx.nd.ones((2, 3, 6, 7))


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


def called(net):
    """The net, initialized, once it has been compiled."""
    net.initialize()
    net.hybridize()
    net(X)
    return net


def nodes(net):
    """(operator, attributes) of each node in the compiled graph that computes."""
    found = json.loads(net._cached_graph[1].tojson())["nodes"]
    found = [(node["op"], node.get("attrs", {})) for node in found]
    return [(op, attrs) for op, attrs in found if op not in ("null", "SwapAxis")]


def fused_nodes(net):
    """What is fused into each of our nodes, such as "residual + relu"."""
    ours = [attrs for op, attrs in nodes(net) if op == "Custom"]
    parts = [
        ["residual" * (a.get("residual") == "True"), a.get("activation", "").replace("None", "")]
        for a in ours
    ]
    return [" + ".join(filter(None, each)) for each in parts]


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("has_onednn", [True, False])
def test_patterns(has_onednn, kind, monkeypatch):
    monkeypatch.setattr("gluon_syncbn.native.HAS_ONEDNN", has_onednn)
    body, fused, reasons = BODIES[kind]
    names = []
    for fuses in (False, True):
        net = Net(body, prefix="net_")
        _, report = convert_sync_batchnorm(net, fuse=fuses, return_report=True)
        compiled = called(net)._cached_graph[1]
        # Names that MXNet counts on through a process.
        names.append([re.sub(r"\d+", "", name) for name in compiled.list_outputs()])
    assert [entry.after for entry in report.fused] == fused
    assert [entry.why for entry in report.not_fused] == reasons
    assert names[0] == names[1]
    assert has_onednn or "SwapAxis" not in compiled.tojson()
    assert sorted(filter(None, fused_nodes(net))) == sorted(fused)
    assert len(fused_nodes(net)) == len(fused) + len(reasons)


def attributes(block):
    # Before MXNet 1.9 a block has this one once it has run.
    return sorted(set(vars(block)) - {"_cached_op_args"})


def unlike(net):
    """Everything that must be as before."""
    found = []
    net.apply(lambda block: found.append((id(block), type(block), attributes(block))))
    return found


def test_reverting_and_converting_twice():
    net = called(Net(BODIES["shortcuts"][0]))
    before, plain = unlike(net), nodes(net)
    convert_sync_batchnorm(net)
    _, first = convert_sync_batchnorm(net, fuse=True, return_report=True)
    assert len(first.fused) == 2 and not first.replaced
    net(X)
    assert set(filter(None, fused_nodes(net))) == {"residual + relu"}
    compiled = net._cached_op
    _, second = convert_sync_batchnorm(net, fuse=True, return_report=True)
    assert second == first and net._cached_op is compiled
    convert_sync_batchnorm(net)
    assert net._cached_op is compiled
    revert_sync_batchnorm(net)
    net(X)
    assert unlike(net) == before and nodes(net) == plain


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))]
)
def test_copies_are_fused_as_well(way):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"))
    convert_sync_batchnorm(net, fuse=True)
    other = called(way(net))
    assert fused_nodes(other) == ["relu"]
    # The attribute of the copy belongs to the copy.
    assert not net._cached_graph
    revert_sync_batchnorm(other)
    other(X)
    assert "BatchNorm" in [op for op, _ in nodes(other)]


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


def test_a_synchronized_layer_keeps_its_own_activation():
    net = nn.HybridSequential()
    net.add(sbn.SyncBatchNorm(activation="relu", in_channels=3), sbn.VirtualBatchNorm(2))
    net.add(nn.Activation("relu"))
    _, report = convert_sync_batchnorm(net, fuse=True, return_report=True)
    assert [entry.after for entry in report.fused] == ["relu"] and not report.not_fused
    assert fused_nodes(called(net)) == ["relu", "relu"]
