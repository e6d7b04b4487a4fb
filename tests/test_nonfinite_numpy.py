"""Rows that see a NaN or infinity in the NumPy backend: counted by products, exactly."""

import numpy as np
import pytest

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention
INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("count", [1, 4094, 4095, 4096, 4097, 8190, 9000])
def test_any_number_of_infinities(count, dtype):
    """More of one sign than a count holds is still one sign, and no infinity that is excluded."""
    s = 9000
    q, k, v = np.zeros((2, 4), dtype), np.zeros((s, 4), dtype), np.ones((s, 5), dtype)
    v[:count, 0], v[:count, 1] = INF, -INF
    v[: count - 1, 2], v[count - 1, 2] = INF, -INF
    v[: count - 1, 3], v[count - 1, 3] = -INF, NAN
    keep = np.ones((2, s), bool)
    keep[1, :count] = False
    expected = [INF, -INF, -INF if count == 1 else NAN, NAN, 1]
    for mask, rows in ((None, [expected] * 2), (keep, [expected, [1] * 5])):
        output = sdpa(q, k, v, mask=mask, backend="numpy")
        if count == s and mask is not None:
            rows[1] = [0] * 5  # no key at all
        np.testing.assert_allclose(output, np.array(rows, dtype), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_weights_of_zero(dtype):
    """An allowed infinity makes NaN of a weight of 0, an excluded one nothing."""
    q, k, v = np.ones((3, 1), dtype), np.zeros((6, 1), dtype), np.ones((6, 2), dtype)
    k[1:], v[1:3, 0], v[4, 0] = -2000, INF, -INF
    mask = np.ones((3, 6), bool)
    mask[1, 1:5] = mask[2, :3] = False  # the last sees -inf, with a weight that is none
    output = sdpa(q, k, v, mask=mask, scale=1, backend="numpy")
    np.testing.assert_allclose(output, [[NAN, 1], [1, 1], [-INF, 1]])
