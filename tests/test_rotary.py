"""Rotary embedding against complex numbers in float64."""

import math
from itertools import product

import numpy as np
import pytest
from tolerance import assert_same_bits

from qkv_ext import apply_rotary, rotary_tables
from qkv_ext._core import _backends
from qkv_ext._core._problem import Rotation

EPS = float(np.finfo(np.float32).eps)


def turned(x, at, frequencies, interleaved, width):
    """x with the pairs of its first elements turned by at · frequencies, in float64.

    x is (..., L, D), at broadcasts to (..., L).
    """
    x = x.astype(np.float64)
    first, second = (
        (np.s_[0:width:2], np.s_[1:width:2])
        if interleaved
        else (np.s_[: width // 2], np.s_[width // 2 : width])
    )
    z = x[..., first] + 1j * x[..., second]
    z = z * np.exp(1j * np.asarray(at)[..., None] * frequencies)
    y = x.copy()
    y[..., first], y[..., second] = z.real, z.imag
    return y


def frequencies(width, base=10000.0):
    return np.array([base ** (-2 * t / width) for t in range(width // 2)])


def assert_close(actual, truth):
    """Two products and a sum, each rounded, and tables that were rounded."""
    assert actual.shape == truth.shape
    np.testing.assert_allclose(actual, truth, rtol=0, atol=4 * EPS * np.abs(truth).max(initial=1))


# ---- tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "dim", "options"),
    [(5, 8, {}), (300, 64, {"base": 5e5}), (7, 2, {"scale": 4}), (1, 6, {"base": 10}), (0, 4, {}),
     (9, 8, {"scale": np.float32(0.5), "base": 10000})],
)  # fmt: skip
def test_tables(n, dim, options):
    cos, sin = rotary_tables(n, dim, **options)
    scale, base = float(options.get("scale", 1)), options.get("base", 10000.0)
    for table, function in ((cos, math.cos), (sin, math.sin)):
        assert table.shape == (n, dim // 2)
        assert table.dtype == np.float32
        for p, t in np.ndindex(*table.shape):
            exact = function(p / scale * base ** (-2 * t / dim))
            assert table[p, t] == pytest.approx(exact, rel=EPS, abs=1e-12)


def test_far_positions_keep_their_accuracy():
    """The angle of position 2^20 has no digit to spare in float32."""
    cos, _ = rotary_tables(2**20 + 1, 2)
    assert cos[-1, 0] == np.float32(math.cos(2**20))
    cos, _ = rotary_tables(2**20 + 1, 2, scale=3.0)
    assert cos[-1, 0] == np.float32(math.cos(2**20 / 3))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((4, 7), {}, ValueError, "dim is 7; expected an even number"),
        ((4, 0), {}, ValueError, "dim holds 0"),
        ((-1, 8), {}, ValueError, "n holds -1"),
        ((4.0, 8), {}, TypeError, "n has dtype float64; expected integers"),
        ((4, 8), {"base": 0}, ValueError, "base is 0; expected a positive finite number"),
        ((4, 8), {"base": np.inf}, ValueError, "base is inf"),
        ((4, 8), {"scale": -1.0}, ValueError, "scale is -1.0"),
        ((4, 8), {"scale": np.nan}, ValueError, "scale is nan"),
        ((4, 8), {"scale": None}, TypeError, "scale is None; expected a positive number"),
        ((4, 8), {"base": True}, TypeError, "base is True"),
        ((4, 8), {"base": 1e-300, "scale": 1e-300}, ValueError,
         "base is 1e-300 and scale 1e-300; expected angles below infinity"),
    ],
)  # fmt: skip
def test_tables_reject(arguments, options, error, message):
    with pytest.raises(error, match=message):
        rotary_tables(*arguments, **options)


# ---- apply_rotary -------------------------------------------------------------------------------

SHAPES = [
    (7, 8),
    (3, 7, 8),
    (3, 2, 7, 8),
    (2, 3, 2, 7, 8),
    (3, 2, 1, 8),
    (0, 2, 7, 8),
    (3, 2, 0, 8),
]
both_pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


CALLS = [  # (shape of x as bhld, layout, positions); low ranks have no layout, rank 2 no (B, L)
    (shape, layout, positions)
    for shape in SHAPES
    for layout in (("bhld", "blhd") if len(shape) > 3 else ("bhld",))
    for positions in (("default", "(L,)", "(B, L)") if len(shape) > 2 else ("default", "(L,)"))
]


@pytest.mark.parametrize(("shape", "layout", "positions"), CALLS, ids=str)
def test_apply(shape, layout, positions, backend, rng):
    for interleaved, rotary_dim in product((False, True), (None, 8, 6, 2)):
        width = rotary_dim or shape[-1]
        x = rng.standard_normal(shape, np.float32)
        tables = rotary_tables(20, width)
        at = np.arange(shape[-2])
        options = {"interleaved": interleaved, "rotary_dim": rotary_dim, "layout": layout}
        if positions != "default":
            size = (shape[-2],) if positions == "(L,)" else (shape[0], shape[-2])
            at = options["positions"] = rng.integers(0, 20, size)
        if at.ndim == 2:
            at = at.reshape(shape[0], *[1] * (len(shape) - 3), shape[-2])
        truth = turned(x, at, frequencies(width), interleaved, width)
        if layout == "blhd":
            x, truth = np.ascontiguousarray(x.swapaxes(-3, -2)), truth.swapaxes(-3, -2)
        before = x.copy()
        y = apply_rotary(x, *tables, backend=backend, **options)
        assert y.dtype == np.float32
        assert_close(y, truth)
        assert_same_bits(y[..., width:], x[..., width:])
        assert_same_bits(x, before)
        assert apply_rotary(x, *tables, out=x, backend=backend, **options) is x
        assert_same_bits(x, y)


@pytest.mark.parametrize("shape", [(3, 700, 64), (3, 4, 700, 64), (2, 2, 40, 700, 8)], ids=str)
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_large_arrays(layout, shape, backend, rng):
    """What is too large for one part has the same bits as its items by themselves."""
    if len(shape) == 3 and layout == "blhd":
        shape = (3, 700, 6, 64)
    x = rng.standard_normal(shape, np.float32)
    length = shape[-3] if layout == "blhd" else shape[-2]
    at = rng.integers(0, 900, (shape[0], length))
    tables = rotary_tables(900, shape[-1])
    for positions in (at, at[0]):
        y = apply_rotary(x, *tables, positions=positions, layout=layout, backend=backend)
        for item, each in enumerate(x):
            where = positions[item] if positions.ndim == 2 else positions
            rows = each if layout == "bhld" else each.swapaxes(-3, -2)
            for index in np.ndindex(*rows.shape[:-2]):
                alone = apply_rotary(rows[index], *tables, positions=where, backend=backend)
                actual = y[item] if layout == "bhld" else y[item].swapaxes(-3, -2)
                assert_same_bits(np.ascontiguousarray(actual[index]), alone)


@both_pairings
def test_pairs_by_hand(interleaved, backend):
    """Position 1 of three: a quarter turn of pair 0, none of pair 1; elements 4 and 5 stay."""
    cos, sin = np.float32([[1, 1], [0, 1], [-1, 1]]), np.float32([[0, 0], [1, 0], [0, 0]])
    x = np.float32([[1, 2, 3, 4, 5, 6]])
    y = apply_rotary(x, cos, sin, positions=[1], rotary_dim=4, interleaved=interleaved,
                     backend=backend)  # fmt: skip
    assert y.tolist() == [[-2, 1, 3, 4, 5, 6] if interleaved else [-3, 2, 1, 4, 5, 6]]


def test_as_rotate_half(backend, rng):
    """The formula of transformers: x cos + rotate_half(x) sin, with tables of the full width."""
    x = rng.standard_normal((2, 3, 9, 16), np.float32)
    cos, sin = rotary_tables(9, 16, base=500.0)
    wide_cos, wide_sin = (np.concatenate([table, table], axis=1) for table in (cos, sin))
    half = np.concatenate([-x[..., 8:], x[..., :8]], axis=-1)
    y = apply_rotary(x, wide_cos[:, :8], wide_sin[:, :8], backend=backend)
    np.testing.assert_allclose(y, x * wide_cos + half * wide_sin, rtol=0, atol=1e-6)


@both_pairings
def test_scores_depend_on_the_distance_alone(interleaved, backend, rng):
    q, k = rng.standard_normal((2, 1, 16), np.float32)
    tables = rotary_tables(200, 16)

    def score(p, j):
        rows = [
            apply_rotary(x, *tables, positions=[at], interleaved=interleaved, backend=backend)
            for x, at in ((q, p), (k, j))
        ]
        return (rows[0] * rows[1]).sum()

    assert score(150, 143) == pytest.approx(score(7, 0), abs=1e-5)
    assert abs(score(150, 100) - score(7, 0)) > 1e-2


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, ">i4", list]
)
def test_positions_of_any_integer_dtype(dtype, backend, rng):
    x = rng.standard_normal((2, 3, 4, 6), np.float32)
    tables = rotary_tables(100, 6)
    at = np.array([[0, 99, 5, 5], [1, 2, 3, 50]])
    given = at.tolist() if dtype is list else at.astype(dtype)
    expected = apply_rotary(x, *tables, positions=at, backend=backend)
    assert_same_bits(apply_rotary(x, *tables, positions=given, backend=backend), expected)


def rounding(name):
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@both_pairings
def test_half_types_are_rounded_once(interleaved, name, backend, rng):
    dtype = rounding(name)
    x = rng.standard_normal((2, 3, 7, 8)).astype(dtype)
    options = {"interleaved": interleaved, "rotary_dim": 6, "backend": backend}
    tables = rotary_tables(7, 6)
    y = apply_rotary(x, *tables, **options)
    assert y.dtype == dtype
    wide = apply_rotary(x.astype(np.float32), *tables, **options)
    np.testing.assert_array_equal(y, wide.astype(dtype))
    assert apply_rotary(x, *tables, out=x, **options) is x
    np.testing.assert_array_equal(x, y)


def test_float64(rng):
    """In float64, with tables of float64; a table of another dtype is rounded to that of x."""
    x = rng.standard_normal((2, 7, 8))
    angles = np.outer(np.arange(7), frequencies(8))
    y = apply_rotary(x, np.cos(angles), np.sin(angles), backend="numpy")
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, turned(x, np.arange(7), frequencies(8), False, 8), atol=1e-14)
    x = x.astype(np.float32)
    y = apply_rotary(x, np.cos(angles), np.sin(angles), backend="numpy")
    assert_same_bits(y, apply_rotary(x, *rotary_tables(7, 8), backend="numpy"))


