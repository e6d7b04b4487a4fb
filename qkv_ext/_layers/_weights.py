"""A layer's weights, checked against each other and its heads, and fused ones taken apart."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from qkv_ext._core import _arrays, _check, _rules
from qkv_ext._core._arrays import FLOAT32, Array, operand, same_dtype, shown
from qkv_ext._core._check_norm import epsilon
from qkv_ext._core._packed import PANEL, PackedWeight, side_by_side, split


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


def packed(w: Any, weight_dtype: Any, name: str) -> PackedWeight:
    """A checked weight as it is, or packed and kept as that."""
    if not isinstance(w, PackedWeight):
        return _check.packed(w, weight_dtype, name, "weight_dtype")
    if weight_dtype is not None:
        raise ValueError(
            f"{name} is a PackedWeight of {w.weight_dtype} already, and weight_dtype is "
            f"{shown(weight_dtype)}; expected an array, or no weight_dtype"
        )
    return w


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
    eps = epsilon(norm_eps, "norm_eps")
    return Projections(weights, biases, h, hkv, d, dv, norms, eps, scale, sinks)


def _norm(w: Array, name: str, d: int, heads: int, dtype: np.dtype[Any]) -> Array:
    """The weight of an RMS norm: of each head, or of the whole width of all of them."""
    if w.shape not in ((d,), (heads * d,)):
        wanted = f"({d},), D" + (f", or ({heads * d},), that of all heads" if heads > 1 else "")
        raise ValueError(f"{name} has shape {w.shape}; expected {wanted}")
    return np.array(w, dtype)  # the layer owns it


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
        layer.scale, layer.sinks,
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
    columns = 2 * hkv * d
    if w.shape[1] != columns:
        hint = _check.transposed(_check.turned(w, "w_kv")) if w.shape[0] == columns else ""
        raise ValueError(
            f"w_kv has {w.shape[1]} columns; expected {columns}, 2 Hkv·D with the D = {d} of w_q"
            f"{hint}"
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
