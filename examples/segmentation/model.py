"""A small encoder-decoder network for segmentation, with normalization of the caller's choice."""

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

STRIDE = 8  # three stages halve the image: its sides must be multiples of this


class _ConvNormRelu(nn.HybridSequential):
    """Convolution, normalization, ReLU; `transposed` doubles the size, `stride=2` halves it."""

    def __init__(self, inputs, outputs, norm_layer, norm_kwargs, stride=1, transposed=False):
        super().__init__()
        # The normalization that follows removes any constant, so a bias would learn nothing.
        with self.name_scope():
            if transposed:
                self.add(nn.Conv2DTranspose(outputs, 2, 2, in_channels=inputs, use_bias=False))
            else:
                self.add(nn.Conv2D(outputs, 3, stride, 1, in_channels=inputs, use_bias=False))
            self.add(norm_layer(in_channels=outputs, **norm_kwargs))
            self.add(nn.Activation("relu"))


class SegmentationNet(mx.gluon.HybridBlock):
    """Images (N, 3, H, W) to class scores (N, classes, H, W); H and W multiples of 8.

    Three stages of convolutions go down to H/8, transposed convolutions come up again, each joined
    by the encoder's features of that size. As in gluoncv, `norm_layer` is the class of the
    normalization layer and `norm_kwargs` its arguments.
    """

    def __init__(self, classes, norm_layer=nn.BatchNorm, norm_kwargs=None, channels=(32, 64, 128)):
        super().__init__()
        norm = (norm_layer, norm_kwargs or {})
        low, middle, high = channels
        with self.name_scope():
            self.down1 = self._stage([(3, low, 2), (low, low, 1)], norm)
            self.down2 = self._stage([(low, middle, 2), (middle, middle, 1)], norm)
            self.down3 = self._stage([(middle, high, 2), (high, high, 1), (high, high, 1)], norm)
            self.up2 = _ConvNormRelu(high, middle, *norm, transposed=True)
            self.join2 = _ConvNormRelu(2 * middle, middle, *norm)
            self.up1 = _ConvNormRelu(middle, low, *norm, transposed=True)
            self.join1 = _ConvNormRelu(2 * low, low, *norm)
            self.scores = nn.Conv2DTranspose(classes, 2, 2, in_channels=low)

    @staticmethod
    def _stage(convolutions, norm):
        stage = nn.HybridSequential()
        for inputs, outputs, stride in convolutions:
            stage.add(_ConvNormRelu(inputs, outputs, *norm, stride=stride))
        return stage

    def hybrid_forward(self, F, x):
        half = self.down1(x)
        quarter = self.down2(half)
        eighth = self.down3(quarter)
        x = self.join2(F.concat(self.up2(eighth), quarter, dim=1))
        x = self.join1(F.concat(self.up1(x), half, dim=1))
        return self.scores(x)


class SegmentationLoss(mx.gluon.HybridBlock):
    """The sum of the weighted cross entropies of scores (N, C, H, W) at labels (N, H, W).

    The caller divides the weights by their sum over the whole batch. The devices' losses, and so
    their gradients, then add up to those of the undivided batch however it was split.
    """

    def hybrid_forward(self, F, scores, label, weight):
        likelihood = F.pick(F.log_softmax(scores, axis=1), label, axis=1)
        return -F.sum(likelihood * weight)


class SeededHeNormal(mx.init.Initializer):
    """He's initialization, drawn from NumPy.

    MXNet's own generators are dealt out in turn, so what one yields after a seed depends on all
    that ran before in the process; these numbers depend on the seed alone.
    """

    def __init__(self, seed):
        super().__init__()
        self._rng = np.random.default_rng((seed, 0))

    def _init_weight(self, name, arr):
        # Conv2D holds (out, in, kh, kw), Conv2DTranspose (in, out, kh, kw) with kh = stride, where
        # each output pixel sees every input channel once.
        fan_in = arr.shape[0] if arr.shape[2] == 2 else np.prod(arr.shape[1:])
        arr[:] = self._rng.normal(0, (2 / fan_in) ** 0.5, arr.shape)
