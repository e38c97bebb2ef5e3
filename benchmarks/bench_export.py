"""Latency of exported nets: unfolded, folded, and in ONNX Runtime; see README.md.

    python benchmarks/bench_export.py [--rounds N] [NAME ...]

Measures all kinds of a net in turn, so that other load affects them equally, with a batch of one
image. The result is the fastest round, as disturbances only make a round longer.
"""

import argparse
import os
import tempfile
import time
import warnings

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np

SIDE = {"resnet18_v1": 224, "resnet50_v1b": 224, "mobilenet1.0": 224, "fcn_resnet50_voc": 256}
KINDS = ("training net", "unfolded", "folded", "ONNX, unfolded", "ONNX, folded")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(SIDE), help=f"from {', '.join(SIDE)}")
    parser.add_argument("--rounds", type=int, default=30, help="rounds (%(default)s)")
    parser.add_argument("--side", type=int, help="size of the images (224; 256 for segmentation)")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(SIDE))
    if unknown:
        parser.error(f"{unknown[0]} is unknown: choose from {', '.join(SIDE)}")
    for name, number in (("--rounds", options.rounds), ("--side", options.side)):
        if number is not None and number < 1:
            parser.error(f"{name} is {number}: give a whole number above 0")
    warnings.simplefilter("ignore")
    print(f"Milliseconds for one image, {len(os.sched_getaffinity(0))} cores.\n")
    print(f"| net | {' | '.join(KINDS)} |\n|{' --- |' * (len(KINDS) + 1)}")
    for name in options.names:
        side = options.side or SIDE[name]
        with tempfile.TemporaryDirectory() as folder:
            times = measure(name, side, folder, options.rounds)
        print(f"| {name}, {side}x{side} | {' | '.join(f'{t:.1f}' for t in times)} |", flush=True)


def measure(name, side, folder, rounds):
    from gluoncv.model_zoo import get_model

    options = {"crop_size": side, "pretrained_base": False} if name.startswith("fcn") else {}
    net = sbn.convert_sync_batchnorm(get_model(name, **options))
    net.initialize(mx.init.Xavier(), force_reinit=True)
    x = np.random.default_rng(0).standard_normal((1, 3, side, side)).astype(np.float32)
    net(mx.nd.array(x))
    net.hybridize(static_alloc=True)
    for kind, fold in (("plain", False), ("folded", True)):
        prefix = f"{folder}/{kind}"
        sbn.export(net, prefix, fold=fold, onnx=f"{prefix}.onnx", input_shape=x.shape)
    calls = [mxnet_call(net, x)]
    for kind in ("plain", "folded"):
        prefix = f"{folder}/{kind}"
        files = f"{prefix}-symbol.json", "data", f"{prefix}-0000.params"
        block = mx.gluon.SymbolBlock.imports(*files)
        block.hybridize(static_alloc=True)
        calls.append(mxnet_call(block, x))
    calls += [onnx_call(f"{folder}/{kind}.onnx", x) for kind in ("plain", "folded")]
    times = np.zeros((rounds + 3, len(calls)))
    for row in times:
        for i, call in enumerate(calls):
            # Lets the threads of the previous call go to sleep.
            time.sleep(0.02)
            start = time.perf_counter()
            call()
            row[i] = time.perf_counter() - start
    return times[3:].min(axis=0) * 1e3


def mxnet_call(block, x):
    x = mx.nd.array(x)

    def call():
        outputs = block(x)
        for y in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
            y.wait_to_read()

    return call


def onnx_call(path, x):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options)
    return lambda: session.run(None, {"data": x})


if __name__ == "__main__":
    main()
