"""KVCache: what it holds after any calls in any order, and how caches share pages.

The case table on caches is test_cache_cases.py, storage types are in test_cache_storage.py, errors
in test_cache_errors.py.
"""

import copy
import gc
import itertools
import pickle
import threading

import numpy as np
import pytest
from caches import STORAGE, Model, filled, held, stored
from tolerance import assert_same, assert_same_bits

import qkv_ext
from qkv_ext import KVCache
from qkv_ext._cache import _pages

sdpa = qkv_ext.scaled_dot_product_attention


def draw(rng, *shape):
    return rng.standard_normal(shape, np.float32)


# ---- what it holds ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORAGE)
@pytest.mark.parametrize("page", [256, 768])
def test_any_calls_in_any_order(kind, page, rng):
    """Random appends, truncations, drops, reorders, forks and joinings of a family of caches."""
    cache = KVCache(3, 2, 5, 3, dtype=kind, _page=page)
    family = [(cache, Model(cache))]
    calls = [*["append"] * 3, "truncate", "drop", "reorder", "fork", "concatenate"]
    for _ in range(80):
        at = rng.integers(len(family))
        cache, model = family[at]
        lengths = cache.lengths
        what = rng.choice(calls)
        if what == "append":
            n = int(rng.choice([1, 1, 63, 64, 65, 255, 300, 520]))
            counts = rng.integers(0, n + 1, cache.batch) if rng.random() < 0.5 else None
            k, v = draw(rng, cache.batch, 2, n, 5), draw(rng, cache.batch, 2, n, 3)
            cache.append(k, v, lengths=counts)
            model.append(
                stored(k, kind), stored(v, kind), [n] * cache.batch if counts is None else counts
            )
        elif what == "truncate":
            shorter = np.maximum(lengths - rng.integers(0, 300, cache.batch), 0)
            cache.truncate(shorter)
            model.truncate(shorter)
        elif what == "drop":
            before = np.maximum(lengths - rng.integers(0, 600, cache.batch), 0)
            cache.drop(before)
            model.drop(before.tolist())
        elif what == "reorder":
            indices = rng.integers(0, cache.batch, rng.integers(1, 5))
            cache.reorder(indices)
            model.reorder(indices)
        elif what == "fork":
            family.append((cache.fork(), model.copy()))
        else:
            other, its = family[rng.integers(len(family))]
            family.append((KVCache.concatenate([cache, other]), model.joined(its)))
            indices = rng.permutation(cache.batch + other.batch)[:4]
            family[-1][0].reorder(indices)
            family[-1][1].reorder(indices)
        del family[:-4]
        for cache, model in family:
            model.assert_held_by(cache)


def test_a_step_equals_the_whole(backend, rng):
    """B4: a prompt and then a step at a time is what the whole sequence gives at once."""
    q, k, v = draw(rng, 2, 4, 300, 16), draw(rng, 2, 2, 300, 16), draw(rng, 2, 2, 300, 8)
    whole = sdpa(q, k, v, causal=True, backend=backend)
    cache = filled(k[:, :, :290], v[:, :, :290])
    parts = [cache.attend(q[:, :, :290], causal=True, backend=backend)]
    for n in range(290, 300):
        step = slice(n, n + 1)
        cache.append(k[:, :, step], v[:, :, step])
        parts.append(cache.attend(q[:, :, step], backend=backend))
    np.testing.assert_allclose(np.concatenate(parts, axis=2), whole, rtol=1e-5, atol=2e-6)


def test_lengths_of_items(backend, rng):
    """append(lengths=n) goes with attend(q_lengths=n); items do not see each other's padding."""
    cache = KVCache(3, 1, 8)
    first, second = np.array([5, 0, 2]), np.array([1, 3, 0])
    k, q = draw(rng, 3, 1, 8, 8), draw(rng, 3, 2, 3, 8)
    k[0, :, 5], k[1, :, 0] = np.nan, np.inf  # padding, which is never read
    cache.append(k[:, :, :5], k[:, :, :5], lengths=first)
    cache.append(k[:, :, 5:][:, :, ::-1], k[:, :, 5:][:, :, ::-1], lengths=second)
    assert cache.lengths.tolist() == [6, 3, 2]
    output, lse = cache.attend(q, causal=True, q_lengths=second, return_lse=True, backend=backend)
    for b in range(3):
        alone, n = filled(cache.keys(b)[None], cache.values(b)[None], "float32"), second[b]
        expected = alone.attend(q[b : b + 1, :, :n], causal=True, backend=backend)
        assert_same(output[b : b + 1, :, :n], expected, backend)
        assert not output[b, :, n:].any()
        assert np.isneginf(lse[b, :, n:]).all()
    shorter = cache.attend(q, kv_lengths=[2, 1, 0], backend=backend)
    assert not shorter[2].any()
    cache.truncate([2, 1, 0])
    assert_same(shorter, cache.attend(q, backend=backend), backend)


