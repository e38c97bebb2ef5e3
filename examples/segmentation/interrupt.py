"""Ctrl-C as a request that the training loop can see."""

import signal


class Interrupt:
    """Context manager: the first Ctrl-C sets `requested`, a second one ends the process at once."""

    def __init__(self):
        self.requested = False

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self._before)

    def _request(self, *_):
        self.requested = True
        # The default action needs no Python, so it works while MXNet computes.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
