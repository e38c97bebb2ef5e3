"""Advice for those who come from other libraries' layers."""

from __future__ import annotations

import functools
import logging

_log = logging.getLogger("gluon_syncbn")

# What to do about arguments of other libraries' layers.
ELSEWHERE = {
    "affine": "give center and scale",
    "eps": "give epsilon",
    "fix_gamma": "give scale, its opposite",
    "fuse_relu": "give activation='relu'",
    "key": "leave it out: each layer has its own",
    "ndev": "give num_devices",
    "num_features": "give in_channels",
    "process_group": "give group, a SyncGroup",
    "track_running_stats": "leave it out. Inference uses running statistics, and training too with "
    "use_global_stats=True",
}


@functools.lru_cache(maxsize=None)  # Once for each value, and not for each layer of a net.
def hint_at_small(momentum: float) -> None:
    _log.warning(
        f"momentum={momentum:g} gives each new batch a weight of {1 - momentum:g} in the running "
        f"statistics. In PyTorch momentum is the weight of the new batch: its {momentum:g} is "
        f"momentum={1 - momentum:g} here."
    )
