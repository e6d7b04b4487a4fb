"""A weight matrix in the kernels' own layout, packed once and used by many calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PANEL = 64  #: columns of a panel; PANEL of src/kernels/kernels.h
_LINE = 64  #: bytes of a cache line


class PackedWeight:
    """A matrix (K, N) kept as panels of 64 columns, as ``pack_weight`` makes it.

    ``panels`` is (ceil(N / 64), K, 64), read-only and zero beyond column N.  The layout is the same
    for every backend; NumPy multiplies the panels one by one.  It can be pickled and shared between
    threads.

    Attributes
    ----------
    shape : tuple of int
        (K, N), the shape of the matrix.
    dtype : numpy.dtype
        float32 or float64.
    nbytes : int
        What the panels take in memory.
    """

    __slots__ = ("panels", "shape")

    panels: NDArray[Any]
    shape: tuple[int, int]

    def __init__(self, panels: NDArray[Any], shape: tuple[int, int]) -> None:
        self.panels = panels
        self.shape = shape

    @classmethod
    def from_matrix(cls, w: NDArray[Any]) -> PackedWeight:
        """The packed form of a checked matrix."""
        k, n = w.shape
        count = -(-n // PANEL)
        room = np.zeros(count * k * PANEL + _LINE // w.itemsize, w.dtype)
        skip = -room.ctypes.data % _LINE // w.itemsize  # the panels start on a cache line
        panels = room[skip : skip + count * k * PANEL].reshape(count, k, PANEL)
        for index in range(count):
            columns = w[:, index * PANEL : (index + 1) * PANEL]
            panels[index, :, : columns.shape[1]] = columns
        panels.flags.writeable = False
        return cls(panels, (k, n))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.panels.dtype

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def __repr__(self) -> str:
        return f"PackedWeight(shape={self.shape}, dtype={self.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        k, n = self.shape
        matrix = self.panels.transpose(1, 0, 2).reshape(k, len(self.panels) * PANEL)[:, :n]
        return PackedWeight.from_matrix, (np.ascontiguousarray(matrix),)
