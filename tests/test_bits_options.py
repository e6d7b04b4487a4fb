"""Point 12 under every option: a row has its own bits, in a padded batch, a packed one, or alone.

Bit for bit in the compiled backends; NumPy's rows depend on the BLAS, and there the same tests
allow for rounding.
"""

import numpy as np
import pytest
from cases import dtype_of
from tolerance import assert_same, assert_same_bits

import qkv_ext

sdpa, varlen = qkv_ext.scaled_dot_product_attention, qkv_ext.varlen_attention
EXTRAS = {"return_weights": True, "return_lse": True}

SHAPES = {  # (H, Hkv, D, Dv), the lengths of queries and of keys of each item
    "short": ((4, 2, 20, 12), (33, 1, 0, 17), (33, 40, 5, 17)),
    "self": ((2, 1, 16, 16), (150, 1, 70, 8), (150, 1, 70, 8)),
    "tiles": ((4, 2, 32, 20), (50, 9, 48), (300, 257, 0)),
    "long": ((1, 1, 16, 16), (300, 2), (1100, 700)),
    "decode": ((4, 2, 64, 64), (1, 1, 1, 1), (70, 1, 0, 256)),
    "decode-splits": ((4, 1, 32, 24), (1, 1, 1, 1), (2100, 1024, 1025, 3)),
    "few-queries": ((2, 1, 16, 16), (3, 7, 1), (1300, 1100, 256)),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "align": "top-left"},
    "window": {"window": (30, 4)},
    "causal window": {"causal": True, "window": (257, None)},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": "H"},
    "slopes of each item": {"alibi_slopes": "BH", "causal": True},
    "sinks": {"sinks": "H"},
    "offsets": {"query_offset": "B", "key_offset": 5, "window": (90, 9)},
    "float mask": {"mask": np.float32},
    "bool mask": {"mask": bool, "causal": True},
    "all": {"causal": True, "window": (400, 3), "softcap": 3.0, "alibi_slopes": "BH", "sinks": "H",
            "mask": np.float32, "scale": 0.3, "query_offset": "B", "key_offset": -3},
}  # fmt: skip
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def draw(rng, shape, options, dtype="float32"):
    """(q, k, v, options) of a padded batch; what is beyond an item's length is NaN."""
    (h, hkv, d, dv), q_lengths, kv_lengths = shape
    b, length, s = len(q_lengths), max(q_lengths), max(kv_lengths)
    q, k, v = (rng.standard_normal((b, *x), np.float32).astype(dtype_of(dtype))
               for x in ((h, length, d), (hkv, s, d), (hkv, s, dv)))  # fmt: skip
    for item, (n, m) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        q[item, :, n:] = k[item, :, m:] = v[item, :, m:] = np.nan
    sizes = {"H": (h,), "BH": (b, h)}
    options = dict(options)
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = rng.random(sizes[options[name]], np.float32)
    if "query_offset" in options:
        options["query_offset"] = rng.integers(-5, max(s, 6), b)
    if "mask" in options:
        x = rng.standard_normal((b, 1, length, s), np.float32)
        mask = x < 1 if options["mask"] is bool else np.where(x < 1, x, np.float32(-np.inf))
        options["mask"] = mask
    return q, k, v, options


def of_item(options, item, n, m):
    """The options of one item alone, with its n queries and m keys."""
    own = dict(options)
    for name in ("alibi_slopes", "query_offset"):
        if name in own and (name == "query_offset" or own[name].ndim == 2):
            own[name] = own[name][item : item + 1]
    if "mask" in own:
        own["mask"] = own["mask"][item : item + 1, :, :n, :m]
    return own


@every_shape
@every_option
def test_padded_equals_exact(options, shape, backend, rng):
    """q_lengths and kv_lengths against each item alone, whatever the padding holds."""
    q, k, v, options = draw(rng, shape, options)
    lengths = {"q_lengths": shape[1], "kv_lengths": shape[2]}
    padded = sdpa(q, k, v, backend=backend, **EXTRAS, **lengths, **options)
    output = sdpa(q, k, v, backend=backend, **lengths, **options)
    for item, (n, m) in enumerate(zip(*shape[1:], strict=True)):
        one = np.s_[item : item + 1]
        parts = q[one, :, :n], k[one, :, :m], v[one, :, :m]
        own = of_item(options, item, n, m)
        alone = sdpa(*parts, backend=backend, **EXTRAS, **own)
        for x, y, cut in zip(alone, padded, (np.s_[:, :, :n], np.s_[:, :, :n, :m], np.s_[:, :, :n]),
                             strict=True):  # fmt: skip
            assert_same(x, y[one][cut], backend)
        assert_same(sdpa(*parts, backend=backend, **own), output[one, :, :n], backend)
        for rest in (padded[0][item, :, n:], padded[1][item, :, n:], padded[1][item, :, :, m:]):
            assert_same_bits(rest, np.zeros_like(rest))
        assert (padded[2][item, :, n:] == -np.inf).all()


