"""What every backend promises about masks, causal order, heads, scale and numbers, by example.

The ids A1 ... E1 are classes of faults that users of other libraries reported; the issue where one
was is named beside it.  With Q and K zero the weights are uniform over the allowed keys, so that
the results are exact means of rows of V.
"""

import numpy as np
import pytest
from oracle import attention
from tolerance import assert_same, assert_same_bits

import qkv_ext

sdpa = qkv_ext.scaled_dot_product_attention
T, F, INF = True, False, np.inf
FMIN = float(np.finfo(np.float32).min)


def means(v, length, backend, *, heads=1, **options):
    """The output (L,) of zeros Q and K for values of width 1."""
    v = np.asarray(v, np.float32).reshape(1, 1, -1, 1)
    q, k = np.zeros((1, heads, length, 4), np.float32), np.zeros((1, 1, v.shape[2], 4), np.float32)
    output = sdpa(q, k, v, backend=backend, **options)
    assert (output == output[:, :1]).all()
    return output[0, 0, :, 0].tolist()


def of_scores(scores, v, backend, length=1, **options):
    """(output, weights, lse) where every query has these scores: D = 1, q = 1, k = the scores."""
    k = np.float32(scores).reshape(-1, 1)
    v = np.float32(v).reshape(len(k), -1)
    extras = {"return_weights": True, "return_lse": True}
    return sdpa(np.ones((length, 1), np.float32), k, v, backend=backend, **extras, **options)


# ---- masks and rows -----------------------------------------------------------------------------

EMPTY_ROW = {  # three ways to exclude both keys from the first query and none from the second
    "bool": {"mask": np.array([[F, F], [T, T]])},
    "-inf": {"mask": np.float32([[-INF, -INF], [0, 0]])},
    "causal": {"mask": np.array([[F, T], [T, T]]), "causal": True},
}


@pytest.mark.parametrize("options", EMPTY_ROW.values(), ids=EMPTY_ROW)
@pytest.mark.parametrize("extra", [(), ("return_weights",), ("return_lse",),
                                   ("return_weights", "return_lse")])  # fmt: skip
def test_row_without_keys_is_zero(options, extra, backend):
    """A1 (pytorch/pytorch#103963, #103749), A2 (#160064, ml-explore/mlx#2395): on every path."""
    q = k = np.zeros((1, 1, 2, 4), np.float32)
    v = np.float32([[1], [3]])[None, None]
    result = sdpa(q, k, v, backend=backend, **options, **dict.fromkeys(extra, True))
    output, *rest = result if extra else (result,)
    assert output.ravel().tolist() == [0, 2]
    if "return_weights" in extra:
        assert rest.pop(0).tolist() == [[[[0, 0], [0.5, 0.5]]]]
    if "return_lse" in extra:
        assert rest[0].ravel().tolist() == pytest.approx([-INF, np.log(2)], rel=1e-6)


