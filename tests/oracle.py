"""The oracle: attention as the textbook has it, in float64, independent of the library.

    output = softmax(scale Q Kᵀ + mask, over the allowed keys) V

q (..., H, L, D), k (..., Hkv, S, D) and v (..., Hkv, S, Dv) have equal ranks, and heads at axis -3
from rank 4 on.  Excluded keys are selected, never added; a row without keys is zeros.
"""

import numpy as np


def attention(q, k, v, *, mask=None, causal=False, align="bottom-right", scale=None):
    """(output (..., H, L, Dv), weights (..., H, L, S), lse (..., H, L)), all of them in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    if q.ndim >= 4 and q.shape[-3]:  # query head h uses key head h // (H / Hkv)
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q = np.broadcast_to(q, (*lead, *q.shape[-2:]))
    scores = q * (1 / np.sqrt(q.shape[-1]) if scale is None else scale) @ k.swapaxes(-1, -2)
    length, s = scores.shape[-2:]
    allowed = np.ones(scores.shape, bool)
    if causal:
        offset = s - length if align == "bottom-right" else 0
        allowed &= np.arange(s) <= np.arange(length)[:, None] + offset
    if mask is not None and mask.dtype == bool:
        allowed &= mask
    elif mask is not None:
        allowed &= mask != -np.inf
        scores = scores + mask
    scores = np.where(allowed, scores, -np.inf)
    some = allowed.any(axis=-1, keepdims=True)
    top = np.where(some, scores.max(axis=-1, keepdims=True, initial=-np.inf), 0)
    terms = np.exp(scores - top)  # rows without keys: exp(-inf - 0) = 0
    total = terms.sum(axis=-1, keepdims=True)
    weights = terms / np.where(some, total, 1)
    lse = np.log(total, out=np.full(total.shape, -np.inf), where=some) + top
    return weights @ v, weights, lse[..., 0]
