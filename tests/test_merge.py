"""merge_attention: what was computed over parts of the keys is the whole (B9)."""

import warnings
from itertools import pairwise

import numpy as np
import oracle
import pytest
from tolerance import allowed_error, assert_same, assert_same_bits, assert_within

import qkv_ext
from qkv_ext import merge_attention

sdpa = qkv_ext.scaled_dot_product_attention
INF = np.inf


def in_parts(q, k, v, cuts, backend, *, query_offset, sinks=None, masks=None, axis=-2, **options):
    """(outputs, lses) of attention to each part of the keys; the last part is given the sinks."""
    outputs, lses = [], []
    edges = [0, *cuts, k.shape[axis]]
    for n, (start, stop) in enumerate(pairwise(edges)):
        part = np.arange(start, stop)
        if masks is not None:
            options["mask"] = masks[..., start:stop]
        output, lse = sdpa(
            q, k.take(part, axis), v.take(part, axis), return_lse=True, backend=backend,
            query_offset=query_offset, key_offset=start,
            sinks=sinks if n == len(cuts) else None, **options,
        )  # fmt: skip
        outputs.append(output)
        lses.append(lse)
    return outputs, lses


def assert_whole(merged, whole):
    for actual, expected in zip(merged, whole, strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6, strict=True)


RULES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "causal window": {"causal": True, "window": (9, None)},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "mask": {"mask": True},
    "softcap": {"softcap": 2.0},
    "all": {"causal": True, "window": (20, 2), "alibi": True, "sinks": True, "mask": True,
            "softcap": 3.0},
}  # fmt: skip


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize(("length", "s"), [(7, 40), (1, 300), (40, 7)])
def test_random_splits(length, s, layout, rules, backend, rng):
    """Keys split at random places, empty parts among them, merge back to the unsplit result."""
    rules = dict(rules)
    q = rng.standard_normal((2, 4, length, 8), np.float32)
    k, v = rng.standard_normal((2, 2, 2, s, 8), np.float32)
    if rules.pop("alibi", None):
        rules["alibi_slopes"] = qkv_ext.alibi_slopes(4)
    sinks = rng.standard_normal(4, np.float32) if rules.pop("sinks", None) else None
    masks = None
    if rules.pop("mask", None):
        masks = rng.standard_normal((2, 1, length, s))
        masks = np.where(masks < 0.8, masks, -INF).astype(np.float32)
    if layout == "blhd":
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    options = rules | {"layout": layout}
    whole = sdpa(q, k, v, mask=masks, sinks=sinks, return_lse=True, backend=backend, **options)
    for count in (0, 1, 2, 5, 11):
        cuts = sorted(rng.integers(0, s + 1, count).tolist())
        parts = in_parts(q, k, v, cuts, backend, query_offset=s - length, sinks=sinks, masks=masks,
                         axis=-2 if layout == "bhld" else -3, **options)  # fmt: skip
        assert_whole(merge_attention(*parts, layout=layout, backend=backend), whole)


@pytest.mark.parametrize("offset", [-3, 0, 4, 30, [2, 17]], ids=str)
def test_splits_at_any_offset(offset, backend, rng):
    """query_offset may be anything, and one for each item."""
    q = rng.standard_normal((2, 2, 5, 8), np.float32)
    k, v = rng.standard_normal((2, 2, 2, 20, 8), np.float32)
    options = {"causal": True, "window": (6, 6), "alibi_slopes": qkv_ext.alibi_slopes(2)}
    whole = sdpa(q, k, v, return_lse=True, query_offset=offset, backend=backend, **options)
    parts = in_parts(q, k, v, [6, 6, 13], backend, query_offset=offset, **options)
    assert_whole(merge_attention(*parts, backend=backend), whole)