def test_arrays_as_they_come(backend, rng):
    """Strided, byte-swapped, read-only x and tables; strided and overlapping out."""
    x = rng.standard_normal((3, 7, 8), np.float32)
    cos, sin = rotary_tables(7, 8)
    y = apply_rotary(x, cos, sin, backend=backend)
    wide = np.zeros((3, 7, 16), np.float32)
    wide[..., ::2] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    for given in (wide[..., ::2], x.astype(">f4"), frozen, np.asfortranarray(x), x.tolist()):
        given = np.float32(given) if isinstance(given, list) else given
        assert_same_bits(apply_rotary(given, cos, sin, backend=backend), y)
    assert_same_bits(apply_rotary(x, cos.astype(">f4"), sin[::-1][::-1], backend=backend), y)
    for out in (np.empty((8, 7, 3), np.float32).T, np.empty((3, 7, 8), ">f4")):
        assert apply_rotary(x, cos, sin, out=out, backend=backend) is out
        np.testing.assert_array_equal(out, y)
    room = np.zeros((4, 7, 8), np.float32)
    room[:3] = x
    assert_same_bits(apply_rotary(room[:3], cos, sin, out=room[1:], backend=backend), y)
    square = np.ascontiguousarray(np.broadcast_to(cos[:, :1], (7, 2)))  # out over the tables
    expected = apply_rotary(x[0, :, :4], square, square, backend=backend)
    base = np.zeros((7, 4), np.float32)
    base[:, :2] = square
    apply_rotary(x[0, :, :4], base[:, :2], base[:, :2], out=base, backend=backend)
    assert_same_bits(base, expected)


