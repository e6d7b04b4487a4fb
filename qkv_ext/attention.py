"""The attention function itself, over Q, K and V that are there already."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

from numpy.typing import ArrayLike, NDArray

from qkv_ext import _check

Array = NDArray[Any]

__all__ = ["Options", "scaled_dot_product_attention"]


class Options(TypedDict, total=False):
    """The options that every attention call passes on; none changes what it returns."""

    mask: ArrayLike | None
    causal: bool
    align: Literal["bottom-right", "top-left"]
    scale: float | None
    out: Array | None
    threads: int | None
    backend: str | None


@overload
def scaled_dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    layout: Literal["bhld", "blhd"] = ...,
    return_weights: Literal[False] = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Array: ...
@overload
def scaled_dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    layout: Literal["bhld", "blhd"] = ...,
    return_weights: Literal[True],
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...
@overload
def scaled_dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    layout: Literal["bhld", "blhd"] = ...,
    return_weights: Literal[False] = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...
@overload
def scaled_dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    layout: Literal["bhld", "blhd"] = ...,
    return_weights: Literal[True],
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Array, Array, Array]: ...
def scaled_dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    causal: bool = False,
    align: Literal["bottom-right", "top-left"] = "bottom-right",
    scale: float | None = None,
    layout: Literal["bhld", "blhd"] = "bhld",
    return_weights: bool = False,
    return_lse: bool = False,
    out: Array | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Any:
    """Attention, ``softmax(scale Q Kᵀ + mask) V``, over the keys that each query is allowed.

    Parameters
    ----------
    q : array (L, D), (B, L, D), (B, H, L, D) or with more leading axes
        Queries; float32, or float64 for the NumPy backend.
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
        Upper bound on threads; small work runs on the caller's.
    backend : str, optional
        A name of ``backends()``; by default the fastest, or what ``QKV_EXT_BACKEND`` says.

    Returns
    -------
    output : array (..., H, L, Dv)
        In the dtype and layout of q.  With extras, a tuple in the order output, weights, lse.

    Raises
    ------
    TypeError
        A dtype that is not float32 or float64, several of them, or an integer mask.
    ValueError
        Shapes that do not fit, an option outside its values, an unknown backend.

    Notes
    -----
    - An excluded key never influences the output, whatever its K and V hold, NaN and infinity
      included.  A query that is allowed no key gives output 0, weights 0 and lse -inf.
    - The scale is applied to Q before the product, and the maximum subtracted before exp, so that
      finite scores stay finite.  Sums run over tiles of 256 keys.  The error is at most twice that
      of the plain formula in float32.
    - In the compiled backends a row has the same bits whatever the batch, its place in it and the
      number of threads.
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
    chosen, problem, arrays, staged = _check.attention(
        q, k, v, mask, causal, align, scale, layout, return_weights, return_lse, out, threads,
        backend,
    )  # fmt: skip
    chosen.attention(problem, chosen.isa)
    return _check.deliver(arrays, staged)
