"""What the library does to the process it runs in: memory, threads, signals, forks, the FPU."""

import os
import platform
import re
import shutil
import signal
import subprocess
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tolerance import assert_same

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention
linux_only = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc here")

# ---- import -------------------------------------------------------------------------------------


def test_import_is_innocent(python):
    """No threads, no output, no change of the environment, of signal handlers or of warnings."""
    code = """
import os, signal, sys, threading, warnings
import numpy  # whose BLAS starts threads
def state():
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    handlers = [signal.getsignal(n) for n in signal.valid_signals()]
    return threads, threading.active_count(), dict(os.environ), handlers, warnings.filters[:]
before = state()
import qkv_ext
assert state() == before
"""
    assert python(code) == ""


@pytest.mark.skipif(qkv_ext.backends() == ("numpy",), reason="asks why nothing is compiled")
def test_import_brings_in_nothing_else(python):
    """Beyond NumPy's, an import costs what this package's own files cost, and importlib.util."""
    code = """
import __future__, collections.abc, contextlib, importlib.util, itertools, math, mmap, os, pathlib
import platform, sys, threading, typing, warnings
import numpy.typing
before = set(sys.modules)
import qkv_ext
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print({name for name in new if "cython" not in name})
"""
    assert python(code) == "{'qkv_ext'}"


def test_import_leaves_subnormals_alone(backend, python):
    """D7 (OpenNMT/CTranslate2#1018): in the thread that imports, a new one, and after a call."""
    code = f"""
import threading
import numpy as np, qkv_ext
def check():
    assert 5e-324 > 0
    assert np.float32(1e-45) * 1 > 0
    assert (np.full(100, 1e-45, "f4") * np.float32(2) > 0).all()
    assert np.finfo(np.float32).smallest_subnormal > 0
def check_in_a_thread():
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
threading.excepthook = lambda args: os._exit(1)
check(), check_in_a_thread()
x = np.ones((4, 8, 300, 64), "f4")
for threads in (1, 4):
    qkv_ext.scaled_dot_product_attention(x, x, x, threads=threads, backend={backend!r})
    qkv_ext.matmul(x, x.swapaxes(2, 3), threads=threads, backend={backend!r})
    check(), check_in_a_thread()
"""
    python("import os\n" + code)


def test_subnormal_values_survive(backend, rng):
    """D8 (apache/mxnet#19361): nothing is flushed to zero on the way."""
    q, k = np.zeros((5, 8), np.float32), np.zeros((300, 8), np.float32)
    v = np.full((300, 33), 1e-40, np.float32)
    output = sdpa(q, k, v, backend=backend)
    np.testing.assert_allclose(output, 1e-40, rtol=1e-3)
    k[:, 0], q[:, 0] = np.linspace(0, -95, 300), 1
    output, weights = sdpa(q, k, np.ones_like(v), scale=1, return_weights=True, backend=backend)
    np.testing.assert_allclose(output, 1, rtol=1e-5)
    assert (weights > 0).all()


# ---- memory -------------------------------------------------------------------------------------


def test_no_scores_are_held(backend):
    """E2 (pytorch/pytorch#98505): a default call makes no (L, S) array, as far as Python knows."""
    x = np.ones((1, 1, 4096, 8), np.float32)
    tracemalloc.start()
    sdpa(x, x, x, causal=True, mask=np.ones((1, 4096), bool), backend=backend)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20  # the scores alone are 64 MB


SIZES = [("numpy", 2, 4096)]
if qkv_ext.backends()[-1] != "numpy":
    SIZES.append((qkv_ext.backends()[-1], 8, 8192))


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize(("name", "heads", "length"), SIZES)
def test_memory_at_length(name, heads, length, python):
    """E3 (microsoft/onnxruntime#28695): less than 64 MB beyond the output, with a mask too."""
    code = f"""
import numpy as np, qkv_ext
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
q, k, v = np.random.default_rng(0).standard_normal((3, 1, {heads}, {length}, 64), "f4")
qkv_ext.scaled_dot_product_attention(q[..., :9, :], k[..., :9, :], v[..., :9, :], backend={name!r})
before = peak()
for mask in (None, np.ones((1, 1, 1, {length}), bool), np.zeros((1, 1, 1, {length}), "f4")):
    out = qkv_ext.scaled_dot_product_attention(q, k, v, mask=mask, backend={name!r})
    print(peak() - before - out.nbytes)
    del out
"""
    for beyond in python(code).split():
        assert int(beyond) < 64 << 20


