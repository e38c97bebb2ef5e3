"""Reads checkpoints, and writes files whole or not at all."""

import contextlib
import json
import os
import shutil
import uuid
from pathlib import Path

import mxnet as mx
from mxnet.util import np_array, np_shape

from ..graph.trace import last_line


class FileError(OSError):
    """A file that cannot be read or written; the text names it, the cause and what to do."""


def write_all(writers, check=None):
    """Writes several files, {path: write(temporary path)}. Raises FileError.

    Each file is written next to its final path (for a link, the target's) and renamed once all are
    on disk and check({path: temporary path}) has raised nothing, so no file is ever half-written.
    The first path's old file is moved away before the others, and its new file comes last: if the
    process is killed in between, that file is missing, rather than old files mixed with new ones.
    """
    token = uuid.uuid4().hex[:12]
    places = {path: os.path.realpath(path) for path in writers}
    new = {path: f"{place}.{token}.tmp" for path, place in places.items()}
    old = {path: f"{place}.{token}.old.tmp" for path, place in places.items()}
    path, done = None, False
    try:
        for path, write in writers.items():
            _require_file(path)
            folder = os.path.dirname(path)
            if folder and not os.path.exists(folder):
                raise OSError(f"the folder {folder} does not exist")
            with open(new[path], "xb") as file:
                write(new[path])
                # A name must not point to a new file before its contents are on the disk.
                os.fsync(file.fileno())
            if os.path.exists(path):
                shutil.copymode(path, new[path])
        if check:
            check(new)
        for path, place in places.items() if len(places) > 1 else ():
            if os.path.exists(place):
                os.replace(place, old[path])
        for path, place in reversed(list(places.items())):
            os.replace(new[path], place)
        done = True
    except (OSError, mx.MXNetError) as error:
        raise FileError(
            f"{path} cannot be written ({_cause(error)}): make room, or choose another place, "
            "and try again."
        ) from error
    finally:
        for path, place in places.items():
            with contextlib.suppress(OSError):
                os.unlink(old[path]) if done else os.replace(old[path], place)
            with contextlib.suppress(OSError):
                os.unlink(new[path])


def _require_file(path):
    if os.path.isdir(path):
        raise OSError("a folder has this name")
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("this is a device or a pipe")


def _cause(error):
    return error.strerror if isinstance(error, OSError) and error.strerror else last_line(error)


def bytes_writer(data):
    return lambda path: Path(path).write_bytes(data)


def tagged(arrays, symbol):
    """Arrays by the names that MXNet's checkpoints have: with arg: or aux: before them."""
    auxiliary = set(symbol.list_auxiliary_states())
    return {f"{'aux' if n in auxiliary else 'arg'}:{n}": array for n, array in arrays.items()}


def parameter_writer(arrays):
    """Writes {name: NDArray} in MXNet's format."""

    def write(path):
        mx.nd.save(path, arrays)
        try:
            mx.nd.load(path)  # MXNet reports a full disk only here.
        except mx.MXNetError:
            raise OSError("it is incomplete, as on a full disk") from None

    return write


def read_symbol(path):
    """The symbol in a file. Raises FileError."""
    text = _read(path)
    try:
        for number, node in enumerate(json.loads(text)["nodes"]):
            # MXNet loads such a graph and crashes on it later.
            if any(source >= number for source, *_ in node["inputs"]):
                raise ValueError(f"{node['name']} precedes its inputs")
        return mx.sym.load_json(text.decode())
    except (ValueError, LookupError, TypeError, RecursionError, mx.MXNetError) as error:
        raise FileError(
            f"{path} is not a graph that MXNet {mx.__version__} can load ({_cause(error)}): give "
            "the -symbol.json of an exported net. If this is one, it is damaged or cut off: export "
            "it again."
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
            ".params file as save_parameters and export write it. If this is one, it is damaged or "
            "cut off: take another copy."
        ) from None
    return arrays


@contextlib.contextmanager
def as_saved(path):
    """Switches NumPy shapes on or off, as they were when this .params file was saved: MXNet cannot
    load it in the other mode. Files saved within get the same mode."""
    is_numpy = _read(path, _FIRST_ARRAY + 4)[_FIRST_ARRAY:] == _NUMPY_MAGIC
    with np_array(False), np_shape(is_numpy):
        yield


# NDARRAY_V3_MAGIC, little endian, and where the first array begins.
_NUMPY_MAGIC = (0xF993FACA).to_bytes(4, "little")
_FIRST_ARRAY = 24


def _read(path, size=-1):
    try:
        _require_file(path)
        with open(path, "rb") as file:
            return file.read(size)
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({_cause(error)}): name an existing file."
        ) from None
