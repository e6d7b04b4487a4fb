"""The NumPy backend: everything in plain NumPy, the fallback and the test oracle.

    output = softmax(scale Q Kᵀ, over the allowed keys) V

It computes in the dtype of its inputs, float32 or float64.  Scores are made for a chunk of queries
at a time, so that they never take more than a few MB.  Multiplications are left to NumPy's BLAS,
and so is the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product as every
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from qkv_ext._check import Problem, Product, Rows

Array = NDArray[Any]

CHUNK = 1 << 20  #: scores held at a time


def attention(problem: Problem, isa: int = -1) -> None:
    """Write problem.out, and weights and lse where the problem has them."""
    with np.errstate(all="ignore"):  # NaN, inf and underflow are results here, not accidents
        if problem.q.dtype.itemsize == 2:  # float16 and bfloat16: cast once, computed in float32
            q, k, v = (x.astype(np.float32) for x in (problem.q, problem.k, problem.v))
            out = np.empty(problem.out.shape, np.float32)
            attention(problem._replace(q=q, k=k, v=v, out=out))
            problem.out[...] = out
            return
        for part in _items(problem):
            for item, heads, queries in _chunks(part):
                _attend(part, item, heads, queries)


def _items(problem: Problem) -> Iterator[Problem]:
    """A problem whose items differ in lengths or offsets, as one problem an item."""
    if problem.rules.spans is None:
        yield problem
        return
    rules, lead = problem.rules, problem.out.shape[:-3]
    q, k, v = (np.broadcast_to(x, lead + x.shape[-3:]) for x in (problem.q, problem.k, problem.v))
    mask = problem.mask
    if mask is not None:
        mask = np.broadcast_to(mask, lead + mask.shape[-3:])
    for empty, value in ((problem.out, 0), (problem.weights, 0), (problem.lse, -np.inf)):
        if empty is not None:
            empty[...] = value  # rows past an item's length are no rows
    for n, span in enumerate(rules.spans.tolist()):
        item, q_start, q_length, _, k_start, k_length, shift = span
        index = np.unravel_index(item, lead)
        queries = slice(q_start, q_start + q_length)
        keys = slice(k_start, k_start + k_length)
        own_mask = None
        if mask is not None:
            cut = tuple(
                s if m > 1 else slice(None)
                for s, m in zip((queries, keys), mask.shape[-2:], strict=True)
            )
            own_mask = mask[index][..., cut[0], cut[1]]
        slopes = (
            rules.slopes
            if rules.slopes is None or len(rules.slopes) == 1
            else rules.slopes[n : n + 1]
        )
        yield problem._replace(
            q=q[index][:, queries],
            k=k[index][:, keys],
            v=v[index][:, keys],
            mask=own_mask,
            shift=shift,
            rules=rules._replace(spans=None, slopes=slopes),
            out=problem.out[index][:, queries],
            weights=None if problem.weights is None else problem.weights[index][:, queries, keys],
            lse=None if problem.lse is None else problem.lse[index][:, queries],
        )


def _chunks(problem: Problem) -> Iterator[tuple[tuple[Any, ...], slice, slice]]:
    """Index (leading axes), key/value heads and queries of chunks of at most CHUNK scores.

    One chunk takes everything where that is little, else whole batch items, else key/value heads,
    else some queries of one.
    """
    *lead, h, length, _ = problem.out.shape
    hkv, s = problem.k.shape[-3:-1]
    if 0 in problem.out.shape[:-1]:
        return
    group = h // hkv
    if math.prod(lead) * h * length * s <= CHUNK:
        yield (slice(None),) * len(lead), slice(0, hkv), slice(0, length)
        return
    heads = min(hkv, max(1, CHUNK // max(1, group * length * s)))
    rows = length if heads > 1 else min(length, max(1, CHUNK // max(1, group * s)))
    for item in np.ndindex(*lead):
        for g0, i0 in every(range(0, hkv, heads), range(0, length, rows)):
            yield item, slice(g0, min(hkv, g0 + heads)), slice(i0, min(length, i0 + rows))


def _attend(problem: Problem, item: tuple[Any, ...], heads: slice, queries: slice) -> None:
    lead = problem.out.shape[:-3]
    hkv = heads.stop - heads.start
    group = problem.out.shape[-3] // problem.k.shape[-3]
    all_heads = slice(heads.start * group, heads.stop * group)

    def part(x: Array, rows: slice, which: slice) -> Array:
        """The chunk's share of x, with a group axis for GQA: (..., Hkv, 1 or G, rows, last)."""
        x = np.broadcast_to(x, lead + x.shape[-3:])[item][..., which, rows, :]
        return x.reshape(*x.shape[:-3], hkv, x.shape[-3] // hkv, *x.shape[-2:])

    everything = slice(None)
    q = part(problem.q, queries, all_heads)  # (..., Hkv, G, l, D)
    k = part(problem.k, everything, heads)  # (..., Hkv, 1, S, D)
    v = part(problem.v, everything, heads)  # (..., Hkv, 1, S, Dv)

    # scores: scale, softcap, ALiBi, mask
    rules = problem.rules
    scores = np.matmul(q * q.dtype.type(problem.scale), k.swapaxes(-1, -2))
    if rules.softcap:
        cap = q.dtype.type(rules.softcap)
        scores = cap * np.tanh(scores / cap)
    distance = _positions(problem, queries)[:, None] - np.arange(k.shape[-2])
    if rules.slopes is not None:
        slopes = _per_item(problem, rules.slopes)[item][..., all_heads]
        slopes = slopes.reshape(*scores.shape[:-2], 1, 1)
        scores -= slopes * np.abs(distance).astype(q.dtype)
    allowed = _allowed_by_order(problem, distance)
    if problem.mask is not None:
        shape = (*lead, problem.out.shape[-3], problem.out.shape[-2], problem.k.shape[-2])
        mask = np.broadcast_to(problem.mask, shape)[item][..., all_heads, queries, :]
        mask = mask.reshape(scores.shape)
        if mask.dtype.kind != "b":
            scores += mask
            mask = mask != -np.inf
        allowed = mask if allowed is None else allowed & mask

    # what is excluded is selected, never added, so that NaN cannot leak
    if allowed is None:
        empty: Any = False
    else:
        allowed = np.broadcast_to(allowed, scores.shape)
        empty = ~allowed.any(axis=-1, keepdims=True)
        scores = np.where(allowed, scores, -np.inf)

    # softmax; a row with no key subtracts 0, so that exp gives zeros, and divides by 1
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    nothing: Any = -np.inf  # the lse of a row with no key
    if rules.sinks is not None:
        nothing = rules.sinks[all_heads].reshape(*scores.shape[-4:-2], 1, 1)
        top = np.maximum(top, nothing)
    scores -= np.where(empty, 0, top)
    weights = np.exp(scores, out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    if rules.sinks is not None:
        total += np.exp(nothing - top)
    total = np.where(empty, 1, total)
    if allowed is not None and not np.isfinite(total).all():
        weights = np.where(allowed, weights, 0)  # exp(-inf - NaN) is no weight of a key
    output = np.matmul(weights, v)
    finite = np.isfinite(output).all()
    if not finite:
        # Once more with the non-finite entries of V read as 0: rows that are allowed none of them
        # keep the bits that they would have with finite values there.
        clean: Any = np.isfinite(v)
        output = np.matmul(weights, np.where(clean, v, 0))
    output /= total
    weights /= total
    if not finite:
        allowed = np.ones(scores.shape, bool) if allowed is None else allowed
        spoilt = (allowed & ~clean.all(axis=-1)[..., None, :]).any(axis=-1)
        for row in zip(*np.nonzero(spoilt | ~np.isfinite(output).all(axis=-1)), strict=True):
            values = v[(*row[:-2], 0)]  # the one key/value head of the row's group
            output[row] = _plain_row(weights[row], values, allowed[row])

    _put(problem.out, item, all_heads, queries, output)
    if problem.weights is not None:
        _put(problem.weights, item, all_heads, queries, weights)
    if problem.lse is not None:
        lse = np.where(empty, nothing, top + np.log(total))
        _put(problem.lse[..., None], item, all_heads, queries, lse)


def _positions(problem: Problem, queries: slice) -> Array:
    """Where the queries stand on the axis of the keys, counted from the first key of the array."""
    return np.arange(queries.start, queries.stop) + problem.shift


def _per_item(problem: Problem, slopes: Array) -> Array:
    """(items or 1, H) as (..., H)."""
    lead = problem.out.shape[:-3]
    return np.broadcast_to(slopes, (math.prod(lead), slopes.shape[-1])).reshape(*lead, -1)


def _allowed_by_order(problem: Problem, distance: Array) -> Array | None:
    """(l, S) bool, True where order and window allow the key; None where they allow them all.

    distance is how far each key lies behind each query: i + shift - j.
    """
    left, right = problem.rules.left, problem.rules.right
    if distance.size and distance.max() <= left and -distance.min() <= right:
        return None
    return (distance <= left) & (-distance <= right)


def _plain_row(weights: Array, v: Array, allowed: Array) -> Array:
    """The plain formula for one row: its allowed weights times V, in key order."""
    terms: Array = weights[allowed, None] * v[allowed]
    return np.asarray(terms.sum(axis=0))


def _put(whole: Array, item: tuple[Any, ...], heads: slice, rows: slice, part: Array) -> None:
    target = whole[item][..., heads, rows, :]
    target[...] = part.reshape(target.shape)


def product(problem: Product, isa: int = -1) -> None:
    """out = a b + bias, where b is a matrix or panels (P, K, 64) of packed columns."""
    a, b, out = problem.a, problem.b, problem.out
    with np.errstate(all="ignore"):
        if problem.packed:
            m, n = out.shape
            panels = np.matmul(a, b)  # (P, M, 64)
            out[...] = panels.transpose(1, 0, 2).reshape(m, len(b) * b.shape[-1])[:, :n]
        else:
            np.matmul(a, b, out=out)
        if problem.bias is not None:
            np.add(out, problem.bias, out=out)


def softmax(problem: Rows, isa: int = -1) -> None:
    """out = exp(x - max) / sum over the last axis."""
    x, out = problem.x, problem.out
    if x.size == 0:
        return
    with np.errstate(all="ignore"):
        np.subtract(x, x.max(axis=-1, keepdims=True), out=out)
        np.exp(out, out=out)
        np.divide(out, out.sum(axis=-1, keepdims=True), out=out)
