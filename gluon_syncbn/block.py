"""SyncBatchNorm, the layer."""

import itertools
import math
import numbers
import weakref

import mxnet as mx
import numpy as np
from mxnet.gluon import nn
from mxnet.gluon.parameter import Parameter
from mxnet.util import is_np_array

from . import _native
from .functional import is_numpy, sync_batch_norm
from .group import SyncGroup, default_group, follow_default_group, is_whole, stop_following

# As MXNet gives it to NumPy, which has no such dtype.
_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_bfloat16(dtype):
    return np.dtype(dtype) == _BFLOAT16


def _same_memory(a, b):
    """Of contexts, as MXNet looks for a Parameter's array: cpu, cpu_pinned and cpu_shared are."""
    return (a.device_typeid & 1, a.device_id) == (b.device_typeid & 1, b.device_id)


class _Watched(Parameter):
    """A parameter that tells its layers on which contexts it lives, whenever that changes, and when
    it gets other values than the layers give it. It keeps them alive: a graph may use the parameter
    after the block is gone."""

    def _init_impl(self, data, ctx_list):
        super()._init_impl(data, ctx_list)
        for layer in self._layers:
            layer.configure()
            layer.on_new_values(self)

    def set_data(self, data):
        super().set_data(data)
        for layer in self._layers:
            layer.on_new_values(self)

    def reset_ctx(self, ctx):
        # Calls under way meet on the devices that there were. What failed raises here, as a copy of
        # an array that holds an error would never be filled.
        mx.nd.waitall()
        super().reset_ctx(ctx)

    def cast(self, dtype):
        self._raise_errors()
        super().cast(dtype)

    def _raise_errors(self):
        for array in self._data or ():
            array.wait_to_read()

    def __getstate__(self):
        # The layers of a copy or of a pickle come and watch by themselves.
        return {**self.__dict__, "_layers": None}

    def __setstate__(self, state):
        self.__dict__.update(state, _layers=set())

    @classmethod
    def watch(cls, parameter, layer):
        # The object stays the same one: others share it.
        if not isinstance(parameter, cls):
            parameter.__class__ = cls
            parameter._layers = set()
        parameter._layers.add(layer)

    @staticmethod
    def unwatch(parameter, layer):
        parameter._layers.discard(layer)
        # Others may share it.
        if not parameter._layers:
            del parameter._layers
            parameter.__class__ = Parameter


class SyncedLayer(_native.Layer):
    """The part of a layer that outlives its block: its parameters, and which devices synchronize.

    The block and its running statistics hold it. So a graph that was made of the block goes on as
    long as the parameters are there.
    """

    def __init__(self, block):
        parameters = [block.running_mean, block.running_var, block.gamma, block.beta]
        if block._kwargs["momentum"] is None:
            parameters.append(block.num_batches_tracked)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        super().__init__(block.name)
        for parameter in parameters[:2]:
            _Watched.watch(parameter, self)
        self.join(block._own_group, block._num_devices)

    def leave(self):
        """The block no longer synchronizes."""
        stop_following(self)
        for parameter in self._parameters[:2]:
            if isinstance(parameter(), _Watched):
                _Watched.unwatch(parameter(), self)

    def join(self, group, num_devices):
        """Synchronizes with the devices of the group; None: of the default group."""
        self._own_group, self._num_devices = group, num_devices
        if group is None:
            follow_default_group(self)
        self.configure()

    @property
    def group(self):
        return self._own_group or default_group()

    def contexts(self):
        """The contexts of the parameters, or of their deferred initialization; none before that."""
        parameter = self._parameters[0]()
        if parameter is None or parameter._data is None and not parameter._deferred_init:
            return []
        return parameter.list_ctx()

    def all_devices(self):
        return list(self.group.devices or dict.fromkeys(map(str, self.contexts())))

    def device_groups(self):
        """The devices of this process in lists of those that synchronize."""
        devices = self.all_devices()
        size = min(self.group.group_size or len(devices), len(devices))
        return [devices[i : i + size] for i in range(0, len(devices), size or 1)]

    def configure(self):
        self.group._configure(self, self.all_devices(), self._num_devices)

    def on_new_values(self, parameter):
        """Somebody writes a running statistic."""
        self.restart(variance=parameter is self._parameters[1]())

    def dtype(self):
        parameter = self._parameters[0]()
        return np.dtype(parameter.dtype).name if parameter is not None else "?"

    def fail(self, text):
        self.group._fail(text)

    def running_statistics(self):
        mean, variance, _, _, *count = (parameter() for parameter in self._parameters)
        return _by_device([mean, variance, *count], Parameter.list_data)

    def written_by(self, backward):
        if not backward:
            return self.running_statistics()
        trained = [parameter() for parameter in self._parameters[2:4]]
        trained = [p for p in trained if p is not None and p.grad_req != "null"]
        return _by_device(trained, Parameter.list_grad)