def test_not_finite_numbers_stay_in_their_rows(backend, rng):
    x = rng.standard_normal((3, 7, 8), np.float32)
    tables = rotary_tables(7, 8)
    expected = apply_rotary(x, *tables, backend=backend)
    x[1, 2] = [np.nan, np.inf, -np.inf, 3e38, 3e38, np.inf, 1e-45, 0]
    y = apply_rotary(x, *tables, backend=backend)
    keep = np.ones((3, 7), bool)
    keep[1, 2] = False
    assert_same_bits(y[keep], expected[keep])


X = np.zeros((2, 3, 5, 8), np.float32)
COS = np.zeros((6, 4), np.float32)


@pytest.mark.parametrize(
    ("x", "cos", "sin", "options", "error", "message"),
    [
        (X[0, 0, 0], COS, COS, {}, ValueError, r"x has shape \(8,\); expected at least 2 axes"),
        (X.astype(int), COS, COS, {}, TypeError, "x has dtype int64"),
        (X, COS[0], COS, {}, ValueError, r"cos has shape \(4,\)"),
        (X, COS[:, :3], COS, {}, ValueError,
         r"cos has shape \(6, 3\); expected \(n, 4\), half of rotary_dim = 8"),
        (X, COS, COS[:5], {}, ValueError, r"sin has shape \(5, 4\); expected \(6, 4\) as cos has"),
        (X, COS.astype(int), COS, {}, TypeError, "cos has dtype int64"),
        (X, COS[:4], COS[:4], {}, ValueError,
         r"x has shape \(2, 3, 5, 8\), so L = 5 positions; cos and sin have 4 rows"),
        (X, COS, COS, {"positions": [0, 1, 2, 3, 6]}, ValueError,
         "positions holds 6; expected 0 to 5"),
        (X, COS, COS, {"positions": [0, 1, 2, 3, -1]}, ValueError, "positions holds -1"),
        (X, COS[:0], COS[:0], {"positions": [0] * 5}, ValueError, "positions holds 0"),
        (X, COS, COS, {"positions": np.array([0, 1, 2, 3, 2**64 - 1], np.uint64)}, ValueError,
         "positions holds 18446744073709551615"),
        (X, COS, COS, {"positions": [0.0] * 5}, TypeError, "positions has dtype float64"),
        (X, COS, COS, {"positions": [[0], [1, 2]]}, ValueError,
         r"positions is \[\[0\], \[1, 2\]\]; expected integers \(5,\) or \(2, 5\)"),
        (X, COS, COS, {"positions": [True] * 5}, TypeError, "positions has dtype bool"),
        (X, COS, COS, {"positions": [0] * 4}, ValueError,
         r"positions has shape \(4,\); expected \(5,\) or \(2, 5\)"),
        (X, COS, COS, {"positions": np.zeros((3, 5), int)}, ValueError, r"shape \(3, 5\)"),
        (X[0, 0], COS, COS, {"positions": np.zeros((1, 5), int)}, ValueError,
         r"positions has shape \(1, 5\); expected \(5,\)"),
        (X, COS, COS, {"rotary_dim": 7}, ValueError, "rotary_dim is 7; expected an even number"),
        (X, COS, COS, {"rotary_dim": 10}, ValueError, "rotary_dim holds 10; expected 0 to 8"),
        (X, COS, COS, {"rotary_dim": 4.0}, TypeError, "rotary_dim has dtype float64"),
        (X[..., :7], COS, COS, {}, ValueError, "D = 7 is odd; give an even rotary_dim"),
        (X, COS, COS, {"layout": "bldh"}, ValueError, "layout is 'bldh'"),
        (X[0], COS, COS, {"layout": "blhd"}, ValueError, "layout is 'blhd', but x has shape"),
        (X, COS, COS, {"interleaved": 1}, TypeError, "interleaved is 1; expected True or False"),
        (X, COS, COS, {"out": X[0]}, ValueError, "out has shape"),
        (X, COS, COS, {"out": X.astype(float)}, TypeError, "out has dtype float64"),
        (X, COS, COS, {"backend": "none"}, ValueError, "backend is 'none'"),
        (X, COS, COS, {"threads": 0}, ValueError, "threads is 0"),
    ],
)  # fmt: skip
def test_rejects(x, cos, sin, options, error, message):
    with pytest.raises(error, match=message):
        apply_rotary(x, cos, sin, **options)


