"""What caches take in memory, and caches that are joined to one."""

import os
import pickle
import threading

import numpy as np
import pytest
from caches import filled, held
from tolerance import assert_same_bits

from qkv_ext import KVCache
from qkv_ext._cache import _pages


def rows(rng, *shape):
    return rng.standard_normal(shape, np.float32)


#: made() in a fresh process: bytes that the caches count, resident ones, those in huge pages.
MEASURE = """
import gc, numpy as np
from qkv_ext import KVCache

def full(n, *sizes, kind="float32"):
    cache = KVCache(*sizes, dtype=kind)
    kv = np.ones((sizes[0], sizes[1], n, sizes[2]), "f4")
    cache.append(kv, kv)
    return cache

def memory():
    gc.collect()
    lines = [line.split() for line in open("/proc/self/smaps_rollup")]
    return [int(line[1]) << 10 for line in lines if line[0] in ("Rss:", "AnonHugePages:")]

{made}
full(4, 1, 1, 8)
before = memory()
caches = made()
print(sum(cache.nbytes for cache in caches), *(a - b for a, b in zip(memory(), before)))
"""
linux = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="not told here")
INT8_PAGE = 8 * 256 * (64 + 64 + 8)  #: bytes of a page of 8 heads of 64

#: The same keys, however a cache came to hold them: 100 or 101 of each of 128 items.
HUNDRED = {
    "at once": "return [full(100, 1, 8, 64, kind='int8') for _ in range(128)]",
    "in one batch": "return [full(100, 128, 8, 64, kind='int8')]",
    "step by step": """
    caches = [full(1, 1, 8, 64, kind='int8') for _ in range(128)]
    for cache in caches:
        for _ in range(99):
            cache.append(*np.ones((2, 1, 8, 1, 64), 'f4'))
    return caches""",
    "cut back": """
    caches = [full(1000, 1, 8, 64, kind='int8') for _ in range(128)]
    for cache in caches:
        cache.truncate(100)
    return caches""",
    "behind what was dropped": """
    caches = [full(868, 1, 8, 64, kind='int8') for _ in range(128)]
    for cache in caches:
        cache.drop(768)
    return caches""",
    "out of a large batch": """
    caches = [full(100, 8, 8, 64, kind='int8') for _ in range(128)]
    for cache in caches:
        cache.reorder([3])
    return caches""",
    "joined, and cut back": """
    caches = []
    for _ in range(128):
        long = full(4000, 1, 8, 64, kind='int8')
        caches.append(KVCache.concatenate([full(100, 1, 8, 64, kind='int8'), long]))
        caches[-1].reorder([0])
    return caches""",
    "joined with one that others go on from": """
    long = full(4000, 1, 8, 64, kind='int8')
    caches = [KVCache.concatenate([full(100, 1, 8, 64, kind='int8'), long]) for _ in range(128)]
    del long
    for cache in caches:
        cache.reorder([0])
    return caches""",
}


def measured(python, made):
    return map(int, python(MEASURE.replace("{made}", f"def made():\n    {made}")).split())


@linux
@pytest.mark.parametrize("way", HUNDRED)
def test_small_caches_are_small(way, python):
    """G10: 128 caches of 100 tokens, in bytes counted and in bytes resident."""
    counted, resident, _ = measured(python, HUNDRED[way])
    assert 128 * INT8_PAGE <= counted <= 1.3 * 128 * INT8_PAGE
    assert resident <= 1.3 * 128 * INT8_PAGE


@linux
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("sizes", [(1, 8), (8, 64), (8, 128), (32, 128)])
def test_one_key_takes_no_huge_page(sizes, kind, python):
    """Also where a page of 256 keys fills several of them."""
    made = f"return [full(1, 1, *{sizes}, kind='{kind}') for _ in range(20)]"
    _, resident, huge = measured(python, made)
    assert huge == 0
    heads, d = sizes
    pages = 20 * 256 * heads * (2 * d * {"float32": 4, "int8": 1}.get(kind, 2) + 8)
    assert resident <= max(pages / 2, 2 << 20)