@linux_only
def test_no_memory_leaks(compiled, python):
    """Many calls, refused ones among them, hold no more than one does."""
    code = f"""
import mmap
import numpy as np, qkv_ext
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE
x = np.ones((2, 4, 70, 32), "f4")
long = np.ones((1, 4, 3000, 32), "f4")
by = {{"backend": {compiled!r}}}
def calls(n):
    for _ in range(n):
        for k in (x, long[:, :, :2500]):
            q = x if k is x else long[:, :, :1]
            out = np.empty(q.shape[:-1] + (32,), ">f4")
            qkv_ext.scaled_dot_product_attention(
                q, k, k, mask=np.ones(k.shape[2], bool), out=out, return_weights=True,
                return_lse=True, threads=2, **by
            )
            try:
                qkv_ext.scaled_dot_product_attention(q, k, k, mask=q, **by)
            except ValueError:
                pass
        qkv_ext.softmax(qkv_ext.matmul(x, x.swapaxes(2, 3), **by), **by)
        qkv_ext.linear_projection(x, qkv_ext.pack_weight(x[0, 0, :32]), **by)
calls(50)
before = resident()
calls(300)
print(resident() - before)
"""
    assert int(python(code)) < 4 << 20


def test_memory_error_leaves_the_library_usable(backend):
    """A weight matrix beyond any memory: MemoryError, and the next call is right."""
    q = np.broadcast_to(np.float32(0), (1 << 30, 8))
    k = np.broadcast_to(np.float32(0), (1 << 24, 8))
    with pytest.raises(MemoryError):
        sdpa(q, k, k, return_weights=True, backend=backend)
    x = np.ones((3, 5, 8), np.float32)
    np.testing.assert_allclose(sdpa(x, x, x, backend=backend), 1, rtol=1e-6)


# ---- threads, signals, forks --------------------------------------------------------------------


@pytest.mark.parametrize("what", ["attention", "matmul"])
def test_the_gil_is_released(what, backend):
    """E8 (pydata/bottleneck#101): another thread runs on while a call computes."""
    x = np.ones((1, 4, 1200, 64), np.float32)
    y = np.ones((900, 900), np.float32)
    ticks, done, most = [], threading.Event(), 0

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(20):
            start = time.perf_counter()
            if what == "attention":
                sdpa(x, x, x, threads=1, backend=backend)
            else:
                qkv_ext.matmul(y, y, threads=1, backend=backend)
            end = time.perf_counter()
            # with the GIL held, none but those at the very beginning and end
            margin = 0.1 * (end - start)
            most = max(most, sum(start + margin < t < end - margin for t in ticks))
            if most > 2:
                break
    finally:
        done.set()
        thread.join()
    assert most > 2


