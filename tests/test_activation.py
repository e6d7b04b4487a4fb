"""linear_projection(..., activation=, residual=): what ends a product."""

import functools
import math

import numpy as np
import pytest
from tolerance import WAYS, allowed_error, assert_same, assert_same_bits, assert_within

import qkv_ext
from qkv_ext._core import _activations

linear = qkv_ext.linear_projection
F32 = np.finfo(np.float32)
INF, NAN = np.inf, np.nan

NAMES = (None, "relu", "gelu", "gelu_tanh", "silu")
every_activation = pytest.mark.parametrize("activation", NAMES)
pack_or_not = pytest.mark.parametrize("pack", [False, True])
erf = np.vectorize(math.erf, otypes=[np.float64])
erfc = np.vectorize(math.erfc, otypes=[np.float64])


def activated(x, name):
    """The formulas as they are written, in the dtype of x; at -inf the limit."""
    one, half = x.dtype.type(1), x.dtype.type(0.5)
    with np.errstate(all="ignore"):
        if name is None:
            return x
        if name == "relu":
            return np.where(np.isnan(x), x, np.maximum(x, 0))
        if name == "gelu":
            y = half * x * (one + erf(x / math.sqrt(2)).astype(x.dtype))
        elif name == "gelu_tanh":
            root = x.dtype.type(math.sqrt(2 / math.pi))
            y = half * x * (one + np.tanh(root * (x + x.dtype.type(0.044715) * x * x * x)))
        else:
            y = x / (one + np.exp(-x))
    return np.where(x == -INF, x.dtype.type(0), y)


def formula(x, w, bias, activation, residual, matmul, dtype=np.float32):
    x, w = x.astype(dtype), w.astype(dtype)
    y = matmul(np.atleast_2d(x), w)
    y = y.reshape(*x.shape[:-1], w.shape[1])
    y = activated(y if bias is None else y + bias.astype(dtype), activation)
    return y if residual is None else y + residual.astype(dtype)


def truth_and_bound(*given):
    truth = formula(*given, np.matmul, np.float64)
    return truth, allowed_error(truth, *(formula(*given, way[0]) for way in WAYS))


SHAPES = {  # leading axes of x, d_in, d_out
    "one": ((), 1, 1),
    "row": ((), 70, 100),
    "long row": ((1,), 20, 2100),
    "few rows": ((7,), 300, 70),
    "a strip and more": ((50,), 40, 65),
    "blocks": ((200,), 257, 130),
    "batch": ((3, 1, 5), 48, 64),
    "chunks": ((17,), 600, 33),
    "tails": ((9,), 5, 3),
    "K = 0": ((5,), 0, 70),
    "M = 0": ((3, 0), 8, 70),
    "N = 0": ((4,), 8, 0),
}
every_shape = pytest.mark.parametrize(("lead", "k", "n"), SHAPES.values(), ids=SHAPES)


def arrays(rng, lead, k, n, dtype=np.float32):
    """x, w, bias, residual; the product has entries of a few units."""
    shapes = (*lead, k), (k, n), (n,), (*lead, n)
    x, w, bias, residual = (rng.standard_normal(s, np.float32).astype(dtype) for s in shapes)
    return x * dtype(3 / max(k, 1) ** 0.5), w, bias, residual


@every_activation
@every_shape
@pack_or_not
def test_against_the_formula(pack, lead, k, n, activation, backend, rng):
    x, w, bias, residual = arrays(rng, lead, k, n)
    weight = qkv_ext.pack_weight(w) if pack else w
    for b, r in ((None, None), (bias, None), (None, residual), (bias, residual)):
        call = functools.partial(linear, activation=activation, residual=r, backend=backend)
        truth, bound = truth_and_bound(x, w, b, activation, r)
        y = call(x, weight, b)
        assert_within(y, truth, bound)
        for out in (np.full(truth.shape, NAN, np.float32),
                    np.full((*lead, 2 * n), NAN, np.float32)[..., ::2],
                    np.full(truth.shape[::-1], NAN, np.float32).T,
                    np.full(truth.shape, NAN, ">f4")):  # fmt: skip
            assert call(x, weight, b, out=out) is out
            assert_same(np.ascontiguousarray(out, np.float32), y, backend)


