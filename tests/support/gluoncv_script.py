"""Runs a script of gluoncv as it is, without GPUs and network: gluoncv_script.py SCRIPT ARGUMENTS

CPU contexts stand for GPUs, and backbones are random instead of downloaded. What differs between
one device and two with any layer is fixed: initial values, augmentation, dropout and the sampling
of R-CNN. With CONVERT in the environment the net is converted, as a user does where a script leaves
layers unsynchronized.
"""

import os
import runpy
import sys
import warnings
import zlib

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from mxnet.gluon import data, nn

warnings.simplefilter("ignore")  # gluoncv asks for newer and older packages than each other.

import gluoncv  # noqa: E402
from gluoncv.model_zoo import segbase  # noqa: E402

SIZE = 96  # Of images, where it is a part of the net.


def without_download(build, is_segmentation=False):
    def get_model(*args, **kwargs):
        if is_segmentation or "pretrained_base" in kwargs:
            kwargs["pretrained_base"] = False
        net = build(*args, **kwargs)
        if is_segmentation:  # As where a backbone is loaded, its parameters have values.
            net.initialize(force_reinit=True)
            net.base_forward(mx.nd.zeros((1, 3, SIZE, SIZE)))
        if hasattr(net, "short"):
            net.short = net.max_size = SIZE
        found = []
        net.apply(lambda block: found.append(isinstance(block, sbn.SyncBatchNorm)))
        print("layers of ours:", sum(found))
        if "CONVERT" in os.environ:
            sbn.convert_sync_batchnorm(net)
        return net

    return get_model


def initialize(parameter, finish=mx.gluon.Parameter._finish_deferred_init):
    """Draws values by the parameter's name, as the scripts build one more net for two devices."""
    is_pending = bool(parameter._deferred_init)
    finish(parameter)
    if is_pending and parameter.name.endswith(("weight", "beta", "bias")):
        generator = np.random.RandomState(zlib.crc32(parameter.name.encode()))
        bound = np.sqrt(3 / np.prod(parameter.shape[1:])) if len(parameter.shape) > 1 else 0
        with mx.autograd.pause():
            parameter.set_data(mx.nd.array(generator.uniform(-bound, bound, parameter.shape)))


def get_item(dataset, index, get=data.dataset._LazyTransformDataset.__getitem__):
    gluoncv.utils.random.seed(int(index))
    return get(dataset, index)


def iterate(loader, iterate=data.DataLoader.__iter__):
    gluoncv.utils.random.seed(7)
    return iterate(loader)


segbase.get_segmentation_model = without_download(segbase.get_segmentation_model, True)
gluoncv.model_zoo.get_model = without_download(gluoncv.model_zoo.get_model)
mx.gpu = mx.cpu
mx.gluon.Parameter._finish_deferred_init = initialize
data.dataset._LazyTransformDataset.__getitem__ = get_item
data.DataLoader.__iter__ = iterate
data.vision.datasets.check_sha1 = lambda *_: True  # These images are not CIFAR's.
nn.Dropout.hybrid_forward = lambda self, F, x: F.identity(x)
mx.sym.random.uniform = lambda low, high, shape: mx.sym.arange(*shape)

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
