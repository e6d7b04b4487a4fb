"""The front door of the projection calls: weights against each other, sequences against weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from qkv_ext._core import _arrays, _check, _rules
from qkv_ext._core._arrays import FLOAT32, FLOAT64, Array, operand, same_dtype, shown
from qkv_ext._core._check_rotary import tables
from qkv_ext._core._options import DEFAULT, Given
from qkv_ext._core._packed import PANEL, PackedWeight, side_by_side, split
from qkv_ext._core._problem import Sizes


class ProjectedKV(NamedTuple):
    """Keys (..., Hkv, S, D) and values (..., Hkv, S, Dv) of a context, projected once."""

    k: Array
    v: Array


class Joined(NamedTuple):
    """W_Q, W_K and W_V side by side in one weight, so that one product makes Q, K and V."""

    weight: PackedWeight
    bias: Array | None
    columns: dict[str, slice]  # of each


class Projections(NamedTuple):
    """The checked weights and biases of a layer, each by "q", "k", "v" and "o"."""

    weights: dict[str, Any]  # array or PackedWeight; "o" may be None
    biases: dict[str, Any]  # array or None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int
    norms: dict[str, Array | None]  # RMS weights by "q" and "k": (D,), (heads·D,) or None
    norm_eps: float
    scale: float | None  # where a call gives none; None is 1/√D
    sinks: Array | None  # (H,), where a call gives none
    joined: Joined | None = None  # where they have one d_in, and the layer packed them
    plain: tuple[Any, ...] | None = None  # what src/step.pyx takes of them, in float32


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


def _heads(value: object, name: str) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}; expected a positive integer")
    if value < 1:
        raise ValueError(f"{name} is {shown(value)}; expected a positive integer")
    if value > _rules.MOST_HEADS:
        raise ValueError(f"{name} is {shown(value)}; expected at most {_rules.MOST_HEADS}")
    return int(value)


def _both_heads(num_heads: int, num_kv_heads: int | None) -> tuple[int, int]:
    h = _heads(num_heads, "num_heads")
    hkv = h if num_kv_heads is None else _heads(num_kv_heads, "num_kv_heads")
    if h % hkv:
        raise ValueError(f"num_heads is {h}, no multiple of num_kv_heads, {hkv}")
    return h, hkv


def _weight(w: Any, name: str) -> Any:
    return w if isinstance(w, PackedWeight) else _check.matrix(w, name)


def projections(
    w_q: Any, w_k: Any, w_v: Any, w_o: Any, b_q: Any, b_k: Any, b_v: Any, b_o: Any,
    num_heads: int, num_kv_heads: int | None, *, one_context: bool = True, q_norm: Any = None,
    k_norm: Any = None, norm_eps: Any = 1e-6, scale: Any = None, sinks: Any = None,
) -> Projections:  # fmt: skip
    """Check the weights of a layer against each other and against the heads.

    one_context: keys and values are projected from one sequence.
    """
    h, hkv = _both_heads(num_heads, num_kv_heads)
    given = {"q": w_q, "k": w_k, "v": w_v, "o": w_o}
    weights: dict[str, Any] = {
        p: None if w is None else _weight(w, f"w_{p}") for p, w in given.items()
    }
    for part in "qkv":
        if weights[part] is None:
            raise TypeError(f"w_{part} is None; expected a weight (d_in, d_out)")
    biases = {"q": b_q, "k": b_k, "v": b_v, "o": b_o}
    for part, b in biases.items():
        if b is not None:
            if weights[part] is None:
                raise ValueError("b_o is given without w_o; expected both or none")
            biases[part] = np.array(operand(b, f"b_{part}", 1))  # the layer owns it
    there = {f"w_{p}": w for p, w in weights.items() if w is not None}
    arrays = there | {f"b_{p}": b for p, b in biases.items() if b is not None}
    shapes = {name: x.shape for name, x in arrays.items()}
    misfit = _misfit(shapes, h, hkv, one_context)
    if misfit:

        def fit(turned: dict[str, Any]) -> bool:
            alone = turned["w_q"] != shapes["w_q"] and turned["w_q"][0] != turned["w_k"][0]
            return not alone and not _misfit(turned, h, hkv, True)

        raise ValueError(misfit + _transposed(there, shapes, fit))
    norms = {"q": q_norm, "k": k_norm}
    for part, norm in norms.items():
        if norm is not None:
            norms[part] = arrays[f"{part}_norm"] = operand(norm, f"{part}_norm", 1)
    same_dtype(**arrays)
    d, dv = (weights[part].shape[1] // hkv for part in "kv")
    compute = _arrays.compute_dtype(weights["q"].dtype)
    for part, heads in (("q", h), ("k", hkv)):
        if norms[part] is not None:
            norms[part] = _norm(norms[part], f"{part}_norm", d, heads, compute)
    if scale is not None:
        scale = _arrays.scale(scale, d, compute)
    if sinks is not None:
        sinks = np.array(_rules.per_head(sinks, "sinks", ((h,),), compute))  # the layer owns it
    return Projections(weights, biases, h, hkv, d, dv, norms, _eps(norm_eps), scale, sinks)


def _norm(w: Array, name: str, d: int, heads: int, dtype: np.dtype[Any]) -> Array:
    """The weight of an RMS norm: of each head, or of the whole width of all of them."""
    if w.shape not in ((d,), (heads * d,)):
        wanted = f"({d},), D" + (f", or ({heads * d},), that of all heads" if heads > 1 else "")
        raise ValueError(f"{name} has shape {w.shape}; expected {wanted}")
    return np.array(w, dtype)  # the layer owns it


def _eps(value: Any) -> float:
    eps = _arrays.real(value, "norm_eps", "a number of at least 0")
    if not 0 <= eps <= float(np.finfo(np.float64).max):
        raise ValueError(f"norm_eps is {shown(value)}; expected a finite number of at least 0")
    return float(eps)


def joined(layer: Projections, weight: PackedWeight | None = None) -> Projections:
    """The layer with W_Q, W_K and W_V in one: in that weight already, or copied side by side."""
    parts = [layer.weights[part] for part in "qkv"]
    if weight is None:
        weight = side_by_side(parts)
    own = split(weight, [w.shape[1] for w in parts])
    columns, start = {}, 0
    for part, w in zip("qkv", own, strict=True):
        columns[part] = slice(start, start + w.shape[1])
        start += len(w.panels) * PANEL
    bias = None
    if any(layer.biases[part] is not None for part in "qkv"):
        bias = np.full(start, -0.0, weight.dtype)  # which is no change, to a zero of any sign
        for part in "qkv":
            if layer.biases[part] is not None:
                bias[columns[part]] = layer.biases[part]
    layer = layer._replace(
        weights=layer.weights | dict(zip("qkv", own, strict=True)),
        joined=Joined(weight, bias, columns),
    )
    w_o = layer.weights["o"]
    if weight.dtype != FLOAT32 or 0 in (layer.head_dim, layer.v_dim, *(w_o.shape if w_o else ())):
        return layer
    return layer._replace(plain=(
        weight.panels, bias, weight.shape[1], columns["k"].start, columns["v"].start,
        *((None, None, 0) if w_o is None else (w_o.panels, layer.biases["o"], w_o.shape[1])),
        *layer[2:6], layer.norms["q"], layer.norms["k"], layer.norm_eps,
    ))  # fmt: skip


def _misfit(shapes: dict[str, Any], h: int, hkv: int, one_context: bool) -> str | None:
    """What does not fit about the shapes of weights and biases, if anything."""
    each = (("w_q", h, "num_heads"), ("w_k", hkv, "num_kv_heads"), ("w_v", hkv, "num_kv_heads"))
    for name, heads, of in each:
        if shapes[name][1] % heads:
            return (
                f"{name} has shape {shapes[name]}; expected columns that are a multiple of {of}, "
                f"{heads}"
            )
    d, d_k, dv = (shapes[name][1] // heads for name, heads, _ in each)
    if d != d_k:
        return (
            f"w_q has {d} columns for each of {h} heads and w_k {d_k} for each of {hkv}; "
            "expected one D"
        )
    if one_context and shapes["w_k"][0] != shapes["w_v"][0]:
        return f"w_k has shape {shapes['w_k']} and w_v {shapes['w_v']}; expected one d_in"
    if "w_o" in shapes and shapes["w_o"][0] != h * dv:
        return f"w_o has shape {shapes['w_o']}; expected ({h * dv}, d_out), H·Dv rows"
    for part in "qkvo":
        b, w = shapes.get(f"b_{part}"), shapes.get(f"w_{part}")
        if b is not None and w is not None and b != w[1:]:
            return f"b_{part} has shape {b}; expected {w[1:]}"
    return None


def _transposed(
    weights: dict[str, Any], shapes: dict[str, Any], fit: Callable[[dict[str, Any]], bool]
) -> str:
    """The hint which weights would fit if they were transposed, the fewest; "" for none."""
    for count in range(1, len(weights) + 1):
        for names in combinations(weights, count):
            if fit(shapes | {name: shapes[name][::-1] for name in names}):
                return _check.transposed(*(_check.turned(weights[name], name) for name in names))
    return ""


ORDERS = QKV, GROUPED = "qkv", "grouped"
KV_ORDERS = "kv", GROUPED


def fused(
    w_qkv: Any, b_qkv: Any, w_o: Any, num_heads: int, num_kv_heads: int | None, order: Any = QKV
) -> tuple[list[Array], list[Any]]:
    """Split a fused weight and bias into those of Q, K and V."""
    grouped = _arrays.choice(order, "order", ORDERS) == GROUPED
    h, hkv = _both_heads(num_heads, num_kv_heads)
    w, b = _to_split(w_qkv, b_qkv, "qkv")
    weights = {"w_qkv": w} | ({} if w_o is None else {"w_o": _weight(w_o, "w_o")})
    shapes = {name: x.shape for name, x in weights.items()}
    if b is not None:
        shapes["b_qkv"] = b.shape
    misfit = _fused_misfit(shapes, h, hkv)
    if misfit:

        def fit(turned: dict[str, Any]) -> bool:
            d_in, columns = turned["w_qkv"]  # the columns of three weights are seldom fewer
            return d_in <= columns and not _fused_misfit(turned, h, hkv)

        raise ValueError(misfit + _transposed(weights, shapes, fit))
    counts = (h // hkv, 1, 1)  # of each key/value head
    parts = _split(w, counts, hkv, grouped)
    return parts, [None] * 3 if b is None else _split(b, counts, hkv, grouped)


def fused_kv(
    w_q: Any, w_kv: Any, b_kv: Any, num_heads: int, num_kv_heads: int | None, order: Any
) -> tuple[list[Array], list[Any]]:
    """Split a fused weight and bias of K and V, which are of the D of W_Q."""
    grouped = _arrays.choice(order, "order", KV_ORDERS) == GROUPED
    h, hkv = _both_heads(num_heads, num_kv_heads)
    q = _weight(w_q, "w_q").shape[1]
    w, b = _to_split(w_kv, b_kv, "kv")
    d, rest = divmod(q, h)
    if rest or not d:
        raise ValueError(f"w_q has {q} columns; expected H·D, a multiple of {h}")
    if w.shape[1] != 2 * hkv * d:
        raise ValueError(
            f"w_kv has {w.shape[1]} columns; expected {2 * hkv * d}, 2 Hkv·D with the D = {d} of "
            "w_q"
        )
    if b is not None and b.shape != w.shape[1:]:
        raise ValueError(f"b_kv has shape {b.shape}; expected {w.shape[1:]}")
    parts = _split(w, (1, 1), hkv, grouped)
    return parts, [None] * 2 if b is None else _split(b, (1, 1), hkv, grouped)


def _to_split(w: Any, b: Any, part: str) -> tuple[Array, Array | None]:
    """A fused weight, which is not packed yet, and its bias."""
    array = _weight(w, f"w_{part}")
    if isinstance(array, PackedWeight):
        raise TypeError(
            f"w_{part} is a PackedWeight; expected an array, it is split before packing"
        )
    return array, None if b is None else operand(b, f"b_{part}", 1)


def _split(x: Array, counts: tuple[int, ...], hkv: int, grouped: bool) -> list[Array]:
    """The columns of each part, of so many heads for each key/value head."""
    d = x.shape[-1] // (hkv * sum(counts))
    cuts = np.cumsum(counts)[:-1]
    if not grouped:
        return np.split(x, cuts * hkv * d, axis=-1)
    heads = x.reshape(*x.shape[:-1], hkv, sum(counts), d)
    return [each.reshape(*x.shape[:-1], -1) for each in np.split(heads, cuts, axis=-2)]


def _fused_misfit(shapes: dict[str, Any], h: int, hkv: int) -> str | None:
    """What does not fit about the shapes of a fused weight, its bias and W_O, if anything."""
    columns, parts = shapes["w_qkv"][1], h + 2 * hkv
    if "w_o" in shapes:
        d, rest = divmod(shapes["w_o"][0], h)
        if rest or not d:
            return f"w_o has {shapes['w_o'][0]} rows; expected H·D, a multiple of {h}"
        if columns != parts * d:
            return (
                f"w_qkv has {columns} columns; expected {parts * d}, (H + 2 Hkv)·D with the "
                f"D = {d} of w_o"
            )
    elif columns % parts:
        return (
            f"w_qkv has {columns} columns; expected (H + 2 Hkv)·D, a multiple of {parts} such "
            f"as {parts * max(columns // parts, 1)}"
        )
    if shapes.get("b_qkv", (columns,)) != (columns,):
        return f"b_qkv has shape {shapes['b_qkv']}; expected ({columns},)"
    return None


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
_PADDED = ("mask", "q_lengths", "query_offset", "key_offset", "return_weights")


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
    for name in _PADDED:
        if getattr(given, name) is not getattr(DEFAULT, name):
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
    if sections.ndim != 1:
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