def test_merged_parts_merge_again(backend, rng):
    """In any grouping, because a merge is a part."""
    q = rng.standard_normal((2, 3, 5, 8), np.float32)
    k, v = rng.standard_normal((2, 2, 3, 20, 8), np.float32)
    outputs, lses = in_parts(q, k, v, [3, 9, 15], backend, query_offset=15, causal=True)
    whole = sdpa(q, k, v, causal=True, return_lse=True, backend=backend)
    left = merge_attention(outputs[:2], lses[:2], backend=backend)
    right = merge_attention(outputs[2:], lses[2:], backend=backend)
    pairs = zip(left, right, strict=True)
    assert_whole(merge_attention(*pairs, backend=backend), whole)
    stacked = merge_attention(np.stack(outputs), np.stack(lses), backend=backend)
    listed = merge_attention(outputs, lses, backend=backend)
    for x, y in zip(stacked, listed, strict=True):
        assert_same_bits(x, y)
    generated = merge_attention(iter(outputs), (lse for lse in lses), backend=backend)
    assert_same_bits(generated[0], listed[0])


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)], ids=str)
def test_ranks(shape, backend, rng):
    q, k, v = rng.standard_normal((3, *shape), np.float32)
    whole = sdpa(q, k, v, return_lse=True, backend=backend)
    parts = in_parts(q, k, v, [2, 3], backend, query_offset=0)
    assert_whole(merge_attention(*parts, backend=backend), whole)


def test_packed(backend, rng):
    """(Tq, H, Dv) with (Tq, H): the keys of a packed batch in two packed parts."""
    q, k, v = rng.standard_normal((3, 9, 2, 8), np.float32)
    cu = [0, 4, 4, 9]
    whole = qkv_ext.varlen_attention(q, k, v, cu, cu, return_lse=True, backend=backend)
    first = np.array([0, 1, 4, 5, 6])  # the first keys of each sequence, then the others
    second = np.array([2, 3, 7, 8])
    parts = [
        qkv_ext.varlen_attention(q, k[part], v[part], cu, lengths, return_lse=True, backend=backend)
        for part, lengths in ((first, [0, 2, 2, 5]), (second, [0, 2, 2, 4]))
    ]
    assert_whole(merge_attention(*zip(*parts, strict=True), backend=backend), whole)


# ---- empty parts (B9) ---------------------------------------------------------------------------


def scalars(output, lse):
    return np.float32([[output]]), np.float32([lse])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_nothing_but_empty_parts(count, backend):
    """B9 (flashinfer-ai/flashinfer#4051): (0, -inf), no NaN and no warning."""
    parts = [scalars(0, -INF)] * count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with np.errstate(all="raise"):
            output, lse = merge_attention(*zip(*parts, strict=True), backend=backend)
    assert_same_bits(output, np.float32([[0]]))
    assert lse.tolist() == [-INF]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("holds", [0, 7, np.nan, INF])
def test_an_empty_part_changes_nothing(holds, place, backend, rng):
    """B9: (5, 2) stays (5, 2), to the bit and whatever the empty part holds."""
    output, lse = rng.standard_normal((2, 3, 4), np.float32), rng.standard_normal((2, 3), "f4")
    output[0, 0], lse[0, 0] = 5, 2
    parts = [(output, lse), (np.full_like(output, holds), np.full_like(lse, -INF))]
    parts.insert(place, (np.full_like(output, holds), np.full_like(lse, -INF)))
    merged = merge_attention(*zip(*parts, strict=True), backend=backend)
    assert_same_bits(merged[0], output)
    assert_same_bits(merged[1], lse)


def test_b9_as_reported(backend, rng):
    """B9: S = 10 split at 0, 4 and 10."""
    q, k, v = rng.standard_normal((3, 1, 1, 10, 4), np.float32)
    whole = sdpa(q, k, v, return_lse=True, backend=backend)
    parts = in_parts(q, k, v, [0, 4, 10], backend, query_offset=0)
    assert (parts[1][0] == -INF).all()
    assert (parts[1][3] == -INF).all()
    assert_whole(merge_attention(*parts, backend=backend), whole)


