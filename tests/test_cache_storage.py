"""What a KVCache keeps of a number in each storage type, and in how many bytes."""

import itertools

import numpy as np
import oracle
import pytest
from caches import STORAGE, filled, held, stored
from cases import dtype_of
from tolerance import assert_same_bits, largest

import qkv_ext
from qkv_ext import KVCache
from qkv_ext._cache import _pages
from qkv_ext._core import _storage

F32 = np.finfo(np.float32)
EDGES = np.float32(
    [0, -0.0, F32.smallest_subnormal, -F32.smallest_subnormal, 3e-45, 1e-40, F32.tiny, 1e-30,
     2**-25, 2**-24, 6e-8, 6.1e-5, 1, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, -1.5,
     65504, 65519, 65520, -65536, 1e30, F32.max, -F32.max, np.inf, -np.inf, np.nan]
)  # fmt: skip


def kept(x, kind):
    """x (n, D) as a cache returns it."""
    cache = filled(x[None, None], x[None, None, :, :1], kind)
    return cache.keys(0)[0]


def bound(x, kind):
    """The error that the documentation allows for each entry of x (n, D), in float64."""
    x = np.abs(x.astype(np.float64))
    if kind == "float32":
        return np.zeros_like(x)
    if kind == "int8":
        return x.max(axis=-1, keepdims=True) / 253 + 2.0**-149 + np.zeros_like(x)
    digits, least = {"float16": (11, -25), "bfloat16": (8, -134)}[kind]
    return np.maximum(x * 2.0**-digits, 2.0**least)


@pytest.mark.parametrize("kind", STORAGE)
def test_error_of_an_entry(kind, rng):
    """Over all magnitudes, subnormal ones too; and what is beyond is infinite."""
    x = rng.standard_normal((4000, 7), np.float32)
    with np.errstate(over="ignore"):
        x *= np.float32(2) ** rng.integers(-149, 128, (4000, 1)).astype(np.float32)
    x = x[np.isfinite(x).all(axis=-1)]
    first_infinite = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119}.get(kind, np.inf)
    actual = kept(x, kind).astype(np.float64)
    finite = np.abs(x) < first_infinite
    np.testing.assert_array_equal(actual[~finite], np.copysign(np.inf, x[~finite]))
    assert (np.abs(actual - x)[finite] <= bound(x, kind)[finite]).all()
    assert kind == "float32" or (actual != x).any()


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_edges(kind):
    """Rounded to nearest even, once; infinity and NaN stay."""
    assert_same_bits(kept(EDGES[None], kind), stored(EDGES[None], kind))


def test_int8_edges():
    rows = np.float32(
        [
            [0, 0, 0],
            [127, -127, 63.5],  # to even
            [254, 1, -3],
            [1e-45, 0, -1e-45],  # scales that are no whole number of the smallest
            [178 * F32.smallest_subnormal, 1e-45, -1e-43],
            [F32.tiny, F32.tiny / 2, 0],
            [F32.max, -F32.max, 1e38],
            [1, np.inf, 2],
            [np.nan, 3, 4],
        ]
    )
    actual = kept(rows, "int8")
    np.testing.assert_array_equal(actual[:3], np.float32([[0] * 3, [127, -127, 64], [254, 0, -4]]))
    assert np.isfinite(actual[:7]).all()
    assert (np.abs(actual[:7].astype(np.float64) - rows[:7]) <= bound(rows[:7], "int8")).all()
    assert np.isnan(actual[7:]).all()
    entries, scales = _storage.encode(rows, "int8")
    assert (entries.dtype, scales.dtype) == (np.int8, np.float32)
    assert np.abs(entries.astype(int)).max() == 127
    assert not entries[7:].any()
    assert scales[0] == 0
    assert np.isnan(scales[7:]).all()


