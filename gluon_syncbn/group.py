"""Who reduces together, and how long they wait for each other."""

import math
import os

from mxnet.context import Context

TIMEOUT_VARIABLE = "GLUON_SYNCBN_TIMEOUT"
_DEFAULT_TIMEOUT = 300.0


class SyncGroup:
    """The devices that share their statistics.

    Parameters
    ----------
    devices : list of Context, optional
        Who takes part, each in every call of a layer of this group. By default the contexts on
        which the layer's parameters live.
    timeout : float, optional
        Seconds for which a device waits for the others. A tenth of it brings a warning, all of it
        ends in an MXNetError that tells who came and who did not. By default the environment
        variable ``GLUON_SYNCBN_TIMEOUT``, or else 300.

    Raises
    ------
    ValueError
        Where a device is named twice, or the timeout is not a positive number.
    """

    def __init__(self, devices=None, timeout=None):
        if isinstance(devices, Context):
            devices = [devices]
        if devices is not None and not (
            isinstance(devices, (list, tuple)) and all(isinstance(d, Context) for d in devices)
        ):
            raise ValueError(
                f"SyncGroup got devices={devices!r}: give a list of contexts, such as "
                "[mx.gpu(0), mx.gpu(1)]."
            )
        names = None if devices is None else tuple(str(device) for device in devices)
        if names is not None and (not names or len(set(names)) != len(names)):
            raise ValueError(
                f"SyncGroup got devices={list(names)}: name each device that takes part once, or "
                "leave devices out for those on which the parameters live."
            )
        self.devices = names
        self.timeout = _seconds(timeout)

    def __repr__(self):
        devices = "those of the parameters" if self.devices is None else list(self.devices)
        return f"SyncGroup(devices={devices}, timeout={self.timeout:g})"


def _seconds(timeout):
    source = "timeout"
    if timeout is None:
        source = TIMEOUT_VARIABLE
        timeout = os.environ.get(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT)
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{source} is {timeout!r}: give a number of seconds above 0, such as 300.")
    return seconds
