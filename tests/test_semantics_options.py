"""Windows, lengths, offsets, softcap, slopes and sinks, by example; see test_semantics.py.
With Q and K zero the results are exact means of rows of V.
"""

import os
import time

import numpy as np
import pytest
from cases import dtype_of
from conftest import BACKENDS
from tolerance import assert_same, assert_same_bits

import qkv_ext

sdpa, varlen = qkv_ext.scaled_dot_product_attention, qkv_ext.varlen_attention
T, F, INF = True, False, np.inf
EXTRAS = {"return_weights": True, "return_lse": True}


def means(v, length, backend, *, heads=1, **options):
    """The output (L,) of zeros Q and K for values of width 1."""
    v = np.asarray(v, np.float32).reshape(1, 1, -1, 1)
    q, k = np.zeros((1, heads, length, 4), np.float32), np.zeros((1, 1, v.shape[2], 4), np.float32)
    output = sdpa(q, k, v, backend=backend, **options)
    assert (output == output[:, :1]).all()
    return output[0, 0, :, 0].tolist()


# ---- lengths and offsets ------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 4])
def test_the_last_query_sees_the_last_key_that_is_there(heads, backend):
    """B3 (onnx/onnx#8068, #8054, microsoft/onnxruntime#28958, #29020): a static buffer of 5."""
    options = {"causal": True, "heads": heads}
    assert means(range(5), 2, backend, kv_lengths=[5], **options) == [1.5, 2]
    assert means(range(5), 2, backend, kv_lengths=[3], **options) == [0.5, 1]
    assert means(range(1, 6), 2, backend, kv_lengths=[1], **options) == [0, 1]
    assert means(range(1, 6), 2, backend, kv_lengths=[0], **options) == [0, 0]
    assert means(range(5), 2, backend, kv_lengths=[3], align="top-left", **options) == [0, 0.5]


def test_lengths_of_each_item(backend, rng):
    """B3: one batch of several lengths equals the items one by one."""
    q, v = np.zeros((4, 2, 2, 4), np.float32), np.arange(1, 6, dtype=np.float32)
    k, v = np.zeros((4, 1, 5, 4), np.float32), np.broadcast_to(v[:, None], (4, 1, 5, 1))
    output = sdpa(q, k, v, causal=True, kv_lengths=[5, 3, 1, 0], backend=backend)
    expected = [[2.5, 3], [1.5, 2], [0, 1], [0, 0]]
    assert output[:, 0, :, 0].tolist() == output[:, 1, :, 0].tolist() == expected


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32,
                                   np.int64, np.uint64, ">i4", ">u8"])  # fmt: skip
def test_any_integers(dtype, backend):
    """B7: every integer dtype, byte order and stride is read as the numbers that it holds."""
    q = k = v = np.ones((3, 1, 9, 4), np.float32)
    v = v * np.arange(9, dtype=np.float32)[:, None]
    options = {"q_lengths": [9, 0, 4], "kv_lengths": [3, 9, 1], "query_offset": [0, 5, 2]}
    expected = sdpa(q, k, v, causal=True, backend=backend, **options)
    given = {name: np.array(x, dtype) for name, x in options.items()}
    assert_same_bits(sdpa(q, k, v, causal=True, backend=backend, **given), expected)
    given = {name: np.repeat(np.array(x, dtype), 2)[::2] for name, x in options.items()}
    assert_same_bits(sdpa(q, k, v, causal=True, backend=backend, **given), expected)
    cu = np.array([0, 9, 9, 27], dtype)
    flat = [x.reshape(27, 1, -1) for x in (q, k, v)]
    expected = varlen(*flat, [0, 9, 9, 27], [0, 9, 9, 27], backend=backend)
    assert_same_bits(varlen(*flat, cu, cu, backend=backend), expected)


@pytest.mark.parametrize("options", [{}, {"window": (4, 0)}, {"softcap": 2.0},
                                     {"alibi_slopes": np.float32([0.5, 0.1])},
                                     {"sinks": np.float32([0.5, 3])}],
                         ids=lambda options: " ".join(options) or "plain")  # fmt: skip
