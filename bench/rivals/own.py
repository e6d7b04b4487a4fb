"""qkv_ext itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import qkv_ext
from bench.kinds import Arrays, Attention, Case, Product, Softmax
from bench.rivals.base import Prepared, Rival


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
        if case.mask:
            options["mask"] = arrays["mask"]
        if case.scale is not None:
            options["scale"] = case.scale
        return Prepared(partial(qkv_ext.scaled_dot_product_attention, q, k, v, **options))

    def weights(self, case: Attention, arrays: Arrays) -> Prepared:
        call: Any = self.attention(case, arrays).call
        return Prepared(partial(call, return_weights=True), tuple)

    def product(self, case: Product, arrays: Arrays) -> Prepared:
        return Prepared(partial(qkv_ext.matmul, arrays["x"], arrays["w"], **self._run(case)))

    def packed(self, case: Product, arrays: Arrays) -> Prepared:
        weight = qkv_ext.pack_weight(arrays["w"])
        call = partial(qkv_ext.linear_projection, arrays["x"], weight, **self._run(case))
        return Prepared(call)

    def softmax(self, case: Softmax, arrays: Arrays) -> Prepared:
        x: np.ndarray = arrays["x"]
        return Prepared(partial(qkv_ext.softmax, x, **self._run(case)))
