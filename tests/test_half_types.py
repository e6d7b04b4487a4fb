"""float16 and bfloat16, by example: storage types, computed in float32 and rounded once.

Their errors are in test_attention.py, their bits in test_bits_options.py.
"""

import tracemalloc

import numpy as np
import pytest
from cases import dtype_of
from tolerance import assert_same_bits

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention
EXTRAS = {"return_weights": True, "return_lse": True}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_return_their_own(dtype, backend, rng):
    """Output and weights in the dtype of q, lse in float32; byte order and strides as ever."""
    q, k, v = (rng.standard_normal((2, 2, n, 8), np.float32).astype(dtype_of(dtype))
               for n in (5, 9, 9))  # fmt: skip
    results = sdpa(q, k, v, causal=True, backend=backend, **EXTRAS)
    assert [x.dtype for x in results] == [q.dtype, q.dtype, np.float32]
    views = [x[..., ::-1].copy()[..., ::-1] for x in (q, k, v)]
    if dtype == "float16":
        views[1] = k.astype(">f2")
    out = np.empty_like(q)
    assert sdpa(*views, causal=True, out=out, backend=backend) is out
    assert_same_bits(out, results[0])
    sdpa(q, k, v, causal=True, out=q, backend=backend)
    assert_same_bits(q, results[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("length", [1, 40])
def test_half_types_are_not_copied_whole(length, dtype, compiled, rng):
    """They become float32 a tile at a time: nothing of the size of K is allocated."""
    q, k, v = (np.ones((1, 2, n, 64), np.float32).astype(dtype_of(dtype))
               for n in (length, 20000, 20000))  # fmt: skip
    sdpa(q, k, v, backend=compiled)
    tracemalloc.start()
    try:
        sdpa(q, k, v, backend=compiled, threads=1)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_half_types_at_their_limits(backend):
    """What is rounded once is the result: scores and sums may be beyond float16."""
    q, k = np.zeros((1, 4), np.float16), np.zeros((2, 4), np.float16)
    v = np.float16([[65504, 6e-8], [65504, 0]])
    output = sdpa(q, k, v, backend=backend)
    np.testing.assert_array_equal(
        output, np.float16([[65504, 0]])
    )  # half of the least goes to even
    x = np.full((1, 1), 300, np.float16)
    lse = sdpa(x, x, x, scale=1.0, return_lse=True, backend=backend)[1]
    assert lse.item() == 90000  # the score is beyond float16, not beyond float32
