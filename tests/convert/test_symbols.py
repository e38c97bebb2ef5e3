"""Symbols that are converted, and Modules that train them, against stock Modules on one device."""

import json
import types

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn import native
from devices import context
from gluon_syncbn.graph.symbols import Graph
from mxnet import sym
from runs import contexts
from tolerances import assert_same_bits

pytestmark = pytest.mark.skipif(mx.__version__ < "1.9", reason="MXNet 1.9 has all kinds of nodes")
BATCH = 6


def random_symbol(seed):
    """A net with random nodes, some frozen; in half of the nets some share parameters."""
    rng = np.random.default_rng(seed)
    x, number = sym.FullyConnected(sym.var("data"), num_hidden=4, name="first"), 0
    parameters = None
    for _ in range(rng.integers(1, 5)):
        settings = {
            "eps": rng.choice([1e-5, 1e-3]),
            "momentum": rng.choice([0.9, 0.5]),
            "fix_gamma": bool(rng.random() < 0.4),
            "use_global_stats": bool(rng.random() < 0.2),
        }
        name = f"norm{number}"
        number += 1
        if seed % 2 and parameters and rng.random() < 0.6:
            x = sym.BatchNorm(x, *parameters, **settings, name=name)
        else:
            x = sym.BatchNorm(x, **settings, name=name)
            if rng.random() < 0.6:
                ends = "gamma", "beta", "moving_mean", "moving_var"
                parameters = [x.get_internals()[f"{name}_{end}"] for end in ends]
        x = sym.Activation(x, act_type=rng.choice(["relu", "tanh"]))
    x = sym.FullyConnected(x, num_hidden=2, name="last")
    return sym.LinearRegressionOutput(x, sym.var("label"), name="out")


def names(symbol):
    return symbol.list_arguments(), symbol.list_auxiliary_states(), symbol.list_outputs()


def module_of(symbol, devices, parameters=None, **options):
    module = mx.mod.Module(symbol, label_names=("label",), context=devices, **options)
    start(module, parameters)
    return module


def start(module, parameters=None):
    module.bind([("data", (BATCH, 3))], [("label", (BATCH, 2))])
    if parameters:
        module.set_params(*parameters)
    else:
        np.random.seed(0)
        mx.random.seed(0)
        module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.1})


def batches(seed, count=4):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        x, y = rng.normal(1, 2, (BATCH, 3)), rng.normal(size=(BATCH, 2))
        yield mx.io.DataBatch([mx.nd.array(x)], [mx.nd.array(y)])


def train(module, some):
    for batch in some:
        module.forward(batch, is_train=True)
        module.backward()
        module.update()
    mx.nd.waitall()
    arguments, auxiliary = module.get_params()
    return {name: value.asnumpy() for name, value in {**arguments, **auxiliary}.items()}


def assert_close(found, expected, what):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=2e-3, atol=2e-4, err_msg=f"{what} {name}"
        )


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_symbols_train_on_two_devices(seed, fuse, tmp_path):
    stock = random_symbol(seed)
    converted, report = sbn.convert_sync_batchnorm(stock, fuse=fuse, return_report=True)
    count = stock.tojson().count('"op": "BatchNorm"')
    assert len(report.replaced) == count and not report.refused
    assert names(converted) == names(stock)
    # MXNet updates running statistics backward, so those that nodes share in another order.
    reference = module_of(converted if seed % 2 else stock, [context()])
    parameters = reference.get_params()
    module = module_of(converted, contexts(2), parameters)
    some = list(batches(seed))
    expected, found = train(reference, some[:2]), train(module, some[:2])
    assert_close(found, expected, f"seed {seed}")

    # Another process goes on with the file.
    module.save_checkpoint(str(tmp_path / "model"), 1)
    resumed = mx.mod.Module.load(
        str(tmp_path / "model"), 1, context=contexts(2), label_names=("label",)
    )
    start(resumed, resumed.get_params() if resumed.params_initialized else None)
    expected = train(reference, some[2:])
    assert_close(train(resumed, some[2:]), expected, f"seed {seed}, resumed")

    reverted, report = sbn.revert_sync_batchnorm(converted, return_report=True)
    assert len(report.replaced) == count and names(reverted) == names(stock)
    for one, other in zip(
        *(outputs(s, reference.get_params(), some[0]) for s in (stock, reverted))
    ):
        assert_same_bits(one, other, f"seed {seed}, reverted")


def grouped(symbol, rng):
    """The symbol with operators in one of two context groups: with their parameters, as MXNet
    wants it, all that have some, and many others."""
    graph = json.loads(symbol.tojson())
    nodes = graph["nodes"]
    for node in nodes:
        variables = [nodes[i] for i, *_ in node["inputs"] if nodes[i]["op"] == "null"]
        if node["op"] != "null" and (variables or rng.random() < 0.5):
            group = str(rng.choice(["a", "b"]))
            for each in [node, *variables]:
                each.setdefault("attrs", {})["__ctx_group__"] = group
    return sym.load_json(json.dumps(graph))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("seed", range(0, 12, 2))  # Nodes of two groups cannot share parameters.
