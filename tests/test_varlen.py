"""varlen_attention by example: sequences laid end to end, each computed as if it were alone.

Its bits are in test_bits_options.py, what it refuses in test_errors_options.py.
"""

import numpy as np
import pytest
from oracle import attention
from tolerance import assert_same

import qkv_ext

varlen = qkv_ext.varlen_attention
INF = np.inf


def test_sequences_do_not_see_each_other(backend):
    q = k = np.zeros((6, 1, 4), np.float32)
    v = np.arange(6, dtype=np.float32).reshape(6, 1, 1)
    cu = [0, 1, 1, 4, 6]
    assert varlen(q, k, v, cu, cu, backend=backend).ravel().tolist() == [0, 2, 2, 2, 4.5, 4.5]
    output = varlen(q, k, v, cu, cu, causal=True, backend=backend)
    assert output.ravel().tolist() == [0, 1, 1.5, 2, 4, 4.5]
    output, lse = varlen(
        q, k, v, cu, [0, 0, 3, 4, 6], causal=True, return_lse=True, backend=backend
    )
    assert output.ravel().tolist() == [0, 0, 0, 3, 4, 4.5]
    assert lse.ravel()[:3].tolist() == [-INF] * 3
    output = varlen(q, k, v, cu, cu, kv_lengths=[1, 0, 2, 1], backend=backend)
    assert output.ravel().tolist() == [0, 1.5, 1.5, 1.5, 4, 4]


@pytest.mark.parametrize("cu", [[0], [0, 0], [0, 0, 0]])
def test_packed_batches_of_nothing(cu, backend):
    q, k, v = (np.zeros((0, h, d), np.float32) for h, d in ((4, 8), (2, 8), (2, 3)))
    output, lse = varlen(q, k, v, cu, cu, return_lse=True, backend=backend)
    assert output.shape == (0, 4, 3)
    assert lse.shape == (0, 4)


def test_packed_batch_in_float64(rng):
    q, k, v = (rng.standard_normal((9, 2, 8)) for _ in range(3))
    output = varlen(q, k, v, [0, 4, 9], [0, 4, 9], causal=True, backend="numpy")
    assert output.dtype == np.float64
    for rows in (np.s_[:4], np.s_[4:]):
        one = (x[rows].swapaxes(0, 1)[None] for x in (q, k, v))
        expected = attention(*one, causal=True)[0][0].swapaxes(0, 1)
        np.testing.assert_allclose(output[rows], expected, rtol=1e-12)


def test_packed_out_may_overlap(backend, rng):
    q, k, v = (rng.standard_normal((9, 2, 8), np.float32) for _ in range(3))
    cu = [0, 4, 9]
    expected = varlen(q, k, v, cu, cu, backend=backend)
    for n in range(3):
        arrays = [q.copy(), k.copy(), v.copy()]
        assert varlen(*arrays, cu, cu, out=arrays[n], backend=backend) is arrays[n]
        assert_same(arrays[n], expected, backend)
