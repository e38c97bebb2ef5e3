"""Reads checkpoints, and writes files whole or not at all."""

import contextlib
import json
import os
import uuid
from pathlib import Path

import mxnet as mx
from mxnet.util import np_array, np_shape

from ..graph.trace import last_line


class FileError(OSError):
    """A file that cannot be read or written; the text names it, the cause and what to do."""


def write_all(writers):
    """Writes several files, {path: write(temporary path)}. Raises FileError.

    Each is written to a temporary name in its folder, or in the folder of a link's target. Once all
    are on the disk they are renamed, so no file is ever half-written.
    """
    places = {path: os.path.realpath(path) for path in writers}
    temporary = {path: f"{place}.{uuid.uuid4().hex[:12]}.tmp" for path, place in places.items()}
    path = None
    try:
        for path, write in writers.items():
            if os.path.isdir(path):
                raise IsADirectoryError(f"a folder has this name: {path}")
            if os.path.exists(path) and not os.path.isfile(path):
                raise OSError("this is a device or a pipe, which a file would replace")
            write(temporary[path])
            _to_disk(temporary[path])
        for path, place in places.items():
            os.replace(temporary[path], place)
    except (OSError, mx.MXNetError) as error:
        raise FileError(
            f"{path} cannot be written ({_cause(error)}): make room, or choose another place, and "
            "try again."
        ) from error
    finally:
        for left in temporary.values():
            with contextlib.suppress(OSError):
                os.unlink(left)


def _to_disk(path):
    # A name must not point to a new file before its contents are on the disk.
    number = os.open(path, os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _cause(error):
    return error.strerror if isinstance(error, OSError) and error.strerror else last_line(error)


def bytes_writer(data):
    return lambda path: Path(path).write_bytes(data)


def parameter_writer(arrays):
    """Writes {name: NDArray} in MXNet's format."""

    def write(path):
        mx.nd.save(path, arrays)
        # MXNet does not report a full disk at the end of a file.
        try:
            written = mx.nd.load(path)
        except mx.MXNetError:
            written = {}
        if not _same(arrays, written):
            raise OSError("it is incomplete, as on a full disk")

    return write


def _same(arrays, others):
    def content(array):
        return array.dtype, array.shape, array.asnumpy().tobytes()

    # MXNet loads a file without arrays as a list.
    return len(arrays) == len(others) and all(
        name in others and content(array) == content(others[name]) for name, array in arrays.items()
    )


def read_symbol(path):
    """The symbol in a file. Raises FileError."""
    text = _read(path)
    try:
        for number, node in enumerate(json.loads(text)["nodes"]):
            # MXNet loads such a graph, and crashes on it later.
            if any(source >= number for source, *_ in node["inputs"]):
                raise ValueError(f"{node['name']} precedes its inputs")
        return mx.sym.load_json(text.decode())
    except (ValueError, LookupError, TypeError, mx.MXNetError) as error:
        raise FileError(
            f"{path} is not a graph that MXNet {mx.__version__} can load ({_cause(error)}): give "
            "the -symbol.json of an exported net. If this is one, it is damaged: export it again."
        ) from None


def read_parameters(path):
    """{name: NDArray} of a file. Raises FileError."""
    try:
        with as_saved(path):
            arrays = mx.nd.load(path)
        if not isinstance(arrays, dict) or not arrays:
            raise ValueError("it has no named arrays")
    except (mx.MXNetError, ValueError, MemoryError) as error:
        raise FileError(
            f"{path} is not a file of parameters that MXNet can load ({_cause(error)}): give a "
            ".params file as save_parameters and export write it. If this is one, it is damaged: "
            "take another copy."
        ) from None
    return arrays


@contextlib.contextmanager
def as_saved(path):
    """Switches NumPy's shapes on or off as they were when this .params file was saved: MXNet loads
    it in no other mode, and files saved within have the same mode."""
    is_numpy = _read(path, _FIRST_ARRAY + 4)[_FIRST_ARRAY:] == _NUMPY_MAGIC
    with np_array(False), np_shape(is_numpy):
        yield


# NDARRAY_V3_MAGIC, little endian, and where the first array begins.
_NUMPY_MAGIC = (0xF993FACA).to_bytes(4, "little")
_FIRST_ARRAY = 24


def _read(path, size=-1):
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror}): name an existing file."
        ) from None
