"""Files and folders, and the error that names what is wrong with them."""

import contextlib
import os


class InputError(Exception):
    """The user's input cannot work; the text says what came, where, and what to do."""


def count(text):
    """A whole number from 1, for argparse."""
    if int(text) < 1:
        raise ValueError
    return int(text)


@contextlib.contextmanager
def replacing(path):
    """A binary file to write, which replaces `path` once it is complete."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            # The name must not point to the new file before its contents are on the disk.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        remedy = "make room; --resume continues a run from its last checkpoint"
        raise InputError(f"{path} cannot be written ({error}): {remedy}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def require(folder):
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: name with --root the one that holds it")


def read_lines(path):
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): write one name a line there") from None
    lines = [line for line in lines if line]
    if not lines:
        raise InputError(f"{path} is empty: write one name a line there")
    return lines
