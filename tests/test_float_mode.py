"""G4: the floating-point mode of whoever calls, or starts threads, changes no bit, and stays."""

import platform
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="sets the control register by way of the C library's fenv_t",
)

CODE = """
import ctypes, ctypes.util, platform
import numpy as np, qkv_ext

libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
ROUNDING = {"x86_64": (0x400, 0x800, 0xC00), "aarch64": (0x800000, 0x400000, 0xC00000)}
# where fenv_t has the control word, and its bits for subnormals that are flushed and for traps
AT, FLUSH, TRAPS = {"x86_64": (7, 0x8040, 0x0E80), "aarch64": (0, 1 << 24, 0)}[platform.machine()]
FLAGS = 0x3F if platform.machine() == "x86_64" else 0


def environment():
    words = (ctypes.c_uint32 * 16)()
    libm.fegetenv(words)
    return words


def set_rounding(n):
    assert libm.fesetround(ROUNDING[platform.machine()][n]) == 0


def flush_subnormals():
    words = environment()
    words[AT] |= FLUSH
    libm.fesetenv(words)
    assert np.float32(1e-40) * np.float32(1) == 0, "this CPU does not flush"


def trap_invalid_and_overflow():
    words = environment()
    words[AT] &= ~0x480
    libm.fesetenv(words)


rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 2, n, 40), np.float32) for n in (70, 300, 300))
v[:, 1] *= np.float32(1e-39)  # subnormal
long = rng.standard_normal((1, 2, 3000, 40), np.float32)
bad = v.copy()
bad[0, 0, 5, 3] = np.inf
w = qkv_ext.pack_weight(rng.standard_normal((40, 70), np.float32))
small = q[:, 1] * np.float32(1e-30)
cache = qkv_ext.KVCache(1, 2, 40, dtype="int8")
cache.append(long, long)
halves = [x.astype(np.float16) for x in (q, k, k)]  # NumPy computes in the mode that it finds
rotary = qkv_ext.rotary_tables(70, 40)
tiny, steep, bias = k[0, 0].T * np.float32(1e-9), 60 * k, np.full(70, 1e-39, np.float32)
ones, residual = np.ones(40, np.float32), np.repeat(q, 2, axis=-1)[..., :70]
SDPA = qkv_ext.scaled_dot_product_attention
OPTIONS = {"threads": 2, "backend": BACKEND}


def results():
    return [
        SDPA(q, k, v, scale=0.3, return_weights=True, return_lse=True, **OPTIONS),
        SDPA(q, k, v, **OPTIONS),
        SDPA(q, k, bad, softcap=0.7, **OPTIONS),
        SDPA(*halves, causal=True, **OPTIONS),
        SDPA(long[:, :, :1], long, long, return_lse=True, **OPTIONS),
        cache.attend(long[:, :, :3], **OPTIONS),
        qkv_ext.matmul(small, tiny, **OPTIONS),
        qkv_ext.linear_projection(q, w, bias, **OPTIONS),
        *(qkv_ext.linear_projection(q, w, activation=name, residual=residual, **OPTIONS)
          for name in ("gelu", "gelu_tanh", "silu")),
        qkv_ext.softmax(steep, **OPTIONS),
        qkv_ext.softmax(steep, axis=0, **OPTIONS),
        qkv_ext.apply_rotary(small, *rotary, **OPTIONS),
        qkv_ext.apply_rotary(halves[0], *rotary, positions=list(range(70)), **OPTIONS),
        qkv_ext.layer_norm(small, bias[:40], bias[:40], **OPTIONS),
        qkv_ext.rms_norm(v, ones, eps=0.0, **OPTIONS),
        qkv_ext.merge_attention([small, small], [q[:, 0, :, 0], q[:, 1, :, 0]], **OPTIONS),
    ]


def bits(x):
    return [bits(each) for each in x] if isinstance(x, (list, tuple)) else x.tobytes()


def with_mode(change):
    before = environment()
    try:
        change()
        inside = environment()[AT] & ~FLAGS
        made = results()
        assert environment()[AT] & ~FLAGS == inside, "a call left another mode"
    finally:
        libm.fesetenv(before)
    return bits(made)

"""


def run(python, backend, body):
    return python(CODE.replace("BACKEND", repr(backend)) + body)


@pytest.mark.slow_beside_fastest
@pytest.mark.parametrize(
    "change",
    [*(f"lambda: set_rounding({n})" for n in range(3)), "flush_subnormals"],
    ids=["down", "up", "toward-zero", "flush"],
)
def test_no_bit_depends_on_the_mode(change, compiled, python):
    """Neither in the call that starts the threads, nor in any that follows."""
    run(python, compiled, f"""
odd = with_mode({change})
plain = bits(results())
for n, (a, b) in enumerate(zip(odd, plain)):
    assert a == b, n
assert with_mode({change}) == plain
OPTIONS["threads"] = 1
assert bits(results()) == plain
""")  # fmt: skip


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Arm's CPUs need not have traps")
def test_no_trap_springs(compiled, python):
    """What the kernels do with infinities and NaN is meant, whatever the caller traps."""
    run(python, compiled, """
plain = bits(SDPA(q, k, bad, **OPTIONS))
before = environment()
trap_invalid_and_overflow()
made = SDPA(q, k, bad, **OPTIONS)
libm.fesetenv(before)
assert bits(made) == plain
""")  # fmt: skip


def test_flags_of_the_caller_stay(compiled, python):
    """Those that were raised are raised, and the kernels raise none of their own."""
    run(python, compiled, """
turned = small.swapaxes(1, 2)
every = 0x1D if platform.machine() == "x86_64" else 0x0F  # all but inexact, which Python raises
for raised in (0, 0x04, 0x08):
    libm.feclearexcept(0x1F)
    libm.feraiseexcept(raised)
    for call in (lambda: SDPA(q, k, bad, **OPTIONS), lambda: qkv_ext.softmax(steep, **OPTIONS),
                 lambda: qkv_ext.matmul(small, turned, **OPTIONS)):
        call()
        assert libm.fetestexcept(every) == raised, (raised, libm.fetestexcept(every))
""")  # fmt: skip