def test_excluded_keys_never_matter(backend, rng):
    """A4: whatever lies beyond lengths, windows and masks, in every storage type."""
    for kind in STORAGE:
        k, v, q = draw(rng, 2, 1, 300, 8), draw(rng, 2, 1, 300, 8), draw(rng, 2, 1, 2, 8)
        clean = filled(k, v, kind)
        k[:, :, :100], v[:, :, 40:100] = np.nan, np.inf
        k[:, :, 280:], v[:, :, 290:] = np.inf, np.nan
        spoilt = filled(k, v, kind)
        seen = (np.arange(300) >= 100) & (np.arange(300) < 280)
        for options in (
            {"mask": seen},
            {"mask": np.where(seen, np.float32(0), np.float32(-np.inf))},
            {"kv_lengths": [280, 270], "window": (150, 0), "causal": True},
        ):
            results = [x.attend(q, backend=backend, **options) for x in (spoilt, clean)]
            assert_same_bits(*results)
            assert np.isfinite(results[0]).all()


def test_types_of_arrays(backend, rng):
    """What comes in and goes out is float32, float16 or bfloat16, whatever is kept."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    k, q = draw(rng, 1, 1, 70, 8), draw(rng, 1, 2, 3, 8)
    for kind in STORAGE:
        for dtype in (np.float32, np.float16, bfloat16):
            x = k.astype(dtype)
            cache = filled(x, x, kind)
            np.testing.assert_array_equal(cache.keys(0)[None], stored(x, kind))
            results = cache.attend(
                q.astype(dtype), return_weights=True, return_lse=True, backend=backend
            )
            assert [result.dtype for result in results] == [dtype, dtype, np.float32]


def test_out_and_layouts(backend, rng):
    cache = filled(*draw(rng, 2, 2, 1, 20, 8))
    q = draw(rng, 2, 4, 5, 8)
    expected = cache.attend(q, backend=backend)
    out = np.empty((2, 5, 4, 8), np.float32)
    blhd = np.ascontiguousarray(q.swapaxes(1, 2))
    assert cache.attend(blhd, layout="blhd", out=out, backend=backend) is out
    assert_same(out.swapaxes(1, 2), expected, backend)
    cache.attend(q, out=q, backend=backend)
    assert_same(q, expected, backend)


# ---- sharing ------------------------------------------------------------------------------------


def bits_of(cache):
    return [x(b).tobytes() for b in range(cache.batch) for x in (cache.keys, cache.values)]


@pytest.mark.parametrize("kind", STORAGE)
def test_forks_go_on_by_themselves(kind, rng):
    """Full pages are shared; the last one is not, so that neither pays when it goes on."""
    x, more = draw(rng, 2, 2, 700, 6), draw(rng, 3, 2, 2, 300, 6)
    cache = filled(x, x, kind)
    before, nbytes = bits_of(cache), cache.nbytes
    fork = cache.fork()
    assert bits_of(fork) == before
    assert fork.nbytes == nbytes
    shared = [a is b for a, b in zip(pages_of(cache), pages_of(fork), strict=True)]
    assert shared == [True, True, False] * 2
    mine, its = pages_of(cache), pages_of(fork)
    fork.append(more[0], more[0])
    cache.append(more[1], more[1])
    assert pages_of(cache)[:3] == mine[:3]  # appended to in place
    assert pages_of(fork)[:3] == its[:3]
    for held_by, added in ((cache, more[1]), (fork, more[0])):
        np.testing.assert_array_equal(
            held_by.keys(1), stored(np.concatenate([x, added], 2), kind)[1]
        )
    # cut back into the pages that both hold, and on: neither changes the other
    kept = bits_of(cache)
    fork.truncate(130)
    fork.append(more[2], more[2])
    assert bits_of(cache) == kept
    cache.truncate(40)
    kept = bits_of(fork)
    cache.append(more[2], more[2])
    assert bits_of(fork) == kept


def pages_of(cache):
    return [page for item in cache._store.items for page in item.pages]


def test_reorder_copies_no_page(rng, monkeypatch):
    x, more = draw(rng, 3, 1, 300, 4), draw(rng, 4, 1, 1, 4)
    cache = filled(x, x)
    pages = pages_of(cache)
    monkeypatch.setattr(_pages.Pool, "take", None)  # no page can be had
    cache.reorder([2, 0, 2, 2])
    assert pages_of(cache) == [pages[n] for n in (4, 5, 0, 1, 4, 5, 4, 5)]
    monkeypatch.undo()
    cache.append(more, more)
    assert len(set(pages_of(cache))) == 1 + 2 + 3  # full, of the item that was used once, copies
    for b, was in enumerate((2, 0, 2, 2)):
        np.testing.assert_array_equal(cache.keys(b), np.concatenate([x[was], more[b]], axis=1))
    cache.reorder([])
    assert (cache.batch, cache.nbytes) == (0, 0)
    assert cache.attend(np.ones((0, 2, 1, 4), np.float32)).shape == (0, 2, 1, 4)


@pytest.mark.parametrize("kind", STORAGE)
def test_growing_copies_nothing(kind, rng):
    cache = filled(*draw(rng, 2, 1, 2, 400, 4), kind)
    pages = pages_of(cache)
    for n in (1, 111, 1, 600):
        cache.append(*draw(rng, 2, 1, 2, n, 4))
        assert pages_of(cache)[: len(pages)] == pages
        pages = pages_of(cache)
    assert len(pages) == 5


def test_a_step_describes_only_new_pages(rng):
    """What a backend reads is made anew where a page came or went, not with every key."""
    cache = filled(*draw(rng, 2, 2, 1, 250, 4))
    x = draw(rng, 2, 1, 1, 4)
    tables = []
    for _ in range(10):
        cache.append(x, x)
        tables.append(cache._store.pages().table)
        assert cache._store.pages().table is tables[-1]
    assert [a is b for a, b in itertools.pairwise(tables)] == [True] * 5 + [False] + [True] * 3
    assert tables[-1].shape == (4, 4)


def test_pages_come_back(rng):
    """A page that nobody holds any more serves again, as zeros; a few are kept for that."""
    cache = filled(*draw(rng, 2, 1, 2, 2700, 4))
    pool = cache._store.pool
    cache.truncate(2100)
    gc.collect()
    assert len(pool.used) == 2
    cache.append(*draw(rng, 2, 1, 2, 205, 4))
    assert len(pool.used) == 1
    page = pages_of(cache)[9]
    assert page.value_rows()[:, 0].all()
    assert not page.value_rows()[:, 1:].any()
    assert not page.k[:, 0, :, 1:].any()
    assert not page.k[:, 1:].any()
    del page
    cache.truncate(700)
    gc.collect()
    assert len(pool.used) == 0
    assert pool.rooms == 3  # the others went back to the system


@pytest.mark.parametrize("kind", STORAGE)
def test_slots_without_a_key_are_zeros(kind, rng):
    """Panels may be read whole; also where keys were taken back."""
    cache = filled(*draw(rng, 2, 1, 2, 200, 4), kind)
    cache.truncate(70)
    (page,) = pages_of(cache)
    assert not page.value_rows()[:, 70:].any()
    assert not page.k[:, 1, :, 6:].any()
    assert not page.k[:, 2:].any()
    assert page.k[:, 1, :, 5].all()
    if kind == "int8":
        assert page.v_scale[:, :70].all()
        assert not page.v_scale[:, 70:].any()
        assert not page.k_scale[:, 70:].any()


# ---- dropped keys -------------------------------------------------------------------------------


def test_dropped_keys(backend, rng):
    """A call is refused where a query sees one of them by the rules, and right where none does."""
    k, v = draw(rng, 3, 1, 900, 4), draw(rng, 3, 1, 900, 4)
    refused = served = 0
    for _ in range(150):
        whole = KVCache(3, 1, 4)
        whole.append(k, v, lengths=rng.integers(0, 901, 3))
        lengths = whole.lengths
        cut = whole.fork()
        cut.drop(rng.integers(0, lengths // 2 + 1))
        length = int(rng.choice([1, 3, 40]))
        options = {
            "causal": bool(rng.integers(2)),
            "align": str(rng.choice(["bottom-right", "top-left"])),
        }
        if rng.random() < 0.8:
            options["window"] = (int(rng.integers(0, 400)), int(rng.choice([0, 50])))
        if rng.random() < 0.4:
            options["query_offset"] = rng.integers(-60, 950, 3)
        if rng.random() < 0.3:
            options["kv_lengths"] = rng.integers(0, lengths + 1)
        if rng.random() < 0.3:
            options["q_lengths"] = rng.integers(0, length + 1, 3)
        if rng.random() < 0.2:
            options["key_offset"] = int(rng.integers(-100, 100))
        q = np.zeros((3, 2, length, 4), np.float32)  # all keys that are seen have a weight
        expected, weights = whole.attend(q, return_weights=True, backend="numpy", **options)
        gone = np.arange(weights.shape[-1]) < cut.dropped[:, None, None, None]
        if (weights * gone).any():
            refused += 1
            with pytest.raises(ValueError, match="has dropped the keys before"):
                cut.attend(q, backend=backend, **options)
        else:
            served += 1
            actual = cut.attend(q, return_weights=True, backend=backend, **options)
            np.testing.assert_allclose(actual[0], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(actual[1], weights, rtol=1e-5, atol=1e-6)
    assert min(refused, served) > 30


def test_dropping_gives_memory_back(rng):
    """Whole pages; and a window that goes on for long holds no more than it needs."""
    cache = filled(*draw(rng, 2, 1, 2, 1000, 4))
    page = cache.nbytes // 4
    for before, pages in ((255, 4), (256, 3), (100, 3), (767, 2), (768, 1), (801, 1)):
        cache.drop(before)
        assert cache.nbytes == pages * page + cache._store.pool.spare()
        assert cache._store.pool.spare() <= page
    assert cache.dropped.tolist() == [801]
    assert cache.keys(0).shape == (2, 199, 4)
    for _ in range(40):
        cache.append(*draw(rng, 2, 1, 2, 100, 4))
        cache.attend(draw(rng, 1, 2, 100, 4), causal=True, window=(199, 0))
        cache.drop(cache.lengths - 199)
        assert cache.nbytes <= 3 * page
    cache.truncate(300)  # into what was dropped: there is nothing left, and it can go on
    x = draw(rng, 1, 2, 5, 4)
    cache.append(x, x)
    assert (cache.lengths.item(), cache.dropped.item()) == (305, 300)
    np.testing.assert_array_equal(cache.keys(0), x[0])
    cache.truncate(0)
    assert (cache.lengths.item(), cache.dropped.item(), cache.nbytes) == (0, 0, 0)


# ---- pickles, copies, threads, processes, memory ------------------------------------------------


@pytest.mark.parametrize("kind", STORAGE)
def test_pickles_and_copies(kind, rng):
    x = draw(rng, 3, 2, 700, 6)
    x[0, 0, 5, 1] = np.nan
    cache = KVCache(3, 2, 6, dtype=kind)
    cache.append(x, x, lengths=[700, 0, 513])
    cache.drop([600, 0, 0])
    fork = cache.fork()
    bits = bits_of(cache)
    data = pickle.dumps(cache)
    entry = {"float32": 4, "int8": 1}.get(kind, 2)
    scales = 8 * 2 * 613 if kind == "int8" else 0
    assert len(data) < 613 * 2 * 12 * entry + scales + 3000  # what is used, not whole pages
    for other in (pickle.loads(data), copy.copy(cache), copy.deepcopy(cache)):
        assert repr(other) == repr(cache)
        assert other.dropped.tolist() == [600, 0, 0]
        assert bits_of(other) == bits
        other.append(x, x)
        assert other.lengths.tolist() == [1400, 700, 1213]
        assert bits_of(cache) == bits == bits_of(fork)
    pages = pages_of(copy.deepcopy([cache, cache])[0])
    assert not {p for p in pages if p} & set(pages_of(cache))


def test_threads_on_one_cache(rng):
    """Calls on one cache follow each other, forks go their ways: whatever is there is whole."""
    cache = KVCache(2, 2, 16, dtype="float16")
    errors, stop = [], threading.Event()

    def check(one):
        for b in range(one.batch):
            k, v = one.keys(b), one.values(b)
            n = min(k.shape[1], v.shape[1])
            assert (k[:, :n, :1] == k[:, :n]).all()  # a key is a number, in all of its entries
            assert (k[:, :n] == v[:, :n]).all()

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                what = rng.integers(6)
                n = int(rng.integers(1, 80))
                x = np.broadcast_to(rng.integers(1, 1000, (2, 1, n, 1)), (2, 2, n, 16))
                x = x.astype(np.float32)
                if what < 2 and cache.lengths.max() < 600:
                    cache.append(x, x)
                elif what == 2:
                    cache.attend(x[:, :, :3], threads=1)
                elif what == 3:
                    cache.truncate(int(rng.integers(0, 40)) if rng.random() < 0.5 else 0)
                elif what == 4:
                    fork = cache.fork()
                    fork.append(x, x)
                    fork.reorder([0, 0, 1])
                    fork.append(x[[0, 0, 1]], x[[0, 0, 1]])
                    check(fork)
                else:
                    cache.reorder([1, 0] if n % 2 else [0, 0])
        except ValueError as error:  # cut by another thread below what this one asked for
            if "expected at most" not in str(error) and "; expected 0 to" not in str(error):
                errors.append(error)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    stop.wait(1.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    check(cache)


def test_a_forked_process_has_its_own(python):
    """Pages are private to a process."""
    assert (
        python(
            """
