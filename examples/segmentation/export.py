"""Export the best checkpoint of a run, and see that it predicts the same without gluon_syncbn.

    python examples/segmentation/export.py runs/segmentation-1

writes into runs/segmentation-1/export what MXNet loads as it is (model-symbol.json and
model-0000.params), the same with normalization folded into the convolutions (folded-*), and
model.onnx. Then a process that cannot import gluon_syncbn predicts the validation images from each.
"""

import importlib.util
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import checkpoint
from data import DataError
from predictor import load_parameters, run_config

# A pixel on the border of two classes may fall to the other one.
TOLERANCE = 1e-3
WITHOUT_US = (
    "import os, runpy, sys; sys.modules['gluon_syncbn'] = None; sys.argv = sys.argv[1:]; "
    "sys.path.insert(0, os.path.dirname(sys.argv[0])); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def main(argv=None):
    arguments = sys.argv[1:] if argv is None else argv
    usage = f"usage: {sys.argv[0]} RUN"
    if arguments in (["-h"], ["--help"]):
        print(f"{usage}\n\n{__doc__.strip()}")
        return 0
    if len(arguments) != 1:
        return usage
    run = Path(arguments[0])
    try:
        return export_and_validate(run)
    except (DataError, checkpoint.CheckpointError, OSError, ValueError, RuntimeError) as error:
        return f"{sys.argv[0]}: {error}"


def _stop(*_):
    """What Ctrl-C does: a KeyboardInterrupt in what native code imports would be lost."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print(
        "the export was stopped, the run itself is whole; to export it again:\n"
        f"  {shlex.join([sys.executable, *sys.argv])}",
        file=sys.stderr,
    )
    sys.exit(130)


def export_and_validate(run):
    """Write the files and compare them with the run; return the exit status."""
    files = export(run)
    wanted = checkpoint.load(run / "checkpoints" / "best.ckpt").progress["best"]["mean_iou"]
    print(f"exported     {', '.join(map(str, files))}")
    scores = validate(run, files)
    text = ", ".join(f"{Path(path).name} {score:.4f}" for path, score in scores.items())
    print(f"mean IoU without gluon_syncbn: {text}; in training it was {wanted:.4f}")
    wrong = [path for path, score in scores.items() if not abs(score - wanted) <= TOLERANCE]
    if wrong:
        return f"{sys.argv[0]}: {wrong[0]} does not predict as the net did in training"
    print("The mean IoU is the same.")
    return 0


def export(run):
    """Write the files; return those that hold a model."""
    try:
        import gluon_syncbn as sbn
    except ModuleNotFoundError as error:
        if error.name != "gluon_syncbn":
            raise
        raise DataError(
            "an export needs gluon_syncbn, which is not installed: run pip install -e . in the "
            "root of the repository and export then, or train with --no-export"
        ) from None
    arguments = run_config(run)["arguments"]
    best = run / "best.params"
    if not best.exists():
        raise FileNotFoundError(f"there is no {best}: name the folder of a run that has validated")
    net = load_parameters(best, sbn.SyncBatchNorm)
    folder = run / "export"
    folder.mkdir(exist_ok=True)
    onnx, shape = folder / "model.onnx", (1, 3, arguments["size"], arguments["size"])
    if not all(map(importlib.util.find_spec, ("onnx", "onnxruntime"))):
        onnx = None
        print("onnx or onnxruntime is not installed, so there is no ONNX file: pip install both")
    plain = sbn.export(net, folder / "model")
    folded = sbn.export(net, folder / "folded", fold=True, onnx=onnx, input_shape=shape)
    return [path for path in (plain.symbol, folded.symbol, folded.onnx) if path]


def validate(run, files):
    """{file: mean IoU}, computed by a process without gluon_syncbn."""
    script = Path(__file__).with_name("predict.py")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_US, script, "--validate", run, "--model", *files],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{sys.argv[0]}: the exported files cannot be used:\n{done.stderr.strip()}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["model"]: line["mean_iou"] for line in lines}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _stop)
    sys.exit(main())
