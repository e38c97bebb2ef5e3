"""Checks of arguments."""

import math
import numbers
import os

import numpy

from . import durations

TIMEOUT_VARIABLE = "GLUON_SYNCBN_TIMEOUT"


def is_whole(value):
    return isinstance(value, (int, numpy.integer)) and not isinstance(value, bool)


def is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def error_for(value, kinds=numbers.Real):
    """The class of the error for a value that is refused: TypeError if it is of another kind."""
    return ValueError if isinstance(value, kinds) else TypeError


def seconds(timeout):
    """A timeout as a number. None takes the environment's."""
    source, number = "timeout", timeout
    if timeout is None:
        source, timeout = TIMEOUT_VARIABLE, os.environ.get(TIMEOUT_VARIABLE, durations.TIMEOUT)
        try:
            number = float(timeout)
        except ValueError:
            number = math.nan
    if not (is_number(number) and 0 < number < math.inf):
        raise error_for(number)(
            f"{source} is {timeout!r}: give a number of seconds above 0, such as 300."
        )
    return float(number)
