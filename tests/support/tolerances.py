"""How far a result may lie from the reference: the largest difference over the largest value."""

import numpy as np
from dtypes import values

# float32 rounds each of the four operations of y, and dx has three more, at 6e-8 each. float64 has
# 1e-16, and sums in triple-double add nothing to either. The 16-bit types are computed in float32
# and rounded once, at half of 2^-10 and 2^-7.
RELATIVE = {"float16": 2**-11 + 1e-6, "bfloat16": 2**-8 + 1e-6, "float32": 1e-6, "float64": 1e-12}


def relative_error(result, reference):
    result = np.asarray(values(result), dtype=np.longdouble)
    reference = np.asarray(reference, dtype=np.longdouble)
    assert result.shape == reference.shape
    scale = np.abs(reference).max()
    return float(np.abs(result - reference).max() / (scale if scale else 1))


def assert_close(result, reference, dtype, what=""):
    error = relative_error(result, reference)
    assert error <= RELATIVE[dtype], f"{what}: relative error {error:.3g} > {RELATIVE[dtype]:g}"


def assert_same_bits(result, reference, what=""):
    result, reference = np.ascontiguousarray(result), np.ascontiguousarray(reference)
    assert result.dtype == reference.dtype and result.shape == reference.shape, what
    differing = int((result.view(np.uint8) != reference.view(np.uint8)).sum())
    assert differing == 0, f"{what}: {differing} bytes differ"


# An exported net computes the same as the one that it was made from, in another order.
EXPORTED = {False: 2e-6, True: 1e-5}  # by whether it is folded
ONNX = 1e-5
