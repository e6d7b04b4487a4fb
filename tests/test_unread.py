"""What lengths exclude, and masks in whole tiles, is not even read: this is memory that faults."""

import platform

import pytest

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="protects pages as Linux does")

SCRIPT = """
import ctypes, itertools, mmap
import numpy as np, qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention
backend, PAGE = {backend!r}, mmap.PAGESIZE
libc, held = ctypes.CDLL(None, use_errno=True), []
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
rng = np.random.default_rng(0)

def array(dtype, *shape, form):
    # (..., n, D) whose rows are pages of memory
    dtype = np.dtype(dtype)
    items = int(np.prod(shape[:-1]))
    held.append(mmap.mmap(-1, (items + 1) * PAGE))
    offset, step = (1, 1) if form == "misaligned" else (0, 2 if form == "strided" else 1)
    rows = [PAGE * int(np.prod(shape[n + 1 : -1])) for n in range(len(shape) - 1)]
    x = np.ndarray(shape, dtype, held[-1], offset, (*rows, step * dtype.itemsize))
    x[...] = rng.standard_normal(shape)
    return x

def protect(x, *rows):
    # rows, by an index of the axes before the last, fault from now on; the others are a copy's
    copy = np.zeros(x.shape, x.dtype.newbyteorder("="))
    there = np.ones(x.shape[:-1], bool)
    for index in rows:
        there[index] = False
    copy[there] = x[there]
    for index in zip(*np.nonzero(~there)):
        at = x[index].__array_interface__["data"][0] // PAGE * PAGE
        assert libc.mprotect(at, PAGE, 0) == 0
    return copy

def same(name, actual, expected):
    print(name, flush=True)  # the last one that is printed is the one that fails
    for x, y in zip(actual, expected, strict=True):
        assert x.tobytes() == y.tobytes() if backend != "numpy" else np.allclose(x, y), name

def padded(name, q, k, v, lengths, **options):
    # q, k and v (B, H, n, D), or (B, n, H, D), or of a lower rank
    options |= {{"backend": backend, "return_lse": True}}
    q_lengths, kv_lengths = lengths
    copies = []
    for x, own in ((q, q_lengths), (k, kv_lengths), (v, kv_lengths)):
        lead = slice(None) if options.get("layout") != "blhd" and x.ndim == 4 else Ellipsis
        if np.ndim(own) == 0:
            rows = [(slice(own, None),)]
        elif options.get("layout") == "blhd" or x.ndim == 3:
            rows = [(b, slice(n, None)) for b, n in enumerate(own)]
        elif x.shape[0] == 1:
            rows = [(0, slice(None), slice(max(own), None))]
        else:
            rows = [(b, slice(None), slice(n, None)) for b, n in enumerate(own)]
        copies.append(protect(x, *rows))
    options |= {{"q_lengths": q_lengths, "kv_lengths": kv_lengths}}
    same(name, sdpa(q, k, v, **options), sdpa(*copies, **options))

def packed(name, dtype, form):
    cu_q, cu_k, kv_lengths = [0, 3, 4, 9], [0, 300, 304, 320], [270, 0, 16]
    q, k, v = (array(dtype, n, h, 16, form=form) for n, h in ((9, 4), (320, 2), (320, 2)))
    gaps = [slice(a + n, b) for a, b, n in zip(cu_k, cu_k[1:], kv_lengths)]
    copies = [q.astype(q.dtype.newbyteorder("=")), protect(k, *gaps), protect(v, *gaps)]
    options = dict(kv_lengths=kv_lengths, return_lse=True, backend=backend)
    same(name, qkv_ext.varlen_attention(q, k, v, cu_q, cu_k, **options),
         qkv_ext.varlen_attention(*copies, cu_q, cu_k, **options))

def cached(name, dtype, form):
    for kind in ("float32", "float16", "bfloat16", "int8"):
        q, k, v = (array(dtype, 2, h, 5, 16, form=form) for h in (4, 2, 2))
        gone = [(0, slice(None), slice(3, None)), (1, slice(None), slice(0, None))]
        plain = [protect(x, *gone) for x in (q, k, v)]
        results = []
        for q, k, v in ((q, k, v), plain):
            cache = qkv_ext.KVCache(2, 2, 16, dtype=kind)
            cache.append(k, v, lengths=[3, 0])
            results.append(cache.attend(q, q_lengths=[3, 0], return_lse=True, backend=backend))
        same(name + " " + kind, *results)

try:
    import ml_dtypes
    half = ["f2", ">f2", ml_dtypes.bfloat16]
except ImportError:
    half = ["f2", ">f2"]
for dtype in ["f4", ">f4", *half] + ["f8", ">f8"] * (backend == "numpy"):
    for form in ("rows", "strided", "misaligned", "contiguous"):
        one = lambda *shape: array(dtype, *shape, form=form)
        name = f"{{np.dtype(dtype)}} {{form}}"
        d = PAGE // np.dtype(dtype).itemsize if form == "contiguous" else 16
        for length, s, lengths in ((9, 40, ([7, 0], [33, 5])), (1, 300, ([1, 1], [257, 0])),
                                   (30, 20, ([30, 1], [0, 20]))):
            padded(name, one(2, 4, length, d), one(2, 2, s, d), one(2, 2, s, d), lengths)
        padded(name + " rank 3", one(2, 9, d), one(2, 40, d), one(2, 40, d), ([7, 9], [33, 5]))
        padded(name + " rank 2", one(9, d), one(40, d), one(40, d), (7, 33))
        padded(name + " blhd", one(2, 9, 4, d), one(2, 40, 2, d), one(2, 40, 2, d),
               ([7, 9], [33, 5]), layout="blhd")
        padded(name + " broadcast", one(2, 4, 9, d), one(1, 2, 40, d), one(1, 2, 40, d),
               ([7, 9], [33, 5]))
        if form != "contiguous":
            packed(name + " packed", dtype, form)
            if np.dtype(dtype).itemsize < 8:
                cached(name + " cached", dtype, form)
# masks of the dtype of computation, whose columns past the lengths lie in another page
for dtype in ("?", "f4"):
    columns = PAGE // np.dtype(dtype).itemsize
    held.append(mmap.mmap(-1, 2 * 3 * PAGE))
    mask = np.ndarray((3, 2 * columns), dtype, held[-1])
    mask[...] = 1
    for row in mask:
        assert libc.mprotect(row[columns:].ctypes.data, PAGE, 0) == 0
    q, k = np.ones((1, 1, 3, 4), "f4"), np.ones((1, 1, 2 * columns, 4), "f4")
    output = sdpa(q, k, k, mask=mask, kv_lengths=[columns], backend=backend)
    same(f"mask {{dtype}}", (output,), (np.ones_like(q),))
# keys and values of tiles that masks exclude for all rows of a block, in the compiled backends
keep = np.repeat([True, False, True], 256)
masks = {{
    "bool": {{"mask": keep[None]}},
    "float": {{"mask": np.where(keep, np.float32(0.5), np.float32(-np.inf))[None]}},
    "blocks": {{"block_mask": qkv_ext.BlockMask(keep[None, ::256], (10**9, 256))}},
    "segments": {{"kv_segments": keep[None].astype(int)}},
}}
for (name, options), length in itertools.product(masks.items(), (1, 30)):
    if backend != "numpy":
        q, k, v = (array("f4", 1, 2, n, 16, form="rows") for n in (length, 768, 768))
        copies = [protect(x, (0, slice(None), ~keep)) for x in (k, v)]
        if name == "segments":
            options = options | {{"q_segments": np.ones((1, length), int)}}
        options = options | {{"backend": backend}}
        same(f"tiles {{name}}", (sdpa(q, k, v, **options),), (sdpa(q, *copies, **options),))
"""


@pytest.mark.slow
def test_what_lengths_exclude_is_not_read(backend, python):
    """Also where rows are copied: of another byte order, strided or misaligned."""
    python(SCRIPT.format(backend=backend))
