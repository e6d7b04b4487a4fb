"""Layer norm and RMS norm against the formula in float64, and their bits."""

import functools

import numpy as np
import pytest
from cases import dtype_of
from tolerance import WAYS, allowed_error, assert_same, assert_same_bits, assert_within

import qkv_ext
from qkv_ext._core import _backends
from qkv_ext._core._problem import Norm

layer_norm, rms_norm = qkv_ext.layer_norm, qkv_ext.rms_norm
F32 = np.finfo(np.float32)
INF, NAN = np.inf, np.nan


def formula(x, weight, bias, eps, centered, add_up=WAYS[0][1], dtype=np.float64):
    """The formula as it is written, in a dtype, with sums of some order."""
    x, weight = x.astype(dtype), weight.astype(dtype)
    n = dtype(x.shape[-1])
    with np.errstate(all="ignore"):
        if centered:
            x = x - (add_up(x) / n)[..., None]
        y = x / np.sqrt((add_up(x * x) / n)[..., None] + dtype(eps)) * weight
        return y if bias is None else y + bias.astype(dtype)


def truth_and_bound(*arguments):
    truth = formula(*arguments)
    plain = (formula(*arguments, add_up=way[1], dtype=np.float32) for way in WAYS)
    return truth, allowed_error(truth, *plain)


def call(x, weight, bias, eps, centered, **options):
    if centered:
        return layer_norm(x, weight, bias, eps=eps, **options)
    return rms_norm(x, weight, eps=eps, **options)


def vectors(rng, n, dtype=np.float32):
    return tuple(rng.standard_normal(n, np.float32).astype(dtype) for _ in range(2))


SIZES = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 300, 1023, 1024,
         1025, 1500, 4096, 5000]  # fmt: skip
KINDS = {"layer": (True, True), "layer without bias": (True, False), "rms": (False, False)}
every_kind = pytest.mark.parametrize(("centered", "biased"), KINDS.values(), ids=KINDS)


@every_kind
@pytest.mark.parametrize("n", SIZES)
def test_rows(n, centered, biased, backend, rng):
    """Every size and offset is within the error rule, by itself and in place."""
    weight, bias = vectors(rng, n)
    bias = bias if biased else None
    for spread, offset, eps in ((1, 0, 1e-5), (1, 100, 0.0), (0.01, 1, 1e-6), (1e-3, 0, 1e-5)):
        x = rng.standard_normal((5, n), np.float32) * np.float32(spread) + np.float32(offset)
        if n < 3 and not eps:
            continue  # 0 / 0, or two numbers that are 1 and -1
        given = x, weight, bias, eps, centered
        truth, bound = truth_and_bound(*given)
        y = call(*given, backend=backend)
        assert_within(y, truth, bound)
        assert call(x, *given[1:], out=x, backend=backend) is x
        assert_same_bits(x, y)


SHAPES = [(64,), (3, 64), (2, 3, 64), (2, 3, 4, 64), (1, 1, 1, 5), (2, 1, 3, 1, 7), (0, 4), (3, 0),
          (2, 0, 4), (300, 700)]  # fmt: skip


@every_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_arrays_as_they_come(shape, centered, biased, backend, rng):
    x = rng.standard_normal(shape, np.float32)
    weight, bias = vectors(rng, shape[-1])
    rest = weight, bias if biased else None, 1e-5, centered
    y = call(x, *rest, backend=backend)
    assert y.dtype == np.float32
    assert y.flags.c_contiguous
    if not x.size:
        assert y.shape == shape
        return
    assert_within(y, *truth_and_bound(x, *rest))
    wide = np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)
    wide[..., ::2] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    raw = np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(shape)
    for given in (wide[..., ::2], x.astype(">f4"), frozen, np.asfortranarray(x), raw):
        assert_same_bits(call(given, *rest, backend=backend), y)
    for out in (np.full(shape, NAN, np.float32), np.full(shape[::-1], NAN, np.float32).T,
                np.full(shape, NAN, ">f4"), np.full(shape, NAN, np.float32)[::-1],
                np.full((*shape[:-1], 2 * shape[-1]), NAN, np.float32)[..., ::2]):  # fmt: skip
        assert call(x, *rest, out=out, backend=backend) is out
        np.testing.assert_array_equal(out, y)
    strided = np.repeat(weight, 2)[::2]
    assert_same_bits(call(x, strided, *rest[1:], backend=backend), y)


