"""JAX's dot_product_attention on its CPU, compiled before it is timed.

XLA has no setting for threads: it takes one per CPU that the process may use, so the process is
held on as many CPUs as there are threads.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from bench.kinds import Arrays, Attention, Outputs, Skip
from bench.rivals.base import Prepared, Rival, room_for_scores


class Jax(Rival):
    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        held = ""
        if hasattr(os, "sched_setaffinity"):
            there = sorted(os.sched_getaffinity(0))
            if threads < len(there):
                os.sched_setaffinity(0, there[:threads])
                held = f" held on {threads} CPUs"
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax

        self.jax = jax
        self.line = f"JAX {jax.__version__} dot_product_attention{held}"

    def attention(self, case: Attention, arrays: Arrays) -> Prepared:
        room_for_scores(case, 2)
        if case.window:
            raise Skip("needs minutes for a window")
        jax = self.jax
        inputs = [
            jax.device_put(np.ascontiguousarray(arrays[x].swapaxes(1, 2))) for x in "qkv"
        ]  # (B, L, H, D)
        if case.mask:
            inputs.append(jax.device_put(arrays["mask"]))

        def formula(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
            return jax.nn.dot_product_attention(
                q, k, v, bias, scale=case.scale, is_causal=case.causal
            )

        compiled = jax.jit(formula).lower(*inputs).compile()

        def call() -> Any:
            return compiled(*inputs).block_until_ready()

        def unpack(result: Any) -> Outputs:
            return (np.asarray(result).swapaxes(1, 2),)

        return Prepared(call, unpack)