@pytest.mark.parametrize("length", [1, 5, 200])
@pytest.mark.parametrize("s", [1, 40, 300, 2100])
@pytest.mark.parametrize("fill", [F, -INF])
def test_rows_without_keys_in_every_path(fill, s, length, backend, rng):
    """A2: one query, blocks of queries, many tiles, several heads, and a row that has keys."""
    q, k, v = (rng.standard_normal((2, 2, n, 8), np.float32) for n in (length, s, s))
    mask = np.full((2, 1, length, s), fill)
    mask[1, 0, -1] = not fill if fill is F else 0.0
    output, weights, lse = sdpa(
        q, k, v, mask=mask, return_weights=True, return_lse=True, backend=backend
    )
    for part in (np.s_[0], np.s_[1, :, :-1]):
        assert_same_bits(output[part], np.zeros_like(output[part]))
        assert_same_bits(weights[part], np.zeros_like(weights[part]))
        assert (lse[part] == -INF).all()
    assert np.isfinite(lse[1, :, -1]).all()
    np.testing.assert_allclose(weights[1, :, -1].sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize(("fill", "expected"), [(-INF, 0), (-1e9, 2), (FMIN, 2), (-1e300, 2)])
@pytest.mark.parametrize("length", [1, 3])
def test_only_minus_infinity_excludes(fill, expected, length, backend):
    """A3 (microsoft/onnxruntime#28958): softmax does not see a shift, however large."""
    mask = np.full((1, 2), fill, np.float64)
    assert means([1, 3], length, backend, mask=mask) == [expected] * length


def test_mask_beyond_float32_is_held_at_its_limits(backend):
    """A finite value stays finite: the key with the larger one wins, none is excluded."""
    assert means([1, 3], 1, backend, mask=np.array([[-1e300, -1e200]])) == [2]
    assert means([1, 3], 1, backend, mask=np.array([[-1e300, 0]])) == [3]
    assert means([1, 3], 1, backend, mask=np.array([[1e300, 0]])) == [1]
    assert means([1, 3], 1, backend, mask=np.array([[-1e300, -INF]])) == [1]


def test_true_keeps_a_key(backend):
    """A5 (pytorch/pytorch#21518, #120668): a mask of the future is not turned round."""
    assert means([1, 3], 2, backend, mask=np.triu(np.ones((2, 2)), 1).astype(bool)) == [3, 0]


def test_mask_of_the_batch_serves_every_head(backend):
    """A7 (microsoft/onnxruntime#24017)."""
    q, k = np.zeros((2, 2, 1, 4), np.float32), np.zeros((2, 2, 2, 4), np.float32)
    v = np.broadcast_to(np.float32([[1], [2]]), (2, 2, 2, 1))
    mask = np.array([[T, F], [F, T]]).reshape(2, 1, 1, 2)
    for given in (mask, np.where(mask, np.float32(0), np.float32(-INF))):
        assert sdpa(q, k, v, mask=given, backend=backend).ravel().tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("shape", [(b, h, i, j) for b in (1, 2) for h in (1, 4) for i in (1, 5)
                                   for j in (1, 70)])  # fmt: skip
@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_masks_broadcast(shape, dtype, backend, rng):
    """A6, A7: every choice of {1, full} for the four axes equals the mask written out."""
    q, k, v = (rng.standard_normal((2, h, n, 8), np.float32) for h, n in ((4, 5), (2, 70), (2, 70)))
    mask = rng.standard_normal(shape)
    mask = mask < 0.5 if dtype is bool else np.where(mask < 0.5, mask, -INF).astype(dtype)
    full = np.broadcast_to(mask, (2, 4, 5, 70)).copy()
    expected = sdpa(q, k, v, mask=full, backend=backend)
    assert_same(sdpa(q, k, v, mask=mask, backend=backend), expected, backend)


def test_mask_and_causal_compose(backend):
    """A11 (OpenVINO's attention, pytorch/pytorch#100709): neither one is dropped."""
    mask = np.array([[F, T], [F, T]])
    for given in (mask, np.where(mask, np.float32(0), np.float32(-INF))):
        assert means([1, 3], 2, backend, mask=given, causal=True) == [0, 3]


# ---- causal order -------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 4])
def test_both_alignments(heads, backend):
    """B1 (pytorch/pytorch#108108, #103082, pytorch/executorch#22426)."""
    v, options = range(5), {"causal": True, "heads": heads}
    assert means(v, 2, backend, **options) == [1.5, 2]
    assert means(v, 1, backend, **options) == [2]
    assert means(v, 2, backend, align="top-left", **options) == [0, 0.5]
    assert means(v, 1, backend, align="top-left", **options) == [0]


@pytest.mark.parametrize("heads", [1, 4])
def test_more_queries_than_keys(heads, backend):
    """B2 (ml-explore/mlx#2835, #2967)."""
    options = {"causal": True, "heads": heads}
    assert means([1, 3], 5, backend, **options) == [0, 0, 0, 1, 2]
    assert means([1, 3], 5, backend, align="top-left", **options) == [1, 2, 2, 2, 2]


def test_align_is_nothing_without_causal(backend):
    assert means([1, 3], 3, backend, align="top-left") == [2, 2, 2]


# ---- heads and sizes ----------------------------------------------------------------------------


def test_neighbouring_heads_share_a_key_head(backend):
    """C1 (onnx/onnx#7274)."""
    q, k = np.zeros((1, 4, 1, 8), np.float32), np.zeros((1, 2, 1, 8), np.float32)
    v = np.float32([10, 20]).reshape(1, 2, 1, 1)
    assert sdpa(q, k, v, backend=backend).ravel().tolist() == [10, 10, 20, 20]


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize(("d", "dv"), [(32, 24), (8, 1), (1, 40), (24, 200)])
def test_default_scale_is_of_d(d, dv, length, backend, rng):
    """C3 (pytorch/pytorch#128348, Dao-AILab/flash-attention#753): Dv may differ from D."""
    q, k = (rng.standard_normal((2, h, n, d), np.float32) for h, n in ((4, length), (2, 40)))
    v = rng.standard_normal((2, 2, 40, dv), np.float32)
    output = sdpa(q, k, v, causal=True, backend=backend)
    assert output.shape == (2, 4, length, dv)
    expected = sdpa(q, k, v, causal=True, scale=1 / np.sqrt(d), backend=backend)
    assert_same(output, expected, backend)
    np.testing.assert_allclose(output, attention(q, k, v, causal=True)[0], rtol=1e-4, atol=1e-5)


def test_scores_have_a_head_axis_at_rank_4_and_above_only(backend, rng):
    """At rank 3 the first axis is a batch, so 4 queries' worth of it cannot share 2."""
    q, k = rng.standard_normal((4, 5, 8), np.float32), rng.standard_normal((2, 5, 8), np.float32)
    assert sdpa(q[None], k[None], k[None], backend=backend).shape == (1, 4, 5, 8)
    with pytest.raises(ValueError, match="leading axes"):
        sdpa(q, k, k, backend=backend)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("zero", ["B", "H", "L", "S", "Dv", "D"])
def test_sizes_of_zero(zero, causal, backend):
    """C12 (pytorch/pytorch#141219, #174939, #192651): shapes are kept, and extras are arrays."""
    n = {"B": 2, "H": 2, "L": 3, "S": 4, "D": 8, "Dv": 5} | {zero: 0}
    q, k, v = (np.ones((n["B"], n["H"], n[rows], n[columns]), np.float32)
               for rows, columns in (("L", "D"), ("S", "D"), ("S", "Dv")))  # fmt: skip
    scale = 1.0 if zero == "D" else None
    output, weights, lse = sdpa(
        q, k, v, causal=causal, scale=scale, return_weights=True, return_lse=True, backend=backend
    )
    assert output.shape == (n["B"], n["H"], n["L"], n["Dv"])
    assert weights.shape == (n["B"], n["H"], n["L"], n["S"])
    assert lse.shape == (n["B"], n["H"], n["L"])
    if zero == "S":
        assert not output.any()
        assert (lse == -INF).all()
    if zero == "D":
        np.testing.assert_allclose(output, 1, rtol=1e-6)


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("repeat", [1, 150, 1100])
@pytest.mark.parametrize("scores", [[151, 0], [-1000, 0, 0], [3e38, -3e38], [0] * 40 + [500],
                                    [-3e38, -3.1e38], [3e38, 3e38]])  # fmt: skip
def test_large_scores(scores, repeat, length, backend):
    """D1 (pytorch/executorch#18407, ROCm/AMDMIGraphX#1290, intel/xFasterTransformer#326)."""
    scores = np.float32(scores * repeat)
    output, weights, lse = of_scores(scores, np.arange(len(scores)), backend, length)
    assert np.isfinite(output).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    top = scores == scores.max()
    np.testing.assert_allclose(weights[:, top], 1 / top.sum(), rtol=1e-6)
    np.testing.assert_allclose(lse, np.float64(scores.max()) + np.log(top.sum()), rtol=1e-6)


@pytest.mark.parametrize(("scale", "expected"), [(None, 0.880797), (0.0, 0.5), (-0.5, 0.119203),
                                                 (0.5, 0.880797), (0, 0.5)])  # fmt: skip
def test_scale_is_honoured(scale, expected, backend):
    """D4 (SKaiNET-developers/SKaiNET#860, pytorch/pytorch#105202): 0 and negatives too."""
    q, k = np.float32([[1, 0, 0, 0]]), np.float32([[4, 0, 0, 0], [0, 0, 0, 0]])
    output = sdpa(q, k, np.float32([[1], [0]]), scale=scale, backend=backend)
    assert output.item() == pytest.approx(expected, abs=1e-6)


def test_scale_goes_to_q_before_the_product(backend):
    """Point 1: what q·k alone would make infinite is finite."""
    q, k = np.full((3, 64), 1e20, np.float32), np.full((5, 64), 1e19, np.float32)
    output, lse = sdpa(
        q, k, np.ones((5, 2), np.float32), scale=1e-3, return_lse=True, backend=backend
    )
    np.testing.assert_allclose(output, 1, rtol=1e-6)
    np.testing.assert_allclose(lse, 64e36, rtol=1e-6)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, np.float16, np.array, int])
