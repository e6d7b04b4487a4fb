"""Segments, blocks, and masks that exclude whole tiles: the bits of the mask that says the same.

The rows of tests/cases.py hold them to the oracle.
"""

import copy
import pickle
import re
import weakref

import numpy as np
import pytest
from tolerance import assert_same, assert_same_bits

import qkv_ext
from qkv_ext import BlockMask, KVCache

sdpa = qkv_ext.scaled_dot_product_attention
L = S = 600  # three tiles of keys, and several blocks of rows


def arrays(rng, b=2, h=2, hkv=1, length=L, s=S, d=8):
    shapes = (b, h, length, d), (b, hkv, s, d), (b, hkv, s, d)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def documents(rng, b, n):
    """(B, n): documents end to end, of random lengths, with numbers of no order."""
    cuts = np.sort(rng.integers(0, n, (b, 3)), axis=-1)
    return np.array([7, -1, 2**40, 0])[(np.arange(n) >= cuts[..., None]).sum(1)]


def full(segments):
    """The mask (B, 1, L, S) of segments of self-attention."""
    return (segments[:, :, None] == segments[:, None, :])[:, None]


def far(rng, kind):
    """Masks (L, S) that exclude and keep whole tiles, and others in part."""
    i, j = np.arange(L)[:, None], np.arange(S)
    return {
        "documents": i // 260 == j // 260,
        "causal": j <= i,
        "prefix": (j < 300) | (j <= i),
        "window and global": (abs(i - j) < 40) | (j < 5) | (i < 5),
        "tree": rng.random((L, S)) < np.where(i // 130 == j // 130, 0.5, 0.0),
        "few keys": np.broadcast_to((j == 3) | (j == 550), (L, S)),
        "few rows": np.broadcast_to((i == 131) | (i == 540), (L, S)),
        "none": np.zeros((L, S), bool),
        "all": np.ones((L, S), bool),
    }[kind]


KINDS = ("documents", "causal", "prefix", "window and global", "tree", "few keys", "few rows",
         "none", "all")  # fmt: skip
EXTRAS = {"return_weights": True, "return_lse": True}


def piecewise(q, k, v, mask, backend):
    """Each row by itself with its allowed keys alone: nothing of a tile is excluded there."""
    output = np.zeros(q.shape, np.float32)
    for b, h, i in np.ndindex(q.shape[:3]):
        keys = np.flatnonzero(mask[i])
        if keys.size:
            own = (b, h * k.shape[1] // q.shape[1], keys)
            output[b, h, i] = sdpa(q[b, h, i : i + 1], k[own], v[own], backend=backend)[0]
    return output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["bool", "inf", "by head"])
def test_tiles(kind, form, backend, rng):
    """Each form of a mask gives the same; a row is near what it is without the others' keys."""
    q, k, v = arrays(rng, b=1)
    mask = far(rng, kind)
    given = {
        "bool": mask,
        "inf": np.where(mask, np.float32(0), np.float32(-np.inf)),
        "by head": np.array(np.broadcast_to(mask, (1, 2, L, S))),
    }[form]
    output, weights, lse = sdpa(q, k, v, mask=given, backend=backend, **EXTRAS)
    rows = rng.choice(L, 12, replace=False)
    expected = piecewise(q[:, :, rows], k, v, mask[rows], backend)
    np.testing.assert_allclose(output[:, :, rows], expected, atol=2e-6)
    assert not weights[np.broadcast_to(~mask, weights.shape)].any()
    np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to(~mask.any(-1), lse.shape))
    some = sdpa(q, k, v, mask=given, backend=backend, threads=2)
    assert_same(some, output, backend)
    for x in (q, k, v):  # what nobody sees is not felt
        unseen = np.flatnonzero(~(mask.any(1) if x is q else mask.any(0)))
        x[:, :, unseen] = np.nan
    again = sdpa(q, k, v, mask=given, backend=backend)
    assert_same(again, output, backend)


def test_what_is_not_finite_in_other_tiles(backend, rng):
    """NaN and infinities in V where a row's tile is excluded, kept or in part."""
    q, k, v = arrays(rng, b=1, h=2, hkv=1)
    mask = far(rng, "documents")
    plain = sdpa(q, k, v, mask=mask, backend=backend)
    for j, value in ((3, np.nan), (300, np.inf), (599, -np.inf)):
        spoilt = v.copy()
        spoilt[:, :, j] = value
        output = sdpa(q, k, spoilt, mask=mask, backend=backend)
        seen = mask[:, j]
        assert_same(output[:, :, ~seen], plain[:, :, ~seen], backend)
        assert (
            np.isnan(output[:, :, seen]) if np.isnan(value) else output[:, :, seen] == value
        ).all()


