"""torch on its CPU: scaled_dot_product_attention, linear, softmax, gelu, norms."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.kinds import Arrays, Attention, Outputs, Product, Softmax
from bench.rivals.base import Prepared, Rival, allowed, fold, grouped
from bench.steps import FeedForward, LayerNorm, RMSNorm


def tensor(x: np.ndarray) -> Any:
    if x.dtype.name == "bfloat16":  # a type that torch.from_numpy does not know
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(result: Any) -> Outputs:
    results = result if isinstance(result, tuple) else (result,)
    return tuple(x.float().numpy() for x in results)


class Torch(Rival):
    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        torch.set_num_threads(threads)
        torch.inference_mode().__enter__()  # once, for it takes 1 us of each call otherwise
        self.line = f"torch {torch.__version__}"

    def attention(self, case: Attention, arrays: Arrays) -> Prepared:
        options: dict[str, Any] = {}
        q, k, v = (tensor(x) for x in (arrays["q"], arrays["k"], arrays["v"]))
        if case.window:  # there is no option for it: a mask, made once, added as it is
            keep = torch.from_numpy(allowed(case))
            options["attn_mask"] = torch.zeros(keep.shape).masked_fill_(~keep, -math.inf)
        elif case.causal:
            options["is_causal"] = True
        if "mask" in arrays:
            options["attn_mask"] = tensor(arrays["mask"])
        if case.scale is not None:
            options["scale"] = case.scale
        sdpa = torch.nn.functional.scaled_dot_product_attention
        if case.fold:
            rows = tensor(fold(case, arrays["q"]))
            shape = arrays["q"].shape
            return Prepared(partial(sdpa, rows, k, v), lambda x: to_numpy(x.reshape(shape)))
        if grouped(case):
            options["enable_gqa"] = True
        return Prepared(partial(sdpa, q, k, v, **options), to_numpy)

    def weights(self, case: Attention, arrays: Arrays) -> Prepared:
        """The call above has no weights to give: matmul, softmax, matmul."""
        q, k, v = (tensor(x) for x in (arrays["q"], arrays["k"], arrays["v"]))
        scale = 1 / math.sqrt(case.shape[-1])

        def call() -> Any:
            weights = torch.softmax((q * scale) @ k.mT, -1)
            return weights @ v, weights

        return Prepared(call, to_numpy)

    def product(self, case: Product, arrays: Arrays) -> Prepared:
        """linear, with the weight (N, K) that it wants."""
        x, w = tensor(arrays["x"]), tensor(np.ascontiguousarray(arrays["w"].T))
        return Prepared(partial(torch.nn.functional.linear, x, w), to_numpy)

    def up(self, case: FeedForward, arrays: Arrays) -> Prepared:
        product: Any = self.product(case, arrays).call
        return Prepared(lambda: torch.nn.functional.gelu(product()), to_numpy)

    def down(self, case: FeedForward, arrays: Arrays) -> Prepared:
        product: Any = self.product(case, arrays).call
        residual = tensor(arrays["residual"])
        return Prepared(lambda: product().add_(residual), to_numpy)

    def layer_norm(self, case: LayerNorm, arrays: Arrays) -> Prepared:
        x, weight, bias = (tensor(arrays[name]) for name in ("x", "weight", "bias"))
        norm = torch.nn.functional.layer_norm
        return Prepared(partial(norm, x, weight.shape, weight, bias), to_numpy)

    def rms_norm(self, case: RMSNorm, arrays: Arrays) -> Prepared:
        x, weight = tensor(arrays["x"]), tensor(arrays["weight"])
        norm = torch.nn.functional.rms_norm
        return Prepared(partial(norm, x, weight.shape, weight, 1e-6), to_numpy)

    def softmax(self, case: Softmax, arrays: Arrays) -> Prepared:
        return Prepared(partial(torch.softmax, tensor(arrays["x"]), -1), to_numpy)