@pytest.mark.parametrize(("n", "m"), [(3, 2), (250, 10), (60, 1)])
def test_prefill_and_decode_equal_one_run(n, m, options, backend, rng):
    """B4 (onnx/onnx#7297): past keys are seen, whether m queries come at once or one by one."""
    q, k, v = (rng.standard_normal((2, h, n + m, 16), np.float32) for h in (2, 1, 1))
    options = options | {"causal": True, "backend": backend}
    whole = sdpa(q, k, v, **options)
    prefill = sdpa(q[:, :, :n], k[:, :, :n], v[:, :, :n], **options)
    np.testing.assert_allclose(prefill, whole[:, :, :n], rtol=0, atol=1e-6)
    past, new = (k[:, :, :n], v[:, :, :n]), (k[:, :, n:], v[:, :, n:])
    keys, values = (np.concatenate(pair, axis=2) for pair in zip(past, new, strict=True))
    chunk = sdpa(q[:, :, n:], keys, values, **options)
    np.testing.assert_allclose(chunk, whole[:, :, n:], rtol=0, atol=1e-6)
    room = [np.full_like(x, np.nan) for x in (k, v)]  # a buffer that is filled step by step
    room[0][:, :, :n], room[1][:, :, :n] = past
    for i in range(n, n + m):
        step = np.s_[:, :, i : i + 1]
        room[0][step], room[1][step] = k[step], v[step]
        here = np.s_[:, :, : i + 1]
        expected = sdpa(q[step], k[here], v[here], **options)
        np.testing.assert_allclose(expected, whole[step], rtol=0, atol=1e-6)
        assert_same(sdpa(q[step], *room, kv_lengths=[i + 1] * 2, **options), expected, backend)


def test_offsets_place_queries_and_keys(backend):
    """Point 3: query i at i + query_offset, key j at j + key_offset, in causal order."""
    v = range(5)
    assert means(v, 2, backend, causal=True, query_offset=0) == [0, 0.5]
    assert means(v, 2, backend, causal=True, query_offset=[2]) == [1, 1.5]
    assert means(v, 2, backend, causal=True, query_offset=-1) == [0, 0]
    assert means(v, 2, backend, causal=True, query_offset=100) == [2, 2]
    assert means(v, 2, backend, causal=True, query_offset=3, key_offset=2) == [0.5, 1]
    assert means(v, 2, backend, causal=True, key_offset=4) == [0, 0]
    assert means(v, 2, backend, causal=True, key_offset=-1) == [2, 2]
    assert means(v, 2, backend, window=(1, 0), query_offset=6, key_offset=3) == [2.5, 3.5]
    # key_offset enters neither the lengths nor the offset of align; query_offset replaces align
    assert means(v, 2, backend, causal=True, key_offset=1, align="top-left") == [0, 0]
    assert means(v, 2, backend, causal=True, query_offset=3, align="top-left") == [1.5, 2]
    assert means(v, 2, backend, causal=True, query_offset=3, kv_lengths=[2]) == [0.5, 0.5]


# ---- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 4])
def test_windows_count_keys_beside_the_query(heads, backend):
    """B6 (huggingface/transformers#39408, microsoft/onnxruntime#25927, vllm-project/vllm#3385)."""
    v, options = [1, 2, 3, 4], {"heads": heads}
    assert means(v, 4, backend, causal=True, window=(2, None), **options) == [1, 1.5, 2, 3]
    assert means(v, 4, backend, window=(2, 0), **options) == [1, 1.5, 2, 3]
    assert means(v, 4, backend, causal=True, window=(2, 5), **options) == [1, 1.5, 2, 3]
    assert means(v, 4, backend, window=(1, 0), **options) == [1, 1.5, 2.5, 3.5]
    assert means(v, 4, backend, window=(0, 0), **options) == [1, 2, 3, 4]
    assert means(v, 4, backend, window=(None, 2), **options) == [2, 2.5, 2.5, 2.5]
    assert means(v, 4, backend, window=(0, 1), **options) == [1.5, 2.5, 3.5, 4]
    assert means(v, 4, backend, window=[None, None], **options) == [2.5] * 4
    assert means(v, 1, backend, window=(1, 0), **options) == [3.5]
    assert means(v, 2, backend, window=(1, 0), align="top-left", **options) == [1, 1.5]
    assert means([1, 2], 4, backend, window=(0, 1), **options) == [0, 1, 1.5, 2]


