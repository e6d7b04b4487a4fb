"""What a compiled append writes: the bytes that NumPy's has, in every storage type."""

import numpy as np
import pytest
from caches import STORAGE
from cases import dtype_of

from qkv_ext import KVCache
from qkv_ext._core import _backends
from qkv_ext._core._storage import widen

F32 = np.finfo(np.float32)
#: largest magnitudes of a row, for the scales of int8 and what 16 bits round to
MAGNITUDES = np.float32(
    [0, F32.smallest_subnormal, 1e-44, 3e-40, F32.tiny, 127 * F32.tiny, 1e-30, 1, 3, 65519, 65520,
     1e30, 2.0**66, 2.0**67, F32.max, np.inf, np.nan]
)  # fmt: skip


def numbers(rng, shape, dtype):
    """Rows of all magnitudes; without a NaN where its payload is stored."""
    x = rng.uniform(-1, 1, shape).astype(np.float32)
    x[..., :1] = 1  # the largest of its row
    size = rng.choice(MAGNITUDES, shape[:-1])[..., None]
    with np.errstate(all="ignore"):
        return (x * size).astype(dtype)


def memory(cache):
    """All that its pages hold."""
    return [
        [array.copy() for array in (page.k, *(rows for _, rows in page.v_blocks),
                                    page.k_scale, page.v_scale) if array is not None]
        for item in cache._store.items for page in item.pages
    ]  # fmt: skip


def same(actual, expected, kind):
    """Bit for bit, but for those of a NaN."""
    for a, b in zip(actual, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            if x.dtype.kind != "i":
                x, y = (z if z.dtype.kind == "f" else widen(z, None, kind) for z in (x, y))
                np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
                x, y = (np.where(np.isnan(z), 0, z).astype(z.dtype) for z in (x, y))
            assert x.tobytes() == y.tobytes()


def append(cache, k, v, counts, compiled, threads=1):
    cache._store.append(k, v, counts, compiled, threads)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", STORAGE)
def test_bytes(kind, dtype, compiled, rng):
    """Steps and prompts, ragged and strided, over the ends of panels and pages."""
    append_of = _backends._TABLE[compiled].append
    for d, dv, threads in ((1, 70, 1), (5, 3, 2), (64, 64, 1), (129, 66, 2), (0, 2, 1)):
        ours, numpys = (KVCache(2, 3, d, dv, dtype=kind) for _ in range(2))
        for counts in ([1, 1], [60, 62], [1, 3], [64, 64], [130, 0], [0, 7], [300, 300], [1, 1]):
            n = max(counts)
            k = numbers(rng, (2, n, 3, d), dtype_of(dtype)).swapaxes(1, 2)
            v = numbers(rng, (2, 3, n + 2, dv), dtype_of(dtype))[:, :, 2:]
            append(ours, k, v, counts, append_of, threads)
            append(numpys, k, v, counts, None)
            assert ours._store.pool.large_scales == numpys._store.pool.large_scales
        same(memory(ours), memory(numpys), kind)


@pytest.mark.parametrize("kind", STORAGE)
def test_bytes_of_plain_calls(kind, compiled, monkeypatch, rng):
    """KVCache.append of arrays that are taken as they are, where pages are there and where not."""
    monkeypatch.setattr(_backends, "DEFAULT", _backends._TABLE[compiled])
    ours, numpys = (KVCache(2, 2, 6, 5, dtype=kind) for _ in range(2))
    for n in (250, *[1] * 9, 3, 255, 0, 1):
        k, v = numbers(rng, (2, 2, n, 6), "f4"), numbers(rng, (2, 2, n, 5), "f4")
        ours.append(k, v)
        append(numpys, k, v, [n, n], None)
    assert ours.lengths.tolist() == numpys.lengths.tolist()
    same(memory(ours), memory(numpys), kind)


def test_what_is_shared_is_not_written_to(compiled, monkeypatch, rng):
    monkeypatch.setattr(_backends, "DEFAULT", _backends._TABLE[compiled])
    row = [rng.standard_normal((2, 1, 1, 8), np.float32) for _ in range(6)]
    cache = KVCache(2, 1, 8)
    cache.append(row[0], row[0])
    cache.append(row[1], row[1])
    others = [cache.fork(), KVCache.concatenate([cache]), cache.fork()]
    others[2].reorder([1, 1])
    for n, each in enumerate((cache, *others)):
        each.append(row[2 + n], row[2 + n])
        each.append(row[2 + n], -row[2 + n])
    for n, each in enumerate((cache, *others)):
        for b in range(2):
            expected = [row[i][b if n < 3 else 1, 0, 0] for i in (0, 1)] + [row[2 + n][b, 0, 0]] * 2
            np.testing.assert_array_equal(each.keys(b)[0], expected)
            np.testing.assert_array_equal(each.values(b)[0, 3], -expected[3])
