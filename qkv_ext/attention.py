"""The attention function itself, over Q, K and V that are there already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext._core import _backends, _check, _rules
from qkv_ext._core._backends import default_backend
from qkv_ext._core._block_mask import BlockMask
from qkv_ext._core._options import (
    ATTENTION,
    EXTRAS,
    VARLEN,
    Flag,
    Given,
    LayoutOptions,
    No,
    Options,
    VarlenOptions,
    Yes,
    shows,
    take,
)
from qkv_ext._core._threads import threads_of
from qkv_ext._core._unknown import refuse

Array = NDArray[Any]

__all__ = ["Options", "alibi_slopes", "scaled_dot_product_attention", "varlen_attention"]


@overload
def scaled_dot_product_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *,
    return_weights: No = ..., return_lse: No = ..., **options: Unpack[LayoutOptions],
) -> Array: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *,
    return_weights: Yes, return_lse: No = ..., **options: Unpack[LayoutOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *,
    return_weights: No = ..., return_lse: Yes, **options: Unpack[LayoutOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *,
    return_weights: Yes, return_lse: Yes, **options: Unpack[LayoutOptions],
) -> tuple[Array, Array, Array]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *,
    return_weights: Flag = ..., return_lse: Flag = ..., **options: Unpack[LayoutOptions],
) -> Array | tuple[Array, ...]: ...  # fmt: skip
@shows(LayoutOptions, *EXTRAS)
def scaled_dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    causal: bool | np.bool_ = False,
    align: Literal["bottom-right", "top-left"] = "bottom-right",
    scale: float | np.floating[Any] | None = None,
    window: Sequence[int | np.integer[Any] | None] | None = None,
    softcap: float | np.floating[Any] | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    block_mask: BlockMask | None = None,
    q_segments: ArrayLike | None = None,
    kv_segments: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    key_offset: int | np.integer[Any] = 0,
    layout: Literal["bhld", "blhd"] = "bhld",
    return_weights: bool | np.bool_ = False,
    return_lse: bool | np.bool_ = False,
    out: Array | None = None,
    threads: int | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> Any:
    """Attention, ``softmax(scale Q Kᵀ + mask) V``, over the keys that each query is allowed.

    Parameters
    ----------
    q : array (L, D), (B, L, D), (B, H, L, D) or with more leading axes
        Queries; float32, float16 or bfloat16, or float64 for the NumPy backend.
    k : array (..., Hkv, S, D)
        Keys, of the rank and dtype of q.  H may be a multiple of Hkv (grouped-query attention):
        query head h then uses key head h // (H / Hkv).  Axes before the heads broadcast.
    v : array (..., Hkv, S, Dv)
        Values; Dv may differ from D.
    mask : array that broadcasts to (..., H, L, S), optional
        bool: True keeps a key.  Floating point: added to the scores, and only -inf excludes.
        At rank 3 it broadcasts to (B, L, S), at rank 2 to (L, S).  It is not expanded in memory.
    causal : bool
        A query sees the keys up to its own position.  Composes with mask.
    align : {"bottom-right", "top-left"}
        Where the queries stand on the axis of the keys, x for a key that is seen::

            bottom-right, L=2, S=4     top-left, L=2, S=4     bottom-right, L=3, S=2
                  x x x .                  x . . .                  . .
                  x x x x                  x x . .                  x .
                                                                    x x

        "bottom-right" lets the last query see every key, as a decode step sees its whole cache.
        "top-left" is what torch means by is_causal.
    window : (left, right), optional
        A query at position p sees the keys p - left .. p + right; None leaves a side open.  It
        composes with causal, and neither side counts the position itself: (0, 0) is p alone::

            window=(1, 0), L=S=4       window=(None, 1), L=S=4
                  x . . .                  x x . .
                  x x . .                  x x x .
                  . x x .                  x x x x
                  . . x x                  x x x x

    softcap : float, optional
        Scores become softcap · tanh(score / softcap), before ALiBi and the mask.
    alibi_slopes : array (H,) or (B, H), optional
        slope · |distance of query and key| is taken off each score; see ``alibi_slopes``.
    sinks : array (H,), optional
        A logit per head that takes part in the denominator, and in nothing else.
    q_lengths, kv_lengths : integers (B,), optional
        How many queries and keys of each batch item are there, an integer at rank 2.  Rows from
        q_lengths on are padding: output 0, weights 0, lse -inf.  Keys from kv_lengths on are not
        even read (a mask that has to be converted is, as a whole).  Right-padded self-attention is
        q_lengths = kv_lengths = the lengths.
    q_segments, kv_segments : integers (B, L) and (B, S), optional
        A query sees the keys whose segment is equal to its own, such as the documents of a packed
        sequence; no number is special.  (L,) and (S,) at rank 2.  q_segments is kv_segments by
        default where L = S.  No mask is made of them.
    block_mask : BlockMask, optional
        Which blocks of keys each block of queries sees: see ``BlockMask``.  Like mask, segments and
        blocks go by the places of rows in q and k, and a key is seen if everything allows it.
    query_offset : integer or integers (B,), optional
        The position of the first query, in place of what align says.
    key_offset : integer
        The position of the first key, for keys that were split; it enters neither the lengths nor
        align.
    scale : float, optional
        What the scores are multiplied by; 1/√D by default.  0 and negative numbers are honoured.
    layout : {"bhld", "blhd"}
        "blhd" takes q, k, v and out as (..., L, H, D), (..., S, Hkv, D), (..., S, Hkv, Dv) and
        (..., L, H, Dv), at rank 4 or more.  mask, weights and lse stay (..., H, L, ...).
    return_weights, return_lse : bool
        Return the weights (..., H, L, S) and the log-sum-exp (..., H, L) of the scores as well.
    out : array (..., H, L, Dv), optional
        Where to write the output; may be strided and may overlap an input.
    threads : int, optional
        Upper bound on threads; small work runs on the caller's.  The NumPy backend holds NumPy's
        BLAS to it, process-wide while the call runs, where threadpoolctl is installed.
    backend : str, optional
        A name of ``backends()``; by default the fastest, or what ``QKV_EXT_BACKEND`` says.

    Returns
    -------
    output : array (..., H, L, Dv)
        In the dtype and layout of q.  With extras, a tuple in the order output, weights, lse.

    Raises
    ------
    TypeError
        A dtype that is not floating-point, several of them, an integer mask, lengths that are no
        integers, an option of another name.
    ValueError
        Shapes that do not fit, an option outside its values, an unknown backend.

    Notes
    -----
    - An excluded key never influences the output, whatever its K and V hold, NaN and infinity
      included.  A query that is allowed no key gives output 0, weights 0 and lse -inf.
    - The scale is applied to Q before the product, and the maximum subtracted before exp, so that
      finite scores stay finite.  Sums run over tiles of 256 keys.  The largest error is at most
      twice that of the plain formula in float32, in the farthest order of its sums, plus four units
      of rounding of what goes into an entry: Σ w |v| + Σ w |v - output| s, where s is the size of
      the terms of w's exponent, score - lse.  The README has the rule.
    - In the compiled backends a row has the same bits whatever the batch, its place in it, what the
      other rows hold and the number of threads; for other L or S they may be others.
    - float16 and bfloat16 are computed in float32 and rounded once; lse is float32 then.
    - A query's position is i + offset, where the offset is len_k - len_q for "bottom-right" and 0
      for "top-left", of each item's own lengths.
    - Neither (L, S) scores nor repeated heads are held in memory, unless weights are asked for.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> v = np.float32([[1], [3]])
    >>> zeros = np.zeros((2, 4), "f4")
    >>> qkv_ext.scaled_dot_product_attention(zeros, zeros, v, causal=True)
    array([[1.],
           [2.]], dtype=float32)

    References
    ----------
    A. Vaswani et al., "Attention Is All You Need" (2017).  The loop over tiles is that of
    M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax" (2018), and of
    T. Dao et al., "FlashAttention" (2022).
    """
    if unknown:
        raise refuse(unknown, "scaled_dot_product_attention", ATTENTION)
    given = (
        mask, causal, align, scale, window, softcap, alibi_slopes, sinks, kv_lengths, q_lengths,
        block_mask, q_segments, kv_segments, query_offset, key_offset, layout, return_weights,
        return_lse, out, threads, backend,
    )  # fmt: skip
    # most calls give few options, and their arrays can often be taken as they are
    output = default_backend(backend).plain_attention(q, k, v, given, threads_of(threads))
    if output is not None:
        return output
    return _backends.attention(_check.attention(q, k, v, tuple.__new__(Given, given)), backend)


@overload
def varlen_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, *,
    return_lse: No = ..., **options: Unpack[VarlenOptions],
) -> Array: ...  # fmt: skip
@overload
def varlen_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, *,
    return_lse: Yes, **options: Unpack[VarlenOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def varlen_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, cu_seqlens_q: ArrayLike, cu_seqlens_k: ArrayLike, *,
    return_lse: Flag = ..., **options: Unpack[VarlenOptions],
) -> Array | tuple[Array, ...]: ...  # fmt: skip
@shows(VarlenOptions, "return_lse")
def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    return_lse: bool | np.bool_ = False,
    **options: Unpack[VarlenOptions],
) -> Any:
    """Attention over a packed batch of sequences of any lengths, laid end to end without padding.

    Sequence n has the queries ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1]`` and the keys
    ``cu_seqlens_k[n]`` to ``cu_seqlens_k[n + 1]``, and is computed as if it were alone.

    Parameters
    ----------
    q : array (Tq, H, D)
        The queries of all sequences; dtypes are those of ``scaled_dot_product_attention``.
    k, v : array (Tk, Hkv, D) and (Tk, Hkv, Dv)
        Their keys and values.
    cu_seqlens_q, cu_seqlens_k : integers (N + 1,)
        Cumulative lengths: from 0, never falling, to Tq and Tk.  Sequences may be empty.
    alibi_slopes : array (H,) or (N, H), optional
    kv_lengths : integers (N,), optional
        How many keys of each sequence's span are there.
    **options
        As in ``scaled_dot_product_attention``.
    return_lse : bool
        Return the log-sum-exp (Tq, H) as well.

    Returns
    -------
    output : array (Tq, H, Dv)
        With return_lse, the tuple (output, lse).

    Raises
    ------
    TypeError, ValueError
        As ``scaled_dot_product_attention`` does; cumulative lengths that do not fit.

    Notes
    -----
    In the compiled backends the output is bit for bit that of each sequence alone.  Work is shared
    out by blocks of queries, so that one long sequence keeps all threads busy.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 7, 2, 8), "f4")
    >>> qkv_ext.varlen_attention(q, k, v, [0, 3, 7], [0, 3, 7], causal=True).shape
    (7, 2, 8)

    References
    ----------
    The packed form is that of T. Dao et al., FlashAttention.
    """
    given = take(options, "varlen_attention", VARLEN, return_lse=return_lse)
    checked = _check.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, given)
    return _backends.attention(checked, given.backend)


def alibi_slopes(num_heads: int) -> Array:
    """The slopes of attention with linear biases (ALiBi), one for each head.

    For a power of two they are 2^(-8/H), 2^(-16/H), ... 2^-8.  Otherwise those of the next lower
    power of two come first, then every other one of twice as many heads.

    Parameters
    ----------
    num_heads : int
        H, at least 1.

    Returns
    -------
    array (H,)
        float32, for the argument alibi_slopes.

    Raises
    ------
    TypeError, ValueError
        A num_heads that is no positive integer.

    Examples
    --------
    >>> import qkv_ext
    >>> qkv_ext.alibi_slopes(3)
    array([0.0625    , 0.00390625, 0.25      ], dtype=float32)

    References
    ----------
    O. Press, N. A. Smith and M. Lewis, "Train Short, Test Long" (2022).
    """
    return _rules.default_slopes(num_heads)