def test_calls_from_many_threads(backend, rng):
    """Shared inputs, outputs of their own: each caller gets what it gets alone."""
    q, k, v = (rng.standard_normal((2, 4, n, 32), np.float32) for n in (70, 300, 300))
    long = rng.standard_normal((1, 2, 3000, 32), np.float32)
    w = qkv_ext.pack_weight(rng.standard_normal((32, 100), np.float32))
    calls = [
        lambda n: sdpa(q, k, v, causal=True, threads=n, backend=backend),
        lambda n: sdpa(long[:, :, :1], long, long, threads=n, backend=backend),
        lambda n: qkv_ext.linear_projection(k, w, threads=n, backend=backend),
        lambda n: qkv_ext.softmax(k, threads=n, backend=backend),
    ]
    expected = [call(1) for call in calls]
    wrong = []

    def run(which):
        for n in range(12):
            try:
                assert_same(calls[which](1 + n % 4), expected[which], backend)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=run, args=(i % len(calls),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


FORK = """
import os, signal, sys, warnings
import numpy as np, qkv_ext
warnings.simplefilter("ignore")  # Python's own, about forks of processes with threads
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 4, 8, 300, 64), "f4")
w = rng.standard_normal((64, 500), "f4")
options = {"threads": 4, "backend": BACKEND}
def work():
    many = qkv_ext.scaled_dot_product_attention(q, k, v, **options)
    one = qkv_ext.scaled_dot_product_attention(q[:, :, :1], k, v, **options)
    return many.tobytes() + one.tobytes() + qkv_ext.matmul(q, w, **options).tobytes()
"""


@pytest.mark.slow_beside_fastest
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork(backend, python):
    """F1 (OpenMathLib/OpenBLAS#294, #5520): the child, its child, and then the parent compute."""
    code = f"""
BACKEND = {backend!r}
{FORK}
expected = work()
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        code = 0 if work() == expected else 1
        grandchild = os.fork()
        if grandchild == 0:
            signal.alarm(120)
            os._exit(0 if work() == expected else 1)
        os._exit(code or os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert work() == expected
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {{status}}"
assert work() == expected
"""
    python(code)


@pytest.mark.slow_beside_fastest
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork_while_other_threads_compute(compiled, python):
    """F1: the pool is in use at the moment of the fork."""
    code = f"""
import threading
BACKEND = {compiled!r}
{FORK}
expected = work()
done = False
def keep_computing():
    while not done:
        work()
thread = threading.Thread(target=keep_computing)
thread.start()
try:
    for _ in range(10):
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            os._exit(0 if work() == expected else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"the child ended with {{status}}"
finally:
    done = True
thread.join()
assert work() == expected
"""
    python(code)


@pytest.mark.slow_beside_fastest
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_pool_of_processes(backend, tmp_path, python):
    """F1: multiprocessing with the start method fork, after a call with threads."""
    code = f"""
import multiprocessing
BACKEND = {backend!r}
{FORK}
def one(_):
    signal.alarm(120)
    return work()
expected = work()
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(one, range(4)) == [expected] * 4
"""
    python(code)


INTERRUPT = """
import os, signal, threading
import numpy as np, qkv_ext
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
x = np.ones((1, 16, 16384, 64), "f4")
out = np.full(x.shape, np.nan, "f4")
timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
timer.start()
try:
    CALL
except KeyboardInterrupt:
    print("interrupted", np.isnan(out).any())
small = np.ones((4, 8, 300, 64), "f4")
print(np.allclose(qkv_ext.scaled_dot_product_attention(small, small, small, backend=BACKEND), 1))
"""
LONG_CALLS = {
    "attention": "qkv_ext.scaled_dot_product_attention(x, x, x, out=out, threads=THREADS, "
    "backend=BACKEND)",
    "one head": "qkv_ext.scaled_dot_product_attention(x.reshape(-1, 64), "
    "x.reshape(-1, 64), x.reshape(-1, 64), out=out.reshape(-1, 64), threads=THREADS, "
    "backend=BACKEND)",
    "matmul": "x = np.ones((8192, 8192), 'f4'); out = np.full(x.shape, np.nan, 'f4'); "
    "qkv_ext.matmul(x, x, out=out, threads=THREADS, backend=BACKEND)",
}


@pytest.mark.slow_beside_fastest
@pytest.mark.skipif(os.name == "nt", reason="no signals like these here")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("call", LONG_CALLS.values(), ids=LONG_CALLS)
def test_interrupt(call, threads, backend, python):
    """^C ends a call of many seconds in the middle; the next call is right."""
    code = INTERRUPT.replace("CALL", call).replace("THREADS", str(threads))
    assert python(code.replace("BACKEND", repr(backend))) == "interrupted True\nTrue"


@pytest.mark.slow_beside_fastest
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("call", ["softmax", "masked", "rotary", "norm", "merge"])
def test_interrupt_within_a_row(call, threads, compiled, python):
    """^C does not wait for the end of what one task has to do: a long row, or rows with weights."""
    python(f"""
import signal
import numpy as np, qkv_ext
signal.signal(signal.SIGALRM, signal.default_int_handler)
options = {{"threads": {threads}, "backend": {compiled!r}}}
if {call!r} == "softmax":
    x = np.zeros(1 << 27, "f4")
    out, done = np.full(x.shape, 7, "f4"), np.float32(2.0**-27)
    call = lambda: qkv_ext.softmax(x, out=out, **options)
elif {call!r} == "rotary":
    x, table = np.ones((1, 1 << 27), "f4"), np.ones((1, 1 << 26), "f4")
    out, done = np.full(x.shape, 7, "f4"), 2
    call = lambda: qkv_ext.apply_rotary(x, table, table, out=out, interleaved=True, **options)
elif {call!r} == "norm":
    x, weight = np.full((1, 1 << 27), 1e-42, "f4"), np.ones(1 << 27, "f4")  # scaled twice
    out, done = np.full(x.shape, 7, "f4"), 1
    call = lambda: qkv_ext.rms_norm(x, weight, eps=0.0, out=out, **options)
elif {call!r} == "merge":
    parts, lses = [np.ones((1, 1 << 26), "f4")] * 20, [np.zeros(1, "f4")] * 20
    out, done = np.zeros(1), 1
    call = lambda: qkv_ext.merge_attention(parts, lses, **options)
else:  # no key is allowed, and rows are zeros when they are finished, in order
    q = np.ones((1, 96, 64), "f4")
    k = np.broadcast_to(q[:, :1], (1, 1 << 23, 64))
    out, done = np.full(q.shape, 7, "f4"), 0
    mask = np.zeros((1, 1 << 23), bool)
    call = lambda: qkv_ext.scaled_dot_product_attention(q, k, k, mask=mask, out=out, **options)
signal.setitimer(signal.ITIMER_REAL, 0.02)
try:
    call()
    raise SystemExit("the call ended first")
except KeyboardInterrupt:
    assert (out != done).any(), "all of it was computed"
""")


@pytest.mark.slow_beside_fastest
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
def test_handler_that_does_not_raise_changes_nothing(compiled, python):
    """A signal in the middle of a call: its handler runs, and the call goes on."""
    code = f"""
import signal
import numpy as np, qkv_ext
x = np.random.default_rng(0).standard_normal((1, 8, 2048, 64), "f4")
expected = qkv_ext.scaled_dot_product_attention(x, x, x, backend={compiled!r})
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.03)
while len(seen) < 5:
    actual = qkv_ext.scaled_dot_product_attention(x, x, x, backend={compiled!r})
    assert actual.tobytes() == expected.tobytes()
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    python(code)


# ---- what was built -----------------------------------------------------------------------------

BUILT = sorted(Path(qkv_ext.__file__).parent.rglob("*.so"))


def said_by(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not here")
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout


@linux_only
@pytest.mark.skipif(not BUILT, reason="nothing is compiled here")
def test_modules_link_the_c_library_only():
    """F8 (dmlc/xgboost#8488): no OpenMP runtime, no C++ one."""
    for module in BUILT:
        needed = re.findall(r"NEEDED.*\[(.*)\]", said_by("readelf", "-d", str(module)))
        others = [name for name in needed if not re.match(r"lib(c|m|pthread)\.(so|musl)|ld-", name)]
        assert not others, f"{module.name} needs {others}"


@linux_only
@pytest.mark.skipif(not BUILT, reason="nothing is compiled here")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for x86's wide registers")
def test_loops_hold_baseline_instructions_only():
    """F4 (zarr-developers/numcodecs#252): wide registers are for the kernels, in one module."""
    for module in BUILT:
        if not module.name.startswith("_kernels."):
            code = said_by("objdump", "-d", "--no-show-raw-insn", str(module))
            assert not re.findall(r".*%[yz]mm.*|.*%k[0-7].*", code)[:5], module.name


def test_flags_do_not_depend_on_the_host():
    """F5 (aresch/rencode#43): nothing in setup.py chooses an instruction set."""
    setup = Path(__file__).resolve().parents[1] / "setup.py"
    if not setup.is_file():
        pytest.skip("no setup.py here")
    text = setup.read_text()
    assert not re.findall(r"\"(-m\w+|-ffast-math|-fopenmp|/arch:\w+)", text)
