"""The front door of the projection calls: sequences against the weights of a layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qkv_ext._core import _arrays, _check, _rules
from qkv_ext._core._arrays import FLOAT64, Array, operand, same_dtype
from qkv_ext._core._check_rotary import tables
from qkv_ext._core._options import DEFAULT, Given
from qkv_ext._core._problem import Sizes
from qkv_ext._layers._weights import Projections


class ProjectedKV(NamedTuple):
    """Keys (..., Hkv, S, D) and values (..., Hkv, S, Dv) of a context, projected once."""

    k: Array
    v: Array


class GivenRotary(NamedTuple):
    """What a call is given of rotary embedding, unchecked."""

    tables: Any = None  # (cos, sin)
    interleaved: Any = False
    rotary_dim: Any = None
    positions: Any = None
    sections: Any = None


class Rotary(NamedTuple):
    """The checked tables of a call, which elements of a row are a pair, and where rows stand."""

    cos: Array  # (n, rotary_dim / 2)
    sin: Array
    interleaved: bool
    positions: Array | None = None  # integers of any shape; None is what the options say
    sections: Array | None = None  # int64 (axes,): how many pairs the positions of each axis turn


def sequence(x: Any, name: str, layer: Projections, part: str) -> Array:
    """Check a sequence (..., L, d_in) against the weight that is to project it."""
    if isinstance(x, ProjectedKV):
        raise TypeError(
            f"{name} is a ProjectedKV; expected a sequence (..., n, d_in): projected keys and "
            "values are passed to a layer as kv="
        )
    array = operand(x, name, 2)
    w = layer.weights[part]
    if array.shape[-1] != w.shape[0]:
        hint = _check.transposed(f"w_{part}.T") if array.shape[-1] == w.shape[1] else ""
        raise ValueError(
            f"{name} has shape {array.shape}; expected (..., {w.shape[0]}), the d_in of w_{part}"
            f"{hint}"
        )
    if array.dtype is not w.dtype:
        same_dtype(**{name: array, f"w_{part}": w})
    return array


def projected_kv(kv: Any, layer: Projections) -> tuple[Array, Array]:
    """Check what a caller hands back: k (..., Hkv, S, D) and v (..., Hkv, S, Dv)."""
    if not isinstance(kv, tuple) or len(kv) != 2:
        raise TypeError(f"kv is a {type(kv).__name__}; expected what project_kv returns")
    k, v = operand(kv[0], "kv.k", 3), operand(kv[1], "kv.v", 3)
    same_dtype(**{"kv.k": k, "kv.v": v, "w_q": layer.weights["q"]})
    for part, x, name in (("k", k, "kv.k"), ("v", v, "kv.v")):
        last = layer.weights[part].shape[1] // layer.num_kv_heads
        if x.shape[-3] != layer.num_kv_heads or x.shape[-1] != last:
            raise ValueError(
                f"{name} has shape {x.shape}; expected (..., {layer.num_kv_heads}, S, {last})"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"kv.k and kv.v have shapes {k.shape} and {v.shape}; expected them to differ in the "
            "last axis only"
        )
    return k, v


def sizes(layer: Projections, x: Array, name: str, k: tuple[int, ...]) -> Sizes:
    """The sizes of a call, from a sequence (..., L, d_in) and keys of shape (..., Hkv, S, D)."""
    lead = x.shape[:-2]
    if len(k) != x.ndim + 1:
        raise ValueError(
            f"{name} has shape {x.shape}, the projected keys {k}; expected the same number "
            "of leading axes"
        )
    if k[:-3] != lead:
        try:
            lead = np.broadcast_shapes(lead, k[:-3])
        except ValueError:
            raise ValueError(
                f"{name} has shape {x.shape}, the projected keys {k}; their leading axes do not "
                "broadcast"
            ) from None
    return Sizes(
        x.ndim + 1, lead, layer.num_heads, layer.num_kv_heads, x.shape[-2], k[-2], layer.head_dim,
        layer.v_dim, x.dtype,
    )  # fmt: skip


def values(given: Any, name: str, context: Array, context_name: str, layer: Projections) -> Array:
    """Check what values are projected from: the context, or a sequence as long as it."""
    if given is None:
        if layer.weights["v"].shape[0] == layer.weights["k"].shape[0]:
            return context
        return sequence(context, context_name, layer, "v")
    array = sequence(given, name, layer, "v")
    if array.shape[:-1] != context.shape[:-1]:
        raise ValueError(
            f"{name} has shape {array.shape}; expected {context.shape[:-1]} before the last axis, "
            f"as {context_name} has"
        )
    return array


#: Options of a call that a packed batch has no use for.
_PADDED = (
    "mask", "q_lengths", "block_mask", "q_segments", "kv_segments", "query_offset", "key_offset",
    "return_weights",
)  # fmt: skip


def packed(
    cu_seqlens: Any, cu_seqlens_context: Any, alone: bool, sizes: Sizes, given: Given
) -> Sizes:
    """The sizes of a packed batch; alone: keys and values are those of x."""
    if cu_seqlens is None:
        raise ValueError("cu_seqlens_context is given without cu_seqlens; expected both")
    if sizes.lead:
        raise ValueError(
            f"cu_seqlens is given, but x has {len(sizes.lead) + 2} axes; expected (T, d_in)"
        )
    there = given._replace(  # which other types may spell
        key_offset=_rules.offset(given.key_offset, "key_offset"),
        return_weights=_arrays.as_bool(given.return_weights, "return_weights"),
    )
    for name in _PADDED:
        if getattr(there, name) is not getattr(DEFAULT, name):
            raise ValueError(f"{name} and cu_seqlens are both given; expected one of them")
    cu_q = cu_k = _rules.cumulative(cu_seqlens, "cu_seqlens", sizes.length)
    if alone and cu_seqlens_context is not None:
        raise ValueError(
            "cu_seqlens_context is given, but there is no context; expected it with a context or kv"
        )
    if not alone:
        if cu_seqlens_context is None:
            raise ValueError(
                "cu_seqlens_context is None; expected the cumulative lengths of the context, or of "
                "kv"
            )
        cu_k = _rules.cumulative(cu_seqlens_context, "cu_seqlens_context", sizes.s)
        if cu_k.shape != cu_q.shape:
            raise ValueError(
                f"cu_seqlens has shape {cu_q.shape} and cu_seqlens_context {cu_k.shape}; expected "
                "one shape"
            )
    return sizes._replace(rank=4, lead=(len(cu_q) - 1,), packed=(cu_q, cu_k))


def output(out: Any, layer: Projections, sizes: Sizes) -> None:
    """Check the out of a call, before anything is computed."""
    w_o = layer.weights["o"]
    width = sizes.h * sizes.dv if w_o is None else w_o.shape[1]
    lead = sizes.lead if sizes.packed is None else ()
    _arrays.target(out, (*lead, sizes.length, width), sizes.dtype)


# ---- rotary -------------------------------------------------------------------------------------


def rotary(given: GivenRotary, layer: Projections) -> Rotary | None:
    """Check the tables of a call against the heads of the layer."""
    neighbours = _arrays.as_bool(given.interleaved, "interleaved")
    if given.tables is None:
        others = {
            "interleaved": neighbours or None,
            "rotary_dim": given.rotary_dim,
            "positions": given.positions,
            "rotary_sections": given.sections,
        }
        for option, value in others.items():
            if value is not None:
                raise ValueError(
                    f"{option} is given without rotary; expected rotary=(cos, sin) too"
                )
        return None
    if not isinstance(given.tables, (tuple, list)) or len(given.tables) != 2:
        raise TypeError(f"rotary is a {type(given.tables).__name__}; expected a pair (cos, sin)")
    cos, sin = tables(given.tables[0], given.tables[1], given.rotary_dim, layer.head_dim)
    positions = sections = None
    if given.positions is not None:
        positions = _rules.integer_array(given.positions, "positions")
    if given.sections is not None:
        if positions is None:
            raise ValueError("rotary_sections is given without positions; expected both")
        sections = _sections(given.sections, cos.shape[1])
    return Rotary(cos, sin, neighbours, positions, sections)


def _sections(given: Any, pairs: int) -> Array:
    """How many pairs the positions of each axis turn, (axes,)."""
    sections = _rules.integer_array(given, "rotary_sections", "integers (axes,)")
    if sections.ndim != 1 or not sections.size:
        raise ValueError(f"rotary_sections has shape {sections.shape}; expected (axes,)")
    sections = _rules.integers(sections, "rotary_sections", sections.size, 0, pairs)
    if sections.sum() != pairs:
        raise ValueError(
            f"rotary_sections is {sections.tolist()}, {sections.sum()} pairs; expected {pairs}, "
            "the columns of rotary"
        )
    return sections


def own_positions(
    rotary: Rotary, lead: tuple[int, ...], length: int, there: Array | None
) -> tuple[Rotary, Array]:
    """Tables of the positions that a call gives, and the rows of them, int64 (L,) or (B, L).

    there (B, L) tells rows from padding, which stands nowhere and is given position 0.
    """
    given, sections = rotary.positions, rotary.sections
    assert given is not None
    axes = () if sections is None else (len(sections),)
    shapes = [(*axes, length), *([(*axes, lead[0], length)] if lead else [])]
    if given.shape not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"positions has shape {given.shape}; expected {wanted}")
    if there is not None:
        if given.ndim == len(axes) + 1 and lead:
            given = np.broadcast_to(given[..., None, :], (*axes, lead[0], length))
        given = np.where(there if lead else there[0], given, 0)
    last = len(rotary.cos) - 1
    at = _rules.integers(given.ravel(), "positions", given.size, 0, last).reshape(given.shape)
    if sections is None:
        return rotary, at
    axis = np.repeat(np.arange(len(sections)), sections)  # of each pair
    rows, pairs = np.ascontiguousarray(at.reshape(len(sections), -1)[axis].T), np.arange(len(axis))
    gathered = rotary._replace(cos=rotary.cos[rows, pairs], sin=rotary.sin[rows, pairs])
    return gathered, np.arange(len(rows)).reshape(at.shape[1:])


def covered(rows: int, name: str, at: range | Array) -> None:
    """Tables of that many rows have one for each of the positions."""
    if isinstance(at, range):
        low, high = (at.start, at.stop - 1) if at else (0, -1)
    else:
        low, high = at.min(initial=0), at.max(initial=-1)
    if low < 0 or high >= rows:
        raise ValueError(
            f"rotary has {rows} rows, but {name} stand at positions up to {high}"
            if low >= 0
            else f"rotary has rows from 0 on, but {name} stand at positions from {low} on"
        )


# ---- with a cache -------------------------------------------------------------------------------


def cached_call(
    x: Any, cache: Any, layer: Projections, given: Given
) -> tuple[Array, list[int], Sizes]:
    """Check a sequence against a cache: how many of its rows each item has, and all sizes."""
    array = sequence(x, "x", layer, "q")
    if layer.joined is None:
        array = sequence(array, "x", layer, "k")
    if array.dtype == FLOAT64:
        raise TypeError(
            "x has dtype float64; a cache takes float32, float16 or bfloat16: weights and "
            f"x{_arrays.cast_to(_arrays.FLOAT32)}"
        )
    _, _, h, hkv, d, dv = layer[:6]
    own, before = cache._store.layout, cache._store.lengths
    if (own.kv_heads, own.head_dim, own.v_dim) != (hkv, d, dv):
        raise ValueError(
            f"cache is {cache!r}; expected num_kv_heads={hkv}, head_dim={d} and v_dim={dv}, as the "
            "weights have"
        )
    *lead, length, d_in = array.shape
    batch = len(before)
    if len(lead) > 1 or (lead or [1]) != [batch]:
        expected = f"({batch}, L, {d_in}), as the cache has"
        raise ValueError(f"x has shape {array.shape}; expected {expected}")
    counts = [length] * batch
    if given.q_lengths is not None:
        one = batch if lead else None
        counts = _rules.integers(given.q_lengths, "q_lengths", one, 0, length).reshape(-1).tolist()
    keys = [there + count for there, count in zip(before, counts, strict=True)]
    s = max(keys, default=0)
    ragged = None if keys.count(s) == batch > 0 else keys
    sizes = Sizes(len(lead) + 3, tuple(lead), h, hkv, length, s, d, dv, array.dtype, ragged)
    return array, counts, sizes