import os, numpy as np, qkv_ext
if not hasattr(os, "fork"):
    print("[1. 2.]")
    raise SystemExit
cache = qkv_ext.KVCache(1, 1, 1)
x = np.ones((1, 1, 1, 1), "f4")
cache.append(x, x)
cache.append(2 * x, x)
child = os.fork()
if child == 0:
    cache.truncate(1)
    cache.append(3 * x, x)
    assert cache.keys(0).ravel().tolist() == [1, 3]
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(cache.keys(0).ravel())
"""
        )
        == "[1. 2.]"
    )


def test_no_memory_leaves_everything(rng, monkeypatch):
    x = draw(rng, 2, 1, 300, 4)
    cache = filled(x, x)
    before, nbytes = bits_of(cache), cache.nbytes

    def allocate(nbytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(_pages, "allocate", allocate)
    cache._store.pool.clean.clear()
    more = draw(rng, 2, 1, 600, 4)
    with pytest.raises(MemoryError, match=r"^no memory for 4 pages of \d+ bytes, 256 keys each$"):
        cache.append(more, more)
    with pytest.raises(MemoryError):
        cache.fork()
    assert bits_of(cache) == before
    assert cache.nbytes == nbytes
    cache.append(more[:, :, :200], more[:, :, :200])  # there is room for these
    monkeypatch.undo()
    cache.append(more[:, :, 200:], more[:, :, 200:])
    np.testing.assert_array_equal(cache.keys(1), np.concatenate([x, more], axis=2)[1])


@pytest.mark.parametrize("kind", STORAGE)
def test_absurd_sizes(kind):
    cache = KVCache(1, 1 << 31, 1 << 31, 0, dtype=kind)
    with pytest.raises(MemoryError):
        cache._store._make_room([1])
    cache = KVCache(1, 1, 1, dtype=kind)
    for n, error in ((1 << 45, MemoryError), (1 << 60, ValueError)):
        endless = np.broadcast_to(np.float32(1), (1, 1, n, 1))
        with pytest.raises(error):
            cache.append(endless, endless)
    assert cache.lengths.tolist() == [0]
    assert cache.nbytes == 0


def test_held_is_what_is_there(rng):
    k, v = draw(rng, 2, 1, 9, 4), draw(rng, 2, 1, 9, 3)
    for x, y in zip(held(filled(k, v)), (k, v), strict=True):
        np.testing.assert_array_equal(x, y)
