"""Exports of gluoncv's segmentation and detection nets, with random weights.

They run in their own processes, as gluoncv changes how Pillow reads damaged images.
"""

import os
import sys

import numpy as np
import programs
import pytest
import stock
from tolerances import EXPORTED, ONNX, relative_error

pytestmark = pytest.mark.long

# The number of layers, and whether the net can be converted to ONNX.
NETS = {"fastscnn_citys": (45, True), "yolo3_mobilenet1.0_voc": (47, False)}


@pytest.mark.parametrize("name", NETS)
def test_stock_mxnet_and_onnx_runtime_agree_with_the_net(tmp_path, name):
    norms, converts = NETS[name]
    done = programs.run([__file__, name, tmp_path], seconds=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"folded {norms}, left 0" in done.stdout
    assert ("refused: " in done.stdout) != converts
    if not converts:
        assert done.stdout.count("operators to ONNX: _contrib_box_nms.") == 2, done.stdout
    with np.load(tmp_path / "expected.npz") as arrays:
        expected = [arrays[key] for key in arrays.files]
    with np.load(tmp_path / "input.npz") as arrays:
        inputs = dict(arrays)
    for fold in (False, True):
        prefix, model = str(tmp_path / f"{fold}"), str(tmp_path / f"{fold}.onnx")
        assert os.path.exists(model) == converts
        outputs = stock.outputs_of(prefix, inputs, str(tmp_path), 0, model if converts else None)
        tolerances = dict.fromkeys(("block", "module"), EXPORTED[fold])
        tolerances.update(fused=EXPORTED[True], **({"onnx": ONNX} if converts else {}))
        assert outputs.keys() == tolerances.keys()
        for kind, tolerance in tolerances.items():
            errors = [relative_error(*pair) for pair in zip(outputs[kind], expected)]
            print(f"{name} {kind} folded {fold}:", *errors)
            assert len(outputs[kind]) == len(expected) and max(errors) <= tolerance


def main(name, folder):
    import gluon_syncbn as sbn
    import mxnet as mx
    from deploy_nets import forward, randomize
    from gluoncv.model_zoo import get_model

    mx.random.seed(1)
    options = {} if name.startswith("yolo") else {"crop_size": 64}
    net = get_model(name, pretrained_base=False, norm_layer=sbn.SyncBatchNorm, **options)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    x = np.random.default_rng(0).standard_normal((1, 3, 64, 64)).astype("float32")
    forward(net, x)
    randomize(net)
    np.savez(f"{folder}/expected.npz", *forward(net, x))
    np.savez(f"{folder}/input.npz", data=x)
    for fold in (False, True):
        place = f"{folder}/{fold}"
        try:
            result = sbn.export(net, place, 0, fold, f"{place}.onnx", x.shape)
        except sbn.ExportError as error:
            print("refused:", error)
            assert not os.path.exists(f"{place}-symbol.json")
            result = sbn.export(net, place, fold=fold)
    print(f"folded {len(result.folded)}, left {len(result.left)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
