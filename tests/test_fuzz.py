"""Calls of fuzz_calls.py by hypothesis, which shrinks them: against the oracle, and other forms.

Here their numbers have a right answer; .ci/fuzz draws the same calls with numbers and arguments of
any kind, by the thousand and under sanitizers.
"""

import os

import fuzz_calls
import numpy as np
import oracle
import pytest
from cases import dtype_of
from fuzz_arrays import Draw
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


class Tame(Draw):
    """Choices of hypothesis, the first the simplest; finite numbers of float32 in any form."""

    def __init__(self, data):
        self.data = data
        super().__init__(data.draw(st.integers(0, 2**32 - 1)), 0)

    def one_in(self, n):
        return self.data.draw(st.integers(0, n - 1)) == n - 1

    def choice(self, options):
        return options[self.between(0, len(options) - 1)]

    def between(self, low, high):
        return self.data.draw(st.integers(low, high))

    def dtype(self):
        return np.dtype(np.float32)

    def numbers(self, shape, dtype=np.float32):
        return self.rng.standard_normal(shape, np.float32).astype(dtype)

    def view(self, x):
        view = super().view(x)
        same = isinstance(view, np.ndarray) and np.array_equal(view, x)
        return view if same else x  # a list, or broadcast


def plain(x):
    """The same numbers in contiguous native arrays; int64, where the oracle subtracts them."""
    if isinstance(x, np.ndarray):
        dtype = np.int64 if x.dtype.kind in "iu" else x.dtype.newbyteorder("=")
        return np.array(x, dtype, order="C")
    return x


def contiguous(options):
    return {name: plain(x) for name, x in options.items()}


@st.composite
def calls(draw):
    """(q, k, v) as they come, and options, of scaled_dot_product_attention."""
    call = fuzz_calls.attention(Tame(draw(st.data())))
    for name in ("out", "return_weights", "return_lse"):
        call.options.pop(name, None)
    return call.arguments, call.options


def drawn(count):
    """A test of so many calls."""
    return lambda test: settings(max_examples=count)(given(calls())(test))


@drawn(60)
def test_error_rule(backend, call):
    q, k, v = map(plain, call[0])
    options = contiguous(call[1])
    if "mask" in options:
        options["mask"] = mask_in_float32(options["mask"])
    if options.get("layout") == "blhd":  # an output in the other layout would be
        q, k, v = (x.swapaxes(-3, -2) for x in (q, k, v))
        del options["layout"]
    truth = oracle.attention(q, k, v, **options)
    plains = [plain_attention(q, k, v, way, **options) for way in WAYS]
    results = sdpa(q, k, v, return_weights=True, return_lse=True, backend=backend, **options)
    for actual, expected, *others in zip(results, truth, *plains, strict=True):
        bound = allowed_error(expected, *others)
        # one number alone may come out right by luck in the plain formula: a few ulp of a term
        assert_within(actual, expected, bound + 4 * float(F32.eps))
    output = sdpa(q, k, v, backend=backend, **options)
    assert_within(output, truth[0], allowed_error(truth[0], *(x[0] for x in plains)) + 4 * F32.eps)


@pytest.mark.slow_beside_fastest
@drawn(60)
def test_strides(backend, call):
    arrays, options = call
    expected = sdpa(*map(plain, arrays), return_lse=True, backend=backend, **contiguous(options))
    room = np.full([n + 2 for n in expected[0].shape], np.nan, np.float32)
    out = room[(slice(1, -1),) * room.ndim][..., ::-1]
    actual = sdpa(*arrays, return_lse=True, out=out, backend=backend, **options)
    assert actual[0] is out
    for x, y in zip(actual, expected, strict=True):
        assert_same(np.ascontiguousarray(x), y, backend)
    assert np.isnan(room).sum() == room.size - out.size


@drawn(40)
def test_threads(compiled, call):
    arrays, options = call
    expected = sdpa(*arrays, threads=1, backend=compiled, **options)
    for threads in (2, 5):
        actual = sdpa(*arrays, threads=threads, backend=compiled, **options)
        assert_same(actual, expected, compiled)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@drawn(20)
def test_half_types(backend, dtype, call):
    """The float32 computation on the same numbers, rounded once."""
    arrays, options = call
    q, k, v = (x.astype(dtype_of(dtype)) for x in arrays)
    actual = sdpa(q, k, v, return_lse=True, backend=backend, **options)
    wide = (x.astype(np.float32) for x in (q, k, v))
    expected = sdpa(*wide, return_lse=True, backend=backend, **options)
    assert_same_bits(actual[0], expected[0].astype(q.dtype))
    assert_same_bits(actual[1], expected[1])


