"""Caches to test on, and what a cache is to hold, as plain lists: a model of it without pages."""

import numpy as np
from cases import dtype_of

import qkv_ext
from qkv_ext._core._storage import ENTRIES

STORAGE = tuple(ENTRIES)


def filled(k, v, kind="float32", step=None, page=256):
    """A cache that holds k and v (B, Hkv, S, D or Dv), appended so many keys at a time."""
    batch, heads, s, d = k.shape
    cache = qkv_ext.KVCache(batch, heads, d, v.shape[-1], dtype=kind, _page=page)
    for start in range(0, s, step or max(s, 1)):
        part = slice(start, start + (step or s))
        cache.append(k[:, :, part], v[:, :, part])
    return cache


def held(cache):
    """All keys and values of a cache that dropped none, zeros behind those of shorter items."""
    shape = (cache.batch, cache.num_kv_heads, max(cache.lengths, default=0))
    k, v = (np.zeros((*shape, last), np.float32) for last in (cache.head_dim, cache.v_dim))
    for b, length in enumerate(cache.lengths):
        k[b, :, :length], v[b, :, :length] = cache.keys(b), cache.values(b)
    return k, v


def stored(x, kind):
    """What a storage type makes of x (..., D), by the plainest NumPy."""
    x = np.asarray(x).astype(np.float32)
    with np.errstate(all="ignore"):
        if kind != "int8":
            return x.astype(dtype_of(kind)).astype(np.float32)
        scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
        entries = np.rint(x / scale)
        rows = np.where(scale == 0, np.float32(0), entries * scale)
        return np.where(np.isfinite(scale), rows, np.float32(np.nan))


class Model:
    """The keys and values of each item as a list of rows (Hkv, D) and (Hkv, Dv)."""

    def __init__(self, cache):
        self.heads, self.d, self.dv = cache.num_kv_heads, cache.head_dim, cache.v_dim
        self.items = [[] for _ in range(cache.batch)]
        self.dropped = [0] * cache.batch

    def copy(self):
        other = object.__new__(Model)
        other.heads, other.d, other.dv = self.heads, self.d, self.dv
        other.items, other.dropped = [list(item) for item in self.items], list(self.dropped)
        return other

    def joined(self, other):
        joined = self.copy()
        joined.items += [list(item) for item in other.items]
        joined.dropped += other.dropped
        return joined

    def append(self, k, v, lengths):
        for b, n in enumerate(lengths):
            self.items[b] += [(k[b, :, i], v[b, :, i]) for i in range(n)]

    def truncate(self, lengths):
        for b, n in enumerate(lengths):
            del self.items[b][n:]
            self.dropped[b] = min(self.dropped[b], n)

    def drop(self, before):
        self.dropped = [max(a, b) for a, b in zip(self.dropped, before, strict=True)]

    def reorder(self, indices):
        self.items = [list(self.items[n]) for n in indices]
        self.dropped = [self.dropped[n] for n in indices]

    def arrays(self):
        """k (B, Hkv, S, D) and v, dropped keys too, zeros behind those of shorter items."""
        count = max(map(len, self.items), default=0)
        k, v = (
            np.zeros((len(self.items), self.heads, count, last), np.float32)
            for last in (self.d, self.dv)
        )
        for b, item in enumerate(self.items):
            for i, (key, value) in enumerate(item):
                k[b, :, i], v[b, :, i] = key, value
        return k, v

    def assert_held_by(self, cache):
        assert cache.lengths.tolist() == [len(item) for item in self.items]
        assert cache.dropped.tolist() == self.dropped
        for b, item in enumerate(self.items):
            rows = item[self.dropped[b] :]
            for n, actual, last in ((0, cache.keys(b), self.d), (1, cache.values(b), self.dv)):
                expected = np.zeros((self.heads, len(rows), last), np.float32)
                for i, row in enumerate(rows):
                    expected[:, i] = row[n]
                np.testing.assert_array_equal(actual, expected, strict=True)
