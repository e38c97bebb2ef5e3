"""A trained net as one call, from any of the files that a run leaves. Needs no gluon_syncbn.

- a checkpoint: checkpoints/best.ckpt, best.params, or the folder of a run;
- an exported symbol: export/model-symbol.json, with the parameters beside it;
- an ONNX file: export/model.onnx, for ONNX Runtime.
"""

import contextlib
import json
from pathlib import Path

import numpy as np

import checkpoint
from data import DataError
from options import CONFIG

_KINDS = "the folder of a run, a .ckpt, a .params, a -symbol.json or a .onnx"
# What `setting.open_data` asks of the arguments of a run.
_DATA_ARGUMENTS = {"data", "classes", "seed", "size", "brightness", "val_images"}
_GREY = 0.5  # what pixels beyond the edge are, as in training


class Predictor:
    """`predict(images)`: classes (N, H, W) uint8 of images (N, 3, H, W) float32 from 0 to 1.

    `names` are those of the classes. H and W are any: the images are filled up to what the net
    takes, and cut into its size where that is fixed, as in an ONNX file.
    """

    def __init__(self, path):
        self.path = path = Path(path)
        if path.is_dir():
            self.path = path = path / "checkpoints" / "best.ckpt"
        if not path.exists():
            raise DataError(f"there is no {path}: name {_KINDS}")
        self._fixed = None  # (N, H, W)
        openers = {".ckpt": _from_checkpoint, ".params": _from_parameters, ".onnx": _from_onnx}
        opener = _from_symbol if path.name.endswith("-symbol.json") else openers.get(path.suffix)
        if opener is None:
            raise DataError(f"{path} is no model: name {_KINDS}")
        self._scores, self._fixed = opener(path)
        self.names = _names_near(path, self._count_classes())

    def _count_classes(self):
        count, *sides = self._fixed or (1, 32, 32)
        try:
            scores = self._scores(np.full((count, 3, *sides), _GREY, np.float32))
            given, classes, *pixels = scores.shape
            if (given, pixels) != (count, sides) or len(sides) != 2:
                raise ValueError(f"its output has the shape {scores.shape}")
        except Exception as error:  # Whatever MXNet and ONNX Runtime say to a net of another kind.
            raise DataError(
                f"{self.path} gives no scores to the pixels of a photo "
                f"({str(error).strip().splitlines()[-1]}): name {_KINDS}"
            ) from error
        return classes

    def predict(self, images):
        height, width = images.shape[2:]
        count, rows, columns = self._fixed or (len(images), 8, 8)
        down, right = -height % rows, -width % columns
        padded = np.pad(
            images, ((0, 0), (0, 0), (0, down), (0, right)), constant_values=np.float32(_GREY)
        )
        if not self._fixed:
            return self._classes(padded)[:, :height, :width]
        result = np.zeros((len(images), height + down, width + right), np.uint8)
        for i in range(0, len(images), count):
            batch = padded[i : i + count]
            # The last one may be short.
            whole = np.concatenate([batch, np.repeat(batch[:1], count - len(batch), axis=0)])
            for y in range(0, height + down, rows):
                for x in range(0, width + right, columns):
                    part = self._classes(whole[:, :, y : y + rows, x : x + columns])
                    result[i : i + count, y : y + rows, x : x + columns] = part[: len(batch)]
        return result[:, :height, :width]

    def _classes(self, images):
        return self._scores(images).argmax(axis=1).astype(np.uint8)


def _from_checkpoint(path):
    try:
        arrays = checkpoint.load(path).arrays
    except checkpoint.CheckpointError as error:
        raise DataError(str(error)) from None
    prefix = "parameter:"
    return _from_net(
        _net_of(
            path, {name[len(prefix) :]: a for name, a in arrays.items() if name.startswith(prefix)}
        )
    )


def _from_parameters(path):
    return _from_net(load_parameters(path))


def _from_net(net):
    import mxnet as mx

    net.hybridize(static_alloc=True)
    return lambda images: net(mx.nd.array(images)).asnumpy(), None


def load_parameters(path, *norm):
    """The net of a best.params; `norm`, a normalization layer and its arguments, is any: the
    parameters are the same with each, and so is inference. Raises DataError for other files."""
    import mxnet as mx

    try:
        arrays = mx.nd.load(str(path))
        arrays = {name: array.asnumpy() for name, array in arrays.items()}
    except (mx.MXNetError, AttributeError) as error:
        raise DataError(f"{path} cannot be read: name {_KINDS}") from error
    return _net_of(path, arrays, *norm)


def _net_of(path, arrays, *norm):
    import mxnet as mx

    from model import SegmentationNet

    if "scores.weight" not in arrays or arrays["scores.weight"].ndim < 2:
        raise DataError(f"{path} holds no net of this example: name {_KINDS}")
    net = SegmentationNet(arrays["scores.weight"].shape[1], *norm)
    net.initialize()
    for name, parameter in net._collect_params_with_prefix().items():
        if name not in arrays or arrays[name].shape != parameter.shape:
            raise DataError(
                f"{path} has no {name} of shape {parameter.shape}, so it is of another net: name "
                f"{_KINDS}"
            )
        parameter.set_data(mx.nd.array(arrays[name]))
    return net


def _from_symbol(path):
    import warnings

    import mxnet as mx

    prefix = path.name[: -len("-symbol.json")]
    parameters = sorted(path.parent.glob(f"{prefix}-[0-9][0-9][0-9][0-9].params"))
    if not parameters:
        raise DataError(f"there is no {prefix}-0000.params beside {path}: put it there")
    try:
        with warnings.catch_warnings():
            # The symbol does not say of which dtype its input is.
            warnings.simplefilter("ignore")
            net = mx.gluon.SymbolBlock.imports(str(path), ["data"], str(parameters[-1]))
    except (mx.MXNetError, AssertionError, ValueError) as error:
        raise DataError(
            f"{path} and {parameters[-1]} cannot be loaded ({str(error).strip().splitlines()[-1]})"
            ": export the net again"
        ) from error
    net.hybridize(static_alloc=True)
    return lambda images: net(mx.nd.array(images)).asnumpy(), None


def _from_onnx(path):
    try:
        import onnxruntime
    except ImportError as error:
        raise DataError(f"{path} needs ONNX Runtime: pip install onnxruntime") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # Of classes that are not exported.
        raise DataError(
            f"{path} cannot be loaded ({str(error).splitlines()[0]}): export the net again"
        ) from error
    given = session.get_inputs()[0]
    fixed = (*given.shape[:1], *given.shape[2:])
    if not all(isinstance(n, int) for n in fixed):
        fixed = None
    return lambda images: session.run(None, {given.name: images})[0], fixed


def run_config(run):
    """The config.json of a run's folder; a DataError if there is none, or one of something else."""
    path = Path(run, CONFIG)
    remedy = "name the folder of a run"
    try:
        config = json.loads(path.read_text())
        whole = _DATA_ARGUMENTS <= config["arguments"].keys()
        whole = whole and isinstance(config["data"]["classes"], list)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}): {remedy}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise DataError(f"{path} is not of a run of this example: {remedy}")
    return config


def _names_near(path, classes):
    """The names of the classes in the config.json of the run that a file lies in."""
    for folder in list(path.absolute().parents)[:2]:
        # Another program may have a config.json there.
        with contextlib.suppress(DataError):
            names = run_config(folder)["data"]["classes"]
            if len(names) == classes:
                return tuple(names)
    return ("background", *(f"class {number}" for number in range(1, classes)))
