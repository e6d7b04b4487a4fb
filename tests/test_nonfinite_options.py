"""Points 4, 6 and 7 under every option: NaN and infinity in keys that are excluded, and in rows
that are none.

A key that lengths, a window or the order at any offset excludes changes no bit, whatever its K and
V hold, and a key that they allow is seen.
"""

import numpy as np
import oracle
import pytest
from cases import dtype_of
from tolerance import assert_same, assert_same_bits

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention
INF, NAN = np.inf, np.nan
EXTRAS = {"return_weights": True, "return_lse": True}

SHAPES = {  # (B, H, Hkv, L, S, D, Dv)
    "few": (2, 4, 2, 9, 33, 20, 12),
    "tiles": (2, 2, 1, 40, 600, 16, 37),
    "decode": (2, 4, 2, 1, 70, 16, 16),
    "decode-splits": (2, 4, 1, 1, 2100, 16, 5),
    "few-queries": (2, 2, 2, 3, 1100, 8, 70),
    "many-queries": (1, 1, 1, 300, 290, 8, 8),
}
WAYS = {  # how to exclude keys, for L and S; two items where the shape has them
    "causal": lambda n, s: {"causal": True},
    "causal, top-left": lambda n, s: {"causal": True, "align": "top-left"},
    "window": lambda n, s: {"window": (s // 5, s // 9)},
    "window and order": lambda n, s: {"window": (s // 5, 0), "causal": True},
    "window of itself": lambda n, s: {"window": (0, 0)},
    "kv_lengths": lambda n, s: {"kv_lengths": [s // 3, s - 1]},
    "kv_lengths and order": lambda n, s: {"kv_lengths": [s // 2, s - 1], "causal": True},
    "no keys": lambda n, s: {"kv_lengths": [0, s // 2]},
    "query_offset": lambda n, s: {"query_offset": [s // 3, s // 2 - n], "causal": True},
    "key_offset": lambda n, s: {"key_offset": s // 4, "window": (s // 3, 2)},
    "both offsets": lambda n, s: {"key_offset": -s // 4, "query_offset": 3, "causal": True},
    "float mask and window": lambda n, s: {"mask": np.float32([[0.5, -INF]]),
                                           "window": (s // 4, 9)},
    "bool mask and lengths": lambda n, s: {"mask": np.array([[True, False]]),
                                           "kv_lengths": [s // 2, s - 1]},
    "padded": lambda n, s: {"q_lengths": [n, n // 2], "kv_lengths": [s - 1, s // 2],
                            "causal": True},
}  # fmt: skip
OTHERS = {"softcap": 3.0, "alibi_slopes": "H", "sinks": "H"}  # what excludes no key
POISON = ([NAN], [INF], [-INF, INF, NAN])


def draw(rng, shape, way, with_others=False, dtype="float32"):
    """(q, k, v, options, keep): keep (B, L, S) are the keys that the options allow."""
    b, h, hkv, length, s, d, dv = shape
    shapes = (b, h, length, d), (b, hkv, s, d), (b, hkv, s, dv)
    q, k, v = (rng.standard_normal(each, np.float32).astype(dtype_of(dtype)) for each in shapes)
    options = WAYS[way](length, s)
    for name in ("kv_lengths", "q_lengths", "query_offset"):
        if isinstance(options.get(name), list):
            options[name] = options[name][:b]
    if "mask" in options:
        options["mask"] = np.tile(options["mask"], s)[:, :s]
    if with_others:
        options |= {
            name: rng.random(h, np.float32) if x == "H" else x for name, x in OTHERS.items()
        }
    zeros = np.zeros((b, 1, length, 1)), np.zeros((b, 1, s, 1)), np.zeros((b, 1, s, 1))
    rules = {name: x for name, x in options.items() if name not in OTHERS}
    return q, k, v, options, oracle.attention(*zeros, **rules)[1][:, 0] > 0


def poisoned(x, bad, values, whole_rows):
    """x with values of no number in the rows of the bad keys (B, S) of each item."""
    x = x.copy()
    for n, (item, key) in enumerate(zip(*np.nonzero(bad), strict=True)):
        columns = slice(None) if whole_rows else n % x.shape[-1]
        x[item, :, key, columns] = values[n % len(values)]
    return x


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_keys_that_no_row_sees_change_no_bit(way, shape, backend, rng):
    """A4 (pytorch/pytorch#101967, ggml-org/llama.cpp#3523, Dao-AILab/flash-attention#2374)."""
    q, k, v, options, keep = draw(rng, shape, way, with_others=True)
    unseen = ~keep.any(axis=1)
    clean = sdpa(q, k, v, backend=backend, **EXTRAS, **options)
    alone = sdpa(q, k, v, backend=backend, **options)
    for values in POISON:
        for whole in (True, False):
            k_bad, v_bad = (poisoned(x, unseen, values, whole) for x in (k, v))
            results = sdpa(q, k_bad, v_bad, backend=backend, **EXTRAS, **options)
            for x, y in zip(results, clean, strict=True):
                assert_same_bits(x, y)
            assert_same_bits(sdpa(q, k_bad, v_bad, backend=backend, **options), alone)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["K", "V", "K and one column of V"])
def test_rows_that_do_not_see_it_keep_their_bits(where, way, shape, backend, rng):
    """A4, with other rows that are allowed the key: those see it, and no others."""
    q, k, v, options, keep = draw(rng, shape, way)
    s = k.shape[2]
    bad = np.zeros((len(q), s), bool)
    bad[:, [0, s // 3, s // 2, s - 1]] = True
    sees = (keep & bad[:, None]).any(axis=2)  # (B, L)
    clean = sdpa(q, k, v, backend=backend, **EXTRAS, **options)
    alone = sdpa(q, k, v, backend=backend, **options)
    for values in POISON:
        k_bad = poisoned(k, bad, values, True) if "K" in where else k
        v_bad = poisoned(v, bad, values, where == "V") if "V" in where else v
        results = sdpa(q, k_bad, v_bad, backend=backend, **EXTRAS, **options)
        output = sdpa(q, k_bad, v_bad, backend=backend, **options)
        for b in range(len(q)):
            for x, y in zip(results, clean, strict=True):
                assert_same_bits(x[b][:, ~sees[b]], y[b][:, ~sees[b]])
            assert_same_bits(output[b][:, ~sees[b]], alone[b][:, ~sees[b]])
            if where == "V" or values == [NAN]:
                assert (~np.isfinite(output[b][:, sees[b]])).any(axis=-1).all()
            assert not results[1][b][:, ~keep[b]].any()  # the weights of excluded keys are 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", ["causal", "window and order", "kv_lengths", "padded",
                                 "float mask and window"])  # fmt: skip
def test_half_types(way, shape, dtype, backend, rng):
    q, k, v, options, keep = draw(rng, shape, way, with_others=True, dtype=dtype)
    unseen = ~keep.any(axis=1)
    clean = sdpa(q, k, v, backend=backend, return_lse=True, **options)
    for values in POISON:
        k_bad, v_bad = (poisoned(x, unseen, values, True) for x in (k, v))
        results = sdpa(q, k_bad, v_bad, backend=backend, return_lse=True, **options)
        for x, y in zip(results, clean, strict=True):
            assert_same_bits(x, y)
    s = k.shape[2]
    k[:, :, s // 2] = v[:, :, s // 2] = NAN
    sees = np.broadcast_to(keep[:, None, :, s // 2], q.shape[:-1])
    output, lse = sdpa(q, k, v, backend=backend, return_lse=True, **options)
    np.testing.assert_array_equal(np.isnan(output).all(axis=-1), sees)
    np.testing.assert_array_equal(np.isnan(lse), sees)
    assert_same(output[~sees], clean[0][~sees], backend)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sinks": 2.0}, {"window": (3, 3)},
                                     {"softcap": 2.0, "alibi_slopes": 0.1}],
                         ids=lambda options: " ".join(options) or "plain")  # fmt: skip
def test_rows_past_the_length_are_no_rows(options, shape, backend, rng):
    """Point 4: output 0, weights 0 and lse -inf whatever q holds there, with sinks too."""
    b, h, hkv, length, s, d, dv = shape
    q, k, v = (rng.standard_normal((b, *x), np.float32)
               for x in ((h, length, d), (hkv, s, d), (hkv, s, dv)))  # fmt: skip
    options = {name: np.full(h, x, np.float32) if name in ("sinks", "alibi_slopes") else x
               for name, x in options.items()}  # fmt: skip
    lengths = [length // 2, 0][:b]
    expected = sdpa(q, k, v, q_lengths=lengths, backend=backend, **EXTRAS, **options)
    for values in (NAN, INF, -INF, 3e38):
        bad = q.copy()
        for item, n in enumerate(lengths):
            bad[item, :, n:] = values
        out = np.full(expected[0].shape, NAN, np.float32)
        results = sdpa(bad, k, v, q_lengths=lengths, backend=backend, out=out, **EXTRAS, **options)
        for x, y, nothing in zip(results, expected, (0, 0, -INF), strict=True):
            assert_same_bits(x, y)
            for item, n in enumerate(lengths):
                rest = x[item, :, n:]
                assert_same_bits(rest, np.full_like(rest, nothing))
        # rows that are there keep their bits too, and are rows
        assert np.isfinite(results[2][0, :, max(0, length - s) : lengths[0]]).all()


def test_the_case_of_the_report(backend):
    """A4: exactly 7 with NaN beside it in K and V, by lengths, windows and offsets."""
    q, k = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 2, 4), np.float32)
    for bad in (NAN, INF, -INF):
        k[0, 0, 1], v = bad, np.float32([7, bad]).reshape(1, 1, 2, 1)
        for options in ({"kv_lengths": [1]}, {"window": (0, 0), "align": "top-left"},
                        {"window": (1, 0), "query_offset": 0}, {"causal": True, "key_offset": 1},
                        {"causal": True, "query_offset": [0]},
                        {"window": (None, 3), "key_offset": 3, "query_offset": 0}):  # fmt: skip
            assert sdpa(q, k, v, backend=backend, **options).item() == 7


@pytest.mark.parametrize("length", [1, 5, 60])
@pytest.mark.parametrize("s", [1, 3, 300, 1100])
def test_infinite_scores_under_a_softcap(s, length, backend, rng):
    """tanh brings an infinite score back to the cap; a NaN stays one."""
    q, k, v = (rng.standard_normal((1, 1, n, 4), np.float32) for n in (length, s, s))
    q[...], k[0, 0, 0] = 1e30, 1e30
    k[0, 0, 1:] = -1e30
    output, weights, lse = sdpa(q, k, v, softcap=2.0, backend=backend, **EXTRAS)
    terms = np.exp(np.where(np.arange(s) == 0, 2.0, -2.0))
    np.testing.assert_allclose(weights[0, 0], np.tile(terms / terms.sum(), (length, 1)), rtol=1e-5)
    np.testing.assert_allclose(lse, np.log(terms.sum()), rtol=1e-5)
    assert np.isfinite(output).all()
    k[0, 0, -1, 0] = NAN
    assert np.isnan(sdpa(q, k, v, softcap=2.0, backend=backend)).all()


def test_nan_in_a_sequence_stays_there(backend, rng):
    """varlen_attention: another sequence's keys, and an empty one between them."""
    q, k, v = (rng.standard_normal((20, 2, 8), np.float32) for _ in range(3))
    cu = [0, 5, 5, 12, 20]
    for options in ({}, {"causal": True}, {"window": (2, 1)}, {"kv_lengths": [5, 0, 3, 8]}):
        clean = qkv_ext.varlen_attention(q, k, v, cu, cu, backend=backend, **options)
        k_bad, v_bad = k.copy(), v.copy()
        k_bad[11], v_bad[11] = NAN, INF
        output = qkv_ext.varlen_attention(q, k_bad, v_bad, cu, cu, backend=backend, **options)
        others = np.r_[:5, 12:20] if "kv_lengths" not in options else np.s_[:]
        assert_same_bits(output[others], clean[others])
        if "kv_lengths" not in options:
            assert np.isnan(output[11]).all()
