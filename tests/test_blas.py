"""G14: the threads of NumPy's BLAS are held to those of a call, and are what they were after it."""

import io
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import qkv_ext
from qkv_ext._core import _blas, _threads

sdpa = qkv_ext.scaled_dot_product_attention
HERE = 6  #: threads that a library has before any call


class Library:
    """What threadpoolctl calls a library controller, of one number for the process or a thread."""

    user_api, threading_layer = "blas", "pthreads"

    def __init__(self, internal_api="openblas"):
        self.internal_api, self.numbers, self.asked = internal_api, threading.local(), []
        self.shared = HERE

    @property
    def num_threads(self):
        per_thread = self.internal_api == "mkl"
        return getattr(self.numbers, "own", HERE) if per_thread else self.shared

    def set_num_threads(self, number):
        self.asked.append(number)
        self.shared = self.numbers.own = number


class Guard(_blas.Guard):
    """A guard of libraries that are not there."""

    def __init__(self, *libraries):
        super().__init__()
        self._libraries = list(libraries)


@pytest.fixture(params=["openblas", "mkl"])
def library(request, monkeypatch):
    library = Library(request.param)
    monkeypatch.setattr(_blas, "GUARD", Guard(library))
    return library


@pytest.fixture
def real():
    """The BLAS of this NumPy, set to a number of threads that is none of its own choosing."""
    pytest.importorskip("threadpoolctl")
    libraries = _blas.GUARD.libraries()
    if not libraries:
        pytest.skip("threadpoolctl knows no BLAS here")
    before = [library.num_threads for library in libraries]
    for library in libraries:
        _blas._set(library, HERE)
    if [library.num_threads for library in libraries] != [HERE] * len(libraries):
        pytest.skip("a BLAS that does not take so many threads")
    yield libraries
    after = [library.num_threads for library in libraries]
    for library, number in zip(libraries, before, strict=True):
        _blas._set(library, number)
    assert after == [HERE] * len(libraries)


def held(threads, compute):
    """Run it as the NumPy backend runs a problem that has these threads."""
    return _blas.held_to_threads(lambda problem: compute())(SimpleNamespace(threads=threads))


def in_threads(count, function):
    """Run function(n) in so many threads, and raise what one of them raised."""
    errors = []

    def run(n):
        try:
            function(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_a_call_holds_the_library(library):
    assert held(2, lambda: library.num_threads) == 2
    assert library.asked == [2, HERE]


def test_nested_calls(library):
    def outer():
        assert library.num_threads == 3
        assert held(1, lambda: library.num_threads) == 1
        assert library.num_threads == 3
        assert held(5, lambda: library.num_threads) == 3

    held(3, outer)
    assert library.num_threads == HERE


def test_what_a_call_raises(library):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        held(1, fail)
    assert library.num_threads == HERE


def test_an_interrupt_on_the_way_out(library):
    """Whatever it is that leaving is interrupted by, it is done."""
    set_num_threads, times = library.set_num_threads, []

    def interrupted(number):
        times.append(number)
        if len(times) == 2:
            raise KeyboardInterrupt
        set_num_threads(number)

    library.set_num_threads = interrupted
    with pytest.raises(KeyboardInterrupt):
        held(1, lambda: None)
    assert library.num_threads == HERE


def test_no_call_raises_the_number(library):
    assert held(200, lambda: library.num_threads) == HERE
    assert not library.asked


def test_threads_that_nobody_asked_for(library):
    held(_threads.Unasked(1), lambda: None)
    assert not library.asked


def test_the_smallest_number_of_those_at_once():
    """One number for the process: a call ends, and the smallest of the others holds."""
    library = Library()
    guard, calls = Guard(library), [object() for _ in range(4)]
    for call, threads, holds in zip(calls, (4, 2, 3, 2), (4, 2, 2, 2), strict=True):
        guard.enter(call, threads, [])
        assert library.num_threads == holds
    for n, holds in ((1, 2), (3, 3), (2, 4), (0, HERE)):
        guard.leave(calls[n], [])
        assert library.num_threads == holds


def test_whoever_else_sets_the_number(library):
    """What was set during a call by others stays after it."""
    held(2, lambda: library.set_num_threads(5))
    if library.internal_api == "openblas":
        assert library.num_threads == 5
        held(2, lambda: held(1, lambda: library.set_num_threads(7)))
        assert library.num_threads == 7


def test_eight_threads(real):
    """Each call has no more threads than it asked for, and at the end all is as it was."""

    def run(n):
        for turn in range(300):
            threads = 1 + (n + turn) % 4

            def look(threads=threads):
                assert all(library.num_threads <= threads for library in real)

            held(threads, look)
            with pytest.raises(ZeroDivisionError):
                held(threads, lambda: 1 / 0)

    in_threads(8, run)


def test_eight_callers(real, rng):
    x = rng.standard_normal((1, 2, 40, 16), np.float32)
    expected = sdpa(x, x, x, backend="numpy", threads=1)

    def run(n):
        for turn in range(50):
            output = sdpa(x, x, x, backend="numpy", threads=1 + (n + turn) % 3)
            np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)

    in_threads(8, run)


X, W = np.ones((1, 8, 16), np.float32), np.ones((16, 16), np.float32)
LAYER = qkv_ext.MultiHeadAttention(W, W, W, W, num_heads=2)


def attend_to_a_cache(**options):
    cache = qkv_ext.KVCache(1, 1, 16)
    cache.append(X[None], X[None])
    return cache.attend(X[None], **options)


