"""The storage types of a KVCache and of weights: numbers into them, and back to float32.

    float32     as given, or widened from 16 bits, exactly
    float16     rounded to nearest even, once; beyond 65504 infinite
    bfloat16    rounded to nearest even, once; kept as its 16 bits, so that ml_dtypes is not needed
    int8        rint(x / scale) with one scale = max |x| / 127 for each row, so -127 to 127

A row is one key, or one value, of one head.  An int8 row of zeros has scale 0; one that holds a
number which is not finite has scale NaN and reads back as NaN.  All arithmetic is in float32, and
none of it is left to a backend: what is stored has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from qkv_ext._core._arrays import FLOAT32, Array

CHUNK = 1 << 16  #: entries that are converted at a time: what comes between stays in the cache
_MOST = np.float32(127)
_F32 = np.finfo(np.float32)
_LEAST_SCALE = _F32.tiny
_LARGEST_SCALE = np.nextafter(_F32.max / _MOST, np.float32(0))  # 127 of it are still finite


def encode(x: Array, kind: str) -> tuple[Array, Array | None]:
    """x (..., n, D) of float32, float16 or bfloat16 as entries, and the scales (..., n) or None.

    What is there in the storage type already is not copied.
    """
    given = x.dtype.name
    if given == kind:
        return (x.view(np.uint16) if kind == "bfloat16" else x), None
    if x.size <= CHUNK:
        return _encode(x, kind)
    entries = np.empty(x.shape, ENTRIES[kind])
    scales = np.empty(x.shape[:-1], FLOAT32) if kind in SCALED else None
    n = x.shape[-2]
    step = max(1, CHUNK * n // x.size)
    for start in range(0, n, step):
        part = slice(start, start + step)
        entries[..., part, :], of_part = _encode(x[..., part, :], kind)
        if scales is not None:
            scales[..., part] = of_part
    return entries, scales


@np.errstate(all="ignore")
def _encode(x: Array, kind: str) -> tuple[Array, Array | None]:
    if x.dtype == np.float16:
        x = x.astype(FLOAT32)
    elif x.dtype != FLOAT32:
        x = widen(x.view(np.uint16), None, "bfloat16")
    return _STORAGE[kind].encode(x)


@np.errstate(all="ignore")
def widen(entries: Array, scales: Array | None, kind: str) -> Array:
    """Entries (..., D), and the scales (...) where there are some, as a new float32 array."""
    wide = _STORAGE[kind].widen(entries)
    if scales is not None:
        wide *= scales[..., None]
    return wide


def _wide(entries: Array) -> Array:
    return entries.astype(FLOAT32)


def _from_bfloat16(entries: Array) -> Array:
    bits = entries.astype(np.uint32)
    bits <<= 16
    return bits.view(FLOAT32)


def _float32(x: Array) -> tuple[Array, None]:
    return x, None


def _float16(x: Array) -> tuple[Array, None]:
    return x.astype(np.float16), None


def _bfloat16(x: Array) -> tuple[Array, None]:
    """The upper half of the bits of float32, rounded to nearest even."""
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits  # a carry into the exponent is right
    rounded >>= 16
    nan = np.isnan(x)
    if nan.any():  # whose payload must not round up to infinity
        rounded = np.where(nan, bits >> 16 | np.uint32(0x40), rounded)
    return rounded.astype(np.uint16), None


def _int8(x: Array) -> tuple[Array, Array]:
    top = np.abs(x).max(axis=-1, initial=0)
    scales = top / _MOST
    by = scales
    if not (
        scales.min(initial=_LARGEST_SCALE) >= _LEAST_SCALE
        and scales.max(initial=_LEAST_SCALE) <= _LARGEST_SCALE
    ):
        fine = np.isfinite(top)
        x = np.where(fine[..., None], x, np.float32(0))
        scales = np.minimum(scales, _LARGEST_SCALE)
        # So small a scale is max / 127 to a whole unit only; one more keeps x / scale within 127.
        small = (top > 0) & (scales < _LEAST_SCALE)
        scales = np.where(small, scales + _F32.smallest_subnormal, scales)
        scales = np.where(fine, scales, np.float32(np.nan))
        by = np.where(scales > 0, scales, np.float32(1))
    entries = x / by[..., None]
    return np.rint(entries, out=entries).astype(np.int8), scales


class Storage(NamedTuple):
    """A storage type, as src/kernels/storage.def has it for what is compiled."""

    entries: np.dtype[Any]  #: what numbers are kept as
    scaled: bool  #: whether rows have scales
    encode: Callable[[Array], tuple[Array, Array | None]]  #: float32 as entries and scales
    widen: Callable[[Array], Array]  #: entries as float32, but for the scales


_STORAGE = {
    "float32": Storage(FLOAT32, False, _float32, _wide),
    "float16": Storage(np.dtype(np.float16), False, _float16, _wide),
    "bfloat16": Storage(np.dtype(np.uint16), False, _bfloat16, _from_bfloat16),
    "int8": Storage(np.dtype(np.int8), True, _int8, _wide),
}
ENTRIES = {name: kind.entries for name, kind in _STORAGE.items()}  #: by the name of a type
SCALED = {name for name, kind in _STORAGE.items() if kind.scaled}  #: the types that have scales
