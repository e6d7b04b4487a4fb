"""trace: its steps against the rules written out key by key, its results against the fast calls."""

import math

import numpy as np
import pytest
from tolerance import assert_same_bits

import qkv_ext
from qkv_ext import trace, trace_cross, trace_self

sdpa = qkv_ext.scaled_dot_product_attention
INF = np.inf
STEPS = ["Q", "K", "V", "scores", "scaled", "capped", "masked", "weights", "output", "lse"]
EXTRAS = {"return_weights": True, "return_lse": True}


def assert_agrees(steps, results, atol=1e-5):
    """output, weights and lse of the fast call, shapes, dtypes and non-finite numbers included."""
    for name, expected in zip(("output", "weights", "lse"), results, strict=True):
        assert steps[name].dtype == expected.dtype
        close = atol if expected.dtype.itemsize > 2 else 4e-3
        np.testing.assert_allclose(
            steps[name].astype(float), expected.astype(float), rtol=close, atol=close, err_msg=name
        )
        assert steps[name].shape == expected.shape


def by_key(q, k, v, mask=None, causal=False, align="bottom-right", scale=None, window=None,
           softcap=None, alibi_slopes=None, q_lengths=None, kv_lengths=None, query_offset=None,
           key_offset=0, sinks=None):  # fmt: skip
    """The steps for q (B, H, L, D), one key after the other, in Python's float64."""
    b_n, h_n, l_n, d = q.shape
    s_n = k.shape[-2]
    names = ("scores", "scaled", "capped", "masked")
    steps = {name: np.zeros((b_n, h_n, l_n, s_n)) for name in names}
    for b, h, i, j in np.ndindex(b_n, h_n, l_n, s_n):
        key = k[b, h // (h_n // k.shape[1]), j].astype(float)
        score = math.fsum(q[b, h, i].astype(float) * key)
        scaled = score * (1 / math.sqrt(d) if scale is None else scale)
        capped = scaled if softcap is None else softcap * math.tanh(scaled / softcap)
        len_q = l_n if q_lengths is None else q_lengths[b]
        len_k = s_n if kv_lengths is None else kv_lengths[b]
        offset = len_k - len_q if align == "bottom-right" else 0
        if query_offset is not None:
            offset = np.broadcast_to(query_offset, b_n)[b]
        behind = (i + offset) - (j + key_offset)
        masked = capped
        if alibi_slopes is not None:
            masked -= np.broadcast_to(alibi_slopes, (b_n, h_n))[b, h] * abs(behind)
        allowed = i < len_q and j < len_k and not (causal and behind < 0)
        if window is not None:
            allowed &= window[0] is None or behind <= window[0]
            allowed &= window[1] is None or -behind <= window[1]
        if mask is not None:
            entry = np.broadcast_to(mask, (b_n, h_n, l_n, s_n))[b, h, i, j]
            allowed &= bool(entry) if mask.dtype == bool else entry != -INF
            masked += 0 if mask.dtype == bool else entry
        for name, value in zip(names, (score, scaled, capped, masked), strict=True):
            steps[name][b, h, i, j] = value
        if not allowed:
            steps["masked"][b, h, i, j] = -INF
    return steps


SLOPES = np.float32([0.5, 0.25, 0.125, 0.0625])
MASK = np.array([[True, False, True, True, True, True]])
ALL = {"causal": True, "window": (3, None), "softcap": 2.0, "alibi_slopes": SLOPES, "scale": 0.7,
       "sinks": SLOPES, "q_lengths": [5, 3], "kv_lengths": [6, 4], "key_offset": 1,
       "mask": np.where(MASK, 0.5, -INF).astype(np.float32)}  # fmt: skip
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "align": "top-left"},
    "scale": {"scale": -0.3},
    "scale 0": {"scale": 0.0},
    "window": {"window": (1, 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi per item": {"alibi_slopes": np.stack([SLOPES, SLOPES[::-1]])},
    "sinks": {"sinks": np.float32([0, 1, -INF, 3]), "causal": True, "query_offset": -2},
    "bool": {"mask": MASK},
    "float": {"mask": ALL["mask"]},
    "mask per item": {"mask": np.arange(60).reshape(2, 1, 5, 6) % 3 > 0},
    "lengths": {"q_lengths": [5, 3], "kv_lengths": [2, 0]},
    "offsets": {"causal": True, "query_offset": [4, -1], "key_offset": 2},
    "all": ALL,
    "all, offsets": ALL | {"query_offset": [3, 1]},
    "all, top-left": ALL | {"align": "top-left"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def draw(rng, dtype=np.float32):
    """q, k, v of B 2, H 4, Hkv 2, L 5, S 6, D 8 and Dv 3."""
    shapes = ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@every_option
def test_steps(options, backend, rng):
    q, k, v = draw(rng)
    steps = trace(q, k, v, **options)
    assert list(steps) == STEPS
    for name, given in (("Q", q), ("K", k), ("V", v)):
        assert_same_bits(steps[name], given)
    for name, expected in by_key(q, k, v, **options).items():
        assert steps[name].dtype == np.float32
        np.testing.assert_allclose(steps[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
    assert_agrees(steps, sdpa(q, k, v, backend=backend, **EXTRAS, **options))
    reached = steps["masked"] > -INF
    assert (steps["weights"][~reached] == 0).all()
    sums = steps["weights"].sum(axis=-1)
    assert (sums[~reached.any(axis=-1)] == 0).all()
    if "sinks" not in options:
        np.testing.assert_allclose(sums[reached.any(axis=-1)], 1, rtol=1e-5)


@every_option
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_dtypes(name, options, rng):
    """Storage types come back in Q, K, V, weights and output; the rest is in float32."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)
    q, k, v = draw(rng, dtype)
    steps = trace(q, k, v, **options)
    for step, array in steps.items():
        stored = step in ("Q", "K", "V", "weights", "output") or name == "float64"
        assert array.dtype == (dtype if stored else np.float32), step
    assert_agrees(steps, sdpa(q, k, v, backend="numpy", **EXTRAS, **options))


@every_option
def test_layout(options, rng):
    q, k, v = draw(rng)
    steps = trace(q, k, v, **options)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    other = trace(*turned, layout="blhd", **options)
    for name, array in other.items():
        in_layout = name in ("Q", "K", "V", "output")
        assert_same_bits(
            np.ascontiguousarray(array.swapaxes(1, 2) if in_layout else array), steps[name]
        )


@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 4)], ids=str)
def test_ranks(lead, backend, rng):
    """No head axis at rank 2 and 3, and more leading axes from rank 5 on."""
    q, k, v = (rng.standard_normal((*lead, n, 8), np.float32) for n in (5, 6, 6))
    batch = lead[:1]
    options = {"causal": True, "q_lengths": np.full(batch, 4), "kv_lengths": np.full(batch, 5),
               "alibi_slopes": SLOPES[:1] if len(lead) < 2 else SLOPES}  # fmt: skip
    steps = trace(q, k, v, **options)
    for name in ("scores", "scaled", "capped", "masked", "weights"):
        assert steps[name].shape == (*lead, 5, 6)
    assert_agrees(steps, sdpa(q, k, v, backend=backend, **EXTRAS, **options))


def test_leading_axes_broadcast(backend, rng):
    q, k = (
        rng.standard_normal((3, 1, 2, 5, 8), np.float32),
        rng.standard_normal((1, 2, 1, 6, 8), "f4"),
    )
    v = rng.standard_normal((3, 2, 1, 6, 4), np.float32)
    slopes = np.float32([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    options = {"alibi_slopes": slopes, "kv_lengths": [6, 2, 0]}
    steps = trace(q, k, v, **options)
    assert steps["scores"].shape == (3, 2, 2, 5, 6)
    assert_agrees(steps, sdpa(q, k, v, backend=backend, **EXTRAS, **options))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
@pytest.mark.parametrize("s", [0, 5])
def test_sizes_of_zero(s, shape, backend):
    q = np.ones(shape, np.float32)
    k = np.ones((*shape[:-2], s, shape[-1]), np.float32)
    options = {"scale": 1.0, "causal": True, "kv_lengths": np.full(shape[0], s)}
    assert_agrees(trace(q, k, k, **options), sdpa(q, k, k, backend=backend, **EXTRAS, **options))


WAYS = {
    "mask": {"mask": np.array([True, True, False, True, True])},
    "float mask": {"mask": np.float32([0, 0, -INF, 0, 0])},
    "causal": {"causal": True, "query_offset": 0},
    "window": {"window": (0, 0), "query_offset": 3},
    "lengths": {"kv_lengths": 2},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("value", [np.nan, INF, -INF])
def test_an_excluded_key_is_not_felt(value, options, backend, rng):
    """A4: key 2 is excluded from row 0, whatever its K and V hold; row 0 keeps its bits."""
    q, k, v = (rng.standard_normal((n, 4), np.float32) for n in (1, 5, 5))
    before = trace(q, k, v, **options)
    assert before["masked"][0, 2] == -INF
    k[2], v[2] = value, value
    after = trace(q, k, v, **options)
    for name in ("masked", "weights", "output", "lse"):
        assert_same_bits(after[name], before[name])
    assert_agrees(after, sdpa(q, k, v, backend=backend, **EXTRAS, **options))


@pytest.mark.parametrize("value", [np.nan, INF, -INF])
@pytest.mark.parametrize("which", ["k", "v"])
def test_an_allowed_key_is(which, value, backend, rng):
    q, k, v = (rng.standard_normal((5, 4), np.float32) for _ in range(3))
    (k if which == "k" else v)[2, 1] = value
    q[:, 1] = np.abs(q[:, 1])
    steps = trace(q, k, v, causal=True)
    assert_agrees(steps, sdpa(q, k, v, causal=True, backend=backend, **EXTRAS))
    assert np.isfinite(steps["output"][:2]).all()


def test_large_numbers(backend):
    """The scale meets Q before the product: scores overflow, scaled does not, and no warning."""
    q = k = np.full((2, 4), 2e19, np.float32)
    v = np.float32([[1], [3]])
    steps = trace(q, k, v, scale=1e-20)
    assert np.isinf(steps["scores"]).all()
    assert np.isfinite(steps["scaled"]).all()
    assert steps["output"].tolist() == [[2], [2]]
    assert_agrees(steps, sdpa(q, k, v, scale=1e-20, backend=backend, **EXTRAS))


def test_out(rng):
    q, k, v = draw(rng)
    expected = trace(q, k, v)["output"]
    out = np.empty((2, 4, 5, 6), np.float32)[..., ::2]
    assert trace(q, k, v, out=out)["output"] is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": np.zeros((5, 6), int)}, TypeError, "mask has dtype int64"),
        ({"window": 3}, ValueError, "window is 3"),
        ({"kv_lengths": [7, 1]}, ValueError, "kv_lengths holds 7"),
        ({"backend": "none"}, ValueError, "backend is 'none'"),
        ({"threads": 0}, ValueError, "threads is 0"),
        ({"return_lse": True}, TypeError, "return_lse"),
    ],
)
def test_rejects(options, error, message, rng):
    """The front door is that of the fast function."""
    with pytest.raises(error, match=message):
        trace(*draw(rng), **options)


# ---- with projections ---------------------------------------------------------------------------

LAYER_STEPS = [*STEPS[:-2], "heads", "output", "lse"]


def weights(rng, d_in, d_ctx, w_o=True):
    """Of H 4, Hkv 2, D 8, Dv 3 and d_out 7."""
    shapes = {"w_q": (d_in, 32), "w_k": (d_ctx, 16), "w_v": (d_ctx, 6), "b_q": (32,), "b_v": (6,)}
    if w_o:
        shapes |= {"w_o": (12, 7), "b_o": (7,)}
    drawn = {name: rng.standard_normal(shape, np.float32) / 4 for name, shape in shapes.items()}
    return drawn | {"num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize("lead", [(), (2,), (3, 2)], ids=str)
@pytest.mark.parametrize("w_o", [False, True])
def test_trace_self(w_o, lead, backend, rng):
    w = weights(rng, 9, 9, w_o)
    x = rng.standard_normal((*lead, 5, 9), np.float32)
    batch = lead[:1]
    options = {"causal": True, "softcap": 2.0, "q_lengths": np.full(batch, 4),
               "kv_lengths": np.full(batch, 4), "alibi_slopes": SLOPES}  # fmt: skip
    steps = trace_self(x, **w, **options)
    assert list(steps) == ["X", *LAYER_STEPS]
    assert_same_bits(steps["X"], x)
    q = (x @ w["w_q"] + w["b_q"]).reshape(*lead, 5, 4, 8).swapaxes(-3, -2)
    np.testing.assert_allclose(steps["Q"], q, atol=1e-5)
    assert steps["V"].shape == (*lead, 2, 5, 3)
    assert steps["masked"].shape == (*lead, 4, 5, 5)
    assert steps["heads"].shape == (*lead, 4, 5, 3)
    assert_agrees(steps, qkv_ext.self_attention(x, **w, backend=backend, **EXTRAS, **options))


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_trace_cross(lead, backend, rng):
    w = weights(rng, 9, 11)
    x_dec, x_enc = (rng.standard_normal((*lead, *s), np.float32) for s in ((5, 9), (6, 11)))
    options = {"mask": MASK, "sinks": SLOPES}
    steps = trace_cross(x_dec, x_enc, **w, **options)
    assert list(steps) == ["X_dec", "X_enc", *LAYER_STEPS]
    results = qkv_ext.cross_attention(x_dec, x_enc, **w, backend=backend, **EXTRAS, **options)
    assert_agrees(steps, results)
    out = np.empty((*lead, 5, 7), np.float32)
    assert trace_cross(x_dec, x_enc, **w, out=out, **options)["output"] is out
    assert_same_bits(out, steps["output"])


def test_trace_of_a_layer_rejects(rng):
    w = weights(rng, 9, 11)
    x_dec, x_enc = np.zeros((5, 9), np.float32), np.zeros((6, 11), np.float32)
    with pytest.raises(ValueError, match=r"x_enc has shape \(5, 9\)"):
        trace_cross(x_dec, x_dec, **w)
    with pytest.raises(ValueError, match=r"x has shape \(6, 11\)"):
        trace_self(x_enc, **w)
    with pytest.raises(TypeError, match=r"^trace_cross.. got an unexpected .* 'layout'; expected"):
        trace_cross(x_dec, x_enc, **w, layout="blhd")
    with pytest.raises(ValueError, match="backend is 'none'"):
        trace_cross(x_dec, x_enc, **w, backend="none")
