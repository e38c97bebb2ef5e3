"""The operator as one call."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Union

import mxnet as mx
import numpy as np
from mxnet.contrib.amp import amp

from .. import native

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

# As MXNet gives it to NumPy, which has no such dtype.
_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
# What a layer is called with: a symbol where a graph is traced.
ArrayOrSymbol = Union[mx.nd.NDArray, mx.sym.Symbol]
_NUMPY = (mx.np.ndarray, mx.sym.np._Symbol)


def is_numpy(x: Any) -> bool:
    """Whether x is one of MXNet's NumPy arrays or symbols."""
    return isinstance(x, _NUMPY)


def is_bfloat16(dtype: DTypeLike) -> bool:
    return np.dtype(dtype) == _BFLOAT16


def is_true(text: str) -> bool:
    """The value of a flag among a node's attributes."""
    return text in ("True", "true", "1")


class Settings(NamedTuple):
    """What the operator computes: the attributes of its nodes in graphs. Values that are the
    default here, in src/operator/call/attributes.h and in MXNet's BatchNorm are left out."""

    axis: int = 1
    momentum: float | None = 0.9
    epsilon: float = 1e-5
    # Whether gamma counts as 1, with gradient 0.
    fix_gamma: bool = False
    use_global_stats: bool = False
    # Whether the running variance follows the batch's times M / (M - 1).
    unbiased: bool = False
    virtual_devices: int = 0
    activation: str | None = None
    slope: float = 0.01
    inplace: bool = False

    @classmethod
    def read(cls, attributes: Mapping[str, str]) -> Settings:
        """The settings among a node's attributes, which are strings."""
        settings: dict[str, Any] = {}
        for name, default in _DEFAULTS.items():
            text = attributes.get(name, str(default))
            if isinstance(default, bool):
                settings[name] = is_true(text)
            elif text == "None":
                settings[name] = None
            else:
                settings[name] = text if default is None else type(default)(text)
        return cls(**settings)


_DEFAULTS = Settings()._asdict()
_STOCK_HAS_OTHERS = {name: _DEFAULTS[name] for name in ("epsilon", "fix_gamma")}