OPTIONS = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window": (300, 20), "softcap": 5.0},
    "lengths": {"kv_lengths": [550, 0], "q_lengths": [600, 3]},
    "lengths and order": {"kv_lengths": [400, 70], "q_lengths": [600, 133], "causal": True},
    "sinks": {"sinks": np.float32([0, 3]), "key_offset": 2, "causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("beside", [None, "bool", "inf"])
def test_segments(options, beside, backend, rng):
    """The bits of their mask, alone and beside another."""
    q, k, v = arrays(rng)
    segments = documents(rng, 2, L)
    same = mask = full(segments)
    given = {"kv_segments": segments}
    if beside:
        other = rng.random((L, S)) < 0.8
        mask = same & other
        given["mask"] = other if beside == "bool" else np.where(other, 0.5, -np.inf).astype("f4")
        if beside == "inf":
            mask = np.where(same, given["mask"], np.float32(-np.inf))
    options = options | EXTRAS | {"backend": backend}
    actual = sdpa(q, k, v, **given, **options)
    for x, y in zip(actual, sdpa(q, k, v, mask=mask, **options), strict=True):
        assert_same(x, y, backend)
    both = sdpa(q, k, v, **given, q_segments=segments.astype(object), **options, threads=2)
    for x, y in zip(actual, both, strict=True):
        assert_same(x, y, backend)


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, object])
def test_numbers_of_segments(dtype, backend, rng):
    """Equal integers see each other: no value is special, of any dtype."""
    q, k, v = arrays(rng, b=1, length=5, s=9)
    numbers = {np.int8: (-128, 127, 0), np.uint64: (2**64 - 1, 2**63, 0), object: (-(2**90), 0, 1)}
    of_q, of_k = rng.integers(0, 3, (1, 5)), rng.integers(0, 3, (1, 9))
    table = np.array(numbers[dtype], dtype)
    mask = (of_q[:, :, None] == of_k[:, None, :])[:, None]
    output = sdpa(q, k, v, q_segments=table[of_q], kv_segments=table[of_k], backend=backend)
    assert_same(output, sdpa(q, k, v, mask=mask, backend=backend), backend)
    if dtype is np.uint64:  # beside another dtype
        signed = np.array([-1, -(2**63), 0])[of_k]
        output = sdpa(q, k, v, q_segments=table[of_q], kv_segments=signed, backend=backend)
        mask = (of_q[:, :, None] == 2) & (of_k[:, None, :] == 2)
        assert_same(output, sdpa(q, k, v, mask=mask[:, None], backend=backend), backend)


