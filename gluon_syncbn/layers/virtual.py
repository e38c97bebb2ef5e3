"""VirtualBatchNorm: several devices' batch normalization on one device."""

from __future__ import annotations

from typing import Any

from ..arguments import error_for, is_whole
from ..groups.group import SyncGroup
from .batch_norm import SyncBatchNorm


class VirtualBatchNorm(SyncBatchNorm):
    r"""Batch normalization that treats each device as several devices that do not synchronize.

    The batch of a device is cut along its first axis into `virtual_devices` chunks, the first ones
    larger by one sample if they do not divide evenly. Each chunk i is normalized by its own
    statistics:

    .. math:: y_i = \gamma \frac{x_i - \mu_i}{\sqrt{\sigma_i^2 + \epsilon}} + \beta

    y and dx are bit-identical to those of that many unsynchronized devices, with the memory of one
    device and in one call. (The running statistics are the mean over the devices, which is what
    MXNet saves. They and the gradients of gamma and beta are added in double before rounding; real
    devices round first.) So a training run on many unsynchronized GPUs can be repeated on few. For
    large batches this is known as ghost batch normalization.

    Inference uses the running statistics, the same for all samples.

    Parameters
    ----------
    virtual_devices : int
        Number of chunks of a device's batch, 1 or more.
    **arguments
        Those of :class:`SyncBatchNorm` except `num_devices` and `group`, as devices do not wait for
        each other.

    Raises
    ------
    ValueError, TypeError
        For arguments out of range, or of another type.
    MXNetError
        On waiting for a result, if a batch has fewer samples than there are virtual devices. At
        once if the channels are on axis 0.

    References
    ----------
    E. Hoffer, I. Hubara, D. Soudry, Train longer, generalize better, NeurIPS 2017 (ghost batch
    normalization).
    """

    def __init__(self, virtual_devices: int, **arguments: Any) -> None:
        if not (is_whole(virtual_devices) and 0 < virtual_devices < 1 << 16):
            raise error_for(virtual_devices)(
                f"virtual_devices is {virtual_devices!r}: give the number of chunks into which a "
                "batch is cut, 1 or more."
            )
        for name in ("num_devices", "group"):
            if arguments.get(name) is not None:
                raise ValueError(
                    f"VirtualBatchNorm got {name}={arguments[name]!r}, and its devices do not wait "
                    "for each other: leave it out."
                )
        super().__init__(**{**arguments, "group": SyncGroup(group_size=1)})
        self._own_settings = {**self._own_settings, "virtual_devices": int(virtual_devices)}
