"""Gives the graph of each Module that trains layers of its own, which synchronize its contexts."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Callable

from .. import native
from ..layers.batch_norm import SyncBatchNorm
from .symbols import OUR_OPERATOR, ROLES, Graph, Node, settings_of, taken_apart

if TYPE_CHECKING:
    import mxnet as mx
    from mxnet.module.executor_group import DataParallelExecutorGroup


def new_layer(node: Node, activation: str | None = None) -> SyncBatchNorm:
    """A SyncBatchNorm with the settings of a node of batch normalization, without its parameters
    and what is fused into it."""
    settings = settings_of(node)
    stem = node.name[: -len("_fwd")] if node.name.endswith("_fwd") else node.name
    return SyncBatchNorm(
        axis=settings.axis,
        momentum=settings.momentum,
        epsilon=settings.epsilon,
        scale=not settings.fix_gamma,
        use_global_stats=settings.use_global_stats,
        running_variance="unbiased" if settings.unbiased else "biased",
        activation=activation,
        prefix=f"{stem}_",
    )


def with_layers(symbol: mx.sym.Symbol) -> tuple[mx.sym.Symbol, dict[SyncBatchNorm, str]]:
    """A symbol whose nodes of ours have layers, and {layer: the name of its running mean}. A node
    keeps a layer of this process that knows its devices or their number."""
    if native.OP_TYPE not in symbol.tojson():
        return symbol, {}
    graph = Graph(symbol)
    known = {str(layer.id): layer for layer in native.layers()}
    layers: dict[tuple[str, str], SyncBatchNorm] = {}
    means: dict[SyncBatchNorm, str] = {}
    for node in graph.nodes():
        if node.operator not in OUR_OPERATOR or settings_of(node).virtual_devices:
            continue
        own = node.attrs["process"] == native.PROCESS and known.get(node.attrs["layer"])
        if own and (own._num_devices or own.all_devices()):
            continue
        key = node.attrs["process"], node.attrs["layer"]
        if key not in layers:
            layers[key] = layer = new_layer(node)
            layer._layer.join(own._own_group if own else None, None)
            means[layer] = taken_apart(node)[2][ROLES.index("running_mean")][0].name
        node.attrs.update(process=native.PROCESS, layer=str(layers[key]._layer.id))
    return graph.symbol_like(symbol), means


# The arguments of a DataParallelExecutorGroup between the contexts and `for_training`.
_BETWEEN = 4


def making_layers(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``DataParallelExecutorGroup.__init__``."""

    @functools.wraps(init)
    def init_with_layers(
        group: DataParallelExecutorGroup,
        symbol: mx.sym.Symbol,
        contexts: list[mx.Context],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        means: dict[SyncBatchNorm, str] = {}
        if kwargs.get("for_training", args[_BETWEEN] if len(args) > _BETWEEN else False):
            symbol, means = with_layers(symbol)
        group._sync_layers = list(means)
        init(group, symbol, contexts, *args, **kwargs)
        for layer, mean in means.items():
            # Where MXNet has placed the node: group2ctxs may say another device than `contexts`.
            devices = [executor.aux_dict[mean].context for executor in group.execs]
            if len(set(devices)) < len(devices):
                raise ValueError(
                    f"The Module calls {layer.name} on {devices}: give a context once only, in "
                    "`context` and in each group of `group2ctxs`."
                )
            # Deferred, as the channels are unknown: the arrays are the Module's.
            layer.initialize(ctx=devices)
            layer._layer.configure()
            layer._layer._executors = functools.partial(_written, weakref.ref(group), mean)

    return init_with_layers


def _written(
    group: Callable[[], DataParallelExecutorGroup | None], mean: str, all: bool = False
) -> dict[str, list[mx.nd.NDArray]]:
    """{device: [the running mean, ...]} of a group that may be gone. MXNet does not know that the
    calls of an executor write it; errors are in its outputs and its first gradient, or in all."""
    written = {}
    for executor in getattr(group(), "execs", ()):
        array = executor.aux_dict[mean]
        gradients = [gradient for gradient in executor.grad_arrays if gradient is not None]
        others = [*gradients, *executor.arg_arrays] if all else gradients[:1]
        written[str(array.context)] = [array, *executor.outputs, *others]
    return written


def noting_training(forward: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``DataParallelExecutorGroup.forward``."""

    @functools.wraps(forward)
    def forward_and_note(
        group: DataParallelExecutorGroup, data_batch: mx.io.DataBatch, is_train: bool | None = None
    ) -> None:
        # Later probes are queued behind what follows, which may wait for another context.
        for layer in group._sync_layers[:1]:
            layer._layer.watch_written()
        if group.for_training if is_train is None else is_train:
            for layer in group._sync_layers:
                native.begin_training(layer._layer)
        forward(group, data_batch, is_train)

    return forward_and_note
