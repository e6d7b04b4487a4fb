"""The front door of apply_rotary, and what a layer asks of its tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv_ext._core import _arrays, _rules
from qkv_ext._core._arrays import Array
from qkv_ext._core._check import Checked
from qkv_ext._core._problem import Rotation
from qkv_ext._core._threads import threads_of


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


def rotary(
    x: Any, cos: Any, sin: Any, positions: Any, interleaved: Any, rotary_dim: Any, layout: Any,
    out: Any, threads: Any,
) -> Checked[Rotation]:  # fmt: skip
    """apply_rotary."""
    x = _arrays.operand(x, "x", 2)
    blhd = _arrays.is_blhd(layout)
    if blhd and x.ndim < 4:
        raise ValueError(f"layout is 'blhd', but x has shape {x.shape}; expected rank 4 or more")
    most = threads_of(threads)
    cos, sin = tables(cos, sin, rotary_dim, x.shape[-1])
    rows = _positions(positions, x, blhd, len(cos))
    beside = None if _arrays.same_place(x, out) else x  # what out is not to overlap
    output, target = _arrays.target(out, x.shape, x.dtype, beside, cos, sin)
    into = output if target is None else target
    if blhd:
        x, into = x.swapaxes(-3, -2), into.swapaxes(-3, -2)
    cos, sin, rows = rounded(cos, sin, rows, x.shape[-2], x.dtype)
    neighbours = _arrays.as_bool(interleaved, "interleaved")
    problem = Rotation(x, cos, sin, rows, neighbours, into, most)
    return problem, (output,), () if target is None else ((output, target),)