def test_float32_stays_float32(kind, backend, rng):
    """D5 (numpy/numpy#25098, #23912): a float64 scale or mask makes nothing a float64."""
    q, k, v = (rng.standard_normal((2, n, 16), np.float32) for n in (3, 9, 9))
    expected = sdpa(q, k, v, scale=1.0, backend=backend)
    for mask in (None, np.zeros((3, 9)), np.zeros((3, 9), np.float16)):
        results = sdpa(q, k, v, scale=kind(1), mask=mask, return_weights=True, return_lse=True,
                       backend=backend)  # fmt: skip
        assert [x.dtype for x in results] == [np.float32] * 3
        np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("shape", [(3, 3), (40, 300), (300, 40), (1, 300)])
def test_causal_with_weights(shape, align, backend, rng):
    """E1 (pytorch/pytorch#99282, #172338): the same order with weights as without them."""
    q, k, v = (rng.standard_normal((2, 2, n, 16), np.float32) for n in (shape[0], *shape[1:] * 2))
    options = {"causal": True, "align": align, "backend": backend}
    output, weights = sdpa(q, k, v, return_weights=True, **options)
    np.testing.assert_allclose(output, sdpa(q, k, v, **options), rtol=0, atol=1e-6)
    allowed = np.tri(*shape, shape[1] - shape[0] if align == "bottom-right" else 0, bool)
    assert not weights[..., ~allowed].any()
    expected = np.broadcast_to(allowed.any(axis=-1), weights.shape[:-1])
    np.testing.assert_allclose(weights.sum(axis=-1), expected, rtol=1e-5)


