"""SyncBatchNorm as a Gluon user sees it: a drop-in for nn.BatchNorm."""

import copy
import functools
import inspect
import pickle
import re

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
import reference
from devices import context
from dtypes import numpy_dtype, rounded
from mxnet import autograd
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from runs import MODES, contexts, hybridize, prepare, run, shards
from tolerances import assert_close, assert_same_bits


def test_it_has_all_arguments_of_batch_norm_and_more():
    theirs = list(inspect.signature(nn.BatchNorm.__init__).parameters.values())
    ours = list(inspect.signature(sbn.SyncBatchNorm.__init__).parameters.values())
    expected = [(p.name, p.default) for p in theirs]
    expected[-1:-1] = [("num_devices", None), ("group", None), ("running_variance", "biased")]
    expected[-1:-1] = [("activation", None), ("slope", 0.01), ("inplace", False)]
    assert [(p.name, p.default) for p in ours] == expected


def test_parameters_have_the_names_and_settings_of_batch_norm_and_contrib():
    settings = dict(
        beta_initializer=mx.init.Constant(2),
        gamma_initializer=mx.init.Constant(3),
        running_mean_initializer=mx.init.Constant(4),
        running_variance_initializer=mx.init.Constant(5),
        momentum=0.8,
        epsilon=1e-3,
        center=False,
        use_global_stats=True,
        in_channels=7,
    )
    described = []
    for kind in (sbn.SyncBatchNorm, nn.BatchNorm, ContribSyncBatchNorm):
        more = {} if kind is nn.BatchNorm else {"num_devices": 1}
        layer = kind(prefix="bn_", **settings, **more)
        layer.initialize()
        described.append(
            [
                {name: layer._kwargs[name] for name in ("eps", "momentum", "use_global_stats")},
                *(
                    (p.name, p.shape, p.grad_req, np.dtype(p.dtype), p.data().asnumpy().tolist())
                    for p in layer.collect_params().values()
                ),
            ]
        )
    assert described[0] == described[1] == described[2]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_results_as_batch_norm_on_one_device(mode):
    x = np.random.default_rng(0).standard_normal((4, 3, 5, 5)).astype("float32")
    results = []
    for kind in (sbn.SyncBatchNorm, nn.BatchNorm):
        layer = prepare(kind(), contexts(1), "float32", MODES[mode], np.arange(1, 4), np.arange(3))
        results.append(run(layer, x, x[::-1].copy(), (4,), contexts(1), steps=3))
    for field in results[0]._fields:
        ours, theirs = (getattr(result, field) for result in results)
        # nn.BatchNorm sums in float32. The tolerance is for both, compared with the reference.
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4, err_msg=field)


@pytest.mark.parametrize(
    "dtype, cast_to, parameters, remedy",
    [
        ("float64", "float32", "float64", "float64"),
        ("float32", "float64", "float32", "float32"),
        ("float16", "float64", "float32", "float16"),
        ("bfloat16", "float64", "float32", "float32"),
    ],
)
def test_mixed_dtypes_say_what_to_cast(dtype, cast_to, parameters, remedy):
    layer = prepare(sbn.SyncBatchNorm(in_channels=3), contexts(1), cast_to)
    x = mx.nd.array(rounded(np.ones((2, 3)), dtype), dtype=numpy_dtype(dtype))
    words = (
        f"data of dtype {dtype}.*must be {parameters}.*one of them is {cast_to}.*"
        rf"cast\('{remedy}'\)"
    )
    with pytest.raises(mx.MXNetError, match=words):
        layer(x)
    layer.cast(remedy)
    assert layer(x).dtype == x.dtype


STATISTICS = "running_mean", "running_var"
INPLACE = {"activation": "leaky_relu", "inplace": True}


@pytest.mark.parametrize(
    "arguments, message",
    [
        *(({"num_devices": value}, None) for value in (0, 1.5, float("nan"), True)),
        *(({"in_channels": value}, None) for value in (-1, float("nan"), 3.5, True)),
        ({"running_variance": "Unbiased"}, None),
        *(({"epsilon": value}, None) for value in (-1, float("inf"))),
        *(({"momentum": value}, None) for value in (True, 1.5)),
        *(({"axis": value}, None) for value in (1.0, True, 5, -6)),
        *(({"slope": value}, None) for value in (-0.1, float("nan"))),
        ({"activation": "gelu"}, "activation is 'gelu': give None, 'relu' or 'leaky_relu'"),
        ({"axis": 64}, "Or in_channels=64, which contrib's and PyTorch's layers take first"),
        ({"inplace": True}, "inplace=True was given with activation=None"),
        ({"inplace": True, "activation": "relu"}, "inplace=True was given with activation='relu'"),
        ({**INPLACE, "slope": 0}, "slope=0"),
        ({**INPLACE, "epsilon": 0}, "epsilon=0"),
    ],
)
def test_invalid_arguments(arguments, message):
    if message is None:
        ((name, value),) = arguments.items()
        message = f"{name} is {value!r}: give "
    with pytest.raises(ValueError, match=re.escape(message)):
        sbn.SyncBatchNorm(**arguments)


