"""Checks of arguments."""

from __future__ import annotations

import math
import numbers
import os
from typing import Any

import numpy

from . import durations

TIMEOUT_VARIABLE = "GLUON_SYNCBN_TIMEOUT"


def is_whole(value: Any) -> bool:
    return isinstance(value, (int, numpy.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def error_for(value: Any, kinds: type | tuple[type, ...] = numbers.Real) -> type[Exception]:
    """The class of the error for a value that is refused: TypeError if it is of another kind."""
    return ValueError if isinstance(value, kinds) else TypeError


def seconds(timeout: float | None) -> float:
    """A timeout as a number. None takes the environment's."""
    if timeout is None:
        source, given = TIMEOUT_VARIABLE, os.environ.get(TIMEOUT_VARIABLE, durations.TIMEOUT)
        try:
            number = float(given)
        except ValueError:
            number = math.nan
    else:
        source, given, number = "timeout", timeout, timeout
    if not (is_number(number) and 0 < number < math.inf):
        raise error_for(number)(
            f"{source} is {given!r}: give a number of seconds above 0, such as 300."
        )
    return float(number)
