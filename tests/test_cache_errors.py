"""What a KVCache refuses, with the exception and the exact message; it is then as it was."""

import re

import numpy as np
import pytest

from qkv_ext import KVCache


def f32(*shape):
    return np.ones(shape, np.float32)


K, V, Q = f32(2, 2, 3, 8), f32(2, 2, 3, 5), f32(2, 4, 1, 8)
AS_K = "expected (2, 2, n, 8), as the cache has"
AS_Q = "expected (2, H, L, 8) with H a multiple of 2, as the cache has"
KINDS = "expected one of float32, float16, bfloat16, int8"
FLOATS = "expected float32, float16 or bfloat16"

MAKING = [
    (lambda: KVCache(-1, 2, 8), ValueError, "batch holds -1; expected 0 to 1048576"),
    (lambda: KVCache(2.0, 2, 8), TypeError, "batch has dtype float64; expected integers"),
    (lambda: KVCache(1, None, 8), TypeError, "num_kv_heads is None; expected integers"),
    (lambda: KVCache(0, 2, 8).keys(0), ValueError, "b holds 0; but there are none"),
    (lambda: KVCache(0, 2, 8).reorder([0]), ValueError, "indices holds 0; but there are none"),
    (lambda: KVCache(1, 2, [8]), ValueError, "head_dim has shape (1,); expected an integer"),
    (lambda: KVCache(1, 2, 8, -8), ValueError, "v_dim holds -8; expected 0 to 2147483648"),
    (lambda: KVCache(1, 2, 8, dtype="float64"), ValueError, f"dtype is 'float64'; {KINDS}"),
    (lambda: KVCache(1, 2, 8, dtype=np.float64), ValueError,
     f"dtype is <class 'numpy.float64'>; {KINDS}"),
    (lambda: KVCache(1, 2, 8, dtype=None), TypeError, f"dtype is None; {KINDS}"),
    (lambda: KVCache(1, 2, 8, dtype=8), TypeError, f"dtype is 8; {KINDS}"),
    (lambda: KVCache(1, 2, 8, _page=100), ValueError,
     "_page is 100; expected a positive multiple of 256"),
    (lambda: KVCache(1, 2, 8, _page=0), ValueError,
     "_page is 0; expected a positive multiple of 256"),
]  # fmt: skip

