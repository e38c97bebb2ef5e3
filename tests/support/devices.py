"""The devices of the tests: CPU contexts, or simulated GPUs (make test-gpu-all)."""

import os
import threading

import mxnet_compat  # noqa: F401
import mxnet as mx

KIND = os.environ.get("GLUON_SYNCBN_TEST_DEVICES", "cpu")

if KIND == "gpu":

    class _Default(threading.local):
        value = mx.gpu(0)

    mx.Context._default_ctx = _Default()

    # MXNet loads parameters onto the CPU, whatever the default is.
    _imports = mx.gluon.SymbolBlock.imports
    mx.gluon.SymbolBlock.imports = staticmethod(
        lambda symbol, names, parameters=None, ctx=None, **options: _imports(
            symbol, names, parameters, ctx or mx.gpu(0), **options
        )
    )


def context(index=0):
    return mx.Context(KIND, index)