@pytest.mark.parametrize("kind", ["few", "many"])
def test_window_of_many_keys(kind, compiled, rng):
    """A window of w keys gives the same from 4000 keys, NaN but for those, as from w alone."""
    length, s = (1, 4000) if kind == "few" else (64, 4000)
    q, k, v = (rng.standard_normal((1, 2, n, 32), np.float32) for n in (length, s, s))
    window = (100, 0)
    seen = np.s_[:, :, s - length - 100 :]
    expected = sdpa(q, k[seen], v[seen], window=window, backend=compiled)
    k[:, :, : s - length - 100] = v[:, :, : s - length - 100] = np.nan
    actual = sdpa(q, k, v, window=window, backend=compiled)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"window": (64, 0)}, {"kv_lengths": [100]},
                                     {"window": (None, 0), "query_offset": 100},
                                     {"window": (64, 0), "alibi_slopes": np.float32([0.1])}],
                         ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("length", [1, 64])
def test_excluded_tiles_are_skipped(length, options, compiled, rng):
    """A rule that leaves 1 key in 100 takes a small part of the time, not all of it."""
    s = 16384 if length > 1 else 1 << 17
    q, k, v = (rng.standard_normal((1, 1, n, 16), np.float32) for n in (length, s, s))

    def seconds(**options):
        start = time.thread_time()
        sdpa(q, k, v, backend=compiled, threads=1, **options)
        return time.thread_time() - start

    best = [min(seconds(**each) for _ in range(7)) for each in (options, {})]
    assert best[0] < best[1] / 3


# ---- softcap, slopes, sinks ---------------------------------------------------------------------


def test_softcap_comes_before_exclusion(backend):
    """B5 (onnx/onnx#7867): capped first, -inf would have become a finite -2."""
    for mask in (np.array([[T, F]]), np.float32([[0, -INF]])):
        assert means([1, 100], 1, backend, mask=mask, softcap=2) == [1]
        assert means([1, 100], 3, backend, mask=mask, softcap=2) == [1, 1, 1]
    assert means([1, 100], 2, backend, causal=True, softcap=2) == [1, 50.5]
    assert means([1, 100], 1, backend, kv_lengths=[1], softcap=2) == [1]
    assert means([1, 100], 2, backend, window=(0, 0), softcap=2) == [1, 100]


@pytest.mark.parametrize("length", [1, 20])
def test_softcap_of_large_and_small_scores(length, backend):
    """Finite whatever the score, and nothing is lost near 0: c·tanh(s/c) is s there."""
    k = np.float32([-3e38, -100, -1, -1e-4, 0, 1e-4, 1, 100, 3e38]).reshape(-1, 1)
    q, v = np.ones((length, 1), np.float32), np.eye(9, dtype=np.float32)
    for cap in (1e-30, 0.5, 5.0, 50.0, 1e30):
        output, weights, lse = sdpa(q, k, v, softcap=cap, backend=backend, **EXTRAS)
        capped = cap * np.tanh(k[:, 0].astype(np.float64) / cap)
        terms = np.exp(capped - capped.max())
        expected = np.tile(terms / terms.sum(), (length, 1))
        np.testing.assert_allclose(output, expected, rtol=2e-5, atol=1e-40)
        np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=1e-40)
        np.testing.assert_allclose(lse, capped.max() + np.log(terms.sum()), rtol=1e-5, atol=1e-6)


