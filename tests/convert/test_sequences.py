"""Random sequences of conversions, freezing, copies and files, against a stock graph that is built
with the settings that the sequence means."""

import copy
import pickle
import random
from functools import partial

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from devices import KIND, context
from gluon_syncbn.graph.blocks import walk
from gluon_syncbn.graph.symbols import OUR_OPERATOR, STOCK_OPERATORS, Graph, settings_of
from mxnet import autograd, sym
from mxnet.gluon import SymbolBlock, nn
from runs import MODES

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(mx.__version__ < "1.9", reason="MXNet 1.9 has all kinds of nodes"),
]
SHAPE = (4, 3, 2, 2)
ENDS = "gamma", "beta", "moving_mean", "moving_var"
AFTER = {
    None: lambda x, _: x,
    "relu": lambda x, _: sym.relu(x),
    "leaky": lambda x, _: sym.LeakyReLU(x, slope=0.3),
    "tanh": lambda x, _: sym.tanh(x),
    "add": lambda x, before: x + before,
}


class Layer(nn.BatchNorm):
    """As a program's own, which sets arguments."""

    def __init__(self, **settings):
        super().__init__(epsilon=0.1, in_channels=3, **settings)


class Graphs(SymbolBlock):
    """A SymbolBlock of a program's own."""


