"""Layer norm and RMS norm, the steps of a transformer block before, or after, its attention."""

from __future__ import annotations

from typing import Any, cast

from numpy.typing import ArrayLike, NDArray

from qkv_ext._core import _backends, _check_norm
from qkv_ext._core._backends import default_backend
from qkv_ext._core._threads import threads_of

Array = NDArray[Any]

__all__ = ["layer_norm", "rms_norm"]


def layer_norm(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    out: Array | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Array:
    """Layer norm over the last axis.

    ``y = (x - mean) / sqrt(var + eps) · weight + bias``, with mean and var = mean((x - mean)²) of
    each row.

    Parameters
    ----------
    x : array (..., n)
        float32, float16 or bfloat16, or float64 for the NumPy backend.
    weight : array (n,)
        The gain ("gamma"), in the dtype of x.
    bias : array (n,), optional
        What is added at the end ("beta"), likewise.
    eps : float
        What is added to the variance; a finite number of at least 0.
    out : array (..., n), optional
        Of the shape and dtype of x; may be strided, and may overlap x: ``out=x`` is in place.
    threads, backend : optional
        As in ``matmul``.

    Returns
    -------
    array (..., n)
        Of the dtype of x.  Rows of no numbers (n = 0) give such rows.

    Raises
    ------
    TypeError
        A dtype that is none of these, or several of them; an eps that is no number.
    ValueError
        A weight or bias that is not (n,), an eps below 0 or not finite, an out that cannot be
        written, an unknown backend.

    Notes
    -----
    The mean is found first, and then the squares around it; sums run in many chains, and are added
    up in float64.  Rows of numbers whose squares are beyond float32, or below it where eps is as
    small, are multiplied by a power of 2 first: they are as right as others.  A row of equal
    numbers is 0 but for rounding, or 0 / 0 = NaN with eps = 0.  A row that holds NaN or an infinity
    is NaN, and no other is.

    Computed in float32, or in float64 for a float64 x; float16 and bfloat16 are rounded once, at
    the end.  The largest error is at most twice that of the plain float32 formula, in the farthest
    order of its sums, plus four units of rounding of the largest result.  A row has the same bits
    wherever it lies, whatever the batch and the number of threads (compiled backends).

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> x = np.float32([[1, 2, 3, 6], [10, 10, 20, 20]])
    >>> weight, bias = np.ones(4, "f4"), np.zeros(4, "f4")
    >>> qkv_ext.layer_norm(x, weight, bias, eps=0.0)[1]
    array([-1., -1.,  1.,  1.], dtype=float32)
    >>> bool(np.allclose(qkv_ext.layer_norm(x, weight).mean(-1), 0, atol=1e-6))
    True

    References
    ----------
    J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer Normalization" (2016); the correction of the mean
    is that of T. F. Chan, G. H. Golub and R. J. LeVeque, "Algorithms for Computing the Sample
    Variance", The American Statistician 37 (1983).
    """
    return _norm(x, weight, bias, eps, True, out, threads, backend)


def rms_norm(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    eps: float = 1e-6,
    out: Array | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Array:
    """RMS norm over the last axis: ``y = x / sqrt(mean(x²) + eps) · weight``.

    Parameters
    ----------
    x : array (..., n)
        float32, float16 or bfloat16, or float64 for the NumPy backend.
    weight : array (n,)
        The gain, in the dtype of x.  Checkpoints that keep it less 1, as Gemma's do, want
        ``1 + weight``.
    eps : float
        What is added to the mean of the squares; a finite number of at least 0.
    out : array (..., n), optional
        Of the shape and dtype of x; may be strided, and may overlap x: ``out=x`` is in place.
    threads, backend : optional
        As in ``matmul``.

    Returns
    -------
    array (..., n)
        Of the dtype of x.  Rows of no numbers (n = 0) give such rows.

    Raises
    ------
    TypeError
        A dtype that is none of these, or several of them; an eps that is no number.
    ValueError
        A weight that is not (n,), an eps below 0 or not finite, an out that cannot be written, an
        unknown backend.

    Notes
    -----
    Numerics are those of ``layer_norm``.  A row of zeros is 0, or 0 / 0 = NaN with eps = 0.  As the
    formula has it, a row that holds an infinity, and no NaN, is NaN there and 0 elsewhere.  float16
    and bfloat16 are rounded once, after the product with the weight; some models round before it,
    too.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> qkv_ext.rms_norm(np.float32([3, -4, 0, 0]), np.ones(4, "f4"), eps=0.0)
    array([ 1.2, -1.6,  0. ,  0. ], dtype=float32)

    References
    ----------
    B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    return _norm(x, weight, None, eps, False, out, threads, backend)


def _norm(
    x: Any, weight: Any, bias: Any, eps: Any, centered: bool, out: Any, threads: Any, backend: Any
) -> Array:
    if out is None:  # most arrays can be taken as they are
        plain = default_backend(backend).plain_norm
        normed = plain(x, weight, bias, eps, centered, threads_of(threads))
        if normed is not None:
            return cast(Array, normed)
    checked = _check_norm.norm(x, weight, bias, eps, centered, out, threads)
    result: Array = _backends.norm(checked, backend)
    return result
