"""The NumPy backend: everything in plain NumPy, the fallback and the test oracle.

    output = softmax(scale Q Kᵀ, over the allowed keys) V

It computes in the dtype of its inputs, float32 or float64; 16-bit numbers are cast to float32.
Scores are made for a chunk of queries at a time, so that they never take more than a few MB.
Multiplications are left to NumPy's BLAS, and so is the number of threads where none is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product as every
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv_ext._core import _activations
from qkv_ext._core._arrays import FLOAT32, Array, converted
from qkv_ext._core._blas import held_to_threads
from qkv_ext._core._packed import wide

if TYPE_CHECKING:
    from qkv_ext._core._problem import Problem, Product, Rotation, Rows, Rules

CHUNK = 1 << 20  #: scores held at a time
LARGE = 1 << 16  #: weights and values of a head that is worth a look of its own
LOW = 1 << 12  #: more than there are keys in a count
NAN = LOW * LOW  #: float32 holds every number up to here
PIECE = 1 << 31  #: multiplications left to BLAS at a time
PAIRS = 1 << 16  #: elements that are turned at a time, where there are heads to part them by


@held_to_threads
def attention(problem: Problem) -> None:
    """Write problem.out, and weights and lse where the problem has them."""
    with np.errstate(all="ignore"):  # NaN, inf and underflow are results here, not accidents
        for part in _items(problem):
            part = _widened(part)
            for item, heads, queries in _chunks(part):
                _attend(part, item, heads, queries)


def _widened(problem: Problem) -> Problem:
    """float16 and bfloat16 as float32, once; after the lengths, so that no other row is read."""
    q, k, v = (
        converted(x, FLOAT32) if x.dtype.itemsize == 2 else x
        for x in (problem.q, problem.k, problem.v)
    )
    return problem._replace(q=q, k=k, v=v)


def _items(problem: Problem) -> Iterator[Problem]:
    """A problem whose items differ in lengths or offsets, or lie in pages, as one an item."""
    rules, lead, pages = problem.rules, problem.out.shape[:-3], problem.pages
    if rules.spans is not None:
        spans = rules.spans.tolist()
    elif pages is not None:
        length, s = problem.out.shape[-2], max(pages.lengths, default=0)
        spans = [[n, 0, length, length, 0, s, problem.diagonal] for n in range(len(pages.items))]
    else:
        yield problem
        return

    def own(x: Any, item: int, *cut: slice) -> Any:
        """An item's part of x, cut along the axes behind the heads."""
        x = np.broadcast_to(x, lead + x.shape[len(lead) :])[np.unravel_index(item, lead)]
        return x[(slice(None), *cut)]

    for array, value in ((problem.out, 0), (problem.weights, 0), (problem.lse, -np.inf)):
        if array is not None:
            array[...] = value  # padding rows: those past an item's length
    for n, span in enumerate(spans):
        item, q_start, q_length, _, k_start, k_length, diagonal = span
        queries = slice(q_start, q_start + q_length)
        keys = slice(k_start, k_start + k_length)
        index = np.unravel_index(item, lead)
        mask, slopes, segments, blocks = problem.mask, rules.slopes, rules.segments, rules.blocks
        if mask is not None:  # its axes of length 1 stay: they broadcast
            cuts = (
                c if m > 1 else slice(None)
                for c, m in zip((queries, keys), mask.shape[-2:], strict=True)
            )
            mask = own(mask, item, *cuts)
        if slopes is not None and len(slopes) > 1:
            slopes = slopes[n : n + 1]
        if segments is not None:
            segments = segments[0][n : n + 1, queries], segments[1][n : n + 1, keys]
        if blocks is not None:
            blocks = blocks._replace(keep=own(blocks.keep, item))
        yield problem._replace(
            q=own(problem.q, item, queries),
            k=own(problem.k, item, keys) if pages is None else pages.keys(item, k_length),
            v=own(problem.v, item, keys) if pages is None else pages.values(item, k_length),
            mask=mask,
            diagonal=diagonal,
            rules=rules._replace(spans=None, slopes=slopes, segments=segments, blocks=blocks),
            out=problem.out[index][:, queries],
            weights=None if problem.weights is None else problem.weights[index][:, queries, keys],
            lse=None if problem.lse is None else problem.lse[index][:, queries],
            pages=None,
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
    """One chunk.  Inside, arrays have a group axis for GQA: (..., Hkv, G, l, S)."""
    lead = problem.out.shape[:-3]
    hkv, group = heads.stop - heads.start, problem.out.shape[-3] // problem.k.shape[-3]
    all_heads = slice(heads.start * group, heads.stop * group)

    def part(x: Array, which: slice, rows: slice) -> Array:
        """The chunk's share of x, (..., Hkv, G, rows, last), or with 1 in the place of G."""
        x = np.broadcast_to(x, lead + x.shape[-3:])[item][..., which, rows, :]
        return x.reshape(*x.shape[:-3], hkv, x.shape[-3] // hkv, *x.shape[-2:])

    everything = slice(None)
    q = part(problem.q, all_heads, queries)
    k = part(problem.k, heads, everything)
    v = part(problem.v, heads, everything)
    mask = slopes = sinks = None
    if problem.mask is not None:
        shape = (*problem.out.shape[:-1], problem.k.shape[-2])
        mask = part(np.broadcast_to(problem.mask, shape), all_heads, queries)
    if problem.rules.slopes is not None:
        slopes = np.broadcast_to(problem.rules.slopes, (math.prod(lead), problem.out.shape[-3]))
        slopes = part(slopes.reshape(*lead, -1, 1, 1), all_heads, everything)
    if problem.rules.sinks is not None:
        sinks = problem.rules.sinks[all_heads].reshape(hkv, group, 1, 1)

    positions = np.arange(queries.start, queries.stop) + problem.diagonal
    seen = seen_keys(problem, item, all_heads, queries)
    if seen is not None:
        own, of_group = (1, 1) if seen.shape[-3] == 1 else (hkv, group)
        seen = seen.reshape(*seen.shape[:-3], own, of_group, *seen.shape[-2:])
    scores, allowed = _scores(problem, q, k, positions, mask, slopes, seen)
    weights, total, lse = _softmax(scores, allowed, sinks)
    output = _times_values(weights, total, allowed, v)

    target = problem.out[item][..., all_heads, queries, :]
    target[...] = output.reshape(target.shape)
    if problem.weights is not None:
        target = problem.weights[item][..., all_heads, queries, :]
        target[...] = weights.reshape(target.shape)
    if problem.lse is not None:
        target = problem.lse[item][..., all_heads, queries]
        target[...] = lse.reshape(target.shape)


def _scores(
    problem: Problem, q: Array, k: Array, positions: Array, mask: Any, slopes: Any, seen: Any
) -> tuple[Array, Array | None]:
    """Scores, -inf for excluded keys, and which keys are allowed; None where all of them are.

    In this order: scale, softcap, ALiBi, mask, exclusion.  tracing.py takes the same steps.
    """
    rules = problem.rules
    scores = np.matmul(q * q.dtype.type(problem.scale), k.swapaxes(-1, -2))
    distance = positions[:, None] - np.arange(k.shape[-2])  # how far a key lies behind a query
    allowed = seen
    if distance.size == 0 or distance.max() > rules.left or -distance.min() > rules.right:
        allowed = in_order(rules, distance)
        allowed = allowed if seen is None else allowed & seen
    return masked(capped(scores, rules), slopes, distance, mask, allowed)


def seen_keys(problem: Problem, item: Any, heads: slice, queries: slice) -> Array | None:
    """(..., H or 1, l, S): the keys that segments and blocks leave, or None for all."""
    lead, s = problem.out.shape[:-3], problem.k.shape[-2]
    segments, blocks = problem.rules.segments, problem.rules.blocks
    seen = None
    if segments is not None:
        of_q, of_k = (x.reshape(*lead, 1, x.shape[-1])[item] for x in segments)
        seen = of_q[..., queries, None] == of_k[..., None, :]
    if blocks is not None:
        keep = np.broadcast_to(blocks.keep, lead + blocks.keep.shape[-3:])[item]
        keep = keep if keep.shape[-3] == 1 else keep[..., heads, :, :]
        rows = np.arange(queries.start, queries.stop) // blocks.rows
        keep = keep[..., rows, :][..., np.arange(s) // blocks.keys]
        seen = keep if seen is None else seen & keep
    return seen


def capped(scores: Array, rules: Rules) -> Array:
    """The scores after softcap."""
    if rules.softcap:
        cap = scores.dtype.type(rules.softcap)
        scores = cap * np.tanh(scores / cap)
    return scores


def in_order(rules: Rules, distance: Array) -> Array:
    """Which keys causal and window allow."""
    return (distance <= rules.left) & (-distance <= rules.right)


def masked(
    scores: Array, slopes: Any, distance: Array, mask: Any, allowed: Array | None
) -> tuple[Array, Array | None]:
    """Capped scores, which may be overwritten, after the rest, and which keys the mask leaves.

    What is excluded is selected, never added, so that a NaN in its key cannot leak.
    """
    if slopes is not None:
        scores -= slopes * np.abs(distance).astype(scores.dtype)
    if mask is not None:
        if mask.dtype.kind != "b":
            scores += mask
            mask = mask != -np.inf
        allowed = mask if allowed is None else allowed & mask
    if allowed is not None:
        allowed = np.broadcast_to(allowed, scores.shape)
        scores = np.where(allowed, scores, -np.inf)
    return scores, allowed


def _softmax(
    scores: Array, allowed: Array | None, sinks: Array | None
) -> tuple[Array, Array, Array]:
    """Unnormalised weights, what they are to be divided by, and lse; scores are overwritten."""
    empty: Any = False if allowed is None else ~allowed.any(axis=-1, keepdims=True)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    nothing: Any = -np.inf if sinks is None else sinks  # the lse of a row with no key
    if sinks is not None:
        top = np.maximum(top, sinks)
    scores -= np.where(empty, 0, top)  # a row with no key subtracts 0, so that exp gives zeros
    weights = np.exp(scores, out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks - top)
    total = np.where(empty, 1, total)
    return weights, total, np.where(empty, nothing, top + np.log(total))


def _times_values(weights: Array, total: Array, allowed: Array | None, v: Array) -> Array:
    """weights V / total; the weights are divided by the total in place."""
    output: Array = np.matmul(weights, v)
    output /= total
    if np.isfinite(output).all() and np.isfinite(total).all():
        weights /= total
        return output
    heads: Any = [...]
    lead = weights.shape[:-3]
    if weights.size + v.size > LARGE * math.prod(lead):
        heads = np.ndindex(lead)  # one by one: what is computed on the way stays in a cache
    for head in heads:
        own = None if allowed is None else allowed[head]
        _times_nonfinite(weights[head], total[head], own, v[head], output[head])
    return output


def _times_nonfinite(
    weights: Array, total: Array, allowed: Array | None, v: Array, output: Array
) -> None:
    """The same once more, where something is not finite, into an output that is there."""
    # The non-finite entries of V are read as 0 in the same product: rows that are allowed none of
    # them keep the bits that they would have with finite values there.
    bad = ~np.isfinite(v)
    count, finite = np.count_nonzero(bad), v
    if count:
        bits = v.view(f"i{v.itemsize}")
        finite = (bits * ~bad).view(v.dtype)  # five times as fast as to select them
        np.matmul(weights, finite, out=output)
        output /= total
    weights /= total
    lost = np.isnan(total)  # rows with a NaN among their scores: NaN in every column
    if allowed is not None and lost.any():
        # there exp(-inf - NaN) is not the weight of an excluded key
        np.copyto(weights, 0, where=lost & ~allowed)
    beyond = ~np.isfinite(output).all(axis=-1, keepdims=True) & ~lost
    if beyond.any():  # sums that overflow before the division: weights of at most 1 meet V
        np.copyto(output, np.matmul(weights, finite), where=beyond)
        beyond &= ~np.isfinite(output).all(axis=-1, keepdims=True)
    if 2 * count >= v.shape[-2]:
        _add_nonfinite(weights, allowed, v, output)
    elif count:  # few keys hold them all
        keys = np.unique(np.flatnonzero(bad) // v.shape[-1] % v.shape[-2])
        some = None if allowed is None else allowed[..., keys]
        _add_nonfinite(weights[..., keys], some, v[..., keys, :], output)
    for row in zip(*np.nonzero(beyond[..., 0]), strict=True):
        values = v[(*row[:-2], 0)]  # the one key/value head of the row's group
        output[row] = _reference_row(
            weights[row], values, True if allowed is None else allowed[row]
        )


def _add_nonfinite(weights: Array, allowed: Array | None, v: Array, output: Array) -> None:
    """Add what the non-finite entries of V are to the sums of their rows: an infinity or NaN.

    They are counted, since infinity times the weight of 0 of an excluded key would be NaN.  One
    product counts them all: +inf by ones, -inf by LOW, and by NAN or more what makes a sum NaN,
    with infinity times an allowed weight of 0.  Below NAN it is exact.
    """
    zero = weights == 0
    if allowed is not None:
        zero &= allowed
    low, nan = v.dtype.type(LOW), v.dtype.type(NAN)
    rows = (weights > 0).astype(v.dtype)
    if zero.any():
        rows += nan * zero
    entries = (v == np.inf) + low * (v == -np.inf) + nan * np.isnan(v)
    sums = np.array([0, np.inf, -np.inf, np.nan, *[np.nan] * 4], v.dtype)
    for start in range(0, v.shape[-2], LOW - 1):
        part = slice(start, start + LOW - 1)
        counts = np.matmul(rows[..., part], entries[..., part, :]).astype(np.int64)
        which = (counts % LOW > 0) + 2 * (counts // LOW % LOW > 0) + 4 * (counts >= NAN)
        output += sums[which]


def _reference_row(weights: Array, v: Array, allowed: Any) -> Array:
    """The plain formula for one row: its allowed weights times V, in key order."""
    terms: Array = weights[allowed, None] * v[allowed]
    return np.asarray(terms.sum(axis=0))


@held_to_threads
def product(problem: Product) -> None:
    """out = activation(a b + bias) + residual; b is a matrix or panels (P, K, 64) of columns."""
    a, b, out = problem.a, problem.b, problem.out
    with np.errstate(all="ignore"):
        if problem.packed:
            m, n = out.shape
            count, k, width = b.shape
            for rows, panels in _pieces(m, count, k * width):
                columns = slice(panels.start * width, min(n, panels.stop * width))
                made = np.matmul(a[rows], wide(b[panels])).transpose(1, 0, 2)  # (m, P, 64)
                out[rows, columns] = made.reshape(len(made), -1)[:, : columns.stop - columns.start]
        else:
            _multiply(a, b, out)
        if problem.bias is not None:
            np.add(out, problem.bias, out=out)
        if problem.activation is not None:
            _activations.apply(problem.activation, out)
        if problem.residual is not None:
            np.add(out, problem.residual, out=out)


def _multiply(a: Array, b: Array, out: Array) -> None:
    """out = a b, left to BLAS in pieces of some 50 ms: between two of them ^C is seen."""
    *lead, m, n = out.shape
    cost = m * n * a.shape[-1]
    if lead and math.prod(lead) * cost > PIECE:  # some items at a time, or parts of one
        a, b = (np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
        step = PIECE // (math.prod(lead[1:]) * cost)
        for start in range(0, lead[0], max(1, step)):
            items = slice(start, start + step) if step else start
            _multiply(a[items], b[items], out[items])
        return
    for rows, columns in _pieces(m, n, a.shape[-1]):
        np.matmul(a[..., rows, :], b[..., columns], out=out[..., rows, columns])


def _pieces(m: int, n: int, cost: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of an (m, n) product whose elements cost that many multiplications each.

    A piece is as square as it can be.
    """
    elements = max(1, PIECE // max(1, cost))
    rows = min(m, max(math.isqrt(elements), elements // max(1, n)))
    columns = max(1, elements // max(1, rows))
    for i, j in every(range(0, m, max(1, rows)), range(0, n, columns)):
        yield slice(i, min(m, i + rows)), slice(j, min(n, j + columns))


def softmax(problem: Rows) -> None:
    """out = exp(x - max) / sum over the last axis."""
    if problem.x.size == 0:
        return
    all_rows, all_out = (x.reshape(-1, x.shape[-1]) for x in (problem.x, problem.out))
    step = max(1, CHUNK // all_rows.shape[-1])
    with np.errstate(all="ignore"):
        for start in range(0, len(all_rows), step):
            x, out = all_rows[start : start + step], all_out[start : start + step]
            np.subtract(x, x.max(axis=-1, keepdims=True), out=out)
            np.exp(out, out=out)
            np.divide(out, out.sum(axis=-1, keepdims=True), out=out)


def rotary(*problems: Rotation) -> None:
    """(a, b) -> (a cos - b sin, b cos + a sin), for the pairs of each row."""
    with np.errstate(all="ignore"):
        for problem in problems:
            _turn(problem)


def _turn(problem: Rotation) -> None:
    x, cos, sin, positions, interleaved, out, _ = problem
    if positions is None:
        rows: Any = slice(0, x.shape[-2])
    else:
        heads = (1,) * (x.ndim - 3) if positions.ndim == 2 else ()
        rows = positions.reshape(*positions.shape[:-1], *heads, positions.shape[-1])
    wide = x.astype(cos.dtype, copy=False)
    into = out if out.dtype == cos.dtype else np.empty(x.shape, cos.dtype)
    _rotate(wide, cos[rows], sin[rows], interleaved, into)
    if into is not out:
        out[...] = into


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array) -> None:
    """Write out, a part at a time, so that what is computed on the way stays in the cache.

    x and out are (..., L, D), or one and the same, and cos and sin broadcast to
    (..., L, rotary_dim / 2).
    """
    if x.size > PAIRS and x.ndim > 2:
        rows = (*x.shape[:-1], cos.shape[-1])
        cos, sin = np.broadcast_to(cos, rows), np.broadcast_to(sin, rows)
        for n in range(len(x)):
            _rotate(x[n], cos[n], sin[n], interleaved, out[n])
        return
    columns = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * columns, 2), slice(1, 2 * columns, 2)
    else:
        first, second = slice(0, columns), slice(columns, 2 * columns)
    a, b = x[..., first], x[..., second]
    turned = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    out[..., first] = turned
    out[..., 2 * columns :] = x[..., 2 * columns :]


def merge(
    parts: list[Array], logs: list[Array], output: Array, lse: Array, blhd: bool, threads: int
) -> None:
    """lse = log Σ exp lse_n and output = Σ exp(lse_n - lse) output_n, for parts of keys."""
    with np.errstate(all="ignore"):  # exp of -inf is 0 and log of 0 is -inf, as meant
        top = logs[0]
        for each in logs[1:]:
            top = np.maximum(top, each)
        top = np.where(top == -np.inf, 0, top)  # -inf - (-inf) is no number
        total = np.zeros_like(top)
        for each in logs:
            total += np.exp(each - top)
        made = np.zeros(output.shape, top.dtype)
        for part, each in zip(parts, logs, strict=True):
            # divided before it meets the part: the sum of large ones stays finite
            weight = np.exp(each - top) / np.where(total == 0, 1, total)
            # what an empty part holds is selected, not added, so that NaN cannot leak
            empty = _along(each == -np.inf, blhd)
            made += np.where(empty, 0, _along(weight, blhd) * part)
        output[...] = made
        np.add(top, np.log(total), out=lse)


def _along(x: Array, blhd: bool) -> Array:
    """(..., H, L) with the axes of an output: (..., H, L, 1), or (..., L, H, 1)."""
    return (x.swapaxes(-1, -2) if blhd else x)[..., None]
