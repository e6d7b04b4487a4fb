"""What the options of a call say of its scores: which keys a query sees, and what else there is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qkv_ext._core import _arrays, _block_mask
from qkv_ext._core._arrays import FLOAT32, Array, shown
from qkv_ext._core._options import DEFAULT, Given
from qkv_ext._core._problem import (
    CAUSAL,
    COLUMNS,
    DIAGONAL,
    ITEM,
    K_LENGTH,
    K_START,
    OPEN,
    PLAIN,
    Q_LENGTH,
    Q_ROOM,
    Q_START,
    Rules,
    Scoring,
    Sizes,
)

new = tuple.__new__  #: makes a NamedTuple in half the time
MOST_HEADS = 1 << 20
_SMALL = np.iinfo(np.int32)
#: The options that a call without them has PLAIN or CAUSAL rules for: None, all of them.
RULED = slice(Given._fields.index("window"), Given._fields.index("kv_lengths"))


def integer_array(value: Any, name: str, expected: str = "integers") -> Array:
    """Integers of any dtype and shape; Python's own may be beyond any dtype."""
    array = _arrays.array_of(value, name, expected, objects=True)
    if array.size == 0 and not hasattr(value, "dtype"):
        return array.astype(np.int64)  # an empty list has no dtype of its own
    kind = array.dtype.kind
    if kind in "iu" or (
        kind == "O" and all(isinstance(n, int) and not isinstance(n, bool) for n in array.flat)
    ):
        return array
    given = f"is {shown(value)}" if kind == "O" else f"has dtype {array.dtype}"
    raise TypeError(f"{name} {given}; expected integers")


def integers(value: Any, name: str, count: int | None, least: int, most: int) -> Array:
    """An integer (count None) or integers (count,) of any dtype, as int64 within their bounds."""
    array = integer_array(value, name, "an integer" if count is None else f"integers ({count},)")
    if array.shape != (() if count is None else (count,)):
        wanted = "an integer" if count is None else f"shape ({count},)"
        raise ValueError(f"{name} has shape {array.shape}; expected {wanted}")
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < least or high > most:
            beyond = shown(low if low < least else high)
            bounds = f"expected {least} to {most}" if least <= most else "but there are none"
            raise ValueError(f"{name} holds {beyond}; {bounds}")
    return array.astype(np.int64)


def offset(value: Any, name: str) -> int:
    if type(value) is int and -OPEN <= value <= OPEN:
        return value
    return int(integers(value, name, None, -OPEN, OPEN))


def _window(window: Any) -> tuple[int, int]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(
            f"window is {shown(window)}; expected a pair (left, right) of integers or None for open"
        )
    sides = []
    for side in window:
        if side is None:
            sides.append(OPEN)
            continue
        if isinstance(side, (bool, np.bool_)) or not isinstance(side, (int, np.integer)):
            raise TypeError(f"window is {shown(window)}; expected integers or None for open")
        if side < 0:
            raise ValueError(f"window is {shown(window)}; expected no negative side: None is open")
        sides.append(min(int(side), OPEN))
    return sides[0], sides[1]


def _softcap(softcap: Any, dtype: Any) -> float:
    value = _arrays.number(softcap, "softcap", "positive", "positive finite", dtype)
    if not dtype.type(value) > 0:
        raise ValueError(f"softcap is {shown(softcap)}; expected a positive finite number or None")
    return value


def per_head(value: Any, name: str, shapes: tuple[tuple[int, ...], ...], dtype: Any) -> Array:
    """Floats of one of the shapes, in the compute dtype."""
    array = _arrays.array_of(value, name, "a plain array")
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {array.dtype}; expected floating point")
    if array.shape not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"{name} has shape {array.shape}; expected {wanted}")
    return np.ascontiguousarray(_arrays.finite_as(array, dtype))


def options(given: Given, sizes: Sizes) -> Scoring:
    """Check every option that scores depend on, for a call of these sizes."""
    _, lead, h, _, length, s, d, _, dtype, keys, packed = sizes
    if given is DEFAULT and d and keys is None and packed is None:  # most decode steps, quickly
        return new(Scoring, (None, 1.0 / math.sqrt(d), s - length, PLAIN, 0))
    compute = dtype if dtype is FLOAT32 else _arrays.compute_dtype(dtype)
    bottom_right = given.align is DEFAULT.align
    if not bottom_right:
        bottom_right = _arrays.choice(given.align, "align", _arrays.ALIGNS) == _arrays.BOTTOM_RIGHT
    scale = given.scale
    scale = 1.0 / math.sqrt(d) if scale is None and d else _arrays.scale(scale, d, compute)
    causal = given.causal
    if (causal is False or causal is True) and not [x for x in given[RULED] if x is not None]:
        rules = CAUSAL if causal else PLAIN
    else:
        rules = _rules(given, lead, h, compute)
    key_offset = given.key_offset
    if key_offset is not DEFAULT.key_offset:
        key_offset = offset(key_offset, "key_offset")
    no_lengths = given.q_lengths is given.kv_lengths is keys is None
    if no_lengths and given.query_offset is packed is None:
        diagonal = (s - length if bottom_right else 0) - key_offset
    else:
        diagonal, spans = _spans(given, sizes, bottom_right, key_offset)
        rules = rules if spans is None else rules._replace(spans=spans)
    if given.kv_segments is not None or given.q_segments is not None:
        rules = rules._replace(segments=_segments(given, sizes))
    if given.block_mask is not None:
        rules = rules._replace(blocks=_block_mask.checked(given.block_mask, sizes))
    mask = given.mask
    if mask is not None:
        mask = sizes.by_head(_arrays.mask(mask, (*sizes.rows, s), compute))
    return new(Scoring, (mask, scale, diagonal, rules, key_offset))


