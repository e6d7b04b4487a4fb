"""The case table on a KVCache: every option, every backend, every storage type.

The truth is the oracle's in float64, over what the cache says that it holds: keys() and values().
Rows of rank 4 take part, their keys and values repeated where they broadcast.
"""

import functools
import zlib

import numpy as np
import oracle
import pytest
from caches import STORAGE, filled, held
from cases import CASES, PAIRS, dtype_of
from tolerance import WAYS, allowed_error, assert_within, mask_in_float32, plain_attention

RANK4 = [case for case in CASES if len(case.q) == 4 and case.work < 2e8]
WHAT = ("output", "weights", "lse")


def rows():
    """(case, storage): every storage type where options meet, one of them elsewhere."""
    meeting = {case.name for case in CASES[-len(PAIRS) :]}
    for case in RANK4:
        kinds = STORAGE if case.name in meeting else (STORAGE[zlib.crc32(case.name.encode()) % 4],)
        for kind in kinds:
            yield pytest.param(case, kind, id=f"{case.name}-in-{kind}")


def call_of(case, kind):
    """(q, cache, options) of a row."""
    q, k, v, options = case.arrays()
    if options.get("layout") == "blhd":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    batch = case.first
    k, v = (np.broadcast_to(x, (batch, *x.shape[1:])) for x in (k, v))
    q = np.broadcast_to(q, (batch, *q.shape[1:]))
    return q, filled(k, v, kind, step=100), options


@functools.cache
def truth_and_bounds(name, kind):
    case = RANK4[[each.name for each in RANK4].index(name)]
    q, cache, options = call_of(case, kind)
    k, v = held(cache)
    if options.get("layout") == "blhd":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if "mask" in options:
        options["mask"] = mask_in_float32(options["mask"])
    plain = [plain_attention(q, k, v, way, **options) for way in WAYS]
    truth = oracle.attention(q, k, v, **options)
    return truth, [allowed_error(*arrays) for arrays in zip(truth, *plain, strict=True)]


@pytest.mark.parametrize(("case", "kind"), list(rows()))
def test_error_rule(case, kind, backend):
    q, cache, options = call_of(case, kind)
    truth, bounds = truth_and_bounds(case.name, kind)
    options["backend"] = backend
    dtypes = dtype_of(case.dtype), dtype_of(case.dtype), np.float32
    every = cache.attend(q, return_weights=True, return_lse=True, **options)
    for n, actual in enumerate(every):
        assert_within(actual, truth[n], bounds[n], WHAT[n], dtypes[n])
    assert_within(cache.attend(q, **options), truth[0], bounds[0], WHAT[0], dtypes[0])
