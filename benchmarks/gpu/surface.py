"""The CUDA kernels on PyTorch tensors, through the library's C functions. No MXNet."""

import ctypes
import math

import torch

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 12}
_INT64 = ctypes.c_int64


class Library:
    def __init__(self, path):
        self._library = ctypes.CDLL(str(path))
        self._library.gluon_syncbn_cuda_work_size.restype = _INT64
        self._library.gluon_syncbn_cuda_coefficients_size.restype = _INT64
        self._library.gluon_syncbn_cuda.restype = ctypes.c_char_p
        self.description = (self._library.gluon_syncbn_cuda() or b"none").decode()

    def call(self, name, *arguments):
        """Passes tensors by address and integers as int64, unless they have a ctypes type."""
        error = self.ask(name, *arguments)
        if error:
            raise RuntimeError(f"gluon_syncbn_cuda_{name} returned CUDA error {error}")

    def ask(self, name, *arguments):
        def convert(value):
            if isinstance(value, torch.Tensor):
                return ctypes.c_void_p(value.data_ptr())
            return _INT64(value) if isinstance(value, int) else value

        return getattr(self._library, f"gluon_syncbn_cuda_{name}")(*map(convert, arguments))


def view_of(shape, channels_last):
    """N, C, S, R of the library for a tensor of shape (n, C, ...), or (n, ..., C)."""
    inner = math.prod(shape[1:-1] if channels_last else shape[2:])
    if channels_last:
        return shape[0] * inner, shape[-1], 1, inner
    return shape[0], shape[1], inner, 1


class Layer:
    """A layer on one device, with all memory allocated in advance. x and dy are contiguous."""

    def __init__(self, library, x, dy, gamma, beta, channels_last):
        self.library, self.x, self.dy, self.gamma, self.beta = library, x, dy, gamma, beta
        self.dtype = ctypes.c_int(DTYPES[x.dtype])
        self.view = view_of(x.shape, channels_last)
        self.channels = self.view[1]
        work = library.ask("work_size", self.dtype, *self.view)
        coefficients = library.ask("coefficients_size", self.dtype, self.channels)

        def doubles(*shape):
            return torch.full(shape, math.nan, dtype=torch.float64, device=x.device)

        self.work = doubles(max(1, work), 6)
        self.coefficients, self.gradient_coefficients = (
            doubles(coefficients // 8),
            doubles(coefficients // 8),
        )
        self.sums, self.gradient_sums = doubles(self.channels, 6), doubles(self.channels, 6)
        # mean, its low part, variance, 1 / standard deviation
        self.statistics = doubles(self.channels, 4)
        self.y, self.dx = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
        self.running = torch.zeros_like(gamma), torch.ones_like(gamma)
        self.dgamma, self.dbeta = torch.full_like(gamma, math.nan), torch.full_like(beta, math.nan)

    def _call(self, name, *arguments):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.library.call(name, self.dtype, *arguments, stream)

    def forward_sums(self):
        self._call("forward_sums", *self.view, self.x, self.work, self.sums)

    def _count(self):
        return ctypes.c_double(self.view[0] * self.view[2])

    def prepare_forward(self):
        arguments = (self.sums, self._count(), ctypes.c_double(1e-5))
        arguments += (self.gamma, self.beta, self.statistics, self.coefficients)
        self._call("finish_forward", self.channels, *arguments)

    def normalize(self):
        arguments = (self.x, self.coefficients, self.y)
        self._call("normalize", *self.view, *arguments)

    def backward_sums(self):
        arguments = (self.dy, self.x, self.statistics, self.work, self.gradient_sums)
        self._call("backward_sums", *self.view, *arguments)

    def prepare_backward(self):
        arguments = (self.gradient_sums, self._count())
        arguments += (self.gradient_coefficients, self.dgamma, self.dbeta)
        self._call("finish_backward", self.channels, self.statistics, self.gamma, *arguments)

    def input_gradient(self):
        arguments = (self.dy, self.x, self.gradient_coefficients, self.dx)
        self._call("input_gradient", *self.view, *arguments)

    def calls(self, rounds):
        """Forward and backward as the operator runs them, with their waits."""
        results = (*self.running, self.y, self.dx, self.dgamma, self.dbeta, ctypes.c_int(rounds))
        arguments = (self.x, self.dy, self.gamma, self.beta, *results)
        device = ctypes.c_int(self.x.get_device())
        self.library.call("calls", device, self.dtype, *self.view, *arguments)

    def forward(self):
        self.forward_sums()
        self.prepare_forward()
        self.normalize()

    def backward(self):
        self.backward_sums()
        self.prepare_backward()
        self.input_gradient()
