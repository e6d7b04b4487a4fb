"""matmul, linear_projection, pack_weight, softmax, and the exp and tanh of the kernels."""

import pickle

import numpy as np
import pytest
from tolerance import WAYS, allowed_error, assert_same, assert_same_bits, assert_within, largest

import qkv_ext
from qkv_ext._core import _numpy
from qkv_ext.projected import ProjectedKV

matmul, linear, softmax = qkv_ext.matmul, qkv_ext.linear_projection, qkv_ext.softmax
F32 = np.finfo(np.float32)
INF, NAN = np.inf, np.nan

PRODUCTS = {  # shapes of a and b
    "1x1": ((1, 1), (1, 1)),
    "row": ((1, 300), (300, 200)),
    "column": ((300, 200), (200, 1)),
    "outer": ((40, 1), (1, 70)),
    "inner": ((1, 3000), (3000, 1)),
    "square": ((64, 64), (64, 64)),
    "odd": ((37, 65), (65, 33)),
    "tiles": ((130, 1025), (1025, 129)),
    "tall": ((1000, 48), (48, 5)),
    "wide": ((5, 48), (48, 1000)),
    "minilm": ((128, 384), (384, 1536)),
    "batch": ((3, 9, 20), (3, 20, 33)),
    "broadcast a": ((1, 9, 20), (3, 20, 33)),
    "broadcast b": ((3, 2, 9, 20), (20, 33)),
    "broadcast both": ((3, 1, 9, 20), (2, 20, 33)),
    "K = 0": ((2, 0), (0, 3)),
    "M = 0": ((0, 4), (4, 3)),
    "N = 0": ((2, 4), (4, 0)),
    "no batch": ((0, 2, 4), (4, 3)),
}
every_product = pytest.mark.parametrize("shapes", PRODUCTS.values(), ids=PRODUCTS)


def truth_and_bound(a, b, bias=None):
    """a b + bias in float64, and how far float32 may be from it."""
    bias = np.float32(0) if bias is None else bias
    truth = a.astype(np.float64) @ b.astype(np.float64) + bias
    return truth, allowed_error(truth, *(way[0](a, b) + bias for way in WAYS))


@every_product
def test_matmul(shapes, backend, rng):
    a, b = (rng.standard_normal(shape, np.float32) for shape in shapes)
    truth, bound = truth_and_bound(a, b)
    assert_within(matmul(a, b, backend=backend), truth, bound)
    out = np.full(truth.shape, NAN, np.float32)
    assert matmul(a, b, out=out, backend=backend) is out
    assert_within(out, truth, bound)
    flipped = np.full(truth.shape, NAN, np.float32)[..., ::-1]
    matmul(np.asfortranarray(a), b.astype(">f4"), out=flipped, backend=backend)
    assert_within(flipped, truth, bound)
    np.testing.assert_allclose(
        matmul(a.astype(float), b.astype(float), backend="numpy"), truth, rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 9, 15, 16, 17, 31, 33, 37, 63, 64, 65, 100, 128, 130])
def test_matmul_tails(n, backend, rng):
    """C10: every size in each place, rows that go on with NaN."""
    for m, k, columns in ((n, 20, 30), (20, n, 30), (20, 30, n), (n, n, n)):
        shapes = (m, k), (k, columns)
        a, b = (np.full((i + 1, j + 3), NAN, np.float32)[:i, :j] for i, j in shapes)
        a[...], b[...] = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
        assert_within(matmul(a, b, backend=backend), *truth_and_bound(a, b))
        bias = rng.standard_normal(columns, np.float32)
        for w in (b, qkv_ext.pack_weight(b)):
            assert_within(linear(a, w, bias, backend=backend), *truth_and_bound(a, b, bias))


