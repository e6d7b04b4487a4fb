"""Rotary position embedding: pairs of Q and K turned by angles that grow with their position.

    (a, b)  ->  (a cos - b sin, b cos + a sin)        angle = position / scale · base^(-2t / dim)

for pair t of a row, so that the product of a query and a key depends on their distance alone.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext._core import _arrays, _backends, _check_rotary, _rules
from qkv_ext._core._arrays import shown
from qkv_ext._core._threads import threads_of

Array = NDArray[Any]

__all__ = ["apply_rotary", "rotary_tables"]

_LARGEST = float(np.finfo(np.float64).max)
_MOST = 1 << 40  #: rows and columns that a table may be asked for; memory ends before that


def rotary_tables(
    n: int, dim: int, *, base: float = 10000.0, scale: float = 1.0
) -> tuple[Array, Array]:
    """The cosines and sines of the positions 0 to n - 1, for ``apply_rotary``.

    ``angle[p, t] = (p / scale) · base^(-2t / dim)``

    Parameters
    ----------
    n : int
        How many positions there are; the longest sequence, its cache included.
    dim : int
        How many elements of a row are turned: D, or the rotary_dim of ``apply_rotary``.  Even.
    base : float
        The base of the wavelengths ("rope_theta").
    scale : float
        What positions are divided by (linear scaling, "position interpolation").

    Returns
    -------
    cos, sin : array (n, dim / 2)
        float32.

    Raises
    ------
    TypeError, ValueError
        An n or dim that is no integer in range, an odd dim, a base or scale that is no positive
        finite number.

    Notes
    -----
    Angles are computed in float64 and only the results are rounded, so that far positions keep
    their accuracy.

    Any other scaling is a pair of tables that the caller makes of frequencies f (dim / 2,):
    ``angles = np.outer(np.arange(n), f)``, then ``np.cos(angles)`` and ``np.sin(angles)``.  From
    ``f = base^(-2t / dim)``, for a context that is s times the length L0 of training:

    - NTK-aware scaling takes base · s^(dim / (dim - 2)) in place of base.
    - Llama 3 takes ``(1 - g) f / s + g f`` with g = (L0 f / 2π - low) / (high - low), held within
      0 and 1; low = 1 and high = 4.
    - YaRN takes the same with g = (t1 - t) / (t1 - t0), held within 0 and 1, where t0 and t1 are
      dim / (2 log base) · log(L0 / 2πr) for r = 32, rounded down, and for r = 1, rounded up; both
      tables are multiplied by 0.1 log s + 1.

    Examples
    --------
    >>> import qkv_ext
    >>> cos, sin = qkv_ext.rotary_tables(1024, 64)
    >>> cos.shape, sin.shape, cos.dtype
    ((1024, 32), (1024, 32), dtype('float32'))

    References
    ----------
    J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021);
    S. Chen et al., "Extending Context Window of Large Language Models via Position Interpolation"
    (2023); B. Peng et al., "YaRN: Efficient Context Window Extension" (2023).
    """
    rows = int(_rules.integers(n, "n", None, 0, _MOST))
    width = int(_rules.integers(dim, "dim", None, 2, _MOST))
    if width % 2:
        raise ValueError(f"dim is {width}; expected an even number")
    exponents = np.arange(0, width, 2) / -width
    with np.errstate(all="ignore"):
        frequencies = _positive(base, "base") ** exponents
        angles = np.outer(np.arange(rows) / _positive(scale, "scale"), frequencies)
        if not np.isfinite(angles).all():
            given = f"base is {shown(base)} and scale {shown(scale)}"
            raise ValueError(f"{given}; expected angles below infinity")
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def apply_rotary(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    positions: ArrayLike | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    layout: Literal["bhld", "blhd"] = "bhld",
    out: Array | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Array:
    """Turn the pairs of each row of Q or K by the angles of its position.

    Pair t of a row at position p, (a, b), becomes
    ``(a cos[p, t] - b sin[p, t], b cos[p, t] + a sin[p, t])``.

    Parameters
    ----------
    x : array (L, D), (B, L, D), (B, H, L, D) or with more leading axes
        Queries or keys; float32, float64, float16 or bfloat16.
    cos, sin : array (n, rotary_dim / 2)
        A row for each position, as ``rotary_tables`` makes them or the caller, which covers
        NTK-aware, Llama 3 and YaRN scaling; any float dtype.  Tables of width rotary_dim, whose
        halves are equal, are to be passed as ``cos[:, : rotary_dim // 2]``.
    positions : integers (L,) or (B, L), optional
        The row of the tables for each row of x, B being the first axis of x; 0 to L - 1 by default.
    interleaved : bool
        Which elements of a row are a pair, the same digit for rotary_dim = 6, D = 8::

            False, half-split           True, neighbours
            0 1 2 0 1 2 . .             0 0 1 1 2 2 . .

        The half-split form is that of GPT-NeoX and of the Llama checkpoints of transformers,
        the other that of GPT-J and of Meta's Llama checkpoints.
    rotary_dim : int, optional
        How many elements of each row take part, D by default; those beyond pass through.
    layout : {"bhld", "blhd"}
        "blhd" takes x and out as (..., L, H, D), at rank 4 or more.
    out : array, optional
        Of the shape and dtype of x; may be strided, and may overlap x: ``out=x`` is in place.
    threads, backend : optional
        As in ``matmul``; every backend gives the same bits, but for those of a NaN.

    Returns
    -------
    array
        Of the shape and dtype of x.

    Raises
    ------
    TypeError
        A dtype that is not floating-point, positions that are no integers.
    ValueError
        Shapes that do not fit, positions beyond the tables, an odd rotary_dim or one beyond D, an
        out that cannot be written, an unknown backend.

    Notes
    -----
    Computed in float32, or in float64 for a float64 x; float16 and bfloat16 are rounded once, at
    the end.  The tables are rounded to the dtype of computation.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> q = np.ones((2, 4, 3, 8), "f4")
    >>> cos, sin = qkv_ext.rotary_tables(16, 8)
    >>> turned = qkv_ext.apply_rotary(q, cos, sin, positions=[5, 6, 7])
    >>> turned.shape
    (2, 4, 3, 8)
    >>> bool(np.allclose((turned**2).sum(-1), 8))  # lengths stay
    True

    References
    ----------
    J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    plain = _backends.default_backend(backend).plain_rotary
    turned: Array | None = plain(
        x, cos, sin, positions, interleaved, rotary_dim, layout, out, threads_of(threads)
    )
    if turned is not None:  # the plain case, quickly
        return turned
    checked = _check_rotary.rotary(
        x, cos, sin, positions, interleaved, rotary_dim, layout, out, threads
    )
    result: Array = _backends.rotary(checked, backend)
    return result


def _positive(value: Any, name: str) -> float:
    number = _arrays.real(value, name, "a positive number")
    if not 0 < number <= _LARGEST:
        raise ValueError(f"{name} is {shown(value)}; expected a positive finite number")
    return float(number)
