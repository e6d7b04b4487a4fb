"""Attention with its projections: Q = X W_Q, K = X W_K, V = X W_V, heads, and W_O."""

from __future__ import annotations

from typing import Any, Unpack, overload

from numpy.typing import ArrayLike, NDArray

from qkv_ext._core._options import PROJECTION, Flag, No, Options, Yes, shows, take
from qkv_ext._core._packed import PackedWeight
from qkv_ext._layers import _weights
from qkv_ext._layers._check_layer import ProjectedKV
from qkv_ext._layers._forward import Sequences, forward

Array = NDArray[Any]
Weight = ArrayLike | PackedWeight

__all__ = ["ProjectedKV", "cross_attention", "self_attention"]


class ProjectionOptions(Options, total=False):
    """The options of self_attention; none changes what it returns."""

    num_heads: int
    num_kv_heads: int | None
    b_q: ArrayLike | None
    b_k: ArrayLike | None
    b_v: ArrayLike | None
    b_o: ArrayLike | None


class CrossOptions(ProjectionOptions, total=False):
    """The options of cross_attention."""

    x_enc_v: ArrayLike | None


@overload
def self_attention(
    x: ArrayLike, w_q: Weight, w_k: Weight, w_v: Weight, w_o: Weight | None = ..., *,
    return_weights: No = ..., return_lse: No = ..., **options: Unpack[ProjectionOptions],
) -> Array: ...  # fmt: skip
@overload
def self_attention(
    x: ArrayLike, w_q: Weight, w_k: Weight, w_v: Weight, w_o: Weight | None = ..., *,
    return_weights: Yes, return_lse: No = ..., **options: Unpack[ProjectionOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def self_attention(
    x: ArrayLike, w_q: Weight, w_k: Weight, w_v: Weight, w_o: Weight | None = ..., *,
    return_weights: No = ..., return_lse: Yes, **options: Unpack[ProjectionOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def self_attention(
    x: ArrayLike, w_q: Weight, w_k: Weight, w_v: Weight, w_o: Weight | None = ..., *,
    return_weights: Yes, return_lse: Yes, **options: Unpack[ProjectionOptions],
) -> tuple[Array, Array, Array]: ...  # fmt: skip
@overload
def self_attention(
    x: ArrayLike, w_q: Weight, w_k: Weight, w_v: Weight, w_o: Weight | None = ..., *,
    return_weights: Flag = ..., return_lse: Flag = ..., **options: Unpack[ProjectionOptions],
) -> Array | tuple[Array, ...]: ...  # fmt: skip
@shows(Options)
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
    return_weights: Flag = False,
    return_lse: Flag = False,
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
        As in ``scaled_dot_product_attention``.  Masks broadcast to (..., H, L, L); lengths and
        query_offset are (B,) with the first axis of x, integers where x is (L, d_in).  out is the
        final (..., L, d_out).

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
    given = take(options, "self_attention", PROJECTION, return_weights, return_lse)
    layer = _weights.projections(w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads)
    return forward(layer, Sequences(x), given)


@overload
def cross_attention(
    x_dec: ArrayLike, x_enc: ArrayLike,
    w_q: Weight, w_k: Weight, w_v: Weight, w_o: Weight | None = ..., *,
    return_weights: No = ..., return_lse: No = ..., **options: Unpack[CrossOptions],
) -> Array: ...  # fmt: skip
@overload
def cross_attention(
    x_dec: ArrayLike, x_enc: ArrayLike,
    w_q: Weight, w_k: Weight, w_v: Weight, w_o: Weight | None = ..., *,
    return_weights: Yes, return_lse: No = ..., **options: Unpack[CrossOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def cross_attention(
    x_dec: ArrayLike, x_enc: ArrayLike,
    w_q: Weight, w_k: Weight, w_v: Weight, w_o: Weight | None = ..., *,
    return_weights: No = ..., return_lse: Yes, **options: Unpack[CrossOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def cross_attention(
    x_dec: ArrayLike, x_enc: ArrayLike,
    w_q: Weight, w_k: Weight, w_v: Weight, w_o: Weight | None = ..., *,
    return_weights: Yes, return_lse: Yes, **options: Unpack[CrossOptions],
) -> tuple[Array, Array, Array]: ...  # fmt: skip
@overload
def cross_attention(
    x_dec: ArrayLike, x_enc: ArrayLike,
    w_q: Weight, w_k: Weight, w_v: Weight, w_o: Weight | None = ..., *,
    return_weights: Flag = ..., return_lse: Flag = ..., **options: Unpack[CrossOptions],
) -> Array | tuple[Array, ...]: ...  # fmt: skip
@shows(Options)
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
    x_enc_v: ArrayLike | None = None,
    return_weights: Flag = False,
    return_lse: Flag = False,
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
    w_o, num_heads, num_kv_heads, b_q, b_k, b_v, b_o, return_weights, return_lse
        As in ``self_attention``; weights are (..., H, L, S).
    x_enc_v : array (..., S, d_v), optional
        The sequence that values are projected from; x_enc by default.  w_v is (d_v, Hkv·Dv) then.
    **options
        As in ``self_attention``; masks broadcast to (..., H, L, S).

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
    given = take(options, "cross_attention", PROJECTION, return_weights, return_lse)
    layer = _weights.projections(
        w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, num_heads, num_kv_heads,
        one_context=x_enc_v is None,
    )  # fmt: skip
    names = ("x_dec", "x_enc", "x_enc_v")
    return forward(layer, Sequences(x_dec, x_enc, x_enc_v, names=names), given)