def test_a_part_of_nothing_but_sinks(backend, rng):
    """Sinks may come alone: the output 0 and the lse of a part without keys."""
    q, k, v = rng.standard_normal((3, 2, 3, 5, 4), np.float32)
    sinks = rng.standard_normal(3, np.float32)
    whole = sdpa(q, k, v, sinks=sinks, return_lse=True, backend=backend)
    parts = [
        sdpa(q, k, v, return_lse=True, backend=backend),
        sdpa(q, k[:, :, :0], v[:, :, :0], sinks=sinks, return_lse=True, backend=backend),
    ]
    assert_whole(merge_attention(*zip(*parts, strict=True), backend=backend), whole)


def test_rows_past_the_length(backend, rng):
    """Rows that are none are none in every part."""
    q, k, v = rng.standard_normal((3, 2, 3, 6, 4), np.float32)
    options = {"q_lengths": [4, 0], "return_lse": True, "backend": backend}
    whole = sdpa(q, k, v, query_offset=0, **options)
    parts = [sdpa(q, k[:, :, p], v[:, :, p], query_offset=0, **options)
             for p in (np.s_[:2], np.s_[2:])]  # fmt: skip
    merged = merge_attention(*zip(*parts, strict=True), backend=backend)
    assert_whole(merged, whole)
    assert not merged[0][1].any()
    assert (merged[1][1] == -INF).all()


# ---- numbers ------------------------------------------------------------------------------------


def test_far_apart(backend):
    """exp of what is far below the top is 0, never a reason for inf or NaN."""
    for low, high in ((-3e38, 3e38), (-500, 500), (0, 200)):
        output, lse = merge_attention(
            *zip(scalars(1, low), scalars(3, high), strict=True), backend=backend
        )
        assert (output.item(), lse.item()) == (3, np.float32(high))


@pytest.mark.parametrize("value", [np.nan, INF])
def test_not_finite_numbers(value, backend):
    """An lse of NaN or +inf is no empty part: as in the plain formula the row is NaN."""
    good, bad = scalars(1, 0), scalars(2, value)
    output, lse = merge_attention(*zip(good, bad, strict=True), backend=backend)
    assert np.isnan(output).all()
    assert np.isnan(lse).all()
    output, lse = merge_attention(*zip(good, scalars(value, 0), strict=True), backend=backend)
    np.testing.assert_array_equal(output, [[value]])
    assert lse.tolist() == [np.float32(np.log(2))]


