"""How far a result may be from the truth, and when two results must have the same bits.

The error rule holds for each array that a call returns:

    max |error| <= 2 max |error of the plain float32 formula| + 4 eps max |size|

The plain formula is computed twice, with NumPy's matmul and with sums that take one term after the
other, and the farther one counts.  So its tests hold no tolerance tuned by hand.  Half a
unit of the dtype is added where an array of float16 or bfloat16 was rounded to it.

The size of an entry is the magnitude of what goes into it, see adversary.py: where that is far more
than the entry, the roundings of the plain formula may cancel by luck.  Ordinary data has no such
luck: all tests but those of adversary.py take the truth itself for the size, and adversary.py takes
the plain formula in the orders of the compiled backends, too.
"""

import numpy as np
import oracle

F32 = np.finfo(np.float32)


def matmul_in_order(a, b):
    """a @ b, each sum taken one term after the other."""
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total = np.zeros(shape, a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., :, i, None] * b[..., None, i, :]
    return total


def sum_in_order(x):
    """The sums over the last axis, each taken one term after the other."""
    return np.add.accumulate(x, axis=-1)[..., -1] if x.shape[-1] else x.sum(axis=-1)


def sum_by_numpy(x):
    return x.sum(axis=-1)


WAYS = ((np.matmul, sum_by_numpy), (matmul_in_order, sum_in_order))  #: of the plain formula


def mask_in_float32(mask):
    """A float mask in the compute dtype, its finite values held at the limits."""
    if mask is None or mask.dtype == bool:
        return mask
    held = np.clip(mask.astype(np.float64), F32.min, F32.max)
    return np.where(np.isinf(mask), mask, held).astype(np.float32)


def plain_attention(q, k, v, way, **options):
    """(output, weights, lse) of the plain formula in float32."""
    matmul, add_up = way
    options["mask"] = mask_in_float32(options.get("mask"))
    return oracle.attention(q, k, v, dtype=np.float32, matmul=matmul, add_up=add_up, **options)


def largest(x, minus=0.0):
    """The largest magnitude of x - minus, in float64, where that is finite."""
    with np.errstate(invalid="ignore"):  # -inf - (-inf) for the lse of empty rows
        difference = np.abs(np.asarray(x, np.float64) - minus)
    return float(difference[np.isfinite(difference)].max(initial=0))


def allowed_error(truth, *plain, size=None):
    """The bound of the error rule for one array; size is as large as the truth, or larger."""
    errors = [largest(x, truth) for x in plain]
    return 2 * max(errors) + 4 * float(F32.eps) * largest(truth if size is None else size)


def half_unit(x, dtype):
    """Half of the last place of the numbers of x in float16 or bfloat16; nothing in float32."""
    if dtype == np.float32:
        return 0.0
    digits, least = (10, -14) if dtype == np.float16 else (7, -126)
    exponent = np.frexp(x)[1] - 1  # 2 ** exponent <= |x| < 2 ** (exponent + 1)
    return np.ldexp(0.5, np.maximum(exponent, least) - digits)


def assert_within(actual, truth, bound, what="output", dtype=np.float32):
    """The error rule; where the truth is infinite or NaN, the result is the same."""
    assert actual.shape == truth.shape, what
    assert actual.dtype == dtype, what
    actual = actual.astype(np.float64)
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(actual[~finite], truth[~finite], err_msg=what)
    assert np.isfinite(actual[finite]).all(), f"{what} is not finite where the truth is"
    if dtype != np.float32:  # before its one rounding it is within the bound
        error = np.abs(actual[finite] - truth[finite])
        actual = np.maximum(error - half_unit(np.abs(truth[finite]) + bound, dtype), 0)
        truth = 0.0
    error = largest(actual, truth)
    assert error <= bound, f"{what}: error {error:.3g}, allowed {bound:.3g}"


def assert_same_bits(actual, expected):
    """Equal to the last bit, signs of zeros included."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)  # for its message
    assert actual.tobytes() == expected.tobytes(), "the sign of a zero or the bits of a NaN differ"


def assert_same(actual, expected, backend):
    """The same bits in a compiled backend; NumPy's depend on the BLAS, so there within rounding."""
    if backend != "numpy":
        return assert_same_bits(actual, expected)
    assert actual.dtype == expected.dtype
    scale = largest(expected)
    # 16 bits are rounded once more: two results that are close may be neighbours
    rtol = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(actual.dtype.name, 1e-5)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-6 * scale, strict=True)
