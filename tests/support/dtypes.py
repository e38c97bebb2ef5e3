"""NumPy arrays of every dtype that the layer supports.

NumPy has no bfloat16. MXNet's is a structure of one uint16, which can be sliced, concatenated and
compared; `values` converts it to numbers.
"""

import numpy as np

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def numpy_dtype(dtype):
    return BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)


def parameter_dtype(dtype):
    """The dtype of gamma, beta and the running statistics, for data of `dtype`."""
    return "float64" if dtype == "float64" else "float32"


def rounded(array, dtype):
    """The values rounded to the dtype: to nearest, ties to even."""
    if dtype != "bfloat16":
        return np.asarray(array).astype(dtype)
    bits = np.asarray(array, dtype=np.float32).view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    nearest = np.where(np.isnan(array), 0x7FC0, nearest).astype(np.uint16)
    return nearest.view(BFLOAT16)


def values(array):
    """The array in a dtype that NumPy can compute in."""
    array = np.asarray(array)
    if array.dtype != BFLOAT16:
        return array
    bits = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).reshape(array.shape)