CALLS = [
    # append
    (lambda c: c.append(K[0], V), ValueError, f"k has shape (2, 3, 8); {AS_K}"),
    (lambda c: c.append(K[:1], V), ValueError, f"k has shape (1, 2, 3, 8); {AS_K}"),
    (lambda c: c.append(K[:, :1], V), ValueError, f"k has shape (2, 1, 3, 8); {AS_K}"),
    (lambda c: c.append(K[..., :7], V), ValueError, f"k has shape (2, 2, 3, 7); {AS_K}"),
    (lambda c: c.append(K, K), ValueError,
     "v has shape (2, 2, 3, 8); expected (2, 2, n, 5), as the cache has"),
    (lambda c: c.append(K, V[:, :, :2]), ValueError,
     "k and v have shapes (2, 2, 3, 8) and (2, 2, 2, 5); expected one n"),
    (lambda c: c.append(K.astype(float), V), TypeError,
     f"k has dtype float64; {FLOATS}: k.astype(np.float32)"),
    (lambda c: c.append(K, V.astype(float)), TypeError,
     f"v has dtype float64; {FLOATS}: v.astype(np.float32)"),
    (lambda c: c.append(K.astype(int), V), TypeError,
     "k has dtype int64; expected float32, float64, float16 or bfloat16"),
    (lambda c: c.append(K, V.astype("f2")), TypeError,
     "k, v have different dtypes (k float32, v float16); expected one dtype, as "
     "v.astype(np.float32) gives"),
    (lambda c: c.append(K, V, lengths=[4, 0]), ValueError, "lengths holds 4; expected 0 to 3"),
    (lambda c: c.append(K, V, lengths=[-1, 0]), ValueError, "lengths holds -1; expected 0 to 3"),
    (lambda c: c.append(K, V, lengths=2), ValueError, "lengths has shape (); expected shape (2,)"),
    (lambda c: c.append(K, V, lengths=[1.0, 2.0]), TypeError,
     "lengths has dtype float64; expected integers"),
    # attend
    (lambda c: c.attend(Q[0]), ValueError, f"q has shape (4, 1, 8); {AS_Q}"),
    (lambda c: c.attend(f32(3, 4, 1, 8)), ValueError, f"q has shape (3, 4, 1, 8); {AS_Q}"),
    (lambda c: c.attend(f32(2, 3, 1, 8)), ValueError, f"q has shape (2, 3, 1, 8); {AS_Q}"),
    (lambda c: c.attend(f32(2, 4, 1, 5)), ValueError, f"q has shape (2, 4, 1, 5); {AS_Q}"),
    (lambda c: c.attend(f32(2, 4, 3, 8), layout="blhd"), ValueError,
     "q has shape (2, 4, 3, 8); expected (2, L, H, 8) with H a multiple of 2, as the cache has; "
     'it fits with layout="bhld"'),
    (lambda c: c.attend(Q.astype(float)), TypeError,
     f"q has dtype float64; {FLOATS}: q.astype(np.float32)"),
    (lambda c: c.attend(Q, layout="bshd"), ValueError,
     "layout is 'bshd'; expected 'bhld' or 'blhd'"),
    (lambda c: c.attend(Q, kv_lengths=[7, 3]), ValueError,
     "kv_lengths holds 7; expected 0 to 6"),
    (lambda c: c.attend(Q, kv_lengths=[6, 4]), ValueError,
     "kv_lengths holds 4 for item 1; expected at most its length, 3"),
    (lambda c: c.attend(Q, kv_lengths=3), ValueError,
     "kv_lengths has shape (); expected shape (2,)"),
    (lambda c: c.attend(Q, q_lengths=[2, 0]), ValueError, "q_lengths holds 2; expected 0 to 1"),
    (lambda c: c.attend(Q, mask=np.ones((1, 7), bool)), ValueError,
     "mask has shape (1, 7); expected one that broadcasts to (2, 4, 1, 6)"),
    (lambda c: c.attend(Q, window=3), ValueError,
     "window is 3; expected a pair (left, right) of integers or None for open"),
    (lambda c: c.attend(Q, out=f32(2, 4, 1, 8)), ValueError,
     "out has shape (2, 4, 1, 8); expected (2, 4, 1, 5)"),
    (lambda c: c.attend(Q, backend="gpu"), ValueError, None),
    (lambda c: c.attend(Q, threads=0), ValueError,
     "threads is 0; expected a positive integer or None"),
    # the rest
    (lambda c: c.keys(2), ValueError, "b holds 2; expected 0 to 1"),
    (lambda c: c.values(-1), ValueError, "b holds -1; expected 0 to 1"),
    (lambda c: c.keys(0.0), TypeError, "b has dtype float64; expected integers"),
    (lambda c: c.truncate(7), ValueError, "lengths holds 7; expected 0 to 6"),
    (lambda c: c.truncate(4), ValueError,
     "lengths holds 4 for item 1; expected at most its length, 3"),
    (lambda c: c.truncate([1, 2, 3]), ValueError,
     "lengths has shape (3,); expected shape (2,)"),
    (lambda c: c.truncate(True), TypeError, "lengths has dtype bool; expected integers"),
    (lambda c: c.truncate(-1), ValueError, "lengths holds -1; expected 0 to 6"),
    (lambda c: c.truncate([[1], [2, 3]]), ValueError,
     "lengths is [[1], [2, 3]]; expected an integer or integers (2,)"),
    (lambda c: c.drop([0, 4]), ValueError,
     "before holds 4 for item 1; expected at most its length, 3"),
    (lambda c: c.drop(1.5), TypeError, "before has dtype float64; expected integers"),
    (lambda c: c.reorder(0), ValueError, "indices has shape (); expected (n,)"),
    (lambda c: c.reorder([0, 2]), ValueError, "indices holds 2; expected 0 to 1"),
    (lambda c: c.reorder([-1]), ValueError, "indices holds -1; expected 0 to 1"),
    (lambda c: c.reorder([0.0]), TypeError, "indices has dtype float64; expected integers"),
    (lambda c: c.reorder([[0, 1]]), ValueError, "indices has shape (1, 2); expected (n,)"),
    (lambda c: c.reorder([[0], [1, 2]]), ValueError,
     "indices is [[0], [1, 2]]; expected integers (n,)"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), MAKING)
def test_sizes(make, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make()


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_calls(call, error, message):
    cache = KVCache(2, 2, 8, 5)
    cache.append(K, V)
    cache.append(K, V, lengths=[3, 0])
    with pytest.raises(error, match=message and f"^{re.escape(message)}$"):
        call(cache)
    assert repr(cache) == (
        "KVCache(batch=2, num_kv_heads=2, head_dim=8, v_dim=5, dtype='float32', lengths=[6, 3])"
    )
    assert cache.dropped.tolist() == [0, 0]
    assert (cache.keys(0) == 1).all()


def test_dropped_keys():
    cache = KVCache(2, 2, 8, 5)
    cache.append(K, V)
    cache.drop([0, 2])
    message = (
        "the cache has dropped the keys before 2 of item 1, but a query of this call sees keys "
        "from 1 on; expected a window that leaves them out"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cache.attend(Q, window=(1, 0))
    assert cache.attend(Q, window=(0, 0)).shape == (2, 4, 1, 5)


def test_what_it_shows():
    assert repr(KVCache(20, 1, 8, dtype="int8")) == (
        "KVCache(batch=20, num_kv_heads=1, head_dim=8, dtype='int8', lengths=0 to 0)"
    )
    cache = KVCache(2, 2, 8, 5)
    lengths = cache.lengths
    lengths += 1  # a copy
    assert cache.lengths.tolist() == [0, 0]
    assert lengths.dtype == np.int64
    sizes = (cache.batch, cache.num_kv_heads, cache.head_dim, cache.v_dim, cache.dtype)
    assert sizes == (2, 2, 8, 5, "float32")
    with pytest.raises(AttributeError):
        cache.lengths = [1, 1]
