"""Batches of any size in Gluon's Estimator."""

from __future__ import annotations

from typing import Any, Sequence

from mxnet.context import Context
from mxnet.gluon.contrib.estimator import BatchProcessor, Estimator
from mxnet.gluon.utils import split_and_load

from .participants import participants


class UnevenBatches(BatchProcessor):
    """A BatchProcessor for batches that do not divide evenly among the devices, in training and in
    validation. A batch with fewer samples than devices leaves the last devices idle, as
    :class:`participants` does.

    ::

        from mxnet.gluon.contrib.estimator import Estimator

        Estimator(net, loss, context=devices, trainer=trainer, batch_processor=sbn.UnevenBatches())
    """

    def fit_batch(
        self, estimator: Estimator, train_batch: Sequence[Any], batch_axis: int = 0
    ) -> Any:
        with participants(estimator.context[: train_batch[0].shape[batch_axis]]):
            return super().fit_batch(estimator, train_batch, batch_axis)

    def _get_data_and_label(
        self, batch: Sequence[Any], ctx: Sequence[Context], batch_axis: int = 0
    ) -> list[Any]:
        used = ctx[: batch[0].shape[batch_axis]]
        return [split_and_load(part, used, batch_axis, even_split=False) for part in batch[:2]]