@every_kind
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_leading_axes_of_any_strides(dtype, order, centered, biased, backend, rng):
    """As a layer has them: heads of a projection, in place, whatever lies between."""
    room = rng.standard_normal((4, 5, 6, 40), np.float32).astype(dtype_of(dtype))
    before = room.copy()
    part = room[::-1, 1:4, ::2, :24]
    x = part.transpose(*order, 3)
    weight, bias = vectors(rng, 24)
    expected = [call(np.ascontiguousarray(row), weight.astype(x.dtype), None, 1e-6, False,
                     backend=backend) for row in x.reshape(-1, 24)]  # fmt: skip
    exact = weight.astype(x.dtype).astype(np.float32)
    norm = _backends.choose(backend, None).norm
    for threads in (1, 2):
        room[...] = before
        norm(Norm(x, exact, None, 1e-6, False, x, threads))
        assert_same_bits(x.reshape(-1, 24), np.array(expected))
        part[...] = before[::-1, 1:4, ::2, :24]
        assert room.tobytes() == before.tobytes()  # what lies between is not touched
    given = before[::-1, 1:4, ::2, :24].transpose(*order, 3)
    rest = weight.astype(x.dtype), bias.astype(x.dtype) if biased else None, 1e-5, centered
    together = call(given, *rest, backend=backend)
    out = np.empty((4, 3, 3, 48), x.dtype)[..., ::2].transpose(*order, 3)
    assert call(given, *rest, out=out, backend=backend) is out
    assert_same_bits(np.ascontiguousarray(out), together)
    for index in np.ndindex(*given.shape[:-1]):
        assert_same_bits(call(given[index], *rest, backend=backend), together[index])


def test_broadcast_rows(backend, rng):
    row = rng.standard_normal(24, np.float32)
    weight, bias = vectors(rng, 24)
    x = np.broadcast_to(row, (3, 5, 24))
    y = layer_norm(x, weight, bias, backend=backend)
    assert_same_bits(y[2, 3], layer_norm(row, weight, bias, backend=backend))
    assert (y == y[0, 0]).all()


@pytest.mark.parametrize("shift", [-1, 1])
def test_out_overlaps(shift, backend, rng):
    memory = rng.standard_normal((6, 16), np.float32)
    weight, bias = vectors(rng, 16)
    x, out = memory[1:5], memory[1 + shift : 5 + shift]
    expected = layer_norm(x.copy(), weight, bias, backend=backend)
    assert layer_norm(x, weight, bias, out=out, backend=backend) is out
    assert_same_bits(out, expected)
    memory = rng.standard_normal((6, 16), np.float32)
    own = memory[2], memory[3]  # in place over the weight and the bias
    expected = layer_norm(memory.copy(), *(v.copy() for v in own), backend=backend)
    layer_norm(memory, *own, out=memory, backend=backend)
    assert_same_bits(memory, expected)


# ---- numbers ------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("n", [1, 15, 64, 200, 1030])
def test_half_types_are_rounded_once(n, dtype, centered, biased, backend, rng):
    dtype = dtype_of(dtype)
    x = (3 * rng.standard_normal((4, n), np.float32)).astype(dtype)
    weight, bias = vectors(rng, n, dtype)
    rest = weight, bias if biased else None, 1e-5, centered
    y = call(x, *rest, backend=backend)
    assert y.dtype == dtype
    wide = (None if v is None else v.astype(np.float32) for v in rest[:2])
    exact = call(x.astype(np.float32), *wide, *rest[2:], backend=backend)
    if backend != "numpy":  # whose float32 is rounded from float64
        np.testing.assert_array_equal(y, exact.astype(dtype))
    truth, bound = truth_and_bound(x, *rest)
    assert_within(y, truth, bound, dtype=dtype)
    assert call(x, *rest, out=x, backend=backend) is x
    assert_same_bits(x, y)


@every_kind
def test_float64(centered, biased, rng):
    for scale in (1, 1e200, 1e-200, 1.7e308, 1e-310):
        x = rng.uniform(-1, 1, (3, 50)) * scale
        weight, bias = rng.standard_normal((2, 50))
        rest = weight, bias if biased else None
        y = call(x, *rest, 0.0, centered, backend="numpy")
        assert y.dtype == np.float64
        wide = np.longdouble if np.finfo(np.longdouble).max > 1e4000 else np.float64
        own = x if wide is np.longdouble else x / scale
        np.testing.assert_allclose(y, formula(own, *rest, 0.0, centered, dtype=wide), rtol=1e-7)
    assert not call(np.zeros((2, 50)), weight, None, 1e-5, centered, backend="numpy").any()


@every_kind
@pytest.mark.parametrize("n", [1, 3, 64, 100, 2000])
@pytest.mark.parametrize("scale", [1e19, 1e30, 3.4e38, 1e-15, 1e-25, 1e-38, 1e-42])
def test_large_and_small_numbers(scale, n, centered, biased, backend, rng):
    """Their squares are beyond float32, the result is not."""
    x = rng.uniform(-1, 1, (4, n)).astype(np.float32) * np.float32(scale)
    weight = rng.uniform(0.5, 2, n).astype(np.float32)
    bias = weight / 2 if biased else None
    for eps in (0.0, 1e-5, 1e-12, 1e-35, 1e-70):
        if centered and n == 1 and not eps:
            continue  # 0 / 0
        y = call(x, weight, bias, eps, centered, backend=backend)
        truth = formula(x, weight, bias, eps, centered)
        assert np.isfinite(y).all()
        bound = 8 * F32.eps * np.abs(truth).max() + 2 * F32.tiny * F32.eps
        assert_within(y, truth, bound, f"eps {eps}")


