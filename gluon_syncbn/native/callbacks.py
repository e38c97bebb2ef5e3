"""Functions that the library calls, and texts on their way there and back."""

from __future__ import annotations

import ctypes
from typing import Any, Callable

from .library import library as _library

# Kept alive, as the library calls them.
_callbacks: list[Any] = []


def encoded(text: str) -> bytes:
    """A text for the library. What UTF-8 lacks, as in the names of some files, is spelled out, and
    the zero, which would end it."""
    return text.replace("\0", r"\0").encode(errors="backslashreplace")


def decoded(text: bytes) -> str:
    """A text of the library, which may have been cut off within a character."""
    return text.decode(errors="replace")


def text_of(failure: BaseException) -> str:
    """What an exception says, or else its type."""
    try:
        text = str(failure)
    except BaseException:
        text = ""
    return text or type(failure).__name__


def last_text() -> str:
    """What the last function of the library on this thread has to say, as why it has failed."""
    return decoded(_library.gluon_syncbn_text())


def callback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the library a function to call, which it declares as ``gluon_syncbn_`` and its name.
    Texts come as str. Whatever it raises becomes an Outcome, as the native caller cannot pass
    exceptions on."""
    name = f"gluon_syncbn_{function.__name__}"
    kind, _ = _library.declared(name)

    @kind
    def call(*arguments: Any) -> Any:
        *given, outcome = arguments
        try:
            result = function(*(decoded(a) if isinstance(a, bytes) else a for a in given))
            _library.gluon_syncbn_conclude(outcome, None)
            return result
        except BaseException as failure:
            _library.gluon_syncbn_conclude(outcome, encoded(text_of(failure)))
            return 0

    _callbacks.append(call)
    address = ctypes.cast(call, ctypes.c_void_p).value
    ctypes.c_void_p.in_dll(_library, name).value = address
    return function
