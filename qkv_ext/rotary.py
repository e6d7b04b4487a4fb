"""Rotary position embedding: pairs of Q and K turned by angles that grow with their position.

    (a, b)  ->  (a cos - b sin, b cos + a sin)        angle = position / scale · base^(-2t / dim)

for pair t of a row, so that the product of a query and a key depends on their distance alone.  The
formula is here for the NumPy backend and float64; src/rotary.pyx has it with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv_ext import _arrays, _backends, _rules
from qkv_ext._arrays import shown
from qkv_ext._threads import threads_of

Array = NDArray[Any]

__all__ = ["apply_rotary", "rotary_tables"]

_LARGEST = float(np.finfo(np.float64).max)
CHUNK = 1 << 16  #: elements that are turned at a time, where there are heads to part them by
_MOST = 1 << 40  #: rows and columns that a table may be asked for; memory ends before that


class RotaryProblem(NamedTuple):
    """One checked call; heads before positions."""

    x: Array  # (..., H, L, D), of contiguous rows
    cos: Array  # (n, rotary_dim / 2), in the dtype of computation
    sin: Array
    positions: Array | None  # int64 (L,) or (B, L), rows of the tables; None is 0 to L - 1
    interleaved: bool
    out: Array  # as x; x itself for a compiled backend alone, which reads pairs before it writes
    threads: int


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
    problem, compute, output, computed = _checked(
        x, cos, sin, positions, interleaved, rotary_dim, layout, out, threads, backend
    )
    with np.errstate(all="ignore"):  # NaN, inf and underflow are results here, not accidents
        compute(problem)
        if computed is not None:
            output[...] = computed
    return output


def _positive(value: Any, name: str) -> float:
    number = _arrays.real(value, name, "a positive number")
    if not 0 < number <= _LARGEST:
        raise ValueError(f"{name} is {shown(value)}; expected a positive finite number")
    return float(number)


def _width(rotary_dim: Any, d: int) -> int:
    """How many elements of a row of D are turned."""
    if rotary_dim is None:
        if d % 2:
            raise ValueError(f"rotary_dim is None, but D = {d} is odd; give an even rotary_dim")
        return d
    width = int(_rules.integers(rotary_dim, "rotary_dim", None, 0, d))
    if width % 2:
        raise ValueError(f"rotary_dim is {width}; expected an even number")
    return width


def _halved(cos: Array, columns: int) -> str:
    """How tables are passed that have each angle twice, as (n, D) or (1, n, D)."""
    width = cos.shape[-1]
    if columns == 0 or width != 2 * columns or not (cos.ndim == 2 or cos.shape[:-2] == (1,)):
        return ""
    by_halves = np.array_equal(cos[..., :columns], cos[..., columns:])
    by_pairs = np.array_equal(cos[..., ::2], cos[..., 1::2])
    half = "::2" if by_pairs and not by_halves else f":{width} // 2"
    index = f"[:, {half}]" if cos.ndim == 2 else f"[0, :, {half}]"
    return f": pass cos{index} and sin{index}"


def tables(cos: Any, sin: Any, rotary_dim: Any, d: int) -> tuple[Array, Array]:
    """Check tables (n, rotary_dim / 2) for rows of D elements."""
    columns = _width(rotary_dim, d) // 2
    cos, sin = _arrays.operand(cos, "cos", 2), _arrays.operand(sin, "sin", 2)
    if cos.ndim != 2 or cos.shape[1] != columns:
        wanted = f"(n, {columns}), half of rotary_dim = {2 * columns}"
        raise ValueError(f"cos has shape {cos.shape}; expected {wanted}{_halved(cos, columns)}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin has shape {sin.shape}; expected {cos.shape} as cos has")
    return cos, sin


def _positions(positions: Any, x: Array, blhd: bool, n: int) -> Array | None:
    """The rows of the tables to take, int64 (L,) or (B, L); None for the first L.

    Checked against the length of the tables before anything is indexed.
    """
    length = x.shape[-3 if blhd else -2]
    other, hint = length, f'; they fit with layout="{"bhld" if blhd else "blhd"}"'
    if x.ndim > 3:
        other = x.shape[-2 if blhd else -3]
    if positions is None:
        if length > n:
            raise ValueError(
                f"x has shape {x.shape}, so L = {length} positions; cos and sin have {n} rows"
                + hint * (other <= n)
            )
        return None
    own = [(length,)] if x.ndim == 2 else [(length,), (x.shape[0], length)]
    wanted = " or ".join(map(str, own))
    array = _rules.integer_array(positions, "positions", f"integers {wanted}")
    if array.shape not in own:
        fits = array.shape in ((other,), (x.shape[0], other)) and other != length
        raise ValueError(f"positions has shape {array.shape}; expected {wanted}{hint * fits}")
    flat = _rules.integers(array.ravel(), "positions", array.size, 0, n - 1)
    return flat.reshape(array.shape)


def rounded(
    cos: Array, sin: Array, positions: Array | None, length: int, dtype: np.dtype[Any]
) -> tuple[Array, Array, Array | None]:
    """Tables in which x of that dtype is computed, only rows that it takes; positions in them."""
    dtype = _arrays.compute_dtype(dtype)
    if cos.dtype == sin.dtype == dtype:
        return cos, sin, positions
    rows: Any = slice(0, length) if positions is None else positions.ravel()
    with np.errstate(all="ignore"):
        cos, sin = cos[rows].astype(dtype, copy=False), sin[rows].astype(dtype, copy=False)
    if positions is not None:
        positions = np.arange(positions.size).reshape(positions.shape)
    return cos, sin, positions


def _checked(
    x: Any, cos: Any, sin: Any, positions: Any, interleaved: Any, rotary_dim: Any, layout: Any,
    out: Any, threads: Any, backend: Any,
) -> tuple[RotaryProblem, Callable[[RotaryProblem], None], Array, Array | None]:  # fmt: skip
    """Check a call of apply_rotary: what computes what, what is returned, and is copied to it."""
    x = _arrays.operand(x, "x", 2)
    blhd = _arrays.is_blhd(layout)
    if blhd and x.ndim < 4:
        raise ValueError(f"layout is 'blhd', but x has shape {x.shape}; expected rank 4 or more")
    compiled, most = _backends.choose(backend, x.dtype).rotary, threads_of(threads)
    cos, sin = tables(cos, sin, rotary_dim, x.shape[-1])
    rows = _positions(positions, x, blhd, len(cos))
    in_place = compiled is not None and _same_place(x, out)
    output, target = _arrays.target(out, x.shape, x.dtype, None if in_place else x, cos, sin)
    into = output if target is None else target
    if blhd:
        x, into = x.swapaxes(-3, -2), into.swapaxes(-3, -2)
    cos, sin, rows = rounded(cos, sin, rows, x.shape[-2], x.dtype)
    neighbours = _arrays.switch(interleaved, "interleaved")
    problem = RotaryProblem(x, cos, sin, rows, neighbours, into, most)
    return problem, _formula if compiled is None else compiled, output, target


def _same_place(x: Array, out: Any) -> bool:
    """Whether each element of out is that of x in memory."""
    return (
        isinstance(out, np.ndarray)
        and (out.shape, out.strides) == (x.shape, x.strides)
        and out.__array_interface__["data"][0] == x.__array_interface__["data"][0]
    )


def turn(queries: RotaryProblem, keys: RotaryProblem, backend: _backends.Backend) -> None:
    """The inner door: both of a checked step, in one run where that is compiled."""
    if backend.rotary_step is not None:
        backend.rotary_step(queries, keys)
        return
    with np.errstate(all="ignore"):
        _formula(queries)
        _formula(keys)


def _formula(problem: RotaryProblem) -> None:
    """The NumPy backend."""
    x, cos, sin, positions, interleaved, out, _ = problem
    if positions is None:
        rows: Any = slice(0, x.shape[-2])
    else:
        heads = (1,) * (x.ndim - 3) if positions.ndim == 2 else ()
        rows = positions.reshape(*positions.shape[:-1], *heads, positions.shape[-1])
    wide = x.astype(cos.dtype, copy=False)
    into = out if out.dtype == cos.dtype else np.empty(x.shape, cos.dtype)
    _rotate(wide, cos[rows], sin[rows], interleaved, into)
    if into is not out:
        out[...] = into


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array) -> None:
    """Write out, a part at a time, so that what is computed on the way stays in the cache.

    x and out are (..., L, D), and cos and sin broadcast to (..., L, rotary_dim / 2).
    """
    if x.size > CHUNK and x.ndim > 2:
        rows = (*x.shape[:-1], cos.shape[-1])
        cos, sin = np.broadcast_to(cos, rows), np.broadcast_to(sin, rows)
        for n in range(len(x)):
            _rotate(x[n], cos[n], sin[n], interleaved, out[n])
        return
    columns = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * columns, 2), slice(1, 2 * columns, 2)
    else:
        first, second = slice(0, columns), slice(columns, 2 * columns)
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    out[..., 2 * columns :] = x[..., 2 * columns :]