def test_slopes_of_any_number_of_heads():
    """C13 (ml-explore/mlx#343, #3071, paiml/aprender#2143)."""
    slopes = qkv_ext.alibi_slopes
    np.testing.assert_allclose(slopes(12), [*(2.0 ** -np.arange(1, 9)), 0.70710678, 0.35355339,
                                            0.17677670, 0.08838835], rtol=1e-6)  # fmt: skip
    assert slopes(3).tolist() == [0.0625, 0.00390625, 0.25]
    assert slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert slopes(16).tolist()[1::2] == slopes(8).tolist()
    assert slopes(1).tolist() == [2.0**-8]
    assert slopes(2).tolist() == [2.0**-4, 2.0**-8]
    for h in (*range(1, 70), 96, 128, 1000):
        x = slopes(h)
        power = 1 << (h.bit_length() - 1)
        assert x.shape == (h,)
        assert x.dtype == np.float32
        assert (x > 0).all()
        assert (x <= 1).all()
        assert len(set(x.tolist())) == h
        np.testing.assert_allclose(x[:power], 2.0 ** (-8 * np.arange(1, power + 1) / power),
                                   rtol=1e-6)  # fmt: skip
        np.testing.assert_array_equal(x[power:], slopes(2 * power)[: 2 * (h - power) : 2])
    assert_same_bits(slopes(np.uint8(12)), slopes(12))


@pytest.mark.parametrize("length", [1, 3, 40])
def test_slopes_take_the_distance_off(length, backend, rng):
    """-slope |i + offset - j| on each side of the query, the same as a float mask of it."""
    q, k, v = (rng.standard_normal((2, h, n, 16), np.float32)
               for h, n in ((12, length), (4, 50), (4, 50)))  # fmt: skip
    slopes = qkv_ext.alibi_slopes(12)
    distance = np.abs(np.arange(length)[:, None] + 50 - length - np.arange(50))
    mask = -slopes[:, None, None] * distance.astype(np.float32)
    expected = sdpa(q, k, v, mask=mask, backend=backend)
    actual = sdpa(q, k, v, alibi_slopes=slopes, backend=backend)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    both = np.stack([slopes, slopes[::-1]])
    actual = sdpa(q, k, v, alibi_slopes=both, backend=backend)
    assert_same(actual[0], sdpa(q, k, v, alibi_slopes=slopes, backend=backend)[0], backend)
    alone = sdpa(q, k, v, alibi_slopes=slopes[::-1].astype(np.float64), backend=backend)
    assert_same(actual[1], alone[1], backend)


@pytest.mark.parametrize("power", [0, 3, 22, 23, 24, 25, 31, 40, 52])
@pytest.mark.parametrize("sign", [1, -1])
def test_distances_are_exact_however_far(power, sign, backend, rng):
    """As far as the formula's are: integers, rounded once to floats of their own."""
    for off in (-300, -17, -1, 0, 1, 5, 18, 301):
        first = sign * 2**power + off
        distance = np.abs(first + np.arange(3)[:, None] - np.arange(40))
        slope = np.float32(2.0 ** -max(power - 3, 0))  # whose products with distances are exact
        scores = -slope * (distance.astype(np.float32) - np.float32(distance.min()))
        expected = np.exp(scores.astype(np.float64))
        expected /= expected.sum(axis=-1, keepdims=True)
        zeros = np.zeros((2, 40, 4), np.float32)
        _, weights = sdpa(zeros[:, :3], zeros, zeros, alibi_slopes=np.array([slope]),
                          query_offset=first, return_weights=True, backend=backend)  # fmt: skip
        np.testing.assert_allclose(weights[1], expected, rtol=2e-6, atol=1e-7)


