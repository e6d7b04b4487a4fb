"""The kind of case that weights kept in 16 bits make: a decode step's, which no cache holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bench.caches import STORAGE
from bench.kinds import Product

ROTATED = 512 * 2**20  #: bytes of weights that take turns, as the layers of a model do


@dataclass(frozen=True, kw_only=True)
class Stored(Product):
    """X W with weights of weight_dtype, packed before, each call with the next of many."""

    weight_dtype: Literal["float32", "float16", "bfloat16"]
    tolerance = 1e-2  # of the largest number; the exact one is with a weight that is not rounded

    @property
    def operations(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("stored",)

    @property
    def count(self) -> int:
        """How many weights take turns; a test's small ones need not be many."""
        return math.ceil(ROTATED / self.read) if self.read > 2**20 else 2

    @property
    def read(self) -> float:
        return STORAGE[self.weight_dtype] * float(self.shape[1] * self.shape[2])

    @property
    def moved(self) -> float:
        m, k, n = self.shape
        return self.read + 4.0 * m * (k + n)

    @property
    def bound(self) -> Literal["fma", "read"] | None:
        return "read" if self.shape[0] <= 8 else "fma"
