"""The launcher: python -m gluon_syncbn.launch.

It starts the processes of any MXNet program, and imports neither MXNet nor gluon_syncbn. In
reading order: ``__main__`` reads the command line, ``environment`` finds which of several launchers
this is, ``children`` starts processes and ends them, ``runner`` is what each of them runs.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def gluon_syncbn() -> NoReturn:
    """The program ``gluon-syncbn``, which is ``python -m gluon_syncbn`` under whatever name."""
    os.execv(sys.executable, [sys.executable, "-m", "gluon_syncbn", *sys.argv[1:]])