def test_what_is_large_beside_small(backend):
    """One large number, and others that it leaves as zeros; and finite weights make infinities."""
    x = np.float32([[1e30, 1, -1, 1e-30], [1e-30, 1e-38, -1e-38, 0]])
    ones = np.ones(4, np.float32)
    truth = formula(x, ones, None, 0.0, False)
    assert_within(rms_norm(x, ones, eps=0.0, backend=backend), truth, 8 * F32.eps)
    y = rms_norm(x[:1], 3e38 * ones, eps=0.0, backend=backend)
    assert np.isinf(y[0, 0])
    assert np.isfinite(y[0, 1:]).all()


@pytest.mark.parametrize("n", [1, 5, 64, 100, 3000])
def test_equal_numbers(n, backend):
    """0 but for rounding, where eps allows; with eps = 0 a NaN, or what rounding made of 0 / 0."""
    weight, bias = np.ones(n, np.float32), np.full(n, 3, np.float32)
    for value in (0, 1, -7, 1e-30):
        x = np.full((2, n), value, np.float32)
        y = layer_norm(x, weight, bias, backend=backend)
        np.testing.assert_allclose(y, 3, rtol=1e-6)
    zeros = np.zeros((2, n), np.float32)
    assert np.isnan(layer_norm(zeros, weight, eps=0.0, backend=backend)).all()
    assert np.isnan(rms_norm(zeros, weight, eps=0.0, backend=backend)).all()
    assert not rms_norm(zeros, weight, backend=backend).any()
    assert np.signbit(rms_norm(-zeros, weight, backend=backend)).all()


