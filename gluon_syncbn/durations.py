"""Python's durations of waits for others, in seconds, and shares of them.

A timeout belongs to a store, a group or a call: ``timeout``, or ``GLUON_SYNCBN_TIMEOUT``. While a
process is stopped its time stands still: see `waits.Clock`.
"""

from __future__ import annotations

# The timeout, where nobody gives one.
TIMEOUT = 300.0
# The share of a timeout after which a wait is worth a warning.
WARN_AFTER = 0.1
# How many timeouts one process may run on after another has reached the end of its script, as to
# evaluate the net.
ALONE = 10
# How much of a wait for MXNet counts, if no operation of a store is under way: it may be a
# computation, so it has ten timeouts too.
DOUBT = 1 / ALONE

# Between two reports of a process, at most.
PERIOD = 1.0
# Of the time between two looks, so much counts at most, as a process may have been stopped.
LONGEST_LOOK = 3.0
# Of silence, before a connection is made again, at least.
SILENCE = 2.0
# For an attempt to connect, as a network that is back answers the next one sooner; between two.
ATTEMPT, BETWEEN_ATTEMPTS = 2.0, 0.2
# Within which a process was heard of that has ended, if it closes its connection.
FRESH = 5.0
# For a process that has closed its connection to make another, at most: a tenth of the timeout.
RECONNECTS = 1.0
# For one that connects to show its token.
GREETING = 5.0
# After which a wait looks whether it is of use; kSlice in src/operator/threads/waits.h.
SLICE = 0.1
# A store fails where another process is gone: for the judge to say so.
EXPLAINED = 2.0
# For a thread to start, where the system has none.
THREAD = 1.0
# Past the timeout, so that exchanges, whose errors say more, end first.
LATER = 0.5
# For which the timeout of an exchange holds after it was last reported, as others report later.
REMAINS = 3.0

# After a verdict: for an error to end the script's current wait, before the process is ended. (A
# script that does not wait, or has caught the error, has the timeout to save what it has.)
RAISES = 0.5
# For the others to learn of an end; for the last message.
TELL, LAST_WORDS = 1.0, 2.0
# At exit: without another arrival, after which a call is assumed to wait in vain; for warnings.
PATIENCE, WARNINGS = 2.0, 2.0


def duration(number: float) -> str:
    """Seconds as a text, such as "0.25 s" or "12 s", as the native library writes them."""
    return f"{round(number, 2):g} s" if number < 10 else f"{number:.0f} s"