def padded(x, ends, fill):
    """The sequences of a packed x (T, ...), as (B, the longest, ...)."""
    lengths = np.diff(ends)
    rows = np.full((len(lengths), lengths.max(initial=0), *x.shape[1:]), fill, x.dtype)
    for n, (start, length) in enumerate(zip(ends, lengths, strict=False)):
        rows[n, :length] = x[start : start + length]
    return rows


@settings(max_examples=40)
@given(st.data())
def test_packed_equals_padded(backend, data):
    """varlen_attention against a padded batch of the same sequences, with NaN for padding."""
    call = fuzz_calls.varlen(Tame(data))
    (*packed, cu_q, cu_k), options = call.arguments, call.options | {"return_lse": True}
    options.pop("out", None)
    ends = [np.int64(cu_q), np.int64(cu_k), np.int64(cu_k)]
    packed = [x[: at[-1]] for x, at in zip(packed, ends, strict=True)]  # rows beyond are refused
    output, lse = qkv_ext.varlen_attention(*packed, cu_q, cu_k, backend=backend, **options)
    arrays = [padded(x, at, np.nan) for x, at in zip(packed, ends, strict=True)]
    lengths = {"q_lengths": np.diff(ends[0]), "kv_lengths": np.diff(ends[1])}
    expected = sdpa(*arrays, layout="blhd", backend=backend, **(lengths | options))
    there = np.arange(arrays[0].shape[1]) < lengths["q_lengths"][:, None]
    assert_same(output, expected[0][there], backend)
    assert_same(lse, expected[1].swapaxes(1, 2)[there], backend)


@settings(max_examples=60)
@given(st.data())
def test_products(backend, data):
    draw = Tame(data)
    m, k, n = draw.size(), draw.keys(), draw.choice([draw.size(), draw.keys()])
    a, b = draw.numbers((m, k)), draw.numbers((k, n))
    bias = None if draw.one_in(2) else draw.numbers(n)
    truth = a.astype(np.float64) @ b + (0 if bias is None else bias)
    plains = [way[0](a, b) + (np.float32(0) if bias is None else bias) for way in WAYS]
    terms = np.abs(a).astype(np.float64) @ np.abs(b) + (0 if bias is None else np.abs(bias))
    bound = allowed_error(truth, *plains, size=terms) + 4 * float(F32.eps)
    expected = qkv_ext.linear_projection(a, b, bias, backend=backend)
    x, w = draw.view(a), draw.view(b)
    results = [expected]
    results += [
        qkv_ext.linear_projection(x, weight, bias, backend=backend)
        for weight in (w, qkv_ext.pack_weight(w))
    ]
    if bias is None:
        results.append(qkv_ext.matmul(x, w, backend=backend))
    for actual in results:
        assert_within(actual, truth, bound)
        if backend != "numpy":  # whose BLAS adds a single number up in many orders
            assert_same_bits(actual, expected)


@settings(max_examples=60)
@given(st.data())
def test_softmax(backend, data):
    draw = Tame(data)
    shape = [draw.size(0, 40) for _ in range(draw.between(1, 3))]
    axis = draw.between(-len(shape), len(shape) - 1)
    x = draw.numbers(shape) * np.float32(10)
    expected = qkv_ext.softmax(x, axis, backend=backend)
    terms = np.exp(x.astype(np.float64) - x.max(axis=axis, keepdims=True, initial=-1e9))
    truth = terms / terms.sum(axis=axis, keepdims=True) if x.size else terms
    np.testing.assert_allclose(expected, truth, rtol=1e-5, atol=1e-7)
    assert_same(qkv_ext.softmax(draw.view(x), axis, backend=backend), expected, backend)


def test_this_file_draws_what_it_says():
    """Forms of arrays that are not plain ones, of the same numbers, and each option."""
    met, others = set(), 0

    @drawn(200)
    def check(call):
        nonlocal others
        met.update(call[1])
        for x in call[0]:
            others += not (x.flags.c_contiguous and x.dtype.isnative and x.flags.aligned)
            np.testing.assert_array_equal(plain(x), x)

    check()
    assert others > 60
    assert met >= {"mask", "causal", "align", "scale", "window", "softcap", "alibi_slopes", "sinks",
                   "kv_lengths", "q_lengths", "query_offset", "key_offset", "layout"}  # fmt: skip