@pytest.mark.parametrize("n", [2, 5, 64, 100, 3000])
def test_what_is_not_finite_stays_in_its_row(n, backend, rng):
    x = rng.standard_normal((6, n), np.float32)
    weight, bias = vectors(rng, n)
    expected = [layer_norm(x, weight, bias, backend=backend), rms_norm(x, weight, backend=backend)]
    x[1, n // 2], x[3, n - 1], x[4, 0], x[4, 1] = NAN, INF, -INF, INF
    rows = np.array([0, 2, 5])
    y = layer_norm(x, weight, bias, backend=backend)
    assert np.isnan(y[[1, 3, 4]]).all()
    assert_same(y[rows], expected[0][rows], backend)
    y = rms_norm(x, weight, backend=backend)
    assert_same(y[rows], expected[1][rows], backend)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(np.isnan(y[3:5]), np.isinf(x[3:5]))
    assert not y[3:5][np.isfinite(x[3:5])].any()
    weight[n // 2] = NAN
    y = rms_norm(x[[0]], weight, backend=backend)
    assert np.flatnonzero(np.isnan(y)).tolist() == [n // 2]


@every_kind
def test_large_mean(centered, biased, backend, rng):
    """What the rounding of the mean leaves is taken off, so far better than the plain formula."""
    x = (1e4 + rng.standard_normal((4, 3000))).astype(np.float32)
    weight, bias = vectors(rng, 3000)
    given = x, weight, bias if biased else None, 1e-5, centered
    truth = formula(*given)
    assert_within(call(*given, backend=backend), truth, 32 * F32.eps * np.abs(truth).max())


@every_kind
@pytest.mark.parametrize("n", [1_000_000, 600_001])
def test_long_rows(n, centered, biased, backend, rng):
    """In pieces, whose sums are added up in float64: no error grows with the length."""
    x = rng.standard_normal((2, n), np.float32) + np.float32(3)
    weight, bias = vectors(rng, n)
    given = x, weight, bias if biased else None, 1e-5, centered
    truth = formula(*given)
    y = call(*given, backend=backend)
    assert_within(y, truth, 8 * F32.eps * np.abs(truth).max())
    assert_same(call(x[1], *given[1:], threads=1, backend=backend), y[1], backend)
    x[0] *= np.float32(1e30)
    large = call(*given, backend=backend)
    assert_within(large[0], formula(x[:1], *given[1:])[0], 8 * F32.eps * np.abs(truth).max())
    assert_same(large[1], y[1], backend)


# ---- bits ---------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("n", [1, 17, 64, 100, 1030])
def test_rows_alone(n, centered, biased, compiled, rng):
    """The same bits in any batch, in any place, and with any number of threads."""
    x = rng.standard_normal((max(40, 200_000 // n), n), np.float32)
    weight, bias = vectors(rng, n)
    rest = weight, bias if biased else None, 1e-5, centered
    whole = call(x, *rest, threads=1, backend=compiled)
    for threads in (2, 3):
        assert_same_bits(call(x, *rest, threads=threads, backend=compiled), whole)
    for row in (0, 1, 39, len(x) - 1):
        assert_same_bits(call(x[row], *rest, backend=compiled), whole[row])
    assert_same_bits(call(x[::-3], *rest, backend=compiled), whole[::-3])


@every_kind
@pytest.mark.parametrize("n", [1024, 1000])
def test_results_past_the_caches(n, centered, biased, compiled, rng):
    """A result of 16 MB or more goes there another way, wherever it starts."""
    x = rng.standard_normal((5000, n), np.float32)
    weight, bias = vectors(rng, n)
    rest = weight, bias if biased else None, 1e-5, centered
    right = np.concatenate([call(part, *rest, backend=compiled) for part in np.split(x, 10)])
    assert_same_bits(call(x, *rest, threads=2, backend=compiled), right)
    room = np.zeros(x.size + 1, np.float32)
    for start in (0, 1):
        out = room[start : x.size + start].reshape(x.shape)
        call(x, *rest, out=out, backend=compiled)
        assert_same_bits(out, right)
    call(x, *rest, out=x, backend=compiled)
    assert_same_bits(x, right)


def test_a_plain_call_is_not_checked_in_python(compiled, rng, monkeypatch):
    from qkv_ext._core import _check_norm

    x = rng.standard_normal((2, 3, 40), np.float32)
    weight, bias = vectors(rng, 40)
    calls = [
        functools.partial(layer_norm, x, weight, bias, backend=compiled),
        functools.partial(layer_norm, x, weight, backend=compiled, eps=0.5),
        functools.partial(rms_norm, x, weight, backend=compiled, threads=1),
    ]
    expected = [each(out=np.empty_like(x)) for each in calls]

    def refuse(*_arguments, **_options):
        raise AssertionError("it came to _check_norm.py")

    monkeypatch.setattr(_check_norm, "norm", refuse)
    for each, right in zip(calls, expected, strict=True):
        assert_same_bits(each(), right)


# ---- what is refused ----------------------------------------------------------------------------

X, W = np.zeros((2, 3, 8), np.float32), np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("x", "weight", "options", "error", "message"),
    [
        (np.float32(1), W, {}, ValueError, r"^x has shape \(\); expected at least 1 axis$"),
        (X.astype(int), W, {}, TypeError, "^x has dtype int64; expected float32"),
        (X, W[:7], {}, ValueError,
         r"^weight has shape \(7,\); expected \(8,\), the last axis of x$"),
        (X, X[0], {}, ValueError, r"^weight has shape \(3, 8\); expected \(8,\)"),
        (X, W[0], {}, ValueError, r"^weight has shape \(\); expected at least 1 axis$"),
        (X, None, {}, TypeError, "^weight "),
        (X, W.astype("f2"), {}, TypeError, r"^x, weight have different dtypes \(x float32, "),
        (X, W, {"eps": -1e-5}, ValueError,
         "^eps is -1e-05; expected a finite number of at least 0$"),
        (X, W, {"eps": NAN}, ValueError, "^eps is nan; expected a finite"),
        (X, W, {"eps": INF}, ValueError, "^eps is inf; expected a finite"),
        (X, W, {"eps": 10**400}, ValueError, "^eps is 1000.*; expected a finite"),
        (X, W, {"eps": None}, TypeError, "^eps is None; expected a finite number of at least 0$"),
        (X, W, {"eps": "1"}, TypeError, "^eps "),
        (X, W, {"eps": True}, TypeError, "^eps is True"),
        (X, W, {"out": X[0]}, ValueError, r"^out has shape \(3, 8\); expected \(2, 3, 8\)$"),
        (X, W, {"out": X.astype(float)}, TypeError, "^out has dtype float64; expected float32$"),
        (X, W, {"threads": 0}, ValueError, "^threads is 0"),
        (X, W, {"backend": "none"}, ValueError, "^backend is 'none'"),
    ],
)  # fmt: skip
def test_rejects(x, weight, options, error, message):
    for function in (layer_norm, rms_norm):
        with pytest.raises(error, match=message):
            function(x, weight, **options)


@pytest.mark.parametrize("bias", [W[:7], X[0], W.astype("f2"), W.astype(int)], ids=str)
def test_rejects_bias(bias):
    with pytest.raises((ValueError, TypeError), match="bias"):
        layer_norm(X, W, bias)


def test_float64_belongs_to_numpy(compiled):
    with pytest.raises(TypeError, match="computes float32; float64 needs backend 'numpy'"):
        layer_norm(X.astype(float), W.astype(float), backend=compiled)
