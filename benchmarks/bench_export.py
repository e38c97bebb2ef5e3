"""Latency of exported nets: unfolded, folded, and in ONNX Runtime; see README.md.

    python benchmarks/bench_export.py [--rounds N] [NAME ...]

Measures all kinds of a net in turn, so that other load affects them equally, with a batch of one
image. The result is the fastest round, as disturbances only make a round longer.
"""

import argparse
import functools
import tempfile
import time
import warnings

import gluon_syncbn as sbn
import mxnet as mx
import numpy as np

import harness

SIDE = {"resnet18_v1": 224, "resnet50_v1b": 224, "mobilenet1.0": 224, "fcn_resnet50_voc": 256}
KINDS = ("training net", "unfolded", "folded", "ONNX, unfolded", "ONNX, folded")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"from {', '.join(SIDE)} (all)")
    parser.add_argument("--rounds", type=harness.positive, default=30, help="rounds (%(default)s)")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(SIDE))
    if unknown:
        parser.error(f"{unknown[0]} is unknown: choose from {', '.join(SIDE)}")
    warnings.simplefilter("ignore")
    print(f"Milliseconds for one image, {harness.CORES} cores.\n")
    print(harness.table(["net", *KINDS], []))
    for name in args.names or SIDE:
        times = [f"{each:.1f}" for each in measure(name, SIDE[name], args.rounds)]
        print(harness.row([f"{name}, {SIDE[name]}x{SIDE[name]}", *times]), flush=True)


def measure(name, side, rounds):
    """The milliseconds of each kind."""
    from gluoncv.model_zoo import get_model

    options = {"crop_size": side, "pretrained_base": False} if name.startswith("fcn") else {}
    net = sbn.convert_sync_batchnorm(get_model(name, **options))
    net.initialize(mx.init.Xavier(), force_reinit=True)
    x = np.random.default_rng(0).standard_normal((1, 3, side, side)).astype(np.float32)
    net(mx.nd.array(x))
    nets, sessions = [net], []
    with tempfile.TemporaryDirectory() as folder:
        for fold in (False, True):
            prefix = f"{folder}/{fold}"
            sbn.export(net, prefix, fold=fold, onnx=f"{prefix}.onnx", input_shape=x.shape)
            files = f"{prefix}-symbol.json", "data", f"{prefix}-0000.params"
            nets.append(mx.gluon.SymbolBlock.imports(*files))
            sessions.append(onnx_call(f"{prefix}.onnx", x))
    for each in nets:
        each.hybridize(static_alloc=True)
    calls = [*(mxnet_call(each, x) for each in nets), *sessions]
    named = {kind: functools.partial(rested, call) for kind, call in zip(KINDS, calls)}
    return [min(seconds) * 1e3 for seconds in harness.interleave(named, rounds).values()]


def rested(call):
    # Lets the threads of the previous call go to sleep.
    time.sleep(0.02)
    return harness.seconds_of(call)


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