CALLS = {
    "attention": lambda **o: sdpa(X, X, X, **o),
    "float16": lambda **o: sdpa(*[X.astype(np.float16)] * 3, **o),
    "varlen": lambda **o: qkv_ext.varlen_attention(X, X, X, [0, 1], [0, 1], **o),
    "matmul": lambda **o: qkv_ext.matmul(X, W, **o),
    "linear": lambda **o: qkv_ext.linear_projection(X, W, **o),
    "packed": lambda **o: qkv_ext.linear_projection(X, qkv_ext.pack_weight(W), **o),
    "cache": attend_to_a_cache,
    "layer": lambda **o: LAYER(X, **o),
    "self": lambda **o: qkv_ext.self_attention(X, W, W, W, **o),
    "trace": lambda **o: qkv_ext.trace(X, X, X, **o),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_that_have_products(call, library):
    call(backend="numpy")
    call(backend="numpy", threads=HERE)
    assert not library.asked
    call(backend="numpy", threads=1)
    assert set(library.asked) == {1, HERE}
    assert library.num_threads == HERE


@pytest.mark.filterwarnings("ignore::qkv_ext.PerformanceWarning")
def test_float64_of_a_compiled_default(library):
    x = X.astype(np.float64)
    sdpa(x, x, x)
    assert not library.asked
    sdpa(x, x, x, threads=1)
    assert library.asked == [1, HERE]


def test_compiled_backends_leave_it_alone(compiled, library):
    sdpa(X, X, X, threads=1, backend=compiled)
    assert not library.asked


SEEN = """
import sys
import numpy as np, qkv_ext
from qkv_ext._core import _blas
x = np.ones((4, 8), "f4")
numbers = []
class Guard(_blas.Guard):
    def enter(self, call, threads, own):
        numbers.append(threads)
        super().enter(call, threads, own)
_blas.GUARD = Guard()
for threads in (None, 3):
    qkv_ext.matmul(x, x.T, backend="numpy", threads=threads)
    print(numbers, "threadpoolctl" in sys.modules)
qkv_ext.show_config()
"""


@pytest.mark.parametrize(
    ("variables", "first"),
    [({}, "[] False"), ({"OMP_NUM_THREADS": "2"}, "[] False"),
     ({"QKV_EXT_NUM_THREADS": "2"}, "[2] True"), ({"QKV_EXT_NUM_THREADS": " "}, "[] False")],
)  # fmt: skip
def test_it_is_imported_where_threads_are_given(variables, first, python):
    """And only then; not for what OpenMP's variable, the affinity or a quota says."""
    pytest.importorskip("threadpoolctl")
    said = python(SEEN, **variables).splitlines()
    assert said[0] == first
    assert said[1] == ("[2, 3] True" if first.endswith("True") else "[3] True")
    held = "is held to" in said[-1]
    assert held or "knows no way" in said[-1]
    assert not held or ("where it is given" in said[-1]) is first.endswith("False")


@pytest.mark.parametrize("variables", [{}, {"QKV_EXT_NUM_THREADS": "2"}], ids=["none", "variable"])
def test_without_threadpoolctl(variables, python):
    """Threads may be given all the same, and show_config says that they hold nothing."""
    said = python(f"import sys; sys.modules['threadpoolctl'] = None\n{SEEN}", **variables)
    assert said.splitlines()[:2] == ["[] True", "[] True"]
    assert "without threadpoolctl" in said.splitlines()[-1]


def test_show_config_says_what_holds(real):
    file = io.StringIO()
    qkv_ext.show_config(file=file)
    *_, said = file.getvalue().splitlines()
    assert f"({', '.join(f'{x.internal_api} {HERE}' for x in real)})" in said or (
        type(_threads.DEFAULT) is int
    )


FORK = """
import os, signal, threading, warnings
from types import SimpleNamespace
import numpy as np, qkv_ext
from qkv_ext._core import _blas

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
libraries = [x for x in _blas.GUARD.libraries() if not _blas._per_thread(x)]
numbers = lambda: [x.num_threads for x in libraries]
for x in libraries:
    _blas._set(x, 4)
before, entered, over = numbers(), threading.Event(), threading.Event()

def child(wanted):
    signal.alarm(60)
    assert numbers() == wanted, numbers()
    x = np.ones((4, 8), "f4")
    for threads in (None, 1, 2):
        qkv_ext.matmul(x, x.T, backend="numpy", threads=threads)
        assert numbers() == before, numbers()

def fork():
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(before)
            code = 0
        finally:
            if not beside:
                return code  # out of the call that it was forked in
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    return None

def held(compute):
    return _blas.held_to_threads(lambda problem: compute())(SimpleNamespace(threads=1))

# beside a call of another thread
beside = True
thread = threading.Thread(target=held, args=(lambda: (entered.set(), over.wait()),), daemon=True)
thread.start()
entered.wait()
assert numbers() == [1] * len(before)
fork()
over.set()
thread.join()
assert numbers() == before
# within a call, as a signal handler may
beside = False
code = held(fork)
assert numbers() == before
if code is not None:
    os._exit(code)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_after_a_fork(python):
    """A child holds nothing, whoever held something when it was made."""
    pytest.importorskip("threadpoolctl")
    python(FORK)


def test_a_version_that_lets_one_thread_set_the_number(real):
    """threadpoolctl 3.8 remembers who set it: two calls, of which the first ends first."""
    entered, left = threading.Event(), threading.Event()

    def run(n):
        if n == 0:
            held(1, entered.wait)
            left.set()
            return

        def look():
            entered.set()
            left.wait()
            assert all(library.num_threads <= 2 for library in real)

        held(2, look)

    in_threads(2, run)