@pytest.mark.parametrize("shapes", [((50, 70), (70, 200)), ((5, 1, 9, 70), (3, 70, 40))])
@pytest.mark.parametrize("piece", [1, 70 * 7, 9 * 70 * 40, 9 * 70 * 40 * 7, 70 * 64 * 130])
def test_numpy_multiplies_in_pieces(piece, shapes, rng, monkeypatch):
    """A long product is left to BLAS in pieces, so that ^C is seen; they make the same whole."""
    monkeypatch.setattr(_numpy, "PIECE", piece)
    a, b = (rng.standard_normal(shape, np.float32) for shape in shapes)
    assert_within(matmul(a, b, backend="numpy"), *truth_and_bound(a, b))
    if b.ndim == 2:
        packed = qkv_ext.pack_weight(b)
        assert_within(linear(a, packed, backend="numpy"), *truth_and_bound(a, b))


@pytest.mark.parametrize("lead", [(), (3,), (0,), (2, 5)])
def test_empty_inner_dimension_clears_out(lead, backend):
    """C11 (OpenMathLib/OpenBLAS#2914)."""
    out = np.full((*lead, 2, 3), NAN, np.float32)
    matmul(
        np.ones((*lead, 2, 0), np.float32), np.ones((0, 3), np.float32), out=out, backend=backend
    )
    assert not out.any()
    x, w, b = np.ones((*lead, 0), np.float32), np.ones((0, 3), np.float32), np.float32([1, 2, 3])
    for weight in (w, qkv_ext.pack_weight(w)):
        assert not linear(x, weight, backend=backend).any()
        assert (linear(x, weight, b, backend=backend) == b).all()


def test_matmul_out_may_overlap(backend, rng):
    arrays = rng.standard_normal((2, 3, 40, 40), np.float32)
    expected = matmul(*arrays, backend=backend)
    for which in (0, 1):
        for flip in (np.s_[:], np.s_[:, ::-1], np.s_[::-1], np.s_[..., ::-1]):
            given = arrays.copy()
            out = given[which][flip]
            assert matmul(*given, out=out, backend=backend) is out
            assert_same(np.ascontiguousarray(out), expected, backend)


def test_matmul_hands_nan_on(backend, rng):
    """No exclusion here: 0 times NaN is NaN, 0 times infinity is NaN."""
    a, b = rng.standard_normal((9, 40), np.float32), rng.standard_normal((40, 33), np.float32)
    a[2], b[5, 7], b[6, 8] = 0, NAN, INF
    actual = matmul(a, b, backend=backend)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(a @ b))
        np.testing.assert_array_equal(np.isinf(actual), np.isinf(a @ b))


@pytest.mark.parametrize("lead", [(), (1,), (7,), (3, 5), (2, 1, 4), (0,), (3, 0)])
@pytest.mark.parametrize("pack", [False, True])
def test_linear_projection(pack, lead, backend, rng):
    x, w = rng.standard_normal((*lead, 48), np.float32), rng.standard_normal((48, 70), np.float32)
    b = rng.standard_normal(70, np.float32)
    weight = qkv_ext.pack_weight(w) if pack else w
    for bias in (None, b):
        truth, bound = truth_and_bound(x[..., None, :], w, bias)
        truth = truth[..., 0, :]
        assert_within(linear(x, weight, bias, backend=backend), truth, bound)
        for out in (np.full(truth.shape, NAN, np.float32),
                    np.full((*lead, 140), NAN, np.float32)[..., ::2],
                    np.full(truth.shape[::-1], NAN, np.float32).T,
                    np.full(truth.shape, NAN, ">f4")):  # fmt: skip
            assert linear(x, weight, bias, out=out, backend=backend) is out
            assert_within(np.ascontiguousarray(out, np.float32), truth, bound)
        assert_within(linear(x, w.T.copy().T, bias, backend=backend), truth, bound)


@pytest.mark.parametrize("pack", [False, True])
def test_linear_projection_out_may_overlap(pack, backend, rng):
    x, w = rng.standard_normal((2, 48, 48), np.float32)
    weight = qkv_ext.pack_weight(w) if pack else w
    expected = linear(x, weight, x[0].copy(), backend=backend)
    linear(x, weight, x[0], out=x, backend=backend)
    assert_same(x, expected, backend)


