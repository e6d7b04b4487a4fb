"""Many threads: of one call, of many callers, and those that run when the interpreter ends."""

import os
import signal
import sys
import sysconfig
import threading
import time

import numpy as np
import pytest
from tolerance import assert_same, assert_same_bits

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention
SECONDS = float(os.environ.get("QKV_EXT_TEST_SECONDS", "0.3"))  #: per backend


def some_calls(rng, backend):
    """Calls of each path, each as a function of its number of threads."""
    q, k, v = (rng.standard_normal((2, 4, n, 32), np.float32) for n in (150, 300, 300))
    long = rng.standard_normal((1, 2, 5000, 32), np.float32)
    half = k.astype(np.float16)
    w = qkv_ext.pack_weight(rng.standard_normal((32, 200), np.float32))
    wide = rng.standard_normal((32, 700), np.float32)
    tables = qkv_ext.rotary_tables(300, 32)
    return [
        lambda n: sdpa(q, k, v, causal=True, threads=n, backend=backend),
        lambda n: sdpa(long[:, :, :1], long, long, threads=n, backend=backend),
        lambda n: sdpa(half, half, half, window=(40, 0), threads=n, backend=backend),
        lambda n: qkv_ext.linear_projection(k, w, threads=n, backend=backend),
        lambda n: qkv_ext.linear_projection(
            k,
            w,
            activation="gelu",
            residual=np.repeat(k, 7, -1)[..., :200],
            threads=n,
            backend=backend,
        ),
        lambda n: qkv_ext.matmul(k, wide, threads=n, backend=backend),
        lambda n: qkv_ext.softmax(k, threads=n, backend=backend),
        lambda n: qkv_ext.apply_rotary(k, *tables, threads=n, backend=backend),
        lambda n: qkv_ext.layer_norm(k, k[0, 0, 0], threads=n, backend=backend),
        lambda n: qkv_ext.merge_attention(
            [k, v], [k[..., 0], v[..., 0]], threads=n, backend=backend
        )[0],
    ]


@pytest.mark.parametrize("threads", [2, 3, 5, 8, 16, 33, 64])
def test_any_number_of_threads_gives_the_same_bits(threads, compiled, rng):
    """Far more of them than CPUs, too."""
    for call in some_calls(rng, compiled):
        assert_same_bits(call(threads), call(1))


@pytest.mark.slow_beside_fastest
def test_sixteen_callers_at_once(compiled, rng):
    """Each gets what it gets alone; QKV_EXT_TEST_SECONDS=60 for a long run."""
    calls = some_calls(rng, compiled)
    expected = [call(1) for call in calls]
    end = time.monotonic() + SECONDS
    wrong, done = [], []

    def run(first):
        try:
            for n in range(first, 10**9):
                which = n % len(calls)
                assert_same(calls[which](1 + n % 5), expected[which], compiled)
                done.append(1)
                if time.monotonic() > end:
                    break
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert len(done) >= 16


EXIT = """
import threading, time
import numpy as np, qkv_ext
x = np.ones((1, 8, 8192, 64), "f4")
started = threading.Event()
def compute():
    started.set()
    while True:
        qkv_ext.scaled_dot_product_attention(x, x, x, threads=2, backend=BACKEND)
for _ in range(2):
    threading.Thread(target=compute, daemon=True).start()
started.wait()
time.sleep(0.2)
"""


def test_the_interpreter_ends_while_calls_run(backend, python):
    """Daemon threads in the middle of a call hold up nothing, and crash nothing."""
    assert python(EXIT.replace("BACKEND", repr(backend))) == ""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to threads here")
def test_the_pool_after_an_exception(compiled, rng):
    """A call that a signal handler ends by an exception, then calls with all the workers."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("handlers are set, and run, in the main thread")
    calls = some_calls(rng, compiled)
    expected = [call(1) for call in calls]
    x = np.ones((1, 16, 8192, 64), np.float32)

    def refuse(*_):
        raise InterruptedError("enough")

    before = signal.signal(signal.SIGUSR1, refuse)
    main = threading.main_thread().ident
    try:
        for _ in range(3):
            timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1))
            timer.start()
            with pytest.raises(InterruptedError, match="enough"):
                sdpa(x, x, x, threads=3, backend=compiled)
            timer.join()
            for call, right in zip(calls, expected, strict=True):
                assert_same_bits(call(4), right)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="no /proc here")
def test_affinity_of_one_cpu(python):
    """F2: a process on one CPU starts no other thread unless it is told to."""
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np, qkv_ext
from qkv_ext._core import _threads
assert _threads.DEFAULT == 1, _threads.DEFAULT
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
x = np.ones((1, 8, 600, 64), "f4")
expected = qkv_ext.scaled_dot_product_attention(x, x, x)
assert count() == before
assert np.array_equal(qkv_ext.scaled_dot_product_attention(x, x, x, threads=4), expected)
"""
    python(code, QKV_EXT_BACKEND=qkv_ext.backends()[-1])


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_import_leaves_the_gil_off(python):
    """F7: a module that is not declared compatible would turn it on, with a warning."""
    python("import sys, numpy, qkv_ext; assert not sys._is_gil_enabled()")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_block_no_signal_that_they_send_themselves(compiled, python):
    """G11 (FRRouting/frr#18060): a fault in a worker is no silent end; all else is the caller's."""
    python(f"""
import os, pathlib, signal
import numpy as np, qkv_ext
x = np.ones((8, 8, 300, 64), "f4")
before = set(os.listdir("/proc/self/task"))
qkv_ext.scaled_dot_product_attention(x, x, x, threads=3, backend={compiled!r})
workers = set(os.listdir("/proc/self/task")) - before
assert workers
own = {{signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}}
for task in workers:
    status = pathlib.Path("/proc/self/task", task, "status").read_text()
    blocked = int(status.split("SigBlk:")[1].split()[0], 16)
    blocked = {{n for n in range(1, 32) if blocked >> (n - 1) & 1}}
    assert not own & blocked, blocked
    assert {{signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD}} <= blocked
""")
