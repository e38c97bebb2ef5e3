"""Batch normalization in NumPy, as the papers write it. Imports nothing from the package.

Means and variances are computed in long double (64 bits of mantissa on x86). At a mean of 1e5
standard deviations, float64 would not be exact enough to test float64 data.
"""

from collections import namedtuple

import numpy as np

Forward = namedtuple("Forward", "y mean variance")
Backward = namedtuple("Backward", "dx dgamma dbeta")


def _channel_first(array, axis):
    """(C, everything else)."""
    moved = np.moveaxis(np.asarray(array, dtype=np.longdouble), axis, 0)
    return moved.reshape(moved.shape[0], -1)


def _like(rows, array, axis):
    moved = np.moveaxis(array, axis, 0)
    return np.moveaxis(rows.reshape(moved.shape), 0, axis)


def _column(vector):
    return np.asarray(vector, dtype=np.longdouble)[:, None]


def forward(x, gamma, beta, epsilon=1e-5, axis=1, mean=None, variance=None):
    """Uses the statistics of the batch, unless they are given."""
    rows = _channel_first(x, axis)
    mean = rows.mean(axis=1) if mean is None else np.asarray(mean, dtype=np.longdouble)
    if variance is None:
        variance = ((rows - _column(mean)) ** 2).mean(axis=1)
    inv_std = 1 / np.sqrt(_column(variance) + np.longdouble(epsilon))
    y = (rows - _column(mean)) * inv_std * _column(gamma) + _column(beta)
    return Forward(_like(y, x, axis), mean, np.asarray(variance))


def backward(dy, x, gamma, epsilon=1e-5, axis=1, mean=None, variance=None):
    """Gradients, also through the statistics of the batch; given statistics are constants."""
    rows, grads = _channel_first(x, axis), _channel_first(dy, axis)
    constant = mean is not None
    if not constant:
        _, mean, variance = forward(x, gamma, np.zeros_like(gamma), epsilon, axis)
    inv_std = 1 / np.sqrt(_column(variance) + np.longdouble(epsilon))
    xhat = (rows - _column(mean)) * inv_std
    dgamma, dbeta = (grads * xhat).sum(axis=1), grads.sum(axis=1)
    dx = grads
    if not constant:
        dx = (
            grads
            - grads.mean(axis=1, keepdims=True)
            - xhat * (grads * xhat).mean(axis=1, keepdims=True)
        )
    return Backward(_like(dx * inv_std * _column(gamma), x, axis), dgamma, dbeta)