@pytest.mark.parametrize("given", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", STORAGE)
def test_16_bits_in(given, kind, rng):
    """Their own type exactly, every other as the float32 that they are."""
    dtype = dtype_of(given)
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(-1, 16)
    with np.errstate(invalid="ignore"):  # of signalling NaNs, on Arm
        top = np.abs(x.astype(np.float32)).max(axis=-1)
    fine = x if kind != "int8" else x[(top > 1e-35) & np.isfinite(top)]  # plain scales
    actual = kept(fine, kind)
    with np.errstate(invalid="ignore"):
        expected, exact = stored(fine, kind), fine.astype(np.float32)
    np.testing.assert_array_equal(actual, expected, strict=True)
    if given == kind:
        np.testing.assert_array_equal(actual, exact)


@pytest.mark.parametrize("kind", STORAGE)
def test_parts_do_not_matter(kind, rng):
    """Long arrays are converted part by part: the same bits, whatever the strides."""
    x = rng.standard_normal((2, 3, 3000, 24), np.float32)
    assert x.size > 4 * _storage.CHUNK
    at_once, scales = _storage.encode(x, kind)
    strided, of_strided = _storage.encode(x.swapaxes(0, 1).copy().swapaxes(0, 1)[:, :, ::-1], kind)
    np.testing.assert_array_equal(strided[:, :, ::-1], at_once)
    for n in (0, 1, 2999):
        alone, of_alone = _storage.encode(x[:, :, n : n + 1], kind)
        np.testing.assert_array_equal(alone, at_once[:, :, n : n + 1])
        if scales is not None:
            np.testing.assert_array_equal(of_alone, scales[:, :, n : n + 1])
    if scales is not None:
        np.testing.assert_array_equal(of_strided[:, :, ::-1], scales)


@pytest.mark.parametrize("kind", STORAGE)
@pytest.mark.parametrize("d", [7, 64, 576])
def test_error_of_an_output(kind, d, rng):
    """D11: what the errors of keys and values make of an output, by the documented bound."""
    q, k = (
        rng.standard_normal((1, 2, 5, d), np.float32),
        rng.standard_normal((1, 1, 300, d), np.float32),
    )
    v = rng.standard_normal((1, 1, 300, 9), np.float32)
    cache = filled(k, v, kind)
    stored_k, stored_v = held(cache)
    exact, actual = oracle.attention(q, k, v)[0], oracle.attention(q, stored_k, stored_v)[0]
    dk, dv = largest(stored_k, k), largest(stored_v, v)
    exponent = 2 / np.sqrt(d) * np.abs(q).sum(axis=-1, keepdims=True) * dk
    assert (np.abs(actual - exact) <= dv + np.abs(v).max() * np.expm1(exponent) + 1e-12).all()
    typical = {"float32": 1e-12, "float16": 1e-3, "bfloat16": 8e-3, "int8": 2e-2}[kind]
    assert np.abs(actual - exact).max() <= typical


@pytest.mark.parametrize("kind", STORAGE)
def test_bytes(kind):
    """A key takes Hkv (D + Dv) entries, in int8 8 Hkv bytes more; a page a line or two besides."""
    for heads, d, dv in ((8, 128, 128), (1, 5, 3)):
        cache = KVCache(2, heads, d, dv, dtype=kind)
        assert cache.nbytes == 0
        cache.append(np.ones((2, heads, 257, d), "f4"), np.ones((2, heads, 257, dv), "f4"))
        entry = {"float32": 4, "int8": 1}.get(kind, 2)
        key = heads * (d + dv) * entry + (8 * heads if kind == "int8" else 0)
        assert 0 < cache.nbytes - 2 * 512 * key <= 2 * 2 * 128


@pytest.mark.parametrize("kind", STORAGE)
def test_alignment(kind):
    """Each array of a page starts on a cache line, behind the end of the one before."""
    assert _pages.allocate(3 << 20).ctypes.data % (2 << 20) == 0  # on a huge page
    cache = KVCache(3, 3, 5, 7, dtype=kind)
    cache.append(np.ones((3, 3, 700, 5), "f4"), np.ones((3, 3, 700, 7), "f4"))
    pages = cache._store.pages()
    assert pages.first.tolist() == [0, 3, 6, 9]
    assert pages.lengths == [700] * 3
    held_pages = [page for item in cache._store.items for page in item.pages]
    ends = []
    for row, page in zip(pages.table.tolist(), held_pages, strict=True):
        v = page.v_blocks[0][1]
        arrays = (page.k, v, page.k_scale, page.v_scale)
        for address, array in zip(row, arrays, strict=True):
            assert address == (0 if array is None else array.ctypes.data)
            assert address % 64 == 0
            if array is not None:
                assert array[0].flags.c_contiguous
                ends.append((address, address + array.nbytes))
        start = page.room.ctypes.data
        assert page.room.nbytes >= max(row) + 64 - start
        assert v.ctypes.data + page.value_rows().nbytes + 64 <= start + page.room.nbytes
    ends.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_bfloat16_needs_no_package(python):
    """As storage; ml_dtypes is for arrays that come in or go out."""
    assert (
        python(
            """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np, qkv_ext
cache = qkv_ext.KVCache(1, 1, 2, dtype="bfloat16")
x = np.float32([[[[1.00390625, 3]]]])
cache.append(x, x)
print(cache.keys(0).ravel(), cache.attend(x).ravel(), cache.dtype)
"""
        )
        == "[1. 3.] [1. 3.] bfloat16"
    )


def test_dtypes_by_any_name():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for dtype, name in (
        (np.float16, "float16"), (np.dtype("f4"), "float32"), (np.int8, "int8"),
        (bfloat16, "bfloat16"), (np.dtype(bfloat16), "bfloat16"), ("bfloat16", "bfloat16"),
    ):  # fmt: skip
        assert KVCache(1, 1, 1, dtype=dtype).dtype == name
    assert qkv_ext.KVCache(1, 1, 1).dtype == "float32"


@pytest.mark.parametrize("kind", STORAGE)
@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
def test_the_callers_errstate_is_not_obeyed(kind, given):
    """Overflow, underflow and NaN are results here, whatever NumPy is told."""
    with np.errstate(all="ignore"):
        x = np.resize(EDGES, (1, 1, 40, 8)).astype(dtype_of(given))
    with np.errstate(all="raise"):
        cache = filled(x, x, kind)
        cache.keys(0)
        cache.attend(x[:, :, :2])
        cache.attend(x[:, :, :2], backend="numpy")


@pytest.mark.parametrize("n", [2, 20, 300, 3000])
@pytest.mark.parametrize("length", [1, 3, 20, 200])
def test_int8_scores_beyond_float32(length, n, backend, rng):
    """inf - inf of the formula is NaN, though the products with the integers are 0 together.

    A row that is not allowed the key has the bits that it has beside an ordinary one.
    """
    k, v = (rng.standard_normal((1, 2, n, 2), np.float32) for _ in "kv")
    q = np.full((1, 2, length, 2), 1e30, np.float32)
    q[..., 1] *= -1
    k[..., 1] = k[..., 0]
    mask = np.ones((length, n), bool)
    mask[::2, n // 2] = False
    outputs = []
    for key in (1, 1e10):
        k[:, :, n // 2] = key
        cache = KVCache(1, 2, 2, dtype="int8")
        cache.append(k, v)
        more = {"return_weights": True, "return_lse": True}
        outputs.append(cache.attend(q, mask=mask, backend=backend, **more))
    for plain, large in zip(*outputs, strict=True):
        assert np.isfinite(plain).all()
        assert_same_bits(large[:, :, ::2], plain[:, :, ::2])
        assert np.isnan(large[:, :, 1::2]).all()


def test_what_is_compiled_has_the_same_types():
    """storage.def and _storage.py, in one order."""
    kernels = pytest.importorskip("qkv_ext._core._kernels", reason="nothing is compiled here")
    ours = {name: (place, kind.entries.itemsize * 8, kind.scaled)
            for place, (name, kind) in enumerate(_storage._STORAGE.items())}  # fmt: skip
    assert kernels.storage() == ours