def _without_amp(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator without the wrapper of ``amp.init``, which casts the data of every custom
    operator to float32, but not that of BatchNorm."""
    while getattr(function, "__globals__", None) is vars(amp):
        wrapped = function.__code__.co_freevars.index("f")
        function = function.__closure__[wrapped].cell_contents
    return function


def sync_batch_norm(
    F: ModuleType,
    x: ArrayOrSymbol,
    gamma: ArrayOrSymbol,
    beta: ArrayOrSymbol,
    running_mean: ArrayOrSymbol,
    running_var: ArrayOrSymbol,
    num_batches_tracked: ArrayOrSymbol | None = None,
    *,
    layer: native.Layer,
    residual: ArrayOrSymbol | None = None,
    copy_layout: bool | None = False,
    name: str | None = None,
    node: int | None = None,
    **settings: Any,
) -> ArrayOrSymbol:
    r"""What :class:`gluon_syncbn.SyncBatchNorm` computes for one device (Ioffe and Szegedy, 2015).

    x has shape (N, C, S): all axes before the channel axis count as N, all after it as S. Sums run
    over n and s on all devices of `layer`, M values in all:

    .. math::
        \mu_c &= \frac1M \sum x_{ncs} \qquad \sigma_c^2 = \frac1M \sum (x_{ncs} - \mu_c)^2 \\
        y_{ncs} &= a\left(\gamma_c \frac{x_{ncs} - \mu_c}{\sqrt{\sigma_c^2 + \epsilon}} + \beta_c
            + r_{ncs}\right)

    with the activation a, and the residual r if there is one. In inference, and with
    `use_global_stats`, the running statistics take the place of :math:`\mu` and :math:`\sigma^2`.

    Backward, with :math:`\hat x = (x - \mu) / \sqrt{\sigma^2 + \epsilon}` and the gradient g of the
    activation's argument, which is dy times 1 or the slope:

    .. math::
        dr &= g \qquad d\beta_c = \sum g_{ncs} \qquad d\gamma_c = \sum g_{ncs} \hat x_{ncs} \\
        dx_{ncs} &= \frac{\gamma_c}{\sqrt{\sigma_c^2 + \epsilon}}
            \left(g_{ncs} - \frac{d\beta_c}{M} - \hat x_{ncs} \frac{d\gamma_c}{M}\right)

    dx takes the sums over all devices. dgamma and dbeta are each device's own, and the Trainer adds
    them.

    Parameters
    ----------
    F : module
        mxnet.nd or mxnet.sym, as in ``hybrid_forward``.
    x, residual : NDArray or Symbol
        2 to 5 dimensions; float16, bfloat16, float32 or float64. MXNet's NumPy arrays and symbols
        are accepted too, here and below.
    gamma, beta, running_mean, running_var, num_batches_tracked : NDArray or Symbol
        The layer's parameters: shape (C,), the last (1,) and with ``momentum=None`` only; float64
        for float64 data, otherwise float32. Training mode updates all but the first two.
    layer : native.Layer
        Decides which devices synchronize.
    copy_layout : {True, False, None}
        Whether to shield the operator from oneDNN's memory layouts on the CPU: MXNet frees its
        plain copy of such an array before this operator, which runs asynchronously, has read it.
        True: a SwapAxis of equal axes before and after copies x, the residual, y and their
        gradients into memory that stays. False: the caller knows that no oneDNN operator makes x,
        the residual or dy. None: the graph is for GPUs; on the CPU it raises.
    name : str, optional
        Of the node in a graph.
    node : int, optional
        The number of this call among those of a graph, if it has several of the layer.
    **settings
        axis, momentum, epsilon, use_global_stats, activation, slope, inplace: as in
        :class:`gluon_syncbn.SyncBatchNorm`. virtual_devices: as in
        :class:`gluon_syncbn.VirtualBatchNorm`. fix_gamma: whether gamma counts as 1, with gradient
        0. unbiased: whether the running variance is.

    Returns
    -------
    y : NDArray or Symbol
        With the shape and dtype of x.

    Raises
    ------
    TypeError
        For an unknown setting.
    MXNetError
        At once for shapes and dtypes that do not fit. On waiting for y as the layer does.
    """
    as_numpy = is_numpy(x)
    swap_axis = _without_amp(F.SwapAxis)
    # This keeps the memory and graph. MXNet's operators take either kind of array, not both.
    data = [each.as_nd_ndarray() for each in (x, residual) if each is not None]
    if copy_layout:
        data = [swap_axis(each, dim1=0, dim2=0) for each in data]
    x, *residuals = data
    statistics = [running_mean, running_var]
    if settings.get("momentum", 0) is None:
        statistics.append(num_batches_tracked)
    if not settings.keys() <= _DEFAULTS.keys():
        raise TypeError(f"sync_batch_norm has no {settings.keys() - _DEFAULTS.keys()}.")
    given = {name: value for name, value in settings.items() if value != _DEFAULTS[name]}
    more = {**_STOCK_HAS_OTHERS, **given}
    if residuals:
        more["residual"] = True
    if node is not None:
        more["node"] = node
    y = _without_amp(F.Custom)(
        x,
        gamma.as_nd_ndarray(),
        beta.as_nd_ndarray(),
        *residuals,
        *(each.as_nd_ndarray() for each in statistics),
        name=name,
        op_type=native.OP_TYPE,
        layer=layer.id,
        process=native.PROCESS,
        gpu_only=copy_layout is None,
        **more,
    )[0]
    if copy_layout:
        y = swap_axis(y, dim1=0, dim2=0)
    return y.as_np_ndarray() if as_numpy else y
