"""Running statistics measured again, after training or for averaged weights."""

from __future__ import annotations

import contextlib
import logging
from typing import Iterator

import mxnet as mx
from mxnet.gluon import Block, SymbolBlock

from .. import native
from ..distributed.join import counted
from ..graph.blocks import BATCH_NORMS, check_block, compile_again, walk
from ..layers.batch_norm import SyncBatchNorm
from .steps import end_step

_log = logging.getLogger("gluon_syncbn")
_COUNT = "num_batches_tracked"
# The nets within the context.
measured: list[Block] = []


@contextlib.contextmanager
def precise_statistics(net: Block) -> Iterator[None]:
    r"""A context in which a net's running statistics become the mean over the n batches that it is
    called with, whatever the `momentum` of its layers is.

    .. math:: \text{running} = \frac{1}{n} \sum_{i=1}^n \text{batch}_i

    ::

        with sbn.precise_statistics(net):
            for x, _ in loader:
                net(x)

    The calls are in training mode and need no backward; the parameters stay as they are. On several
    devices and in several processes the net is called as in training, but each process needs
    samples for each call: ``participants([])`` raises. If some have more batches than others, loop
    over ``gluon_syncbn.distributed.join(loader)``. Without any batch the statistics stay as they
    were, and a warning says so. An error ends all calls in flight, as within :class:`participants`.
    Layers that are frozen stay as they are. The logger
    ``gluon_syncbn`` names what is not measured: ``nn.BatchNorm`` and graphs of SymbolBlocks.

    Parameters
    ----------
    net : Block
        Its parameters have values.

    Raises
    ------
    TypeError
        If `net` is not a Block.
    ValueError
        If no :class:`SyncBatchNorm` in it follows the batches.
    RuntimeError
        If a parameter has no value yet. The net stays as it was.

    References
    ----------
    - P. Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, UAI
      2018: averaged weights need statistics of their own (``torch.optim.swa_utils.update_bn``).
    - Y. Wu, J. Johnson, Rethinking "Batch" in BatchNorm, 2021 (``PreciseBN`` of detectron2).
    """
    check_block(net, "precise_statistics")
    found = list(walk(net))
    layers, left = [], []
    for path, block in found:
        if isinstance(block, SyncBatchNorm):
            layers += [] if block._kwargs["use_global_stats"] else [block]
        elif isinstance(block, BATCH_NORMS) or isinstance(block, SymbolBlock):
            left.append(path or block.name)
    if not layers:
        raise ValueError(
            f"precise_statistics got {type(net).__name__} '{net.name}', in which no SyncBatchNorm "
            "follows the batches: call convert_sync_batchnorm or unfreeze before."
        )
    if left:
        _log.warning("precise_statistics does not measure %s.", ", ".join(left))
    mx.nd.waitall()
    end_step()
    before = [(layer, layer._kwargs["momentum"], _count(layer)) for layer in layers]
    try:
        measured.append(net)
        for layer in layers:
            _count_batches(layer)
        compile_again(found)
        with counted(), mx.autograd.train_mode():
            yield
        mx.nd.waitall()
        if not any(map(_count, layers)):
            _log.warning(
                "%s was not called within precise_statistics, so its running statistics stay as "
                "they were: call it with each batch.",
                net.name,
            )
    except BaseException as error:
        native.give_up(error)
        raise
    finally:
        measured.remove(net)
        end_step()
        for layer, momentum, count in before:
            if momentum is not None:
                _follow_batches(layer, momentum)
            elif not _count(layer):
                _set_count(layer, count)
        compile_again(found)


def _count(layer: SyncBatchNorm) -> float | None:
    """The number of batches, or None if the layer does not count them."""
    count = vars(layer).get(_COUNT)
    return None if count is None else count.list_data()[0].asnumpy()[0]


def _set_count(layer: SyncBatchNorm, count: float) -> None:
    for array in layer.num_batches_tracked.list_data():
        array[:] = count


def _count_batches(layer: SyncBatchNorm) -> None:
    if layer._kwargs["momentum"] is not None:
        mean, settings = layer.running_mean, {"init": "zeros", "differentiable": False}
        devices = mean.list_ctx()  # An error here must leave no parameter behind.
        count = layer.params.get(_COUNT, grad_req="null", shape=(1,), **settings)
        count.cast(mean.dtype)
        count.initialize(ctx=devices)
        setattr(layer, _COUNT, count)
        # Copies of the layer share the dict.
        layer._kwargs = {**layer._kwargs, "momentum": None}
        layer._layer.enter(layer)
    else:
        _set_count(layer, 0)


def _follow_batches(layer: SyncBatchNorm, momentum: float) -> None:
    layer._kwargs = {**layer._kwargs, "momentum": momentum}
    count = layer.__dict__.pop(_COUNT, None)
    if count is not None:
        del layer._reg_params[_COUNT], layer.params._params[count.name]
    layer._layer.enter(layer)