SIZES = ((64, 128), (1, 1), (100, 7), (600, 300), (10**9, 10**12), (3, 256))
LEADS = ((), (2, 1), (1, 2), (2, 2))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("n", range(len(SIZES)))
def test_blocks(n, options, backend, rng):
    """The bits of the mask made of its blocks."""
    q, k, v = arrays(rng)
    size, lead = SIZES[n], LEADS[(n + len(options)) % len(LEADS)]
    keep = rng.random((*lead, -(-L // size[0]), -(-S // size[1]))) < 0.4
    blocks = BlockMask(keep, size)
    mask = blocks.expand(L, S)
    rows, keys = np.arange(L) // size[0], np.arange(S) // size[1]
    np.testing.assert_array_equal(mask, keep[..., rows[:, None], keys])
    options = options | {"backend": backend, "return_lse": True}
    actual = sdpa(q, k, v, block_mask=blocks, **options)
    for x, y in zip(actual, sdpa(q, k, v, mask=mask, **options), strict=True):
        assert_same(x, y, backend)


def test_every_call(backend, rng):
    """Layers, caches, projections and trace take them as the function does."""
    x = rng.standard_normal((2, 40, 16), np.float32)
    w = rng.standard_normal((4, 16, 16), np.float32) / 4
    segments = documents(rng, 2, 40)
    blocks = BlockMask(rng.random((3, 5)) < 0.6, (16, 8))
    mask = full(segments) & blocks.expand(40, 40)
    given = {"kv_segments": segments, "block_mask": blocks, "backend": backend}
    layer = qkv_ext.MultiHeadAttention(*w, num_heads=2)
    expected = layer(x, mask=mask, backend=backend)
    assert_same(layer(x, **given), expected, backend)
    assert_same(qkv_ext.self_attention(x, *w, num_heads=2, **given), expected, backend)
    crossed = qkv_ext.cross_attention(x, x, *w, num_heads=2, **given, q_segments=segments)
    assert_same(crossed, expected, backend)
    cache = KVCache(2, 2, 8)
    layer(x[:, :39], cache=cache, causal=True)
    q = rng.standard_normal((2, 2, 7, 8), np.float32)
    of_q, keep = rng.integers(0, 2, (2, 7)), BlockMask(rng.random((2, 4)) < 0.6, (4, 10))
    of_k = rng.integers(0, 2, (2, 39))
    given = {"q_segments": of_q, "kv_segments": of_k, "block_mask": keep, "backend": backend}
    mask = (of_q[:, :, None] == of_k[:, None, :])[:, None] & keep.expand(7, 39)
    assert_same(cache.attend(q, **given), cache.attend(q, mask=mask, backend=backend), backend)
    steps = qkv_ext.trace(q, cache.keys(0)[None], cache.values(0)[None], **given)
    whole = qkv_ext.trace(q, cache.keys(0)[None], cache.values(0)[None], mask=mask)
    for name, step in steps.items():
        assert_same_bits(step, whole[name])


def test_step_of_a_layer(backend, rng):
    """A step tells the segments of what it appends, and of all that is there then."""
    w = rng.standard_normal((4, 16, 16), np.float32) / 4
    x = rng.standard_normal((1, 6, 16), np.float32)
    layer, segments = qkv_ext.MultiHeadAttention(*w, num_heads=2), np.array([[0, 0, 1, 1, 0, 1]])
    whole = layer(x, causal=True, kv_segments=segments, backend=backend)
    cache = KVCache(1, 2, 8)
    for i in range(6):
        output = layer(x[:, i : i + 1], cache=cache, backend=backend,
                       q_segments=segments[:, [i]], kv_segments=segments[:, : i + 1])  # fmt: skip
        np.testing.assert_allclose(output, whole[:, i : i + 1], atol=1e-6)


def test_a_segment_has_no_mask(rng):
    """Nothing of (L, S) is made, which would be 400 MB; NumPy's holds some scores at a time."""
    tracemalloc = pytest.importorskip("tracemalloc")
    q, k, v = arrays(rng, b=1, h=1, hkv=1, length=20000, s=20000, d=1)
    segments = np.repeat(np.arange(200), 100)[None]
    blocks = BlockMask(np.eye(200, dtype=bool), (100, 100))
    for given in ({"kv_segments": segments}, {"block_mask": blocks}):
        tracemalloc.start()
        sdpa(q, k, v, **given)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50e6


def test_block_mask():
    """A value: of a copy, read-only, and through copies and pickles."""
    keep = np.eye(3, dtype=bool)
    blocks = BlockMask(keep, [2, np.int64(4)])
    keep[:] = True
    np.testing.assert_array_equal(blocks.keep, np.eye(3, dtype=bool))
    assert not blocks.keep.flags.writeable
    assert blocks.block_size == (2, 4)
    assert repr(blocks) == "BlockMask(keep=(3, 3), block_size=(2, 4))"
    for twin in (copy.copy(blocks), copy.deepcopy(blocks), pickle.loads(pickle.dumps(blocks))):
        np.testing.assert_array_equal(twin.keep, blocks.keep)
        assert twin.block_size == (2, 4)
    assert weakref.ref(blocks)() is blocks
    assert blocks.expand(5, 12).shape == (5, 12)
    assert BlockMask(np.ones((0, 0), bool), (1, 1)).expand(0, 0).shape == (0, 0)


SQUARE = np.eye(2, dtype=bool)
WRONG = [
    (np.eye(2), (1, 1), TypeError, "keep has dtype float64; expected bool"),
    (np.ones(2, bool), (1, 1), ValueError, "keep has shape (2,); expected two axes or more"),
    (SQUARE, 2, TypeError, "block_size is 2; expected a pair (rows, keys)"),
    (SQUARE, (2,), TypeError, "block_size is (2,); expected a pair (rows, keys)"),
    (SQUARE, (2, 0), ValueError, f"block_size holds 0; expected 1 to {1 << 60}"),
    (SQUARE, (2, 2.0), TypeError, "block_size holds 2.0; expected integers"),
    (SQUARE, (2, True), TypeError, "block_size holds True; expected integers"),
]


@pytest.mark.parametrize(("keep", "size", "error", "message"), WRONG, ids=[x[3] for x in WRONG])
def test_wrong_block_mask(keep, size, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        BlockMask(keep, size)


def test_wrong_lengths_of_a_block_mask():
    with pytest.raises(
        ValueError, match=r"block_mask has .2, 2. blocks of .2, 2.; expected .3, 2."
    ):
        BlockMask(SQUARE, (2, 2)).expand(5, 4)
    with pytest.raises(TypeError, match=r"length holds 4\.0; expected integers"):
        BlockMask(SQUARE, (2, 2)).expand(4.0, 4)
    with pytest.raises(ValueError, match="s holds -1; expected 0 to"):
        BlockMask(SQUARE, (2, 2)).expand(4, -1)
