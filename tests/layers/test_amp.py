"""MXNet's automatic mixed precision, mxnet.contrib.amp.

On the CPU, MXNet's convolutions do not support float16, and bfloat16 only with AVX-512. So pooling
replaces them for float16.
"""

import json
import os

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import programs
import pytest
from devices import context
from dtypes import BFLOAT16
from mxnet import autograd
from mxnet.contrib import amp
from mxnet.gluon import nn
from mxnets import needs_bfloat16, needs_float16_amp
from runs import MODES, contexts
from tolerances import assert_same_bits, relative_error

PROGRAM = os.path.join(os.path.dirname(__file__), "amp_training.py")


in_onednn = pytest.mark.cpu_only("MXNet's Convolution has bfloat16 in oneDNN alone")
TARGETS = [pytest.param("float16", marks=needs_float16_amp)]
TARGETS += [pytest.param("bfloat16", marks=[needs_bfloat16, in_onednn])]


@pytest.fixture(scope="module", params=TARGETS)
def trained(request):
    """The output of amp_training.py."""
    done = programs.run([PROGRAM, request.param])
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)


@pytest.mark.parametrize("which", [*(f"ours {mode}" for mode in MODES), "ours whole"])
def test_training_after_init(trained, which):
    """With AMP's loss scale, which begins too high for float16 and is reduced."""
    dtype, results = trained
    result = results[which]
    assert result["finite"] and result["parameters"] == ["float32"]
    assert result["losses"][-1] < 0.4 * result["losses"][0]
    if dtype == "float16":
        assert result["scales"][-1] < result["scales"][0] == 2**16
    limit = {"float16": 0.01, "bfloat16": 0.05}[dtype]
    np.testing.assert_allclose(result["losses"], results["theirs whole"]["losses"], rtol=limit)


def test_the_layer_gets_the_dtype_of_batch_norm(trained):
    """AMP would cast the data of custom operators to float32."""
    dtype, results = trained
    assert results["theirs whole"]["inside"] == [dtype, dtype]
    for which in ("ours whole", "ours hybrid"):
        assert results[which]["inside"] == [dtype, dtype]
    assert results["ours whole"]["output"] == results["theirs whole"]["output"]


@pytest.mark.long
def test_init_before_the_package_is_imported(trained):
    dtype, results = trained
    done = programs.run([PROGRAM, dtype, "--late"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ours whole"] == results["ours whole"]


def images():
    return np.random.default_rng(0).standard_normal((6, 4, 8, 8)).astype("float32") + 3


def lists(dtype, custom):
    """The arguments of the converters: without float16 convolutions, and with custom operators in
    AMP's list for float32, which is its default, or in no list."""
    known = amp.list_fp32_ops(BFLOAT16 if dtype == "bfloat16" else dtype)
    return {
        "target_dtype": dtype,
        "target_dtype_ops": ["Pooling"] if dtype == "float16" else None,
        "fp32_ops": None if custom else [name for name in known if name != "Custom"],
    }


def sbn_nodes(symbol):
    nodes = json.loads(symbol.tojson())["nodes"]
    return sum(node.get("attrs", {}).get("op_type") == "GluonSyncBatchNorm" for node in nodes)


def trained_net(convolution):
    """A net whose running statistics fit its data, and its output."""
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        if convolution:
            net.add(nn.Conv2D(4, 3, padding=1, in_channels=4))
        net.add(nn.MaxPool2D(), sbn.SyncBatchNorm(prefix="norm_"))
        net.add(nn.Activation("relu"), nn.Flatten())
    net.initialize(mx.init.Xavier(), ctx=contexts(1))
    net.hybridize()
    for _ in range(20):
        with autograd.record():
            net(mx.nd.array(images()))
    return net, net(mx.nd.array(images())).asnumpy()


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("dtype", TARGETS)
@pytest.mark.parametrize("custom", [True, False], ids=["as listed", "not listed"])
def test_conversions(dtype, custom, tmp_path):
    """Of a block, and of a symbol and parameters, as for Module."""
    net, expected = trained_net(dtype == "bfloat16")
    x, arguments, outputs = mx.nd.array(images()), lists(dtype, custom), []
    originals = net.collect_params()
    for optional in (False, True):
        converted = amp.convert_hybrid_block(
            net, ctx=contexts(1)[0], cast_optional_params=optional, **arguments
        )
        assert sbn_nodes(converted._cached_graph[1]) == 1
        for name, parameter in converted.collect_params().items():
            if "norm" in name:
                assert_same_bits(parameter.data().asnumpy(), originals[name].data().asnumpy(), name)
        outputs.append(converted(x))
        # An operator in no list keeps the dtype of its data, as nn.BatchNorm does. (Not bfloat16,
        # which AMP casts to float32 for the layout copy on the CPU.)
        internals = converted._cached_graph[1].get_internals()
        types = dict(zip(internals.list_outputs(), internals.infer_type(data="float32")[1]))
        narrow = dtype == "float16" and not custom
        assert types["net_norm_fwd_output"] == (np.float16 if narrow else np.float32)

    net.export(str(tmp_path / "net"))
    model = mx.model.load_checkpoint(str(tmp_path / "net"), 0)
    symbol, weights, auxiliary = amp.convert_model(*model, **arguments)
    assert {array.dtype for array in auxiliary.values()} == {np.float32}
    executor = symbol.simple_bind(context(), data=x.shape, grad_req="null")
    executor.copy_params_from(weights, auxiliary)
    outputs += executor.forward(is_train=False, data=x)

    limit = {"float16": 2**-9, "bfloat16": 2**-6}[dtype]
    for y in outputs:
        assert relative_error(y.asnumpy(), expected) < limit
