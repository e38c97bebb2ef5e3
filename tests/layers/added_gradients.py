"""Prints how many results of random nets differ between the modes of hybridize: SEED COUNT DTYPE.

Each value has two uses, whose gradients are added. With MXNET_EXEC_INPLACE_GRAD_SUM_CAP=1 a
compiled graph lets the second operator add its gradient to that of the first, and without oneDNN
that operator may be ours. (The gradients of three uses are added in another order.)
"""

import sys

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from dtypes import numpy_dtype, rounded, values
from mxnet.gluon import nn
from runs import MODES, hybridize


class Net(nn.HybridBlock):
    def __init__(self, uses, activation):
        super().__init__(prefix="")
        self._uses = uses
        self.norm = sbn.SyncBatchNorm(in_channels=3, activation=activation, prefix="norm_")
        self.other = sbn.SyncBatchNorm(in_channels=3, prefix="other_")

    def hybrid_forward(self, F, x):
        functions = {
            "norm": self.norm,
            "other": self.other,
            "again": lambda x: self.norm(F.sigmoid(x)),
            "double": lambda x: x * 2,
            "tanh": F.tanh,
        }
        first, second = (functions[use](x) for use in self._uses)
        return first + second


def results(seed, mode, dtype):
    rng = np.random.default_rng(seed)
    uses = rng.permutation(["norm", rng.choice(["other", "again", "double", "tanh"])])
    net = Net(uses, rng.choice([None, "relu"]))
    net.initialize()
    net.cast(dtype)
    hybridize(net, mode)
    shape = (*rng.integers(2, 5, 1), 3, *rng.integers(1, 9, 2))
    x, dy = (
        mx.nd.array(rounded(rng.normal(size=shape), dtype), dtype=numpy_dtype(dtype))
        for _ in range(2)
    )
    x.attach_grad(rng.choice(["write", "add"]))
    trained = [net.norm.gamma, net.norm.beta]
    for parameter in trained:
        parameter.grad_req = str(rng.choice(["write", "add"]))
    for _ in range(2):
        with mx.autograd.record():
            y = net(x)
        y.backward(dy)
    return [values(a.asnumpy()) for a in (y, x.grad, *(each.grad() for each in trained))]


def main(first, count, dtype):
    different = 0
    for seed in range(int(first), int(first) + int(count)):
        expected, *others = (results(seed, mode, dtype) for mode in MODES)
        for mode, arrays in zip(list(MODES)[1:], others):
            if not all(map(np.array_equal, arrays, expected)):
                different += 1
                print(f"seed {seed}, {mode} differs")
    print(f"{dtype}: {different} differ")


if __name__ == "__main__":
    main(*sys.argv[1:])