def _by_device(parameters, arrays_of):
    """{device: arrays}; empty before the parameters have values, or after they are gone."""
    # An initialization that an error ended leaves some parameters without.
    if any(parameter is None or parameter._data is None for parameter in parameters):
        return {}
    arrays = zip(*map(arrays_of, parameters))
    return {str(first.context): (first, *others) for first, *others in arrays}


class SyncBatchNorm(nn.BatchNorm):
    r"""Batch normalization with the statistics of the whole mini-batch, over all devices.

    .. math:: y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta

    with the mean :math:`\mu` and the biased variance :math:`\sigma^2` of each channel over all
    values of that channel on all devices; :mod:`gluon_syncbn.functional` has the backward. It takes
    the place of :class:`mxnet.gluon.nn.BatchNorm`: same arguments, same parameters, same files. The
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
        self._places = itertools.count()

    def __getstate__(self):
        return {**self.__dict__, "_layer": None, "_places": None}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._meet()

    def _clear_cached_op(self):
        super()._clear_cached_op()
        # The graph is traced again, and its places are to be those of other processes, which may
        # trace less often.
        self._places = itertools.count()

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
            place=next(self._places) if F is mx.sym else -1,
            use_global_stats=bool(settings["use_global_stats"]),
            running_variance=self._running_variance,
            virtual_devices=self._virtual_devices,
            gate=_native.HAS_ONEDNN if on_cpu else None,
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


class VirtualBatchNorm(SyncBatchNorm):
    r"""Batch normalization as by several devices that do not synchronize, on each device.

    The batch of a device is cut along its first axis into `virtual_devices` chunks, the first of
    them larger by one sample where that does not come out even. Each chunk i is normalized by its
    own statistics:

    .. math:: y_i = \gamma \frac{x_i - \mu_i}{\sqrt{\sigma_i^2 + \epsilon}} + \beta

    y, dx and the running statistics are those of so many times the devices that do not wait for
    each other, bit for bit, but with the memory of one device and in one call. (The running
    statistics are the mean of the devices', which is what MXNet saves of them. The gradients of
    gamma and beta are added in double before they are rounded, those of devices after.) So a
    training that many unsynchronized GPUs did can be done again on few. For large batches the same
    is known as ghost batch normalization.

    Inference takes the running statistics, for all samples the same.

    Parameters
    ----------
    virtual_devices : int
        Into how many chunks the batch of a device is cut, 1 or more.
    **arguments
        Those of :class:`SyncBatchNorm` but `num_devices` and `group`: devices do not wait for each
        other.

    Raises
    ------
    ValueError
        For arguments that make no sense.
    MXNetError
        Where a result is waited for, when a batch has fewer samples than there are virtual devices;
        at once when the channels are on axis 0.

    References
    ----------
    E. Hoffer, I. Hubara, D. Soudry, Train longer, generalize better, NeurIPS 2017 (ghost batch
    normalization).
    """

    def __init__(self, virtual_devices, **arguments):
        if not (is_whole(virtual_devices) and 0 < virtual_devices < 1 << 16):
            raise ValueError(
                f"virtual_devices is {virtual_devices!r}: give the number of chunks into which a "
                "batch is cut, 1 or more."
            )
        for name in ("num_devices", "group"):
            if arguments.get(name) is not None:
                raise ValueError(
                    f"VirtualBatchNorm got {name}={arguments[name]!r}, and its devices do not wait "
                    "for each other: leave it out."
                )
        self._virtual_devices = int(virtual_devices)
        super().__init__(**{**arguments, "group": SyncGroup(group_size=1)})
