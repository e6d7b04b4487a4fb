"""What the NumPy backend does to rows beside attention and products: layer norm and RMS norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qkv_ext._core._arrays import FLOAT64, Array

if TYPE_CHECKING:
    from qkv_ext._core._problem import Norm

PART = 1 << 16  #: numbers that are normed at a time, so that what is made of them stays in a cache
FAR = 1000  #: 2 to that power, and its inverse, is a float64


def norm(problem: Norm) -> None:
    """out = (x - mean) / sqrt(var + eps) weight + bias, for the rows of x."""
    if problem.x.size:
        with np.errstate(all="ignore"):
            _norm_rows(problem, problem.x, problem.out)


def _norm_rows(problem: Norm, x: Array, out: Array) -> None:
    """Write out, a part at a time."""
    step = PART * len(x) // x.size  # of the first axis; none where even one is too much
    if x.ndim == 1 or step >= len(x):
        out[...] = _normed(problem, x)
    elif step or x.ndim == 2:
        for start in range(0, len(x), max(1, step)):
            part = slice(start, start + max(1, step))
            out[part] = _normed(problem, x[part])
    else:
        for own_x, own_out in zip(x, out, strict=True):
            _norm_rows(problem, own_x, own_out)


def _normed(problem: Norm, x: Array) -> Array:
    """In float64, in which no float32 has a square that is out of range."""
    root: Array = np.sqrt(np.float64(problem.eps))
    wide = x.astype(FLOAT64)
    if x.dtype == FLOAT64:  # brought near 1, so that it has none either
        exponent = np.frexp(np.abs(x).max(axis=-1, keepdims=True))[1]
        exponent = np.where(np.isfinite(x).all(axis=-1, keepdims=True), exponent, 0)
        exponent = np.clip(exponent, -FAR, FAR)
        wide, root = np.ldexp(wide, -exponent), np.ldexp(root, -exponent)
    if problem.centered:
        wide -= wide.mean(axis=-1, keepdims=True)
        wide -= wide.mean(axis=-1, keepdims=True)  # what the mean was off by
    deviation = np.sqrt(np.square(wide).mean(axis=-1, keepdims=True))
    wide /= np.hypot(deviation, root)
    wide *= problem.weight
    if problem.bias is not None:
        wide += problem.bias
    return wide
