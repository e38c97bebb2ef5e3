"""sbn.export(net, onnx=...): what goes to ONNX, and what is refused."""

import copy
import os

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import onnx
import pytest
from deploy_nets import conv_net, ready, residual, sequential
from gluon_syncbn.deploy import _onnx_model
from mxnet.gluon import nn
from mxnets import needs_onnx
from tolerances import ONNX, assert_same_bits

pytestmark = needs_onnx


@pytest.fixture
def export(tmp_path):
    def export(net, shape, **settings):
        model = tmp_path / "m.onnx"
        return sbn.export(net, tmp_path / "m", onnx=model, input_shape=shape, **settings)

    return export


@pytest.fixture
def assert_refused(export, tmp_path):
    """Asserts that the export ends with an error, and that no file is left."""

    def assert_refused(net, shape, match, **settings):
        with pytest.raises(sbn.ExportError, match=match):
            export(net, shape, **settings)
        assert os.listdir(tmp_path) == []

    return assert_refused


@pytest.mark.parametrize("fold", [False, True])
def test_blocks_that_are_called_several_times(export, fold):
    """Their nodes have one name, and ONNX identifies values by name."""
    conv = nn.Conv2D(3, 3, padding=1, in_channels=3)
    cell = sequential(conv, sbn.SyncBatchNorm(), nn.Activation("relu"))
    net = sequential(cell, cell, nn.MaxPool2D(), cell)
    ready(net, (1, 3, 8, 8))
    result = export(net, (1, 3, 8, 8), fold=fold)
    assert result.onnx_error < ONNX and len(result.left) == 3 * fold


def test_bfloat16_to_another_dtype(export):
    net = conv_net()
    ready(net, (2, 3, 6, 6))
    net.cast(np.dtype([("bfloat16", np.uint16)]))
    result = export(net, (2, 3, 6, 6), fold=True, dtype="float32")
    assert len(result.folded) == 1 and result.onnx_error < ONNX
    with pytest.raises(sbn.ExportError, match="give dtype='float32'"):
        export(net, (2, 3, 6, 6))


def test_one_operator_set_and_no_parameters_for_inputs(export):
    net = residual()
    ready(net, (2, 3, 16, 16))
    made = onnx.load(export(net, (2, 3, 16, 16)).onnx)
    assert [(entry.domain, entry.version) for entry in made.opset_import] == [("", 15)]
    [value] = made.graph.input
    assert value.name == "data"
    assert [d.dim_value for d in value.type.tensor_type.shape.dim] == [2, 3, 16, 16]
    assert made.ir_version == 8
    assert onnx.checker.DEFAULT_CONTEXT.opset_imports[""] == onnx.defs.onnx_opset_version()
    onnx.checker.check_model(made, full_check=True)


@pytest.mark.parametrize(
    "size, dtype",
    [((), "float32"), (1, "float32"), ((3, 4), "float16"), (4, "float32"), ((5, 2), "float32")]
    + [((7, 11), "float32")],
)
def test_adaptive_pooling(export, size, dtype):
    """With bins of one size, bins that share values, and more bins than values."""
    pool = nn.HybridLambda(lambda F, x: F.contrib.AdaptiveAvgPooling2D(x, output_size=size))
    net = sequential(nn.Conv2D(3, 1, in_channels=3), sbn.SyncBatchNorm(), pool)
    ready(net, (2, 3, 6, 8))
    before = copy.deepcopy(_onnx_model.load_onnx()[2].registry_)
    export(net, (2, 3, 6, 8), dtype=dtype)
    # MXNet's own exporter does not change.
    assert _onnx_model.load_onnx()[2].registry_ == before


