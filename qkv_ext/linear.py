"""The primitives under attention: products of matrices, projections, and softmax."""

from __future__ import annotations

from typing import Any, Literal, cast

from numpy.typing import ArrayLike, NDArray

from qkv_ext._core import _backends, _check
from qkv_ext._core._arrays import FLOAT32
from qkv_ext._core._backends import default_backend
from qkv_ext._core._packed import PackedWeight, WeightDtype
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
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] | None = None,
    residual: ArrayLike | None = None,
    out: Array | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Array:
    """The projection ``activation(X W + b) + residual``; X W_Q, or half of a feed-forward layer.

    Parameters
    ----------
    x : array (..., d_in)
        float32, float16 or bfloat16, or float64 for the NumPy backend.
    w : array (d_in, d_out) or PackedWeight
        The weight.  A framework that keeps weights as (d_out, d_in), as torch's Linear does, passes
        ``w.T``.  A weight that serves many calls is best packed once, by ``pack_weight``.
    b : array (d_out,), optional
        The bias.
    activation : {"relu", "gelu", "gelu_tanh", "silu"}, optional
        What is applied to each number of X W + b, none by default::

            relu       max(x, 0)
            gelu       x Φ(x) = 0.5 x (1 + erf(x / √2))
            gelu_tanh  0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))
            silu       x / (1 + exp(-x))

    residual : array (..., d_out), optional
        What is added at the end, such as the x of a block; of the shape of the output, to which
        nothing is broadcast.
    out : array (..., d_out), optional
        Where to write the result; may be strided and may overlap an input, the residual too.
    threads, backend : optional
        As in ``matmul``.

    Returns
    -------
    array (..., d_out)

    Raises
    ------
    TypeError
        A dtype that is none of these, or several of them; an activation that is no string.
    ValueError
        Shapes that do not fit, an unknown activation, an out that cannot be written, an unknown
        backend.

    Notes
    -----
    Numerics are those of ``matmul``; bias, activation and residual follow on the sums, in this
    order, while they are in the first cache.  A packed weight gives the same bits as the array that
    it keeps, ``PackedWeight.dequantize()``.  float16 and bfloat16 are rounded once, at the end.

    With an activation the error rule is that of the plain formula: the largest error is at most
    twice that of the float32 product with the activation of it, in the farthest order of its sums,
    plus four units of rounding of the largest result.  By themselves, of a number that is given,
    gelu and silu are within 9 units in the last place, below 0 too, where the formulas as they are
    written lose all digits; gelu_tanh is within 3 where x > 0, and within 3e-5 of its result below.
    (Results below 2^-119 are aside.)  At -inf all activations are 0, their limit, and NaN is NaN.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> x, w = np.ones((4, 8), "f4"), np.ones((8, 3), "f4")
    >>> qkv_ext.linear_projection(x, qkv_ext.pack_weight(w)).shape
    (4, 3)
    >>> float(qkv_ext.linear_projection(x, w, activation="silu", residual=x[:, :3])[0, 0])
    8.99731731414795

    References
    ----------
    D. Hendrycks and K. Gimpel, "Gaussian Error Linear Units (GELUs)" (2016), which has silu too.
    """
    if out is None:  # most arrays can be taken as they are
        chosen = default_backend(backend)
        matrix, columns = w, 0
        if isinstance(w, PackedWeight) and w.dtype is FLOAT32:
            matrix, columns = w.panels, w.shape[1]
        plain = chosen.plain_product(
            x, matrix, b, columns, 1, threads_of(threads), activation, residual
        )
        if plain is not None:
            return cast(Array, plain)
    checked = _check.linear(x, w, b, activation, residual, out, threads)
    output: Array = _backends.product(checked, backend)
    return output


def pack_weight(w: ArrayLike, *, dtype: WeightDtype | None = None) -> PackedWeight:
    """Pack a weight once for every later ``linear_projection`` with it.

    Parameters
    ----------
    w : array (d_in, d_out)
        float32, float16 or bfloat16, or float64 for the NumPy backend.  It is copied.
    dtype : {"float32", "float16", "bfloat16"}, optional
        What its numbers are kept as, that of w by default.  16 bits take half the memory, and
        little more than half the time where few rows are multiplied: a decode step reads every
        weight once.  bfloat16 does not need ml_dtypes.

    Returns
    -------
    PackedWeight
        The same for every backend.  Its ``dtype``, which x has to be of, is that of w.

    Raises
    ------
    TypeError
        A w of another dtype; a dtype of a float64 w, which is kept as it is.
    ValueError
        A w that is not two-dimensional, another dtype.

    Notes
    -----
    float32 is rounded to nearest even, once: by at most 2^-8 of a number in bfloat16, and 2^-11 in
    float16 (2^-25 below 2^-14), which is infinite from 65520 on.  All arithmetic is in float32: on
    compiled backends a product has the bits of one with ``PackedWeight.dequantize()``, for every
    number of rows.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> qkv_ext.pack_weight(np.ones((8, 100), "f4"))
    PackedWeight(shape=(8, 100), dtype=float32)
    >>> qkv_ext.pack_weight(np.ones((8, 100), "f4"), dtype="bfloat16")
    PackedWeight(shape=(8, 100), dtype=float32, weight_dtype=bfloat16)
    """
    return _check.packed(w, dtype, "w", "dtype")


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
