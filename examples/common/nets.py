"""The initial parameters of nets."""

import contextlib
import warnings

import mxnet as mx

from common.files import InputError

# MXNet gives this warning for the inputs of graphs, which gluoncv's detectors contain.
warnings.filterwarnings("ignore", "Cannot decide type")


@contextlib.contextmanager
def downloading(options, what):
    """While gluoncv builds a net: says what to do if pretrained weights cannot be had."""
    try:
        yield
    except Exception as error:
        if not options.pretrained:
            raise
        raise InputError(
            f"the pretrained weights for {what} cannot be had ({type(error).__name__}: "
            f"{str(error)[:200]}): connect to the network, put them into ~/.mxnet/models, or leave "
            "--pretrained out"
        ) from None


def initialize(net, contexts, pretrained=False):
    """Give the net its initial parameters, on the devices."""
    if pretrained:
        net.initialize(HeNormal())  # what was not loaded
        net.collect_params().reset_ctx(contexts)
    else:
        # gluoncv's constructors have initialized parts, on one device.
        net.initialize(HeNormal(), ctx=contexts, force_reinit=True)


@mx.init.register
class HeNormal(mx.init.Xavier):
    """He et al., 2015. https://arxiv.org/abs/1502.01852

    gluoncv builds parts of its nets as graphs, whose vectors MXNet initializes with it too.
    """

    def __init__(self):
        super().__init__(rnd_type="gaussian", factor_type="in", magnitude=2)

    def _init_weight(self, name, array):
        if array.ndim > 1:
            super()._init_weight(name, array)
        else:
            array[:] = 1 if name.endswith(("gamma", "var")) else 0
