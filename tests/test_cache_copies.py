"""What a KVCache computes after any calls, and copies of it, held against a model without pages."""

import copy
import pickle

import numpy as np
import oracle
import pytest
from caches import STORAGE, Model, stored
from tolerance import assert_same

from qkv_ext import KVCache

HEADS, GROUP, D, DV = 2, 2, 5, 3


def through_pickle(cache):
    return pickle.loads(pickle.dumps(cache))


def through_deepcopy(cache):
    return copy.deepcopy(cache)


def arrays(rng, batch, n):
    return tuple(rng.standard_normal((batch, HEADS, n, last), np.float32) for last in (D, DV))


def any_calls(rng, kind):
    """A cache after random calls, copies of every kind among them, and its model."""
    cache = KVCache(int(rng.integers(1, 4)), HEADS, D, DV, dtype=kind, _page=rng.choice([256, 512]))
    model = Model(cache)
    for _ in range(rng.integers(1, 9)):
        lengths = cache.lengths
        what = rng.choice(["append", "append", "truncate", "drop", "reorder", "copy"])
        if what == "append":
            n = int(rng.choice([1, 5, 255, 400, 700]))
            counts = rng.integers(0, n + 1, cache.batch)
            k, v = arrays(rng, cache.batch, n)
            cache.append(k, v, lengths=counts)
            model.append(stored(k, kind), stored(v, kind), counts)
        elif what == "truncate":
            shorter = rng.integers(0, lengths + 1)
            cache.truncate(shorter)
            model.truncate(shorter)
        elif what == "drop":  # often all of them, or all but a few
            before = np.maximum(lengths - rng.choice([0, 0, 20, 300], cache.batch), 0)
            cache.drop(before)
            model.drop(before.tolist())
        elif what == "reorder":
            indices = rng.integers(0, cache.batch, rng.integers(1, 4))
            cache.reorder(indices)
            model.reorder(indices)
        else:
            make = rng.choice([KVCache.fork, copy.copy, through_deepcopy, through_pickle])
            cache = make(cache)
    return cache, model


def any_options(rng, cache, length):
    """Options that place the queries, and others."""
    batch, lengths = cache.batch, cache.lengths
    s = int(lengths.max())
    near = [None, 0, 10, 300]
    placing = {
        "causal": lambda: True,
        "align": lambda: str(rng.choice(["bottom-right", "top-left"])),
        "window": lambda: (near[rng.integers(4)], near[rng.integers(4)]),
        "kv_lengths": lambda: rng.integers(0, lengths + 1),
        "q_lengths": lambda: rng.integers(0, length + 1, batch),
        "query_offset": lambda: rng.integers(-20, s + 60, batch),
        "key_offset": lambda: int(rng.integers(-50, 50)),
    }
    others = {
        "mask": lambda: rng.random((batch, 1, length, s)) < rng.choice([0.0, 0.3, 0.9]),
        "scale": lambda: 0.7,
        "softcap": lambda: 3.0,
        "alibi_slopes": lambda: rng.random((batch, HEADS * GROUP), np.float32),
        "sinks": lambda: rng.standard_normal(HEADS * GROUP, np.float32),
    }
    if rng.random() < 0.3:  # a float mask
        others["mask"] = lambda: np.where(rng.random((length, s)) < 0.5, np.float32(0.5), -np.inf)
    taken = {name: make() for name, make in placing.items() if rng.random() < 0.45}
    if rng.random() < 0.7 and "window" not in taken:
        taken["window"] = (int(rng.choice([0, 10, 250])), 0)
    return taken, {name: make() for name, make in others.items() if rng.random() < 0.25}


