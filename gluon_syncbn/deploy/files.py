"""Files that are written whole or not at all, and the reading of what others have written."""

import contextlib
import json
import os
import re
import uuid

import mxnet as mx
from mxnet.util import np_array, np_shape


class FileError(OSError):
    """A file that cannot be read or written; the text names it, the cause and what to do."""


def write_all(writers):
    """Writes several files, {path: write(temporary path)}. Raises FileError.

    Each is written to a temporary name in its folder, or in that of the file that it is a link to.
    Once all are on the disk they are moved to their places, so no file is ever half-written.
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
    """What an error of the system or of MXNet says."""
    return error.strerror if isinstance(error, OSError) and error.strerror else last_line(error)


def last_line(error):
    """What an error says, without MXNet's stack trace and line numbers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return re.sub(r"(MXNetError: )?(\[[\d:]+\] \S+:\d+: )?", "", text)[:300]


def text_writer(text):
    def write(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    return write


def bytes_writer(data):
    def write(path):
        with open(path, "wb") as file:
            file.write(data)

    return write


def parameter_writer(arrays):
    """Writes {name: NDArray} in MXNet's format."""

    def write(path):
        mx.nd.save(path, arrays)
        # MXNet does not say when the end of a file finds no room.
        try:
            written = mx.nd.load(path)
        except mx.MXNetError:
            written = {}
        if not _same(arrays, written):
            raise OSError("it came out incomplete, as on a full disk")

    return write


def _same(arrays, others):
    if arrays and (not isinstance(others, dict) or arrays.keys() != others.keys()):
        return False
    for name, array in arrays.items():
        other = others[name]
        if array.dtype != other.dtype or array.shape != other.shape:
            return False
        if array.asnumpy().tobytes() != other.asnumpy().tobytes():
            return False
    return True


def read_symbol(path):
    """The symbol in a file. Raises FileError."""
    text = _read(path)
    wanted = "the -symbol.json of an exported net was expected"
    try:
        graph = json.loads(text.decode())
    except ValueError as error:
        cut = text.lstrip()[:1] == b"{" and "line" in str(error)
        raise FileError(
            f"{path} is {'damaged' if cut else 'no JSON'} ({error}): {wanted}; export it again."
        ) from None
    if not (isinstance(graph, dict) and {"nodes", "heads"} <= set(graph)):
        raise FileError(f"{path} is JSON but holds no graph of MXNet: {wanted}.")
    try:
        symbol = mx.sym.load_json(text.decode())
    except mx.MXNetError as error:
        raise FileError(
            f"{path} cannot be loaded by MXNet {mx.__version__} ({_cause(error)}): it needs "
            "operators that this MXNet has not, or is damaged."
        ) from None
    for number, node in enumerate(graph["nodes"]):
        # MXNet loads such graphs, and stumbles over them later.
        if any(source >= number for source, *_ in node["inputs"]):
            raise FileError(
                f"{path} is damaged ({node['name']} does not stand behind its inputs): {wanted}; "
                "export it again."
            )
    return symbol


def read_parameters(path):
    """{name: NDArray} of a file. Raises FileError."""
    wanted = "a .params file of MXNet was expected, as save_parameters and export write it"
    if _read(path, len(_MAGIC)) != _MAGIC:
        raise FileError(f"{path} is no file of parameters: {wanted}.")
    try:
        with as_saved(path):
            arrays = mx.nd.load(path)
    except (mx.MXNetError, UnicodeDecodeError, MemoryError) as error:
        raise FileError(
            f"{path} is damaged ({_cause(error)}): it was cut short or changed. Take another copy."
        ) from None
    if not isinstance(arrays, dict) or not arrays:
        raise FileError(f"{path} has no named arrays: {wanted}.")
    return arrays


@contextlib.contextmanager
def as_saved(path):
    """Within it, NumPy's shapes are switched on or off as where this .params file was saved: MXNet
    loads it in no other way, and so will who loads what is saved within."""
    is_numpy = _read(path, _FIRST_ARRAY + 4)[_FIRST_ARRAY:] == _NUMPY_MAGIC
    with np_array(False), np_shape(is_numpy):
        yield


# kMXAPINDArrayListMagic and NDARRAY_V3_MAGIC, little endian, and where the first array begins.
_MAGIC = (0x112).to_bytes(8, "little")
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
