"""A layer's call through a KVCache: project, turn, append, attend, and project by W_O."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv_ext import _check_cache, _layers
from qkv_ext._arrays import Array
from qkv_ext._layers import Projections, Rotary
from qkv_ext.attention import Options
from qkv_ext.cache import KVCache
from qkv_ext.projected import project, together
from qkv_ext.rotary import apply_rotary


def attend(
    layer: Projections,
    x: Any,
    cache: Any,
    return_weights: bool | np.bool_,
    return_lse: bool | np.bool_,
    options: Options,
    rotary: Rotary | None,
) -> Any:
    """Append the keys and values of x, and attend to all that are there.

    One step for the threads that share the cache; if it fails the cache is as it was.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; expected a KVCache")
    with cache._turn():
        store = cache._store
        x, counts = _layers.cached_call(x, cache, layer, options)
        before, n = store.lengths, x.shape[-2]
        s = max((there + count for there, count in zip(before, counts, strict=True)), default=0)
        there = (*x.shape[:-2], cache.num_kv_heads, s, cache.v_dim)
        values = np.broadcast_to(np.zeros((), x.dtype), there)
        out, rest = _layers.projected_call(x, values, values, layer, dict(options), "x")
        q, k, v = (project(layer, part, x, options) for part in "qkv")
        single = x.ndim == 2
        if single:
            q, k, v = q[None], k[None], v[None]
        if rotary is not None:
            q, k = _turned(q, k, before, counts, rotary, rest)
        try:
            store.append(*_check_cache.appended(store, k, v, counts))
            heads = np.empty((cache.batch, n, layer.num_heads, cache.v_dim), q.dtype)
            rest |= {"return_weights": return_weights, "return_lse": return_lse}
            extras: Any = cache._attend(q, out=heads.swapaxes(1, 2), **rest)
            output = together(layer, heads[0] if single else heads, out, options)
        except BaseException:
            store.truncate(before)
            raise
    if not isinstance(extras, tuple):
        return output
    return (output, *(extra[0] if single else extra for extra in extras[1:]))


def _turned(
    q: Array,
    k: Array,
    before: list[int],
    counts: list[int],
    rotary: Rotary,
    options: dict[str, Any],
) -> tuple[Array, Array]:
    """Q and the new keys turned by the angles of their positions."""
    rows = len(rotary.cos)
    at_q, at_k = _layers.cached_positions(q.shape[-2], before, counts, rows, options)
    how: dict[str, Any] = {"interleaved": rotary.interleaved, "rotary_dim": rotary.rotary_dim}
    how |= {name: options.get(name) for name in ("threads", "backend")}
    return (
        apply_rotary(q, rotary.cos, rotary.sin, positions=at_q, **how),
        apply_rotary(k, rotary.cos, rotary.sin, positions=at_k, **how),
    )