@pytest.mark.slow_beside_fastest
@pytest.mark.parametrize("kind", STORAGE)
def test_attend_after_any_calls(backend, kind, rng):
    """A row that may see a dropped key is refused; every other call is right, on every copy."""
    refused = served = 0
    for _ in range(150):
        cache, model = any_calls(rng, kind)
        length = int(rng.choice([1, 1, 3, 30]))
        placing, others = any_options(rng, cache, length)
        k, v = model.arrays()
        q = rng.standard_normal((cache.batch, HEADS * GROUP, length, D), np.float32)
        rules = {"kv_lengths": cache.lengths} | placing
        _, seen, _ = oracle.attention(0 * q, k, v, **rules)
        gone = np.arange(k.shape[2]) < cache.dropped[:, None, None, None]
        options = {**placing, **others, "return_weights": True, "return_lse": True}
        if (gone & (seen > 0)).any():
            refused += 1
            with pytest.raises(ValueError, match="has dropped the keys before"):
                cache.attend(q, backend=backend, **options)
            continue
        served += 1
        actual = cache.attend(q, backend=backend, **options)
        expected = oracle.attention(q, k, v, **rules, **others)
        for x, y in zip(actual, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        for x, y in zip(actual, copied(rng, cache).attend(q, backend=backend, **options),
                        strict=True):  # fmt: skip
            assert_same(x, y, backend)
    assert min(refused, served) > 20


def copied(rng, cache):
    return rng.choice([KVCache.fork, through_deepcopy, through_pickle])(cache)


@pytest.mark.parametrize("kind", STORAGE)
@pytest.mark.parametrize("page", [256, 768])
@pytest.mark.parametrize("make", [through_pickle, through_deepcopy, copy.copy])
def test_a_copy_behaves_as_its_original(backend, make, page, kind, rng):
    """Also where all keys were dropped, of a page begun, of a whole one, or of no page at all."""
    for length, dropped, kept in [(5, 5, 5), (256, 256, 256), (700, 700, 700), (700, 600, 300),
                                  (0, 0, 0), (5, 2, 1), (1000, 999, 1000)]:  # fmt: skip
        cache = KVCache(2, HEADS, D, DV, dtype=kind, _page=page)
        cache.append(*arrays(rng, 2, length), lengths=[length, length // 2])
        cache.drop([dropped, dropped // 2])
        cache.truncate([kept, kept // 2])
        other = make(cache)
        q = rng.standard_normal((2, HEADS * GROUP, 1, D), np.float32)
        k, v = arrays(rng, 2, 300)
        for same in (cache, other):
            assert same.fork().lengths.tolist() == [kept, kept // 2]
            assert through_pickle(same).dropped.tolist() == cache.dropped.tolist()
        held, others = (x.nbytes - x._store.pool.spare() for x in (cache, other))
        assert (repr(other), others) == (repr(cache), held)
        for step in range(3):  # as they are, with more keys, and fewer again
            for b in range(2):
                np.testing.assert_array_equal(other.keys(b), cache.keys(b), strict=True)
                np.testing.assert_array_equal(other.values(b), cache.values(b), strict=True)
            seen = {"query_offset": cache.lengths, "window": (0, 5)}  # what comes next, if there is
            before = [x.attend(q, backend=backend, **seen) for x in (cache, other)]
            np.testing.assert_array_equal(*before)
            for same in (cache, other):
                if step == 0:
                    same.append(k, v)
                elif step == 1:
                    same.truncate(same.lengths - 299)


def test_a_row_without_keys_looks_at_no_page(backend, rng):
    """Dropped pages are not touched, whatever lengths, offsets and windows leave of a row."""
    q = rng.standard_normal((2, HEADS * GROUP, 1, D), np.float32)
    cache = KVCache(2, HEADS, D, DV)
    cache.append(*arrays(rng, 2, 700))
    cache.drop(600)
    for lengths in ([100, 100], [700, 0], [0, 0], [700, 100], [512, 300]):
        options = {"kv_lengths": lengths, "query_offset": 650, "window": (10, 0)}
        output, lse = cache.attend(q, **options, return_lse=True, backend=backend)
        for b, n in enumerate(lengths):
            assert (output[b] != 0).all() == (n == 700)
            assert (lse[b] == -np.inf).all() == (n != 700)
