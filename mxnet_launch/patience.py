"""How long a wait has taken."""

import time


class Patience:
    """The seconds of a wait, of which `timeout` are too many.

    A process that is stopped, as by Ctrl-Z or ``docker pause``, does not wait: of the time between
    two calls of `waited` at most three seconds count, so call it every second or so.
    """

    def __init__(self, timeout):
        self._most = min(3.0, timeout / 2)
        self._waited, self._looked = 0.0, time.monotonic()

    def waited(self):
        now = time.monotonic()
        self._waited += min(now - self._looked, self._most)
        self._looked = now
        return self._waited
