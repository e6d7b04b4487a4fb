"""Random shapes, strides, masks and options, by hypothesis; failures shrink to small calls.

Every draw is checked against the oracle by the error rule, or against the same numbers in plain
contiguous arrays by their bits.
"""

import os

import numpy as np
import oracle
import pytest
from cases import dtype_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import (
    F32,
    WAYS,
    allowed_error,
    assert_same,
    assert_same_bits,
    assert_within,
    mask_in_float32,
    plain_attention,
)

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention

settings.register_profile(
    "qkv_ext",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("qkv_ext")

SIZES = st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 17, 31, 33, 48, 64, 65, 100]))
LENGTHS = st.one_of(SIZES, st.sampled_from([127, 129, 255, 256, 257, 300, 513, 1025]))


@st.composite
def broadcast_lead(draw, lead):
    """lead, with some of its axes of length 1 instead."""
    return tuple(draw(st.sampled_from([n, 1])) for n in lead)


@st.composite
def calls(draw):
    """(q, k, v, options) of an attention call, small enough to be quick."""
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    hkv, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    length = draw(LENGTHS)
    s = draw(LENGTHS if length < 130 else SIZES)
    d, dv = draw(SIZES.filter(bool)), draw(SIZES)
    if len(lead) > 0:  # rank 4 and above: heads
        shapes = [
            (*draw(broadcast_lead(lead)), h, n, width)
            for h, n, width in ((hkv * group, length, d), (hkv, s, d), (hkv, s, dv))
        ]
        scores = [*np.broadcast_shapes(*(x[:-3] for x in shapes)), hkv * group, length, s]
    else:
        lead = tuple(draw(st.lists(st.integers(1, 4), max_size=1)))
        shapes = [
            (*draw(broadcast_lead(lead)), n, width) for n, width in ((length, d), (s, d), (s, dv))
        ]
        scores = [*np.broadcast_shapes(*(x[:-2] for x in shapes)), length, s]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    first = scores[0] if len(scores) > 2 else None
    options = draw(rules(rng, first, scores[-3] if len(scores) > 3 else 1, length, s))
    if draw(st.booleans()):
        options |= {"causal": True, "align": draw(st.sampled_from(["bottom-right", "top-left"]))}
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-2, 2, width=32))
    if draw(st.booleans()):
        shape = tuple(draw(st.sampled_from([n, 1])) for n in scores)
        options["mask"] = draw(masks(rng, shape[draw(st.integers(0, len(shape))) :]))
    return q, k, v, options


@st.composite
def rules(draw, rng, first, heads, length, s):
    """Options of position, lengths and heads; first is B, None at rank 2."""

    def numbers(low, high):  # an integer of each item
        if first is None:
            return draw(st.integers(low, high))
        return rng.integers(low, high + 1, first).astype(draw(st.sampled_from(["i2", "i8", ">i4"])))

    options = {}
    side = st.one_of(st.none(), st.integers(0, 9), st.integers(0, 1100))
    if draw(st.booleans()):
        options["window"] = draw(st.tuples(side, side))
    if draw(st.booleans()):
        options["kv_lengths"] = numbers(0, s)
    if draw(st.booleans()):
        options["q_lengths"] = numbers(0, length)
    if draw(st.booleans()):
        options["query_offset"] = numbers(-10, s + 10)
    if draw(st.booleans()):
        options["key_offset"] = draw(st.integers(-20, 20))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.3, 2.0, 30.0]))
    if draw(st.booleans()):
        each = first is not None and draw(st.booleans())
        options["alibi_slopes"] = rng.random((first, heads) if each else heads, np.float32)
    if draw(st.booleans()):
        options["sinks"] = rng.standard_normal(heads, np.float32)
    kept = draw(st.lists(st.sampled_from(sorted(options)), max_size=4)) if options else []
    return {name: options[name] for name in kept}


@st.composite
def masks(draw, rng, shape):
    dtype = draw(st.sampled_from([bool, np.float16, np.float32, np.float64]))
    keep = rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    if dtype is bool:
        return np.asarray(keep)
    excluded = draw(st.sampled_from([-np.inf, float(np.finfo(dtype).min), -1e4]))
    return np.asarray(np.where(keep, rng.standard_normal(shape), excluded), dtype)


