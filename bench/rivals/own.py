"""qkv_ext itself."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import qkv_ext
from bench.caches import Cached, CacheUse
from bench.kinds import Arrays, Attention, Case, Product, Softmax
from bench.masks import Masked, block_size
from bench.rivals.base import Prepared, Rival
from bench.steps import FeedForward, LayerNorm, Merge, RMSNorm, Rotary
from bench.weights import Stored


class Own(Rival):
    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.line = f"qkv_ext {qkv_ext.__version__} {qkv_ext.backends()[-1]}"

    def _run(self, case: Case) -> dict[str, Any]:
        if case.backend is not None and case.backend not in qkv_ext.backends():
            raise ValueError(f"no backend {case.backend} here")
        return {"threads": case.threads or self.threads, "backend": case.backend}

    def attention(self, case: Attention, arrays: Arrays) -> Prepared:
        q, k, v = arrays["q"], arrays["k"], arrays["v"]
        options: dict[str, Any] = {} if case.overhead else self._run(case)
        if case.causal:
            options["causal"] = True
        if case.window:
            options["window"] = (case.window - 1, 0)
        if "mask" in arrays:
            options["mask"] = arrays["mask"]
        if case.scale is not None:
            options["scale"] = case.scale
        return Prepared(partial(qkv_ext.scaled_dot_product_attention, q, k, v, **options))

    def weights(self, case: Attention, arrays: Arrays) -> Prepared:
        call: Any = self.attention(case, arrays).call
        return Prepared(partial(call, return_weights=True), tuple)

    def segments(self, case: Masked, arrays: Arrays) -> Prepared:
        q, k, v = arrays["q"], arrays["k"], arrays["v"]
        options = {"kv_segments": arrays["segments"], **self._run(case)}
        return Prepared(partial(qkv_ext.scaled_dot_product_attention, q, k, v, **options))

    def varlen(self, case: Masked, arrays: Arrays) -> Prepared:
        q, k, v = (np.ascontiguousarray(arrays[x][0].swapaxes(0, 1)) for x in "qkv")
        starts = np.searchsorted(arrays["segments"][0], np.arange(arrays["segments"][0, -1] + 2))
        call = partial(qkv_ext.varlen_attention, q, k, v, starts, starts, **self._run(case))
        return Prepared(call, lambda result: (result.swapaxes(0, 1)[None],))

    def blocks(self, case: Masked, arrays: Arrays) -> Prepared:
        q, k, v = arrays["q"], arrays["k"], arrays["v"]
        mask = qkv_ext.BlockMask(arrays["blocks"], block_size(case.shape[4]))
        options = {"block_mask": mask, **self._run(case)}
        return Prepared(partial(qkv_ext.scaled_dot_product_attention, q, k, v, **options))

    def product(self, case: Product, arrays: Arrays) -> Prepared:
        return Prepared(partial(qkv_ext.matmul, arrays["x"], arrays["w"], **self._run(case)))

    def packed(self, case: Product, arrays: Arrays) -> Prepared:
        weight = qkv_ext.pack_weight(arrays["w"])
        call = partial(qkv_ext.linear_projection, arrays["x"], weight, **self._run(case))
        return Prepared(call)

    def stored(self, case: Stored, arrays: Arrays) -> Prepared:
        packed = [qkv_ext.pack_weight(arrays["w"], dtype=case.weight_dtype)]
        packed += [copy.copy(packed[0]) for _ in range(case.count - 1)]
        turns, x, run = itertools.cycle(packed), arrays["x"], self._run(case)
        return Prepared(lambda: qkv_ext.linear_projection(x, next(turns), **run))

    def up(self, case: FeedForward, arrays: Arrays) -> Prepared:
        call: Any = self.packed(case, arrays).call
        return Prepared(partial(call, activation="gelu"))

    def down(self, case: FeedForward, arrays: Arrays) -> Prepared:
        call: Any = self.packed(case, arrays).call
        return Prepared(partial(call, residual=arrays["residual"]))

    def layer_norm(self, case: LayerNorm, arrays: Arrays) -> Prepared:
        x, weight, bias = (arrays[name] for name in ("x", "weight", "bias"))
        out, run = np.empty_like(x), self._run(case)
        return Prepared(partial(qkv_ext.layer_norm, x, weight, bias, out=out, **run))

    def rms_norm(self, case: RMSNorm, arrays: Arrays) -> Prepared:
        x, weight = arrays["x"], arrays["weight"]
        out, run = np.empty_like(x), self._run(case)
        return Prepared(partial(qkv_ext.rms_norm, x, weight, out=out, **run))

    def softmax(self, case: Softmax, arrays: Arrays) -> Prepared:
        x: np.ndarray = arrays["x"]
        return Prepared(partial(qkv_ext.softmax, x, **self._run(case)))

    def cached(self, case: Cached, arrays: Arrays) -> Prepared:
        cache = _filled(case.shape[0], arrays["k"], arrays["v"], case.stored, case.shape[4])
        return Prepared(partial(cache.attend, arrays["q"], **self._run(case)))

    def rotary(self, case: Rotary, arrays: Arrays) -> Prepared:
        x, *tables = (arrays[name] for name in ("x", "cos", "sin"))
        if case.overhead:
            return Prepared(partial(qkv_ext.apply_rotary, x, *tables))
        out = np.empty_like(x)
        return Prepared(partial(qkv_ext.apply_rotary, x, *tables, out=out, **self._run(case)))

    def merge(self, case: Merge, arrays: Arrays) -> Prepared:
        parts: Any = [list(arrays[name]) for name in ("outputs", "lses")]
        options: dict[str, Any] = {} if case.overhead else self._run(case)
        return Prepared(partial(qkv_ext.merge_attention, *parts, **options), tuple)

    def use(self, case: CacheUse, arrays: Arrays) -> Prepared:
        kv = arrays["kv"]
        cache = _filled(case.shape[0], kv, kv, "float32", case.shape[2])
        more = kv[:, :, : case.count]
        step = _step(case, cache, self.threads) if case.use == "layer" else None
        query = kv[:, :, :1]
        pairs = [n // 2 * 2 for n in range(case.shape[0])]
        times = max(1, min(100, 4096 // max(case.count, 1)))
        turns = itertools.cycle(range(times))

        def call() -> qkv_ext.KVCache:
            if case.use == "fork":
                return cache.fork()
            if case.use == "reorder":
                cache.reorder(pairs)
            elif case.use == "attend":
                cache.attend(query)
            else:
                if next(turns) == 0:
                    cache.truncate(case.shape[2])
                if step is None:
                    cache.append(more, more)
                else:
                    step()
            return cache

        return Prepared(call, lambda result: (result.lengths,))


def _step(case: CacheUse, cache: qkv_ext.KVCache, threads: int) -> Callable[[], Any]:
    """One token through a layer of random weights, with its rotary embedding."""
    batch, heads, s, d = case.shape
    rng = np.random.default_rng(7)
    weights = rng.standard_normal((4, heads * d, heads * d), np.float32)
    layer = qkv_ext.MultiHeadAttention(*weights, num_heads=heads)
    x = rng.standard_normal((batch, 1, heads * d), np.float32)
    rotary = qkv_ext.rotary_tables(s + 4096, d)
    return partial(layer, x, cache=cache, rotary=rotary, threads=threads)


def _filled(batch: int, k: np.ndarray, v: np.ndarray, stored: str, length: int) -> qkv_ext.KVCache:
    """A cache of that many keys, taken from k and v again and again."""
    cache = qkv_ext.KVCache(batch, k.shape[1], k.shape[3], dtype=stored)
    for start in range(0, length, 4096):
        at = start % k.shape[2]
        part = slice(at, at + min(4096, length - start))
        cache.append(k[:, :, part], v[:, :, part])
    return cache
