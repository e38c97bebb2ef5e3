"""Train a small net in several processes. docs/distributed.md explains it.

python -m gluon_syncbn.launch -n 2 examples/distributed/train.py [FOLDER]
python -m gluon_syncbn.launch -n 2 --engine horovod examples/distributed/train.py [FOLDER]

Continues from the files of FOLDER (runs/kvstore or runs/horovod), if there are any. Each process
takes one GPU, or one CPU context.
"""

import os
import sys
from pathlib import Path

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

# BATCH: images of each process in a step.
EPOCHS, IMAGES, BATCH, SEED = 4, 200, 8, 1
horovod, gpus = "HOROVOD_RANK" in os.environ, mx.context.num_gpus()
folder = Path(*sys.argv[1:] or ["runs", "horovod" if horovod else "kvstore"])
if not horovod and "DMLC_ROLE" not in os.environ:
    sys.exit("Start it with: python -m gluon_syncbn.launch -n 2 examples/distributed/train.py")

# 1. Join the processes, before the first step of training.
if horovod:
    import horovod.mxnet as hvd

    hvd.init()
    store = sbn.distributed.HorovodReducer(hvd)
else:
    kv = mx.kv.create("dist_sync")
    store = sbn.distributed.KVStoreReducer(kv)
sbn.set_default_group(sbn.SyncGroup(store=store))
local_rank = hvd.local_rank() if horovod else int(os.environ.get("GLUON_SYNCBN_LOCAL_RANK", 0))
device = mx.gpu if gpus else mx.cpu
devices = [device(local_rank)]

# 2. The data, equal in every process: stripes in noise, to be told apart by their direction.
labels = np.arange(IMAGES) % 2
images = np.random.RandomState(SEED).normal(size=(IMAGES, 1, 16, 16)).astype("float32")
images += np.where(
    labels[:, None, None, None], np.sin(np.arange(16))[:, None], np.sin(np.arange(16))
)
data = gluon.data.ArrayDataset(images, labels)

# 3. The net, with equal parameters in every process.
mx.random.seed(SEED)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Conv2D(8, 3), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"))
net.add(gluon.nn.Conv2D(16, 3), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"))
net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(2))
sbn.convert_sync_batchnorm(net)
net.initialize(ctx=devices)
net(mx.nd.zeros((1, 1, 16, 16), ctx=devices[0]))  # Draws parameters whose shapes were not known.
mx.nd.waitall()  # A KVStore without our reducer may fail on weights that oneDNN still rearranges.
mx.random.seed(SEED + store.rank)  # Other numbers for dropout and augmentation.
net.hybridize(static_alloc=True)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

# 4. The Trainer.
optimizer = "sgd", {"learning_rate": 0.05, "momentum": 0.9}
if horovod:
    trainer = hvd.DistributedTrainer(net.collect_params(), *optimizer)
else:
    trainer = gluon.Trainer(net.collect_params(), *optimizer, kv, update_on_kvstore=False)

# 5. The files of the last epoch.
done = len(list(folder.glob("*.states")))
if done:
    net.load_parameters(str(folder / f"{done}.params"), ctx=devices)
    trainer.load_states(str(folder / f"{done}.states"))
if done >= EPOCHS and store.rank == 0:
    print(f"{folder} holds all {done} epochs: delete it to train again, or name another folder")

for epoch in range(done, EPOCHS):
    # 6. All draw the same order. Of `size` batches, each process takes one.
    order = np.random.RandomState(SEED + epoch).permutation(len(data))
    starts = range(store.rank * BATCH, len(data), store.size * BATCH)
    loader = gluon.data.DataLoader(data, batch_sampler=[order[i : i + BATCH] for i in starts])
    total = np.zeros(1)
    # 7. Some may have a batch more than others.
    for x, y in (steps := sbn.distributed.join(loader, trainer)):
        xs, ys = (gluon.utils.split_and_load(part, devices) for part in (x, y))
        with autograd.record():
            losses = [loss_of(net(x), y) for x, y in zip(xs, ys)]
        autograd.backward(losses)
        # 8. Divides by the samples of all processes. Horovod has divided by their number already.
        trainer.step(steps.batch_size / store.size if horovod else steps.batch_size)
        if not steps.absent:  # Else the batch is the last one again, which counts for nothing.
            total += sum(float(loss.sum().asscalar()) for loss in losses)
    total = store.all_reduce("loss", total)
    # 9. All have the same parameters, and one saves them.
    if store.rank == 0:
        print(f"epoch {epoch}: loss {total[0] / len(data):.4f}")
        folder.mkdir(parents=True, exist_ok=True)
        net.save_parameters(str(folder / f"{epoch + 1}.params"))
        # It gets its name once all is written, so that half a pair never counts.
        trainer.save_states(str(folder / "new"))
        os.replace(folder / "new", folder / f"{epoch + 1}.states")
