"""The kinds of case: what is computed on which arrays, how much work it is, and the exact answer.

A kind is a subclass of Case with a handful of members (below).  Its ``operations`` are method names
that a rival is searched for, the first that it has being taken: a product with packed weights looks
for ``packed`` and is content with ``product``.  The kinds of a KV cache are in caches.py, that of
masks (L, S) in masks.py, weights of 16 bits in weights.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np

Arrays = dict[str, np.ndarray]
Outputs = tuple[np.ndarray, ...]


class Skip(Exception):
    """A rival cannot do a case; the message says why."""


class Beside(NamedTuple):
    """Another call that takes turns in the rounds of a case, to be compared with ours."""

    label: str
    case: Case
    rival: str = "qkv_ext"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What every kind has.  Sizes, options and the members that raise are the kind's own."""

    name: str
    sets: tuple[str, ...] = ()
    quick: bool = False  #: a row of --quick
    rivals: tuple[str, ...] | None = None  #: None is all of them
    beside: tuple[Beside, ...] = ()
    most_rounds: int = 99  #: for calls that take many seconds
    memory: bool = False  #: also measure the peak working memory
    threads: int | None = None  #: of our own call, where not those of the run
    backend: str | None = None  #: of our own call, where not the default

    operations = ("",)

    def arrays(self) -> Arrays:
        """The inputs by name, the same in every process."""
        raise NotImplementedError

    def exact(self, arrays: Arrays) -> np.ndarray:
        """The answer in float64 on a sample of the output."""
        raise NotImplementedError

    def sample(self, outputs: Outputs) -> np.ndarray:
        """The same sample of what a rival computed."""
        raise NotImplementedError

    def tiny(self) -> Case:
        """The same call at sizes that take no time."""
        raise NotImplementedError

    @property
    def tolerance(self) -> float:
        """What tells a wrong answer from rounding, as a share of the largest number."""
        raise NotImplementedError

    @property
    def bound(self) -> Literal["fma", "read"] | None:
        """The limit of the machine that the case is measured against."""
        raise NotImplementedError

    @property
    def flop(self) -> float:
        """Additions and multiplications of the products."""
        raise NotImplementedError

    @property
    def read(self) -> float:
        """Bytes of what a case bound by memory waits for."""
        raise NotImplementedError

    @property
    def moved(self) -> float:
        """Bytes of all inputs and outputs, each once."""
        raise NotImplementedError

    @property
    def unit(self) -> str:
        return {"fma": "GF/s", "read": "GB/s"}[self.bound or "read"]

    @property
    def work(self) -> float:
        return self.flop if self.unit == "GF/s" else self.read

    def but(self, **changes: Any) -> Self:
        """The same case with some fields changed, and nothing beside it."""
        return replace(self, **{"beside": (), **changes})


