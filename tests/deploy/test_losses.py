"""The command export on symbols with losses: the files compute what a Module does."""

import os

import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn import __main__ as command_line
from deploy_nets import operators
from mxnets import needs_onnx
from tolerances import EXPORTED, relative_error

SOFTMAX = ("SoftmaxOutput", "Softmax")
REGRESSIONS = ("LogisticRegressionOutput", "LinearRegressionOutput", "MAERegressionOutput")


def random_loss(rng):
    """(name, attributes, the function of x in inference by MXNet's documentation)."""
    name = str(rng.choice([*SOFTMAX, *SOFTMAX, *REGRESSIONS, "SVMOutput"]))
    attrs = {}
    if name in SOFTMAX:
        choices = {
            "multi_output": (True, False, "1"),
            "preserve_shape": (True, False, "true"),
            "use_ignore": (True,),
            "ignore_label": (0,),
            "normalization": ("valid", "batch"),
            "out_grad": (True,),
            "smooth_alpha": (0.1,),
            "grad_scale": (3,),
        }
        for key, values in choices.items():
            if rng.random() < 0.35:
                attrs[key] = values[rng.integers(len(values))]
        if attrs.get("multi_output"):
            axis = 1
        else:
            axis = -1 if attrs.get("preserve_shape") else "all"
        return name, attrs, lambda x: softmax(x, axis)
    if name in REGRESSIONS and rng.random() < 0.5:
        attrs["grad_scale"] = 3
    return name, attrs, sigmoid if name.startswith("Logistic") else lambda x: x


def softmax(x, axis):
    axes = tuple(range(1, x.ndim)) if axis == "all" else axis
    e = np.exp(x - x.max(axes, keepdims=True))
    return e / e.sum(axes, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def random_symbol(rng):
    """A symbol with one or two losses, the same with labels that are variables, what the losses
    take, the functions, and the shape of the data. The first computes some labels."""
    shape = tuple(map(int, rng.integers(2, 5, rng.integers(2, 6))))
    x = mx.sym.BatchNorm(mx.sym.var("data"), fix_gamma=False, name="bn")
    heads, plain, sources, functions = [], [], [], []
    for number in range(rng.integers(1, 3)):
        y = x
        if rng.random() < 0.5:
            flatten = bool(rng.random() < 0.5)
            y = mx.sym.FullyConnected(y, num_hidden=3, flatten=flatten, name=f"fc{number}")
        elif rng.random() < 0.3:
            y = mx.sym.Flatten(y, name=f"flat{number}")
        name, attrs, function = random_loss(rng)
        label = mx.sym.var(f"own{number}_label")
        computed = label if rng.random() < 0.5 else mx.sym.Reshape(label * 2, shape=(-1,))
        for some, each in ((plain, label), (heads, computed)):
            some.append(getattr(mx.sym, name)(y, each, name=f"loss{number}", **attrs))
        sources.append(y)
        functions.append((name, attrs, function))
    return *map(mx.sym.Group, (heads, plain, sources)), functions, shape


def outputs(symbol, shape, dtype, values, x):
    """Of a Module in inference, which makes its own labels."""
    labels = [name for name in symbol.list_arguments() if name.endswith("_label")]
    module = mx.mod.Module(symbol, label_names=labels or None)
    module.bind([mx.io.DataDesc("data", shape, dtype)], for_training=False)
    module.set_params(*values, allow_extra=True)
    module.forward(mx.io.DataBatch([mx.nd.array(x, dtype=dtype)], []), is_train=False)
    return [y.asnumpy() for y in module.get_outputs()]


@needs_onnx
@pytest.mark.filterwarnings("ignore:.*Cannot decide type", "ignore:Data provided by label_shapes")
@pytest.mark.parametrize("seed", range(24))
def test_random_losses(tmp_path, monkeypatch, capsys, seed):
    """With oneDNN, a Module takes another softmax on float32 data of four dimensions than MXNet's
    other builds and float64 do. There is no file then, and an error that says so."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(seed)
    symbol, plain, sources, functions, shape = random_symbol(rng)
    dtype = str(rng.choice(["float32", "float64"]))
    arrays, names = {}, sources.list_arguments()
    for name, each in zip(names, sources.infer_shape(data=shape)[0]):
        arrays[name] = mx.nd.array(rng.uniform(-1, 1, each), dtype=dtype)
    del arrays["data"]
    [size] = arrays["bn_beta"].shape
    auxiliary = {
        f"bn_moving_{part}": mx.nd.array(rng.uniform(0.5, 2, size), dtype=dtype)
        for part in ("mean", "var")
    }
    values = arrays, auxiliary
    mx.model.save_checkpoint("m", 4, symbol, *values)
    x = rng.standard_normal(shape)
    taken = outputs(sources, shape, dtype, values, x)
    expected = [function(y) for (*_, function), y in zip(functions, taken)]
    text = f"seed {seed}: {[each[:2] for each in functions]}, {shape}, {dtype}"
    source = outputs(plain, shape, dtype, values, x)
    command = "export m -o o --input-shape " + ",".join(map(str, shape))
    # MXNet's converter takes an output once, and some losses pass on their data.
    if dtype == "float32" and len(set(sources.list_outputs())) == len(functions):
        command += " --onnx o.onnx"
    agree = all(relative_error(y, wanted) < 1e-5 for y, wanted in zip(source, expected))
    if not agree:
        assert len(shape) == 4 and dtype == "float32", text
        with pytest.raises(SystemExit):
            command_line.main(command.split())
        assert "Set MXNET_MKLDNN_ENABLED=0" in capsys.readouterr().err, text
        assert not any(name.startswith("o") for name in os.listdir()), text
        return
    assert command_line.main(command.split()) == 0
    assert not set(operators("o")) & {*SOFTMAX, *REGRESSIONS, "SVMOutput"}, text
    exported, *values = mx.model.load_checkpoint("o", 0)
    for y, wanted in zip(outputs(exported, shape, dtype, values, x), expected):
        assert relative_error(y, wanted) < EXPORTED[False], text
