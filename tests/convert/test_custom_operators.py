"""Custom operators of others keep their place, whatever their names and attributes are."""

import json
import random

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from devices import context
from gluon_syncbn.__main__ import main
from gluon_syncbn.graph.symbols import Graph, add_layout_copies
from mxnet.gluon import HybridBlock, SymbolBlock, nn

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPE = (4, 3, 2, 2)
NAMES = ["BatchNorm", "_contrib_SyncBatchNorm", "_contrib_BatchNormWithReLU", "BatchNorm_v1"]
NAMES += ["relu", "Activation", "LeakyReLU", "elemwise_add", "SwapAxis", "Dropout", "RNN"]
NAMES += ["Convolution", "SoftmaxOutput", "null", "Custom", "GluonSyncBatchNorm2"]
ATTRIBUTES = {
    "act_type": ["relu", "leaky", "rrelu"],
    "slope": [0.1],
    "axis": [1, 3],
    "dim1": [0, 1],
    "dim2": [0, 1],
    "mode": ["always"],
    "residual": [True],
    "gpu_only": [True],
    "inplace": [True],
    "activation": ["relu"],
    "use_global_stats": [True],
    "layer": [0],
    "process": ["another"],
}


class Operator(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], 3 * in_data[0] - sum(x.mean() for x in in_data[1:]))

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 3 * out_grad[0])


class Properties(mx.operator.CustomOpProp):
    def __init__(self, count, **attributes):
        super().__init__()
        self.count = int(count)

    def list_arguments(self):
        return [f"x{number}" for number in range(self.count)]

    def infer_shape(self, shapes):
        return shapes, [shapes[0]], []

    def create_operator(self, ctx, shapes, types):
        return Operator()


class Net(HybridBlock):
    """Normalizations, each followed by operators that are others' or could be fused."""

    def __init__(self, seed):
        super().__init__(prefix="net_")
        rng = random.Random(seed)
        self.calls = []
        with self.name_scope():
            for number in range(rng.randrange(1, 5)):
                setattr(self, f"norm{number}", nn.BatchNorm(in_channels=3))
                some = rng.sample(sorted(ATTRIBUTES), rng.randrange(5))
                attributes = {name: rng.choice(ATTRIBUTES[name]) for name in some}
                if rng.random() < 0.8:
                    name, count = rng.choice(NAMES), rng.choice([1, 2, 5])
                    attributes.update(op_type=name, count=count)
                    self.calls.append(attributes)
                else:
                    self.calls.append(None)

    def hybrid_forward(self, F, x):
        for number, attributes in enumerate(self.calls):
            y = getattr(self, f"norm{number}")(x)
            if attributes:
                x = F.Custom(y, *[x] * (attributes["count"] - 1), **attributes)
            else:
                x = F.relu(y + x)
        return x


def foreign(symbol):
    """The attributes of the operators of others in a symbol."""
    nodes = json.loads(symbol.tojson())["nodes"]
    attributes = [node["attrs"] for node in nodes if node["op"] == "Custom"]
    return [each for each in attributes if each["op_type"] != "GluonSyncBatchNorm"]


def count_ours(symbol):
    return symbol.tojson().count('"GluonSyncBatchNorm"')


@pytest.fixture(autouse=True, scope="module")
def registered():
    for name in NAMES:
        mx.operator.register(name)(type(f"{name}Properties", (Properties,), {}))


@pytest.mark.parametrize("seed", range(8))
def test_they_stay_in_blocks_and_symbols(seed, tmp_path, capsys):
    net = Net(seed)
    net.initialize(ctx=context())
    x = mx.nd.array(np.random.default_rng(seed).normal(1, 2, SHAPE), ctx=context())
    expected, count, fused = net(x), len(net.calls), net.calls.count(None)
    stock = net(mx.sym.var("data"))
    theirs = [{name: str(value) for name, value in call.items()} for call in net.calls if call]

    def check(block, what, ours):
        block.hybridize()
        what = f"seed {seed}: {what}"
        np.testing.assert_allclose(
            block(x).asnumpy(), expected.asnumpy(), rtol=1e-4, atol=1e-4, err_msg=what
        )
        symbol = block._cached_graph[1]
        assert foreign(symbol) == theirs and count_ours(symbol) == ours, what

    symbols = SymbolBlock(stock, mx.sym.var("data"), params=net.collect_params())
    for block in (net, symbols):
        name = type(block).__name__
        _, report = sbn.convert_sync_batchnorm(block, fuse=True, return_report=True)
        assert len(report.replaced) == count and len(report.fused) == fused, f"seed {seed}"
        check(block, f"{name} converted", count)
        assert sbn.freeze(block) == count and sbn.unfreeze(block) == count
        names = sorted({call["op_type"] for call in theirs})
        if names:
            with pytest.raises(sbn.ExportError) as raised:
                sbn.export(block, tmp_path / "m", input_shape=SHAPE)
            assert f"custom operators ({', '.join(names)})" in str(raised.value), f"seed {seed}"
        sbn.revert_sync_batchnorm(block)
        check(block, f"{name} reverted", 0)

    converted, report = sbn.convert_sync_batchnorm(stock, fuse=True, return_report=True)
    assert len(report.replaced) == count and len(report.fused) == fused, f"seed {seed}"
    assert foreign(add_layout_copies(Graph(converted)).symbol()) == theirs, f"seed {seed}"
    assert foreign(sbn.revert_sync_batchnorm(converted)) == theirs, f"seed {seed}"
    converted.save(f"{tmp_path}/n-symbol.json")
    assert main(["convert", f"{tmp_path}/n-symbol.json", "-o", f"{tmp_path}/c-symbol.json"]) == 0
    assert f": {count} GluonSyncBatchNorm became BatchNorm" in capsys.readouterr().out
    assert foreign(mx.sym.load(f"{tmp_path}/c-symbol.json")) == theirs, f"seed {seed}"
