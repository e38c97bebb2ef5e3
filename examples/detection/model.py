"""gluoncv's detectors, with what their trainings need: the file to change for a net of your own.

A detector has a `net`, which takes images (N, 3, H, W) and in inference returns classes (N, K, 1),
scores (N, K, 1) and boxes (N, K, 4) in pixels, -1 where there is no object; and

- `sample(image, boxes)`: what one training sample holds; `batchify(samples)` makes arrays of them
- `count(parts)`: the divisor of the loss, from the arrays of each device
- `losses(parts)`: the losses of the devices, which add up to that of the undivided batch times the
  count. The net is called for every device before any result is waited for.
- `resize(image)`: the image in the size for inference.
"""

import functools
import math

import mxnet as mx
from gluoncv import model_zoo
from gluoncv.data import batchify
from gluoncv.data.transforms import image as image_transforms
from gluoncv.data.transforms import presets
from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import custom_faster_rcnn_fpn
from gluoncv.model_zoo.ssd.target import SSDTargetGenerator
from gluoncv.model_zoo.yolo.yolo_target import YOLOV3PrefetchTargetGenerator
from mxnet import autograd, gluon
from mxnet.gluon import nn

from common import nets
from common.files import InputError
from common.images import DEVIATION, MEAN


class SSD:
    """Liu et al., SSD: Single Shot MultiBox Detector, 2016. https://arxiv.org/abs/1512.02325"""

    # The layers whose strides are 8, 16 and 32.
    features = {
        **{f"mobilenet{width}": ("relu10", "relu22", "relu26") for width in ("0.5", "0.25", "1.0")},
        "resnet50_v1": ("stage2_activation3", "stage3_activation5", "stage4_activation2"),
    }
    backbones = tuple(features)
    # The anchors' sides at each level, as fractions of the image.
    sides = (0.1, 0.2, 0.37, 0.54, 0.71, 0.88, 1.05)

    def __init__(self, options, names, each):
        self._options, self._names = options, names
        self._loss = MultiBoxLoss()
        self._loss.hybridize(static_alloc=True)
        self.net = self._build(options.pretrained)
        probe = self._build(False)
        probe.initialize()
        with autograd.train_mode():
            self._anchors = probe(mx.nd.zeros((1, 3, options.size, options.size)))[2]
        self._targets = SSDTargetGenerator(negative_mining_ratio=-1)
        self._transform = augmentation(presets.ssd.SSDDefaultTrainTransform, options)
        self.batchify = batchify.Tuple(*[batchify.Stack()] * 3)
        self.resize = functools.partial(squared, options.size)

    def _build(self, pretrained):
        size, backbone = self._options.size, self._options.backbone
        suffix = "_fwd" if backbone.startswith("mobilenet") else "_output"
        features = [name + suffix for name in self.features[backbone]]
        levels = int(math.log2(size // 8)) + 1  # down to a map of one or two pixels
        levels = min(levels, len(self.sides) - 1)
        # fmt: off
        return model_zoo.SSD(
            backbone, size, features[:levels], [256] * (levels - len(features)),
            sizes=[size * side for side in self.sides[: levels + 1]],
            ratios=[[1, 2, 0.5]] + [[1, 2, 0.5, 3, 1 / 3]] * (levels - 1),
            steps=[8 * 2**level for level in range(levels)],
            classes=self._names, pretrained=pretrained,
        )
        # fmt: on

    def sample(self, image, boxes):
        image, boxes = self._transform(image, boxes)
        ends, classes = mx.nd.array(boxes[None, :, :4]), mx.nd.array(boxes[None, :, 4:5])
        classes, offsets, _ = self._targets(self._anchors, None, ends, classes)
        return image, classes[0], offsets[0]

    def count(self, parts):
        return sum(int((classes > 0).sum().asscalar()) for _, classes, _ in parts)

    def losses(self, parts):
        outputs = [self.net(images)[:2] for images, _, _ in parts]
        return [self._loss(*output, *part[1:]) for output, part in zip(outputs, parts)]


class MultiBoxLoss(gluon.HybridBlock):
    """The sum over the matched anchors and, for the classes, over three times as many others of
    each image, those with the highest loss.

    gluoncv's loss divides by the matches of this process alone, and waits for them.
    """

    def hybrid_forward(self, F, scores, offsets, classes, targets):
        matched = classes > 0
        loss = -F.pick(F.log_softmax(scores, axis=-1), F.relu(classes), axis=-1)
        rank = F.argsort(F.argsort(loss * (matched - 1), axis=1), axis=1)
        # Ranks are float32, whatever the loss is.
        wanted = 3 * F.sum(F.cast(matched, "float32"), axis=1, keepdims=True)
        loss = F.where(F.broadcast_lesser(rank, wanted), loss, loss * matched)
        distance = F.smooth_l1(offsets - targets, scalar=1)
        distance = F.broadcast_mul(distance, F.expand_dims(matched, axis=2))
        return F.sum(loss) + F.sum(distance)


class YOLOv3:
    """Redmon and Farhadi, YOLOv3: An Incremental Improvement, 2018.
    https://arxiv.org/abs/1804.02767"""

    backbones = ("mobilenet0.25", "mobilenet1.0", "darknet53")

    def __init__(self, options, names, each):
        build = functools.partial(
            model_zoo.get_model, f"yolo3_{options.backbone}_custom", classes=names
        )
        self.net, probe = build(pretrained_base=options.pretrained), build(pretrained_base=False)
        probe.initialize()
        self._images = mx.nd.zeros((1, 3, options.size, options.size))
        with autograd.train_mode():
            _, self._anchors, self._offsets, self._maps, *_ = probe(self._images)
        self._targets = YOLOV3PrefetchTargetGenerator(len(names))
        self._transform = augmentation(presets.yolo.YOLO3DefaultTrainTransform, options)
        stack = batchify.Stack()
        self.batchify = batchify.Tuple(*[stack] * 6, batchify.Pad(pad_val=-1))
        self.resize = functools.partial(squared, options.size)

    def sample(self, image, boxes):
        image, boxes = self._transform(image, boxes)
        ends, classes = mx.nd.array(boxes[None, :, :4]), mx.nd.array(boxes[None, :, 4:5])
        targets = self._targets(
            self._images, self._maps, self._anchors, self._offsets, ends, classes, None
        )
        return (image, *(target[0] for target in targets), ends[0])

    def count(self, parts):
        return sum(len(part[0]) for part in parts)

    def losses(self, parts):
        outputs = [self.net(images, ends, *targets) for images, *targets, ends in parts]
        return [sum(loss.sum() for loss in output) for output in outputs]


class FasterRCNN:
    """Ren et al., Faster R-CNN, 2015, https://arxiv.org/abs/1506.01497, with a feature pyramid:
    Lin et al., Feature Pyramid Networks, 2017, https://arxiv.org/abs/1612.03144."""

    backbones = ("resnet18_v1b", "resnet50_v1b", "resnet101_v1d")
    anchors, regions = 256, 128  # samples of each image

    def __init__(self, options, names, each):
        size, strides = options.size, (4, 8, 16, 32, 64)
        proposals = sum(3 * math.ceil(size / stride) ** 2 for stride in strides)
        # With nn.BatchNorm itself, gluoncv would freeze the normalization.
        # fmt: off
        self.net = custom_faster_rcnn_fpn(
            names, None, "custom", options.pretrained, options.backbone,
            functools.partial(nn.BatchNorm), {}, short=size, max_size=2 * size,
            min_stage=2, max_stage=6, nms_thresh=0.5, nms_topk=-1, post_nms=-1, roi_size=(7, 7),
            strides=strides, clip=4.14, rpn_channel=256, base_size=16,
            scales=(2, 4, 8, 16, 32), alloc_size=(384, 384), rpn_nms_thresh=0.7,
            rpn_train_pre_nms=12000, rpn_train_post_nms=min(2000, proposals),
            rpn_test_pre_nms=6000, rpn_test_post_nms=min(1000, proposals), rpn_min_size=1,
            per_device_batch_size=each, num_sample=self.regions, pos_iou_thresh=0.5, pos_ratio=0.25,
        )
        # fmt: on
        self.net.target_generator  # noqa: B018  It is made when it is first used.
        self.net.rpn.anchor_generator.initialize()
        self._transform = presets.rcnn.FasterRCNNDefaultTrainTransform(
            size, 2 * size, self.net, num_sample=self.anchors, ashape=384, multi_stage=True,
            flip_p=0.5 * options.augment,
        )  # fmt: skip
        self._batchify = batchify.FasterRCNNTrainBatchify(self.net)
        self._loss = RCNNLoss(self.regions, self.anchors)
        self._loss.hybridize(static_alloc=True)

    def batchify(self, samples):
        images, labels, *targets = self._batchify(samples)
        return [images, labels, *(target[0] for target in targets)]

    def sample(self, image, boxes):
        return self._transform(image, boxes)

    def resize(self, image):
        return image_transforms.resize_short_within(image, self.net.short, self.net.max_size)

    def count(self, parts):
        return sum(len(part[0]) for part in parts)

    def losses(self, parts):
        outputs = [
            self.net(images, labels[:, :, :4], labels[:, :, 4:5]) for images, labels, *_ in parts
        ]
        # scores, offsets, -, -, -, RPN's scores, RPN's offsets, -, classes, targets, masks, -
        outputs = [[output[k] for k in (0, 1, 5, 6, 8, 9, 10)] for output in outputs]
        return [self._loss(*output, *part[2:]) for output, part in zip(outputs, parts)]


class RCNNLoss(gluon.HybridBlock):
    """The sum of the losses of regions and of proposals (RPN), divided by the samples of each.

    As in the paper; gluoncv's script divides by each device's own number of samples and images.
    """

    def __init__(self, regions, anchors):
        super().__init__()
        self._regions, self._anchors = regions, anchors

    def hybrid_forward(
        self, F, scores, offsets, rpn_scores, rpn_offsets, classes, targets, masks, *rpn_targets
    ):
        rpn_classes, rpn_targets, rpn_masks = rpn_targets
        likelihood = F.pick(F.log_softmax(scores), F.relu(classes))
        regions = F.sum(masks * F.smooth_l1(offsets - targets, scalar=1))
        regions = regions - F.sum(likelihood * (classes >= 0))
        logits = F.squeeze(rpn_scores, axis=-1)
        entropy = F.relu(logits) - logits * (rpn_classes > 0)
        entropy = entropy + F.Activation(-F.abs(logits), "softrelu")
        proposals = F.sum(entropy * (rpn_classes >= 0))
        proposals = proposals + F.sum(rpn_masks * F.smooth_l1(rpn_offsets - rpn_targets, scalar=3))
        return regions / self._regions + proposals / self._anchors


MODELS = {"ssd": SSD, "yolo3": YOLOv3, "faster_rcnn": FasterRCNN}


def get_model(options, names, each=1):
    """The detector of the command line; `each`: the images for each device."""
    kind = MODELS[options.model]
    if options.backbone not in kind.backbones:
        raise InputError(
            f"--backbone is {options.backbone}, which --model {options.model} does not come with: "
            f"choose {', '.join(kind.backbones)}"
        )
    with nets.downloading(options, f"--backbone {options.backbone}"):
        return kind(options, names, each)


def augmentation(transform, options):
    """gluoncv's random colours, expansion, crop and flip, or the plain image in its size."""
    if options.augment:
        return transform(options.size, options.size)
    return presets.ssd.SSDDefaultValTransform(options.size, options.size)


def squared(size, image):
    return image_transforms.imresize(image, size, size, interp=9)


def tensor(image):
    """(3, H, W), normalized, of (H, W, 3) from 0 to 255."""
    image = mx.nd.image.to_tensor(image)
    return mx.nd.image.normalize(image, tuple(MEAN.flat), tuple(DEVIATION.flat))
