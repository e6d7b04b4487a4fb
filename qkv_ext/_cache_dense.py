"""A KVCache for compiled backends that do not read pages: its keys and values as plain arrays."""

from __future__ import annotations

import numpy as np

from qkv_ext._arrays import FLOAT32, converted
from qkv_ext._backends import Backend
from qkv_ext._check import Problem
from qkv_ext._store import Pages


def attention(backend: Backend, problem: Problem, pages: Pages) -> None:
    """Write problem.out, and weights and lse where the problem has them."""
    k, v = np.zeros(problem.k.shape, np.float32), np.zeros(problem.v.shape, np.float32)
    for item, length in enumerate(pages.lengths.tolist()):
        k[item, :, :length] = pages.keys(item, length)
        v[item, :, :length] = pages.values(item, length)
    q, out = problem.q, problem.out
    if q.dtype != FLOAT32:
        q, out = converted(q, FLOAT32), np.empty(out.shape, np.float32)
    backend.attention(problem._replace(q=q, k=k, v=v, out=out, pages=None), backend.isa)
    if out is not problem.out:
        with np.errstate(all="ignore"):
            problem.out[...] = out
