"""The one table of shapes x options that every backend is tested on.  A new option is a new row.

Sizes are called B, H, Hkv, L, S, D, Dv as everywhere; the id of a row tells all of it.  Its last
part brings every two choices of all options and shapes together, see LEVELS.
"""

import zlib
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from pairwise import covering_rows

import qkv_ext


def dtype_of(name):
    """A dtype by its name; bfloat16 is that of ml_dtypes."""
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


class Case(NamedTuple):
    """One row: shapes, the kind and shape of the mask, and the options of the call."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    mask: tuple[str, tuple[int, ...]] | None
    options: dict[str, Any]
    name: str
    dtype: str = "float32"

    def arrays(self):
        """(q, k, v, options) of the call in its dtype, the same in every run."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in (self.q, self.k, self.v))
        options = dict(self.options)
        if self.mask:
            kind, shape = self.mask
            options["mask"] = np.asarray(MASKS[kind](rng, shape))
        for option, draw in DRAWN.items():
            if option in options:
                options[option] = draw(rng, options[option], self)
        q, k, v = (x.astype(dtype_of(self.dtype), copy=False) for x in (q, k, v))
        if options.get("layout") == "blhd":
            q, k, v = (np.ascontiguousarray(x.swapaxes(-3, -2)) for x in (q, k, v))
        return q, k, v, options

    @property
    def heads(self):
        """H, which is 1 below rank 4."""
        return self.q[-3] if len(self.q) > 3 else 1

    @property
    def first(self):
        """The length of the first axis."""
        return max(self.q[0], self.k[0], self.v[0]) if len(self.q) > 2 else 1

    @property
    def work(self):
        """Multiplications, about."""
        return int(np.prod(self.q, dtype=float) * self.k[-2])


# ---- masks: kind -> how to draw one of a shape --------------------------------------------------


def _some(rng, shape, value):
    """Random numbers, a third of them replaced by a value."""
    x = rng.standard_normal(shape)
    return np.where(rng.random(shape) < 1 / 3, value, x)


def _with_empty_rows(rng, shape):
    """bool; about a third of the rows keep no key, the others most of them."""
    rows = rng.random((*shape[:-1], 1)) < 2 / 3
    return (rng.random(shape) < 0.8) & rows


F32, F64 = np.finfo(np.float32), np.finfo(np.float64)
MASKS = {
    "bool": lambda rng, shape: rng.random(shape) < 0.7,
    "empty-rows": _with_empty_rows,
    "float": lambda rng, shape: rng.standard_normal(shape).astype(np.float32),
    "inf": lambda rng, shape: _some(rng, shape, -np.inf).astype(np.float32),
    "empty-inf": lambda rng, shape: np.where(_with_empty_rows(rng, shape), 0, -np.inf),
    "min": lambda rng, shape: _some(rng, shape, F32.min).astype(np.float32),
    "all-min": lambda rng, shape: np.full(shape, F32.min, np.float32),
    "half": lambda rng, shape: _some(rng, shape, -np.inf).astype(np.float16),
    "double": lambda rng, shape: _some(rng, shape, F64.min),  # beyond the range of float32
    "double-max": lambda rng, shape: _some(rng, shape, F64.max),
}

# ---- one number for each head: option -> how to draw it, by the choice in the row ---------------


def _slopes(rng, choice, case):
    """float32 (H,) or (B, H), positive but for "negative"."""
    each = choice == "of each item" and len(case.q) > 2
    shape = (case.first, case.heads) if each else (case.heads,)
    slopes = rng.random(shape, np.float32) * np.float32(0.3)
    return -slopes if choice == "negative" else slopes


def _sinks(rng, choice, case):
    """float32 (H,): like a score, far above and below, or no sink for half of the heads."""
    sinks = rng.standard_normal(case.heads, np.float32)
    if choice == "far":
        sinks = np.where(np.arange(case.heads) % 2, np.float32(60), np.float32(-60)) + sinks
    if choice == "-inf":
        sinks[::2] = -np.inf
    return sinks


