"""A weight matrix in the kernels' own layout, packed once and used by many calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from qkv_ext._core import _copies
from qkv_ext._core._arrays import Array, compute_dtype

PANEL = 64  #: columns of a panel; PANEL of src/kernels/kernels.h
_LINE = 64  #: bytes of a cache line


def _zeros(count: int, k: int, dtype: np.dtype[Any]) -> Array:
    """Panels of zeros that start on a cache line."""
    room = np.zeros(count * k * PANEL + _LINE // dtype.itemsize, dtype)
    skip = -room.ctypes.data % _LINE // dtype.itemsize
    return room[skip : skip + count * k * PANEL].reshape(count, k, PANEL)


class PackedWeight:
    """A matrix (K, N) kept as panels of 64 columns; made by ``pack_weight``, and by nothing else.

    The layout is the same for every backend; NumPy multiplies the panels one by one.  It can be
    pickled and shared between threads.

    Attributes
    ----------
    shape : tuple of int
        (K, N), the shape of the matrix.
    dtype : numpy.dtype
        That of the matrix.
    panels : array (ceil(N / 64), K, 64)
        Read-only, zero beyond column N; float32 where the matrix is float16 or bfloat16.
    nbytes : int
        What the panels take in memory.
    """

    __slots__ = ("__weakref__", "_dtype", "_panels", "_shape")

    _panels: Array
    _shape: tuple[int, int]
    _dtype: np.dtype[Any]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        raise TypeError("a PackedWeight is made by pack_weight(w)")

    @classmethod
    def from_matrix(cls, w: Array) -> Self:
        """The packed form of a checked matrix."""
        k, n = w.shape
        panels = _zeros(-(-n // PANEL), k, compute_dtype(w.dtype))
        for index, panel in enumerate(panels):
            columns = w[:, index * PANEL : (index + 1) * PANEL]
            panel[:, : columns.shape[1]] = columns
        return cls._of(panels, n, w.dtype)

    @classmethod
    def _of(cls, panels: Array, n: int, dtype: np.dtype[Any]) -> Self:
        panels.flags.writeable = False
        packed = cls.__new__(cls)
        packed._panels, packed._shape, packed._dtype = panels, (panels.shape[1], n), dtype
        return packed

    @property
    def panels(self) -> Array:
        return self._panels

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        k, n = self.shape
        matrix = self.panels.transpose(1, 0, 2).reshape(k, len(self.panels) * PANEL)[:, :n]
        state = _copies.added_state(self, PackedWeight)
        return _copies.reduced(self.from_matrix, (matrix.astype(self.dtype),), state)


def side_by_side(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Weights of one K and dtype as one, panel after panel; ``split`` gives them back."""
    first = parts[0].panels
    panels = _zeros(sum(len(part.panels) for part in parts), first.shape[1], first.dtype)
    np.concatenate([part.panels for part in parts], out=panels)
    return PackedWeight._of(panels, len(panels) * PANEL, parts[0].dtype)


def split(weight: PackedWeight, widths: Sequence[int]) -> list[PackedWeight]:
    """Weights of so many columns, in the memory of one; each begins with a panel."""
    cuts = np.cumsum([-(-n // PANEL) for n in widths])[:-1]
    each = zip(np.split(weight.panels, cuts), widths, strict=True)
    return [PackedWeight._of(panels, n, weight.dtype) for panels, n in each]
