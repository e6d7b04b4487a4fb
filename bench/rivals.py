"""Who is measured: each rival is a function that makes a call, or says why it cannot.

A rival gets the arrays and the number of threads and returns a function without arguments that
computes the output as an array or tensor (B, H, L, D), and a line that says what runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.cases import Case

Call = Callable[[], Any]


def qkv_ext(case: Case, threads: int, backend: str | None = None) -> tuple[Call, str]:
    import qkv_ext

    q, k, v = case.arrays()
    sdpa = qkv_ext.scaled_dot_product_attention
    line = f"qkv_ext {qkv_ext.__version__} {backend or qkv_ext.backends()[-1]}"
    return lambda: sdpa(q, k, v, causal=case.causal, threads=threads, backend=backend), line


def numpy(case: Case, threads: int) -> tuple[Call, str]:
    """The plain formula as a NumPy user writes it, heads of a group on an axis of their own."""
    q, k, v = case.arrays()
    group = case.h // case.hkv
    shape = (case.b, case.hkv, group, case.length, case.d)
    scale = np.float32(1 / math.sqrt(case.d))
    keep = np.tri(case.length, case.s, case.s - case.length, bool) if case.causal else None

    def call() -> np.ndarray:
        scores = (q * scale).reshape(shape) @ k[:, :, None].swapaxes(-1, -2)
        if keep is not None:
            scores = np.where(keep, scores, np.float32(-np.inf))
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return (scores @ v[:, :, None]).reshape(q.shape)

    return call, f"NumPy {np.__version__} {_blas()}"


def _blas() -> str:
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "(kernel unknown: threadpoolctl is not installed)"
    return " ".join(f"{lib['internal_api']} {lib.get('architecture')}" for lib in threadpool_info())


def torch(case: Case, threads: int) -> tuple[Call, str]:
    import torch

    torch.set_num_threads(threads)
    q, k, v = (torch.from_numpy(x) for x in case.arrays())
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call() -> Any:
        with torch.inference_mode():
            return sdpa(q, k, v, is_causal=case.causal, enable_gqa=case.h != case.hkv)

    return call, f"torch {torch.__version__}"


RIVALS: dict[str, Callable[[Case, int], tuple[Call, str]]] = {
    "qkv_ext": qkv_ext,
    "NumPy": numpy,
    "torch": torch,
}
