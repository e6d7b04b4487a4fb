"""What caches take in memory, and caches that are joined to one."""

import sys

import numpy as np
import pytest
from caches import filled, held
from tolerance import assert_same_bits

from qkv_ext import KVCache, _pages


def rows(rng, *shape):
    return rng.standard_normal(shape, np.float32)


RESIDENT = """
import gc, numpy as np
from qkv_ext import KVCache
def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
kv = np.ones((1, 8, 100, 64), "f4")
KVCache(1, 8, 64, dtype="int8").append(kv, kv)
gc.collect()
before = resident()
caches = [KVCache(1, 8, 64, dtype="int8") for _ in range(128)]
for cache in caches:
    cache.append(kv, kv)
print(sum(cache.nbytes for cache in caches), resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
def test_small_caches_are_small(python):
    """G10: 128 caches of 100 tokens, in bytes counted and in bytes resident."""
    output = python(RESIDENT)
    counted, resident = map(int, output.split())
    page = 8 * 256 * (64 + 64 + 8)
    assert 128 * page <= counted <= 1.3 * 128 * page
    assert resident <= 1.3 * 128 * page


def test_slabs():
    """No larger than what was asked for at first, then a part of what is there, then 4 MB."""
    pool = KVCache(1, 8, 64, dtype="int8")._store.pool
    pages, slabs = [], []
    for _ in range(200):
        before = pool.rooms
        pages += pool.take(1)
        if pool.rooms > before:
            slabs.append(pool.rooms - before)
    assert slabs[:5] == [1] * 5
    assert slabs == sorted(slabs)
    assert slabs[-1] == -(-(4 << 20) // pool.nbytes)
    assert pool.spare() <= 4 << 20


def test_a_slab_of_pages_of_a_megabyte():
    pool = KVCache(1, 8, 128, dtype="float16")._store.pool
    pages = pool.take(63)
    assert (
        pool.rooms == 64
    )  # by fours: what is behind the values of a page takes no slab of its own
    assert len(pages) == 63


def test_no_heads_make_no_views():
    cache = KVCache(1, 0, 8)
    cache.append(np.zeros((1, 0, 5, 8), "f4"), np.zeros((1, 0, 5, 8), "f4"))
    assert cache._store.pool.rooms == 1
    assert cache.nbytes == _pages.SLACK


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8"])
def test_concatenate(kind, backend, rng):
    """The bits of each cache alone; pages are shared until one of them is written to."""
    parts = [filled(rows(rng, b, 2, n, 8), rows(rng, b, 2, n, 8), kind)
             for b, n in ((2, 300), (1, 0), (1, 700))]  # fmt: skip
    parts[2].drop(260)
    joined = KVCache.concatenate([*parts, parts[0]])
    assert joined.lengths.tolist() == [300, 300, 0, 700, 300, 300]
    assert joined.dropped.tolist() == [0, 0, 0, 260, 0, 0]
    pages = [part.nbytes - part._store.pool.spare() for part in [*parts, parts[0]]]
    assert joined.nbytes == sum(pages)
    q = rows(rng, 6, 4, 1, 8)
    options = {"window": (200, 0), "backend": backend}
    actual, alone = joined.attend(q, **options), 0
    for part in (*parts, parts[0]):
        own = part.attend(q[alone : alone + part.batch], **options)
        if backend != "numpy":
            assert_same_bits(actual[alone : alone + part.batch], own)
        np.testing.assert_allclose(actual[alone : alone + part.batch], own, rtol=1e-5, atol=1e-6)
        alone += part.batch
    before = [part.keys(0) for part in parts]
    joined.append(*np.ones((2, 6, 2, 1, 8), "f4"))
    for part, keys in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part.keys(0), keys)
    parts[0].append(*np.full((2, 2, 2, 1, 8), 2, "f4"))
    assert joined.keys(0)[0, -1, 0] == joined.keys(4)[0, -1, 0] == joined.values(5)[0, -1, 0]
    assert abs(joined.keys(0)[0, -1, 0] - 1) < 0.01
    joined.truncate(0)
    assert held(parts[1])[0].shape[2] == 0


def test_concatenate_and_the_rest(rng):
    """Of a subclass, of forks, through an iterator; then like any other cache."""

    class Mine(KVCache):
        pass

    cache = filled(rows(rng, 1, 1, 5, 4), rows(rng, 1, 1, 5, 4))
    joined = Mine.concatenate(x for x in (cache, cache.fork(), cache))
    assert type(joined) is Mine
    joined.reorder([2, 0])
    assert joined.fork().lengths.tolist() == [5, 5]
    np.testing.assert_array_equal(joined.keys(1), cache.keys(0))


@pytest.mark.parametrize(
    ("caches", "error", "message"),
    [
        ([], ValueError, r"^caches is empty; expected one KVCache at least$"),
        (5, TypeError, r"^caches is a int; expected a sequence of KVCache$"),
        (KVCache(1, 1, 4), TypeError, r"^caches is a KVCache; expected a sequence of KVCache$"),
        ([KVCache(1, 1, 4), 3], TypeError, r"^caches\[1\] is a int; expected a KVCache$"),
        ([KVCache(1, 1, 4), KVCache(1, 2, 4, dtype="int8")], ValueError,
         r"^caches\[1\] has dtype 'int8' and not 'float32', num_kv_heads 2 and not 1; expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined(caches, error, message):
    with pytest.raises(error, match=message):
        KVCache.concatenate(caches)
