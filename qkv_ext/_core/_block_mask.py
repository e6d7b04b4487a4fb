"""BlockMask: which blocks of queries see which blocks of keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from qkv_ext._core import _arrays
from qkv_ext._core._arrays import Array, shown
from qkv_ext._core._problem import OPEN, Blocks, Sizes


class BlockMask:
    """A mask of blocks: query i sees key j where ``keep[..., i // rows, j // keys]`` is True.

    For patterns whose mask (L, S) would be too large.  Attention takes it as ``block_mask=``.

    Parameters
    ----------
    keep : array of bool (..., ceil(L / rows), ceil(S / keys))
        Leading axes are those of a mask, (B, H) or fewer, and broadcast to it.  It is copied.
    block_size : (int, int)
        rows and keys of a block.

    Raises
    ------
    TypeError, ValueError
        A keep that is no array of bool with two axes or more, sizes that are no positive integers;
        in the call, a keep that does not fit L and S.

    Notes
    -----
    It says what the mask made of its blocks says, and the result has the same bits.  What it
    excludes in whole tiles of 256 keys is not computed.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> local = np.abs(np.subtract.outer(np.arange(4), np.arange(4))) <= 1  # itself and neighbours
    >>> mask = qkv_ext.BlockMask(local, block_size=(128, 128))
    >>> q = np.ones((1, 2, 500, 8), "f4")
    >>> qkv_ext.scaled_dot_product_attention(q, q, q, block_mask=mask, causal=True).shape
    (1, 2, 500, 8)
    >>> mask.expand(500, 500).shape, mask
    ((500, 500), BlockMask(keep=(4, 4), block_size=(128, 128)))
    """

    __slots__ = ("__weakref__", "_block_size", "_keep")

    def __init__(self, keep: ArrayLike, block_size: tuple[int, int]) -> None:
        array = _arrays.array_of(keep, "keep")
        if array.dtype.kind != "b":
            raise TypeError(f"keep has dtype {array.dtype}; expected bool")
        if array.ndim < 2:
            raise ValueError(f"keep has shape {array.shape}; expected two axes or more")
        if not isinstance(block_size, (tuple, list)) or len(block_size) != 2:
            raise TypeError(f"block_size is {shown(block_size)}; expected a pair (rows, keys)")
        self._keep = np.array(array, order="C")
        self._keep.flags.writeable = False
        rows, keys = (_count(n, "block_size", 1) for n in block_size)
        self._block_size = rows, keys

    @property
    def keep(self) -> Array:
        """The blocks that are seen, read-only."""
        return self._keep

    @property
    def block_size(self) -> tuple[int, int]:
        """The rows and the keys of a block."""
        return self._block_size

    def expand(self, length: int, s: int) -> Array:
        """The mask (..., L, S) of bool that says the same.

        Raises
        ------
        TypeError, ValueError
            Lengths that are no integers, or that have other numbers of blocks.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> qkv_ext.BlockMask(np.eye(2, dtype=bool), (2, 1)).expand(3, 2)
        array([[ True, False],
               [ True, False],
               [False,  True]])
        """
        length, s = _count(length, "length", 0), _count(s, "s", 0)
        _fits(self, length, s)
        rows, keys = self._block_size
        return self._keep[..., np.arange(length) // rows, :][..., np.arange(s) // keys]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._keep, self._block_size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keep={self._keep.shape}, block_size={self._block_size})"


def _count(given: Any, name: str, least: int) -> int:
    if not isinstance(given, (int, np.integer)) or isinstance(given, bool):
        raise TypeError(f"{name} holds {shown(given)}; expected integers")
    if not least <= given <= OPEN:
        raise ValueError(f"{name} holds {shown(given)}; expected {least} to {OPEN}")
    return int(given)


def _fits(mask: BlockMask, length: int, s: int) -> None:
    blocks = tuple(-(-n // size) for n, size in zip((length, s), mask.block_size, strict=True))
    if mask.keep.shape[-2:] != blocks:
        raise ValueError(
            f"block_mask has {mask.keep.shape[-2:]} blocks of {mask.block_size}; expected {blocks} "
            f"for L = {length} and S = {s}"
        )


def checked(given: Any, sizes: Sizes) -> Blocks:
    """Check the block_mask of a call."""
    if not isinstance(given, BlockMask):
        kind = type(given)
        raise TypeError(
            f"block_mask is a {kind.__module__}.{kind.__qualname__}; expected a qkv_ext.BlockMask"
        )
    _fits(given, sizes.length, sizes.s)
    keep, lead = given.keep, sizes.rows[:-1]
    own = keep.shape[:-2]
    if len(own) > len(lead) or any(
        n not in (1, full) for n, full in zip(own[::-1], lead[::-1], strict=False)
    ):
        raise ValueError(
            f"block_mask has leading axes {own}; expected some that broadcast to {lead}"
        )
    keep = keep[(None,) * (len(lead) - len(own))]
    return Blocks(sizes.by_head(keep), *given.block_size)