FLAGS = "center", "scale", "use_global_stats", "inplace"


@pytest.mark.parametrize(
    "name, value",
    [
        *((name, value) for name in FLAGS for value in (np.ones(2), "False")),
        *((name, np.ones(2)) for name in ("activation", "running_variance")),
        *(("running_variance", value) for value in (None, True)),
        *((name, "1") for name in ("axis", "epsilon", "in_channels", "momentum", "num_devices")),
        *((name, None) for name in ("axis", "epsilon", "in_channels", "slope")),
        ("group", "all"),
    ],
)
def test_arguments_of_another_type(name, value):
    with pytest.raises(TypeError, match=re.escape(f"{name} is {value!r}: give ")):
        sbn.SyncBatchNorm(**{name: value})


@pytest.mark.parametrize("kind", ["SyncBatchNorm", "SyncBatchNormReLU", "VirtualBatchNorm"])
@pytest.mark.parametrize("seed", range(3))
def test_the_group_of_a_layer(kind, seed):
    """Whatever gives it one, except setting it."""
    rng = np.random.default_rng(seed)
    virtual = kind == "VirtualBatchNorm"
    make = functools.partial(getattr(sbn, kind), *[2] * virtual)
    own, default = sbn.SyncGroup(timeout=7) if rng.random() < 0.3 and not virtual else None, None
    layer = make(group=own)
    virtual = virtual and layer.group
    try:
        for how in rng.choice(["convert", "default", "copy", "set", "initialize"], 6):
            given = sbn.SyncGroup(timeout=float(rng.integers(1, 100)))
            if how == "convert":
                sbn.convert_sync_batchnorm(layer, group=given)
                own = given
            elif how == "default":
                sbn.set_default_group(given)
                default = given
            elif how == "copy":
                layer = copy.deepcopy(layer)
            elif how == "initialize":
                layer.initialize(ctx=contexts(2), force_reinit=True)
            else:
                with pytest.raises(
                    AttributeError, match=r"convert_sync_batchnorm\(net, group="
                ) as e:
                    layer.group = given
                assert str(given) in str(e.value)
            expected = repr(virtual or own or default or sbn.SyncGroup())
            for each in layer, pickle.loads(pickle.dumps(layer)):
                assert repr(each.group) == expected, (seed, how)
    finally:
        sbn.set_default_group(None)


@pytest.mark.parametrize(
    "argument, words",
    [
        (
            "num_device",
            "'num_device': give some of axis, .*, num_devices, .*, inplace, prefix, params.",
        ),
        ("ndev", "'ndev': give num_devices."),
        ("eps", "'eps': give epsilon."),
        ("num_features", "'num_features': give in_channels."),
        ("affine", "'affine': give center and scale."),
        ("track_running_stats", "'track_running_stats': leave it out. Inference uses running"),
    ],
)
def test_unknown_arguments(argument, words):
    for kind in (sbn.SyncBatchNorm, sbn.SyncBatchNormReLU):
        with pytest.raises(TypeError, match=f"{kind.__name__} has no argument {words}"):
            kind(**{argument: 1})


def test_pytorchs_momentum_is_noticed_once(caplog):
    for momentum in (0.0625, 0.0625, 0, 0.5, None):
        sbn.SyncBatchNorm(momentum=momentum)
    assert caplog.messages == [
        "momentum=0.0625 gives each new batch a weight of 0.9375 in the running statistics. In "
        "PyTorch momentum is the weight of the new batch: its 0.0625 is momentum=0.9375 here."
    ]


