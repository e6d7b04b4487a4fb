"""The kinds of case that a KVCache is measured by: decode steps from it, and what else it does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.kinds import Arrays, Attention, Case, Outputs

STORAGE = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}  #: bytes of an entry


@dataclass(frozen=True, kw_only=True)
class Cached(Attention):
    """A decode step from a KVCache; everybody but us reads the plain float32 arrays."""

    stored: str = "float32"

    operations = ("cached", "attention")  # type: ignore[assignment]

    @property
    def read(self) -> float:
        b, _, hkv, _, s, d = self.shape
        scales = 4 if self.stored == "int8" else 0
        return 2.0 * b * hkv * s * (STORAGE[self.stored] * d + scales)

    @property
    def tolerance(self) -> float:
        return {"float32": 1e-4, "float16": 1e-2}.get(self.stored, 5e-2)


@dataclass(frozen=True, kw_only=True)
class CacheUse(Case):
    """What a float32 cache does beside attention, in microseconds.

    "append" puts count keys behind those of every item, and every hundredth time takes all of them
    back, "fork" makes another cache, "reorder" lets each pair of items go on from one of the two.
    "attend" is one query of as many heads to all keys, "layer" the step of a layer of as many heads
    that appends a key by itself, projections and rotary embedding included.
    """

    shape: tuple[int, int, int, int]  #: (B, Hkv, S, D)
    use: str
    count: int = 0
    rivals = ()
    operations = ("use",)
    tolerance = 1e-6
    bound = None
    flop = read = moved = 0.0
    unit = "us"

    def arrays(self) -> Arrays:
        return {"kv": np.ones((*self.shape[:2], max(self.count, 4096), self.shape[3]), np.float32)}

    def exact(self, arrays: Arrays) -> np.ndarray:
        more = self.count if self.use in ("append", "layer") else 0
        return np.full(self.shape[0], float(self.shape[2] + more))

    def sample(self, outputs: Outputs) -> np.ndarray:
        """The lengths of the items."""
        return outputs[0].astype(np.float64)

    def tiny(self) -> CacheUse:
        b, hkv, s, d = self.shape
        return self.but(shape=(b, min(hkv, 2), min(s, 300), min(d, 8)), count=min(self.count, 5))