@every_activation
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pack_or_not
def test_16_bits_are_rounded_once(pack, dtype, activation, backend, rng):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    dtype = np.dtype(dtype).type
    for lead, k, n in (((9,), 48, 70), ((2, 3), 300, 64)):
        x, w, bias, residual = (each.astype(dtype) for each in arrays(rng, lead, k, n))
        options = {"activation": activation, "backend": backend}
        exact = linear(*(each.astype(np.float32) for each in (x, w, bias)),
                       residual=residual.astype(np.float32), **options)  # fmt: skip
        weight = qkv_ext.pack_weight(w) if pack else w
        y = linear(x, weight, bias, residual=residual, **options)
        assert_same(y, exact.astype(dtype), backend)
        truth, bound = truth_and_bound(x, w, bias, activation, residual)
        assert_within(y, truth, bound, dtype=dtype)
        assert linear(x, weight, bias, residual=residual, out=residual, **options) is residual
        assert_same(residual, y, backend)


@every_activation
@pack_or_not
def test_float64(pack, activation, rng):
    x, w, bias, residual = arrays(rng, (3, 5), 300, 70, np.float64)
    weight = qkv_ext.pack_weight(w) if pack else w
    y = linear(x, weight, bias, activation=activation, residual=residual, backend="numpy")
    assert y.dtype == np.float64
    truth = formula(x, w, bias, activation, residual, np.matmul, np.float64)
    np.testing.assert_allclose(y, truth, rtol=1e-12, atol=1e-12)


# ---- an activation by itself --------------------------------------------------------------------


def applied(x, activation, backend):
    """The activation of the numbers of x, which a product with 1 leaves as they are."""
    one = np.ones((1, 1), x.dtype)
    return linear(x[:, None], one, activation=activation, backend=backend)[:, 0]


def exact(x, activation):
    """In float64, without loss of digits below 0."""
    x = x.astype(np.float64)
    with np.errstate(all="ignore"):
        if activation == "gelu":
            return 0.5 * x * erfc(-x / math.sqrt(2))
        u = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) if activation != "silu" else x
        return x / (1 + np.exp(-u))


@pytest.mark.parametrize(
    ("activation", "units", "below", "least"),
    [("gelu", 9, 9, -13.2), ("silu", 6, 6, -88.0), ("gelu_tanh", 3, None, -9.8)],
)
def test_units_in_the_last_place(activation, units, below, least, backend, rng):
    """What the docstring says; of gelu_tanh below 0 it is a share of the result."""
    x = np.concatenate([
        np.linspace(least, 20, 200_001, dtype=np.float32),
        rng.uniform(-3, 3, 100_000).astype(np.float32),
        np.ldexp(rng.uniform(-1, 1, 50_000), rng.integers(-100, 4, 50_000)).astype(np.float32),
        np.float32([0, 1e-37, -1e-37, 100, 1e4, 1e19, 1e30]),
    ])  # fmt: skip
    y, truth = applied(x, activation, backend), exact(x, activation)
    counts = np.abs(truth) >= 2.0**-119
    y, truth, x = (each[counts] for each in (y, truth, x))
    error = np.abs(y - truth)
    inside = error / np.spacing(np.abs(truth).astype(np.float32)).astype(np.float64)
    above = x > 0
    assert inside[above].max() <= units
    if below:
        assert inside[~above].max() <= below
    else:
        assert (error[~above] / np.abs(truth[~above])).max() <= 3e-5


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_units_of_float64(activation, rng):
    x = np.concatenate([np.linspace(-30, 40, 20_001), rng.uniform(-3, 3, 10_000)])
    y, truth = applied(x, activation, "numpy"), exact(x, activation)
    counts = np.abs(truth) >= np.finfo(np.float64).tiny
    np.testing.assert_allclose(y[counts], truth[counts], rtol=1e-12)
    near = np.abs(x) < 3
    np.testing.assert_allclose(y[near], truth[near], rtol=4e-15)


