"""Every row of the table: NumPy against the oracle, and every backend against NumPy in float64."""

import functools

import numpy as np
import oracle
import pytest
from cases import CASES, NAMES
from tolerance import WAYS, allowed_error, assert_within, mask_in_float32, plain_attention

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention
every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)
WHAT = ("output", "weights", "lse")


@functools.cache
def truth_and_bounds(case_name):
    """(output, weights, lse) of NumPy in float64, and how far float32 may be from each."""
    q, k, v, options = CASES[NAMES.index(case_name)].arrays()
    if "mask" in options:
        options["mask"] = mask_in_float32(options["mask"])
    plain = [plain_attention(q, k, v, way, **options) for way in WAYS]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    truth = sdpa(q, k, v, return_weights=True, return_lse=True, backend="numpy", **options)
    return truth, [allowed_error(*arrays) for arrays in zip(truth, *plain, strict=True)]


@every_case
def test_numpy_equals_the_oracle(case):
    q, k, v, options = case.arrays()
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    expected = oracle.attention(q, k, v, **options)
    actual = sdpa(q, k, v, return_weights=True, return_lse=True, backend="numpy", **options)
    for x, y, what in zip(actual, expected, WHAT, strict=True):
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-11, strict=True, err_msg=what)


@every_case
def test_error_rule(case, backend):
    q, k, v, options = case.arrays()
    truth, bounds = truth_and_bounds(case.name)
    extras = sdpa(q, k, v, return_weights=True, return_lse=True, backend=backend, **options)
    for actual, expected, bound, what in zip(extras, truth, bounds, WHAT, strict=True):
        assert_within(actual, expected, bound, what)
    # The output is within the rule without the extras too, and with either of them.
    assert_within(sdpa(q, k, v, backend=backend, **options), truth[0], bounds[0])
    output, lse = sdpa(q, k, v, return_lse=True, backend=backend, **options)
    assert_within(output, truth[0], bounds[0])
    assert_within(lse, truth[2], bounds[2], "lse")
    output, weights = sdpa(q, k, v, return_weights=True, backend=backend, **options)
    assert_within(output, truth[0], bounds[0])
    assert_within(weights, truth[1], bounds[1], "weights")
