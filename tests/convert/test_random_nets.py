"""Random nets: exported, folded, converted, reverted and fused, they compute the same."""

import random
import warnings

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
import random_nets
from gluon_syncbn.__main__ import main
from mxnet import autograd
from mxnet.gluon import SymbolBlock
from runs import MODES
from stock import listed
from tolerances import EXPORTED, relative_error

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK, LONG = range(20), range(20, 300)


def seeds(function):
    """Some seeds with the quick tests, the others in parts of 50 with the long ones."""
    parts = [LONG[start : start + 50] for start in range(0, len(LONG), 50)]
    long = [pytest.param(part, marks=pytest.mark.long, id=f"{part[0]}-") for part in parts]
    return pytest.mark.parametrize("numbers", [pytest.param(QUICK, id="quick"), *long])(function)


def called(block, xs):
    outputs = block(*(mx.nd.array(x, dtype=x.dtype) for x in xs))
    return [y.asnumpy() for y in listed(outputs)]


def load(prefix, inputs):
    names = ["data"] if inputs == 1 else [f"data{number}" for number in range(inputs)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet's own, for inputs whose dtype a file does not say
        symbol = mx.sym.load(f"{prefix}-symbol.json")
        names = [name for name in names if name in symbol.list_inputs()]
        return SymbolBlock.imports(f"{prefix}-symbol.json", names, f"{prefix}-0000.params"), names


def check(outputs, expected, what, tolerance=EXPORTED[True]):
    assert len(outputs) == len(expected), what
    for number, pair in enumerate(zip(outputs, expected)):
        error = relative_error(*pair)
        assert error <= tolerance, f"{what}, output {number}: {error:.3g} > {tolerance:g}"


@seeds
def test_exports_and_conversions(numbers, tmp_path):
    for seed in numbers:
        export_and_convert(seed, tmp_path)


def export_and_convert(seed, folder):
    rng = random.Random(seed)
    net, xs = random_nets.make(seed)
    expected = called(net, xs)
    fuse, fold = rng.random() < 0.5, rng.random() < 0.5
    what = f"seed {seed}, fuse={fuse}, fold={fold}"
    if fuse:
        sbn.convert_sync_batchnorm(net, fuse=True)
        check(called(net, xs), expected, f"{what}: converted")
    if rng.random() < 0.7:
        net.hybridize()
        check(called(net, xs), expected, f"{what}: hybridized")

    def exported(block, title, inputs):
        dtype = rng.choice([None, None, "float32", "float64", "float16"])
        title = f"{what}: {title}, dtype={dtype}"
        graph = block._cached_graph
        try:
            result = sbn.export(
                block,
                folder / "m",
                fold=fold,
                dtype=dtype,
                input_shape=[random_nets.SHAPE] * inputs,
            )
        except sbn.ExportError as error:
            raise AssertionError(f"{title}: {error}") from error
        assert result.error is not None and block._cached_graph is graph, title
        if dtype != "float16":
            loaded, names = load(folder / "m", inputs)
            given = [x.astype(dtype or x.dtype) for x in xs]
            used = given if inputs == 1 else [given[int(name[-1])] for name in names]
            check(called(loaded, used), expected, title)

    exported(net, "exported", net.inputs)
    net.hybridize()
    called(net, xs)
    net.export(str(folder / "n"))
    block, names = load(folder / "n", net.inputs)
    xs = xs if net.inputs == 1 else [xs[int(name[-1])] for name in names]
    check(called(block, xs), expected, f"{what}: in a file")
    layers = [layer for layer in net._children.values() if isinstance(layer, sbn.SyncBatchNorm)]
    if not any(layer._own_settings["inplace"] for layer in layers):
        assert main(["convert", f"{folder}/n-symbol.json", "-o", f"{folder}/c-symbol.json"]) == 0
        stock = SymbolBlock.imports(f"{folder}/c-symbol.json", names)
        stock.collect_params().load(
            f"{folder}/n-0000.params",
            ctx=mx.current_context(),
            ignore_extra=True,
            cast_dtype=True,
            dtype_source="saved",
        )
        check(called(stock, xs), expected, f"{what}: by the command")
    sbn.convert_sync_batchnorm(block, fuse=rng.random() < 0.5)
    check(called(block, xs), expected, f"{what}: its graph converted")
    if len(names) == net.inputs:
        exported(block, "its graph exported", net.inputs)
    sbn.revert_sync_batchnorm(block)
    check(called(block, xs), expected, f"{what}: its graph reverted")


@seeds
def test_fused_nets_train_with_the_same_values(numbers):
    for seed in numbers:
        results = [trained(seed, fuse) for fuse in (False, True)]
        assert results[0].keys() == results[1].keys()
        for what, value in results[0].items():  # -0 counts as 0.
            np.testing.assert_array_equal(results[1][what], value, f"seed {seed}, {what}")


def trained(seed, fuse):
    """{what: array} of two steps of training."""
    net, xs = random_nets.make(seed, training=True)
    sbn.convert_sync_batchnorm(net, fuse=fuse)
    net.hybridize(**random.Random(seed).choice([MODES["hybrid"], MODES["static_alloc"]]))
    rng, result = np.random.default_rng(seed), {}
    mx.random.seed(seed)
    xs = [mx.nd.array(x) for x in xs]
    for x in xs:
        x.attach_grad()
    for step in range(2):
        with autograd.record():
            ys = listed(net(*xs))
        dys = [mx.nd.array(rng.standard_normal(random_nets.SHAPE)) for _ in ys]
        autograd.backward(ys, dys)
        found = {f"y{number}": y for number, y in enumerate(ys)}
        found.update({f"dx{number}": x.grad for number, x in enumerate(xs)})
        for name, parameter in net.collect_params().items():
            found[name] = parameter.data()
            if parameter.grad_req != "null":
                found[f"gradient of {name}"] = parameter.grad()
        result.update({f"{name} of step {step}": a.asnumpy() for name, a in found.items()})
    return result
