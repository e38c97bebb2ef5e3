"""The least that trains a net of gluoncv's with synchronized batch normalization; copy it.

python examples/segmentation/minimal.py
"""

import gluon_syncbn as sbn
import gluoncv
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

BATCH, CLASSES, EPOCHS, SIZE = 4, 2, 2, 64
# All GPUs; or one CPU, as several contexts of a large net take much memory there.
devices = [mx.gpu(i) for i in range(mx.context.num_gpus())] or [mx.cpu()]

# Yours: images (N, 3, H, W) and for each pixel a class, or -1 for none. Here bright squares.
labels = np.zeros((11, SIZE, SIZE), "float32")
for i in range(len(labels)):
    labels[i, i : i + 30, 2 * i : 2 * i + 30] = 1
images = np.random.RandomState(0).normal(size=(len(labels), 3, SIZE, SIZE)) + labels[:, None]
data = gluon.data.ArrayDataset(images.astype("float32"), labels)
loader = gluon.data.DataLoader(data, BATCH, shuffle=True, last_batch="keep")

net = gluoncv.model_zoo.FCN(
    CLASSES, backbone="resnet50", aux=False, pretrained_base=False, base_size=SIZE, crop_size=SIZE
)
sbn.convert_sync_batchnorm(net)
# The head has initialized itself on the CPU. With pretrained_base=True so has the rest: call
# net.collect_params().reset_ctx(devices) instead.
net.initialize(mx.init.Xavier(), ctx=devices, force_reinit=True)
net.hybridize(static_alloc=True)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss(axis=1)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})

for epoch in range(EPOCHS):
    total = 0
    for x, y in loader:
        # The last batch is smaller: devices may get fewer images, or none.
        here = devices[: len(x)]
        xs, ys = (gluon.utils.split_and_load(part, here, even_split=False) for part in (x, y))
        with sbn.participants(here):
            with autograd.record():
                # For every device before you wait for any result.
                losses = [loss_of(net(x)[0], y, (y >= 0).expand_dims(1)) for x, y in zip(xs, ys)]
            autograd.backward(losses)
            trainer.step(len(x))
        total += sum(float(loss.sum().asscalar()) for loss in losses)
    print(f"epoch {epoch}: loss {total / len(data):.4f}")

net.save_parameters("fcn.params")  # One file, whatever the number of devices.
net.load_parameters("fcn.params", ctx=devices)
print(sbn.export(net, "fcn", input_shape=(1, 3, SIZE, SIZE)).symbol, "is for stock MXNet")