@linux
def test_many_keys_take_huge_pages(python):
    """Where the system has them: most of a cache that was filled at once, or step by step."""
    with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
        if "[never]" in file.read():
            pytest.skip("no huge pages here")
    for made in (
        "return [full(1024, 16, 8, 64)]",
        "return [full(200, 1, 32, 128)]",
        "cache = full(1, 16, 8, 64)\n"
        "    for _ in range(40):\n"
        "        cache.append(*np.ones((2, 16, 8, 25, 64), 'f4'))\n"
        "    return [cache]",
    ):
        counted, _, huge = measured(python, made)
        assert huge >= 0.7 * counted


@linux
def test_what_is_joined_counts_what_it_keeps(python):
    """Pages do not keep the spare rooms of the cache that they came from."""
    made = """
    long = full(8000, 1, 8, 64)
    for n in range(7000, 3000, -200):
        long.truncate(n)
    joined = KVCache.concatenate([full(300, 1, 8, 64), long])
    del long
    joined.truncate(300)
    return [joined]
"""
    counted, resident, _ = measured(python, made)
    assert counted <= 1.3 * 4 * 8 * 256 * 128 * 4
    assert resident <= counted + (2 << 20)


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


@pytest.mark.parametrize("sizes", [(0, 8, 8), (0, 8, 1 << 31), (0, 1 << 31, 8), (3, 0, 0)])
def test_nothing_to_keep_makes_no_views(sizes):
    """Nor blocks of columns, where there are no heads that have any."""
    cache = KVCache(1, *sizes)
    heads, d, dv = sizes
    cache.append(np.zeros((1, heads, 5, d), "f4"), np.zeros((1, heads, 5, dv), "f4"))
    assert cache._store.pool.rooms == 1
    assert cache.nbytes == _pages.SLACK
    assert cache.fork().lengths.tolist() == [5]
    assert not cache._store.items[0].pages[0].v_blocks or heads


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