@pytest.mark.parametrize("fold", [False, True])
def test_any_batch(export, fold):
    pool = nn.HybridLambda(lambda F, x: F.contrib.AdaptiveAvgPooling2D(x, output_size=(3, 2)))
    net = sequential(nn.Conv2D(4, 3), sbn.SyncBatchNorm(), sbn.SyncBatchNorm(axis=-1), pool)
    net.add(nn.Flatten(), nn.Dense(3), sbn.SyncBatchNorm())
    ready(net, (2, 3, 16, 16))
    result = export(net, (2, 3, 16, 16), fold=fold, any_batch=True)
    session = _onnx_model.load_onnx()[1].InferenceSession(result.onnx)
    for batch in (1, 2, 5):
        x = mx.nd.random.normal(shape=(batch, 3, 16, 16))
        (y,) = session.run(None, {"data": x.asnumpy()})
        expected = net(x).asnumpy()
        assert np.abs(y - expected).max() <= ONNX * np.abs(expected).max()
    assert session.get_inputs()[0].shape[1:] == [3, 16, 16]


def test_a_net_for_one_batch_size(assert_refused):
    net = nn.HybridLambda(lambda F, x: F.broadcast_add(x, F.ones((2, 6))))
    assert_refused(net, (2, 6), r"inputs of shape \(4, 6\)", any_batch=True)


def test_random_outputs_are_not_compared(assert_refused):
    """Training goes on with the same random numbers."""
    mx.random.seed(7)
    expected = mx.nd.random.uniform(shape=(2,)).asnumpy()
    mx.random.seed(7)
    noisy = nn.HybridLambda(lambda F, x: F.broadcast_add(x, F.random.uniform(shape=(1,))))
    assert_refused(noisy, (2, 3), "draws random numbers")
    assert_same_bits(mx.nd.random.uniform(shape=(2,)).asnumpy(), expected)


def test_operators_and_settings_that_onnx_lacks_are_named(assert_refused):
    unknown = nn.HybridLambda(lambda F, x: F.smooth_l1(F.sinh(F.smooth_l1(x))))
    net = conv_net(unknown)
    ready(net, (2, 3, 6, 6))
    assert_refused(net, (2, 3, 6, 6), r"^(?!.*Convolution).*: sinh, smooth_l1\.")


@pytest.mark.parametrize("seed", range(6))
def test_every_axis(export, seed):
    """MXNet's converter takes axis 1 only. Layers follow each other, and an output of the net."""
    rng = np.random.default_rng(seed)
    shape = tuple(map(int, rng.integers(2, 5, rng.integers(2, 6))))
    axes = rng.integers(-len(shape), len(shape), 3)
    kinds = rng.choice([nn.BatchNorm, sbn.SyncBatchNorm], 3)
    net = sequential(*(kind(axis=int(axis)) for kind, axis in zip(kinds, axes)))
    net.add(nn.Dense(4, flatten=False), sbn.SyncBatchNorm(axis=-1, activation="relu"))
    ready(net, shape, seed=seed)
    for fold in (False, True):
        result = export(net, shape, fold=fold)
        text = f"seed {seed}: {shape}, {axes}"
        assert result.onnx_error < ONNX and len(result.left) == 3 * fold, text


def test_a_wrong_converter_is_noticed(assert_refused, monkeypatch):
    # The first output is -1 for each input, like the class of a detector that finds nothing.
    two_heads = nn.HybridLambda(lambda F, x: (F.zeros_like(x) - 1, F.relu(x)))
    _, _, converter = _onnx_model.load_onnx()
    monkeypatch.setitem(converter.registry_[12], "relu", converter.registry_[12]["sigmoid"])
    assert_refused(two_heads, (2, 3, 16, 16), r"output 1 differs from the net's by \d")


def test_suppression_by_class_is_refused_where_no_box_would_show_it(assert_refused):
    detector = nn.HybridLambda(lambda F, x: F.contrib.box_nms(x, valid_thresh=1e6, id_index=0))
    net = sequential(sbn.SyncBatchNorm(), detector)
    [x], [y] = ready(net, (2, 3, 6))
    assert (y == -1).all()
    assert_refused(net, x.shape, "_contrib_box_nms")


def test_a_net_that_amplifies_rounding_is_refused(assert_refused):
    chaotic = nn.HybridLambda(lambda F, x: F.sin(1e5 * x))
    net = sequential(nn.Conv2D(4, 3, in_channels=64), chaotic)
    ready(net, (1, 64, 16, 16))
    assert_refused(net, (1, 64, 16, 16), r"by \S+ of .* the net amplifies rounding")
