"""The calls of layers in training that other processes make too, for steps in which this process
has no samples."""

import collections

from mxnet import autograd

from .. import native

# Since the last step: (id of the layer, number of its node if a graph has several, whether it is
# recorded). Bounded, as a loop may have no Trainer.
made = collections.deque(maxlen=10**5)
_device = None


def note(device, nodes):
    """Notes a call on a device of these nodes: (id of a layer, number or None)."""
    global _device
    if not made:
        _device = device
    # All devices make the same calls.
    if device == _device:
        made.extend((*node, autograd.is_recording()) for node in nodes)


def are_noted():
    """Whether other processes make the calls of now too, of any layer."""
    return native.spans_processes() and autograd.is_training()
