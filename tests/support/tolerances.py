"""Tolerances: the largest difference from the reference, relative to its largest value."""

import numpy as np
from dtypes import values

# y has four roundings and dx seven, of 6e-8 each in float32 and 1e-16 in float64. The sums are in
# triple-double and add no error. The 16-bit types are computed in float32 and rounded once more, by
# half of 2^-10 and 2^-7.
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


# An exported net computes the same as its source, in a different order.
EXPORTED = {False: 2e-6, True: 1e-5}  # by whether it is folded
ONNX = 1e-5
