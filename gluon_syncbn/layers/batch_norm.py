"""SyncBatchNorm, the layer."""

from __future__ import annotations

import inspect
import math
import numbers
import reprlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn
from mxnet.util import is_np_array

from .. import native
from ..arguments import error_for, is_number, is_whole
from ..groups.group import SyncGroup, check_group
from ._advice import ELSEWHERE, hint_at_small
from .operator import ArrayOrSymbol, Settings, is_bfloat16, is_numpy, sync_batch_norm
from .synced_layer import SyncedLayer

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


def _same_memory(a: mx.Context, b: mx.Context) -> bool:
    """Whether MXNet finds the same array of a Parameter for both contexts: cpu, cpu_pinned and
    cpu_shared count as one."""
    return (a.device_typeid & 1, a.device_id) == (b.device_typeid & 1, b.device_id)


class SyncBatchNorm(nn.BatchNorm):
    r"""Batch normalization with the statistics of the whole mini-batch, over all devices.

    .. math:: y = a\left(\gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta + r\right)

    with the mean :math:`\mu` and the biased variance :math:`\sigma^2` of each channel over all
    devices, an activation a if the layer has one, and a residual r if it is called as
    ``layer(x, r)``. :func:`gluon_syncbn.layers.operator.sync_batch_norm` gives the backward. A
    drop-in for :class:`mxnet.gluon.nn.BatchNorm`: same arguments, same parameters, same files of
    ``save_parameters``. Results have the same bits however a batch is split over devices and
    threads.

    Training code does not change: call the net once for each device inside ``autograd.record()``,
    and do not wait for a result before every device has been called. In inference, devices do not
    wait for each other.

    Parameters
    ----------
    axis : int, default 1
        The axis of the channels.
    momentum : float or None, default 0.9
        ``running = momentum * running + (1 - momentum) * batch`` in each forward in training mode.
        (PyTorch calls the other factor momentum, so a value between 0 and 0.5 logs a warning.)
        None: running statistics are the mean over all batches since the initialization, as with
        ``momentum=None`` in PyTorch. The layer then has the parameter num_batches_tracked.
    epsilon : float, default 1e-5
        Added to the variance.
    center, scale : bool, default True
        Whether beta and gamma are trained. Without scale, gamma counts as 1.
    use_global_stats : bool, default False
        Normalize with the running statistics in training too, and do not update them.
    beta_initializer, gamma_initializer, running_mean_initializer, running_variance_initializer
        str or Initializer.
    in_channels : int, default 0
        The number of channels C; 0: inferred from the first data.
    num_devices : int, optional
        The number of devices that take part. By default all contexts of the parameters.
    group : SyncGroup, optional
        Which devices and processes take part, and how long they wait for each other. By default
        the group set by :func:`gluon_syncbn.set_default_group`.
    running_variance : {"biased", "unbiased"}, default "biased"
        Whether the running variance follows :math:`\sigma^2`, or :math:`\sigma^2 M / (M - 1)` for
        M > 1 values of a channel. ``nn.BatchNorm`` uses the biased one on the CPU and the unbiased
        one through cuDNN; PyTorch uses the unbiased one. The batch itself is always normalized by
        the biased variance.
    activation : {None, "relu", "leaky_relu"}, default None
        The activation, computed in the same pass over the data. Outputs, gradients and running
        statistics are bit-identical to the layer followed by ``elemwise_add`` of the residual and
        ``Activation`` or ``LeakyReLU``. (Exceptions: a leaky relu of 16-bit or float64 data, which
        MXNet rounds more often; NaN and infinity; the sign of a gradient of 0.)
    slope : float, default 0.01
        The leaky relu's slope for negative values, 0 or more.
    inplace : bool, default False
        Whether backward recovers x from y, so that MXNet frees x after the forward. For
        ``activation="leaky_relu"`` with a positive `slope` and epsilon, without a residual.
        Gradients are those of x rounded once more: they lose digits where the magnitude of beta is
        much larger than that of gamma. gamma is used with a magnitude of at least `epsilon`, in
        inference too. It saves nothing on CPU contexts of a oneDNN build, where a copy of y
        replaces x.

    Parameters of the layer
    -----------------------
    gamma, beta, running_mean, running_var
        Shape (C,), named and saved as those of ``nn.BatchNorm``.
    num_batches_tracked
        Shape (1,), with ``momentum=None`` only: the number of batches so far. Load files without it
        with ``allow_missing=True`` into an initialized layer.
        ``layer.num_batches_tracked.set_data(mx.nd.zeros(1))`` restarts the average.

    Inputs and outputs
    ------------------
    x : (N, C), (N, C, W), (N, C, H, W) or (N, C, D, H, W), or with C on another `axis`; of dtype
    float16, bfloat16, float32 or float64. The residual and the output have its shape and dtype.
    Parameters are float64 for float64 data and float32 for all others, as ``cast`` makes them.
    After ``mx.npx.set_np()`` all are MXNet's NumPy arrays.

    Raises
    ------
    ValueError
        For arguments out of range, for data on a context without parameters, and for a residual
        with ``inplace=True``.
    TypeError
        For arguments of another type, an input that is not an MXNet array, and an ``mx.nd`` array
        after ``mx.npx.set_np()``.
    MXNetError
        On waiting for a result, if a device does not arrive, arrives twice, or has another number
        of channels. In one process, training can go on with the next step; of several, all start
        again from the last checkpoint.

    References
    ----------
    - S. Ioffe and C. Szegedy, Batch Normalization, ICML 2015.
    - H. Zhang et al., Context Encoding for Semantic Segmentation, CVPR 2018.
    - S. Rota Bulo, L. Porzi, P. Kontschieder, In-Place Activated BatchNorm for Memory-Optimized
      Training of DNNs, CVPR 2018, for `inplace`. (There gamma counts as its magnitude plus
      epsilon.)
    """

    def __init__(
        self,
        axis: int = 1,
        momentum: float | None = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        beta_initializer: str | mx.init.Initializer = "zeros",
        gamma_initializer: str | mx.init.Initializer = "ones",
        running_mean_initializer: str | mx.init.Initializer = "zeros",
        running_variance_initializer: str | mx.init.Initializer = "ones",
        in_channels: int = 0,
        num_devices: int | None = None,
        group: SyncGroup | None = None,
        running_variance: str = "biased",
        activation: str | None = None,
        slope: float = 0.01,
        inplace: bool = False,
        **kwargs: Any,
    ) -> None:
        for name in set(kwargs) - {"prefix", "params"}:
            known = [*inspect.signature(SyncBatchNorm).parameters][:-1] + ["prefix", "params"]
            advice = ELSEWHERE.get(name, f"give some of {', '.join(known)}")
            raise TypeError(f"{type(self).__name__} has no argument {name!r}: {advice}.")
        # Data has 2 to 5 axes.
        if not (is_whole(axis) and -5 <= axis < 5):
            contrib = f" Or in_channels={axis}, which contrib's and PyTorch's layers take first."
            raise error_for(axis)(
                f"axis is {axis!r}: give that of the channels, from -5 to 4."
                + (contrib if is_whole(axis) and axis > 0 else "")
            )
        if not (momentum is None or is_number(momentum) and 0 <= momentum <= 1):
            raise error_for(momentum)(
                f"momentum is {momentum!r}: give a number from 0 to 1, or None."
            )
        if momentum and momentum < 0.5:
            hint_at_small(float(momentum))
        if not (is_number(epsilon) and 0 <= epsilon < math.inf):
            raise error_for(epsilon)(f"epsilon is {epsilon!r}: give a number of 0 or more.")
        if str(running_variance) not in ("biased", "unbiased"):
            raise error_for(running_variance, str)(
                f"running_variance is {running_variance!r}: give 'biased' or 'unbiased'."
            )
        if not (is_whole(in_channels) and in_channels >= 0):
            raise error_for(in_channels)(
                f"in_channels is {in_channels!r}: give the number of channels, or 0 to take that "
                "of the first data."
            )
        flags = {"center": center, "scale": scale, "use_global_stats": use_global_stats}
        for name, value in {**flags, "inplace": inplace}.items():
            if not isinstance(value, (numbers.Integral, np.bool_, type(None))):
                raise TypeError(f"{name} is {value!r}: give True or False.")
        if num_devices is not None:
            if not (is_number(num_devices) and num_devices in range(1, 1 << 16)):
                raise error_for(num_devices)(
                    f"num_devices is {num_devices!r}: give the number of devices that take part, "
                    "or None for all on which the parameters live."
                )
            num_devices = int(num_devices)
        check_group(group)
        if activation is not None and str(activation) not in ("relu", "leaky_relu"):
            raise error_for(activation, str)(
                f"activation is {activation!r}: give None, 'relu' or 'leaky_relu', and call any "
                "other after the layer."
            )
        if not (is_number(slope) and 0 <= slope < math.inf):
            raise error_for(slope)(f"slope is {slope!r}: give a finite number of 0 or more.")
        if inplace and not (activation == "leaky_relu" and slope and epsilon):
            raise ValueError(
                f"inplace=True was given with activation={activation!r}, slope={slope:g}, "
                f"epsilon={epsilon:g}: backward can recover x only with activation='leaky_relu' "
                "and a slope and an epsilon above 0. Give these, or leave inplace out."
            )
        super().__init__(
            axis=int(axis),
            momentum=momentum if momentum is None else float(momentum),
            epsilon=float(epsilon),
            center=center,
            scale=scale,
            use_global_stats=use_global_stats,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            running_mean_initializer=running_mean_initializer,
            running_variance_initializer=running_variance_initializer,
            in_channels=int(in_channels),
            **kwargs,
        )
        if momentum is None:
            self.num_batches_tracked = self.params.get(
                "num_batches_tracked",
                grad_req="null",
                shape=(1,),
                init="zeros",
                differentiable=False,
            )
        # Those that nn.BatchNorm lacks; _kwargs has the others.
        self._own_settings = {
            "unbiased": str(running_variance) == "unbiased",
            "virtual_devices": 0,
            "activation": None if activation is None else str(activation),
            "slope": float(slope),
            "inplace": bool(inplace),
        }
        self._num_devices = num_devices
        self._own_group = group
        self._meet()

    def _meet(self) -> None:
        """Gives the block a layer of its own in the native library."""
        self._layer = SyncedLayer.of(self)

    @property
    def group(self) -> SyncGroup:
        """The SyncGroup of the layer: its own, or the default one."""
        return self._layer.group

    @group.setter
    def group(self, group: SyncGroup | None) -> None:
        raise AttributeError(
            f"{type(self).__name__}.group cannot be set, to {group!r}: give the group to "
            "SyncBatchNorm(group=...), to gluon_syncbn.convert_sync_batchnorm(net, group=...) for "
            "the layers of a net that is built, or to gluon_syncbn.set_default_group for all that "
            "have none of their own."
        )

    def _settings(self) -> dict[str, Any]:
        stock = self._kwargs
        return {
            **self._own_settings,
            "axis": stock["axis"],
            "momentum": stock["momentum"],
            "epsilon": stock["eps"],
            "fix_gamma": bool(stock["fix_gamma"]),
            "use_global_stats": bool(stock["use_global_stats"]),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_layer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._meet()

    def cast(self, dtype: DTypeLike) -> None:
        # As nn.BatchNorm does for float16: parameters for 16-bit data are float32.
        halves = dtype == "bfloat16" or is_bfloat16(dtype)
        super().cast("float32" if halves else dtype)

    def forward(self, x: ArrayOrSymbol, residual: ArrayOrSymbol | None = None) -> ArrayOrSymbol:
        if autograd.is_training():
            native.begin_training(self._layer)
        if residual is not None and self._own_settings["inplace"]:
            raise ValueError(
                f"{self.name} was called with a residual, and has inplace=True, where backward "
                "recovers x from y: leave inplace out, or add the residual after the layer."
            )
        more = () if residual is None else (self._placed(residual),)
        return super().forward(self._placed(x), *more)

    def _placed(self, x: ArrayOrSymbol) -> ArrayOrSymbol:
        """An input, on a context of the parameters."""
        if isinstance(x, (list, tuple)):
            raise TypeError(
                f"{self.name} was called with a {type(x).__name__} of {len(x)}: call it with one "
                "array at a time, once for each device."
            )
        if not isinstance(x, (mx.nd.NDArray, mx.sym.Symbol)):
            raise TypeError(
                f"{self.name} was called with {reprlib.repr(x)}: give an NDArray, such as "
                "mx.nd.array(...), or a Symbol."
            )
        if is_np_array() and isinstance(x, mx.nd.NDArray) and not is_numpy(x):
            # MXNet would say so only once it has the result, while other devices wait.
            raise TypeError(
                f"{self.name} was called with an mx.nd array, and MXNet's NumPy arrays are "
                "switched on: give mx.np arrays, such as x.as_np_ndarray(), or call "
                "mx.npx.reset_np() before the net is made."
            )
        contexts = self._layer.contexts()
        if isinstance(x, mx.nd.NDArray) and contexts and x.context not in contexts:
            # MXNet finds parameters in the same way: a DataLoader's workers give arrays on
            # cpu_shared(0).
            own = [context for context in contexts if _same_memory(context, x.context)]
            if own:
                return x.as_in_context(own[0])
            raise ValueError(
                f"{self.name} was called with data on {x.context}, but its parameters live on "
                f"{contexts}: initialize the net on every context in use "
                "(net.initialize(ctx=[...]) or net.collect_params().reset_ctx([...])), or move the "
                "data."
            )
        return x

    def hybrid_forward(
        self,
        F: ModuleType,
        x: ArrayOrSymbol,
        residual: ArrayOrSymbol | None = None,
        *,
        gamma: ArrayOrSymbol,
        beta: ArrayOrSymbol,
        running_mean: ArrayOrSymbol,
        running_var: ArrayOrSymbol,
        num_batches_tracked: ArrayOrSymbol | None = None,
    ) -> ArrayOrSymbol:
        contexts = self._layer.contexts()
        on_cpu = not contexts or any(context.device_type != "gpu" for context in contexts)
        return sync_batch_norm(
            F,
            x,
            gamma,
            beta,
            running_mean,
            running_var,
            num_batches_tracked,
            layer=self._layer,
            residual=residual,
            copy_layout=native.HAS_ONEDNN if on_cpu else None,
            name="fwd",
            **self._settings(),
        )

    def __repr__(self) -> str:
        group, devices = self._layer.group, self._layer.all_devices()
        text = "".join(
            f", {name}={value}"
            for name, value in self._own_settings.items()
            if value != getattr(Settings(), name)
        ).replace("unbiased=True", "running_variance=unbiased")
        text += f", num_devices={self._num_devices}" if self._num_devices else ""
        text += f", devices={devices}"
        if group.group_size and not self._own_settings["virtual_devices"]:
            text += f", group_size={group.group_size}"
        text += f", processes={group.size}" if group.size > 1 else ""
        return f"{super().__repr__()[:-1]}{text})"


class SyncBatchNormReLU(SyncBatchNorm):
    """:class:`SyncBatchNorm` with ``activation="relu"``, in place of ``nn.BatchNormReLU``.

    (MXNet's own ``nn.BatchNormReLU`` takes only float32 data of 4 dimensions with axis=1 on the
    CPU, and omits the relu for NumPy's arrays.)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # To mypy, the arguments by position might reach that far.
        super().__init__(*args, activation="relu", **kwargs)  # type: ignore[misc]
        self.fuse_relu = True
