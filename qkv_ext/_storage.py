"""The storage types of a KVCache: rows of numbers into them, and back to float32.

    float32     as given, or widened from 16 bits, exactly
    float16     rounded to nearest even, once; beyond 65504 infinite
    bfloat16    rounded to nearest even, once; kept as its 16 bits, so that ml_dtypes is not needed
    int8        rint(x / scale) with one scale = max |x| / 127 for each row, so -127 to 127

A row is one key, or one value, of one head.  An int8 row of zeros has scale 0; one that holds a
number which is not finite has scale NaN and reads back as NaN.  All arithmetic is in float32, and
none of it is left to a backend: what is stored has the same bits everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv_ext._arrays import FLOAT32, Array

#: What the entries of each storage type are kept as.
ENTRIES: dict[str, np.dtype[Any]] = {
    "float32": FLOAT32,
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
}

_MOST = np.float32(127)
_F32 = np.finfo(np.float32)
_LARGEST_SCALE = np.nextafter(_F32.max / _MOST, np.float32(0))  # 127 of it are still finite


def encode(x: Array, kind: str) -> tuple[Array, Array | None]:
    """x (..., D) of float32, float16 or bfloat16 as entries, and the scales (...) of int8."""
    given = x.dtype.name
    if given == kind:
        return (x.view(np.uint16) if kind == "bfloat16" else x), None
    wide = widen(x.view(np.uint16), None, "bfloat16") if given == "bfloat16" else x
    if kind == "bfloat16":
        return _bfloat16(wide.astype(FLOAT32, copy=False)), None
    with np.errstate(all="ignore"):
        if kind == "int8":
            return _int8(wide.astype(FLOAT32, copy=False))
        return wide.astype(ENTRIES[kind]), None


def widen(entries: Array, scales: Array | None, kind: str) -> Array:
    """Entries (..., D), and the scales (...) of int8, as a new float32 array."""
    if kind == "bfloat16":
        bits = entries.astype(np.uint32)
        bits <<= 16
        return bits.view(FLOAT32)
    wide = entries.astype(FLOAT32)
    if scales is not None:
        with np.errstate(all="ignore"):
            wide *= scales[..., None]
    return wide


def _bfloat16(x: Array) -> Array:
    """The upper half of the bits of float32, rounded to nearest even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    odd = (bits >> 16) & 1
    rounded = (bits + (odd + np.uint32(0x7FFF))) >> 16  # a carry into the exponent is right
    nan = np.isnan(x)
    if nan.any():  # whose payload must not round up to infinity
        rounded = np.where(nan, bits >> 16 | np.uint32(0x40), rounded)
    return rounded.astype(np.uint16)


def _int8(x: Array) -> tuple[Array, Array]:
    top = np.abs(x).max(axis=-1, initial=0)
    scales = np.minimum(top / _MOST, _LARGEST_SCALE)
    if (scales < _F32.tiny).any():
        # So small a scale is no longer max / 127 to the last bit but to a whole unit: the next one
        # keeps x / scale within 127.
        small = (scales < _F32.tiny) & (top > 0)
        scales = np.where(small, scales + _F32.smallest_subnormal, scales)
    fine = np.isfinite(top)
    if not fine.all():
        scales = np.where(fine, scales, np.float32(np.nan))
        x = np.where(fine[..., None], x, np.float32(0))
    entries = x / np.where(scales > 0, scales, np.float32(1))[..., None]
    return np.rint(entries, out=entries).astype(np.int8), scales
