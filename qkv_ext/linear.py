"""The primitives under attention: products of matrices, projections, and softmax."""

from __future__ import annotations

from typing import Any, cast

from numpy.typing import ArrayLike, NDArray

from qkv_ext._core import _backends, _check
from qkv_ext._core._arrays import FLOAT32
from qkv_ext._core._backends import default_backend
from qkv_ext._core._packed import PackedWeight
from qkv_ext._core._threads import threads_of

Array = NDArray[Any]

__all__ = ["linear_projection", "matmul", "pack_weight", "softmax"]


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    out: Array | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Array:
    """The matrix product ``a @ b`` of stacks of matrices.

    Parameters
    ----------
    a : array (..., M, K)
        float32, float16 or bfloat16, or float64 for the NumPy backend.
    b : array (..., K, N)
        The dtype of a; leading axes broadcast as in NumPy.
    out : array (..., M, N), optional
        Where to write the result; may be strided and may overlap an input.
    threads : int, optional
        Upper bound on threads; small products run on the caller's.  The NumPy backend holds
        NumPy's BLAS to it, process-wide while the call runs, where threadpoolctl is installed.
    backend : str, optional
        A name of ``backends()``.

    Returns
    -------
    array (..., M, N)
        Zeros where K is 0.

    Raises
    ------
    TypeError
        A dtype that is none of these, or two of them.
    ValueError
        Shapes that do not fit, an out that cannot be written, an unknown backend.

    Notes
    -----
    Compiled backends add up each element in one order, whatever M, N, the position and the number
    of threads: chains of 256 terms from zero, each added to the total.  The same row of a and the
    same b give the same bits.  The largest error is at most twice that of the plain float32
    product, in the farthest order of its sums, plus four units of rounding of the largest
    Σ |a| |b|.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> qkv_ext.matmul(np.eye(2, dtype="f4"), np.float32([[1, 2], [3, 4]]))
    array([[1., 2.],
           [3., 4.]], dtype=float32)

    References
    ----------
    The blocking is that of K. Goto and R. van de Geijn, "Anatomy of High-Performance Matrix
    Multiplication", ACM TOMS 34 (2008).
    """
    if out is None:  # most arrays can be taken as they are
        chosen = default_backend(backend)
        plain = chosen.plain_product(a, b, None, 0, 2, threads_of(threads))
        if plain is not None:
            return cast(Array, plain)
    output: Array = _backends.product(_check.matmul(a, b, out, threads), backend)
    return output


def linear_projection(
    x: ArrayLike,
    w: ArrayLike | PackedWeight,
    b: ArrayLike | None = None,
    *,
    out: Array | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Array:
    """The projection ``X W + b``, such as Q = X W_Q.

    Parameters
    ----------
    x : array (..., d_in)
        float32, float16 or bfloat16, or float64 for the NumPy backend.
    w : array (d_in, d_out) or PackedWeight
        The weight.  A framework that keeps weights as (d_out, d_in), as torch's Linear does, passes
        ``w.T``.  A weight that serves many calls is best packed once, by ``pack_weight``.
    b : array (d_out,), optional
        The bias.
    out : array (..., d_out), optional
        Where to write the result; may be strided and may overlap an input.
    threads, backend : optional
        As in ``matmul``.

    Returns
    -------
    array (..., d_out)

    Raises
    ------
    TypeError
        A dtype that is none of these, or several of them.
    ValueError
        Shapes that do not fit, an out that cannot be written, an unknown backend.

    Notes
    -----
    Numerics are those of ``matmul``, the bias added last.  A packed weight gives the same bits as
    the array it was made of.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> x, w = np.ones((4, 8), "f4"), np.ones((8, 3), "f4")
    >>> qkv_ext.linear_projection(x, qkv_ext.pack_weight(w)).shape
    (4, 3)
    """
    if out is None:  # most arrays can be taken as they are
        chosen = default_backend(backend)
        matrix, columns = w, 0
        if isinstance(w, PackedWeight) and w.dtype is FLOAT32:
            matrix, columns = w.panels, w.shape[1]
        plain = chosen.plain_product(x, matrix, b, columns, 1, threads_of(threads))
        if plain is not None:
            return cast(Array, plain)
    output: Array = _backends.product(_check.linear(x, w, b, out, threads), backend)
    return output


def pack_weight(w: ArrayLike) -> PackedWeight:
    """Pack a weight once for every later ``linear_projection`` with it.

    Parameters
    ----------
    w : array (d_in, d_out)
        float32, float16 or bfloat16, or float64 for the NumPy backend.  It is copied.

    Returns
    -------
    PackedWeight
        The same for every backend.

    Raises
    ------
    TypeError
        A dtype that is none of these.
    ValueError
        A w that is not two-dimensional.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> qkv_ext.pack_weight(np.ones((8, 100), "f4"))
    PackedWeight(shape=(8, 100), dtype=float32)
    """
    return PackedWeight.from_matrix(_check.matrix(w, "w"))


def softmax(
    x: ArrayLike,
    axis: int = -1,
    *,
    out: Array | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Array:
    """The stable softmax ``exp(x - max) / sum(exp(x - max))`` along an axis.

    Parameters
    ----------
    x : array
        float32, float16 or bfloat16, or float64 for the NumPy backend.
    axis : int
        The axis that is to sum to 1.
    out : array, optional
        Of the shape and dtype of x; may be strided and may overlap x.
    threads, backend : optional
        As in ``matmul``.

    Returns
    -------
    array
        Of the shape of x.  As the formula has it, a row is NaN where it holds a NaN or +inf, or
        nothing but -inf.  (A row of attention without any key is zeros instead: see
        ``scaled_dot_product_attention``.)

    Raises
    ------
    TypeError
        A dtype that is none of these.
    ValueError
        An axis that x does not have, an out that cannot be written, an unknown backend.

    Notes
    -----
    exp is within 4 units in the last place; its results below 2^-126 are rounded once more.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> qkv_ext.softmax(np.float32([1000.0, 1000.0]))
    array([0.5, 0.5], dtype=float32)
    """
    if out is None and type(axis) is int and axis == -1:
        chosen = default_backend(backend)
        plain = chosen.plain_softmax(x, threads_of(threads))
        if plain is not None:
            return cast(Array, plain)
    output: Array = _backends.softmax(_check.softmax(x, axis, out, threads), backend)
    return output
