"""What a checked call is, as data: made by _check.py once, then only read, by every backend.

Nothing of the package is imported here, so that checks and backends know each other by this alone.

Query i stands at position i + offset on the axis of the keys, key j at j + key_offset.  Everything
that depends on the two is brought to one number per batch item, diagonal = offset - key_offset:
query i sees the keys of the array with

    i + diagonal - left  <=  j  <=  i + diagonal + right
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qkv_ext._cache._store import Pages

Array: TypeAlias = NDArray[Any]
OPEN = 1 << 60  #: a window side, or an offset, beyond which nothing lies


class Sizes(NamedTuple):
    """The sizes of a call, by whoever has arrays, a cache or a layer; nothing else of them is read.

    What the caller has one of for each query is of shape ``rows``: without a batch at rank 2,
    without heads at rank 2 and 3 of q, k and v.  A layer's x (L, d_in) has heads, and no batch.
    """

    rank: int  # axes of q (..., H, L, D), those that there are
    lead: tuple[int, ...]  # the axes before H, broadcast
    h: int
    hkv: int
    length: int  # L
    s: int
    d: int
    dv: int
    dtype: np.dtype[Any]  # of q
    keys: Sequence[int] | None = None  # how many each item has, where they are not all S
    packed: tuple[Array, Array] | None = None  # cumulative lengths: lead is (sequences,)

    @property
    def rows(self) -> tuple[int, ...]:
        if self.rank - len(self.lead) > 2:
            return (*self.lead, self.h, self.length)
        return (*self.lead, self.length)

    def by_head(self, x: Array) -> Array:
        """x (*rows, ...) with the axes that the arrays of a Problem have: batch and heads too."""
        if self.rank > 3:
            return x
        if self.lead:
            return x[:, None]
        return x[None] if self.rank > 2 else x[None, None]


class Blocks(NamedTuple):
    """A mask of blocks: query i sees key j where keep[..., i // rows, j // keys] is True."""

    keep: Array  # bool, with the axes of a Problem's mask
    rows: int
    keys: int


class Rules(NamedTuple):
    """What a score obeys beyond scale and mask; the same for every call that gives no option."""

    left: int = OPEN
    right: int = OPEN
    softcap: float = 0.0  # 0 is off
    slopes: Array | None = None  # float32 or float64, (items, H) or (1, H), items as in spans
    sinks: Array | None = None  # (H,)
    spans: Array | None = None  # int64 (items, COLUMNS), as below
    segments: tuple[Array, Array] | None = None  # int32 (items, L) and (items, S)
    blocks: Blocks | None = None


PLAIN = Rules()
CAUSAL = Rules(right=0)
#: Columns of Rules.spans: whose arrays, the rows of q that are there and those that are the item's
#: own, the rows of k and v that are there, and the diagonal.
ITEM, Q_START, Q_LENGTH, Q_ROOM, K_START, K_LENGTH, DIAGONAL = range(7)
COLUMNS = 7

# ---- pages of a KVCache, which _cache/_pages.py draws -------------------------------------------

TILE = 256  #: keys of a tile of the kernels, which never crosses one
SLACK = 64  #: bytes behind v, and behind the scales, that a vector load may touch
#: Columns of the table of pages: where what a page holds lies, 0 for what it does not.
K_ADDRESS, V_ADDRESS, K_SCALE_ADDRESS, V_SCALE_ADDRESS = range(4)
ADDRESSES = 4

# ---- a call -------------------------------------------------------------------------------------


class Scoring(NamedTuple):
    """The checked options of a call: all that makes scores of Q Kᵀ."""

    mask: Array | None  # as in a Problem
    scale: float
    diagonal: int
    rules: Rules
    key_offset: int  # which diagonal has in it already


class Problem(NamedTuple):
    """One attention call.  Leading axes broadcast; every array has the rank of out, at least 4."""

    q: Array  # (..., H, L, D); float32, float64, float16 or bfloat16, as k, v and out
    k: Any  # (..., Hkv, S, D), or None where pages hold the keys and values
    v: Any  # (..., Hkv, S, Dv)
    mask: Array | None  # bool, or the dtype of computation; broadcasts to (..., H, L, S)
    scale: float
    diagonal: int  # of every item, where rules.spans has none
    rules: Rules
    out: Array  # (..., H, L, Dv)
    weights: Array | None  # (..., H, L, S), in the dtype of computation
    lse: Array | None  # (..., H, L), in the dtype of computation
    threads: int
    pages: Pages | None = None  # of a KVCache


class Product(NamedTuple):
    """One product out = activation(a b + bias) + residual.

    Leading axes broadcast.  Where b is packed, or there is a residual, all are matrices.
    """

    a: Array  # (..., M, K)
    b: Array  # (..., K, N), or panels (P, K, 64) of a PackedWeight, as it keeps them
    packed: bool
    bias: Array | None  # (N,)
    out: Array  # (..., M, N)
    threads: int
    activation: str | None = None  # a name of ACTIVATIONS
    residual: Array | None = None  # (M, N)


#: max(x, 0); x Φ(x), with Φ the normal distribution; the same by tanh; x / (1 + exp(-x)).
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


class Rows(NamedTuple):
    """Rows to be softmaxed: x (..., n) into out of the same shape."""

    x: Array
    out: Array
    threads: int


class Rotation(NamedTuple):
    """Rows of Q or K to be turned by the angles of their positions; heads before positions."""

    x: Array  # (..., H, L, D), of contiguous rows
    cos: Array  # (n, rotary_dim / 2), in the dtype of computation
    sin: Array
    positions: Array | None  # int64 (L,) or (B, L), rows of the tables; None is 0 to L - 1
    interleaved: bool
    out: Array  # as x, or x itself: a pair is read before it is written
    threads: int


class Norm(NamedTuple):
    """Rows to be normed: (x - mean) / sqrt(var + eps) weight + bias, over the last axis."""

    x: Array  # (..., n), of contiguous rows, and leading axes of any strides
    weight: Array  # (n,), in the dtype of computation
    bias: Array | None  # likewise
    eps: float
    centered: bool  # as layer norm has it; else the mean is not subtracted: RMS norm
    out: Array  # as x, or x itself
    threads: int
