"""Loads exported files in a process that cannot import gluon_syncbn, only what lets MXNet run.

As a program: stock.py PREFIX EPOCH INPUTS.npz OUTPUTS.npz [MODEL.onnx] writes the outputs of
SymbolBlock, Module and ONNX Runtime as block:0, module:0, onnx:0 and so on. fused:0 are those of
Module with its default on the CPU, where oneDNN folds and fuses operators.
"""

import os
import subprocess
import sys

import mxnet_compat
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))


def outputs_of(prefix, inputs, folder, epoch=0, onnx=None):
    """{kind: [outputs]} for inputs {name: array}; the kinds are block, module, fused and onnx."""
    source, target = os.path.join(folder, "inputs.npz"), os.path.join(folder, "outputs.npz")
    np.savez(source, **inputs)
    command = [sys.executable, os.path.abspath(__file__), prefix, str(epoch), source, target]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    mxnet_compat.inherit(environment)
    done = subprocess.run(
        [str(part) for part in [*command, *([onnx] if onnx else [])]],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    with np.load(target) as arrays:
        result = {}
        for key in arrays.files:
            result.setdefault(key.split(":")[0], []).append(arrays[key])
    return result


def main(prefix, epoch, source, target, onnx=None):
    # Importing it raises, even if it is installed.
    sys.modules["gluon_syncbn"] = None
    import mxnet as mx

    with np.load(source) as file:
        inputs = {name: file[name] for name in file.files}
    arrays = [mx.nd.array(x, dtype=x.dtype) for x in inputs.values()]
    block = mx.gluon.SymbolBlock.imports(
        f"{prefix}-symbol.json", list(inputs), f"{prefix}-{int(epoch):04d}.params"
    )
    result = {"block": listed(block(*arrays))}
    symbol, args, aux = mx.model.load_checkpoint(prefix, int(epoch))
    for kind, backend in (("module", "NONE"), ("fused", "MKLDNN")):
        os.environ["MXNET_SUBGRAPH_BACKEND"] = backend
        module = mx.mod.Module(symbol, data_names=list(inputs), label_names=None)
        module.bind([(name, x.shape) for name, x in inputs.items()], for_training=False)
        module.set_params(args, aux)
        module.forward(mx.io.DataBatch(arrays), is_train=False)
        result[kind] = module.get_outputs()
    result = {kind: [y.asnumpy() for y in outputs] for kind, outputs in result.items()}
    if onnx:
        import onnxruntime

        result["onnx"] = onnxruntime.InferenceSession(onnx).run(None, inputs)
    with open("/proc/self/maps") as maps:
        assert "gluon_syncbn" not in maps.read()
    flat = {f"{k}:{i}": y for k, outputs in result.items() for i, y in enumerate(outputs)}
    np.savez(target, **flat)


def listed(outputs):
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


if __name__ == "__main__":
    main(*sys.argv[1:])