@st.composite
def views(draw, x):
    """The same numbers with other strides, byte order or alignment."""
    for axis in range(x.ndim):
        kind = draw(st.sampled_from(["plain", "reversed", "stepped", "amid"]))
        at = [slice(None)] * x.ndim
        if kind == "reversed":
            at[axis] = slice(None, None, -1)
            x = np.flip(x, axis).copy()[tuple(at)]
        elif kind in ("stepped", "amid"):
            shape, n = list(x.shape), x.shape[axis]
            shape[axis], at[axis] = (2 * n, slice(0, 2 * n, 2)) if kind == "stepped" else (
                n + 3, slice(1, n + 1))  # fmt: skip
            room = np.full(shape, True if x.dtype == bool else np.nan, x.dtype)
            room[tuple(at)] = x
            x = room[tuple(at)]
    if x.ndim and draw(st.booleans()):
        order = draw(st.permutations(range(x.ndim)))
        x = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    kind = draw(st.sampled_from(["native", "native", "swapped", "misaligned"]))
    if kind == "swapped":
        x = x.astype(x.dtype.newbyteorder())
    if kind == "misaligned":
        raw = np.empty(x.nbytes + 1, np.uint8)
        raw[1:] = np.frombuffer(x.tobytes(), np.uint8)
        x = raw[1:].view(x.dtype).reshape(x.shape)
    x = x.view()
    x.flags.writeable = x.flags.writeable and draw(st.booleans())
    return x


@settings(max_examples=60)
@given(calls())
def test_error_rule(backend, call):
    q, k, v, options = call
    if "mask" in options:
        options["mask"] = mask_in_float32(options["mask"])
    truth = oracle.attention(q, k, v, **options)
    plain = [plain_attention(q, k, v, way, **options) for way in WAYS]
    results = sdpa(q, k, v, return_weights=True, return_lse=True, backend=backend, **options)
    for actual, expected, *others in zip(results, truth, *plain, strict=True):
        bound = allowed_error(expected, *others)
        # one number alone may come out right by luck in the plain formula: a few ulp of a term
        assert_within(actual, expected, bound + 4 * float(F32.eps))
    output = sdpa(q, k, v, backend=backend, **options)
    assert_within(output, truth[0], allowed_error(truth[0], *(x[0] for x in plain)) + 4 * F32.eps)


@pytest.mark.slow_beside_fastest
@settings(max_examples=60)
@given(calls(), st.data())
def test_strides(backend, call, data):
    q, k, v, options = call
    expected = sdpa(q, k, v, return_lse=True, backend=backend, **options)
    q, k, v = (data.draw(views(x)) for x in (q, k, v))
    if "mask" in options:
        options["mask"] = data.draw(views(options["mask"]))
    room = np.full([n + 2 for n in expected[0].shape], np.nan, np.float32)
    out = room[(slice(1, -1),) * room.ndim][..., :: data.draw(st.sampled_from([1, -1]))]
    actual = sdpa(q, k, v, return_lse=True, out=out, backend=backend, **options)
    assert actual[0] is out
    for x, y in zip(actual, expected, strict=True):
        assert_same(np.ascontiguousarray(x), y, backend)
    assert np.isnan(room).sum() == room.size - out.size


@settings(max_examples=40)
@given(calls(), st.integers(1, 5))
def test_threads(compiled, call, threads):
    q, k, v, options = call
    expected = sdpa(q, k, v, threads=1, backend=compiled, **options)
    actual = sdpa(q, k, v, threads=threads, backend=compiled, **options)
    assert_same(actual, expected, compiled)


@settings(max_examples=40)
@given(calls(), st.sampled_from(["float16", "bfloat16"]))
def test_half_types(backend, call, dtype):
    """The float32 computation on the same numbers, rounded once."""
    q, k, v, options = call
    q, k, v = (x.astype(dtype_of(dtype)) for x in (q, k, v))
    actual = sdpa(q, k, v, return_lse=True, backend=backend, **options)
    wide = (x.astype(np.float32) for x in (q, k, v))
    expected = sdpa(*wide, return_lse=True, backend=backend, **options)
    assert_same_bits(actual[0], expected[0].astype(q.dtype))
    assert_same_bits(actual[1], expected[1])


