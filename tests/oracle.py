"""The oracle: attention as the textbook has it, in float64, independent of the library.

    output = softmax(cap(scale Q Kᵀ) - slope |distance| + mask, over the allowed keys) V

q (..., H, L, D), k (..., Hkv, S, D) and v (..., Hkv, S, Dv) have equal ranks, and heads at axis -3
from rank 4 on.  Excluded keys are selected, never added; a row without keys is zeros.  Given
another dtype and other ways to multiply and to add up, it is the plain formula of tolerance.py;
fused divides after the product with V, and rounds the product of ALiBi with the sum, once.
"""

import numpy as np


def attention(q, k, v, *, mask=None, causal=False, align="bottom-right", scale=None, window=None,
              softcap=None, alibi_slopes=None, sinks=None, kv_lengths=None, q_lengths=None,
              block_mask=None, q_segments=None, kv_segments=None, query_offset=None, key_offset=0,
              layout="bhld", dtype=np.float64, matmul=np.matmul, add_up=lambda x: x.sum(axis=-1),
              fused=False):  # fmt: skip
    """(output (..., H, L, Dv), weights (..., H, L, S), lse (..., H, L)), all of them in dtype."""
    wide = np.float64 if fused else dtype
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    if layout == "blhd":
        q, k, v = (x.swapaxes(-3, -2) for x in (q, k, v))
    rank, (length, d), s = q.ndim, q.shape[-2:], k.shape[-2]
    if rank >= 4 and q.shape[-3]:  # query head h uses key head h // (H / Hkv)
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q = np.broadcast_to(q, (*lead, length, d))

    def per_item(x):  # () or (B,), to stand beside (B, ..., L, S)
        return np.reshape(x, np.shape(x) + (1,) * (rank - np.ndim(x)))

    def per_head(x):  # (H,) or (B, H); below rank 4 H is 1
        x = np.asarray(x, wide)
        x = x if x.ndim == 1 else x.reshape(len(x), *(1,) * (rank - 4), x.shape[1])
        return x[..., None, None] if rank >= 4 else x[..., None]

    # where everything stands: query i at i + offset, key j at j + key_offset
    i, j = np.arange(length)[:, None], np.arange(s)
    len_q = per_item(length if q_lengths is None else q_lengths)
    len_k = per_item(s if kv_lengths is None else kv_lengths)
    offset = len_k - len_q if align == "bottom-right" else 0
    offset = offset if query_offset is None else per_item(query_offset)
    distance = i + offset - (j + key_offset)
    left, right = window or (None, None)
    allowed = np.broadcast_to((i < len_q) & (j < len_k), (*lead, length, s))
    for limit, ahead in ((left, distance), (right, -distance), (0 if causal else None, -distance)):
        allowed = allowed if limit is None else allowed & (ahead <= limit)

    if kv_segments is not None:
        own = np.asarray(kv_segments if q_segments is None else q_segments)
        same = own[..., :, None] == np.asarray(kv_segments)[..., None, :]  # (B, L, S)
        allowed = allowed & same.reshape(*same.shape[:-2], *(1,) * (rank - 1 - same.ndim + 1),
                                         length, s)  # fmt: skip
    if block_mask is not None:
        rows, keys = block_mask.block_size
        keep = np.repeat(block_mask.keep, rows, axis=-2)[..., :length, :]
        allowed = allowed & np.repeat(keep, keys, axis=-1)[..., :s]

    scores = matmul(q * dtype(1 / np.sqrt(d) if scale is None else scale), k.swapaxes(-1, -2))
    if softcap is not None:
        scores = dtype(softcap) * np.tanh(scores / dtype(softcap))
    if alibi_slopes is not None:
        product = per_head(alibi_slopes) * np.abs(distance).astype(wide)
        scores = (scores - product).astype(dtype)
    if mask is not None:
        allowed = allowed & (mask if mask.dtype == bool else mask != -np.inf)
        scores = scores if mask.dtype == bool else scores + mask.astype(dtype)
    scores = np.where(allowed, scores, dtype(-np.inf))
    rows = np.broadcast_to(i < len_q, (*lead, length, 1))  # the others are no rows
    sink = np.where(rows, -np.inf if sinks is None else per_head(sinks), -np.inf).astype(dtype)
    top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(np.isneginf(top), dtype(0), top)  # a row with nothing: exp(-inf - 0) = 0
    terms = np.exp(scores - top)
    total = add_up(terms)[..., None] + np.exp(sink - top)
    lse = np.log(total, out=np.full(total.shape, -np.inf, dtype), where=total > 0) + top
    total = np.where(total > 0, total, dtype(1))
    weights = terms / total
    output = matmul(terms, v) / total if fused else matmul(weights, v)
    return output.swapaxes(-3, -2) if layout == "blhd" else output, weights, lse[..., 0]
