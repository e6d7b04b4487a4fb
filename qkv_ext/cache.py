"""The keys and values of a decoder, kept between its steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Literal, Self, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from qkv_ext._cache import _check_cache
from qkv_ext._cache._store import Store
from qkv_ext._core import _backends, _copies
from qkv_ext._core._backends import default_backend
from qkv_ext._core._options import ATTENTION, EXTRAS, Flag, LayoutOptions, No, Yes, shows, take
from qkv_ext._core._threads import threads_of

Array = NDArray[Any]

__all__ = ["KVCache"]


class KVCache:
    """Keys and values that are appended to and attended to, one sequence for each batch item.

    ``cache.append(k, v)`` puts new keys and values behind those that are there, and
    ``cache.attend(q)`` is ``scaled_dot_product_attention(q, K, V)`` over all of them.

    Parameters
    ----------
    batch : int
        B, how many sequences there are.
    num_kv_heads : int
        Hkv.
    head_dim, v_dim : int
        D of the keys and Dv of the values; v_dim is head_dim by default.
    dtype : {"float32", "float16", "bfloat16", "int8"}
        What keys and values are kept as, by name or as a dtype.  Whatever it is, arrays of float32,
        float16 and bfloat16 come in, everything is computed in float32, and the output has the
        dtype of q.

    Attributes
    ----------
    batch, num_kv_heads, head_dim, v_dim : int
    dtype : str
    lengths : array (B,)
        How many keys each item has, dropped ones counted too; a copy, int64.
    dropped : array (B,)
        How many of them were dropped; a copy, int64.
    nbytes : int
        What this cache keeps from being freed: its pages, those that are shared for each cache and
        item, and what is kept for the next ones.

    Raises
    ------
    TypeError, ValueError
        Sizes that are no integers in range, an unknown dtype.

    Notes
    -----
    - A key or value x of float32 is stored with an error per entry of at most

          float32   0
          float16   |x| / 2^11, or 2^-25 if that is more; infinite from 65520 on
          bfloat16  |x| / 2^8, or 2^-134 if that is more; infinite from 2^128 - 2^119 on
          int8      m / 253 + 2^-149, where m is the largest |x| of the row

      A row is the D (or Dv) entries of one key (or value) of one head.  An int8 row that holds a
      number which is not finite reads back as NaN.  Errors of at most dk in the keys and dv in the
      values change an output by at most ``dv + max |v| (exp(2 |scale| sum |q| dk) - 1)``, sum |q|
      being that of the query's entries.  ``keys`` and ``values`` return what is stored; over it,
      attention has the error of ``scaled_dot_product_attention``.
    - A key takes Hkv (D + Dv) entries of 4, 2, 2 or 1 bytes, and 8 Hkv bytes more in int8.
    - Memory is taken in pages of 256 keys of an item, so growing copies nothing.  ``fork`` and
      ``reorder`` share pages; one that is shared is copied before it is written to.
    - In the compiled backends many rows of q at once have the bits of the same rows one by one,
      however the keys were appended.
    - Every method takes the lock of its cache: one cache may be used from several threads, whose
      calls then follow each other.  A signal handler that uses the cache whose call it interrupts
      gets a RuntimeError.  Caches can be pickled; copy.copy forks, copy.deepcopy shares nothing.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 6, 8), "f4")
    >>> cache = qkv_ext.KVCache(batch=1, num_kv_heads=2, head_dim=8)
    >>> cache.append(k[:, :, :5], v[:, :, :5])  # the prompt
    >>> cache.attend(q[:, :, :5], causal=True).shape
    (1, 2, 5, 8)
    >>> cache.append(k[:, :, 5:], v[:, :, 5:])  # and one step
    >>> step = cache.attend(q[:, :, 5:])
    >>> whole = qkv_ext.scaled_dot_product_attention(q, k, v, causal=True)
    >>> step.shape, bool(np.allclose(step, whole[:, :, 5:], atol=1e-6))
    ((1, 2, 1, 8), True)
    >>> cache
    KVCache(batch=1, num_kv_heads=2, head_dim=8, dtype='float32', lengths=[6])

    References
    ----------
    Pages are those of W. Kwon et al., "Efficient Memory Management for Large Language Model Serving
    with PagedAttention" (2023).
    """

    __slots__ = ("__weakref__", "_locks", "_store")

    _store: Store
    #: by process, since a forked child finds its parent's held by threads that it does not have;
    #: threading.RLock, for it knows its owner: nobody takes it twice
    _locks: dict[int, Any]

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        v_dim: int | None = None,
        *,
        dtype: DTypeLike | Literal["bfloat16"] = "float32",
        _page: int = 256,
    ) -> None:
        layout = _check_cache.layout(num_kv_heads, head_dim, v_dim, dtype, _page)
        self._store = Store.empty(layout, _check_cache.batch(batch))
        self._locks = {}

    @classmethod
    def _of(cls, store: Store) -> Self:
        cache = cls.__new__(cls)
        cache._store, cache._locks = store, {}
        return cache

    def _locked(self) -> Any:
        """The lock, to be held by one call at a time."""
        lock = self._locks.get(os.getpid())
        if lock is None:
            lock = self._locks.setdefault(os.getpid(), threading.RLock())
        if lock._is_owned():  # waiting for oneself would last for ever
            raise RuntimeError("this KVCache is in use by the call that this code interrupted")
        return lock

    # ---- what it is -----------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        return len(self._store.lengths)

    @property
    def num_kv_heads(self) -> int:
        return self._store.layout.kv_heads

    @property
    def head_dim(self) -> int:
        return self._store.layout.head_dim

    @property
    def v_dim(self) -> int:
        return self._store.layout.v_dim

    @property
    def dtype(self) -> str:
        return self._store.layout.kind

    @property
    def lengths(self) -> Array:
        return np.array(self._store.lengths, np.int64)

    @property
    def dropped(self) -> Array:
        return np.array(self._store.dropped, np.int64)

    @property
    def nbytes(self) -> int:
        with self._locked():
            return self._store.nbytes()

    def __repr__(self) -> str:
        own, lengths = self._store.layout, self._store.lengths
        shown = lengths if len(lengths) <= 16 else f"{min(lengths)} to {max(lengths)}"
        v_dim = "" if own.v_dim == own.head_dim else f"v_dim={own.v_dim}, "
        return (
            f"{type(self).__name__}(batch={len(lengths)}, num_kv_heads={own.kv_heads}, "
            f"head_dim={own.head_dim}, {v_dim}dtype={own.kind!r}, lengths={shown})"
        )

    # ---- append and attend ----------------------------------------------------------------------

    def append(self, k: ArrayLike, v: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """Put keys and values behind those that are there.

        Parameters
        ----------
        k : array (B, Hkv, n, D)
            float32, float16 or bfloat16.
        v : array (B, Hkv, n, Dv)
            Of the dtype of k.
        lengths : integers (B,), optional
            How many of the n each item takes, all of them by default; the others are not read.

        Raises
        ------
        TypeError, ValueError
            Shapes or dtypes that do not fit, lengths beyond n.
        MemoryError
            No memory for more pages.

        Notes
        -----
        If it fails the cache is as it was.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> cache = qkv_ext.KVCache(2, 1, 8)
        >>> kv = np.ones((2, 1, 5, 8), "f4")
        >>> cache.append(kv, kv, lengths=[5, 3])
        >>> cache.lengths
        array([5, 3])
        """
        with self._locked():
            store, backend, threads = self._store, _backends.DEFAULT, threads_of(None)
            if lengths is None and store.append_plain(k, v, backend.plain_append, threads):
                return
            store.append(*_check_cache.appended(store, k, v, lengths), backend.append, threads)

    @overload
    def attend(
        self, q: ArrayLike, *,
        return_weights: No = ..., return_lse: No = ..., **options: Unpack[LayoutOptions],
    ) -> Array: ...  # fmt: skip
    @overload
    def attend(
        self, q: ArrayLike, *,
        return_weights: Yes, return_lse: No = ..., **options: Unpack[LayoutOptions],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def attend(
        self, q: ArrayLike, *,
        return_weights: No = ..., return_lse: Yes, **options: Unpack[LayoutOptions],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def attend(
        self, q: ArrayLike, *,
        return_weights: Yes, return_lse: Yes, **options: Unpack[LayoutOptions],
    ) -> tuple[Array, Array, Array]: ...  # fmt: skip
    @overload
    def attend(
        self, q: ArrayLike, *,
        return_weights: Flag = ..., return_lse: Flag = ..., **options: Unpack[LayoutOptions],
    ) -> Array | tuple[Array, ...]: ...  # fmt: skip
    @shows(LayoutOptions, *EXTRAS)
    def attend(
        self,
        q: ArrayLike,
        *,
        return_weights: bool | np.bool_ = False,
        return_lse: bool | np.bool_ = False,
        **options: Unpack[LayoutOptions],
    ) -> Any:
        """Attention of q to the keys and values that are there.

        Parameters
        ----------
        q : array (B, H, L, D)
            float32, float16 or bfloat16, whatever the cache keeps; H is a multiple of Hkv.
        kv_lengths : integers (B,), optional
            How many keys of each item take part, the lengths of the cache by default and at most.
        q_lengths : integers (B,), optional
            How many queries of each item there are: after ``append(k, v, lengths=n)`` it is n.
        layout : {"bhld", "blhd"}
            "blhd" takes q and out as (B, L, H, D) and (B, L, H, Dv).
        return_weights, return_lse : bool
            Return the weights (B, H, L, S) and the log-sum-exp (B, H, L) as well.
        **options
            As in ``scaled_dot_product_attention``.  S is the largest of the lengths, for mask too.

        Returns
        -------
        output : array (B, H, L, Dv)
            In the dtype and layout of q.  With extras, a tuple in the order output, weights, lse.

        Raises
        ------
        TypeError, ValueError
            As ``scaled_dot_product_attention`` does; a query that sees keys that were dropped,
            whatever the mask says of them.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> cache = qkv_ext.KVCache(1, 1, 4)
        >>> k, v = np.zeros((1, 1, 3, 4), "f4"), np.float32([1, 3, 8]).repeat(4)
        >>> cache.append(k, v.reshape(1, 1, 3, 4))
        >>> cache.attend(k, causal=True)[0, 0, :, 0]
        array([1., 2., 4.], dtype=float32)
        """
        given = take(options, "KVCache.attend", ATTENTION, return_weights, return_lse)
        with self._locked():
            store = self._store
            if not any(store.dropped):  # most calls give no option but causal
                backend, threads = default_backend(given.backend), threads_of(given.threads)
                output = backend.plain_attend(q, store.pages(), given, threads)
                if output is not None:
                    return output
            checked = _check_cache.attention(store, q, given)
            return _backends.attention(checked, given.backend)

    # ---- what is there --------------------------------------------------------------------------

    def keys(self, b: int) -> Array:
        """The keys of one item as they are stored; values(b) are its values.

        Parameters
        ----------
        b : int
            Which item, 0 to B - 1.

        Returns
        -------
        array (Hkv, length, D)
            A float32 copy.  Keys that were dropped are left out: what is returned starts at
            position dropped[b].

        Raises
        ------
        TypeError, ValueError
            No such item.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> cache = qkv_ext.KVCache(1, 1, 2, dtype="float16")
        >>> cache.append(np.full((1, 1, 1, 2), 0.1, "f4"), np.zeros((1, 1, 1, 2), "f4"))
        >>> cache.keys(0)
        array([[[0.09997559, 0.09997559]]], dtype=float32)
        """
        with self._locked():
            store, b = self._store, _check_cache.item(self._store, b)
            return store.pages().keys(b, store.lengths[b], store.dropped[b])

    def values(self, b: int) -> Array:
        """The values of one item as they are stored, as ``keys`` has its keys.

        Parameters
        ----------
        b : int
            Which item, 0 to B - 1.

        Returns
        -------
        array (Hkv, length, Dv)
            A float32 copy, from position dropped[b] on.

        Raises
        ------
        TypeError, ValueError
            No such item.

        Examples
        --------
        >>> import qkv_ext
        >>> qkv_ext.KVCache(1, 2, 8, 4).values(0).shape
        (2, 0, 4)
        """
        with self._locked():
            store, b = self._store, _check_cache.item(self._store, b)
            return store.pages().values(b, store.lengths[b], store.dropped[b])

    # ---- taking back, sharing -------------------------------------------------------------------

    def truncate(self, lengths: ArrayLike) -> None:
        """Take back the last keys, down to a length for each item.

        Parameters
        ----------
        lengths : integer or integers (B,)
            Each at most the length that the item has.

        Raises
        ------
        TypeError, ValueError
            Lengths that are no integers in that range.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> cache = qkv_ext.KVCache(2, 1, 8)
        >>> cache.append(np.ones((2, 1, 5, 8), "f4"), np.ones((2, 1, 5, 8), "f4"))
        >>> cache.truncate([3, 5])
        >>> cache.lengths
        array([3, 5])
        """
        with self._locked():
            self._store.truncate(_check_cache.per_item(self._store, lengths, "lengths"))

    def drop(self, before: ArrayLike) -> None:
        """Forget the keys before a position, as a window leaves them behind.

        Positions and lengths go on counting them.  Memory is given back by whole pages, which for
        decoding with ``window=(left, 0)`` is
        ``cache.drop(np.maximum(cache.lengths - left, 0))`` after a step.

        Parameters
        ----------
        before : integer or integers (B,)
            Each at most the length of the item; positions that are dropped already stay so.

        Raises
        ------
        TypeError, ValueError
            Positions that are no integers in that range.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> cache = qkv_ext.KVCache(1, 1, 8)
        >>> cache.append(np.ones((1, 1, 600, 8), "f4"), np.ones((1, 1, 600, 8), "f4"))
        >>> cache.drop(550)
        >>> cache.lengths, cache.dropped, cache.keys(0).shape
        (array([600]), array([550]), (1, 50, 8))
        >>> cache.attend(np.ones((1, 1, 1, 8), "f4"), window=(49, 0)).shape
        (1, 1, 1, 8)
        """
        with self._locked():
            self._store.drop(_check_cache.per_item(self._store, before, "before"))

    def reorder(self, indices: ArrayLike) -> None:
        """Make the batch of its own items: item i becomes what item indices[i] was.

        Any number of indices makes a batch of that many.  No page is copied before one of the items
        that share it is appended to.

        Parameters
        ----------
        indices : integers (n,)
            Each from 0 to B - 1, as often as wanted: beam search keeps the sequences it extends.

        Raises
        ------
        TypeError, ValueError
            Indices that are no integers in that range.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> cache = qkv_ext.KVCache(2, 1, 8)
        >>> cache.append(*np.ones((2, 2, 1, 5, 8), "f4"), lengths=[5, 3])
        >>> cache.reorder([1, 1, 0])
        >>> cache.lengths
        array([3, 3, 5])
        """
        with self._locked():
            self._store.reorder(_check_cache.indices(self._store, indices))

    def fork(self) -> Self:
        """Another cache that holds the same, and goes on by itself.

        Full pages are shared, and the last one of each item is copied.

        Returns
        -------
        KVCache
            Of the class of this one; what a subclass added to it is shared, as by copy.copy.

        Raises
        ------
        MemoryError
            No memory for these copies.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> cache = qkv_ext.KVCache(1, 1, 8)
        >>> cache.append(*np.ones((2, 1, 1, 5, 8), "f4"))
        >>> other = cache.fork()
        >>> other.append(*np.ones((2, 1, 1, 1, 8), "f4"))
        >>> cache.lengths, other.lengths
        (array([5]), array([6]))
        """
        with self._locked():
            other = self._of(self._store.fork())
        _copies.set_state(other, _copies.added_state(self, KVCache))
        return other

    @classmethod
    def concatenate(cls, caches: Iterable[KVCache]) -> Self:
        """The items of several caches, one after the other, in one: a batch that requests join.

        Pages are shared and nothing is copied.  The caches stay as they are and go on by
        themselves.  A page that is not full is appended to by the first cache that was made of its
        own; every other one that holds it copies it when it is appended to.

        Parameters
        ----------
        caches : iterable of KVCache
            At least one; of one num_kv_heads, head_dim, v_dim and dtype.  The same may occur twice.

        Returns
        -------
        KVCache
            Its batch is the sum of theirs; reorder makes smaller ones of it.

        Raises
        ------
        TypeError
            Something that is no KVCache.
        ValueError
            No cache at all, or caches of different layouts.

        Examples
        --------
        >>> import numpy as np, qkv_ext
        >>> running, new = qkv_ext.KVCache(2, 1, 8), qkv_ext.KVCache(1, 1, 8)
        >>> new.append(*np.ones((2, 1, 1, 5, 8), "f4"))
        >>> batch = qkv_ext.KVCache.concatenate([running, new])
        >>> batch.lengths
        array([0, 0, 5])
        """
        given = _check_cache.caches(caches, KVCache)
        with ExitStack() as locked:  # in one order everywhere, so that no two calls wait for ever
            for cache in sorted({id(cache): cache for cache in given}.values(), key=id):
                locked.enter_context(cache._locked())
            return cls._of(Store.joined([cache._store for cache in given]))

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        from copy import deepcopy  # whoever calls this has it

        build, arguments, *rest = self.__reduce__()
        other: Self = build(*arguments)  # which are copies
        memo[id(self)] = other
        _copies.set_state(other, deepcopy(rest[0], memo) if rest else None)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        with self._locked():
            state = self._store.state()
        return _copies.reduced(self._restored, state, _copies.added_state(self, KVCache))

    @classmethod
    def _restored(cls, *state: Any) -> Self:
        """A cache out of a pickle."""
        return cls._of(Store.restored(*state))


_restored = KVCache._restored  # by this name in pickles of 0.1.0
