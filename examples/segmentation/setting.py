"""What a run works with: devices, data sets, and a description of it all."""

import os
import platform

import mxnet as mx
import numpy as np

from data import DigitsOnPhotos, readable
from options import UsageError, default_devices, parse_devices, share_devices
from voc import VOCFolder

# Validation images are the same for every --seed, so that runs can be compared.
VALIDATION_SEED = 0


def find_contexts(options, resumed=None):
    """The MXNet contexts of --devices, those of all workers in the order of their ranks;
    `options.devices` then says them in full."""
    gpus = count_gpus()
    default = "gpu" if gpus else default_devices(options.workers, options.batch)
    kind, which = parse_devices(options.devices or default)
    if kind == "cpu":
        number = which
        options.devices = f"cpu:{which}"
    else:
        ids = list(range(gpus)) if which is None else which
        if not ids or max(ids) >= gpus:
            remedy = (
                f"name some of 0 to {gpus - 1}"
                if gpus
                else "see whether nvidia-smi works and mxnet-cu112 is installed in place of mxnet, "
                "or use --devices cpu:2"
            )
            raise UsageError(
                f"--devices is {options.devices}, but MXNet finds {gpus} GPUs: {remedy}"
            )
        number = len(ids)
        options.devices = "gpu:" + ",".join(map(str, ids))
    if options.batch < number:
        raise UsageError(
            f"--batch is {options.batch}, but each of the {number} devices "
            f"({options.devices}) needs an image: give --batch {number} or more, or fewer "
            "--devices"
        )
    share_devices(number, options)
    contexts = [mx.cpu(i) for i in range(number)] if kind == "cpu" else [mx.gpu(i) for i in ids]
    if resumed is not None:
        before = resumed.config["device_types"]
        if before != [context.device_type for context in contexts]:
            raise UsageError(
                f"--devices is {options.devices}, but the run to resume has {len(before)} of type "
                f"{before[0]}, and the same parameters as without interruption need the same"
            )
    return contexts


def count_gpus():
    try:
        return mx.context.num_gpus()
    except mx.MXNetError:
        return 0


def open_data(options, progress):
    """(training data, validation data); `progress(items, **settings)` shows a bar."""
    if options.data:
        with readable(f"--data {options.data}"):
            folder = VOCFolder(options.data, options.classes, progress)
        train = folder.train(options.seed, options.size, options.brightness)
        return train, folder.val(options.size, options.val_images)
    settings = {"size": options.size, "brightness": options.brightness}
    train = DigitsOnPhotos("train", options.seed, **settings)
    return train, DigitsOnPhotos("val", VALIDATION_SEED, images=options.val_images, **settings)


def describe(options, contexts, train_data):
    """All that decides the run, and the versions it ran with, as JSON can hold it."""
    arguments = {**vars(options), "output": str(options.output)}
    del arguments["checkpoint"], arguments["numbered"]
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mxnet": mx.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
    }
    if options.norm == "sync":
        import gluon_syncbn

        versions["gluon_syncbn"] = gluon_syncbn.__version__
    return {
        "arguments": arguments,
        "steps": options.steps,
        "device_types": [context.device_type for context in contexts],
        "data": {"fingerprint": train_data.fingerprint, "classes": list(train_data.names)},
        "versions": versions,
    }
