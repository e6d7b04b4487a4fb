"""Points 6 and 7: NaN and infinity in K and V, where a key is excluded and where it is allowed.

An excluded key changes no bit of a row, whatever its K and V hold.  From allowed keys the result is
non-finite exactly where the plain formula over the allowed keys is.
"""

import numpy as np
import pytest
from tolerance import assert_same_bits

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention
INF, NAN = np.inf, np.nan
EXTRAS = {"return_weights": True, "return_lse": True}

SHAPES = {  # (B, H, Hkv, L, S, D, Dv)
    "few": (2, 4, 2, 9, 33, 20, 12),
    "tiles": (1, 2, 1, 40, 600, 16, 37),
    "decode": (2, 4, 2, 1, 70, 16, 16),
    "decode-splits": (1, 4, 1, 1, 2100, 16, 5),
    "few-queries": (1, 2, 2, 3, 1100, 8, 70),
    "many-queries": (1, 1, 1, 300, 290, 8, 8),
}


def qkv(rng, shape):
    b, h, hkv, length, s, d, dv = shape
    shapes = (b, h, length, d), (b, hkv, s, d), (b, hkv, s, dv)
    return tuple(rng.standard_normal(each, np.float32) for each in shapes)


def by_bool(rng, length, s, bad):
    keep = rng.random((length, s)) < 0.7
    keep[: (length + 1) // 2, bad] = False
    return {"mask": keep}, keep


def by_float(rng, length, s, bad):
    keep = by_bool(rng, length, s, bad)[1]
    bias = np.where(keep, rng.standard_normal(keep.shape), -INF).astype(np.float32)
    return {"mask": bias}, keep


def by_key(rng, length, s, bad):
    """One mask for all rows, as padding has it."""
    keep = np.ones(s, bool)
    keep[bad] = False
    return {"mask": keep}, np.broadcast_to(keep, (length, s))


def by_key_float(rng, length, s, bad):
    keep = by_key(rng, length, s, bad)[0]["mask"]
    bias = np.where(keep, np.float32(0), np.float32(-INF))
    return {"mask": bias}, np.broadcast_to(keep, (length, s))


def by_order(rng, length, s, bad):
    return {"causal": True}, np.tri(length, s, s - length, bool)


def by_order_from_the_left(rng, length, s, bad):
    return {"causal": True, "align": "top-left"}, np.tri(length, s, 0, bool)


def by_order_and_mask(rng, length, s, bad):
    keep = by_bool(rng, length, s, bad)[1]
    return {"causal": True, "mask": keep}, keep & np.tri(length, s, s - length, bool)


#: every way to exclude a key; each gives the options and the (L, S) keys that they allow
WAYS = {
    way.__name__: way
    for way in (by_bool, by_float, by_key, by_key_float, by_order, by_order_from_the_left,
                by_order_and_mask)
}  # fmt: skip
POISON = {"NaN": [NAN], "inf": [INF], "mixed": [-INF, INF, NAN]}


def plain_rows(q, k, v, keep, options, dtype=np.float32):
    """(output, weights, lse) of the plain formula for one head, a row and its keys at a time."""
    bias = options.get("mask")
    bias = None if bias is None or bias.dtype == bool else np.broadcast_to(bias, keep.shape)
    output = np.zeros((len(q), v.shape[1]), dtype)
    weights, lse = np.zeros(keep.shape, dtype), np.full(len(q), -INF, dtype)
    scaled = q.astype(dtype) * dtype(options.get("scale", 1 / np.sqrt(q.shape[1])))
    with np.errstate(all="ignore"):
        for i, allowed in enumerate(keep):
            if not allowed.any():
                continue
            scores = (scaled[i] * k[allowed].astype(dtype)).sum(axis=1)
            scores = scores if bias is None else scores + bias[i, allowed]
            terms = np.exp(scores - scores.max())
            weights[i, allowed] = terms / terms.sum()
            lse[i] = scores.max() + np.log(terms.sum())
            output[i] = (weights[i, allowed, None] * v[allowed]).sum(axis=0)
    return output, weights, lse


def assert_plain(results, q, k, v, keep, options):
    """Every head is non-finite exactly where the plain formula is, and about equal elsewhere."""
    output, weights, lse = results
    group = q.shape[1] // k.shape[1]
    for b, h in np.ndindex(q.shape[:2]):
        expected = plain_rows(q[b, h], k[b, h // group], v[b, h // group], keep, options)
        for x, y in zip((output[b, h], weights[b, h], lse[b, h]), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)  # NaN and inf in their places


def poisoned(x, bad, values, whole_rows):
    """x with values of no number in the rows of the bad keys."""
    x = x.copy()
    for n, key in enumerate(bad):
        columns = slice(None) if whole_rows else n % x.shape[-1]
        x[..., key, columns] = values[n % len(values)]
    return x


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("where", ["K", "V", "K and one column of V"])
def test_excluded_keys_change_no_bit(where, way, shape, backend, rng):
    """A4 (pytorch/pytorch#101967, ggml-org/llama.cpp#3523, Dao-AILab/flash-attention#1745)."""
    q, k, v = qkv(rng, shape)
    length, s = q.shape[-2], k.shape[-2]
    bad = [s // 3, s // 2, s - 1]
    options, keep = way(rng, length, s, bad)
    free = ~keep[:, bad].any(axis=1)  # rows that see none of them
    assert way is by_order or free.any()
    clean = sdpa(q, k, v, backend=backend, **EXTRAS, **options)
    alone = sdpa(q, k, v, backend=backend, **options)[:, :, free]
    for values in POISON.values():
        k_bad = poisoned(k, bad, values, True) if "K" in where else k
        v_bad = poisoned(v, bad, values, where == "V") if "V" in where else v
        results = sdpa(q, k_bad, v_bad, backend=backend, **EXTRAS, **options)
        for x, y in zip(results, clean, strict=True):
            assert_same_bits(x[:, :, free], y[:, :, free])
        output = sdpa(q, k_bad, v_bad, backend=backend, **options)
        assert_same_bits(output[:, :, free], alone)
        if length * s <= 25_000:
            assert_plain(results, q, k_bad, v_bad, keep, options)
    # and so do other finite values
    k[..., bad, :], v[..., bad, :] = -7, 3e37
    assert_same_bits(sdpa(q, k, v, backend=backend, **options)[:, :, free], alone)


def test_the_case_of_the_report(backend):
    """A4: exactly 7, with NaN beside it in K and V."""
    q, k = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 2, 4), np.float32)
    for bad in (NAN, INF, -INF):
        k[0, 0, 1], v = bad, np.float32([7, bad]).reshape(1, 1, 2, 1)
        for options in ({"mask": np.array([[True, False]])}, {"mask": np.array([[0, -INF]])},
                        {"causal": True, "align": "top-left"}):  # fmt: skip
            assert sdpa(q, k, v, backend=backend, **options).item() == 7


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("values", POISON.values(), ids=POISON)
@pytest.mark.parametrize("name", ["q", "k", "v", "k column", "v column"])
def test_allowed_ones_are_seen(name, values, shape, backend, rng):
    """Point 7, with every key allowed: a NaN is neither dropped nor spread."""
    arrays = dict(zip("qkv", qkv(rng, shape), strict=True))
    x = arrays[name[0]]
    bad = [0] if x.shape[-2] == 1 else [x.shape[-2] // 3, x.shape[-2] - 1]
    arrays[name[0]] = poisoned(x, bad, values, "column" not in name)
    q, k, v = arrays.values()
    results = sdpa(q, k, v, backend=backend, **EXTRAS)
    keep = np.ones((q.shape[-2], k.shape[-2]), bool)
    assert_plain(results, q, k, v, keep, {})


@pytest.mark.parametrize("length", [1, 5, 60])
@pytest.mark.parametrize("s", [2, 70, 300, 1100])
def test_weight_of_zero_times_infinity(s, length, backend):
    """The plain formula multiplies: an allowed infinity of V with a weight of 0 gives NaN."""
    q, k = np.ones((length, 1), np.float32), np.zeros((s, 1), np.float32)
    v = np.ones((s, 3), np.float32)
    k[-1], v[-1] = -1000, (INF, 5, NAN)
    output = sdpa(q, k, v, scale=1, backend=backend)
    np.testing.assert_array_equal(np.isnan(output), [[True, False, True]] * length)
    np.testing.assert_allclose(output[:, 1], 1, rtol=1e-5)
    k[-1] = -1
    output = sdpa(q, k, v, scale=1, backend=backend)
    assert (output[:, 0] == INF).all()
    assert np.isfinite(output[:, 1]).all()


@pytest.mark.parametrize("length", [1, 5, 60])
@pytest.mark.parametrize("s", [1, 3, 70, 300, 1100, 2100])
@pytest.mark.parametrize("value", [3e38, -3.4e38, 1e38])
def test_sums_that_overflow_before_the_division(value, s, length, backend, rng):
    """The mean of numbers near the limit is finite: weights are divided before they meet V."""
    q, k = np.zeros((length, 4), np.float32), np.zeros((s, 4), np.float32)
    v = np.full((s, 3), value, np.float32)
    v[:, 1] = rng.standard_normal(s)
    v[::2, 2] *= -1
    output = sdpa(q, k, v, backend=backend)
    expected = plain_rows(q, k, v, np.ones((length, s), bool), {}, np.float64)[0]
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5 * abs(value))
    np.testing.assert_allclose(output[:, 1], expected[:, 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 60])
@pytest.mark.parametrize("s", [1, 3, 70, 300, 1100])
@pytest.mark.parametrize("bias", [None, "bool", "float"])
def test_scores_that_overflow(bias, s, length, backend, rng):
    """Infinite scores from finite Q and K: what the plain formula gives, never a row of zeros."""
    q, k, v = (rng.standard_normal((1, 1, n, 4), np.float32) for n in (length, s, s))
    q[...] = 1e30
    for values in ([1e30], [-1e30], [1e30, -1e30], [-1e30, 1], [1e30, 1], [1e30, 1e8]):
        k[0, 0] = np.resize(np.float32(values), s)[:, None]
        keep = rng.random((length, s)) < 0.8 if bias == "bool" else np.ones((length, s), bool)
        options = {"mask": keep} if bias == "bool" else {}
        if bias == "float":
            options = {"mask": np.full((length, s), 1e38, np.float32)}
        results = sdpa(q, k, v, backend=backend, **EXTRAS, **options)
        assert_plain(results, q, k, v, keep, options)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("s", [1, 2, 300, 1100])
def test_emptiness_is_decided_by_the_rules(s, length, backend):
    """Point 7: a row whose scores are all -inf by arithmetic has keys, and is NaN."""
    q, k = np.full((length, 2), 1e30, np.float32), np.full((s, 2), -1e30, np.float32)
    v = np.ones((s, 3), np.float32)
    for options in ({}, {"mask": np.ones((length, s), bool)}, {"causal": length <= s}):
        output, weights, lse = sdpa(q, k, v, backend=backend, **EXTRAS, **options)
        allowed = np.tri(length, s, s - length, bool) if options.get("causal") else slice(None)
        assert np.isnan(output).all()
        assert np.isnan(weights[allowed]).all()
        assert np.isnan(lse).all()
    # one row of the rules' own making beside it
    mask = np.ones((length + 1, s), bool)
    mask[-1] = False
    more = np.concatenate([q, q[:1]])
    output, weights, lse = sdpa(more, k, v, mask=mask, backend=backend, **EXTRAS)
    assert np.isnan(output[:-1]).all()
    assert not output[-1].any()
    assert not weights[-1].any()
    assert lse[-1] == -INF


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("s", [1, 5, 300])
def test_float_mask_that_is_no_number(s, length, backend, rng):
    """NaN and +inf in a mask are arithmetic, not exclusion."""
    q, k, v = (rng.standard_normal((1, 1, n, 4), np.float32) for n in (length, s, s))
    for value in (NAN, INF):
        mask = rng.standard_normal((length, s)).astype(np.float32)
        mask[0, s // 2] = value
        results = sdpa(q, k, v, mask=mask, backend=backend, **EXTRAS)
        assert np.isnan(results[0][0, 0, 0]).all()
        assert_plain(results, q, k, v, np.ones((length, s), bool), {"mask": mask})


def test_rows_decide_for_themselves(backend, rng):
    """Point 6: a row keeps its bits when another row, head or item takes the careful path."""
    q, k, v = qkv(rng, (3, 4, 2, 40, 300, 16, 12))
    clean = sdpa(q, k, v, causal=True, backend=backend)
    v_bad = v.copy()
    v_bad[1, 1, 290] = NAN  # seen by the last ten queries of heads 2 and 3 of item 1
    output = sdpa(q, k, v_bad, causal=True, backend=backend)
    spoilt = np.zeros(output.shape[:-1], bool)
    spoilt[1, 2:, 30:] = True
    assert np.isnan(output[spoilt]).all()
    assert_same_bits(output[~spoilt], clean[~spoilt])
    q_bad = q.copy()
    q_bad[0, 0, 7] = NAN
    output = sdpa(q_bad, k, v, causal=True, backend=backend)
    assert np.isnan(output[0, 0, 7]).all()
    output[0, 0, 7] = clean[0, 0, 7]
    assert_same_bits(output, clean)


# ---- anything anywhere --------------------------------------------------------------------------

ANYWHERE = {**SHAPES, "splits-many-rows": (1, 2, 2, 20, 2300, 8, 24)}


def sprinkled(rng, x, share):
    """x with NaN and infinities here and there: in some rows, in a few columns, or all over."""
    x = x.copy()
    where = rng.random(x.shape) < share
    if rng.random() < 0.5:
        where &= rng.random((*x.shape[:-1], 1)) < 0.3
    x[where] = rng.choice([NAN, INF, -INF, INF, 3e38], int(where.sum()))
    return x


@pytest.mark.parametrize("shape", ANYWHERE.values(), ids=ANYWHERE)
@pytest.mark.parametrize("share", [2e-4, 0.02, 0.6])
def test_non_finite_where_the_formula_is(share, shape, backend, rng):
    """Any number of them in V, and in K and Q; rows that see one are computed by tiles, too."""
    for way in (by_bool, by_float, by_order, by_order_and_mask, None):
        q, k, v = qkv(rng, shape)
        length, s = shape[3:5]
        options, keep = {}, np.ones((length, s), bool)
        if way:
            options, keep = way(rng, length, s, [1])
        v = sprinkled(rng, v, share)
        if rng.random() < 0.3:
            k = sprinkled(rng, k, share / 50)
        results = sdpa(q, k, v, backend=backend, **EXTRAS, **options)
        with np.errstate(over="ignore"):
            assert_plain(results, q, k, v, keep, options)
        output = sdpa(q, k, v, backend=backend, **options)
        np.testing.assert_allclose(output, results[0], rtol=1e-5, atol=1e-6)
        if backend != "numpy":
            assert_same_bits(output, results[0])
            twice = [np.concatenate([x, x]) for x in (q, k, v)]
            both = sdpa(*twice, backend=backend, threads=3, **options)
            assert_same_bits(both[: len(q)], output)
            assert_same_bits(both[len(q) :], output)