def test_sinks_take_part_in_the_denominator_only(backend):
    """One logit per head: two keys of score 0 and a sink of log 2 weigh 1/4 each."""
    q, k = np.zeros((1, 2, 3, 4), np.float32), np.zeros((1, 1, 2, 4), np.float32)
    v, sinks = np.float32([[1], [3]])[None, None], np.float32([np.log(2), -INF])
    output, weights, lse = sdpa(q, k, v, sinks=sinks, backend=backend, **EXTRAS)
    np.testing.assert_allclose(output[0, :, :, 0], [[1] * 3, [2] * 3], rtol=1e-6)
    np.testing.assert_allclose(weights[0, :, 0], [[0.25, 0.25], [0.5, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(lse[0, :, 0], [np.log(4), np.log(2)], rtol=1e-6)
    # a row without keys has its sink; a row past q_lengths has nothing
    for options in ({"mask": np.zeros((3, 2), bool)}, {"kv_lengths": [0]}):
        output, weights, lse = sdpa(
            q, k, v, sinks=sinks, q_lengths=[2], backend=backend, **EXTRAS, **options
        )
        assert not output.any()
        assert not weights.any()
        np.testing.assert_array_equal(lse[0], [[sinks[0]] * 2 + [-INF], [-INF] * 3])


def test_large_sinks(backend):
    """D1: a sink far above the scores leaves nothing, far below it changes nothing."""
    q, k = np.zeros((1, 2, 1, 4), np.float32), np.zeros((1, 2, 300, 4), np.float32)
    v = np.ones((1, 2, 300, 1), np.float32)
    output, lse = sdpa(q, k, v, sinks=np.float32([3e38, -3e38]), return_lse=True, backend=backend)
    np.testing.assert_allclose(output.ravel(), [0, 1], rtol=1e-5)
    np.testing.assert_allclose(lse.ravel(), [3e38, np.log(300)], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ">f4", "bfloat16"])
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_numbers_of_each_head_in_any_float(name, dtype, backend, rng):
    """D5: they are cast to the compute dtype and make nothing a float64."""
    q, k, v = (rng.standard_normal((1, 4, n, 8), np.float32) for n in (3, 9, 9))
    values = np.array([0.5, 0.25, 2.0, 0.125]).astype(dtype_of(dtype))
    expected = sdpa(q, k, v, backend=backend, **{name: values.astype(np.float32)})
    actual = sdpa(q, k, v, backend=backend, **{name: values})
    assert actual.dtype == np.float32
    assert_same_bits(actual, expected)
    actual = sdpa(q, k, v, backend=backend, **{name: values[::-1].copy()[::-1]})
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_numbers_beyond_float32_are_held_at_its_limits(name, backend, rng):
    """As a float mask's are: finite stays finite."""
    q, k, v = (rng.standard_normal((1, 4, n, 8), np.float32) for n in (3, 9, 9))
    results = sdpa(q, k, v, backend=backend, **EXTRAS, **{name: np.full(4, 1e300)})
    assert all(np.isfinite(x).all() for x in results)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, np.float16, int])
def test_softcap_of_any_number_type(kind, backend, rng):
    """D5 (numpy/numpy#25098): the output stays float32."""
    q, k, v = (rng.standard_normal((2, n, 16), np.float32) for n in (3, 9, 9))
    expected = sdpa(q, k, v, softcap=2.0, backend=backend)
    assert_same_bits(sdpa(q, k, v, softcap=kind(2), backend=backend), expected)


def test_switches_of_numpy(backend):
    assert means([1, 3], 2, backend, causal=np.True_) == [1, 2]
    assert means([1, 3], 2, backend, causal=np.False_) == [2, 2]


def test_lengths_of_no_item(backend):
    """An empty list has no dtype of its own: no item needs no length."""
    x = np.zeros((0, 2, 3, 4), np.float32)
    for lengths in ([], np.zeros(0, np.int64)):
        output = sdpa(x, x, x, kv_lengths=lengths, q_lengths=lengths, backend=backend)
        assert output.shape == x.shape


# ---- instruction sets ---------------------------------------------------------------------------


def test_every_instruction_set_is_tested():
    """D10 (OpenMathLib/OpenBLAS#2029, #1955, #2182): the suite runs once per runnable kernel."""
    here = qkv_ext.backends()
    assert here[0] == "numpy"
    if "QKV_EXT_BACKEND" not in os.environ:
        assert here == BACKENDS
    if len(here) > 1:
        from qkv_ext._core import _kernels

        assert here[1:] == _kernels.runnable()
        assert set(here[1:]) <= set(_kernels.compiled())
