"""SyncBatchNorm, the layer."""

import itertools
import math
import numbers

import mxnet as mx
import numpy as np
from mxnet.gluon import nn
from mxnet.util import is_np_array

from .. import native
from ..distributed.group import SyncGroup
from .operator import is_numpy, sync_batch_norm
from .synced_layer import SyncedLayer

# As MXNet gives it to NumPy, which has no such dtype.
_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_bfloat16(dtype):
    return np.dtype(dtype) == _BFLOAT16


def _same_memory(a, b):
    """Of contexts, as MXNet looks for a Parameter's array: cpu, cpu_pinned and cpu_shared are."""
    return (a.device_typeid & 1, a.device_id) == (b.device_typeid & 1, b.device_id)


class SyncBatchNorm(nn.BatchNorm):
    r"""Batch normalization with the statistics of the whole mini-batch, over all devices.

    .. math:: y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta

    with the mean :math:`\mu` and the biased variance :math:`\sigma^2` of each channel over all
    values of that channel on all devices;
    :func:`gluon_syncbn.layers.operator.sync_batch_norm` has the backward. It takes the place of
    :class:`mxnet.gluon.nn.BatchNorm`: same arguments, same parameters, same files. The
    results are the same, bit for bit, however a batch is split over devices and threads.

    Training code stays as it is: the net is called once for each device inside
    ``autograd.record()``, and no result is waited for before every device was called. In inference
    devices do not wait for each other.

    Parameters
    ----------
    axis : int, default 1
        The axis of the channels.
    momentum : float or None, default 0.9
        ``running = momentum * running + (1 - momentum) * batch`` in each forward in training mode.
        (Elsewhere momentum often names the other factor.) None: running statistics are the mean
        over all batches since the initialization, as with ``momentum=None`` in PyTorch, and the
        layer has one parameter more.
    epsilon : float, default 1e-5
        Added to the variance.
    center, scale : bool, default True
        Whether beta and gamma are trained. Without scale, gamma is taken for 1.
    use_global_stats : bool, default False
        Normalize with the running statistics in training too, and leave them as they are.
    beta_initializer, gamma_initializer, running_mean_initializer, running_variance_initializer
        str or Initializer.
    in_channels : int, default 0
        The number of channels C; 0: taken from the first data.
    num_devices : int, optional
        How many devices take part, where that is not all on which the parameters live.
    group : SyncGroup, optional
        Which devices and processes take part, and how long they wait for each other. By default
        what :func:`gluon_syncbn.set_default_group` says.
    running_variance : {"biased", "unbiased"}, default "biased"
        Whether the running variance follows :math:`\sigma^2`, or :math:`\sigma^2 M / (M - 1)` for
        M values of a channel, which is not smaller than the data's on the average. (M = 1 is taken
        as biased.) ``nn.BatchNorm`` has the biased one on the CPU and the unbiased one through
        cuDNN; PyTorch has the unbiased one. What the batch is normalized by is always biased.

    Parameters of the layer
    -----------------------
    gamma, beta, running_mean, running_var
        Shape (C,), named and saved as those of ``nn.BatchNorm``.
    num_batches_tracked
        Shape (1,), with ``momentum=None`` only: the number of batches so far. A file of a layer
        that has none is loaded with ``allow_missing=True`` into an initialized layer, and
        ``layer.num_batches_tracked.set_data(mx.nd.zeros(1))`` begins the average anew.

    Inputs and outputs
    ------------------
    x : (N, C), (N, C, W), (N, C, H, W) or (N, C, D, H, W), or with C on another `axis`; of dtype
    float16, bfloat16, float32 or float64. The output has its shape and dtype. Parameters are
    float64 with float64 data, and else float32: ``cast`` sees to it. After ``mx.npx.set_np()`` all
    are MXNet's NumPy arrays.

    Raises
    ------
    ValueError
        For arguments that make no sense, and for data on a context that has no parameters.
    TypeError
        For an ``mx.nd`` array after ``mx.npx.set_np()``.
    MXNetError
        Where a result is waited for, when a device does not come, comes twice, or brings other
        channels. Afterwards ``mx.nd.waitall()`` fetches what other devices have to say of the same
        error, and training can go on.

    References
    ----------
    S. Ioffe and C. Szegedy, Batch Normalization, ICML 2015.
    H. Zhang et al., Context Encoding for Semantic Segmentation, CVPR 2018.
    """

    _virtual_devices = 0

    def __init__(
        self,
        axis=1,
        momentum=0.9,
        epsilon=1e-5,
        center=True,
        scale=True,
        use_global_stats=False,
        beta_initializer="zeros",
        gamma_initializer="ones",
        running_mean_initializer="zeros",
        running_variance_initializer="ones",
        in_channels=0,
        num_devices=None,
        group=None,
        running_variance="biased",
        **kwargs,
    ):
        # Data has 2 to 5 axes.
        if not (isinstance(axis, numbers.Integral) and -5 <= axis < 5) or isinstance(axis, bool):
            raise ValueError(f"axis is {axis!r}: give that of the channels, from -5 to 4.")
        if not (momentum is None or _is_number(momentum) and 0 <= momentum <= 1):
            raise ValueError(f"momentum is {momentum!r}: give a number from 0 to 1, or None.")
        if not (_is_number(epsilon) and 0 <= epsilon < math.inf):
            raise ValueError(f"epsilon is {epsilon!r}: give a number of 0 or more.")
        if running_variance not in ("biased", "unbiased"):
            raise ValueError(
                f"running_variance is {running_variance!r}: give 'biased' or 'unbiased'."
            )
        if num_devices is not None:
            if not (isinstance(num_devices, numbers.Real) and num_devices in range(1, 1 << 16)):
                raise ValueError(
                    f"num_devices is {num_devices!r}: give the number of devices that take part, "
                    "or None for all on which the parameters live."
                )
            num_devices = int(num_devices)
        if group is not None and not isinstance(group, SyncGroup):
            raise ValueError(f"group is {group!r}: give a gluon_syncbn.SyncGroup, or None.")
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
            in_channels=in_channels,
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
        self._running_variance = running_variance
        self._num_devices = num_devices
        self._own_group = group
        self._meet()

    def _meet(self):
        """Becomes a layer of its own, whose devices meet each other."""
        self._layer = SyncedLayer(self)
        self._node_ids = itertools.count()

    def __getstate__(self):
        return {**self.__dict__, "_layer": None, "_node_ids": None}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._meet()

    def _clear_cached_op(self):
        super()._clear_cached_op()
        # The graph is traced again, and its places are to be those of other processes, which may
        # trace less often.
        self._node_ids = itertools.count()

    def cast(self, dtype):
        # As nn.BatchNorm does for float16: the parameters for data of 16 bits are float32.
        halves = dtype == "bfloat16" or is_bfloat16(dtype)
        super().cast("float32" if halves else dtype)

    def forward(self, x, *args):
        if isinstance(x, (list, tuple)):
            raise TypeError(
                f"{self.name} was called with a {type(x).__name__} of {len(x)}: call it with one "
                "array at a time, once for each device."
            )
        if is_np_array() and isinstance(x, mx.nd.NDArray) and not is_numpy(x):
            # MXNet says the same when it has the result, for which other devices would wait then.
            raise TypeError(
                f"{self.name} was called with an mx.nd array, and MXNet's NumPy arrays are "
                "switched on: give mx.np arrays, such as x.as_np_ndarray(), or call "
                "mx.npx.reset_np() before the net is made."
            )
        contexts = self._layer.contexts()
        if isinstance(x, mx.nd.NDArray) and contexts and x.context not in contexts:
            # As MXNet looks for parameters: a DataLoader's workers give arrays on cpu_shared(0).
            own = [context for context in contexts if _same_memory(context, x.context)]
            if own:
                return super().forward(x.as_in_context(own[0]), *args)
            raise ValueError(
                f"{self.name} was called with data on {x.context}, but its parameters live on "
                f"{contexts}: initialize the net on every context in use "
                "(net.initialize(ctx=[...]) or net.collect_params().reset_ctx([...])), or move the "
                "data."
            )
        return super().forward(x, *args)

    def hybrid_forward(
        self, F, x, gamma, beta, running_mean, running_var, num_batches_tracked=None
    ):
        settings = self._kwargs
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
            axis=settings["axis"],
            momentum=settings["momentum"],
            epsilon=settings["eps"],
            fix_gamma=bool(settings["fix_gamma"]),
            node=next(self._node_ids) if F is mx.sym else -1,
            use_global_stats=bool(settings["use_global_stats"]),
            running_variance=self._running_variance,
            virtual_devices=self._virtual_devices,
            copy_layout=native.HAS_ONEDNN if on_cpu else None,
            name="fwd",
        )

    def __repr__(self):
        group, devices = self._layer.group, self._layer.all_devices()
        text = f", virtual_devices={self._virtual_devices}" if self._virtual_devices else ""
        if self._running_variance != "biased":
            text += f", running_variance={self._running_variance}"
        text += f", num_devices={self._num_devices}" if self._num_devices else ""
        text += f", devices={devices}"
        if group.group_size and not self._virtual_devices:
            text += f", group_size={group.group_size}"
        text += f", processes={group.size}" if group.size > 1 else ""
        return f"{super().__repr__()[:-1]}{text})"


class SyncBatchNormReLU(SyncBatchNorm):
    """:class:`SyncBatchNorm` with a relu behind it: what ``nn.BatchNormReLU`` is to
    ``nn.BatchNorm``.

    Arguments, parameters, shapes and errors are those of :class:`SyncBatchNorm`, also where MXNet
    has ``nn.BatchNormReLU`` for nothing but float32 data of 4 dimensions with axis=1 on the CPU.
    (With NumPy's arrays MXNet leaves its relu out.)
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fuse_relu = True

    def hybrid_forward(self, F, x, **parameters):
        y = super().hybrid_forward(F, x, **parameters)
        activation = F.npx.activation if is_numpy(y) else F.Activation
        return activation(y, act_type="relu", name="relu")
