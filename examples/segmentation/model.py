"""The net and its loss: the file to change for a net of your own.

`get_model` returns a net, built and not initialized, and its loss. The net takes images
(N, 3, H, W), H and W multiples of `STRIDE`, and returns the class scores (N, classes, H, W), or a
list that begins with them and goes on with those of auxiliary heads.
"""

import operator

import mxnet as mx
from mxnet.gluon import nn

from common import nets

STRIDE = 8
GLUONCV = {
    "fcn": "FCN",
    "psp": "PSPNet",
    "deeplab": "DeepLabV3",
    "deeplabplus": "DeepLabV3Plus",
    "deeplabplusv3b": "DeepLabWV3Plus",
    "danet": "danet.DANet",
    "icnet": "icnet.ICNet",
    "fastscnn": "FastSCNN",
}
# gluoncv's heads do not fit resnet18 and resnet34.
BACKBONES = tuple("resnet50 resnet101 resnet152 resnest50 resnest101 resnest200 resnest269".split())
# These have one backbone, their own.
OWN_BACKBONE = ("deeplabplus", "deeplabplusv3b", "fastscnn")
MODELS = ("digits", *GLUONCV)


def get_model(options, classes):
    """(net, loss) of the command line."""
    name, size = options.model, options.size
    if name == "digits":
        return DigitsNet(classes), SegmentationLoss()
    from gluoncv import model_zoo

    settings = {"pretrained_base": options.pretrained, "crop_size": size, "base_size": size}
    if name not in OWN_BACKBONE:
        settings["backbone"] = options.backbone
    if options.backbone.startswith("resnest"):
        settings["input_size"] = size
    if name not in ("icnet", "danet"):
        settings["aux"] = options.aux_weight > 0
    with nets.downloading(options, f"--model {name}"):
        net = operator.attrgetter(GLUONCV[name])(model_zoo)(classes, **settings)
    # The cascade of ICNet comes in several sizes.
    weights = (1, 0.4, 0.4, 1) if name == "icnet" else (1, options.aux_weight, options.aux_weight)
    return net, SegmentationLoss(weights, resize=name == "icnet")


class SegmentationLoss(mx.gluon.HybridBlock):
    """The sum over the labelled pixels of the cross entropies of all outputs, weighted.

    The caller divides by the labelled pixels of the whole batch. So the devices' losses and
    gradients add up to those of the undivided batch. gluoncv's loss divides by each device's own
    pixels, and its gradient leaves the weights out.
    """

    def __init__(self, weights=(1,), resize=False):
        super().__init__()
        self._weights, self._resize = weights, resize

    def hybrid_forward(self, F, outputs, labels):
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        total, counted = 0, (labels >= 0).astype("float32")
        for weight, scores in zip(self._weights, outputs):
            if self._resize:
                like = F.expand_dims(labels, 1).astype("float32")
                scores = F.contrib.BilinearResize2D(scores, like, mode="like")
            scores = F.amp_cast(scores, dtype="float32")
            likelihood = F.pick(F.log_softmax(scores, axis=1), F.maximum(labels, 0), axis=1)
            total = total - weight * F.sum(likelihood * counted)
        return total


class DigitsNet(mx.gluon.HybridBlock):
    """A small encoder and decoder.

    Three stages of convolutions go down to H/8, transposed convolutions come up again, each joined
    by the encoder's features of that size.
    """

    def __init__(self, classes, channels=(32, 64, 128), norm_layer=nn.BatchNorm):
        super().__init__()

        def normalized(convolution):
            block = nn.HybridSequential()
            norm = norm_layer(in_channels=convolution._channels)
            block.add(convolution, norm, nn.Activation("relu"))
            return block

        # Without a bias, as the normalization removes any constant.
        def conv(inputs, outputs, stride=1):
            return normalized(nn.Conv2D(outputs, 3, stride, 1, in_channels=inputs, use_bias=False))

        def enlarge(inputs, outputs):
            return normalized(nn.Conv2DTranspose(outputs, 2, 2, in_channels=inputs, use_bias=False))

        low, middle, high = channels
        with self.name_scope():
            self.down1, self.down2, self.down3 = (nn.HybridSequential() for _ in channels)
            self.down1.add(conv(3, low, 2), conv(low, low))
            self.down2.add(conv(low, middle, 2), conv(middle, middle))
            self.down3.add(conv(middle, high, 2), conv(high, high), conv(high, high))
            self.up2, self.join2 = enlarge(high, middle), conv(2 * middle, middle)
            self.up1, self.join1 = enlarge(middle, low), conv(2 * low, low)
            self.scores = nn.Conv2DTranspose(classes, 2, 2, in_channels=low)

    def hybrid_forward(self, F, x):
        half = self.down1(x)
        quarter = self.down2(half)
        eighth = self.down3(quarter)
        x = self.join2(F.concat(self.up2(eighth), quarter, dim=1))
        x = self.join1(F.concat(self.up1(x), half, dim=1))
        return self.scores(x)