class Case:
    """A net of two graphs with a layer between them, and what is known of it."""

    def __init__(self, seed, folder):
        self.rng, self.folder = random.Random(seed), folder
        self.history = [f"seed {seed}"]
        # {name: (operator, settings, name of the node that has the parameters, what follows)}
        self.nodes = {}
        self.parts = [self._random_nodes("a"), ["norm"], self._random_nodes("b")]
        self.nodes["norm"] = "BatchNorm", {"eps": 0.1, "fix_gamma": False}, "norm", None
        # Mostly nodes with the same parameters are frozen together.
        self.frozen = {name for name in self.nodes if self.rng.random() < 0.3}
        if self.rng.random() < 0.7:
            self.frozen = {name for name in self.nodes if self.nodes[name][2] in self.frozen}
        # The parameters without gradients.
        self.fixed = set()
        self.layers = []  # Nodes of ours refer to them.
        self.net = nn.HybridSequential(prefix="net_")
        layer = Layer(use_global_stats="norm" in self.frozen, prefix="norm_")
        self.net.add(self._block(self.parts[0]), layer, self._block(self.parts[2]))
        self.net.initialize(ctx=context())
        rng = np.random.default_rng(seed)
        names = {f"{of}_{end}" for _, _, of, _ in self.nodes.values() for end in ENDS}
        self.values = {name: rng.uniform(0.5, 1.5, 3) for name in sorted(names)}
        self.x = mx.nd.array(rng.normal(1, 2, SHAPE), ctx=context())

    def _random_nodes(self, letter):
        kinds = ["BatchNorm"] * 3 + ["BatchNorm_v1", "ours"]
        kinds += ["SyncBatchNorm", "BatchNormWithReLU"] if KIND == "cpu" else []
        names = []
        for number in range(self.rng.randrange(1, 5)):
            name = of = f"{letter}{number}"
            kind, fix_gamma = self.rng.choice(kinds), self.rng.random() < 0.3
            settings = {"eps": self.rng.choice([0.1, 0.3]), "fix_gamma": fix_gamma}
            if names and self.rng.random() < 0.4:
                other, settings_of_other, of, _ = self.nodes[self.rng.choice(names)]
                if self.rng.random() < 0.7:
                    kind, settings = other, settings_of_other
                # MXNet overwrites a gamma that one of them fixes.
                settings = {**settings, "fix_gamma": settings_of_other["fix_gamma"]}
            self.nodes[name] = kind, settings, of, self.rng.choice(list(AFTER))
            names.append(name)
        return names

    def _block(self, names, kind=Graphs):
        data = sym.var("data")
        block = kind(self._graph(names, data, kind is not Graphs), data)
        for parameter in block.collect_params().values():
            parameter.shape = (3,)
        return block

    def _graph(self, names, x, stock):
        """The graph of some nodes with the present settings."""
        variables = {}
        for name in names:
            kind, settings, of, after = self.nodes[name]
            ends = variables.setdefault(of, {end: sym.var(f"{of}_{end}") for end in ENDS})
            frozen = {"use_global_stats": name in self.frozen}
            if kind == "ours" and not stock:
                epsilon, scale = settings["eps"], not settings["fix_gamma"]
                layer = sbn.SyncBatchNorm(epsilon=epsilon, scale=scale, prefix=f"{name}_", **frozen)
                self.layers.append(layer)
                roles = (end.replace("moving", "running") for end in ENDS)
                with layer.name_scope():
                    y = layer.hybrid_forward(sym, x, **dict(zip(roles, ends.values())))
            else:
                known = {
                    "BatchNorm_v1": sym.BatchNorm_v1,
                    "SyncBatchNorm": partial(sym.contrib.SyncBatchNorm, key=name, ndev=1),
                    "BatchNormWithReLU": sym.contrib.BatchNormWithReLU,
                }
                y = known.get(kind, sym.BatchNorm)(x, name=name, **ends, **settings, **frozen)
            x = AFTER[after](y, x)
        return x

    def all_names(self):
        return [name for part in self.parts for name in part]

    def part(self, lists=False):
        """A block of the net, or a list of blocks, and the names of its nodes."""
        blocks = list(self.net._children.values())
        if not blocks or self.rng.random() < 0.5:
            return self.net, self.all_names()
        some = self.rng.sample(range(3), self.rng.randrange(1, 3) if lists else 1)
        self.history.append(str(some))
        names = [name for number in some for name in self.parts[number]]
        return [blocks[number] for number in some] if lists else blocks[some[0]], names

    def parameters_of(self, names):
        return {self.nodes[name][2] for name in names}

    def check_settings(self):
        what = " ".join(self.history)
        graphs = [block for _, block in walk(self.net) if isinstance(block, SymbolBlock)]
        parts = [self.parts[0], self.parts[2]] if len(graphs) > 1 else self.parts
        for block, names in zip(graphs, parts):
            for graph in (block._cached_graph, getattr(block, "_stock_graph", None)):
                flags = [
                    settings_of(node).use_global_stats
                    for node in (Graph(graph[1]).nodes() if graph else ())
                    if node.operator in OUR_OPERATOR or node.operator in STOCK_OPERATORS
                ]
                assert not flags or sum(flags) == len(self.frozen.intersection(names)), what

    def check(self):
        what = " ".join(self.history)
        reference = self._block(self.all_names(), SymbolBlock)
        reference.initialize(ctx=context())
        found, expected = self._step(self.net), self._step(reference)
        moving = self.parameters_of(self.nodes.keys() - self.frozen)
        owners = [of for _, _, of, _ in self.nodes.values()]
        # MXNet updates statistics backward, so those of several nodes in another order, in which
        # frozen ones see them.
        mixed = moving & self.parameters_of(self.frozen)
        for name, value in found.items():
            of, _, end = name.partition("_")
            if end in ENDS[:2]:
                assert (value is None) == (of in self.fixed), f"{what}: {name}"
            elif end in ENDS[2:]:
                moved = not np.array_equal(value, self.values[name].astype("float32"))
                assert moved == (of in moving), f"{what}: {name}"
            if mixed or value is None or end in ENDS[2:] and owners.count(of) > 1:
                continue
            largest = abs(expected["dx" if end in ENDS[:2] else name]).max()
            np.testing.assert_allclose(
                value, expected[name], rtol=1e-3, atol=1e-3 * largest, err_msg=f"{what}: {name}"
            )

    def _step(self, net):
        """y, dx, gradients and running statistics of a step in training."""
        parameters = {
            name.replace("running", "moving"): parameter
            for name, parameter in net.collect_params().items()
        }
        # An export gives a node that fixes a gamma of others one of its own.
        parameters = {name: p for name, p in parameters.items() if name in self.values}
        for name, parameter in parameters.items():
            parameter.set_data(mx.nd.array(self.values[name]))
            if parameter.grad_req != "null":
                parameter.zero_grad()
        self.x.attach_grad()
        with autograd.record():
            y = net(self.x)
        y.backward(mx.nd.array(np.random.default_rng(0).normal(size=SHAPE), ctx=context()))
        mx.nd.waitall()
        found = {"y": y.asnumpy(), "dx": self.x.grad.asnumpy()}
        for name, parameter in parameters.items():
            if name.endswith(ENDS[:2]):
                has = parameter.grad_req != "null"
                found[name] = parameter.grad().asnumpy() if has else None
            else:
                found[name] = parameter.data().asnumpy()
        return found