PARITY = [  # shape, layout, rotary_dim; odd widths, tails of vectors, heads, more than one task
    ((1, 8), "bhld", None),
    ((5, 34), "bhld", 30),
    ((2, 7, 66), "bhld", None),
    ((1, 8, 1, 64), "bhld", None),
    ((2, 3, 5, 130), "bhld", 126),
    ((2, 5, 3, 48), "blhd", None),
    ((2, 2, 3, 5, 10), "blhd", 6),
    ((2, 4, 300, 64), "bhld", None),
    ((3, 0, 4, 8), "bhld", None),
    ((3, 4, 8), "bhld", 0),
]


def numbers(rng, shape, dtype):
    """Among them zeros of both signs, subnormals, infinities and NaN."""
    x = rng.standard_normal(shape).astype(dtype)
    odd = np.array([0, -0.0, 1e-40, -1e-40, 3e38, np.inf, -np.inf, np.nan])
    at = rng.random(shape) < 0.2
    with np.errstate(all="ignore"):
        x[at] = rng.choice(odd, int(at.sum())).astype(dtype)
    return x


def tables_for(rng, x, layout, width):
    length = x.shape[-3 if layout == "blhd" else -2]
    cos, sin = (numbers(rng, (length + 4, width // 2), "f4") for _ in range(2))
    own = rng.integers(0, length + 4, length)
    each = rng.integers(0, length + 4, (x.shape[0], length))
    return cos, sin, [None, own, list(map(int, own)), *([each] if x.ndim > 2 else [])]


def assert_same_numbers(actual, expected):
    """The same bits, or both a NaN: NumPy's own NaN has either sign, as its loops come to it."""
    assert actual.dtype == expected.dtype
    both = np.isnan(actual) & np.isnan(expected)
    bits = f"u{actual.itemsize}"  # np.where of bfloat16 itself crashes in NumPy 2.0
    x, y = (np.where(both, 0, array.view(bits)) for array in (actual, expected))
    assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("shape", "layout", "rotary_dim"), PARITY)
def test_bits_of_numpy(shape, layout, rotary_dim, name, interleaved, compiled, rng):
    """Every option, any number of threads, in place or out: the bits of the NumPy backend."""
    x = numbers(rng, shape, rounding(name))
    cos, sin, all_positions = tables_for(
        rng, x, layout, shape[-1] if rotary_dim is None else rotary_dim
    )
    for positions in all_positions:
        options = {
            "positions": positions, "interleaved": interleaved, "rotary_dim": rotary_dim,
            "layout": layout,
        }  # fmt: skip
        right = apply_rotary(x, cos, sin, **options, backend="numpy")
        options["backend"] = compiled
        for threads in (1, 2):
            assert_same_numbers(apply_rotary(x, cos, sin, **options, threads=threads), right)
        own = x.copy()
        assert apply_rotary(own, cos, sin, **options, out=own) is own
        assert_same_numbers(own, right)
        wide = np.repeat(x, 2, axis=0)
        turned = apply_rotary(wide[::2], cos, sin, **options, out=wide[::2])
        assert_same_numbers(turned, right)
        exact = cos.astype("f8"), sin.astype("f8")
        assert_same_numbers(apply_rotary(x, *exact, **options), right)  # rounded to float32 again
        assert wide[1::2].tobytes() == x.tobytes()  # what lies between is not touched


@pytest.mark.parametrize("interleaved", [False, True])
def test_one_position_has_the_bits_of_many(interleaved, backend, rng):
    x = numbers(rng, (2, 3, 9, 70), "f4")
    cos, sin = rotary_tables(9, 70)
    whole = apply_rotary(x, cos, sin, interleaved=interleaved, backend=backend)
    for p in range(9):
        one = apply_rotary(
            np.ascontiguousarray(x[..., p : p + 1, :]), cos, sin, positions=np.array([p]),
            interleaved=interleaved, backend=backend,
        )  # fmt: skip
        assert_same_numbers(one, whole[..., p : p + 1, :])


@pytest.mark.parametrize("shift", [-1, 1])
def test_out_overlaps_x(shift, backend, rng):
    memory = rng.standard_normal((6, 16)).astype("f4")
    cos, sin = rotary_tables(8, 16)
    x, out = memory[1:5], memory[1 + shift : 5 + shift]
    right = apply_rotary(x.copy(), cos, sin, backend="numpy")
    assert_same_bits(apply_rotary(x, cos, sin, out=out, backend=backend), right)


def test_in_place_by_another_view(backend, rng):
    """out has the very elements of x, but is another array, and strided."""
    memory = rng.standard_normal((6, 5, 16)).astype("f4")
    cos, sin = rotary_tables(8, 16)
    right = apply_rotary(memory[::2].copy(), cos, sin, backend="numpy")
    apply_rotary(memory[::2], cos, sin, out=memory[::2], backend=backend)
    assert_same_bits(memory[::2].copy(), right)


def test_out_is_a_table_too(backend, rng):
    """In place over memory that holds the cosines: they are read before."""
    x = rng.standard_normal((8, 16)).astype("f4")
    cos, sin = x[:, :8], rng.standard_normal((8, 8)).astype("f4")
    right = apply_rotary(x.copy(), cos.copy(), sin, backend="numpy")
    assert_same_bits(apply_rotary(x, cos, sin, out=x, backend=backend), right)


@pytest.mark.parametrize("position", [-1, 4, 2**40])
def test_plain_call_rejects_positions(position, backend):
    """The short way of a compiled backend leaves what is out of range to the checks."""
    cos, sin = rotary_tables(4, 8)
    with pytest.raises(ValueError, match="positions"):
        apply_rotary(
            np.ones((1, 8), "f4"), cos, sin, positions=np.array([position]), backend=backend
        )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_results_past_the_caches(layout, interleaved, compiled, rng):
    """A result of 16 MB or more goes there another way, wherever it starts."""
    x = rng.standard_normal((1, 300, 120, 128), np.float32)
    tables, options = rotary_tables(300, 124), {"rotary_dim": 124, "interleaved": interleaved}
    options |= {
        "layout": layout,
        "positions": rng.integers(0, 300, x.shape[-3 + (layout == "bhld")]),
    }
    right = apply_rotary(x, *tables, **options, backend="numpy")
    assert_same_bits(apply_rotary(x, *tables, **options, threads=2, backend=compiled), right)
    room = np.zeros(x.size + 1, np.float32)
    for start in (0, 1):
        out = room[start : x.size + start].reshape(x.shape)
        apply_rotary(x, *tables, **options, out=out, backend=compiled)
        assert_same_bits(out, right)
    assert apply_rotary(x, *tables, **options, out=x, backend=compiled) is x
    assert_same_bits(x, right)


@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("length", [0, 1, 300])
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_in_one_run(interleaved, length, dtype, compiled, rng):
    """The inner function for layers: heads of a projection, in place or out, as two calls."""
    q = rng.standard_normal((2, length, 8, 64)).astype(dtype).swapaxes(1, 2)
    k = rng.standard_normal((2, 300, 2, 64)).astype(dtype).swapaxes(1, 2)
    cos, sin = rotary_tables(400, 64)
    at = rng.integers(0, 400, (2, length))
    options = {"interleaved": interleaved, "backend": compiled}
    right = (
        apply_rotary(q, cos, sin, positions=at, **options),
        apply_rotary(k, cos, sin, **options),
    )
    out = np.empty(q.shape, q.dtype)
    _backends.choose(compiled, None).rotary.__self__.step(
        Rotation(q, cos, sin, at, interleaved, out, 2),
        Rotation(k, cos, sin, None, interleaved, k, 2),
    )
    assert_same_bits(out, right[0])
    assert_same_bits(np.ascontiguousarray(k), right[1])


def test_out_over_the_positions(backend):
    """They are read before they are written over: none of them is then a row beyond the tables."""
    memory = np.zeros((8, 8), "f4")
    positions = memory.view(np.int64).ravel()[:8]
    positions[:] = np.arange(8)
    x, tables = np.full((8, 8), 1e30, "f4"), rotary_tables(8, 8)
    expected = apply_rotary(x, *tables, backend=backend)
    out = apply_rotary(x, *tables, positions=positions, out=memory, backend=backend)
    np.testing.assert_array_equal(out, expected)
