"""Marks of tests of what older versions of MXNet lack."""

import os

import mxnet as mx
import pytest


def needs_mxnet(version, lack, unless=False):
    return pytest.mark.skipif(
        mx.__version__ < version and not unless, reason=f"MXNet {mx.__version__}: {lack}"
    )


needs_batch_norm_relu = needs_mxnet("1.8", "it has no nn.BatchNormReLU")
needs_onnx = needs_mxnet("1.9", "its converters to ONNX are too old")
needs_float16_amp = needs_mxnet(
    "1.9",
    "its amp_cast knows no float16 with oneDNN",
    unless=os.environ.get("MXNET_MKLDNN_ENABLED") == "0",
)


def with_batch_norm_relu(kinds):
    """Parameters of tests, one of which is nn.BatchNormReLU."""
    needed = {"nn.BatchNormReLU": needs_batch_norm_relu}
    return [pytest.param(kind, marks=needed.get(kind, ())) for kind in kinds]


with open("/proc/cpuinfo") as _file:
    HAS_BFLOAT16 = "avx512bw" in _file.read() and os.environ.get("MXNET_MKLDNN_ENABLED") != "0"


needs_bfloat16 = pytest.mark.skipif(
    not HAS_BFLOAT16, reason="MXNet has bfloat16 in oneDNN alone, on processors with AVX-512"
)
