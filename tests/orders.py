"""The orders in which the compiled backends take their sums, for the error rule.

A sum of n float32 is a chain of roundings.  In a single number those of another order may cancel
by luck, and who knows an order can choose terms whose roundings all point one way.  So the plain
formula is computed in our orders as well.  A product adds each term rounded, or fused: rounded once
with the sum.
"""

import numpy as np

TILE = 256  # after which sums start anew


def fused(total, a, b):
    """total + a b of float32, rounded once: the product is exact in float64."""
    return (total + a.astype(np.float64) * b).astype(np.float32)


def chain(a, b, add=fused):
    """a @ b, each sum one term after the other."""
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total = np.zeros(shape, np.float32)
    for i in range(a.shape[-1]):
        total = add(total, a[..., :, i, None], b[..., None, i, :])
    return total


def rounded(total, a, b):
    return total + a * b


def matmul_in_tiles(add):
    """A way to multiply: chains of 256 terms for each sum, which are added one after the other."""

    def matmul(a, b):
        total = chain(a[..., :TILE], b[..., :TILE, :], add)
        for i in range(TILE, a.shape[-1], TILE):
            total = total + chain(a[..., i : i + TILE], b[..., i : i + TILE, :], add)
        return total

    return matmul


def add_lanes(x):
    """The sums of x over its first axis, whose length is a power of two, in a tree."""
    while len(x) > 1:
        x = x[::2] + x[1::2]
    return x[0]


def matmul_in_lanes(lanes):
    """A way to multiply: as many fused chains for each sum, added in a tree."""

    def matmul(a, b):
        total = [chain(a[..., n::lanes], b[..., n::lanes, :]) for n in range(lanes)]
        return add_lanes(np.stack(total))

    return matmul


def sum_in_lanes(lanes):
    """A way to add up the last axis: tiles of 256 terms, each in so many chains added in a tree."""

    def add_up(x):
        total = np.zeros(x.shape[:-1], np.float32)
        for i in range(0, x.shape[-1], TILE):
            parts = [x[..., n : min(i + TILE, x.shape[-1]) : lanes] for n in range(i, i + lanes)]
            sums = [
                np.add.accumulate(p, axis=-1)[..., -1] if p.shape[-1] else 0 * total for p in parts
            ]
            total = total + add_lanes(np.stack(sums))
        return total

    return add_up


TILES = matmul_in_tiles(fused)
#: (for scores, for outputs, for sums); few queries multiply in as many lanes as a vector has.
ORDERS = (
    (matmul_in_tiles(rounded), matmul_in_tiles(rounded), sum_in_lanes(16)),
    (TILES, TILES, sum_in_lanes(32)),
    (matmul_in_lanes(4), TILES, sum_in_lanes(16)),
    (matmul_in_lanes(8), TILES, sum_in_lanes(16)),
    (matmul_in_lanes(16), TILES, sum_in_lanes(32)),
)
