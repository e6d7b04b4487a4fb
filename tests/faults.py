"""Every allocation of a call fails in turn: MemoryError, nothing leaked, the library usable.

Allocations are working memory and arrays, in compiled backends.  What NumPy computes, and small
objects, have no turn: NumPy's own handling fails there (2.4 crashes in ufuncs and products that get
no buffer, and leaks where an array is asked for one).

    cc -shared -fPIC tests/faults.c -o faults.so
    LD_PRELOAD=./faults.so PYTHONMALLOC=malloc python tests/faults.py faults.so
"""

import ctypes
import gc
import re
import sys

import numpy as np

import qkv_ext
import qkv_ext.onnx

REPEATS = 40  #: of each fault

sdpa = qkv_ext.scaled_dot_product_attention
rng = np.random.default_rng(0)


def f32(*shape):
    return rng.standard_normal(shape, np.float32)


q, k, v = f32(2, 4, 30, 16), f32(2, 2, 300, 16), f32(2, 2, 300, 8)
one, long = f32(1, 4, 1, 16), f32(1, 2, 3000, 16)
x, w = f32(2, 9, 16), f32(4, 16, 16)
half = k.astype(np.float16)
packed, layer = qkv_ext.pack_weight(w[0]), qkv_ext.MultiHeadAttention(*w, num_heads=4)
cu_q, cu_k = np.array([0, 4, 4, 30]), np.array([0, 9, 40, 300])
flat_q, flat_k = f32(30, 4, 16), f32(300, 2, 16)


def step(options):
    cache = qkv_ext.KVCache(2, 2, 16, 8)  # other types are encoded by NumPy
    cache.append(k, v)
    return cache.attend(q, causal=True, **options)


CALLS = {
    "prefill": lambda o: sdpa(q, k, v, causal=True, return_weights=True, return_lse=True, **o),
    "options": lambda o: sdpa(
        q, k, v, mask=np.ones((30, 300), bool), window=(200, 5), softcap=3.0, q_lengths=[3, 30],
        kv_lengths=[300, 7], alibi_slopes=np.ones(4, "f4"), sinks=np.ones(4, "f4"), **o),
    "decode": lambda o: sdpa(one, long, long, **o),
    "float16": lambda o: sdpa(half[:, :, :9], half, half, **o),
    "strides": lambda o: sdpa(q[..., ::-1], k[..., ::-1], v[:, :, :, ::-1], **o),
    "out over q": lambda o: (lambda a: sdpa(a, a, a, out=a, **o))(k.copy()),
    "cache": lambda o: step(o),
    "varlen": lambda o: qkv_ext.varlen_attention(
        flat_q, flat_k, flat_k, cu_q, cu_k, causal=True, return_lse=True, **o),
    "matmul": lambda o: qkv_ext.matmul(q, k.swapaxes(2, 3)[:, [0, 0, 1, 1]], **o),
    "packed": lambda o: qkv_ext.linear_projection(x, packed, w[1, 0], **o),
    "activation": lambda o: qkv_ext.linear_projection(
        half[0, 0], half[0, 0, :16], activation="gelu", residual=half[0, 0], **o),
    "pack": lambda o: qkv_ext.linear_projection(x, qkv_ext.pack_weight(w[0])),
    "softmax": lambda o: qkv_ext.softmax(q, 1, **o),
    "layer": lambda o: layer(x, causal=True, return_lse=True, **o),
    "self": lambda o: qkv_ext.self_attention(x, *w, num_heads=2, **o),
    "cross": lambda o: qkv_ext.cross_attention(x, x[:, :5], *w, num_heads=2, **o),
    "onnx": lambda o: qkv_ext.onnx.attention(q, k, v, is_causal=1, **o),
}  # fmt: skip


def bits(result):
    return [x.tobytes() for x in result if x is not None] if isinstance(result, tuple) else (
        result.tobytes())  # fmt: skip


def with_fault(faults, call, n):
    """Whether the call raised MemoryError when its n-th allocation failed; else its result."""
    try:
        faults.faults_arm(n)
        return call()
    except MemoryError:
        return None
    except SystemError as error:  # NumPy's ufuncs, where their buffers have no memory
        if not re.search("without (setting an )?exception", str(error)):
            raise
        return None
    finally:
        faults.faults_disarm()


def growth(faults, call, n, expected):
    """How many more blocks are held after REPEATS faults of the n-th allocation."""
    before = faults.faults_outstanding()
    for _ in range(REPEATS):
        result = with_fault(faults, call, n)
        assert result is None, f"fault {n} raised nothing"
    assert bits(call()) == expected, f"no longer usable after fault {n}"
    gc.collect()
    return faults.faults_outstanding() - before


def try_call(faults, call, expected):
    """Let every allocation of the call fail; returns how many there are."""
    start = faults.faults_asked()
    call()
    count = faults.faults_asked() - start
    for n in range(1, count + 1):
        # the interpreter's caches grow for a while; a leak grows for ever
        if all(growth(faults, call, n, expected) >= REPEATS // 2 for _ in range(100)):
            raise AssertionError(f"fault {n} leaks")
    return count


def main():
    faults = ctypes.CDLL(sys.argv[1])
    for name in ("faults_asked", "faults_outstanding"):
        getattr(faults, name).restype = ctypes.c_long
    faults.faults_arm.argtypes = [ctypes.c_long]
    assert faults.faults_asked() > 10, "faults.so is not preloaded"
    total = 0
    for backend in qkv_ext.backends()[1:]:
        for name, function in CALLS.items():
            call = lambda: function({"backend": backend, "threads": 2})  # noqa: B023, E731
            expected = bits(call())
            count = try_call(faults, call, expected)
            total += count
            print(f"{backend:8} {name:11} {count:3} faults", flush=True)
    print(f"{total} faults injected, {REPEATS} times each at least")


if __name__ == "__main__":
    main()
