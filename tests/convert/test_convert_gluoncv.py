"""The conversion of gluoncv's models: segmentation, detection, pose, video, classification.

They run in their own processes, as gluoncv changes how Pillow reads damaged images.
"""

import collections
import gc
import json
import os
import re
import sys
import warnings

import gluon_syncbn as sbn
import programs
import pytest
from gluon_syncbn import convert_sync_batchnorm, revert_sync_batchnorm
from gluon_syncbn.graph.blocks import BATCH_NORMS
from mxnet import gluon

pytestmark = pytest.mark.long

# Nets that hold their layers in different ways, as small as possible, and the number of layers.
LAYERS = {
    # Segmentation
    "fcn_resnet50_voc": 57,
    "deeplab_v3_plus_xception": 142,
    "icnet_resnet50_citys": 69,
    "fastscnn_citys": 45,
    "hrnet_w18_small_v1_s": 72,
    # Detection; SSD on ResNet v1 and MobileNet and all FPN detectors have a SymbolBlock
    "ssd_300_mobilenet0.25_voc": 35,
    "ssd_512_resnet18_v1_voc": 28,
    "yolo3_mobilenet0.25_voc": 47,
    "faster_rcnn_fpn_resnet50_v1b_coco": 53,
    "mask_rcnn_fpn_syncbn_resnet18_v1b_coco": 33,
    "center_net_resnet18_v1b_dcnv2_voc": 26,
    # Pose, depth, tracking, video
    "alpha_pose_resnet101_v1b_coco": 106,
    "monodepth2_resnet18_kitti_mono_640x192": 20,
    "siamrpn_alexnet_v2_otb15": 11,
    "i3d_nl5_resnet50_v1_kinetics400": 58,
    "slowfast_4x16_resnet50_kinetics400": 110,
    # Classification
    "resnet18_v2": 19,
    "resnest14": 23,
    "densenet121": 121,
    "nasnet_4_1056": 194,
    "residualattentionnet56": 107,
    # Without any
    "ssd_300_vgg16_atrous_voc": 0,
}
STOCK_OPERATORS = {"BatchNorm", "_contrib_SyncBatchNorm", "_contrib_BatchNormWithReLU"}
# What is fused into how many layers with fuse=True.
FUSED = {
    "resnet18_v1b": {"relu": 9, "residual + relu": 8, "residual of another": 3},
    "psp_resnet50_ade": {"relu": 41, "residual + relu": 16, "residual of another": 4},
    "yolo3_mobilenet0.25_voc": {"relu": 27, "leaky_relu": 20},
    "ssd_512_resnet18_v1_voc": {"relu": 17, "residual + relu": 8, "residual of another": 3},
    "faster_rcnn_fpn_resnet50_v1b_coco": {
        "relu": 33,
        "residual + relu": 16,
        "residual of another": 4,
    },
    "densenet121": {"relu": 121},
    "mobilenetv2_1.0": {
        "residual": 10,
        "followed by clip": 35,
        "followed by Convolution": 2,
        "2 consumers": 5,
    },
}


def build(name, **settings):
    with warnings.catch_warnings():
        # gluoncv asks for newer and older packages than each other.
        warnings.simplefilter("ignore")
        from gluoncv.model_zoo import deeplabv3_plus, get_model
    if name == "deeplab_v3_plus_xception":
        return deeplabv3_plus.get_deeplab_plus(backbone="xception", pretrained_base=False)
    try:
        return get_model(name, pretrained=False, pretrained_base=False, **settings)
    except TypeError:
        return get_model(name, pretrained=False, **settings)


def anatomy(net):
    """[(path, identity, class) of each block], and the graphs of the SymbolBlocks."""
    blocks, graphs = [], []

    def visit(path, block):
        blocks.append((path, id(block), type(block)))
        if isinstance(block, gluon.SymbolBlock):
            graphs.append(block._cached_graph[1].tojson())
        for name, child in block._children.items():
            visit(f"{path}.{name}", child)

    visit("", net)
    return blocks, graphs


def count_of(net):
    """The result of converting and reverting a net."""
    before, parameters = anatomy(net), list(net.collect_params().items())
    _, there = convert_sync_batchnorm(net, return_report=True)
    blocks, graphs = anatomy(net)
    nodes = [node["op"] for graph in graphs for node in json.loads(graph)["nodes"]]
    left = [kind.__name__ for *_, kind in blocks if issubclass(kind, BATCH_NORMS)]
    left = [name for name in left if name != "SyncBatchNorm"]
    left += [operator for operator in nodes if operator in STOCK_OPERATORS]
    # Blocks may be in several places.
    ours = {number for _, number, kind in blocks if kind is sbn.SyncBatchNorm}
    same = list(net.collect_params().items()) == parameters
    _, back = revert_sync_batchnorm(net, return_report=True)
    same = same and list(net.collect_params().items()) == parameters
    names = [name for name, _ in parameters]
    return {
        "replaced": len(there.replaced),
        "synchronized": len(ours) + nodes.count("Custom"),
        "refused": len(there.refused) + len(back.refused),
        "left": left,
        "running means": sum(n.endswith(("running_mean", "moving_mean")) for n in names),
        "reverted": len(back.replaced),
        "same parameters": same,
        "same anatomy": anatomy(net) == before,
    }


def fused_in(name):
    """{what was fused, or why not: the number of layers}."""
    _, report = convert_sync_batchnorm(build(name), fuse=True, return_report=True)
    reasons = [
        re.sub("^(it is|its output has|its output is the) ", "", entry.why)
        for entry in report.not_fused
    ]
    return dict(collections.Counter([entry.after for entry in report.fused] + reasons))


def main(task, *names):
    if task == "fuse":
        for name in names:
            result = fused_in(name)
            assert result == FUSED[name], f"{name}: {result}"
        return
    result = {}
    for name in names:
        result[name] = count_of(build(name))
        gc.collect()
    print(json.dumps(result))


def child(*arguments):
    environment = {**os.environ, "MXNET_CPU_TEMP_COPY": "512"}
    done = programs.run([__file__, *arguments], seconds=280, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def counts():
    return json.loads(child("count", *LAYERS).splitlines()[-1])


@pytest.mark.parametrize("name, expected", LAYERS.items())
def test_every_layer_there_and_back(name, expected, counts):
    assert counts[name] == {
        "replaced": expected,
        "synchronized": expected,
        "refused": 0,
        "left": [],
        "running means": expected,
        "reverted": expected,
        "same parameters": True,
        "same anatomy": True,
    }


def test_what_is_fused():
    child("fuse", *FUSED)


if __name__ == "__main__":
    main(*sys.argv[1:])