@pytest.mark.parametrize("pack", [False, True])
def test_linear_projection_into_rows_without_one_stride(pack, backend, rng):
    x = rng.standard_normal((3, 5, 8), np.float32)
    w = rng.standard_normal((8, 20), np.float32)
    expected = linear(x, w, backend=backend)
    whole = np.full((3, 7, 20), NAN, np.float32)
    out = whole[:, 1:6]
    given = qkv_ext.pack_weight(w) if pack else w
    assert linear(x, given, out=out, backend=backend) is out
    assert_same(np.ascontiguousarray(out), expected, backend)
    assert np.isnan(whole[:, [0, 6]]).all()


def test_weight_with_no_columns_or_rows(backend):
    for d_in, d_out in ((4, 0), (0, 4), (0, 0)):
        x, w = np.ones((3, d_in), np.float32), np.ones((d_in, d_out), np.float32)
        for weight in (w, qkv_ext.pack_weight(w)):
            assert linear(x, weight, backend=backend).tolist() == [[0.0] * d_out] * 3


@pytest.mark.parametrize("n", [300_000, 3_000_000])
def test_softmax_of_a_long_row(n, backend, rng):
    """Sums run over tiles: the weights of equal numbers, and of normal ones, sum to 1."""
    for x in (np.zeros(n, np.float32), rng.standard_normal(n, np.float32)):
        weights = qkv_ext.softmax(x, backend=backend)
        assert abs(weights.sum(dtype=np.float64) - 1) < 1e-6
    x[n // 3] = np.nan
    assert np.isnan(qkv_ext.softmax(x, backend=backend)).all()


@pytest.mark.parametrize("shape", [(8, 100), (1, 1), (3, 64), (300, 65), (5, 0), (0, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_packed_weight(dtype, shape, rng):
    w = rng.standard_normal(shape).astype(dtype)
    packed = qkv_ext.pack_weight(np.asfortranarray(w))
    assert isinstance(packed, qkv_ext.PackedWeight)
    assert (packed.shape, packed.dtype, packed.nbytes) == (shape, dtype, packed.panels.nbytes)
    assert packed.panels.ctypes.data % 64 == 0 or not packed.nbytes
    assert not packed.panels.flags.writeable
    assert repr(packed) == f"PackedWeight(shape={shape}, dtype={np.dtype(dtype)})"
    again = pickle.loads(pickle.dumps(packed))
    assert again.shape == shape
    assert_same_bits(again.panels, packed.panels)
    x = rng.standard_normal((4, shape[0])).astype(dtype)
    np.testing.assert_allclose(linear(x, packed, backend="numpy"), x @ w, rtol=1e-4, atol=1e-4)


def test_packed_weight_has_no_other_maker():
    """Panels and shape that do not fit each other would be read out of bounds."""
    with pytest.raises(TypeError, match="made by pack_weight"):
        qkv_ext.PackedWeight(np.zeros((1, 1, 64), np.float32), (1000, 64))
    packed = qkv_ext.pack_weight(np.zeros((2, 3), np.float32))
    for name in ("panels", "shape", "dtype"):
        with pytest.raises(AttributeError):
            setattr(packed, name, None)


def test_names_in_older_pickles():
    assert pickle.loads(b"cqkv_ext._packed\nPackedWeight\n.") is qkv_ext.PackedWeight
    kv = ProjectedKV(np.ones(3, "f4"), np.ones(3, "f4"))
    assert type(pickle.loads(pickle.dumps(kv))) is ProjectedKV
    assert pickle.loads(b"cqkv_ext._layers\nProjectedKV\n.") is ProjectedKV


def test_packed_weight_does_not_follow_its_matrix(backend):
    x, w = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    packed = qkv_ext.pack_weight(w)
    w[...] = 7
    assert (linear(x, packed, backend=backend) == 3).all()


# ---- softmax ------------------------------------------------------------------------------------

ROWS = [(1,), (2,), (17,), (3, 5), (40, 33), (2, 3, 300), (4, 2100), (1, 1), (5, 64), (3, 4, 5, 7)]


def plain_softmax(x, way):
    with np.errstate(over="ignore"):
        terms = np.exp(x - x.max(axis=-1, keepdims=True))
    return terms / way[1](terms)[..., None]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("spread", [1, 30])
def test_softmax(spread, shape, backend, rng):
    x = rng.standard_normal(shape, np.float32) * np.float32(spread)
    for axis in range(-len(shape), len(shape)):
        rows = np.moveaxis(x, axis, -1)
        truth = plain_softmax(rows.astype(np.float64), WAYS[0])
        bound = allowed_error(truth, *(plain_softmax(rows, way) for way in WAYS))
        actual = softmax(x, axis, backend=backend)
        assert actual.flags.c_contiguous
        assert_within(np.moveaxis(actual, axis, -1), truth, bound)
        np.testing.assert_allclose(actual.sum(axis=axis), 1, rtol=1e-5)
        for out in (np.full(shape, NAN, np.float32), np.full(shape[::-1], NAN, np.float32).T,
                    np.full((*shape[:-1], 2 * shape[-1]), NAN, np.float32)[..., ::-2]):  # fmt: skip
            assert softmax(x, axis, out=out, backend=backend) is out
            assert_same(np.ascontiguousarray(out), actual, backend)
        same = x.copy()
        softmax(same, axis, out=same, backend=backend)
        assert_same(same, actual, backend)
        wide = softmax(x.astype(np.float64), axis, backend="numpy")
        np.testing.assert_allclose(np.moveaxis(wide, axis, -1), truth, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 5, 16, 70, 1100])
def test_softmax_of_what_is_no_number(n, backend, rng):
    """NaN where a row holds NaN or +inf, or nothing but -inf; an infinity away it is exactly 0."""
    x = rng.standard_normal((5, n), np.float32)
    x[0, n // 2], x[1, n - 1], x[2], x[3, n // 3] = NAN, INF, -INF, -INF
    actual = softmax(x, backend=backend)
    assert np.isnan(actual[:3]).all()
    assert np.isfinite(actual[4]).all()
    if n > 1:
        assert actual[3, n // 3] == 0
        assert actual[3].sum() == pytest.approx(1, rel=1e-5)
    else:
        assert np.isnan(actual[3]).all()


@pytest.mark.parametrize("repeat", [1, 100, 1000])
@pytest.mark.parametrize("row", [[151, 0], [-1000, 0, 0], [3e38, -3e38], [0] * 40 + [500],
                                 [88, 89, 90], [-3e38, -3.4e38]])  # fmt: skip
def test_softmax_of_large_numbers(row, repeat, backend):
    """D1 (pytorch/executorch#18407)."""
    x = np.float32(row * repeat)
    actual = softmax(x, backend=backend)
    assert actual.sum() == pytest.approx(1, rel=1e-6 if repeat == 1 else 1e-5)
    truth = plain_softmax(x.astype(np.float64), WAYS[0])
    bound = allowed_error(truth, *(plain_softmax(x, way) for way in WAYS))
    assert_within(actual, truth, bound)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
def test_softmax_of_nothing(shape, backend):
    for axis in range(len(shape)):
        assert softmax(np.zeros(shape, np.float32), axis, backend=backend).shape == shape


def test_softmax_reads_any_array(backend, rng):
    x = rng.standard_normal((6, 8), np.float32)
    expected = softmax(x, backend=backend)
    raw = np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    for view in (x.astype(">f4"), np.asfortranarray(x), x[:, ::-1].copy()[:, ::-1], raw):
        assert_same(softmax(view, backend=backend), expected, backend)
    assert_same(softmax(np.broadcast_to(x[0], (6, 8)), backend=backend)[3], expected[0], backend)


# ---- exp ----------------------------------------------------------------------------------------


def test_exp(compiled):
    """D6 (sonos/tract#2677, ggml-org/llama.cpp#7154): 4 ulp, on every instruction set."""
    from qkv_ext._core import _kernels

    isa = _kernels.compiled().index(compiled)
    x = np.linspace(-104, 43, 3_000_001, dtype=np.float32)  # a softmax needs none above 0, tanh 20
    x = np.concatenate([x, np.float32([0, -1e-30, 1e-30, 43, -87.33, -87.34, -103.97])])
    y = np.empty_like(x)
    _kernels.exp(x, y, isa)
    truth = np.exp(x.astype(np.float64))
    normal = truth >= F32.tiny
    ulp = np.abs(y - truth) / np.spacing(truth.astype(np.float32)).astype(np.float64)
    assert ulp[normal].max() <= 4
    # subnormal results are rounded once more, to half of the smallest number
    assert largest(y[~normal], truth[~normal]) <= 4 * F32.tiny * F32.eps
    assert (np.diff(y[:3_000_001]) >= -4 * np.spacing(y[1:3_000_001])).all()


def test_exp_of_special_values(compiled):
    """D6: exactly 0 for -inf, NaN for NaN in whatever lane, 1 for zeros."""
    from qkv_ext._core import _kernels

    isa = _kernels.compiled().index(compiled)
    special = ((-INF, 0), (NAN, NAN), (0.0, 1), (-0.0, 1), (-200, 0), (-1e30, 0))
    for n in (1, 5, 16, 17, 64, 100):
        for value, expected in special:
            x, y = np.full(n, value, np.float32), np.full(n, 7, np.float32)
            _kernels.exp(x, y, isa)
            np.testing.assert_array_equal(y, np.full(n, expected, np.float32))
            assert not np.signbit(y).any() or np.isnan(value)
        for lane in range(n):
            x = np.zeros(n, np.float32)
            x[lane] = NAN
            _kernels.exp(x, y, isa)
            assert np.flatnonzero(np.isnan(y)).tolist() == [lane]
    every_kind = np.uint32([0x7F800001, 0x7FC00001, 0x7FC001FF, 0x7FFFFFFF, 0xFFC00041, 0xFFFFFFFF])
    x, y = every_kind.view(np.float32), np.empty(6, np.float32)
    _kernels.exp(x, y, isa)
    assert np.isnan(y).all()


def test_tanh(compiled):
    """Softcap's tanh: 4 ulp on every instruction set, near 0 too, and never above 1."""
    from qkv_ext._core import _kernels

    isa = _kernels.compiled().index(compiled)
    x = np.concatenate([
        np.linspace(-12, 12, 2_000_001, dtype=np.float32),
        np.logspace(-37.9, 38, 500_001, dtype=np.float32),
        -np.logspace(-37.9, 38, 500_001, dtype=np.float32),
        np.nextafter(np.float32(0.625), np.float32([0, 1])),
        np.float32([0.625, 9.01, 9.02, 10, F32.max, F32.min, F32.tiny]),
    ])  # fmt: skip
    y = np.empty_like(x)
    _kernels.tanh(x, y, isa)
    truth = np.tanh(x.astype(np.float64))
    ulp = np.abs(y - truth) / np.spacing(np.abs(truth).astype(np.float32)).astype(np.float64)
    assert ulp.max() <= 4
    assert np.abs(y).max() == 1
    negative = np.empty_like(x)
    _kernels.tanh(-x, negative, isa)
    np.testing.assert_array_equal(negative, -y)  # odd
    subnormal = np.float32([1e-45, 1e-40, -1e-44, F32.tiny / 2])
    y = np.empty_like(subnormal)
    _kernels.tanh(subnormal, y, isa)
    assert_same_bits(y, subnormal)


def test_tanh_of_special_values(compiled):
    from qkv_ext._core import _kernels

    isa = _kernels.compiled().index(compiled)
    special = ((INF, 1), (-INF, -1), (NAN, NAN), (0.0, 0), (-0.0, 0), (1e30, 1), (-100, -1))
    for n in (1, 5, 16, 17, 64, 100):
        for value, expected in special:
            x, y = np.full(n, value, np.float32), np.full(n, 7, np.float32)
            _kernels.tanh(x, y, isa)
            np.testing.assert_array_equal(y, np.full(n, expected, np.float32))
        for lane in range(n):
            x = np.ones(n, np.float32)
            x[lane] = NAN
            _kernels.tanh(x, y, isa)
            assert np.flatnonzero(np.isnan(y)).tolist() == [lane]