def number_type(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise Skip("ml_dtypes is not installed") from None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class Attention(Case):
    """softmax(scale Q Kᵀ + mask) V with q (B, H, L, D), k and v (B, Hkv, S, D)."""

    shape: tuple[int, int, int, int, int, int]  #: (B, H, Hkv, L, S, D)
    causal: bool = False
    window: int | None = None  #: how many keys a query sees, itself included; with causal
    mask: bool = False  #: a float mask (B, 1, 1, S)
    weights: bool = False  #: return the weights too
    scale: float | None = None
    dtype: str = "float32"
    overhead: bool = False  #: the call itself is what takes the time
    fold: bool = False  #: the heads of a group go to the rival as rows of one head

    @property
    def operations(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("weights",) if self.weights else ("attention",)

    def arrays(self) -> Arrays:
        b, h, hkv, length, s, d = self.shape
        rng, dtype = np.random.default_rng(7), number_type(self.dtype)
        sizes = {"q": (b, h, length, d), "k": (b, hkv, s, d), "v": (b, hkv, s, d)}
        if self.mask:
            sizes["mask"] = (b, 1, 1, s)
        return {
            name: rng.standard_normal(size, np.float32).astype(dtype, copy=False)
            for name, size in sizes.items()
        }

    def _rows(self) -> list[int]:
        length = self.shape[3]
        return sorted({0, length // 3, length - 1})

    def exact(self, arrays: Arrays) -> np.ndarray:
        b, h, hkv, length, s, d = self.shape
        scale = 1 / math.sqrt(d) if self.scale is None else self.scale
        answer = []
        for item, head in ((0, 0), (b - 1, h - 1)):
            q = arrays["q"][item, head].astype(np.float64)
            k, v = (arrays[x][item, head // (h // hkv)].astype(np.float64) for x in "kv")
            for i in self._rows():
                last = i + s - length if self.causal else s - 1  # the last key that is seen
                first = max(0, last - self.window + 1) if self.window else 0
                scores = np.full(s, -np.inf)
                scores[first : last + 1] = k[first : last + 1] @ (q[i] * scale)
                scores += self.added(arrays, item, i)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                parts = [weights @ v, weights] if self.weights else [weights @ v]
                answer.append(np.concatenate(parts))
        return np.array(answer)

    def added(self, arrays: Arrays, item: int, i: int) -> np.ndarray | float:
        """What the mask adds to the scores of query i of an item."""
        return arrays["mask"][item, 0, 0] if self.mask else 0.0

    def sample(self, outputs: Outputs) -> np.ndarray:
        ends = ((0, 0), (self.shape[0] - 1, self.shape[1] - 1))
        parts = [np.concatenate([x[e][self._rows()] for e in ends]) for x in outputs]
        return np.concatenate(parts, axis=-1).astype(np.float64)

    def tiny(self) -> Attention:
        b, h, hkv, length, s, d = self.shape
        few = min(length, 6)
        heads = (2 * h // hkv, 2) if hkv > 1 else (h, hkv)
        shape = (min(b, 2), *heads, few, few if length == s else min(s, 9), min(d, 8))
        window = None if self.window is None else 3
        return self.but(shape=shape, window=window)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def bound(self) -> Literal["fma", "read"] | None:
        if self.overhead:
            return None
        return "read" if self.shape[3] == 1 else "fma"  # a decode step waits for memory

    @property
    def unit(self) -> str:
        return "us" if self.overhead else super().unit

    @property
    def flop(self) -> float:
        """Half of the full square where causal; inside the window only, where there is one."""
        b, h, _, length, s, d = self.shape
        pairs = length * s / (2 if self.causal else 1)
        if self.window:
            pairs = sum(min(i + 1, self.window) for i in range(length))
        return 4.0 * b * h * pairs * d

    @property
    def _item(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def read(self) -> float:
        b, _, hkv, _, s, d = self.shape
        return 2.0 * self._item * b * hkv * s * d

    @property
    def moved(self) -> float:
        b, h, _, length, s, d = self.shape
        weights = b * h * length * s if self.weights else 0
        return self.read + self._item * (2.0 * b * h * length * d + weights)


@dataclass(frozen=True, kw_only=True)
class Product(Case):
    """X W with x (M, K) and w (K, N): a projection, its weight packed before or not."""

    shape: tuple[int, int, int]  #: (M, K, N)
    packed: bool = False
    tolerance = 1e-4

    @property
    def operations(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("packed", "product") if self.packed else ("product",)

    def arrays(self) -> Arrays:
        m, k, n = self.shape
        rng = np.random.default_rng(7)
        return {
            "x": rng.standard_normal((m, k), np.float32),
            "w": rng.standard_normal((k, n), np.float32),
        }

    def _part(self) -> tuple[list[int], slice]:
        m, _, n = self.shape
        return sorted({0, m // 2, m - 1}), slice(None, None, max(1, n // 64))

    def exact(self, arrays: Arrays) -> np.ndarray:
        rows, columns = self._part()
        x = arrays["x"][rows].astype(np.float64)
        answer: np.ndarray = x @ arrays["w"][:, columns].astype(np.float64)
        return answer

    def sample(self, outputs: Outputs) -> np.ndarray:
        rows, columns = self._part()
        return np.asarray(outputs[0][rows, columns], np.float64)

    def tiny(self) -> Product:
        m, k, n = self.shape
        return self.but(shape=(min(m, 5), min(k, 19), min(n, 7)))

    @property
    def bound(self) -> Literal["fma", "read"] | None:
        return "read" if self.shape[0] == 1 else "fma"  # one row waits for the weight

    @property
    def flop(self) -> float:
        return 2.0 * math.prod(self.shape)

    @property
    def read(self) -> float:
        return 4.0 * self.shape[1] * self.shape[2]

    @property
    def moved(self) -> float:
        m, k, n = self.shape
        return 4.0 * (m * k + k * n + m * n)


@dataclass(frozen=True, kw_only=True)
class Softmax(Case):
    """The softmax of each row of x (rows, columns); measured in bytes read and written."""

    shape: tuple[int, int]
    tolerance = 1e-4
    operations = ("softmax",)
    bound = None
    flop = 0.0

    def arrays(self) -> Arrays:
        return {"x": np.random.default_rng(7).standard_normal(self.shape, np.float32)}

    def exact(self, arrays: Arrays) -> np.ndarray:
        x = np.exp(arrays["x"][[0, -1]].astype(np.float64))
        answer: np.ndarray = x / x.sum(axis=-1, keepdims=True)
        return answer

    def sample(self, outputs: Outputs) -> np.ndarray:
        return outputs[0][[0, -1]].astype(np.float64)

    def tiny(self) -> Softmax:
        return self.but(shape=(3, min(self.shape[1], 130)))

    @property
    def read(self) -> float:
        return self.moved

    @property
    def moved(self) -> float:
        return 8.0 * math.prod(self.shape)