@pytest.mark.parametrize("activation", NAMES[1:])
def test_far_from_zero(activation, backend):
    far_from_zero(np.float32, activation, backend)


@pytest.mark.parametrize("activation", NAMES[1:])
def test_float64_far_from_zero(activation):
    far_from_zero(np.float64, activation, "numpy")


def far_from_zero(dtype, activation, backend):
    greatest = np.finfo(dtype).max
    large = np.array([40, 100, 1e3, 1e10, 1e19, 1e30, greatest, INF], dtype)
    assert_same_bits(applied(large, activation, backend), large)
    y = applied(-large[1:], activation, backend)
    assert np.abs(y).max() < 1e-36
    assert not y[1:].any()
    zeros = applied(np.array([0.0, -0.0], dtype), activation, backend)
    assert not zeros.any()
    with np.errstate(all="ignore"):
        least = np.array([1e-40, -1e-40, F32.tiny], np.float32).astype(dtype)
    y = applied(least, activation, backend)
    right = np.maximum(least, 0) if activation == "relu" else least / 2
    np.testing.assert_allclose(y, right, rtol=1e-6, atol=2e-45)


@every_activation
@pack_or_not
def test_what_is_not_finite_stays_where_it_is(pack, activation, backend, rng):
    x, w, bias, residual = arrays(rng, (9,), 40, 70)
    weight = qkv_ext.pack_weight(w) if pack else w
    options = {"activation": activation, "backend": backend}
    expected = linear(x, weight, bias, residual=residual, **options)
    x[2], bias[5], bias[6], residual[4, 7], residual[5, 8] = NAN, INF, -INF, NAN, INF
    y = linear(x, weight, bias, residual=residual, **options)
    truth = formula(x, w, bias, activation, residual, np.matmul, np.float64)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(truth))
    np.testing.assert_array_equal(y[np.isinf(truth)], truth[np.isinf(truth)])
    rest = np.isfinite(truth)
    rest[:, [5, 6]] = False
    assert_same(y[rest], expected[rest], backend)
    ended = np.delete(y[:, 6], [2]) - np.delete(residual[:, 6], [2])
    assert (ended == (-INF if activation is None else 0)).all()


# ---- bits, strides, overlap ---------------------------------------------------------------------


@every_activation
@pytest.mark.parametrize(("m", "k", "n"), [(400, 300, 200), (33, 600, 130), (60, 64, 1000)])
def test_rows_alone(m, k, n, activation, backend, rng):
    """The same bits packed or not, in any batch and place, with any number of threads."""
    x, w, bias, residual = arrays(rng, (m,), k, n)
    packed = qkv_ext.pack_weight(w)
    call = functools.partial(linear, activation=activation, backend=backend)
    whole = call(x, w, bias, residual=residual, threads=1)
    for threads in (2, 3):
        assert_same(call(x, w, bias, residual=residual, threads=threads), whole, backend)
        assert_same(call(x, packed, bias, residual=residual, threads=threads), whole, backend)
    for rows in (0, m - 1, np.s_[3:5], np.s_[5:25], np.s_[::-1], np.s_[::7]):
        for weight in (w, packed):
            y = call(x[rows], weight, bias, residual=residual[rows])
            assert_same(y, whole[rows], backend)
    for columns in (np.s_[:1], np.s_[-37:], np.s_[::3]):
        some = residual[:, columns]
        y = call(x, w[:, columns], bias[columns], residual=some)
        assert_same(y, whole[:, columns], backend)
    # bias and residual are each one addition, before and after the activation
    sums = linear(x, w, bias, backend=backend)
    one = applied(sums.reshape(-1), activation, backend).reshape(sums.shape)
    assert_same(whole, one + residual, backend)


