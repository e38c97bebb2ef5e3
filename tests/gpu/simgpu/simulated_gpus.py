"""After this import MXNet's own operators compute on simulated GPUs (see operators.cc)."""

import ctypes
import os
from pathlib import Path

import mxnet_compat  # noqa: F401
import mxnet as mx

LIBRARY = Path(mx.__file__).with_name("libsimgpu_operators.so")
EXIST = LIBRARY.exists()
# Whether the layer's kernels run on what cards.cc takes for real GPUs.
ON_CARDS = "SIMGPU_LIBRARY" in os.environ
if EXIST:
    ctypes.CDLL(str(LIBRARY))


def cuda(function):
    """A function of ptxsim.h, such as "calls", or its like of cards.cc."""
    path = os.environ.get("SIMGPU_LIBRARY") or LIBRARY.with_name("libcudart.so.11.0")
    prefix = "gluon_syncbn_cards" if ON_CARDS else "ptxsim"
    return getattr(ctypes.CDLL(str(path)), f"{prefix}_{function}")