@settings(max_examples=40)
@given(st.lists(st.tuples(LENGTHS.filter(lambda n: n < 300), LENGTHS), max_size=5),
       st.integers(1, 2), st.integers(1, 3), st.integers(0, 2**32 - 1), st.data())  # fmt: skip
def test_packed_equals_padded(backend, lengths, hkv, group, seed, data):
    """varlen_attention against a padded batch of the same sequences, with NaN for padding."""
    rng = np.random.default_rng(seed)
    b, h, lengths = len(lengths), hkv * group, np.array(lengths, int).reshape(-1, 2)
    most = lengths.max(axis=0, initial=0)
    options = data.draw(rules(rng, b, h, *most.tolist()))
    options = {name: x for name, x in options.items()
               if name in ("window", "softcap", "alibi_slopes", "sinks")}  # fmt: skip
    options |= {"causal": data.draw(st.booleans()), "return_lse": True, "backend": backend}
    packed, padded = [], []
    for heads, which, width in ((h, 0, 9), (hkv, 1, 9), (hkv, 1, 20)):
        x = rng.standard_normal((b, most[which], heads, width), np.float32)
        there = np.arange(most[which]) < lengths[:, which, None]
        packed.append(x[there])
        x[~there] = np.nan
        padded.append(x)
    cu = np.zeros((b + 1, 2), int)
    cu[1:] = np.cumsum(lengths, axis=0)
    output, lse = qkv_ext.varlen_attention(*packed, cu[:, 0], cu[:, 1], **options)
    expected = sdpa(*padded, layout="blhd", q_lengths=lengths[:, 0], kv_lengths=lengths[:, 1],
                    **options)  # fmt: skip
    there = np.arange(most[0]) < lengths[:, :1]
    assert_same(output, expected[0][there], backend)
    assert_same(lse, expected[1].swapaxes(1, 2)[there], backend)


@settings(max_examples=60)
@given(LENGTHS, LENGTHS, LENGTHS, st.integers(0, 2**32 - 1), st.data())
def test_products(backend, m, k, n, seed, data):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    bias = data.draw(st.sampled_from([None, rng.standard_normal(n, np.float32)]))
    truth = a.astype(np.float64) @ b + (0 if bias is None else bias)
    plain = [way[0](a, b) + (np.float32(0) if bias is None else bias) for way in WAYS]
    bound = allowed_error(truth, *plain) + 4 * float(F32.eps)
    expected = qkv_ext.linear_projection(a, b, bias, backend=backend)
    assert_within(expected, truth, bound)
    x, w = data.draw(views(a)), data.draw(views(b))
    for weight in (w, qkv_ext.pack_weight(w)):
        actual = qkv_ext.linear_projection(x, weight, bias, backend=backend)
        assert_same(actual, expected, backend)
    if bias is None:
        assert_same(qkv_ext.matmul(x, w, backend=backend), expected, backend)


@settings(max_examples=60)
@given(st.lists(SIZES, min_size=1, max_size=3), st.integers(0, 2**32 - 1), st.data())
def test_softmax(backend, shape, seed, data):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(10)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    expected = qkv_ext.softmax(x, axis, backend=backend)
    terms = np.exp(x.astype(np.float64) - x.max(axis=axis, keepdims=True, initial=-1e9))
    truth = terms / terms.sum(axis=axis, keepdims=True) if x.size else terms
    np.testing.assert_allclose(expected, truth, rtol=1e-5, atol=1e-7)
    actual = qkv_ext.softmax(data.draw(views(x)), axis, backend=backend)
    assert_same(actual, expected, backend)


@pytest.mark.parametrize("axis", [0, 1])
def test_this_file_draws_what_it_says(axis):
    """views() keeps the numbers: else the tests above compare nothing."""

    @settings(max_examples=20)
    @given(st.data())
    def check(data):
        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        view = data.draw(views(np.moveaxis(x, axis, 0)))
        np.testing.assert_array_equal(view, np.moveaxis(x, axis, 0))

    check()