def _rules(given: Given, lead: tuple[int, ...], h: int, compute: np.dtype[Any]) -> Rules:
    """What a score obeys beyond the scale, but for lengths and offsets."""
    left, right = OPEN, 0 if _arrays.as_bool(given.causal, "causal") else OPEN
    if given.window is not None:
        left, most = _window(given.window)
        right = min(right, most)
    cap = 0.0 if given.softcap is None else _softcap(given.softcap, compute)
    slopes, sinks = given.alibi_slopes, given.sinks
    if slopes is not None:
        shapes = ((h,), (lead[0] if lead else 1, h))
        slopes = per_head(slopes, "alibi_slopes", shapes, compute)
        slopes = np.repeat(slopes, math.prod(lead[1:]), 0) if slopes.ndim == 2 else slopes[None]
    if sinks is not None:
        sinks = per_head(sinks, "sinks", ((h,),), compute)
    return Rules(left=left, right=right, softcap=cap, slopes=slopes, sinks=sinks)


def _segments(given: Given, sizes: Sizes) -> tuple[Array, Array]:
    """The segments of the queries and keys of every item, numbered in int32."""
    batch = sizes.lead[:1]
    if given.kv_segments is None:
        raise ValueError("q_segments is given without kv_segments; expected both")
    of_q = given.q_segments
    if of_q is None:
        if sizes.length != sizes.s:
            raise ValueError(
                f"kv_segments is given without q_segments, and L = {sizes.length} is not "
                f"S = {sizes.s}; expected both"
            )
        of_q = given.kv_segments
    of_k, arrays = given.kv_segments, []
    for value, name, n in ((of_k, "kv_segments", sizes.s), (of_q, "q_segments", sizes.length)):
        array = integer_array(value, name, f"integers {(*batch, n)}")
        if array.shape != (*batch, n):
            raise ValueError(f"{name} has shape {array.shape}; expected {(*batch, n)}")
        arrays.append(array.reshape(batch[0] if batch else 1, n))
    if any(array.size and not _SMALL.min <= array.min() <= array.max() <= _SMALL.max
           for array in arrays):  # fmt: skip
        arrays = _numbered(arrays)
    inner = math.prod(sizes.lead[1:])
    of_keys, of_queries = (np.repeat(array.astype(np.int32), inner, 0) for array in arrays)
    return of_queries, of_keys


def _numbered(arrays: list[Array]) -> list[Array]:
    """Numbers from 0 on that are equal where the integers are, of any dtype."""
    every = np.concatenate([array.astype(object).ravel() for array in arrays])
    numbers = np.unique(every, return_inverse=True)[1].reshape(-1)
    cut = arrays[0].size
    return [numbers[:cut].reshape(arrays[0].shape), numbers[cut:].reshape(arrays[1].shape)]


def _align(bottom_right: bool, keys: Any, queries: Any) -> Any:
    """The position of the first query that align says."""
    return keys - queries if bottom_right else 0


def _spans(
    given: Given, sizes: Sizes, bottom_right: bool, key_offset: int
) -> tuple[int, Array | None]:
    """The diagonal of every item where they have one and no lengths, else the spans of the items.

    An item is one of the first axis, as often as the axes between it and the heads say.
    """
    length, query_offset, rank = sizes.length, given.query_offset, 0
    if query_offset is not None:
        query_offset = integer_array(query_offset, "query_offset")
        rank = query_offset.ndim
        if given.q_lengths is given.kv_lengths is sizes.keys is None and rank == 0:
            return offset(query_offset, "query_offset") - key_offset, None
    batch = sizes.lead[0] if sizes.lead else None  # without a first axis they are integers
    table = np.zeros((1 if batch is None else batch, COLUMNS), np.int64)
    table[:, Q_LENGTH], table[:, K_LENGTH] = length, sizes.s if sizes.keys is None else sizes.keys
    if sizes.packed is not None:
        for ends, start, count in zip(
            sizes.packed, (Q_START, K_START), (Q_LENGTH, K_LENGTH), strict=True
        ):
            table[:, start], table[:, count] = ends[:-1], np.diff(ends)
    table[:, Q_ROOM] = table[:, Q_LENGTH]
    if given.q_lengths is not None:
        table[:, Q_LENGTH] = integers(given.q_lengths, "q_lengths", batch, 0, length)
    if given.kv_lengths is not None:
        table[:, K_LENGTH] = _kv_lengths(given.kv_lengths, sizes, table[:, K_LENGTH])
    if query_offset is not None:
        diagonal = integers(query_offset, "query_offset", batch if rank else None, -OPEN, OPEN)
    else:
        diagonal = _align(bottom_right, table[:, K_LENGTH], table[:, Q_LENGTH])
    table[:, DIAGONAL] = diagonal - key_offset
    if sizes.packed is None:
        table = np.repeat(table, math.prod(sizes.lead[1:]), axis=0)
        table[:, ITEM] = np.arange(len(table))
    return 0, table


