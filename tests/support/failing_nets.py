"""Random nets with operators that fail where a test says."""

import time

import gluon_syncbn as sbn
import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

# {(number of the operator, direction, device): what it does, once}
faults = {}
# In seconds.
SLEEP = 7.0


# In the error of `bad_like`.
BAD = "potrf failed"


def bad_like(x):
    """An array that will hold an error of MXNet's."""
    negative = mx.nd.linalg.potrf(-mx.nd.ones((1, 1), ctx=x.context))
    return mx.nd.broadcast_add(mx.nd.zeros_like(x), negative.reshape((1,) * x.ndim))


class _Fails(mx.operator.CustomOp):
    def __init__(self, number, device):
        super().__init__()
        self._number, self._device = number, device

    def _copy(self, direction, source, target, request):
        what = faults.pop((self._number, direction, self._device), None)
        if what == "raises":
            # MXNet keeps the exceptions of all custom operators in one variable. If another one
            # ends at that moment, it gets this, and the outputs here hold no error.
            raise ValueError("injected")
        if what == "writes":
            # That one cannot go astray.
            source = source + bad_like(source)
        if what == "sleeps":
            time.sleep(SLEEP)
        self.assign(target, request, source)

    def forward(self, is_train, req, in_data, out_data, aux):
        self._copy("Forward", in_data[0], out_data[0], req[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self._copy("Backward", out_grad[0], in_grad[0], req[0])


@mx.operator.register("fails_where_faults_say")
class _FailsProp(mx.operator.CustomOpProp):
    def __init__(self, number):
        super().__init__(need_top_grad=True)
        self._number = int(number)

    def create_operator(self, ctx, shapes, dtypes):
        # "cpu" for cpu(0).
        return _Fails(self._number, str(ctx))


class Net(gluon.HybridBlock):
    """Layers one after the other, some with a residual, some called twice, and operators that can
    fail around them."""

    def __init__(self, random, group, number=0):
        super().__init__(prefix=f"net{number}_")
        self._units, norms = [], []
        # The very first layer has no parameters: only what reads the data's gradient sees it.
        self._begins_bare = random.random() < 0.3
        for _ in range(random.integers(1, 4)):
            is_shared = norms and random.random() < 0.3
            affine = random.random() < 0.7
            self._units.append((len(norms) - bool(is_shared), random.random() < 0.4))
            if not is_shared:
                norms.append({"center": affine, "scale": affine})
        with self.name_scope():
            self.denses, self.norms = nn.HybridSequential(), nn.HybridSequential()
            for _ in self._units:
                self.denses.add(nn.Dense(4, in_units=4))
            for affine in norms:
                self.norms.add(sbn.SyncBatchNorm(in_channels=4, group=group, **affine))
            if self._begins_bare:
                self.first = sbn.SyncBatchNorm(
                    in_channels=4, group=group, center=False, scale=False
                )
            # Learns from what a layer that has failed gives it.
            self.head = nn.Dense(2, in_units=4, bias_initializer="ones")
        self.operators = range(100 * number, 100 * number + 2 * len(self._units))

    def hybrid_forward(self, F, x):
        def may_fail(x, number):
            number += self.operators.start
            return F.Custom(x, op_type="fails_where_faults_say", number=number)

        if self._begins_bare:
            x = self.first(x)
        for i, (norm, residual) in enumerate(self._units):
            y = may_fail(self.denses[i](x), 2 * i)
            y = may_fail(self.norms[norm](y), 2 * i + 1)
            x = F.tanh(y) + x if residual else F.tanh(y)
        return self.head(x)
