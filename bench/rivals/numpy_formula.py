"""The plain formula as a NumPy user writes it, the heads of a group on an axis of their own."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np

from bench.kinds import Arrays, Attention, Product, Softmax
from bench.rivals.base import Prepared, Rival, allowed, room_for_scores
from bench.steps import FeedForward, LayerNorm, Merge, RMSNorm, Rotary
from bench.weights import Stored


def rows_softmax(scores: np.ndarray) -> np.ndarray:
    """In place."""
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores


def out_of_place(x: np.ndarray) -> np.ndarray:
    terms: np.ndarray = np.exp(x - x.max(-1, keepdims=True))
    terms /= terms.sum(-1, keepdims=True)
    return terms


def formula(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: np.float32,
    mask: np.ndarray | None,
    keep: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    b, h, length, d = q.shape
    hkv, s = k.shape[1:3]
    scores = (q * scale).reshape(b, hkv, h // hkv, length, d) @ k[:, :, None].swapaxes(-1, -2)
    if mask is not None:
        scores += np.expand_dims(mask, -3)
    if keep is not None:
        scores = np.where(keep, scores, np.float32(-np.inf))
    weights = rows_softmax(scores)
    return (weights @ v[:, :, None]).reshape(q.shape), weights.reshape(b, h, length, s)


class NumPyFormula(Rival):
    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.line = f"NumPy {np.__version__} {blas()}"

    def weights(self, case: Attention, arrays: Arrays) -> Prepared:
        mask, keep = arrays.get("mask"), allowed(case)
        if mask is not None and mask.dtype == bool:
            mask, keep = None, mask
        room_for_scores(case, 1 if keep is None else 2)
        scale = np.float32(1 / math.sqrt(case.shape[-1]) if case.scale is None else case.scale)
        q, k, v = arrays["q"], arrays["k"], arrays["v"]
        return Prepared(partial(formula, q, k, v, scale, mask, keep), tuple)

    def attention(self, case: Attention, arrays: Arrays) -> Prepared:
        return Prepared(self.weights(case, arrays).call, lambda result: result[:1])

    def product(self, case: Product, arrays: Arrays) -> Prepared:
        return Prepared(partial(np.matmul, arrays["x"], arrays["w"]))

    def stored(self, case: Stored, arrays: Arrays) -> Prepared:
        """In float32, which is all that its BLAS has."""
        count = case.but(weight_dtype="float32").count
        turns = itertools.cycle([arrays["w"].copy() for _ in range(count)])
        return Prepared(lambda: np.matmul(arrays["x"], next(turns)))

    def rotary(self, case: Rotary, arrays: Arrays) -> Prepared:
        x, cos, sin = (arrays[name] for name in ("x", "cos", "sin"))
        a, b = np.split(x, 2, axis=-1)

        def call() -> np.ndarray:
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        return Prepared(call)

    def merge(self, case: Merge, arrays: Arrays) -> Prepared:
        outputs, lses = arrays["outputs"], arrays["lses"]

        def call() -> tuple[np.ndarray, np.ndarray]:
            lse = np.logaddexp.reduce(lses)
            return (np.exp(lses - lse)[..., None] * outputs).sum(axis=0), lse

        return Prepared(call, tuple)

    def up(self, case: FeedForward, arrays: Arrays) -> Prepared:
        """NumPy has no erf: gelu by tanh, off by less than 5e-4."""
        x, w = arrays["x"], arrays["w"]
        root = np.float32(math.sqrt(2 / math.pi))

        def call() -> np.ndarray:
            y = x @ w
            t = np.tanh(root * (y + np.float32(0.044715) * (y * y * y)))
            return np.float32(0.5) * y * (1 + t)

        return Prepared(call)

    def down(self, case: FeedForward, arrays: Arrays) -> Prepared:
        x, w, residual = (arrays[name] for name in ("x", "w", "residual"))

        def call() -> np.ndarray:
            y = x @ w
            y += residual
            return y

        return Prepared(call)

    def layer_norm(self, case: LayerNorm, arrays: Arrays) -> Prepared:
        x, weight, bias = (arrays[name] for name in ("x", "weight", "bias"))

        def call() -> np.ndarray:
            y = x - x.mean(-1, keepdims=True)
            y /= np.sqrt(np.square(y).mean(-1, keepdims=True) + np.float32(1e-5))
            y *= weight
            y += bias
            return y

        return Prepared(call)

    def rms_norm(self, case: RMSNorm, arrays: Arrays) -> Prepared:
        x, weight = arrays["x"], arrays["weight"]

        def call() -> np.ndarray:
            y = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(1e-6))
            y *= weight
            return y

        return Prepared(call)

    def softmax(self, case: Softmax, arrays: Arrays) -> Prepared:
        return Prepared(partial(out_of_place, arrays["x"]))


def blas() -> str:
    """The library of NumPy's products and the kernel that it chose."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "(kernel unknown: threadpoolctl is not installed)"
    return " ".join(
        f"{lib['internal_api']} {lib.get('version')} {lib.get('architecture')}"
        for lib in threadpool_info()
        if lib["user_api"] == "blas"
    )
