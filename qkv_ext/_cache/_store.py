"""What a KVCache does, without its checks and its lock.

    store       one Item for each batch item, and how many keys each has
      item        a list of pages, page n with the keys nP to (n + 1)P of the item
        page        see _pages.py

Growing adds pages and copies nothing.  A page that two items may hold is shared, and what is shared
is never written again, where a key is.  Who may write is told by a token: a page is written by the
item whose token it carries.  To share all pages of an item is to give it another token; where it
would write to one of them it then writes to a copy.  The page that is not full may be lent: another
item writes behind the keys that were there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkv_ext._cache._pages import SHARE, Layout, Page, Pool
from qkv_ext._core._arrays import FLOAT32, Array
from qkv_ext._core._storage import ENTRIES, SCALED, encode, widen

#: Integer keys with scales below it make products that float32 holds, unless q is as large.
_LARGE_SCALE = np.float32(2.0**60)
_MOST_PAGES = 1 << 20  #: that an item may ask for at once; memory ends before that


class Item:
    """The pages of one batch item, None for one that was dropped."""

    __slots__ = ("floor", "owner", "pages", "stale", "table")

    def __init__(self, pages: list[Page | None], table: Array) -> None:
        self.owner = object()  # the token
        self.pages = pages
        self.table = table  # int64 (as many or more, 4): the addresses of the pages
        self.stale = False  # unless it is not, because a change was interrupted
        self.floor = 0  # keys before it, in a page that was lent, are others' too

    @classmethod
    def empty(cls) -> Item:
        return cls([], np.zeros((4, 4), np.int64))

    def share(self) -> Item:
        """Another item with the same pages; neither may write to them from now on."""
        self.owner = object()
        self.addresses()
        return Item(self.pages.copy(), self.table.copy())

    def lend(self, length: int, size: int) -> Item:
        """share, but that the other may write behind these keys, if this item may."""
        index = length // size
        lent = self.pages[index] if length % size and self.may_write(index) else None
        other = self.share()
        if lent is not None:
            lent.owner, other.floor = other.owner, length
        return other

    def give_up(self, length: int, size: int) -> None:
        """Write no more to a page that was lent, where fewer keys are to stay than there were."""
        if length < self.floor:
            page = self.pages[self.floor // size]
            if page is not None and page.owner is self.owner:
                page.owner = None
            self.floor = 0  # last: whatever interrupts this, what others see is not written to

    def may_write(self, index: int) -> bool:
        """Whether there is such a page, and no other item writes to it or sees what is written."""
        page = self.pages[index] if index < len(self.pages) else None
        return page is not None and page.owner is self.owner

    def writable(self, index: int) -> int:
        """The page up to which all from index on may be written to; index itself for none."""
        while self.may_write(index):
            index += 1
        return index

    def reserve(self, count: int) -> None:
        """Room for the addresses of that many pages."""
        if count > len(self.table):
            table = np.zeros((max(count, 2 * len(self.table)), 4), np.int64)
            table[: len(self.table)] = self.table
            self.table = table

    def put(self, index: int, page: Page) -> None:
        """A page of its own, in the place of one or behind the last; room is reserved."""
        page.owner = self.owner
        self.stale = True  # the page that was there may be given up between the two
        self.table[index] = page.addresses
        self.pages[index : index + 1] = [page]
        self.stale = False

    def addresses(self) -> Array:
        """The table of the pages that are there."""
        if self.stale:
            for index, page in enumerate(self.pages):
                self.table[index] = 0 if page is None else page.addresses
            self.stale = False
        return self.table[: len(self.pages)]

    def read(self, layout: Layout, start: int, stop: int, what: str) -> tuple[Array, Array | None]:
        """Stored entries of "k" or "v" as rows (Hkv, n, D or Dv), and the scales (Hkv, n) of int8.

        Keys that were dropped are zeros.
        """
        heads, size = layout.kv_heads, layout.size
        width = layout.head_dim if what == "k" else layout.v_dim
        entries = np.zeros((heads, max(stop - start, 0), width), ENTRIES[layout.kind])
        scales = np.zeros(entries.shape[:2], FLOAT32) if layout.kind in SCALED else None
        for index in range(start // size, -(-stop // size)):
            page = self.pages[index]
            if page is None:
                continue
            first = index * size
            low, high = max(start, first), min(stop, first + size)
            here, there = slice(low - start, high - start), slice(low - first, high - first)
            rows = page.value_rows() if what == "v" else page.key_rows()
            entries[:, here] = rows[:, there]
            if scales is not None:
                of_page: Any = page.v_scale if what == "v" else page.k_scale
                scales[:, here] = of_page[:, there]
        return entries, scales


class Pages(NamedTuple):
    """The keys and values of one attention call, as a backend reads them.

    Page n of item b is row first[b] + n of table.
    """

    layout: Layout
    lengths: list[int]  # which nobody changes: a new one takes its place
    table: Array  # int64 (pages, 4): where k, v, k_scale and v_scale lie, 0 for none
    first: Array  # int64 (B + 1,)
    items: list[Item]  # which hold the memory that table points to
    large_scales: bool  # see Pool

    def keys(self, b: int, stop: int, start: int = 0) -> Array:
        """float32 (Hkv, stop - start, D), a copy."""
        return widen(*self.items[b].read(self.layout, start, stop, "k"), self.layout.kind)

    def values(self, b: int, stop: int, start: int = 0) -> Array:
        """float32 (Hkv, stop - start, Dv), a copy."""
        return widen(*self.items[b].read(self.layout, start, stop, "v"), self.layout.kind)


class Store:
    """The items of a cache; every argument is checked already."""

    __slots__ = ("_first", "_table", "dropped", "items", "layout", "lengths", "pool", "until")

    _table: Array | None  # that of Pages; None where pages came, went or were shared
    _first: Array
    until: list[int]  # up to how many keys an item may write to pages that are there; as of pages()

    def __init__(
        self, pool: Pool, items: list[Item], lengths: list[int], dropped: list[int]
    ) -> None:
        self.pool, self.layout = pool, pool.layout
        self.items, self.lengths, self.dropped = items, lengths, dropped
        self._table = None
        pool.stores.append(None)

    def __del__(self) -> None:
        pool = getattr(self, "pool", None)
        if pool is not None:
            pool.stores.pop()

    @classmethod
    def empty(cls, layout: Layout, batch: int) -> Store:
        return cls(Pool(layout), [Item.empty() for _ in range(batch)], [0] * batch, [0] * batch)

    def pages(self) -> Pages:
        if self._table is None:
            size, parts = self.layout.size, [item.addresses() for item in self.items]
            first = np.zeros(len(parts) + 1, np.int64)
            np.cumsum([len(part) for part in parts], out=first[1:])
            self._first = first
            self.until = [
                item.writable(length // size) * size
                for item, length in zip(self.items, self.lengths, strict=True)
            ]
            self._table = np.concatenate(parts) if parts else np.zeros((0, 4), np.int64)
        large = self.pool.large_scales
        fields = self.layout, self.lengths, self._table, self._first, self.items, large
        return tuple.__new__(Pages, fields)  # Pages(...) in half the time

    def nbytes(self) -> int:
        held = sum(page is not None for item in self.items for page in item.pages)
        return held * self.pool.nbytes + self.pool.spare()

    def append_plain(self, k: Any, v: Any, plain: Callable[..., Any], threads: int) -> bool:
        """append of all rows of arrays that can be taken as they are, where pages are there."""
        done = plain(k, v, self.pages(), self.until, threads)
        if done is not None:
            self.grow(*done)
        return done is not None

    def grow(self, lengths: list[int], large_scales: bool) -> None:
        """Keys are written behind those that are there; now they count."""
        if large_scales:
            self.pool.large_scales = True
        self.lengths = lengths

    def append(
        self, k: Array, v: Array, counts: list[int], compiled: Callable[..., bool] | None,
        threads: int,
    ) -> None:  # fmt: skip
        """The first of the keys (B, Hkv, n, D) and values (B, Hkv, n, Dv), so many for each item.

        MemoryError leaves the store as it was.
        """
        if compiled is not None:
            self._make_room(counts)
            if compiled(k, v, counts, self.pages(), threads):
                self.pool.large_scales = True
        else:
            keys, values = self._encoded(k, counts), self._encoded(v, counts)
            self._make_room(counts)
            for b, (count, own_k, own_v) in enumerate(zip(counts, keys, values, strict=True)):
                self._write(b, count, own_k[0], own_v[0], own_k[1], own_v[1])
        # only now are they there: nothing that was there before has changed
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]

    def _encoded(self, x: Array, counts: list[int]) -> list[tuple[Array, Array | None]]:
        """Entries and scales of each item; what its count leaves out is not read."""
        kind = self.layout.kind
        if len(set(counts)) > 1:
            return [encode(x[b, :, :count], kind) for b, count in enumerate(counts)]
        entries, scales = encode(x, kind)
        return [(entries[b], None if scales is None else scales[b]) for b in range(len(counts))]

    def _write(self, b: int, count: int, k: Array, v: Array, k_scale: Any, v_scale: Any) -> None:
        """Entries k (Hkv, n, D) and v (Hkv, n, Dv) behind the keys of an item that has room."""
        if k_scale is not None and not k_scale.max(initial=0) < _LARGE_SCALE:
            self.pool.large_scales = True
        size, item, length, done = self.layout.size, self.items[b], self.lengths[b], 0
        while done < count:
            index, at = divmod(length + done, size)
            part = slice(done, min(done + size - at, count))
            page: Any = item.pages[index]
            page.write(at, k[:, part], v[:, part])
            if k_scale is not None:
                page.write_scales(at, k_scale[:, part], v_scale[:, part])
            done = part.stop

    def _make_room(self, counts: list[int]) -> None:
        """Pages for so many more keys; one that is shared is copied."""
        size = self.layout.size
        wanted: list[tuple[Item, int, int]] = []  # item, index, and how many keys to copy
        for item, length, count in zip(self.items, self.lengths, counts, strict=True):
            if not count:
                continue
            index, used = divmod(length, size)
            stop = -(-(length + count) // size)
            if stop - index > _MOST_PAGES:
                raise MemoryError(f"no memory for {stop - index} pages of {self.pool.nbytes} bytes")
            for n in range(index, stop):
                if not item.may_write(n):
                    wanted.append((item, n, used if n == index else 0))
        if not wanted:
            return
        for item, n, _ in wanted:
            item.reserve(n + 1)
        pages = self.pool.take(len(wanted), sum(self.lengths) + sum(counts))
        self._table = None
        for (item, n, used), page in zip(wanted, pages, strict=True):
            shared = item.pages[n] if used and n < len(item.pages) else None
            if shared is not None:
                page.copy_from(shared, used)
            item.put(n, page)

    def truncate(self, lengths: list[int]) -> None:
        """Takes no memory, so that an append can always be taken back."""
        size, before = self.layout.size, self.lengths
        self._table = None
        for item, new in zip(self.items, lengths, strict=True):
            item.give_up(new, size)
        self.lengths = lengths
        self.dropped = [min(a, b) for a, b in zip(self.dropped, lengths, strict=True)]
        for item, old, new in zip(self.items, before, lengths, strict=True):
            if old == new:
                continue
            index, used = divmod(new, size)
            del item.pages[-(-new // size) :]
            if used and item.may_write(index):
                page = item.pages[index]
                assert page is not None
                page.clear(used, min(old - index * size, size))
        self._shrink()

    def drop(self, before: list[int]) -> None:
        """Whatever interrupts it, pages go only after their keys are dropped."""
        size = self.layout.size
        self._table = None
        self.dropped = [max(a, b) for a, b in zip(self.dropped, before, strict=True)]
        for item, dropped in zip(self.items, self.dropped, strict=True):
            stop = dropped // size
            start = next((n for n in range(stop) if item.pages[n] is not None), stop)
            item.pages[start:stop] = [None] * (stop - start)
            item.table[start:stop] = 0
        self._shrink()

    def _shrink(self, needed: int = 0) -> None:
        """Keep no more room for pages than a part of those that are held, or what is needed."""
        if self.pool.spare():
            size, each = self.layout.size, zip(self.lengths, self.dropped, strict=True)
            held = sum(-(-length // size) - gone // size for length, gone in each)
            self.pool.trim(max(held // SHARE, needed))

    def reorder(self, indices: list[int]) -> None:
        """Items that are used once stay, the others are shared.  No page is copied."""
        times = [0] * len(self.items)
        for n in indices:
            times[n] += 1
        items = [self.items[n] if times[n] == 1 else self.items[n].share() for n in indices]
        lengths, dropped = ([of[n] for n in indices] for of in (self.lengths, self.dropped))
        self._table = None
        self.items, self.lengths, self.dropped = items, lengths, dropped
        shared = (times[n] > 1 and lengths[b] % self.layout.size > 0 for b, n in enumerate(indices))
        self._shrink(sum(shared))  # the next append copies their last pages

    def fork(self) -> Store:
        """Shares full pages, and copies the last one of each item."""
        size, last = self.layout.size, []  # item, page and keys of those that are not full
        for n, (item, length) in enumerate(zip(self.items, self.lengths, strict=True)):
            index, used = divmod(length, size)
            page = item.pages[index] if used else None
            if page is not None:
                last.append((n, index, page, used))
        self._table = None
        copies = self.pool.take(len(last))
        for (_, _, page, used), copy in zip(last, copies, strict=True):
            copy.copy_from(page, used)
        own = {n for n, index, _, _ in last if self.items[n].may_write(index)}
        items = [item.share() for item in self.items]
        for (n, index, page, _), copy in zip(last, copies, strict=True):
            items[n].put(index, copy)
            if n in own:  # nobody else holds it
                page.owner = self.items[n].owner
        return Store(self.pool, items, list(self.lengths), list(self.dropped))

    @classmethod
    def joined(cls, stores: Sequence[Store]) -> Store:
        """The items of several stores of one layout; all pages are shared, and none is copied.

        Those that are not full are lent, where the part may write to them itself: an append to the
        whole then copies none, and one to the part does.
        """
        for store in stores:
            store._table = None
        size = stores[0].layout.size
        items = [
            item.lend(length, size)
            for store in stores
            for item, length in zip(store.items, store.lengths, strict=True)
        ]
        lengths = [n for store in stores for n in store.lengths]
        dropped = [n for store in stores for n in store.dropped]
        pool = max((store.pool for store in stores), key=lambda pool: pool.rooms)
        if any(store.pool.large_scales for store in stores):
            pool.large_scales = True
        return cls(pool, items, lengths, dropped)

    def state(self) -> tuple[Any, ...]:
        """The layout, lengths, dropped keys and dropped pages, and what is stored of the others."""
        stored = [
            [item.read(self.layout, start, stop, what) for what in "kv"]
            for item, start, stop in zip(self.items, self.dropped, self.lengths, strict=True)
        ]
        gone = [item.pages.count(None) for item in self.items]  # those before all others
        return tuple(self.layout), self.lengths, self.dropped, gone, stored

    @classmethod
    def restored(
        cls,
        layout: tuple[Any, ...],
        lengths: list[int],
        dropped: list[int],
        gone: list[int],
        stored: list[Any],
    ) -> Store:
        """A store that shares nothing, out of the state of another; the bits are the same."""
        store = cls.empty(Layout(*layout), len(lengths))
        size = store.layout.size
        for item, count in zip(store.items, gone, strict=True):
            item.reserve(count)
            item.pages = [None] * count
        # all pages first, those too of which every key was dropped
        store.lengths = [min(count * size, n) for count, n in zip(gone, lengths, strict=True)]
        store._make_room([n - own for own, n in zip(store.lengths, lengths, strict=True)])
        store.lengths, store.dropped = list(dropped), list(dropped)
        for b, ((k, k_scale), (v, v_scale)) in enumerate(stored):
            store._write(b, lengths[b] - dropped[b], k, v, k_scale, v_scale)
        store.lengths = list(lengths)
        return store
