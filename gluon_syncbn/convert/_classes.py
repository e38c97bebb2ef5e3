"""Changes the class of a layer, and says what a class defines itself."""

from __future__ import annotations

from typing import Iterable

from mxnet.gluon import nn

from ..layers.batch_norm import SyncBatchNorm, SyncBatchNormReLU

# The attributes that only a SyncBatchNorm has.
_OWN_ATTRIBUTES = "_layer", "_num_devices", "_own_group", "_own_settings"
# A third-party class that computes the same as nn.BatchNorm, but not with cuDNN.
_SAME_AS_STOCK = ("gluoncv.nn.block.BatchNormCudnnOff",)
# What a subclass may define and still compute the same.
_HARMLESS = {"__init__", "__repr__", "_alias", "__doc__", "__module__", "__qualname__", "__dict__"}
_HARMLESS |= {"__weakref__", "__annotations__", "__firstlineno__", "__static_attributes__"}


def own_code(kind: type, known: Iterable[type]) -> str | None:
    """What a class defines beyond its base among `known` that may change the result, or None."""
    usual = {base for stock in known for base in stock.__mro__}
    for base in kind.__mro__:
        own = set(vars(base)) - _HARMLESS
        full_name = f"{base.__module__}.{base.__qualname__}"
        if own and base not in usual and full_name not in _SAME_AS_STOCK:
            return f"{base.__name__} defines {', '.join(sorted(own))}."
    return None


def make_synchronized(layer: nn.BatchNorm, template: SyncBatchNorm) -> None:
    settings = layer._kwargs
    added = tuple(name for name in vars(template) if name not in vars(layer))
    vars(layer).update({name: vars(template)[name] for name in added})
    layer._stock = type(layer), settings, added
    layer._kwargs = {name: settings.get(name, v) for name, v in template._kwargs.items()}
    is_fused = getattr(layer, "fuse_relu", False)
    if is_fused:
        layer._own_settings = {**layer._own_settings, "activation": "relu"}
    layer.__class__ = SyncBatchNormReLU if is_fused else SyncBatchNorm
    layer._meet()


def make_stock(layer: SyncBatchNorm) -> None:
    if "_stock" in vars(layer):
        kind, settings, added = layer.__dict__.pop("_stock")
    else:  # It was made as a synchronized layer.
        activation = layer._own_settings["activation"]
        plain = (nn.BatchNormReLU if activation else nn.BatchNorm)(prefix="")
        if hasattr(plain, "fuse_relu"):
            layer.fuse_relu = plain.fuse_relu
        kind, settings, added = type(plain), plain._kwargs, _OWN_ATTRIBUTES
    if "_layer" in vars(layer):
        layer._layer.leave(layer)
    for name in added:
        layer.__dict__.pop(name, None)
    layer._kwargs = {name: layer._kwargs.get(name, value) for name, value in settings.items()}
    layer.__class__ = kind