@every_shape
@every_option
def test_packed_equals_dense(options, shape, backend, rng):
    """varlen_attention against each sequence alone; empty ones and cut ones are among them."""
    q, k, v, options = draw(rng, shape, options)
    for name in ("mask", "query_offset", "key_offset"):
        options.pop(name, None)
    cu_q, cu_k = (np.cumsum([0, *lengths]) for lengths in shape[1:])
    packed = [
        np.concatenate([x[item, :, :n].swapaxes(0, 1) for item, n in enumerate(lengths)])
        for x, lengths in ((q, shape[1]), (k, shape[2]), (v, shape[2]))
    ]
    for cut in (0, 2):  # keys at the end of each span that are not there
        own_keys = np.maximum(np.array(shape[2]) - cut, 0)
        given = {"kv_lengths": own_keys} if cut else {}
        output, lse = varlen(
            *packed, cu_q, cu_k, return_lse=True, backend=backend, **given, **options
        )
        assert output.shape == (sum(shape[1]), *shape[0][::3])
        assert_same(varlen(*packed, cu_q, cu_k, threads=3, backend=backend, **given, **options),
                    output, backend)  # fmt: skip
        for item, (n, m) in enumerate(zip(shape[1], own_keys, strict=True)):
            one, rows = np.s_[item : item + 1], np.s_[cu_q[item] : cu_q[item + 1]]
            alone = sdpa(q[one, :, :n], k[one, :, :m], v[one, :, :m], return_lse=True,
                         backend=backend, **of_item(options, item, n, m))  # fmt: skip
            assert_same(alone[0][0].swapaxes(0, 1), output[rows], backend)
            assert_same(alone[1][0].T, lse[rows], backend)


@every_shape
@every_option
def test_threads(options, shape, backend, rng):
    q, k, v, options = draw(rng, shape, options)
    options |= {"q_lengths": shape[1], "kv_lengths": shape[2], "return_lse": True}
    expected = sdpa(q, k, v, threads=1, backend=backend, **options)
    for threads in (2, 5):
        actual = sdpa(q, k, v, threads=threads, backend=backend, **options)
        for x, y in zip(actual, expected, strict=True):
            assert_same(x, y, backend)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_shape
@every_option
def test_half_types_are_rounded_once(options, shape, dtype, backend, rng):
    """The float32 computation on the same numbers, rounded to the dtype; lse stays float32."""
    q, k, v, options = draw(rng, shape, options, dtype)
    wide = [x.astype(np.float32) for x in (q, k, v)]
    lengths = {"q_lengths": shape[1], "kv_lengths": shape[2]}
    expected = sdpa(*wide, backend=backend, **EXTRAS, **lengths, **options)
    actual = sdpa(q, k, v, backend=backend, **EXTRAS, **lengths, **options)
    for x, y, kind in zip(actual, expected, (q.dtype, q.dtype, np.float32), strict=True):
        assert_same_bits(x, y.astype(kind))
    output = sdpa(*wide, backend=backend, **lengths, **options).astype(q.dtype)
    assert_same_bits(sdpa(q, k, v, backend=backend, **lengths, **options), output)
    strided = np.full((*output.shape[:-1], 2 * output.shape[-1]), 7, q.dtype)[..., ::-2]
    sdpa(q, k, v, backend=backend, out=strided, **lengths, **options)
    assert_same_bits(np.ascontiguousarray(strided), output)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packed_half_types(dtype, backend, rng):
    q, k, v = (rng.standard_normal((70, h, 24), np.float32).astype(dtype_of(dtype))
               for h in (4, 2, 2))  # fmt: skip
    cu = [0, 40, 40, 41, 70]
    wide = [x.astype(np.float32) for x in (q, k, v)]
    options = {"causal": True, "return_lse": True, "backend": backend}
    output, lse = varlen(q, k, v, cu, cu, **options)
    expected = varlen(*wide, cu, cu, **options)
    assert_same_bits(output, expected[0].astype(q.dtype))
    assert_same_bits(lse, expected[1])
    out = np.empty((70, 4, 48), q.dtype)[..., ::2]
    assert varlen(q, k, v, cu, cu, out=out, **options)[0] is out
    assert_same_bits(np.ascontiguousarray(out), output)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(257, 1, 0, 256), (9, 40, 33), (1, 1), (300, 12)])