def test_large_parts_stay_finite(backend):
    """Weights are divided by their sum before they meet what is large."""
    parts = [np.full((1, 2), value, np.float32) for value in (1e38, 3e38, 1e38, 3e38)]
    output, lse = qkv_ext.merge_attention(parts, [np.zeros(1, np.float32)] * 4, backend=backend)
    np.testing.assert_allclose(output, 2e38, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_types(name, backend, rng):
    """Merged in float32 and rounded once; the lse stays float32."""
    dtype = np.dtype(
        pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.float16
    )
    outputs = rng.standard_normal((3, 2, 5, 8)).astype(dtype)
    lses = rng.standard_normal((3, 2, 5), np.float32)
    output, lse = merge_attention(outputs, lses, backend=backend)
    assert output.dtype == dtype
    wide, wide_lse = merge_attention(outputs.astype(np.float32), lses, backend=backend)
    np.testing.assert_array_equal(output, wide.astype(dtype))
    assert_same_bits(lse, wide_lse)


def test_float64(rng):
    q, k, v = rng.standard_normal((3, 2, 3, 12, 8))
    output, _, lse = oracle.attention(q, k, v)
    parts = in_parts(q, k, v, [5, 7], "numpy", query_offset=0)
    merged = merge_attention(*parts, backend="numpy")
    assert merged[0].dtype == merged[1].dtype == np.float64
    np.testing.assert_allclose(merged[0], output, atol=1e-14)
    np.testing.assert_allclose(merged[1], lse, atol=1e-14)


PARTS = [  # shape of a part, layout, how many: tails of vectors, more than one task, long rows
    ((1, 1), "bhld", 1),
    ((5, 3), "bhld", 2),
    ((1, 8, 1, 64), "bhld", 8),
    ((2, 3, 70, 130), "bhld", 3),
    ((2, 3, 70, 33), "blhd", 5),
    ((2, 1, 3, 2, 17), "blhd", 2),
    ((300, 4, 16), "bhld", 4),
    ((2, 2, 4, 8), "bhld", 700),
    ((2, 9001), "bhld", 3),
    ((1, 5000), "bhld", 900),
]


def some_parts(rng, shape, layout, count, dtype="f4"):
    rows = shape[:-1] if layout == "bhld" else (*shape[:-3], shape[-2], shape[-3])
    outputs = rng.standard_normal((count, *shape)).astype(dtype)
    lses = 4 * rng.standard_normal((count, *rows), np.float32)
    lses[rng.random(lses.shape) < 0.1] = -INF
    return list(outputs), list(lses)


def along(x, layout):
    return (x if layout == "bhld" else x.swapaxes(-1, -2))[..., None]


def exact(outputs, lses, layout):
    """The formula in float64, of the numbers that are there."""
    logs = np.asarray(lses, np.float64)
    with np.errstate(divide="ignore"):
        lse = np.logaddexp.reduce(logs)
        weights = np.exp(logs - np.where(np.isinf(lse), 0, lse))
    return (along(weights, layout) * np.asarray(outputs, np.float64)).sum(0), lse


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("shape", "layout", "count"), PARTS, ids=str)
def test_error_rule(shape, layout, count, dtype, compiled, rng):
    """Any number of parts, shapes and dtypes, within the bound that the formula in NumPy sets."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    outputs, lses = some_parts(rng, shape, layout, count, dtype)
    wide = [x.astype(np.float32) for x in outputs]
    plain = merge_attention(wide, lses, layout=layout, backend="numpy")
    merged = merge_attention(outputs, lses, layout=layout, backend=compiled)
    truth = exact(outputs, lses, layout)
    assert_within(merged[0], truth[0], allowed_error(truth[0], plain[0]), dtype=dtype)
    assert_within(merged[1], truth[1], allowed_error(truth[1], plain[1]), "lse")


@pytest.mark.parametrize(("shape", "layout", "count"), PARTS, ids=str)
def test_bits_of_a_row(shape, layout, count, backend, rng):
    """Whatever the threads, the batch, and how the parts are given."""
    outputs, lses = some_parts(rng, shape, layout, count)
    options = {"layout": layout, "backend": backend}
    output, lse = merge_attention(outputs, lses, threads=1, **options)
    for threads in (2, 5):
        for actual, expected in zip(
            merge_attention(outputs, lses, threads=threads, **options), (output, lse), strict=True
        ):
            assert_same_bits(actual, expected)
    first = [merge_attention([x[:1] for x in outputs], [x[:1] for x in lses], **options)]
    assert_same(first[0][0], output[:1], backend)
    assert_same(first[0][1], lse[:1], backend)
    # rows that lie apart, with NaN between them, each part with strides of its own
    apart = []
    for n, x in enumerate(outputs):
        room = np.full((*x.shape[:-2], x.shape[-2] * (1 + n % 2), x.shape[-1] + 3), np.nan, "f4")
        apart.append(room[..., :: 1 + n % 2, : x.shape[-1]])
        apart[-1][...] = x
    logs = [np.repeat(x, 2, axis=0)[::2] for x in lses]
    strided = merge_attention(apart, logs, **options)
    assert_same(strided[0], output, backend)
    assert_same(strided[1], lse, backend)


@pytest.mark.parametrize(("shape", "layout", "count"), PARTS, ids=str)
def test_not_finite_as_the_formula(shape, layout, count, compiled, rng):
    """NaN and infinities, in parts and logarithms, come out where the formula has them."""
    outputs, lses = some_parts(rng, shape, layout, count)
    odd = np.float32([np.nan, INF, -INF, 3e38, -0.0])
    for x in (*outputs, *lses):
        at = rng.random(x.shape) < 0.3 / count
        x[at] = rng.choice(odd, int(at.sum()))
    right = merge_attention(outputs, lses, layout=layout, backend="numpy")
    merged = merge_attention(outputs, lses, layout=layout, backend=compiled)
    for actual, expected in zip(merged, right, strict=True):
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(actual[~finite], expected[~finite])
        np.testing.assert_allclose(actual[finite], expected[finite], rtol=1e-4, atol=1e-4)


def test_inputs_are_not_written(backend, rng):
    outputs, lses = (
        rng.standard_normal((3, 2, 5, 8), np.float32),
        rng.standard_normal((3, 2, 5), "f4"),
    )
    outputs.flags.writeable = lses.flags.writeable = False
    merged = merge_attention(outputs, lses, backend=backend)
    strided = merge_attention(outputs[..., ::-1], lses.astype(">f4"), backend=backend)
    assert_same_bits(np.ascontiguousarray(strided[0][..., ::-1]), merged[0])
    output, lse = merge_attention(outputs[:1], lses[:1], backend=backend)
    assert not np.shares_memory(output, outputs)
    assert not np.shares_memory(lse, lses)


@pytest.mark.parametrize("shape", [(0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (2, 3, 5, 0)], ids=str)
def test_sizes_of_zero(shape, backend):
    outputs, lses = np.zeros((2, *shape), np.float32), np.zeros((2, *shape[:-1]), np.float32)
    output, lse = merge_attention(outputs, lses, backend=backend)
    assert output.shape == shape
    np.testing.assert_allclose(lse, np.full(shape[:-1], np.log(2)), rtol=1e-6)


O, LSE = np.zeros((2, 3, 5, 4), np.float32), np.zeros((2, 3, 5), np.float32)


@pytest.mark.parametrize(
    ("outputs", "lses", "options", "error", "message"),
    [
        ([], [], {}, ValueError, "outputs has 0 parts and lses 0; expected as many, and one at"),
        ([O], [LSE, LSE], {}, ValueError, "outputs has 1 parts and lses 2"),
        # counted before they are looked at: this one filled the memory with 2^48 parts
        ([O], np.broadcast_to(LSE[0, 0], (1 << 48, 5)), {}, ValueError, "parts and lses 2814"),
        ([O, O[:1]], [LSE, LSE], {}, ValueError, r"outputs\[1\] has shape \(1, 3, 5, 4\)"),
        ([O, O], [LSE, LSE[:1]], {}, ValueError,
         r"lses\[1\] has shape \(1, 3, 5\); expected \(2, 3, 5\)"),
        ([O], [LSE], {"layout": "blhd"}, ValueError, r"expected \(2, 5, 3\)"),
        ([O[0]], [LSE[0]], {"layout": "blhd"}, ValueError, "expected rank 4 or more"),
        ([O], [LSE], {"layout": "hbld"}, ValueError, "layout is 'hbld'"),
        ([O, O.astype(np.float64)], [LSE, LSE], {}, TypeError, "have different dtypes"),
        ([O], [LSE.astype(np.float64)], {}, TypeError,
         r"lses\[0\] has dtype float64; expected float32, in which float32 is computed"),
        ([O.astype(np.float16)], [LSE.astype(np.float16)], {}, TypeError, "expected float32"),
        ([O.astype(int)], [LSE], {}, TypeError, r"outputs\[0\] has dtype int64"),
        ([O[0, 0, 0]], [LSE[0, 0]], {}, ValueError, "expected at least 2 axes"),
        (7, [LSE], {}, TypeError, "outputs is a int; expected a sequence of arrays"),
        (np.array(1.0), [LSE], {}, TypeError, "outputs is a ndarray; expected a sequence"),
        ([O], None, {}, TypeError, "lses is a NoneType; expected a sequence of arrays"),
        ([O], [LSE], {"backend": "none"}, ValueError, "backend is 'none'"),
        ([O], [LSE], {"threads": 0}, ValueError, "threads is 0"),
    ],
)  # fmt: skip
def test_rejects(outputs, lses, options, error, message):
    with pytest.raises(error, match=message):
        merge_attention(outputs, lses, **options)


def test_iterators_are_counted_too():
    with pytest.raises(ValueError, match="outputs has 1 parts and lses 2"):
        qkv_ext.merge_attention(iter([O]), iter([LSE, LSE]))