@pytest.mark.parametrize("s", [1, 16, 128, 2048])
@pytest.mark.parametrize("length", [1, 8])
def test_few_queries_equal_their_place_among_many(length, s, backend, rng):
    """E4 (pytorch/executorch#18648, pytorch/pytorch#159835): whatever path serves them."""
    q, k, v = (rng.standard_normal((1, 8, n, 64), np.float32) for n in (100, s, s))
    many = sdpa(q, k, v, backend=backend)[:, :, -length:]
    few = sdpa(q[:, :, -length:], k, v, backend=backend)
    np.testing.assert_allclose(few, many, rtol=1e-5, atol=1e-5)


# ---- what the article says ----------------------------------------------------------------------


def test_walk_through(backend, rng):
    """X of 4 tokens by 8: weights' rows sum to 1, and who asks whom is not symmetric."""
    x, *w = (rng.standard_normal(shape, np.float32) for shape in ((4, 8), (8, 8), (8, 8), (8, 8)))
    q, k, v = (qkv_ext.linear_projection(x, each, backend=backend) for each in w)
    scores = qkv_ext.matmul(q, k.T, backend=backend)
    assert not np.allclose(scores, scores.T)
    output, weights = sdpa(q, k, v, return_weights=True, backend=backend)
    assert output.shape == (4, 8)
    assert weights.shape == (4, 4)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    by_hand = qkv_ext.softmax(scores / np.float32(np.sqrt(8)), backend=backend)
    np.testing.assert_allclose(weights, by_hand, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(output, by_hand @ v, rtol=1e-4, atol=1e-5)


def test_weights_are_per_head(backend, rng):
    q, k, v = (rng.standard_normal((3, 5, 7, 16), np.float32) for _ in range(3))
    weights = sdpa(q, k, v, return_weights=True, backend=backend)[1]
    assert weights.shape == (3, 5, 7, 7)  # (B, H, L, L)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)


@pytest.mark.parametrize("d", [16, 64, 256])
def test_variance_of_scores(d, backend, rng):
    """The variance of q·k is about D, and about 1 after scaling."""
    q, k = (rng.standard_normal((1000, d), np.float32) for _ in range(2))
    scores = qkv_ext.matmul(q, k.T, backend=backend)
    assert np.var(scores) == pytest.approx(d, rel=0.05)
    output, weights, lse = sdpa(
        q, k, np.ones((1000, 1), np.float32), return_weights=True, return_lse=True, backend=backend
    )
    scaled = np.log(weights) + lse[:, None]
    assert np.var(scaled) == pytest.approx(1, rel=0.05)
    np.testing.assert_allclose(output, 1, rtol=1e-5)


def test_nothing_to_write_is_nothing_to_do(compiled):
    """Dv = 0 and no weights: however many rows there are, none is computed."""
    q = np.broadcast_to(np.float32(1), (1, 1 << 40, 5, 8))
    k, v = np.ones((1, 1, 9, 8), np.float32), np.ones((1, 1, 9, 0), np.float32)
    assert sdpa(q, k, v, backend=compiled).shape == (1, 1 << 40, 5, 0)