@every_activation
@pack_or_not
def test_out_may_overlap(pack, activation, backend, rng):
    x, w, bias, residual = arrays(rng, (3, 60), 64, 64)
    weight = qkv_ext.pack_weight(w) if pack else w
    call = functools.partial(linear, activation=activation, backend=backend)
    expected = call(x, weight, bias, residual=residual)
    for which in ("x", "residual", "both"):
        for flip in (np.s_[:], np.s_[:, ::-1], np.s_[::-1], np.s_[..., ::-1]):
            a, r = x.copy(), residual.copy()
            if which == "both":
                a = r = x.copy()
            out = (a if which == "x" else r)[flip]
            right = call(x, weight, bias, residual=x) if which == "both" else expected
            assert call(a, weight, bias, residual=r, out=out) is out
            assert_same(np.ascontiguousarray(out), right, backend)
    own = np.concatenate([residual.ravel(), np.zeros(70, np.float32)])  # a few places further on
    out = own[70:].reshape(residual.shape)
    given = own[:-70].reshape(residual.shape)
    assert_same(call(x, weight, bias, residual=given, out=out), expected, backend)
    own = bias.copy()
    assert_same(call(x[0, 0], weight, own, residual=residual[0, 0], out=own), expected[0, 0],
                backend)  # fmt: skip


@pack_or_not
def test_any_residual(pack, backend, rng):
    """Strided, broadcast by its strides, read-only, byte-swapped, misaligned."""
    x, w, bias, residual = arrays(rng, (3, 7), 40, 70)
    weight = qkv_ext.pack_weight(w) if pack else w
    call = functools.partial(linear, x, weight, bias, activation="gelu", backend=backend)
    expected = call(residual=residual)
    wide = np.full((3, 9, 150), NAN, np.float32)
    wide[:, 1:8, 5:145:2] = residual
    raw = np.frombuffer(b"." + residual.tobytes(), np.uint8)[1:].view(np.float32)
    fixed = residual.copy()
    fixed.flags.writeable = False
    for given in (wide[:, 1:8, 5:145:2], np.asfortranarray(residual), residual.astype(">f4"),
                  raw.reshape(residual.shape), residual[::-1, :, ::-1].copy()[::-1, :, ::-1],
                  fixed, np.pad(residual, ((0, 0), (0, 0), (0, 9)))[..., :70]):  # fmt: skip
        assert_same(call(residual=given), expected, backend)
    same = np.broadcast_to(residual[1, 2], residual.shape)
    assert_same(call(residual=same), call(residual=same.copy()), backend)


def test_a_residual_beside_a_strided_out(backend, rng):
    """out has rows of no one stride: the result is made elsewhere."""
    x, w, bias, residual = arrays(rng, (3, 5), 8, 20)
    expected = linear(x, w, bias, activation="silu", residual=residual, backend=backend)
    whole = np.full((3, 7, 20), NAN, np.float32)
    whole[:, 1:6] = residual
    out = whole[:, 1:6]
    linear(x, w, bias, activation="silu", residual=out, out=out, backend=backend)
    assert_same(np.ascontiguousarray(out), expected, backend)
    assert np.isnan(whole[:, [0, 6]]).all()


@pytest.mark.parametrize("part", [1, 7, 100, 1 << 20])
def test_numpy_goes_part_by_part(part, rng, monkeypatch):
    monkeypatch.setattr(_activations, "PART", part)
    x, w, bias, residual = arrays(rng, (33,), 20, 50)
    for activation in NAMES[1:]:
        y = linear(x, w, bias, activation=activation, residual=residual, backend="numpy")
        assert_within(y, *truth_and_bound(x, w, bias, activation, residual))


def test_a_plain_call_is_not_checked_in_python(compiled, rng, monkeypatch):
    from qkv_ext._core import _check

    x, w, bias, residual = arrays(rng, (2, 3), 40, 70)
    packed = qkv_ext.pack_weight(w)
    calls = [
        functools.partial(linear, x, w, bias, activation="gelu", backend=compiled),
        functools.partial(linear, x, packed, bias, activation="relu", residual=residual,
                          backend=compiled, threads=1),
        functools.partial(linear, x[0, 0], packed, residual=residual[0, 0], backend=compiled),
    ]  # fmt: skip
    expected = [each(out=np.empty_like(each())) for each in calls]

    def refuse(*_arguments, **_options):
        raise AssertionError("it came to _check.py")

    monkeypatch.setattr(_check, "linear", refuse)
    for each, right in zip(calls, expected, strict=True):
        assert_same_bits(each(), right)