def convert(case):
    fuse = case.rng.random() < 0.3
    sbn.convert_sync_batchnorm(case.part()[0], fuse=fuse, return_report=True)


def revert(case):
    sbn.revert_sync_batchnorm(case.part()[0], return_report=True)


def freeze(case):
    part, names = case.part(lists=True)
    affine = case.rng.random() < 0.3
    count = sbn.freeze(part, affine=affine)
    assert count == len(case.parameters_of(set(names) - case.frozen)), case.history
    case.frozen |= set(names)
    case.fixed |= case.parameters_of(names) if affine else set()


def unfreeze(case):
    part, names = case.part(lists=True)
    count = sbn.unfreeze(part)
    assert count == len(case.parameters_of(case.frozen.intersection(names))), case.history
    case.frozen -= set(names)
    case.fixed -= case.parameters_of(names)


def hybridize(case):
    mode = case.rng.choice(list(MODES.values()))
    case.net.hybridize(**({"active": False} if mode is None else mode))


def copied(case):
    # MXNet cannot copy what it has compiled.
    case.net.hybridize(active=False)
    way = case.rng.choice([copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
    case.net = way(case.net)
    # MXNet's copies of parameters have no gradients attached.
    case.net.collect_params().reset_ctx(context())


def files_of_parameters(case):
    case.net.save_parameters(f"{case.folder}/p")
    case.net.load_parameters(f"{case.folder}/p", ctx=context())


def files_of_a_graph(case):
    """The net is one SymbolBlock then, in some cases of a symbol that was converted or reverted."""
    prefix = f"{case.folder}/m"
    if case.rng.random() < 0.5:
        case.net.hybridize()
        case.net(case.x)
        case.net.export(prefix)
    else:
        sbn.export(case.net, prefix, input_shape=SHAPE)
    change = case.rng.choice([lambda s, **_: (s, None)] * 2 + SYMBOLS)
    symbol, _ = change(mx.sym.load(f"{prefix}-symbol.json"), return_report=True)
    symbol.save(f"{prefix}-symbol.json")
    files = f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params"
    case.layers.append(case.net)
    case.net = SymbolBlock.imports(*files, context())
    if change is SYMBOLS[0]:  # Its nodes belong to no layer yet.
        sbn.convert_sync_batchnorm(case.net, return_report=True)
    case.parts, case.fixed = [case.all_names()], set()


SYMBOLS = [sbn.convert_sync_batchnorm, sbn.revert_sync_batchnorm]
ACTIONS = [convert, revert, freeze, unfreeze] * 5
ACTIONS += [hybridize, copied, files_of_parameters, files_of_a_graph, Case.check]


@pytest.mark.parametrize("seed", range(16))
def test_random_sequences_mean_what_they_mean_on_a_stock_net(seed, tmp_path):
    case = Case(seed, tmp_path)
    for _ in range(25):
        action = case.rng.choice(ACTIONS)
        case.history.append(action.__name__)
        action(case)
        case.check_settings()
    case.check()
