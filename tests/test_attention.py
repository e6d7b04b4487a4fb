"""Every row of the table: NumPy against the oracle, and every backend against NumPy in float64."""

import functools
from itertools import combinations

import numpy as np
import oracle
import pytest
from cases import CASES, LEVELS, NAMES, PAIRS, dtype_of, possible
from pairwise import every_pair, pairs_of
from tolerance import WAYS, allowed_error, assert_within, mask_in_float32, plain_attention

import qkv_ext
from qkv_ext._core._options import TRACE

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
    dtypes = dtype_of(case.dtype), dtype_of(case.dtype), np.float32
    truth, bounds = truth_and_bounds(case.name)

    def check(which, *results):
        for n, actual in zip(which, results, strict=True):
            assert_within(actual, truth[n], bounds[n], WHAT[n], dtypes[n])

    options["backend"] = backend
    check((0, 1, 2), *sdpa(q, k, v, return_weights=True, return_lse=True, **options))
    # The output is within the rule without the extras too, and with either of them.
    check((0,), sdpa(q, k, v, **options))
    check((0, 2), *sdpa(q, k, v, return_lse=True, **options))
    check((0, 1), *sdpa(q, k, v, return_weights=True, **options))


def test_every_two_options_meet():
    """The table has each pair of an option's or the shapes' choices in one row at least."""
    met = set().union(*map(pairs_of, PAIRS))
    assert met == every_pair(LEVELS, possible)
    assert len(PAIRS) < 100
    # and what a row says is what its call does: options beyond their defaults, two by two
    names = TRACE.keys() - {"out", "threads", "backend"}  # each needs a row in LEVELS
    together = set()
    for case in CASES[-len(PAIRS) :]:
        options = case.arrays()[3] if case.dtype != "bfloat16" else case.options
        together |= set(combinations(sorted(options), 2))
    assert together == set(combinations(sorted(names), 2))
