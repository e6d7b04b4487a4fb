"""A weight matrix in the kernels' own layout, packed once and used by many calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self, get_args

import numpy as np

from qkv_ext._core import _copies
from qkv_ext._core._arrays import FLOAT32, FLOAT64, Array, compute_dtype
from qkv_ext._core._storage import ENTRIES, encode, widen

PANEL = 64  #: columns of a panel; PANEL of src/kernels/kernels.h
_LINE = 64  #: bytes of a cache line
WeightDtype = Literal["float32", "float16", "bfloat16"]  #: what weights may be kept as
WEIGHT_DTYPES: tuple[str, ...] = get_args(WeightDtype)
_NAMES = {ENTRIES[name]: name for name in WEIGHT_DTYPES} | {FLOAT64: "float64"}


def _zeros(count: int, k: int, dtype: np.dtype[Any]) -> Array:
    """Panels of zeros that start on a cache line."""
    room = np.zeros(count * k * PANEL + _LINE // dtype.itemsize, dtype)
    skip = -room.ctypes.data % _LINE // dtype.itemsize
    return room[skip : skip + count * k * PANEL].reshape(count, k, PANEL)


def wide(panels: Array) -> Array:
    """The numbers of panels, as what computes takes them: float32 or float64."""
    plain = panels.dtype in (FLOAT32, FLOAT64)
    return panels if plain else widen(panels, None, _NAMES[panels.dtype])


class PackedWeight:
    """A matrix (K, N) kept as panels of 64 columns; made by ``pack_weight``, and by nothing else.

    The layout is the same for every backend; NumPy multiplies the panels one by one.  It can be
    pickled and shared between threads.

    Attributes
    ----------
    shape : tuple of int
        (K, N), the shape of the matrix.
    dtype : numpy.dtype
        That of the matrix, and of what is multiplied with it.
    weight_dtype : str
        What its numbers are kept as: ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"float64"``.
    panels : array (ceil(N / 64), K, 64)
        Read-only, zero beyond column N; bfloat16 is there as its 16 bits, uint16.
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
    def from_matrix(cls, w: Array, weight_dtype: str | None = None) -> Self:
        """The packed form of a checked matrix, kept as it is or as that."""
        k, n = w.shape
        kind = w.dtype.name if weight_dtype is None else weight_dtype
        panels = _zeros(-(-n // PANEL), k, ENTRIES.get(kind, FLOAT64))
        for index, panel in enumerate(panels):
            columns = w[:, index * PANEL : (index + 1) * PANEL]
            if kind in ENTRIES:
                columns, _ = encode(columns, kind)
            panel[:, : columns.shape[1]] = columns
        return cls._of(panels, n, w.dtype)

    @classmethod
    def _restored(cls, panels: Array, n: int, dtype: np.dtype[Any]) -> Self:
        """A weight out of a pickle."""
        count, k, _ = panels.shape
        room = _zeros(count, k, np.dtype(panels.dtype.type))  # it may come from another machine
        room[:] = panels
        return cls._of(room, n, dtype)

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
    def weight_dtype(self) -> str:
        return _NAMES[self._panels.dtype]

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes

    def dequantize(self) -> Array:
        """The matrix (K, N) that products with the weight are products with, a new array.

        Returns
        -------
        array (K, N)
            float32, or float64 where the matrix was.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> w = qkv_ext.pack_weight(np.float32([[1, 1 / 3]]), dtype="bfloat16")
        >>> w.dequantize()
        array([[1.       , 0.3339844]], dtype=float32)
        """
        k, n = self.shape
        matrix = np.empty((k, n), compute_dtype(self.dtype))
        for index, panel in enumerate(self.panels):
            columns = matrix[:, index * PANEL : (index + 1) * PANEL]
            columns[:] = wide(panel)[:, : columns.shape[1]]
        return matrix

    def __repr__(self) -> str:
        kept = "" if self.weight_dtype == self.dtype.name else f", weight_dtype={self.weight_dtype}"
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}{kept})"

    def __reduce__(self) -> tuple[Any, ...]:
        state = _copies.added_state(self, PackedWeight)
        return _copies.reduced(self._restored, (self.panels, self.shape[1], self.dtype), state)


def side_by_side(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Weights of one K and both dtypes as one, panel after panel; ``split`` gives them back."""
    first = parts[0].panels
    panels = _zeros(sum(len(part.panels) for part in parts), first.shape[1], first.dtype)
    np.concatenate([part.panels for part in parts], out=panels)
    return PackedWeight._of(panels, len(panels) * PANEL, parts[0].dtype)


def split(weight: PackedWeight, widths: Sequence[int]) -> list[PackedWeight]:
    """Weights of so many columns, in the memory of one; each begins with a panel."""
    cuts = np.cumsum([-(-n // PANEL) for n in widths])[:-1]
    each = zip(np.split(weight.panels, cuts), widths, strict=True)
    return [PackedWeight._of(panels, n, weight.dtype) for panels, n in each]
