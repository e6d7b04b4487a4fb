"""The pages that a KVCache keeps its keys and values in.

A page holds P keys and values of one batch item, page n the keys nP to (n + 1)P, in one allocation
that starts on a cache line:

    k        (Hkv, P / 64, D, 64)   panels: column c of panel p is key 64 p + c
    v        (Hkv, P Dv)            rows in blocks of 64 columns, one block after the other: rows
                                    [P, 64] each, the last one as wide as what is left
    k_scale  (Hkv, P)  float32, int8 only
    v_scale  (Hkv, P)  float32, int8 only

So k and v both are what a product streams through from end to end, 64 columns at a time.  They are
in the entries of the storage type, see _storage.py; which item has which pages, and who may write
to them, in _store.py.

Slots that no key was written to are zeros, so that panels and rows may be read beyond the last key.
(Where an item was cut back within a page that it shares they hold what the others still see, and
where an append was interrupted what it wrote: no value there is used.)
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from qkv_ext._core._arrays import FLOAT32, Array
from qkv_ext._core._packed import PANEL
from qkv_ext._core._problem import SLACK
from qkv_ext._core._storage import ENTRIES, SCALED

_HUGE = 2 << 20  #: bytes of a huge page
_SLAB = 4 << 20  #: bytes that are asked of the system at a time by a cache that is large
_MOST_ROOMS = 64  #: pages of a slab, where they are small
SHARE = 4  #: rooms for the next pages are no more than this part of the pages that are there
_MANY = 8  #: pages that make huge pages worth while, with however few keys each
_SPARE = 32 << 20  #: bytes of given-up pages that are kept for the next ones


class Layout(NamedTuple):
    """What every page of a cache looks like."""

    kind: str  # the storage type
    size: int  # P
    kv_heads: int
    head_dim: int
    v_dim: int

    @property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """Where k, v, k_scale and v_scale start in a page, in bytes, and where the page ends."""
        keys = self.kv_heads * self.size
        entry, scale = ENTRIES[self.kind].itemsize, 4 if self.kind in SCALED else 0
        v = keys * self.head_dim * entry
        k_scale = v + keys * self.v_dim * entry + SLACK
        v_scale = k_scale + keys * scale
        return 0, v, k_scale, v_scale, v_scale + keys * scale + (SLACK if scale else 0)


class Page:
    """One page; it hands its memory back when nobody holds it any more.

    To its pool, which it does not keep alive: a page may go on in a cache that has another pool.
    """

    __slots__ = (
        "addresses", "k", "k_scale", "layout", "owner", "pool", "room", "v_blocks", "v_scale"
    )  # fmt: skip

    def __init__(self, room: Array, pool: Pool) -> None:
        self.room, self.pool = room, weakref.ref(pool)  # first of all, for __del__
        self.owner: object = None
        self.layout = layout = pool.layout
        k, v, k_scale, v_scale, _ = pool.offsets
        start = room.ctypes.data
        #: of k, v, k_scale and v_scale, 0 for what is not there
        self.addresses = start, start + v, 0, 0
        heads, size, entries = layout.kv_heads, layout.size, ENTRIES[layout.kind]
        panels = (heads, size // PANEL, layout.head_dim, PANEL)
        self.k: Array = np.ndarray(panels, entries, room, k)
        flat: Array = np.ndarray((heads, size * layout.v_dim), entries, room, v)
        self.v_blocks: list[tuple[slice, Array]] = []  # columns, and their rows (Hkv, P, 64)
        for first in range(0, layout.v_dim if heads else 0, PANEL):
            stop = min(first + PANEL, layout.v_dim)
            block = flat[:, first * size : stop * size].reshape(heads, size, stop - first)
            self.v_blocks.append((slice(first, stop), block))
        self.k_scale: Array | None = None
        self.v_scale: Array | None = None
        if layout.kind in SCALED:
            self.k_scale = np.ndarray((heads, size), FLOAT32, room, k_scale)
            self.v_scale = np.ndarray((heads, size), FLOAT32, room, v_scale)
            self.addresses = start, start + v, start + k_scale, start + v_scale

    def __del__(self, at_the_end: Callable[[], bool] = sys.is_finalizing) -> None:
        its_pool = getattr(self, "pool", None)
        if its_pool is None or at_the_end():  # it was never made, or the interpreter ends
            return
        pool = its_pool()
        if pool is None:
            release(self.room)
        else:
            pool.give_back(self.room)

    def write(self, at: int, k: Array, v: Array) -> None:
        """Entries of keys (Hkv, n, D) and values (Hkv, n, Dv), from a slot on."""
        count = k.shape[1]
        for columns, block in self.v_blocks:
            block[:, at : at + count] = v[..., columns]
        if count == 1:
            self.k[:, at // PANEL, :, at % PANEL] = k[:, 0]
        else:
            _write_panels(self.k, at, k)

    def write_scales(self, at: int, k_scale: Array, v_scale: Array) -> None:
        """Their scales (Hkv, n), in int8."""
        if self.k_scale is not None and self.v_scale is not None:
            self.k_scale[:, at : at + k_scale.shape[1]] = k_scale
            self.v_scale[:, at : at + v_scale.shape[1]] = v_scale

    def key_rows(self) -> Array:
        """The keys (Hkv, P, D), a copy."""
        heads, panels, d, _ = self.k.shape
        return self.k.swapaxes(-1, -2).reshape(heads, panels * PANEL, d)

    def value_rows(self) -> Array:
        """The values (Hkv, P, Dv), a copy."""
        layout = self.layout
        rows = np.empty((layout.kv_heads, layout.size, layout.v_dim), ENTRIES[layout.kind])
        for columns, block in self.v_blocks:
            rows[..., columns] = block
        return rows

    def copy_from(self, other: Page, count: int) -> None:
        """The first keys of another page, into a page of zeros."""
        panels = -(-count // PANEL)
        self.k[:, :panels] = other.k[:, :panels]
        for (_, block), (_, others) in zip(self.v_blocks, other.v_blocks, strict=True):
            block[:, :count] = others[:, :count]
        if other.k_scale is not None and other.v_scale is not None:
            self.write_scales(0, other.k_scale[:, :count], other.v_scale[:, :count])
        self.clear(count, panels * PANEL)

    def clear(self, start: int, stop: int) -> None:
        """Make the slots from start to stop zeros; those from stop on are zeros already."""
        if start >= stop:
            return
        panel, column = divmod(start, PANEL)
        self.k[:, panel, :, column : stop - panel * PANEL] = 0
        self.k[:, panel + 1 : -(-stop // PANEL)] = 0
        for _, block in self.v_blocks:
            block[:, start:stop] = 0
        if self.k_scale is not None and self.v_scale is not None:
            self.k_scale[:, start:stop] = 0
            self.v_scale[:, start:stop] = 0


def _write_panels(panels: Array, at: int, rows: Array) -> None:
    """Rows (Hkv, n, D) into panels (Hkv, P / 64, D, 64), from column at on."""
    heads, count, d = rows.shape
    done = 0
    while done < count:
        panel, column = divmod(at + done, PANEL)
        whole = (count - done) // PANEL
        if column == 0 and whole:
            taken = rows[:, done : done + whole * PANEL].reshape(heads, whole, PANEL, d)
            panels[:, panel : panel + whole] = taken.swapaxes(-1, -2)
            done += whole * PANEL
        else:
            n = min(PANEL - column, count - done)
            panels[:, panel, :, column : column + n] = rows[:, done : done + n].swapaxes(-1, -2)
            done += n


class Pool:
    """Where the pages of a cache, and of its forks, come from.

    Memory is asked for in slabs, and goes back to the system when no page of its slab is left.  The
    first ones hold what was asked for and no more; they grow with the cache, and take huge pages
    once it is large.  The lists are changed by single operations, which are atomic, so that caches
    on several threads may share a pool.
    """

    def __init__(self, layout: Layout) -> None:
        self.clean: list[Array] = []  # rooms that nobody wrote to yet
        self.used: list[Array] = []  # rooms that were given up
        self.layout = layout
        self.offsets = layout.offsets
        self.nbytes = self.offsets[-1]  #: of a page
        self.large_scales = False  # whether one of int8 may make products that float32 cannot hold
        self.rooms = 0  # that are there, roughly, where threads change it at once
        self.stores: list[None] = []  # as many as there are stores that take pages here

    def __del__(self, at_the_end: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.rooms > self._idle() and not at_the_end():  # pages outlive it, and keep their slabs
            self.trim(0)

    def take(self, count: int, keys: int = 0) -> list[Page]:
        """That many pages of zeros, or MemoryError and none.

        keys is how many the cache is to hold with them.
        """
        pages: list[Page] = []
        try:
            if count * self.nbytes > 16 * _SLAB:
                allocate(count * self.nbytes)  # given up at once: too much fails before it is tried
            while len(pages) < count:
                room = _pop(self.used)
                if room is not None:
                    room.fill(0)
                else:
                    room = _pop(self.clean)
                if room is not None:
                    pages.append(Page(room, self))
                else:
                    self._grow(count - len(pages), keys)
        except (OSError, OverflowError, ValueError, MemoryError) as error:
            pages.clear()
            raise MemoryError(
                f"no memory for {count} pages of {self.nbytes} bytes, {self.layout.size} keys each"
            ) from error
        return pages

    def give_back(self, room: Array) -> None:
        """Keep a room for the next page; if there are enough of them, let its memory go.

        Some are kept, since beam search takes pages and gives them up all the time.  The slab that
        it lies in may have to stay for others.
        """
        self.used.append(room)
        if self.stores:  # else all of them come, and their slabs go as a whole
            self.trim(min(self.rooms - self._idle(), _SPARE // self.nbytes))

    def spare(self) -> int:
        """Bytes of rooms that are in no page."""
        return self._idle() * self.nbytes

    def _idle(self) -> int:
        return len(self.clean) + len(self.used)

    def trim(self, most: int) -> None:
        """Let the memory of rooms go that are in no page, but for so many."""
        while self._idle() > most:
            room = _pop(self.used)
            if room is None:
                room = _pop(self.clean)
            if room is None:  # another thread took it
                return
            self.rooms -= 1
            release(room)

    def _grow(self, wanted: int, keys: int) -> None:
        """One more slab, for so many pages or some of them."""
        most = min(-(-_SLAB // self.nbytes), _MOST_ROOMS)
        fit = min(max(wanted, self.rooms // SHARE), most)
        pages = self.rooms + wanted
        held = keys * self.nbytes // self.layout.size
        huge = held >= _HUGE or (pages >= _MANY and pages * self.nbytes >= 2 * _SLAB)
        slab = allocate(fit * self.nbytes)
        if not huge:
            _advise(slab, "MADV_NOHUGEPAGE")
        self.rooms += fit
        for n in range(fit - 1, -1, -1):
            self.clean.append(slab[n * self.nbytes : (n + 1) * self.nbytes])


def _pop(rooms: list[Array]) -> Array | None:
    try:
        return rooms.pop()
    except IndexError:  # another thread took it
        return None


def release(room: Array) -> None:
    """Give the system pages that a part of what allocate gave fills; it is not to be used again."""
    _advise(room, "MADV_DONTNEED")


def _advise(room: Array, advice: str) -> None:
    """What to do with the pages that a part of what allocate gave fills."""
    whole: Any = room
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    memory = whole.base
    if isinstance(memory, memoryview):
        memory = memory.obj
    if not (isinstance(memory, mmap.mmap) and hasattr(mmap, advice)):
        return
    first = room.ctypes.data - whole.ctypes.data
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (first + room.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        with contextlib.suppress(OSError):  # a kernel that has no such advice
            memory.madvise(getattr(mmap, advice), start, stop - start)


def allocate(nbytes: int) -> Array:
    """Zeroed bytes from the system, in huge pages where it has them and they fill one.

    Private to the process, so that a forked child has its own, and so that Linux gives huge pages.
    """
    private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
    whole = nbytes // _HUGE * _HUGE
    memory = mmap.mmap(-1, nbytes + _HUGE if whole else nbytes, **private)
    room = np.frombuffer(memory, np.uint8)
    skip = -room.ctypes.data % _HUGE if whole else 0
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            if whole:
                memory.madvise(mmap.MADV_HUGEPAGE, skip, whole)
            # what fills none would take one for a few bytes
            memory.madvise(mmap.MADV_NOHUGEPAGE, skip + whole, len(memory) - skip - whole)
    return room[skip : skip + nbytes]
