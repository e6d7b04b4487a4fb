"""A KVCache that is interrupted, forked with its process, or used by whoever interrupts it."""

import contextlib
import itertools
import os
import signal
import sys
import threading

import numpy as np
import pytest

import qkv_ext
from qkv_ext._cache import _pages, _store

KVCache = qkv_ext.KVCache
FILES = {_store.__file__, _pages.__file__}
CHANGES = {
    "append": lambda c, kv: c.append(*kv[:, :, :, :300]),
    "drop": lambda c, kv: c.drop(550),
    "truncate": lambda c, kv: c.truncate(100),
    "reorder": lambda c, kv: c.reorder([1, 1]),
    "fork": lambda c, kv: c.fork(),
    "concatenate": lambda c, kv: KVCache.concatenate([c, c]),
}


class AtLine:
    """Raises KeyboardInterrupt where the n-th line of the store is about to run."""

    def __init__(self, n):
        self.left, self.raised = n, False

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.frame)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def frame(self, frame, event, argument):
        return self.line if frame.f_code.co_filename in FILES else None

    def line(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.raised = True
                raise KeyboardInterrupt
        return self.line


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shared", [False, True])
def test_interrupted_anywhere(change, shared, rng):
    """Before or after the change, and usable: no page that is gone is read."""
    kv = rng.standard_normal((2, 2, 1, 600, 8), np.float32)
    q = np.ones((2, 1, 1, 8), np.float32)
    for n in range(1, 1000):
        cache = KVCache(2, 1, 8)
        cache.append(*kv)
        if shared:
            cache.reorder([0, 0])
        pool = cache._store.pool
        with AtLine(n) as interrupt, contextlib.suppress(KeyboardInterrupt):
            CHANGES[change](cache, kv)
        rubbish = KVCache._of(_store.Store(pool, [_store.Item.empty()], [0], [0]))
        rubbish.append(*np.full((2, 1, 1, 3000, 8), np.nan, np.float32))  # in rooms given up
        for b in range(cache.batch):  # what any item may hold by now
            kept = slice(cache.dropped[b], cache.lengths[b])
            wholes = [
                np.concatenate([kv[0, n, 0], kv[0, m, 0, :300]]) for n in (0, 1) for m in (0, 1)
            ]
            assert any(np.array_equal(cache.keys(b)[0], whole[kept]) for whole in wholes)
        for backend in qkv_ext.backends():
            assert np.isfinite(cache.attend(q, window=(40, 0), backend=backend)).all()
        ones = np.ones((cache.batch, 1, 2, 8), np.float32)
        cache.append(ones, ones)
        np.testing.assert_allclose(cache.attend(q, window=(1, 0)), 1, rtol=1e-6)
        if not interrupt.raised:
            return
    pytest.fail("the change has no end")


@pytest.mark.slow_beside_fastest
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork beside threads
def test_forked_while_another_thread_computes(compiled, rng):
    """Nobody in the child would ever give the lock back.

    Not on NumPy: OpenBLAS may wait for ever in a fork beside a thread that is in a product.
    """
    kv = rng.standard_normal((2, 1, 8, 4000, 64), np.float32)
    q = rng.standard_normal((1, 8, 64, 64), np.float32)
    cache, stop = KVCache(1, 8, 64), threading.Event()
    cache.append(*kv)
    expected = cache.attend(q, backend=compiled)

    def work():
        while not stop.is_set():
            cache.attend(q, backend=compiled)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(120)
                same = cache.attend(q, threads=1, backend=compiled).tobytes() == expected.tobytes()
                os._exit(0 if same else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
def test_used_by_a_signal_handler(rng):
    """What interrupts a call cannot wait for its end: it is told so, and the call goes on."""
    kv = rng.standard_normal((2, 1, 8, 8000, 64), np.float32)
    q = rng.standard_normal((1, 8, 128, 64), np.float32)
    cache, told = KVCache(1, 8, 64), []
    cache.append(*kv)
    expected = cache.attend(q)

    def handler(*_):
        try:
            told.append(cache.keys(0).shape)
        except RuntimeError as error:
            told.append(str(error))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        while "this KVCache is in use by the call that this code interrupted" not in told:
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            assert cache.attend(q).tobytes() == expected.tobytes()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_end_of_the_interpreter_is_silent(python):
    """A large cache that is there until then, more than is kept of what is given up."""
    code = """
import os
os.dup2(1, 2)  # whatever is said so late
import numpy as np, qkv_ext
cache = qkv_ext.KVCache(1, 8, 64)
for _ in range(10):
    cache.append(*np.ones((2, 1, 8, 2048, 64), "f4"))
keep = lambda: cache  # so that it goes late
"""
    assert python(code) == ""


def test_int8_where_integers_overflow(backend):
    """A score is finite where the formula's is, whatever the product of integers."""
    cache = KVCache(1, 1, 2, dtype="int8")
    k = np.float32([[1e-3, 1e-3], [2e-3, 2e-3], [-1e-3, -1e-3]])[None, None]
    cache.append(k, np.float32([[1, 2], [3, 4], [5, 6]])[None, None])
    q = np.full((1, 1, 1, 2), 1e37, np.float32)
    output, lse = cache.attend(q, scale=1.0, return_lse=True, backend=backend)
    np.testing.assert_allclose(output, cache.values(0)[None, :, 1:2], rtol=1e-6)
    np.testing.assert_allclose(lse, 4e34, rtol=1e-2)


def test_memory_goes_back(rng):
    """What is given up does not stay, though it lay between what is kept."""
    if not hasattr(_pages.mmap, "MADV_DONTNEED") or not os.path.exists("/proc/self/statm"):
        pytest.skip("no way to tell here")

    def resident():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    cache = KVCache(64, 1, 32)
    before = resident()
    block = rng.standard_normal((64, 1, 256, 32), np.float32)
    for _ in range(48):
        cache.append(block, block)
    held = resident() - before
    cache.truncate(0)
    assert held > 150e6
    assert resident() - before < held / 2


@pytest.mark.parametrize("lengths", [[2, 5], [6, 3], [1, 1]])
def test_a_joined_cache_is_cut_whatever_interrupts_it(lengths):
    """At every line: what it writes afterwards is never where the part has its keys."""

    def rows(x, n):
        return np.full((1, 1, n, 4), x, "f4")

    for stop in itertools.count():
        parts = [KVCache(1, 1, 4) for _ in range(2)]
        for part in parts:
            part.append(rows(1, 5), rows(1, 5))
        joined = KVCache.concatenate(parts)
        joined.append(*np.full((2, 2, 1, 1, 4), 2, "f4"))
        seen = 0

        def trace(frame, event, _, stop=stop):
            nonlocal seen
            if not frame.f_code.co_filename.endswith("_store.py"):
                return None
            if event == "line":
                seen += 1
                if seen > stop:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            joined.truncate(lengths)
            ended = True
        except KeyboardInterrupt:
            ended = False
        finally:
            sys.settrace(before)
        joined.append(*np.full((2, 2, 1, 4, 4), 9, "f4"))
        for part in parts:
            assert (part.keys(0) == 1).all(), stop
        if ended:
            break
    assert stop > 10
