"""The kind of case that a mask (L, S) makes: patterns that exclude whole tiles, in each form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from bench.kinds import Arrays, Attention

#: A tile of ours: the rows of a task, each head by itself, by keys.  One is skipped as a whole.
ROWS, KEYS = 132, 256
DOCUMENTS = 8
PARENTS = (0, 0, 0, 1, 1, 2, 2, 3)  #: of each branch of the tree; the first one is its root

Array = np.ndarray


def prefix(i: Array, j: Array, n: int) -> Array:
    """A quarter is seen by all, the rest is causal."""
    return (j < n // 4) | (j <= i)


def local_and_global(i: Array, j: Array, n: int) -> Array:
    """A sixteenth to each side; and the first few see all and are seen by all."""
    few, side = max(1, n // 64), max(1, n // 16)
    return (abs(i - j) <= side) | (i < few) | (j < few)


def documents(i: Array, j: Array, n: int) -> Array:
    return documents_of(i, n) == documents_of(j, n)


def documents_of(i: Array, n: int) -> Array:
    """The document of each position."""
    return i * DOCUMENTS // n


def tree(i: Array, j: Array, n: int) -> Array:
    """Branches of one length, causal, each of which also sees those that it grew from."""
    ancestors = np.eye(len(PARENTS), dtype=bool)
    for branch, parent in enumerate(PARENTS):
        ancestors[branch] |= ancestors[parent]
    of_i, of_j = (x * len(PARENTS) // n for x in (i, j))
    return ancestors[of_i, of_j] & (j <= i)


def random(i: Array, j: Array, n: int) -> Array:
    """Nine of ten keys, so that no tile is excluded or kept as a whole."""
    rows = [np.random.default_rng((8, row)).random(n, np.float32) for row in i[:, 0]]
    return np.array(rows) < 0.9


def block_size(n: int) -> tuple[int, int]:
    return max(1, n // 128), max(1, n // 64)


def blocks_of(n: int) -> Array:
    """A tenth of the blocks: those of the diagonal, and some anywhere."""
    rows, keys = block_size(n)
    first = np.arange(-(-n // rows))[:, None] * rows // keys
    column = np.arange(-(-n // keys))
    return (np.random.default_rng(8).random((len(first), len(column))) < 0.09) | (first == column)


def blocks(i: Array, j: Array, n: int) -> Array:
    rows, keys = block_size(n)
    return blocks_of(n)[i[:, 0] // rows].take(j // keys, axis=1)  # contiguous, unlike [:, j]


#: Rows i (m, 1) and columns j (n,) of the mask (n, n).
PATTERNS: dict[str, Callable[[Array, Array, int], Array]] = {
    "prefix": prefix,
    "local and global": local_and_global,
    "documents": documents,
    "tree": tree,
    "random": random,
    "blocks": blocks,
}


def mask_of(pattern: str, n: int) -> Array:
    """The mask (n, n), True where a key is seen."""
    at = np.arange(n)
    return PATTERNS[pattern](at[:, None], at, n)


def by_tasks(pattern: str, n: int) -> Iterator[Array]:
    """The same, as many rows at a time as a task has."""
    at = np.arange(n)
    for first in range(0, n, ROWS):
        yield PATTERNS[pattern](at[first : first + ROWS, None], at, n)


@cache
def pairs(pattern: str, n: int) -> int:
    """How many keys all queries see."""
    return sum(int(np.count_nonzero(rows)) for rows in by_tasks(pattern, n))


@cache
def tile_share(pattern: str, n: int) -> float:
    """The share of the pairs that lie in a tile in which one is seen."""
    starts = np.arange(0, n, KEYS)
    sizes = np.diff([*starts, n])
    computed = (
        len(rows) * int(sizes[np.logical_or.reduceat(rows.any(axis=0), starts)].sum())
        for rows in by_tasks(pattern, n)
    )
    return sum(computed) / n**2


@dataclass(frozen=True, kw_only=True)
class Masked(Attention):
    """Attention of L = S under a pattern; the rivals get it as an array (L, S) in any case."""

    pattern: str
    form: Literal["bool", "float", "segments", "varlen", "blocks"] = "bool"  #: what ours gets

    @property
    def operations(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("attention",) if self.form in ("bool", "float") else (self.form, "attention")

    def arrays(self) -> Arrays:
        n = self.shape[4]
        mask = mask_of(self.pattern, n)
        made = {**super().arrays(), "mask": mask}
        if self.form == "float":
            made["mask"] = np.where(mask, np.float32(0), np.float32(-np.inf))
        elif self.form in ("segments", "varlen"):
            made["segments"] = documents_of(np.arange(n), n)[None]
        elif self.form == "blocks":
            made["blocks"] = blocks_of(n)
        return made

    def added(self, arrays: Arrays, item: int, i: int) -> Array:
        row = arrays["mask"][i]
        return np.where(row, 0, -np.inf) if row.dtype == bool else row.astype(np.float64)

    def tiny(self) -> Masked:
        *_, d = self.shape
        return self.but(shape=(1, 2, 2, 24, 24, min(d, 8)))

    @property
    def flop(self) -> float:
        b, h, _, length, _, d = self.shape
        return 4.0 * b * h * d * pairs(self.pattern, length)

    @property
    def moved(self) -> float:
        """The mask included, where it is an array (L, S)."""
        size = {"bool": 1.0, "float": 4.0}.get(self.form, 0.0)
        return super().moved + size * self.shape[3] * self.shape[4]