# ---- which rows and keys go together: option -> how to draw it ---------------------------------


def _segments(rng, choice, case, n):
    """Integers (n,) or (B, n): three documents end to end, or any of four numbers."""
    shape = (case.first, n) if len(case.q) > 2 else (n,)
    if choice == "documents":
        return np.sort(rng.integers(0, 3, shape), axis=-1)
    return rng.integers(-2, 2, shape) * 2**40


def _blocks(rng, choice, case):
    """A BlockMask: large blocks for all heads, or small ones for each."""
    size = (64, 128) if choice == "large" else (3, 16)
    each = [case.first] if len(case.q) > 2 else []
    each += [1] * (len(case.q) - 4) + ([case.heads] if len(case.q) > 3 else [])
    shape = (-(-case.q[-2] // size[0]), -(-case.k[-2] // size[1]))
    keep = rng.random((*(each if choice == "small" else []), *shape)) < 0.6
    return qkv_ext.BlockMask(keep, size)


DRAWN = {
    "alibi_slopes": _slopes,
    "sinks": _sinks,
    "q_segments": lambda rng, choice, case: _segments(rng, choice, case, case.q[-2]),
    "kv_segments": lambda rng, choice, case: _segments(rng, choice, case, case.k[-2]),
    "block_mask": _blocks,
}

# ---- rows ---------------------------------------------------------------------------------------

CASES: list[Case] = []


def text(shape):
    return "x".join(map(str, shape)) or "scalar"


def row(q, k, v=None, mask=None, name=None, dtype="float32", **options):
    """Add a row by the shapes of its arrays in layout bhld; v is as k by default."""
    v = k if v is None else v
    parts = [name or f"q{text(q)}-k{text(k)}-v{text(v)}"]
    if mask:
        parts += ["mask", mask[0], text(mask[1])]
    for option, value in options.items():
        if option in ("align", "layout"):
            parts.append(value)
        else:
            parts.append(option if value is True else f"{option}={value}".replace(" ", ""))
    if dtype != "float32":
        parts.append(dtype)
    CASES.append(Case(q, k, v, mask, options, "-".join(parts), dtype))


def rank4(b, h, hkv, length, s, d, dv=None, *, title=None, **rest):
    """Add a row of rank 4."""
    dv = d if dv is None else dv
    name = f"B{b}-H{h}-Hkv{hkv}-L{length}-S{s}-D{d}" + (f"-Dv{dv}" if dv != d else "")
    name = f"{title}-{name}" if title else name
    row((b, h, length, d), (b, hkv, s, d), (b, hkv, s, dv), name=name, **rest)


# what people run, scaled down
rank4(1, 12, 12, 128, 128, 32, title="minilm")
rank4(3, 12, 12, 128, 128, 32, title="minilm-batch", mask=("bool", (3, 1, 1, 128)))
rank4(1, 4, 4, 512, 512, 64, title="bert")
rank4(1, 3, 3, 197, 197, 64, title="vit")
rank4(1, 1, 1, 2048, 2048, 64, title="encoder")
rank4(1, 4, 1, 1024, 1024, 128, title="prefill-gqa", causal=True)
rank4(1, 1, 1, 2100, 2100, 32, title="prefill", causal=True)
rank4(1, 2, 2, 448, 1500, 64, title="cross")
rank4(1, 8, 2, 1, 4096, 128, title="decode-gqa")
rank4(1, 4, 1, 1, 32768, 64, title="decode-long")
rank4(4, 8, 2, 1, 1024, 128, title="decode-batch", causal=True)
rank4(1, 8, 8, 1, 2048, 128, title="decode")
rank4(1, 1, 1, 4, 4, 8, title="tiny")

# tails of the vectors, in D and in Dv; blocks of many queries and the path of one query
TAILS = (1, 2, 3, 5, 7, 9, 15, 16, 17, 31, 33, 37, 64, 65, 100, 128, 130, 300)
for n, length in product(TAILS, (9, 1)):
    rank4(1, 2, 1, length, 33, n)
    rank4(2, 2, 1, length, 33, 12, n)

# edges of tiles and splits along the keys, and of blocks along the queries
for s in (1, 2, 3, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513, 1023, 1024, 1025, 2100):
    rank4(2, 4, 2, 1, s, 24)
    rank4(1, 2, 2, 5, s, 24, causal=True)
    rank4(1, 4, 1, 3, s, 40, mask=("bool", (3, s)))
for length in (2, 3, 4, 6, 7, 8, 11, 12, 13, 16, 17, 24, 25, 47, 48, 49, 96, 97, 144, 145, 257):
    rank4(1, 2, 2, length, 70, 20)
    rank4(1, 2, 1, length, length, 20, causal=True)

# heads
for h, hkv in ((2, 1), (4, 2), (6, 3), (6, 2), (8, 1), (7, 7), (12, 4), (32, 8), (40, 1)):
    rank4(2, h, hkv, 1, 40, 16)
    rank4(1, h, hkv, 6, 40, 16, 24, causal=True)

# ranks, and leading axes that broadcast
row((5, 8), (9, 8), (9, 3))
row((5, 8), (9, 8), causal=True, mask=("bool", (9,)))
row((1, 8), (300, 8), mask=("inf", (1, 300)))
row((3, 5, 8), (3, 9, 8))
row((3, 5, 8), (1, 9, 8), (3, 9, 4), mask=("bool", (3, 1, 9)))
row((1, 5, 8), (3, 9, 8), causal=True, mask=("float", (5, 9)))
row((3, 5, 8), (3, 9, 8), mask=("inf", (3, 5, 9)))
row((1, 4, 5, 8), (3, 2, 9, 8), (1, 2, 9, 8))
row((3, 4, 5, 8), (1, 2, 9, 8), (1, 2, 9, 8), mask=("bool", (3, 1, 5, 9)))
row((2, 3, 4, 5, 8), (2, 3, 2, 9, 8), causal=True)
row((2, 1, 4, 5, 8), (1, 3, 2, 9, 8), (2, 3, 2, 9, 5))
row((1, 1, 4, 1, 8), (2, 3, 1, 70, 8), (1, 3, 1, 70, 8), mask=("inf", (2, 1, 4, 1, 70)))
row((2, 1, 4, 5, 8), (1, 3, 2, 9, 8), mask=("bool", (3, 1, 1, 9)))
row((2, 1, 1, 2, 5, 8), (1, 2, 2, 1, 9, 8))
row((1, 2, 5, 8), (1, 2, 9, 8), (3, 2, 9, 8), mask=("bool", (3, 2, 5, 9)))

# more queries than keys
for align in ("bottom-right", "top-left"):
    rank4(1, 2, 2, 9, 4, 8, causal=True, align=align)
    rank4(1, 2, 1, 300, 5, 16, causal=True, align=align)
    rank4(1, 1, 1, 70, 65, 16, causal=True, align=align, mask=("bool", (70, 65)))

# nothing at all
for causal in (False, True):
    rank4(0, 2, 2, 3, 4, 8, causal=causal)
    rank4(2, 0, 0, 3, 4, 8, causal=causal)
    rank4(2, 2, 1, 0, 4, 8, causal=causal)
    rank4(2, 2, 1, 3, 0, 8, causal=causal)
    rank4(2, 2, 1, 3, 4, 8, 0, causal=causal)
    rank4(2, 2, 1, 3, 4, 0, 5, causal=causal, scale=1.0)
    rank4(0, 2, 2, 1, 0, 8, causal=causal)
row((0, 8), (4, 8), mask=("bool", (1, 4)))
row((3, 8), (0, 8), mask=("float", (3, 0)))

# masks: every choice of {1, full} for the four axes, and fewer axes
for kind, *shape in product(("bool", "inf"), (1, 2), (1, 3), (1, 5), (1, 7)):
    rank4(2, 3, 3, 5, 7, 8, mask=(kind, tuple(shape)))
for kind in ("bool", "inf"):
    for shape in ((), (1,), (7,), (5, 1), (5, 7), (3, 1, 7), (3, 5, 7)):
        rank4(2, 3, 3, 5, 7, 8, mask=(kind, shape), causal=True)
    rank4(2, 4, 2, 1, 600, 16, mask=(kind, (2, 1, 1, 600)))
    rank4(2, 4, 2, 1, 600, 16, mask=(kind, (2, 4, 1, 1)))

# masks: every kind, across tiles and for one query, alone and with causal order
for kind in MASKS:
    rank4(1, 2, 1, 40, 600, 16, mask=(kind, (2, 40, 600)))
    rank4(1, 2, 1, 40, 600, 16, mask=(kind, (40, 600)), causal=True)
    rank4(2, 2, 1, 1, 2100, 16, mask=(kind, (2, 2, 1, 2100)))

# every option with every other
orders = ({}, {"causal": True}, {"causal": True, "align": "top-left"})
for order, kind, scale in product(orders, (None, *MASKS), (None, 0.0, -0.5, 2.0)):
    given = {} if scale is None else {"scale": scale}
    rank4(2, 4, 2, 7, 19, 16, mask=kind and (kind, (2, 1, 7, 19)), **order, **given)

# ---- rows of one option, at the edges of tiles, splits and blocks -------------------------------

WINDOWS = ((0, 0), (3, 0), (0, 5), (None, 2), (2, None), (None, None), (254, 1), (255, 0), (256, 3),
           (1023, 0), (1024, 2), (10**12, 0), (0, 10**30))  # fmt: skip
for window in WINDOWS:
    rank4(1, 2, 1, 1, 1300, 16, window=window)
    rank4(1, 2, 1, 30, 1300, 16, window=window)
    rank4(1, 1, 1, 300, 300, 8, window=window, causal=True, align="top-left")
    rank4(1, 2, 2, 70, 40, 8, window=window)  # rows before the first key have none
rank4(1, 1, 1, 1100, 1100, 16, window=(256, 0))
rank4(1, 1, 1, 1100, 1100, 16, window=(100, 300), mask=("bool", (1, 1100)))

EDGES = (0, 1, 255, 256, 257, 1024, 1025)
for length in (1, 5, 30):
    rank4(7, 2, 1, length, 1030, 16, kv_lengths=EDGES)
    rank4(7, 2, 1, length, 1030, 16, kv_lengths=EDGES, causal=True)
    rank4(7, 2, 1, length, 1030, 16, kv_lengths=EDGES, mask=("inf", (7, 1, 1, 1030)))
    rank4(7, 2, 1, length, 1030, 16, kv_lengths=EDGES, window=(256, 0), align="top-left")
rank4(6, 2, 1, 260, 260, 8, q_lengths=(0, 1, 255, 256, 257, 260))
rank4(6, 2, 1, 260, 40, 8, q_lengths=(0, 1, 47, 48, 49, 132), causal=True)
for options in ({}, {"causal": True}, {"window": (9, 2)}):
    lengths = (0, 1, 255, 256, 257, 260)
    rank4(6, 2, 1, 260, 260, 8, q_lengths=lengths, kv_lengths=lengths, **options)
rank4(2, 4, 2, 3, 2100, 16, kv_lengths=(2049, 1000), q_lengths=(1, 2), causal=True)
row((5, 8), (9, 8), kv_lengths=4, q_lengths=3, causal=True)
row((3, 5, 8), (3, 9, 8), kv_lengths=(0, 9, 4), q_lengths=(5, 0, 2))
row((1, 5, 8), (3, 9, 8), kv_lengths=(0, 9, 4), q_lengths=(5, 0, 2))
row((2, 3, 4, 5, 8), (1, 3, 2, 9, 8), kv_lengths=(9, 4), q_lengths=(2, 5), causal=True)

for offset in (-3, 0, 4, 299, 1020, 10**15, -(10**15), (-1, 2000)):
    rank4(2, 2, 1, 1, 1300, 16, query_offset=offset, causal=True)
    rank4(2, 2, 1, 30, 300, 16, query_offset=offset, causal=True, window=(70, 0))
for offset in (-3, 7, 256, -1000, 10**15):
    rank4(2, 2, 1, 1, 1300, 16, key_offset=offset, causal=True)
    rank4(2, 2, 1, 30, 300, 16, key_offset=offset, window=(256, 3))
    rank4(2, 2, 1, 30, 300, 16, key_offset=offset, query_offset=offset, causal=True)

for softcap in (1e-30, 0.01, 0.7, 30, 1e30):
    rank4(1, 2, 1, 1, 1300, 16, softcap=softcap)
    rank4(1, 2, 1, 30, 300, 16, softcap=softcap, scale=3.0)
for slopes in ("of each head", "of each item", "negative"):
    rank4(2, 6, 2, 1, 1300, 16, alibi_slopes=slopes)
    rank4(2, 6, 2, 30, 300, 16, alibi_slopes=slopes, causal=True)
    rank4(1, 1, 1, 300, 300, 8, alibi_slopes=slopes, align="top-left")
    row((2, 5, 8), (2, 300, 8), alibi_slopes=slopes)
    row((2, 3, 4, 5, 8), (2, 3, 2, 9, 8), alibi_slopes=slopes)
for sinks in ("near", "far", "-inf"):
    rank4(2, 6, 2, 1, 1300, 16, sinks=sinks)
    rank4(2, 6, 2, 30, 300, 16, sinks=sinks, causal=True)
    rank4(1, 4, 2, 70, 40, 8, sinks=sinks, causal=True)  # rows without keys have their sink
    rank4(2, 4, 2, 3, 0, 8, sinks=sinks)
    row((5, 8), (9, 8), sinks=sinks, mask=("empty-rows", (5, 9)))
for segments in ("documents", "any"):
    both = {"q_segments": segments, "kv_segments": segments}
    rank4(2, 2, 1, 600, 600, 8, kv_segments=segments)  # those of the queries too
    rank4(2, 4, 2, 300, 1300, 16, **both)
    rank4(2, 4, 2, 1, 1300, 16, **both, causal=True)
    rank4(2, 2, 2, 140, 700, 8, **both, mask=("inf", (140, 700)), kv_lengths=(600, 0))
    row((5, 8), (9, 8), **both)
    row((3, 5, 8), (1, 9, 8), (3, 9, 4), **both, window=(3, 0))
    row((2, 3, 4, 5, 8), (1, 3, 2, 9, 8), **both)
for blocks in ("large", "small"):
    rank4(2, 4, 2, 300, 1300, 16, block_mask=blocks)
    rank4(2, 4, 2, 1, 1300, 16, block_mask=blocks)
    rank4(2, 2, 2, 140, 700, 8, block_mask=blocks, mask=("bool", (140, 700)), q_lengths=(99, 140))
    rank4(1, 2, 1, 600, 600, 8, block_mask=blocks, kv_segments="documents", causal=True)
    row((5, 8), (9, 8), block_mask=blocks)
    row((3, 5, 8), (3, 9, 8), block_mask=blocks)
    row((2, 3, 4, 5, 8), (2, 3, 2, 9, 8), block_mask=blocks)
    rank4(2, 2, 1, 0, 4, 8, block_mask=blocks, kv_segments="any", q_segments="any")
    rank4(2, 2, 1, 3, 0, 8, block_mask=blocks)
for dtype in ("float16", "bfloat16"):
    for n, length in product((1, 7, 8, 16, 17, 33, 64, 100), (9, 1)):
        rank4(1, 2, 1, length, 33, n, dtype=dtype)
        rank4(2, 2, 1, length, 300, 12, n, dtype=dtype)
    for length, s in ((1, 2100), (5, 1025), (140, 257), (300, 300)):
        rank4(1, 4, 2, length, s, 24, dtype=dtype, causal=True)
        rank4(1, 2, 2, length, s, 24, dtype=dtype, mask=("inf", (length, s)))
    row((5, 8), (9, 8), (9, 3), dtype=dtype)
    row((1, 1, 4, 1, 8), (2, 3, 1, 70, 8), (1, 3, 1, 70, 8), dtype=dtype)
    rank4(2, 2, 1, 3, 0, 8, dtype=dtype)

# ---- every choice of every option with every choice of every other, and with every shape --------

SHAPES = {  # q, k, v
    "rank2": ((7, 20), (40, 20), (40, 12)),
    "rank3": ((3, 9, 16), (3, 33, 16), (3, 33, 16)),
    "rank5": ((2, 1, 4, 7, 16), (1, 3, 2, 19, 16), (2, 3, 2, 19, 16)),
    "few": ((2, 4, 9, 20), (2, 2, 33, 20), (2, 2, 33, 37)),
    "tiles": ((2, 2, 40, 16), (2, 1, 600, 16), (2, 1, 600, 16)),
    "self": ((3, 2, 150, 8), (3, 2, 150, 8), (3, 2, 150, 8)),
    "decode": ((2, 6, 1, 24), (2, 2, 300, 24), (2, 2, 300, 24)),
    "splits": ((2, 4, 1, 16), (2, 1, 1300, 16), (2, 1, 1300, 16)),
    "few-queries": ((2, 4, 3, 16), (2, 2, 1100, 16), (2, 2, 1100, 16)),
    "few-keys": ((2, 2, 60, 16), (2, 2, 5, 16), (2, 2, 5, 16)),
}
LEVELS = {  # the first choice of an option is its default
    "shape": tuple(SHAPES),
    "dtype": ("float32", "float16", "bfloat16"),
    "mask": (None, "bool", "empty-rows", "float", "inf"),
    "order": (None, "causal", "top-left"),
    "scale": (None, -0.5),
    "layout": ("bhld", "blhd"),
    "window": (None, (3, 0), (0, 5), (None, 2), (300, 20)),
    "softcap": (None, 0.7, 20),
    "alibi_slopes": (None, "of each head", "of each item"),
    "sinks": (None, "near", "-inf"),
    "kv_lengths": (None, "full and none", "some"),
    "q_lengths": (None, "full and none", "some"),
    "segments": (None, "documents", "any"),
    "block_mask": (None, "large", "small"),
    "query_offset": (None, 5, "of each item"),
    "key_offset": (0, 3, -4),
}


def possible(choices):
    """Layout blhd has heads, and needs rank 4."""
    return not (choices.get("shape", "few")[:5] in ("rank2", "rank3")
                and choices.get("layout") == "blhd")  # fmt: skip


def items(shape, choice, full):
    """A choice of lengths or offsets as numbers: one at rank 2, else one for each item."""
    count = max(x[0] for x in SHAPES[shape])
    numbers = {
        "full and none": [0, full, full - 1],
        "some": [full - full // 3, (full + 1) // 2, 1],
        "of each item": [full // 2, -2, full],
    }[choice]
    return numbers[1] if len(SHAPES[shape][0]) == 2 else tuple(numbers[:count])


PAIRS = covering_rows(LEVELS, possible)
for choices in PAIRS:
    given = {name: x for name, x in choices.items() if x != LEVELS[name][0]}
    shape = choices["shape"]
    q, k, v = SHAPES[shape]
    for name in ("shape", "mask", "order", "segments"):
        given.pop(name, None)
    if choices["segments"]:
        given["q_segments"] = given["kv_segments"] = choices["segments"]
    if choices["order"]:
        given = {"causal": True} | given
        if choices["order"] == "top-left":
            given["align"] = "top-left"
    for name, full in (("kv_lengths", k[-2]), ("q_lengths", q[-2]), ("query_offset", k[-2])):
        if isinstance(given.get(name), str):
            given[name] = items(shape, given[name], full)
    kind = choices["mask"] and (choices["mask"], (q[-2], k[-2]))
    row(q, k, v, mask=kind, name=shape, **given)

NAMES = [case.name for case in CASES]
assert len(set(NAMES)) == len(NAMES), "two rows have one id"