def test_right_padded_self_attention(lengths, causal, backend, rng):
    """Right-padded causal self-attention is q_lengths = kv_lengths: each item alone, and as a
    layer over the padded batch."""
    b, length = len(lengths), max(lengths)
    q, k, v = (rng.standard_normal((b, h, length, 16), np.float32) for h in (4, 2, 2))
    options = {"causal": causal, "backend": backend}
    padded = sdpa(q, k, v, q_lengths=lengths, kv_lengths=lengths, **options)
    for item, n in enumerate(lengths):
        one = np.s_[item : item + 1, :, :n]
        assert_same(sdpa(q[one], k[one], v[one], **options), padded[one], backend)
        assert not padded[item, :, n:].any()
    w = [rng.standard_normal(s, np.float32) / 8 for s in ((24, 32), (24, 16), (24, 16), (32, 24))]
    layer = qkv_ext.MultiHeadAttention(*w, num_heads=4, num_kv_heads=2)
    x = rng.standard_normal((b, length, 24), np.float32)
    together = layer(x, q_lengths=lengths, kv_lengths=lengths, **options)
    for item, n in enumerate(lengths):
        assert_same(together[item, :n], layer(x[item : item + 1, :n], **options)[0], backend)


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (70, 5), (256, 0), (None, 9), (1024, None)])
@pytest.mark.parametrize(("length", "s"), [(1, 1300), (5, 300), (40, 1300), (300, 300)])
def test_what_stands_outside_a_window(length, s, window, backend, rng):
    """Numbers outside of a row's window do not matter, nor which rows are beside it."""
    q, k, v = (rng.standard_normal((2, h, n, 16), np.float32)
               for h, n in ((4, length), (2, s), (2, s)))  # fmt: skip
    expected = sdpa(q, k, v, window=window, backend=backend)
    row = length // 2
    at = row + s - length
    left, right = (s if side is None else side for side in window)
    outside = np.abs(np.arange(s) - at) > np.where(np.arange(s) < at, left, right)
    others = [x.copy() for x in (q, k, v)]
    others[0][:, :, np.arange(length) != row] *= -3
    others[1][:, :, outside], others[2][:, :, outside] = 1e9, -1e9
    actual = sdpa(*others, window=window, backend=backend)
    assert_same(actual[:, :, row], expected[:, :, row], backend)
    # the window as a mask: other tiles may be skipped, so within rounding
    i, j = np.arange(length)[:, None] + s - length, np.arange(s)
    mask = (j >= i - left) & (j <= i + right)
    actual = sdpa(q, k, v, mask=mask, backend=backend)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)


@every_shape
def test_options_that_say_nothing(shape, backend, rng):
    """An open window, full lengths, offsets that are the default, slopes of 0: the same bits."""
    q, k, v, _ = draw(rng, (shape[0], (max(shape[1]),) * 2, (max(shape[2]),) * 2), {})
    length, s = q.shape[2], k.shape[2]
    h = q.shape[1]
    for causal in (False, True):
        expected = sdpa(q, k, v, causal=causal, backend=backend)
        for options in ({"window": (None, None)}, {"window": (s + length, s + length)},
                        {"window": (10**30, 10**30)}, {"q_lengths": [length] * 2},
                        {"kv_lengths": np.full(2, s, np.uint16)}, {"query_offset": s - length},
                        {"query_offset": [s - length] * 2},
                        {"query_offset": s - length + 9, "key_offset": 9},
                        {"alibi_slopes": np.zeros(h, np.float32)}):  # fmt: skip
            actual = sdpa(q, k, v, causal=causal, backend=backend, **options)
            if "alibi_slopes" in options:
                np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
            else:
                assert_same(actual, expected, backend)
