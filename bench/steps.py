"""The kinds of case beside attention that a layer is made of: rotary embedding, merging, norms, and
the halves of a feed-forward layer.

Large ones are measured in bytes read and written, each once; as fast as that can be is np.copyto of
as many bytes on as many threads, which takes its turns beside them (``copy``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bench.kinds import Arrays, Case, Outputs, Product


@dataclass(frozen=True, kw_only=True)
class Moving(Case):
    """What has ``kind``, the name of its operation, and is measured by the bytes that it moves."""

    overhead: bool = False  #: the call itself is what takes the time
    copy: bool = False  #: copy as many bytes instead
    kind = ""
    tolerance = 1e-4
    bound = None
    flop = 0.0

    @property
    def operations(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("copy",) if self.copy else (self.kind,)

    def arrays(self) -> Arrays:
        if not self.copy:
            return self.inputs()
        return {"x": np.random.default_rng(7).standard_normal(int(self.moved) // 8, np.float32)}

    def exact(self, arrays: Arrays) -> np.ndarray:
        return self.sample((arrays["x"],)) if self.copy else self.formula(arrays)

    def sample(self, outputs: Outputs) -> np.ndarray:
        """Some rows of the first head, or of what is copied."""
        x = outputs[0] if self.copy else outputs[0][0, 0]
        return x[:: max(1, len(x) // 3)].astype(np.float64)

    def inputs(self) -> Arrays:
        raise NotImplementedError

    def formula(self, arrays: Arrays) -> np.ndarray:
        raise NotImplementedError

    @property
    def read(self) -> float:
        return self.moved

    @property
    def unit(self) -> str:
        return "us" if self.overhead else "GB/s"


@dataclass(frozen=True, kw_only=True)
class Rotary(Moving):
    """x (B, H, L, D) turned, half by half, by tables (L, D / 2), which is read once too."""

    shape: tuple[int, int, int, int]
    kind = "rotary"

    def inputs(self) -> Arrays:
        *_, length, d = self.shape
        angles = np.outer(np.arange(length), 1e4 ** (-2 / d * np.arange(d // 2)))
        return {
            "x": np.random.default_rng(7).standard_normal(self.shape, np.float32),
            "cos": np.cos(angles).astype(np.float32),
            "sin": np.sin(angles).astype(np.float32),
        }

    def formula(self, arrays: Arrays) -> np.ndarray:
        x, cos, sin = (arrays[name].astype(np.float64) for name in ("x", "cos", "sin"))
        a, b = np.split(x[:1, :1], 2, axis=-1)
        return self.sample((np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1),))

    def tiny(self) -> Rotary:
        b, h, length, d = self.shape
        return self.but(shape=(b, min(h, 2), min(length, 5), min(d, 12)))

    @property
    def moved(self) -> float:
        return 4.0 * (2 * math.prod(self.shape) + self.shape[2] * self.shape[3])


@dataclass(frozen=True, kw_only=True)
class Merge(Moving):
    """Outputs (N, B, H, L, D) and lses (N, B, H, L) of N parts into one."""

    shape: tuple[int, int, int, int, int]
    kind = "merge"

    def inputs(self) -> Arrays:
        rng = np.random.default_rng(7)
        return {
            "outputs": rng.standard_normal(self.shape, np.float32),
            "lses": rng.standard_normal(self.shape[:-1], np.float32),
        }

    def formula(self, arrays: Arrays) -> np.ndarray:
        weights = np.exp(arrays["lses"][:, :1, :1].astype(np.float64))
        weights /= weights.sum(axis=0)
        return self.sample(((weights[..., None] * arrays["outputs"][:, :1, :1]).sum(axis=0),))

    def tiny(self) -> Merge:
        n, b, h, length, d = self.shape
        return self.but(shape=(n, b, min(h, 2), min(length, 5), min(d, 12)))

    @property
    def moved(self) -> float:
        n, *rest = self.shape
        return 4.0 * (n + 1) * (math.prod(rest) + math.prod(rest[:-1]))


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Moving):
    """The layer norm of each row of x (rows, n)."""

    shape: tuple[int, int]
    kind = "layer_norm"

    def inputs(self) -> Arrays:
        rng = np.random.default_rng(7)
        vectors = {name: rng.standard_normal(self.shape[1:], np.float32) for name in self.vectors}
        return {"x": rng.standard_normal(self.shape, np.float32) + np.float32(0.5), **vectors}

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("weight", "bias")

    def formula(self, arrays: Arrays) -> np.ndarray:
        x, weight, bias = (arrays[name].astype(np.float64) for name in ("x", "weight", "bias"))
        x = self.sample((x,))
        x -= x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight + bias

    def sample(self, outputs: Outputs) -> np.ndarray:
        x = outputs[0]  # or what is copied
        return x[:: max(1, len(x) // 3)].astype(np.float64)

    def tiny(self) -> LayerNorm:
        return self.but(shape=(3, min(self.shape[1], 130)))

    @property
    def moved(self) -> float:
        rows, n = self.shape
        return 4.0 * (2 * rows + len(self.vectors)) * n


@dataclass(frozen=True, kw_only=True)
class RMSNorm(LayerNorm):
    """The root mean square norm of each row of x (rows, n)."""

    kind = "rms_norm"

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("weight",)

    def formula(self, arrays: Arrays) -> np.ndarray:
        x, weight = self.sample((arrays["x"],)), arrays["weight"].astype(np.float64)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


@dataclass(frozen=True, kw_only=True)
class FeedForward(Product):
    """gelu(X W), or X W + residual (M, N): the halves of a feed-forward layer, W packed before."""

    residual: bool = False

    @property
    def operations(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("down",) if self.residual else ("up",)

    def arrays(self) -> Arrays:
        m, _, n = self.shape
        more = {"residual": np.random.default_rng(8).standard_normal((m, n), np.float32)}
        return {**super().arrays(), **(more if self.residual else {})}

    def exact(self, arrays: Arrays) -> np.ndarray:
        answer = super().exact(arrays)
        if self.residual:
            return answer + self.sample((arrays["residual"],))
        erf = np.vectorize(math.erf, otypes=[np.float64])
        return answer * 0.5 * (1 + erf(answer / math.sqrt(2)))

    @property
    def moved(self) -> float:
        m, _, n = self.shape
        return super().moved + (4.0 * m * n if self.residual else 0)
