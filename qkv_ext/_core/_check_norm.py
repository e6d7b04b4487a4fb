"""The front door of layer_norm and rms_norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv_ext._core import _arrays
from qkv_ext._core._arrays import Array, shown
from qkv_ext._core._check import Checked
from qkv_ext._core._problem import Norm
from qkv_ext._core._threads import threads_of


def epsilon(eps: Any, name: str = "eps") -> float:
    """Check an eps."""
    expected = "a finite number of at least 0"
    number = _arrays.real(eps, name, expected)
    if not 0 <= number <= _arrays.LARGEST_FLOAT64:
        raise ValueError(f"{name} is {shown(eps)}; expected {expected}")
    return float(number)


def vector(given: Any, name: str, x: Array) -> Array:
    """Check a weight or bias (n,) for the rows of x; in the dtype of computation."""
    array = _arrays.operand(given, name, 1)
    n = x.shape[-1]
    if array.shape != (n,):
        raise ValueError(f"{name} has shape {array.shape}; expected ({n},), the last axis of x")
    _arrays.same_dtype(**{"x": x, name: array})
    array = np.ascontiguousarray(array)
    compute = _arrays.compute_dtype(array.dtype)
    return array if array.dtype == compute else _arrays.converted(array, compute)


def norm(
    x: Any, weight: Any, bias: Any, eps: Any, centered: bool, out: Any, threads: Any
) -> Checked[Norm]:
    """Check a call of layer_norm, or of rms_norm, which is not centered."""
    x = _arrays.operand(x, "x", 1)
    weight = vector(weight, "weight", x)
    if bias is not None:
        bias = vector(bias, "bias", x)
    number, most = epsilon(eps), threads_of(threads)
    beside = None if _arrays.same_place(x, out) else x  # what out is not to overlap
    output, target = _arrays.target(out, x.shape, x.dtype, beside, weight, bias)
    into = output if target is None else target
    problem = Norm(x, weight, bias, number, centered, into, most)
    return problem, (output,), () if target is None else ((output, target),)