class Shared(mx.gluon.HybridBlock):
    """One head, including its normalization, on several levels of a pyramid."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2D(4, 3, padding=1)
        self.norm = sbn.SyncBatchNorm()

    def hybrid_forward(self, F, *levels):
        return tuple(self.norm(self.conv(level)) for level in levels)


@pytest.mark.parametrize("mode", MODES)
def test_one_layer_in_several_places_with_several_shapes(mode):
    """Each call has separate statistics, and the gradients of all calls are added."""
    generator = np.random.default_rng(0)
    whole = [generator.standard_normal((4, 3, n, n)).astype("float32") for n in (16, 8, 4, 8, 2)]
    results = []
    for sizes in ((4,), (1, 3), (2, 1, 1)):
        devices = contexts(len(sizes))
        mx.random.seed(3)
        net = Shared()
        net.initialize(mx.init.Xavier(), ctx=devices)
        hybridize(net, mode)
        levels = [shards(level, sizes, devices) for level in whole]
        for _ in range(3):
            with autograd.record():
                outputs = [net(*inputs) for inputs in zip(*levels)]
                losses = [sum((y * y * y).sum() for y in ys) for ys in outputs]
            autograd.backward(losses)
        arrays = [np.concatenate([y.asnumpy() for y in parts]) for parts in zip(*outputs)]
        arrays += [getattr(net.norm, name).data().asnumpy() for name in STATISTICS]
        gradient = sum(array.asnumpy().astype("float64") for array in net.norm.gamma.list_grad())
        results.append((arrays, gradient))
        # The last bits of the convolution depend on its batch size.
        for array, expected in zip(arrays, results[0][0]):
            assert_close(array, expected, "float32")
        np.testing.assert_allclose(gradient, results[0][1], rtol=1e-4, atol=1e-3)


class TwoPlaces(mx.gluon.HybridBlock):
    """One layer twice: after a branch that is slow for large data, and directly on the input."""

    def __init__(self):
        super().__init__()
        self.norm = sbn.SyncBatchNorm(in_channels=4)

    def hybrid_forward(self, F, large, small, other):
        after_branch = self.norm(F.slice_axis(F.sin(large), axis=2, begin=0, end=1))
        # Uses the buffers that would otherwise happen to make MXNet order the two calls.
        for _ in range(20):
            other = F.sin(other)
        return after_branch, other, self.norm(small)


def test_nodes_of_one_layer_with_static_shape():
    """MXNet alone would keep neither their order nor that of a reader of running statistics."""
    generator = np.random.default_rng(0)
    # The first device reaches the first node long after it could reach the second.
    large = [generator.standard_normal((2, 4, rows, 6)).astype("float32") for rows in (40000, 4)]
    small = [generator.standard_normal((2, 4, 1, 6)).astype("float32") + 10 for _ in range(2)]
    ones = np.ones(4)
    expected = [
        reference.forward(np.concatenate(whole), ones, 0 * ones)
        for whole in ([np.sin(part)[:, :, :1] for part in large], small)
    ]
    net = TwoPlaces()
    net.initialize(ctx=contexts(2))
    net.hybridize(static_alloc=True, static_shape=True, forward_bulk_size=1)
    running_mean = 0 * ones
    for _ in range(20):
        inputs = [
            [mx.nd.array(x, ctx=device) for x in (large[i], small[i], np.ones((1, 8)))]
            for i, device in enumerate(contexts(2))
        ]
        for x in sum(inputs, []):
            x.attach_grad()
        mx.nd.waitall()
        with autograd.record():
            outputs = [net(*arrays) for arrays in inputs]
        for each in expected:
            running_mean = 0.9 * running_mean + 0.1 * each.mean
        for array in net.norm.running_mean.list_data():
            np.testing.assert_allclose(array.asnumpy(), running_mean, atol=1e-4)
        for place, each in zip((0, 2), expected):
            result = np.concatenate([output[place].asnumpy() for output in outputs])
            np.testing.assert_allclose(result, each.y.astype("float64"), atol=1e-4)


@pytest.mark.cpu_only("these are kinds of CPU memory")
@pytest.mark.parametrize("kind", ["cpu_shared", "cpu_pinned"])
def test_data_in_other_memory_of_the_device(kind):
    """The workers of a DataLoader return arrays on cpu_shared(0)."""
    layer = prepare(sbn.SyncBatchNorm(in_channels=3), contexts(2))
    x = mx.nd.random.normal(shape=(4, 3))
    other = x.as_in_context(mx.Context(kind, 1))
    with autograd.record():
        ys = [layer(x.as_in_context(context(0))), layer(other)]
    autograd.backward(ys)
    assert ys[1].context == context(1)
    assert_same_bits(ys[0].asnumpy(), ys[1].asnumpy())
    with pytest.raises(ValueError, match="on cpu_shared"):
        layer(x.as_in_context(mx.Context("cpu_shared", 5)))


def test_backward_uses_the_mode_of_its_forward():
    """And not the train_mode of autograd.backward."""
    x = np.random.default_rng(0).standard_normal((4, 3)).astype("float32")
    gradients = []
    for train_mode in (True, False):
        layer = prepare(sbn.SyncBatchNorm(), contexts(1))
        array = mx.nd.array(x)
        array.attach_grad()
        with autograd.record():
            y = layer(array)
        y.backward(mx.nd.array(x**2), train_mode=train_mode)
        gradients.append(array.grad.asnumpy())
    assert_same_bits(gradients[1], gradients[0])


def node_with(**attributes):
    """A node of the operator, as in an edited file."""
    inputs = (mx.sym.var(name) for name in ("x", "gamma", "beta", "mean", "var"))
    return mx.sym.Custom(*inputs, op_type="GluonSyncBatchNorm", **attributes)


@pytest.mark.parametrize(
    "attribute, words",
    [
        ({"epsilon": "small"}, "epsilon=small: it must be a number"),
        ({"fix_gamma": "yes"}, "fix_gamma=yes: it must be True or False"),
        ({"sharpness": 3}, "the unknown attribute sharpness=3: .*another version"),
    ],
)
def test_invalid_attributes_are_an_error(attribute, words):
    with pytest.raises(mx.MXNetError, match=words):
        node_with(**attribute).infer_shape(x=(2, 3))


def test_every_node_may_have_attributes_of_mxnet():
    with mx.AttrScope(ctx_group="first", lr_mult="2", __note__="mine"):
        node = node_with()
    assert mx.sym.load_json(node.tojson()).infer_shape(x=(2, 3))[1][0] == (2, 3)
