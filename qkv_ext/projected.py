"""Attention with its projections: Q = X W_Q, K = X W_K, V = X W_V, heads, and W_O."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext import _layers, _rules
from qkv_ext._layers import ProjectedKV, Projections, Rotary
from qkv_ext._packed import PackedWeight
from qkv_ext.attention import Options, scaled_dot_product_attention
from qkv_ext.linear import linear_projection
from qkv_ext.rotary import apply_rotary

Array = NDArray[Any]
Weight = ArrayLike | PackedWeight

__all__ = ["ProjectedKV", "cross_attention", "self_attention"]


class ProjectionOptions(Options, total=False):
    """The options of self_attention and cross_attention; none changes what they return."""

    num_heads: int
    num_kv_heads: int | None
    b_q: ArrayLike | None
    b_k: ArrayLike | None
    b_v: ArrayLike | None
    b_o: ArrayLike | None


class Ready(NamedTuple):
    """What attention is to be called with: everything has a batch axis and a head axis."""

    q: Array  # (..., H, L, D)
    k: Array  # (..., Hkv, S, D)
    v: Array  # (..., Hkv, S, Dv)
    single: bool  # x is (L, d_in): the batch axis is to be taken off again
    out: Array | None  # (..., L, d_out)
    options: dict[str, Any]


def project(layer: Projections, part: str, x: Array, options: Options) -> Array:
    """X W + b for W_Q, W_K or W_V, heads before the length: (..., L, d_in) -> (..., H, L, D)."""
    heads = layer.num_heads if part == "q" else layer.num_kv_heads
    w, b = layer.weights[part], layer.biases[part]
    flat = linear_projection(
        x, w, b, threads=options.get("threads"), backend=options.get("backend")
    )
    return flat.reshape(*flat.shape[:-1], heads, w.shape[1] // heads).swapaxes(-3, -2)


def project_kv(layer: Projections, context: ArrayLike, name: str, options: Options) -> ProjectedKV:
    """K and V of a context (..., S, d_ctx)."""
    _layers.known(options)  # here for the traces
    context = _layers.sequence(context, name, layer, "k")
    return ProjectedKV(project(layer, "k", context, options), project(layer, "v", context, options))


def ready(
    layer: Projections, x: ArrayLike, kv: ProjectedKV, options: Options, name: str = "x"
) -> Ready:
    """Check a call of a layer, project x to Q, and give an x (L, d_in) a batch axis."""
    x = _layers.sequence(x, name, layer, "q")
    out, rest = _layers.projected_call(x, kv.k, kv.v, layer, dict(options), name)
    q, k, v = project(layer, "q", x, options), kv.k, kv.v
    single = x.ndim == 2
    if single:
        q, k, v = q[None], k[None], v[None]
    return Ready(q, k, v, single, out, rest)


def together(layer: Projections, heads: Array, out: Array | None, options: Options) -> Array:
    """Lay the heads (..., L, H, Dv) side by side, and project by W_O if there is one."""
    output = heads.reshape(*heads.shape[:-2], heads.shape[-2] * heads.shape[-1])
    if layer.weights["o"] is not None:
        output = linear_projection(
            output, layer.weights["o"], layer.biases["o"], out=out,
            threads=options.get("threads"), backend=options.get("backend"),
        )  # fmt: skip
        if options.get("q_lengths") is not None:
            _clear_padding(output, options["q_lengths"])
    elif out is not None:
        out[...] = output
        output = out
    return output


def _clear_padding(output: Array, q_lengths: Any) -> None:
    """Rows at or past q_lengths are no rows: W_O would make b_o of their zeros."""
    items = output[None] if output.ndim == 2 else output
    batch, most = None if output.ndim == 2 else len(items), items.shape[-2]
    lengths = _rules.integers(q_lengths, "q_lengths", batch, 0, most).reshape(-1).tolist()
    for item, length in zip(items, lengths, strict=True):
        if length < most:
            item[..., length:, :] = 0


def attend(
    layer: Projections,
    x: ArrayLike,
    kv: ProjectedKV,
    return_weights: bool | np.bool_,
    return_lse: bool | np.bool_,
    options: Options,
    name: str = "x",
    rotary: Rotary | None = None,
) -> Any:
    """Project x to Q, attend to kv, and project by W_O.  rotary turns Q and K in between."""
    q, k, v, single, out, rest = ready(layer, x, kv, options, name)
    if rotary is not None:
        q, k = _turned(q, k, rotary, rest)
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    heads = np.empty((*lead, q.shape[-2], layer.num_heads, v.shape[-1]), q.dtype)
    rest |= {"return_weights": return_weights, "return_lse": return_lse}
    extras: Any = scaled_dot_product_attention(q, k, v, out=heads.swapaxes(-3, -2), **rest)
    if single:
        heads = heads[0]
        extras = tuple(extra[0] for extra in extras) if isinstance(extras, tuple) else extras
    output = together(layer, heads, out, options)
    return (output, *extras[1:]) if isinstance(extras, tuple) else output


def _turned(q: Array, k: Array, rotary: Rotary, options: dict[str, Any]) -> tuple[Array, Array]:
    """Q and K turned by the angles of the positions that the options give them."""
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    at_q, at_k = _layers.positions(lead[0], q.shape[-2], k.shape[-2], len(rotary.cos), options)
    if at_q.ndim == 2:  # the items stand at positions of their own, also where they share one x
        q = np.broadcast_to(q, (lead[0], *q.shape[1:]))
    how: dict[str, Any] = {"interleaved": rotary.interleaved, "rotary_dim": rotary.rotary_dim}
    how |= {name: options.get(name) for name in ("threads", "backend")}
    return (
        apply_rotary(q, rotary.cos, rotary.sin, positions=at_q, **how),
        apply_rotary(k, rotary.cos, rotary.sin, positions=at_k, **how),
    )


@overload
def self_attention(
    x: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = ...,
    *,
    return_weights: Literal[False] = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[ProjectionOptions],
) -> Array: ...
@overload
def self_attention(
    x: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = ...,
    *,
    return_weights: Literal[True],
    return_lse: Literal[False] = ...,
    **options: Unpack[ProjectionOptions],
) -> tuple[Array, Array]: ...
@overload
def self_attention(
    x: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = ...,
    *,
    return_weights: Literal[False] = ...,
    return_lse: Literal[True],
    **options: Unpack[ProjectionOptions],
) -> tuple[Array, Array]: ...
@overload
def self_attention(
    x: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = ...,
    *,
    return_weights: Literal[True],
    return_lse: Literal[True],
    **options: Unpack[ProjectionOptions],
) -> tuple[Array, Array, Array]: ...
@overload
def self_attention(
    x: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = ...,
    *,
    return_weights: bool | np.bool_ = ...,
    return_lse: bool | np.bool_ = ...,
    **options: Unpack[ProjectionOptions],
) -> Array | tuple[Array, ...]: ...
def self_attention(
    x: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = None,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    b_q: ArrayLike | None = None,
    b_k: ArrayLike | None = None,
    b_v: ArrayLike | None = None,
    b_o: ArrayLike | None = None,
    return_weights: bool | np.bool_ = False,
    return_lse: bool | np.bool_ = False,
    **options: Unpack[Options],
) -> Any:
    """Multi-head self-attention: Q = X W_Q, K = X W_K, V = X W_V, attention, then W_O.

    Parameters
    ----------
    x : array (..., L, d_in)
        The sequence that gives queries, keys and values.
    w_q, w_k, w_v : array or PackedWeight, (d_in, H·D), (d_in, Hkv·D), (d_in, Hkv·Dv)
        Head h owns the columns h·D to (h + 1)·D.
    w_o : array or PackedWeight (H·Dv, d_out), optional
        Without it the heads are laid side by side.
    num_heads, num_kv_heads : int
        H and Hkv; Hkv is H by default.
    b_q, b_k, b_v, b_o : array, optional
        Biases of the four projections.
    return_weights, return_lse : bool
        Return the weights (..., H, L, L) and the log-sum-exp (..., H, L) as well.
    **options
        mask, causal, align, scale, window, softcap, alibi_slopes, sinks, kv_lengths, q_lengths,
        query_offset, key_offset, threads, backend as in ``scaled_dot_product_attention``.  Masks
        broadcast to (..., H, L, L); lengths and query_offset are (B,) with the first axis of x,
        integers where x is (L, d_in).  out is the final (..., L, d_out).

    Returns
    -------
    output : array (..., L, d_out)
        d_out is H·Dv without w_o.  Rows at or past q_lengths are 0, and not b_o.  With extras, a
        tuple in the order output, weights, lse.

    Raises
    ------
    TypeError, ValueError
        As ``linear_projection`` and ``scaled_dot_product_attention`` do, and where the width of a
        weight is no multiple of its heads.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.standard_normal((4, 8), "f4"), rng.standard_normal((3, 8, 8), "f4")
    >>> output, weights = qkv_ext.self_attention(x, *w, num_heads=2, return_weights=True)
    >>> output.shape, weights.shape
    ((4, 8), (2, 4, 4))

    References
    ----------
    A. Vaswani et al., "Attention Is All You Need" (2017), section 3.2.
    """
    _layers.known(options)
    layer = _layers.projections(w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads)
    kv = project_kv(layer, x, "x", options)
    return attend(layer, x, kv, return_weights, return_lse, options)


@overload
def cross_attention(
    x_dec: ArrayLike,
    x_enc: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = ...,
    *,
    return_weights: Literal[False] = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[ProjectionOptions],
) -> Array: ...
@overload
def cross_attention(
    x_dec: ArrayLike,
    x_enc: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = ...,
    *,
    return_weights: Literal[True],
    return_lse: Literal[False] = ...,
    **options: Unpack[ProjectionOptions],
) -> tuple[Array, Array]: ...
@overload
def cross_attention(
    x_dec: ArrayLike,
    x_enc: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = ...,
    *,
    return_weights: Literal[False] = ...,
    return_lse: Literal[True],
    **options: Unpack[ProjectionOptions],
) -> tuple[Array, Array]: ...
@overload
def cross_attention(
    x_dec: ArrayLike,
    x_enc: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = ...,
    *,
    return_weights: Literal[True],
    return_lse: Literal[True],
    **options: Unpack[ProjectionOptions],
) -> tuple[Array, Array, Array]: ...
@overload
def cross_attention(
    x_dec: ArrayLike,
    x_enc: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = ...,
    *,
    return_weights: bool | np.bool_ = ...,
    return_lse: bool | np.bool_ = ...,
    **options: Unpack[ProjectionOptions],
) -> Array | tuple[Array, ...]: ...
def cross_attention(
    x_dec: ArrayLike,
    x_enc: ArrayLike,
    w_q: Weight,
    w_k: Weight,
    w_v: Weight,
    w_o: Weight | None = None,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    b_q: ArrayLike | None = None,
    b_k: ArrayLike | None = None,
    b_v: ArrayLike | None = None,
    b_o: ArrayLike | None = None,
    return_weights: bool | np.bool_ = False,
    return_lse: bool | np.bool_ = False,
    **options: Unpack[Options],
) -> Any:
    """Multi-head cross-attention: Q = X_dec W_Q; K = X_enc W_K, V = X_enc W_V; attention, W_O.

    Parameters
    ----------
    x_dec : array (..., L, d_in)
        The sequence that asks.
    x_enc : array (..., S, d_enc)
        The sequence that is asked, of the rank of x_dec.
    w_q, w_k, w_v : array or PackedWeight, (d_in, H·D), (d_enc, Hkv·D), (d_enc, Hkv·Dv)
        Head h owns the columns h·D to (h + 1)·D.
    w_o, num_heads, num_kv_heads, b_q, b_k, b_v, b_o, return_weights, return_lse, **options
        As in ``self_attention``; weights are (..., H, L, S).

    Returns
    -------
    output : array (..., L, d_out)
        With extras, a tuple in the order output, weights, lse.

    Raises
    ------
    TypeError, ValueError
        As in ``self_attention``.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> rng = np.random.default_rng(0)
    >>> x_dec, x_enc = rng.standard_normal((4, 8), "f4"), rng.standard_normal((6, 5), "f4")
    >>> w_q, w_k, w_v = (rng.standard_normal((n, 8), "f4") for n in (8, 5, 5))
    >>> qkv_ext.cross_attention(x_dec, x_enc, w_q, w_k, w_v, num_heads=2).shape
    (4, 8)

    References
    ----------
    A. Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3.
    """
    _layers.known(options)
    layer = _layers.projections(w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads)
    kv = project_kv(layer, x_enc, "x_enc", options)
    return attend(layer, x_dec, kv, return_weights, return_lse, options, name="x_dec")
