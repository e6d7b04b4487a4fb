"""The front door of KVCache: its sizes, what is appended to it, and the calls that attend to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from qkv_ext._cache._pages import Layout
from qkv_ext._cache._store import Store
from qkv_ext._core import _arrays, _check, _problem, _rules
from qkv_ext._core._arrays import (
    BHLD,
    BLHD,
    FLOAT32,
    FLOAT64,
    Array,
    Later,
    cast_to,
    operand,
    same_dtype,
    shown,
)
from qkv_ext._core._check import Checked
from qkv_ext._core._options import Given
from qkv_ext._core._problem import TILE, Problem, Scoring, Sizes
from qkv_ext._core._storage import ENTRIES

_MOST = 1 << 31  #: of every size; memory ends before that
_MOST_ITEMS = 1 << 20
_FLOATS = "float32, float16 or bfloat16"


def layout(num_kv_heads: Any, head_dim: Any, v_dim: Any, dtype: Any, page: Any) -> Layout:
    """What the pages of a cache look like."""
    heads = size(num_kv_heads, "num_kv_heads")
    d = size(head_dim, "head_dim")
    dv = d if v_dim is None else size(v_dim, "v_dim")
    keys = size(page, "_page")
    if keys == 0 or keys % TILE:
        raise ValueError(f"_page is {keys}; expected a positive multiple of {TILE}")
    return Layout(storage(dtype), keys, heads, d, dv)


def size(value: Any, name: str, most: int = _MOST) -> int:
    return int(_rules.integers(value, name, None, 0, most))


def batch(value: Any) -> int:
    return size(value, "batch", _MOST_ITEMS)


def storage(dtype: Any) -> str:
    """The name of a storage type, given by its name or as a dtype."""
    name = dtype
    if not isinstance(dtype, str):
        try:
            name = np.dtype(dtype).name if isinstance(dtype, (type, np.dtype)) else None
        except TypeError:  # a type without a dtype
            name = None
        if name is None:
            expected = ", ".join(ENTRIES)
            raise TypeError(f"dtype is {shown(dtype)}; expected one of {expected}")
    if name not in ENTRIES:
        raise ValueError(f"dtype is {shown(dtype)}; expected one of {', '.join(ENTRIES)}")
    return str(name)


def _floats(x: Any, name: str, later: Later | None) -> Array:
    array = operand(x, name, 0, later)
    if array.dtype == FLOAT64:
        raise TypeError(f"{name} has dtype float64; expected {_FLOATS}: {name}{cast_to(FLOAT32)}")
    return array


def appended(store: Store, k: Any, v: Any, lengths: Any) -> tuple[Array, Array, list[int]]:
    """Keys (B, Hkv, n, D) and values (B, Hkv, n, Dv), and how many of them each item takes."""
    count, own = len(store.items), store.layout
    later: Later | None = None if lengths is None else []
    k, v = _floats(k, "k", later), _floats(v, "v", later)
    for x, name, last in ((k, "k", own.head_dim), (v, "v", own.v_dim)):
        if x.ndim != 4 or x.shape[:2] != (count, own.kv_heads) or x.shape[3] != last:
            fits = x.ndim == 4 and (x.shape[0], *x.shape[2:]) == (count, own.kv_heads, last)
            hint = f": pass {name}.swapaxes(1, 2)" if fits else ""
            raise ValueError(
                f"{name} has shape {x.shape}; expected ({count}, {own.kv_heads}, n, {last}), "
                f"as the cache has{hint}"
            )
    n = k.shape[2]
    if v.shape[2] != n:
        raise ValueError(f"k and v have shapes {k.shape} and {v.shape}; expected one n")
    same_dtype(k=k, v=v)
    if lengths is None:
        return k, v, [n] * count
    counts: list[int] = _rules.integers(lengths, "lengths", count, 0, n).tolist()
    if later:
        _arrays.copy_rows(later, (count,), ((b, 0, n) for b, n in enumerate(counts)))
    most = max(counts, default=0)
    return k[:, :, :most], v[:, :, :most], counts


def caches(given: Any, expected: type) -> list[Any]:
    """Caches of one layout."""
    if isinstance(given, expected) or not isinstance(given, Iterable):
        raise TypeError(f"caches is a {type(given).__name__}; expected a sequence of KVCache")
    found = list(given)
    if not found:
        raise ValueError("caches is empty; expected one KVCache at least")
    for n, cache in enumerate(found):
        if not isinstance(cache, expected):
            raise TypeError(f"caches[{n}] is a {type(cache).__name__}; expected a KVCache")
    first: Layout = found[0]._store.layout
    for n, cache in enumerate(found):
        own: Layout = cache._store.layout
        if own != first:
            misfits = (
                f"{_ARGUMENTS[name]} {shown(a)} and not {shown(b)}"
                for name, a, b in zip(Layout._fields, own, first, strict=True)
                if a != b
            )
            raise ValueError(f"caches[{n}] has {', '.join(misfits)}; expected caches of one layout")
    size(sum(len(cache._store.items) for cache in found), "the batch of all caches", _MOST_ITEMS)
    return found


#: What a user calls the fields of a Layout.
_ARGUMENTS = {
    "kind": "dtype",
    "size": "_page",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "v_dim": "v_dim",
}


def item(store: Store, b: Any) -> int:
    return int(_rules.integers(b, "b", None, 0, len(store.items) - 1))


def indices(store: Store, value: Any) -> list[int]:
    """Items (n,), any number of them."""
    array = _rules.integer_array(value, "indices", "integers (n,)")
    if array.ndim != 1:
        raise ValueError(f"indices has shape {array.shape}; expected (n,)")
    last = len(store.items) - 1
    chosen: list[int] = _rules.integers(array, "indices", array.size, 0, last).tolist()
    return chosen


def per_item(store: Store, value: Any, name: str) -> list[int]:
    """An integer or integers (B,), each from 0 to the length of its item."""
    lengths = store.lengths
    wanted = f"an integer or integers ({len(lengths)},)"
    array = _rules.integer_array(value, name, wanted)
    if array.ndim == 0:
        array = np.broadcast_to(array, (len(lengths),))
    longest = max(lengths, default=0)
    numbers: list[int] = _rules.integers(array, name, len(lengths), 0, longest).tolist()
    for b, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        if number > length:
            raise ValueError(
                f"{name} holds {number} for item {b}; expected at most its length, {length}"
            )
    return numbers


def _fits(q: Array, axis: int, own: Layout, count: int) -> bool:
    """Whether q, with its heads on that axis, goes with the keys of that many items."""
    if q.ndim != 4 or q.shape[0] != count or q.shape[3] != own.head_dim:
        return False
    h, heads = q.shape[axis], own.kv_heads
    return h == heads or (heads > 0 and h % heads == 0)


def attention(store: Store, q: Any, given: Given) -> Checked[Problem]:
    """Check a call of KVCache.attend."""
    own, lengths = store.layout, store.lengths
    count, s = len(lengths), max(lengths, default=0)
    later: Later | None = None if given.q_lengths is None else []
    q = _floats(q, "q", later)
    blhd = _arrays.is_blhd(given.layout)
    layout = BLHD if blhd else BHLD
    if not _fits(q, 2 if blhd else 1, own, count):
        axes, other = ("L, H", "bhld") if blhd else ("H, L", "blhd")
        hint = f'; it fits with layout="{other}"' if _fits(q, 1 if blhd else 2, own, count) else ""
        raise ValueError(
            f"q has shape {q.shape}; expected ({count}, {axes}, {own.head_dim}) with H a multiple "
            f"of {own.kv_heads}, as the cache has{hint}"
        )
    q = q.swapaxes(1, 2) if blhd else q
    _, h, length, d = q.shape
    ragged = lengths if lengths.count(s) < count else None
    sizes = Sizes(4, (count,), h, own.kv_heads, length, s, d, own.v_dim, q.dtype, ragged)
    scoring = _rules.options(given, sizes)
    spans = scoring.rules.spans
    if later:
        _check.copy_rows((later, None), layout, (count,), spans)
    kept(sizes, scoring, store.dropped, lengths)
    _check.feasible(sizes, spans)
    return _check.with_output(q, None, None, layout, sizes, given, scoring, store.pages())


def kept(sizes: Sizes, scoring: Scoring, dropped: list[int], lengths: list[int]) -> None:
    """Refuse a call in which a query row may see a key that was dropped.

    Row i sees the keys i + diagonal - left to i + diagonal + right.  Both ends move on with i, so
    the first row that sees any key sees the earliest.
    """
    if not any(dropped):
        return
    rules = scoring.rules
    for b, (gone, length) in enumerate(zip(dropped, lengths, strict=True)):
        rows, there, diagonal = sizes.length, length, scoring.diagonal
        if rules.spans is not None:
            span = rules.spans[b].tolist()
            rows, there = span[_problem.Q_LENGTH], span[_problem.K_LENGTH]
            diagonal = span[_problem.DIAGONAL]
        row = max(0, -(diagonal + rules.right))
        first = max(0, row + diagonal - rules.left)
        if row < rows and first < min(gone, there):
            raise ValueError(
                f"the cache has dropped the keys before {gone} of item {b}, but a query of this "
                f"call sees keys from {first} on; expected a window that leaves them out"
            )
