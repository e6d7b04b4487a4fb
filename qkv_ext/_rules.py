"""The rules that say which keys a query may see, and what else goes into the softmax, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv_ext import _arrays
from qkv_ext._arrays import Array, shown
from qkv_ext._problem import (
    CAUSAL,
    COLUMNS,
    ITEM,
    K_LENGTH,
    K_START,
    OPEN,
    PLAIN,
    Q_LENGTH,
    Q_ROOM,
    Q_START,
    SHIFT,
    Rules,
)

MOST_HEADS = 1 << 20


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


def rules(
    causal: Any,
    window: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    batch: int,
    inner: int,
    h: int,
    dtype: Any,
) -> Rules:
    """Check every option but those of lengths and offsets.  items are batch times inner."""
    result = CAUSAL if _arrays.switch(causal, "causal") else PLAIN
    if window is not None:
        left, right = _window(window)
        result = result._replace(left=left, right=min(right, result.right))
    if softcap is not None:
        result = result._replace(softcap=_softcap(softcap, dtype))
    if alibi_slopes is not None:
        slopes = per_head(alibi_slopes, "alibi_slopes", ((h,), (batch, h)), dtype)
        result = result._replace(slopes=np.repeat(np.atleast_2d(slopes), inner, axis=0)
                                 if slopes.ndim == 2 else slopes[None])  # fmt: skip
    if sinks is not None:
        result = result._replace(sinks=per_head(sinks, "sinks", ((h,),), dtype))
    return result


def spans(
    align: str,
    q_lengths: Any,
    kv_lengths: Any,
    query_offset: Any,
    key_offset: Any,
    batch: int | None,
    inner: int,
    length: int,
    s: int,
) -> tuple[int, Array | None]:
    """The shift of every item where they have one and no lengths, else the spans of the items.

    batch is the length of the first axis, None at rank 2, where lengths and offsets are integers;
    inner is how many items each of its entries has.
    """
    key = offset(key_offset, "key_offset")
    rank = 0
    if query_offset is not None:
        query_offset = integer_array(query_offset, "query_offset")
        rank = query_offset.ndim
    if q_lengths is None and kv_lengths is None and rank == 0:
        if query_offset is None:
            return (s - length if align == "bottom-right" else 0) - key, None
        return offset(query_offset, "query_offset") - key, None
    count = 1 if batch is None else batch
    table = np.zeros((count, COLUMNS), np.int64)
    table[:, Q_LENGTH] = table[:, Q_ROOM] = length
    table[:, K_LENGTH] = s
    if q_lengths is not None:
        table[:, Q_LENGTH] = integers(q_lengths, "q_lengths", batch, 0, length)
    if kv_lengths is not None:
        table[:, K_LENGTH] = integers(kv_lengths, "kv_lengths", batch, 0, s)
    if query_offset is not None:
        first = integers(query_offset, "query_offset", batch if rank else None, -OPEN, OPEN)
        table[:, SHIFT] = first - key
    elif align == "bottom-right":
        table[:, SHIFT] = table[:, K_LENGTH] - table[:, Q_LENGTH] - key
    else:
        table[:, SHIFT] = -key
    table = np.repeat(table, inner, axis=0)
    table[:, ITEM] = np.arange(len(table))
    return 0, table


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


def packed_spans(align: str, cu_q: Array, cu_k: Array, kv_lengths: Any) -> Array:
    """The spans of the sequences of a packed batch; kv_lengths are at most each sequence's own."""
    count = len(cu_q) - 1
    table = np.zeros((count, COLUMNS), np.int64)
    table[:, Q_START], table[:, Q_LENGTH] = cu_q[:-1], np.diff(cu_q)
    table[:, Q_ROOM] = table[:, Q_LENGTH]
    table[:, K_START], table[:, K_LENGTH] = cu_k[:-1], np.diff(cu_k)
    if kv_lengths is not None:
        most = int(table[:, K_LENGTH].max(initial=0))
        lengths = integers(kv_lengths, "kv_lengths", count, 0, most)
        if (lengths > table[:, K_LENGTH]).any():
            worst = int(np.argmax(lengths - table[:, K_LENGTH]))
            raise ValueError(
                f"kv_lengths holds {lengths[worst]} for sequence {worst}; expected at most its "
                f"span, {table[worst, K_LENGTH]}"
            )
        table[:, K_LENGTH] = lengths
    if align == "bottom-right":
        table[:, SHIFT] = table[:, K_LENGTH] - table[:, Q_LENGTH]
    return table


def default_slopes(num_heads: Any) -> Array:
    """The slopes for any number of heads; see ``qkv_ext.alibi_slopes``."""
    h = int(integers(num_heads, "num_heads", None, 1, MOST_HEADS))
    power = 1 << (h.bit_length() - 1)  # the largest power of two up to h
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    if power < h:  # every other slope of twice as many heads
        rest = 2.0 ** (-4.0 / power * np.arange(1, 2 * (h - power), 2))
        slopes = np.concatenate([slopes, rest])
    return slopes.astype(np.float32)
