"""The shapes that are measured, each a problem that somebody computes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    name: str
    b: int
    h: int
    hkv: int
    length: int
    s: int
    d: int
    causal: bool = False

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q (B, H, L, D), k and v (B, Hkv, S, D), the same in every process."""
        rng = np.random.default_rng(7)
        q = rng.standard_normal((self.b, self.h, self.length, self.d), np.float32)
        k = rng.standard_normal((self.b, self.hkv, self.s, self.d), np.float32)
        v = rng.standard_normal((self.b, self.hkv, self.s, self.d), np.float32)
        return q, k, v

    @property
    def decode(self) -> bool:
        """A decode step waits for memory: it is measured in bytes of K and V."""
        return self.length == 1

    @property
    def work(self) -> float:
        """Bytes of K and V, or additions and multiplications, half of them where causal."""
        if self.decode:
            return 8.0 * self.b * self.hkv * self.s * self.d
        return 4.0 * self.b * self.h * self.length * self.s * self.d / (2 if self.causal else 1)

    @property
    def unit(self) -> str:
        return "GB/s" if self.decode else "GF/s"

    def exact(self) -> np.ndarray:
        """The output in float64 for the first and the last query row of the last head."""
        q, k, v = (x[-1, -1].astype(np.float64) for x in self.arrays())
        rows = []
        for i in (0, self.length - 1):
            last = i + self.s - self.length + 1 if self.causal else self.s
            scores = k[:last] @ q[i] / math.sqrt(self.d)
            weights = np.exp(scores - scores.max())
            rows.append(weights @ v[:last] / weights.sum())
        return np.array(rows)


CASES = (
    Case("MiniLM, one sentence", 1, 12, 12, 128, 128, 32),
    Case("MiniLM, batch 32", 32, 12, 12, 128, 128, 32),
    Case("BERT, batch 8", 8, 12, 12, 512, 512, 64),
    Case("ViT", 1, 12, 12, 197, 197, 64),
    Case("encoder 2k", 1, 16, 16, 2048, 2048, 64),
    Case("causal 1k, GQA 4", 1, 32, 8, 1024, 1024, 128, True),
    Case("causal 4k", 1, 8, 8, 4096, 4096, 128, True),
    Case("cross", 1, 8, 8, 448, 1500, 64),
    Case("decode 4k, GQA 4", 1, 32, 8, 1, 4096, 128),
    Case("decode 32k, GQA 4", 1, 32, 8, 1, 32768, 128),
    Case("decode batch 16, 1k, GQA 4", 16, 32, 8, 1, 1024, 128),
    Case("decode 2k, no GQA", 1, 32, 32, 1, 2048, 128),
    Case("call overhead", 1, 1, 1, 4, 4, 8),
)