def test_random_model_parallelism(seed, count):
    """Each node synchronizes the devices on which MXNet places it."""
    rng = np.random.default_rng(seed)
    stock = random_symbol(seed)
    symbol = sbn.convert_sync_batchnorm(grouped(stock, rng))
    default, *groups = (rng.permutation(count) + count * i for i in rng.permutation(3))
    devices = [context(int(i)) for i in default]
    groups = {name: [context(int(i)) for i in on] for name, on in zip("ab", groups)}
    if rng.random() < 0.5:
        groups = [{name: on[i] for name, on in groups.items()} for i in range(count)]
    reference = module_of(stock, [context()])
    parameters = reference.get_params()
    module = module_of(symbol, devices, parameters, group2ctxs=groups)
    expected, found = train(reference, batches(seed)), train(module, batches(seed))
    assert_close(found, expected, f"seed {seed}, {count}: {devices} {groups}")


@pytest.mark.parametrize("same", ["context", "group2ctxs"])
def test_a_device_that_a_module_uses_twice(same):
    symbol = random_symbol(0)
    if same == "group2ctxs":
        symbol = grouped(symbol, types.SimpleNamespace(random=lambda: 0, choice=lambda _: "a"))
        options = {"context": contexts(2), "group2ctxs": {"a": context(2)}}
    else:
        options = {"context": [context()] * 2}
    symbol = sbn.convert_sync_batchnorm(symbol)
    module = mx.mod.Module(symbol, label_names=("label",), **options)
    with pytest.raises(ValueError, match="calls norm0 on .*, .*: give a context once only"):
        start(module)


def outputs(symbol, parameters, batch):
    module = mx.mod.Module(symbol, label_names=("label",), context=context())
    module.bind([("data", (BATCH, 3))], [("label", (BATCH, 2))], for_training=False)
    module.set_params(*parameters)
    module.forward(batch, is_train=False)
    return [y.asnumpy() for y in module.get_outputs()]


def test_a_file_of_another_process_and_two_modules_with_one_symbol():
    """Each has layers of its own, so that their steps may come in any order."""
    x = sbn.SyncBatchNorm(in_channels=3, prefix="norm_")(sym.var("data"))
    symbol = sym.LinearRegressionOutput(
        sym.FullyConnected(x, num_hidden=2, name="last"), sym.var("label"), name="out"
    )
    foreign = sym.load_json(symbol.tojson().replace(native.PROCESS, "another"))
    modules = [module_of(each, contexts(2)) for each in (symbol, foreign, foreign)]
    some = list(batches(0))
    found = [{}, {}, {}]
    for batch in some:
        for module in modules:
            module.forward(batch, is_train=True)
        for module in reversed(modules):
            module.backward()
            module.update()
    found = [train(module, []) for module in modules]
    assert_close(found[1], found[0], "a file")
    assert_close(found[2], found[0], "another")
    names = {layer.name for module in modules for layer in module._exec_group._sync_layers}
    assert len(names) == 1 and len({id(m._exec_group._sync_layers[0]) for m in modules}) == 3


@pytest.mark.parametrize(
    "arguments", [{"group": sbn.SyncGroup()}, {"num_devices": 2}, {"also": [mx.gluon.nn.BatchNorm]}]
)
def test_arguments_that_a_symbol_does_not_take(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"got a Symbol and {name}=.*contexts of the Module"):
        sbn.convert_sync_batchnorm(random_symbol(0), **arguments)


def test_an_executor_without_a_module(monkeypatch):
    symbol = sbn.convert_sync_batchnorm(sym.BatchNorm(sym.var("data"), name="norm"))
    executor = symbol.simple_bind(context(), data=(4, 3))
    executor.forward(is_train=False)[0].wait_to_read()
    with pytest.raises(mx.MXNetError, match="train a symbol, bind an mx.mod.Module"):
        executor.forward(is_train=True)[0].wait_to_read()


def test_attributes_of_a_node_stay():
    with mx.AttrScope(ctx_group="dev1", force_mirroring="True"):
        symbol = sym.BatchNorm(sym.var("data"), name="norm")
    attributes = sbn.convert_sync_batchnorm(symbol).attr_dict()["norm"]
    assert attributes["__ctx_group__"] == "dev1" and attributes["__force_mirroring__"] == "True"


def test_revert_leaves_what_is_not_ours():
    """Such as a node that convert has refused."""
    old = sym.BatchNorm_v1(sym.BatchNorm(sym.var("data"), name="new"), name="old")
    two = sym.BatchNorm_v1(old, name="two", output_mean_var=True)
    stock = sym.Group([sym.contrib.SyncBatchNorm(old, name="contrib", key="k"), two[0], two[1]])

    def operators(symbol):
        nodes = (node for node in Graph(symbol).nodes() if node.op != "null")
        return {node.name.replace("_fwd", ""): node.op for node in nodes}

    assert operators(sbn.revert_sync_batchnorm(stock)) == operators(stock)
    reverted = sbn.revert_sync_batchnorm(sbn.convert_sync_batchnorm(stock))
    assert operators(reverted) == {
        **dict.fromkeys(("new", "old", "contrib"), "BatchNorm"),
        "two": "BatchNorm_v1",
    }


def test_a_shape_that_only_a_later_operator_tells():
    """MXNet's BatchNorm leaves it to a second pass. A custom operator cannot."""

    def symbol(**shape):
        m = sym.var("m", **shape)
        norm = sbn.convert_sync_batchnorm(sym.BatchNorm(m, fix_gamma=False, name="norm"))
        return norm * (m + sym.var("data"))

    with pytest.raises(mx.MXNetError, match="norm.*give the shapes of more inputs"):
        symbol().infer_shape(data=(2, 3))
    assert symbol(shape=(2, 3)).infer_shape(data=(2, 3))[1] == [(2, 3)]