def _kv_lengths(value: Any, sizes: Sizes, own: Array) -> Array:
    """Integers, each at most the keys that its item has."""
    batch = sizes.lead[0] if sizes.lead else None
    lengths = integers(value, "kv_lengths", batch, 0, int(own.max(initial=0)))
    beyond = np.flatnonzero(lengths > own)
    if beyond.size:
        n = beyond[0]
        item, most = ("item", "length") if sizes.packed is None else ("sequence", "span")
        raise ValueError(
            f"kv_lengths holds {lengths.reshape(-1)[n]} for {item} {n}; expected at most its "
            f"{most}, {own[n]}"
        )
    return lengths


def positions(
    scoring: Scoring, sizes: Sizes, before: list[int] | None = None
) -> tuple[range | Array, range | Array]:
    """Where queries and keys stand, on the axis of causal, window and ALiBi.

    Each is (L,) or (B, L), and (S,) for keys that are there.  With the lengths of a cache before
    they are appended, keys are as many as queries: (L,) or (B, L).  Padding stands nowhere; it is
    given position 0, so that it never asks for a longer table.
    """
    _, _, diagonal, rules, key_offset = scoring
    length, s, spans = sizes.length, sizes.s, rules.spans
    if spans is None:
        start = diagonal + key_offset
        first, count = (key_offset, s) if before is None else (s - length + key_offset, length)
        return range(start, start + length), range(first, first + count)
    if sizes.packed is not None:
        of_q, of_k = (np.diff(ends) for ends in sizes.packed)
        queries, keys = (
            np.arange(ends[-1]) - np.repeat(ends[:-1], np.diff(ends)) for ends in sizes.packed
        )
        keys = np.where(keys < np.repeat(spans[:, K_LENGTH], of_k), keys, 0)
        return queries + np.repeat(spans[:, DIAGONAL], of_q), keys
    i = np.arange(length)
    inner = math.prod(sizes.lead[1:])
    if inner == 0:  # of no items there is nothing to turn
        return np.zeros((sizes.lead[0], length), np.int64), np.zeros(s, np.int64)
    spans = spans[::inner]
    there = i < spans[:, Q_LENGTH, None]
    queries = np.where(there, i + spans[:, DIAGONAL, None] + key_offset, 0)
    if before is not None:
        keys = i + np.array(before, np.int64)[:, None] + key_offset
        return queries, np.where(there, keys, 0)
    j = np.arange(s)
    return queries, np.where(j < spans[:, K_LENGTH].max(initial=0), j + key_offset, 0)


def rows_there(scoring: Scoring, sizes: Sizes) -> Array | None:
    """Which rows of q are no padding, (B, L) or (1, L); None where all are there."""
    spans, inner = scoring.rules.spans, math.prod(sizes.lead[1:])
    if spans is None or sizes.packed is not None or inner == 0:
        return None
    there: Array = np.arange(sizes.length) < spans[::inner, Q_LENGTH, None]
    return there


def pairs(table: Array) -> float:
    """How many pairs of a query and a key there are in all items of spans."""
    lengths = table[:, (Q_LENGTH, K_LENGTH)].astype(np.float64)
    return float(lengths.prod(axis=1).sum())


def cumulative(value: Any, name: str, total: int) -> Array:
    """Cumulative lengths (N + 1,) of a packed batch: from 0, never falling, up to the total."""
    array = _arrays.array_of(value, name, "integers (N + 1,)", objects=True)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}; expected (N + 1,)")
    array = integers(array, name, array.size, 0, total)
    if array[0] != 0 or array[-1] != total or (np.diff(array) < 0).any():
        raise ValueError(
            f"{name} runs from {array[0]} to {array[-1]}"
            + (", and falls" if (np.diff(array) < 0).any() else "")
            + f"; expected it to start at 0, never to fall, and to end at {total}"
        )
    return array


def default_slopes(num_heads: Any) -> Array:
    """The slopes for any number of heads; see ``qkv_ext.alibi_slopes``."""
    h = int(integers(num_heads, "num_heads", None, 1, MOST_HEADS))
    power = 1 << (h.bit_length() - 1)  # the largest power of two up to h
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    if power < h:  # every other slope of twice as many heads
        rest = 2.0 ** (-4.0 / power * np.arange(1, 2 * (h - power), 2))
        slopes = np.concatenate([slopes, rest])
    return slopes.astype(np.float32)
