"""Functions that the library calls, and texts on their way there and back."""

from .library import Outcome

# Bytes of an error, with the zero at its end.
_ERROR_SIZE = Outcome.error.size


def encoded(text):
    """A text for the library. What UTF-8 lacks, as in the names of some files, is spelled out."""
    return text.encode(errors="backslashreplace")


def decoded(text):
    """A text of the library, which may have been cut off within a character."""
    return text.decode(errors="replace")


def text_of(failure):
    """What an exception says, or else its type."""
    try:
        text = str(failure)
    except BaseException:
        text = ""
    return text or type(failure).__name__


def callback(kind):
    """Makes functions of this type of `library`. Texts come to them as str. Whatever they raise
    becomes the `Outcome`, as the native caller cannot pass exceptions on."""

    def make(function):
        @kind
        def call(*arguments):
            *arguments, outcome = arguments
            outcome = outcome.contents
            try:
                result = function(*(decoded(a) if isinstance(a, bytes) else a for a in arguments))
                outcome.succeeded = 1
                return result
            except BaseException as failure:
                outcome.succeeded = 0
                text = encoded(text_of(failure))[: _ERROR_SIZE - 1]
                outcome.error = text.decode(errors="ignore").encode()
                return None

        return call

    return make
