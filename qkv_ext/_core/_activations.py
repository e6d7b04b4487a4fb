"""The activations of linear_projection in NumPy, float32 and float64.

Each but relu is x F(x) for a distribution function F with F(-a) = 1 - F(a), computed as

    max(x, 0) - a F(-a)        a = |x|

where neither term cancels the other.  a is held below what makes the second term 0, so that no
infinity is multiplied by it.  src/kernels/activation.h has the same formulas.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qkv_ext._core._arrays import FLOAT32, Array

PART = 1 << 15  #: numbers at a time, so that what is made of them stays in a cache
_ROOT = 2 * math.sqrt(2 / math.pi)

#: R(a) = F(-a) e^(a²/2) of the normal distribution, its Mills ratio over √(2π).  In float32: P / Q,
#: from the highest power to the lowest, with a relative error of 6.3e-9 from 0 to 15.
_P = [float.fromhex(x) for x in (
    "0x1.103046p-8", "0x1.4ee67ap-5", "0x1.78c536p-3", "0x1.c1d3c8p-2", "0x1p-1",
)]  # fmt: skip
_Q = [float.fromhex(x) for x in (
    "0x1.552256p-7", "0x1.a3c2a6p-4", "0x1.e2b97cp-2", "0x1.349f04p+0", "0x1.ad2c14p+0", "0x1p+0",
)]  # fmt: skip
#: In float64: (a + 4) R(a) as a series of Chebyshev polynomials in (a - 4) / (a + 4), with an error
#: of 7e-16; the transformation is that of M. M. Shepherd and J. G. Laframboise, "Chebyshev
#: Approximation of (1 + 2x) exp(x²) erfc x in 0 <= x < ∞", Math. Comp. 36 (1981).
_SERIES = [
    0.9704512045660766, -0.7517088168395706, 0.22219355567525104, -0.048517753260446085,
    0.006925920496242481, -0.00032059847439814995, -0.00010054739163210679, 1.8903369019706965e-05,
    1.010356885474631e-06, -6.145334749397824e-07, -3.3810201200691756e-09, 2.0686508061742833e-08,
    -1.1282603632469507e-10, -7.774015228388695e-10, -9.941424191404708e-12, 3.174482949858303e-11,
    1.842480684470494e-12, -1.3128616466710965e-12, -1.7415362652654813e-13,
    4.9072740317044244e-14, 1.2931384326165576e-14, -1.2180663521726341e-15,
    -8.052147372620933e-16, -2.8604941442616213e-17, 4.057064424335354e-17, 7.006400772814596e-18,
]  # fmt: skip


def apply(name: str, x: Array) -> None:
    """x = activation(x), a part at a time."""
    if x.size > PART and x.ndim > 1 and len(x) > 1:
        step = max(1, PART * len(x) // x.size)
        for start in range(0, len(x), step):
            apply(name, x[start : start + step])
    else:
        x[...] = _FUNCTIONS[name](x)


def _horner(coefficients: list[float], x: Array) -> Array:
    made = np.full_like(x, coefficients[0])
    for each in coefficients[1:]:
        made *= x
        made += x.dtype.type(each)
    return made


def _ratio(a: Array) -> Array:
    """R(a)."""
    if a.dtype == FLOAT32:
        return _horner(_P, a) / _horner(_Q, a)
    inverse = 1 / (a + 4)
    t = 1 - 8 * inverse
    low, high = np.zeros_like(t), np.zeros_like(t)  # Clenshaw's recurrence
    for each in _SERIES[:0:-1]:
        low, high = high, 2 * t * high - low + each
    series: Array = t * high - low + _SERIES[0]
    return series * inverse


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


def _gelu(x: Array) -> Array:
    a = np.minimum(np.abs(x), 15 if x.dtype == FLOAT32 else 39.5)
    high = np.rint(16 * a) / 16  # whose square is exact
    e = np.exp(high * high / -2) * np.exp((a - high) * (a + high) / -2)
    made: Array = np.maximum(x, 0) - a * _ratio(a) * e
    return made


def _logistic(a: Array, u: Array) -> Array:
    """a / (1 + e^u) for u >= 0."""
    e = np.exp(-u)
    made: Array = a * e / (1 + e)
    return made


def _gelu_tanh(x: Array) -> Array:
    a = np.minimum(np.abs(x), 20 if x.dtype == FLOAT32 else 60)
    made: Array = np.maximum(x, 0) - _logistic(a, _ROOT * a * (1 + 0.044715 * (a * a)))
    return made


def _silu(x: Array) -> Array:
    a = np.minimum(np.abs(x), 130 if x.dtype == FLOAT32 else 800)
    made: Array = np.maximum(x, 0) - _logistic(a, a)
    return made


_FUNCTIONS: dict[str, Any] = {
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}
