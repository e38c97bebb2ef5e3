"""freeze and unfreeze, compared with layers that were made with use_global_stats."""

import functools

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
import pytest
from devices import context
from mxnet import autograd
from mxnet.gluon import SymbolBlock, nn
from runs import MODES
from tolerances import assert_same_bits

KINDS = [sbn.SyncBatchNorm, nn.BatchNorm, functools.partial(sbn.VirtualBatchNorm, 2)]


class Net(nn.HybridSequential):
    """Random layers of batch normalization, some in blocks of their own, some called twice."""

    def __init__(self, seed, frozen=frozenset()):
        super().__init__(prefix="net_")
        rng = np.random.default_rng(seed)
        self.number = 0
        with self.name_scope():
            for _ in range(rng.integers(1, 4)):
                self.add(self.some(rng, frozen))

    def some(self, rng, frozen):
        block = nn.HybridSequential()
        for _ in range(rng.integers(1, 4)):
            if rng.random() < 0.3:
                block.add(nn.Dense(3, flatten=False, in_units=3))
            settings = {"use_global_stats": self.number in frozen, "in_channels": 3}
            settings["scale"] = bool(rng.random() < 0.7)
            block.add(
                KINDS[rng.integers(len(KINDS))](axis=-1, prefix=f"norm{self.number}_", **settings)
            )
            self.number += 1
        return block


def norms(net):
    found = []
    net.apply(lambda block: found.append(block) if isinstance(block, nn.BatchNorm) else None)
    return found


def prepared(net, mode=None):
    net.initialize(ctx=context())
    if mode is not None:
        net.hybridize(**mode)
    return with_values(net)


def with_values(net):
    """The net with the parameters of before all steps."""
    rng = np.random.default_rng(0)
    for name, parameter in sorted(net.collect_params().items()):
        low = 0.5 if name.endswith("var") else -1
        parameter.set_data(mx.nd.array(rng.uniform(low, 2, parameter.shape)))
    net.collect_params().zero_grad()
    return net


def step(net, x):
    """y, dx, gradients and running statistics of a step in training."""
    x = mx.nd.array(x, ctx=context())
    x.attach_grad()
    with autograd.record():
        y = net(x)
        loss = (y * y).sum()
    loss.backward()
    mx.nd.waitall()
    found = [y.asnumpy(), x.grad.asnumpy()]
    for _, parameter in sorted(net.collect_params().items()):
        found.append(parameter.data().asnumpy())
        if parameter.grad_req != "null":
            found.append(parameter.grad().asnumpy())
    return found


def assert_same(a, b, text):
    assert len(a) == len(b)
    for i, (one, other) in enumerate(zip(a, b)):
        assert_same_bits(one, other, f"{text}, {i}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
def test_random_nets_are_those_made_with_use_global_stats(seed, mode):
    """After random calls of freeze and unfreeze on parts of a net, compiled or not."""
    rng = np.random.default_rng(100 + seed)
    net = prepared(Net(seed), MODES[mode])
    x = rng.normal(1, 2, (4, 2, 3))
    step(net, x)
    frozen = set()
    for _ in range(4):
        some = [i for i in range(net.number) if rng.random() < 0.5]
        freezes = bool(rng.random() < 0.6)
        changed = set(some) - frozen if freezes else set(some) & frozen
        function = sbn.freeze if freezes else sbn.unfreeze
        if some:
            assert function([norms(net)[i] for i in some]) == len(changed)
        frozen = frozen | changed if freezes else frozen - changed
        expected = prepared(Net(seed, frozen), MODES[mode])
        what = f"seed {seed}, frozen {sorted(frozen)}"
        assert_same(step(with_values(net), x), step(expected, x), what)


def test_gamma_that_an_operator_computes():
    """It is no parameter, so freezing adds none and leaves only beta to `affine`."""
    gamma = mx.sym.Reshape(mx.sym.var("g"), shape=(3,), name="computed")
    y = mx.sym.BatchNorm(mx.sym.var("data"), gamma=gamma, fix_gamma=False, name="norm")
    net = SymbolBlock(y, [mx.sym.var("data")])
    before = list(net.params)
    assert sbn.freeze(net, affine=True) == 1
    assert list(net.params) == before
    assert net.params["norm_beta"].grad_req == "null" and net.params["g"].grad_req == "write"
    assert sbn.unfreeze(net) == 1
    assert net.params["norm_beta"].grad_req == "write"


def test_affine_restores_grad_req():
    net = prepared(Net(1))
    before = {name: parameter.grad_req for name, parameter in net.collect_params().items()}
    sbn.freeze(net, affine=True)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    values = {n: p.data().asnumpy() for n, p in net.collect_params().items() if "norm" in n}
    step(net, np.ones((4, 2, 3)))
    trainer.step(1)
    for name, value in values.items():
        np.testing.assert_array_equal(net.collect_params()[name].data().asnumpy(), value)
    sbn.unfreeze(net)
    assert before == {name: parameter.grad_req for name, parameter in net.collect_params().items()}
