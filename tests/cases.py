"""The one table of shapes x options that every backend is tested on.  A new option is a new row.

Sizes are called B, H, Hkv, L, S, D, Dv as everywhere; the id of a row tells all of it.
"""

import zlib
from itertools import product
from typing import Any, NamedTuple

import numpy as np


class Case(NamedTuple):
    """One row: shapes, the kind and shape of the mask, and the options of the call."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    mask: tuple[str, tuple[int, ...]] | None
    options: dict[str, Any]
    name: str

    def arrays(self):
        """(q, k, v, options) of the call in float32, the same in every run."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in (self.q, self.k, self.v))
        options = dict(self.options)
        if self.mask:
            kind, shape = self.mask
            options["mask"] = np.asarray(MASKS[kind](rng, shape))
        return q, k, v, options

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

# ---- rows ---------------------------------------------------------------------------------------

CASES: list[Case] = []


def text(shape):
    return "x".join(map(str, shape)) or "scalar"


def row(q, k, v=None, mask=None, name=None, **options):
    """Add a row by the shapes of its arrays; v is as k by default."""
    v = k if v is None else v
    parts = [name or f"q{text(q)}-k{text(k)}-v{text(v)}"]
    if mask:
        parts += ["mask", mask[0], text(mask[1])]
    for option, value in options.items():
        parts.append(
            option if value is True else f"{option}={value}" if option != "align" else value
        )
    CASES.append(Case(q, k, v, mask, options, "-".join(parts)))


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

NAMES = [case.name for case in CASES]
assert len(set(NAMES)) == len(NAMES), "two rows have one id"