def test_joined_goes_everywhere(rng):
    """Pickles, forks, drops, other lengths; and sources that go away, or on."""
    a, b = filled(*rows(rng, 2, 2, 1, 700, 4)), filled(*rows(rng, 2, 1, 1, 300, 4))
    a.drop([600, 10])
    joined = KVCache.concatenate([a, b])
    expected = [x.keys(n) for x, n in ((a, 0), (a, 1), (b, 0))]
    fork, pickled = joined.fork(), pickle.loads(pickle.dumps(joined))
    again = KVCache.concatenate((joined, fork))
    a.truncate([650, 0])
    a.append(*np.ones((2, 2, 1, 300, 4), "f4"))
    joined.truncate([650, 300, 200])
    joined.append(*np.ones((2, 3, 1, 300, 4), "f4"))
    del a, b, joined
    for cache in (fork, pickled, again):
        assert cache.dropped.tolist() == [600, 10, 0] * (cache.batch // 3)
        for n in range(cache.batch):
            np.testing.assert_array_equal(cache.keys(n), expected[n % 3])
        cache.append(*np.ones((2, cache.batch, 1, 1, 4), "f4"))
    assert again.lengths.tolist() == [701, 701, 301] * 2


def test_joining_copies_nothing(rng, monkeypatch):
    parts = [filled(*rows(rng, 2, 1, 1, 300, 4)) for _ in range(3)]
    pages = [page for part in parts for page in part._store.items[0].pages]
    monkeypatch.setattr(_pages.Pool, "take", None)  # no page can be had
    joined = KVCache.concatenate(parts)
    assert [page for item in joined._store.items for page in item.pages] == pages
    joined.append(*rows(rng, 2, 3, 1, 100, 4))  # behind the keys of the others
    assert [page for item in joined._store.items for page in item.pages] == pages


def test_who_may_write_to_a_page_that_is_shared(rng):
    """One of those that hold it, behind the keys of the others; not before them, once it is cut."""
    part = filled(*rows(rng, 2, 1, 1, 300, 4))
    first, second = KVCache.concatenate([part]), KVCache.concatenate([part])
    keys = part.keys(0)
    held = [cache._store.items[0].pages[1] for cache in (part, first, second)]
    assert held[0] is held[1] is held[2]
    for n, cache in enumerate((first, second, part)):
        cache.append(*np.full((2, 1, 1, 1, 4), n, "f4"))
    assert [cache._store.items[0].pages[1] is held[0] for cache in (first, second, part)] == [
        True, False, False,
    ]  # fmt: skip
    for n, cache in enumerate((first, second, part)):
        np.testing.assert_array_equal(cache.keys(0)[:, :300], keys)
        assert (cache.keys(0)[:, 300] == n).all()
    third = KVCache.concatenate([first])  # which may write on, and is cut below what it was lent
    third.append(*np.full((2, 1, 1, 1, 4), 7, "f4"))
    third.truncate(290)
    third.append(*np.full((2, 1, 1, 20, 4), 8, "f4"))
    np.testing.assert_array_equal(first.keys(0)[:, :300], keys)
    assert (first.keys(0)[:, 300] == 0).all()
    np.testing.assert_array_equal(third.keys(0)[:, :290], keys[:, :290])
    assert (third.keys(0)[:, 290:] == 8).all()


def test_requests_come_and_go(rng):
    """A batch that requests join and leave: no more than what it holds, and no chain of pools."""
    batch = KVCache.concatenate([filled(*rows(rng, 2, 1, 1, 500, 4)) for _ in range(4)])
    for _ in range(50):
        batch.append(*rows(rng, 2, 4, 1, 40, 4))
        batch.reorder([1, 2, 3])
        batch = KVCache.concatenate([batch, filled(*rows(rng, 2, 1, 1, 500, 4))])
    pages = int((-(-batch.lengths // 256)).sum())
    assert batch.nbytes <= 1.3 * pages * batch._store.pool.nbytes
    page = batch._store.pool.nbytes
    batch.append(*rows(rng, 2, 4, 1, 300, 4))
    pages = int((-(-batch.lengths // 256)).sum())
    assert batch.nbytes <= 1.3 * pages * page


def test_joined_by_threads_at_once(rng):
    """Whatever order they are given in, nobody waits for ever; each sees whole caches."""
    a, b = (filled(*rows(rng, 2, 1, 1, 10, 4)) for _ in "ab")
    failed, start = [], threading.Barrier(4)

    def work(caches, first):
        try:
            start.wait()
            for _ in range(300):
                joined = KVCache.concatenate(caches)
                assert (joined.keys(0)[0, :10] == first).all()
                joined.append(*np.ones((2, joined.batch, 1, 1, 4), "f4"))
                caches[0].append(*np.ones((2, 1, 1, 1, 4), "f4"))
        except BaseException as error:
            failed.append(error)

    orders = [[a, b], [b, a], [a, b, a], [b, b, a]]
    threads = [threading.Thread(target=work, args=(order, order[0].keys(0)[0])) for order in orders]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failed
    assert a.lengths.tolist() == b.lengths.tolist() == [610]


def test_joined_by_who_interrupts(rng):
    """A call that holds one of the locks is not waited for; the others are given back."""
    caches = [filled(*rows(rng, 2, 1, 1, 10, 4)) for _ in range(5)]
    for taken in caches:
        with taken._locked(), pytest.raises(RuntimeError, match="this KVCache is in use"):
            KVCache.concatenate(caches)
    assert KVCache.concatenate(caches).batch == 5


def test_a_fork_that_dies_leaves_nothing():
    """Neither its pages, nor the rooms that they were made in."""
    cache = KVCache(1, 2, 64)
    cache.append(*np.ones((2, 1, 2, 10, 64), "f4"))
    page = cache.nbytes
    fork = cache.fork()
    fork.append(*np.ones((2, 1, 2, 9000, 64), "f4"))
    assert cache.nbytes > page
    del fork
    assert cache.nbytes <= 2 * page
