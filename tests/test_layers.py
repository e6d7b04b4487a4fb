"""MultiHeadAttention with the options of attention, and what becomes of its weights."""

import copy
import pickle

import numpy as np
import pytest
from tolerance import assert_same, assert_same_bits

import qkv_ext
from qkv_ext import MultiHeadAttention, cross_attention, self_attention

sdpa = qkv_ext.scaled_dot_product_attention
EXTRAS = {"return_weights": True, "return_lse": True}


def draw(rng, biases=True, dtype=np.float32):
    """The arguments of a layer: d_in 12, H 4, Hkv 2, D 8, Dv 5, d_out 9."""
    shapes = {"w_q": (12, 32), "w_k": (12, 16), "w_v": (12, 10), "w_o": (20, 9)}
    if biases:
        shapes |= {"b_q": (32,), "b_k": (16,), "b_v": (10,), "b_o": (9,)}
    return {
        name: (rng.standard_normal(shape) / shape[0] ** 0.5).astype(dtype)
        for name, shape in shapes.items()
    }


HEADS = {"num_heads": 4, "num_kv_heads": 2}


def by_hand(w, x, context, **options):
    """(output, weights, lse) of attention between projections that NumPy computes."""
    q, k, v = (
        (y @ w[f"w_{p}"] + w[f"b_{p}"]).reshape(*y.shape[:-1], n, -1).swapaxes(-3, -2)
        for y, p, n in ((x, "q", 4), (context, "k", 2), (context, "v", 2))
    )
    output, weights, lse = sdpa(q, k, v, **EXTRAS, **options)
    output = output.swapaxes(-3, -2)
    output = output.reshape(*output.shape[:-2], 20) @ w["w_o"] + w["b_o"]
    for item, length in zip(output, options.get("q_lengths", ()), strict=False):
        item[..., length:, :] = 0  # padding is no row, and has no bias
    return output, weights, lse


SLOPES = np.float32([0.5, 0.25, 0.125, 0.0625])
OPTIONS = {
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "alibi per item": {"alibi_slopes": np.stack([SLOPES, 2 * SLOPES, 0 * SLOPES])},
    "sinks": {"sinks": SLOPES},
    "lengths": {"q_lengths": [7, 2, 0], "kv_lengths": np.uint8([7, 3, 0])},
    "lengths, causal": {"q_lengths": [7, 2, 4], "kv_lengths": [7, 2, 4], "causal": True},
    "top-left": {"q_lengths": [7, 2, 4], "kv_lengths": [7, 7, 4], "causal": True,
                 "align": "top-left"},
    "query_offset": {"query_offset": 3, "causal": True, "window": (3, None)},
    "query_offset per item": {"query_offset": [3, -2, 0], "causal": True},
    "key_offset": {"key_offset": -2, "causal": True},
    "all": {"query_offset": [3, 1, 0], "key_offset": 1, "causal": True, "window": (4, 4),
            "softcap": 2.0, "sinks": SLOPES, "alibi_slopes": SLOPES, "scale": 0.3,
            "mask": np.arange(7) != 4, "q_lengths": [5, 7, 3], "kv_lengths": [6, 7, 7]},
}  # fmt: skip
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_option
@pytest.mark.parametrize("more", [(), (2,)], ids=str)
def test_options(more, options, backend, rng):
    """Each option of attention is one of the layer; lengths go with the first axis of x."""
    w = draw(rng)
    x = rng.standard_normal((3, *more, 7, 12), np.float32)
    expected = by_hand(w, x, x, backend=backend, **options)
    mha = MultiHeadAttention(**w, **HEADS)
    calls = [mha(x, **EXTRAS, backend=backend, **options),
             mha(x, kv=mha.project_kv(x, backend=backend), **EXTRAS, backend=backend, **options),
             self_attention(x, **w, **HEADS, **EXTRAS, backend=backend, **options)]  # fmt: skip
    for call in calls:
        for actual, right in zip(call, expected, strict=True):
            np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("more", [(), (2,)], ids=str)
def test_padding_has_no_bias(more, dtype, backend, rng):
    """Rows past q_lengths are no rows: 0, where W_O would make b_o of them, or NaN."""
    w = draw(rng, dtype=dtype)
    x = rng.standard_normal((4, *more, 7, 12), np.float32).astype(dtype)
    mha, lengths = MultiHeadAttention(**w, **HEADS), [7, 2, 0, 5]
    options = {"q_lengths": lengths, "kv_lengths": [7, 3, 4, 0], "backend": backend}
    whole = mha(x, backend=backend, kv_lengths=options["kv_lengths"], query_offset=[0, 1, 4, -5])
    out = np.full((4, *more, 9, 7), np.nan, dtype).swapaxes(-1, -2)
    calls = [
        mha(x, **options),
        mha(x, x, **options),
        mha(x, kv=mha.project_kv(x, backend=backend), **options, return_lse=True)[0],
        mha(x, **options, out=out),
        mha(x, **{**options, "q_lengths": np.uint8(lengths)}),
        self_attention(x, **w, **HEADS, **options),
        cross_attention(x, x, **w, **HEADS, **options),
        qkv_ext.trace_self(x, **w, **HEADS, **{**options, "backend": None})["output"],
    ]
    assert calls[3] is out
    for output in calls:
        for item, n, expected in zip(output, lengths, whole, strict=True):
            assert_same_bits(item[..., n:, :], np.zeros_like(item[..., n:, :]))
            near = 1e-5 if dtype == "float32" else 2e-3
            np.testing.assert_allclose(item[..., :n, :], expected[..., :n, :], near, near)
    assert_same_bits(calls[0][3, ..., :5, :], np.broadcast_to(w["b_o"], (*more, 5, 9)))  # no keys

    w["w_o"][:, 4] = np.nan
    spoilt = MultiHeadAttention(**w, **HEADS)(x, **options)
    assert not spoilt[1, ..., 2:, :].any()
    assert np.isnan(spoilt[1, ..., :2, 4]).all()


@pytest.mark.parametrize("axes", [(1, 0, 2, 3), (2, 0, 1, 3), (2, 1, 0, 3)], ids=str)
def test_padding_has_no_bias_in_an_out_that_no_reshape_can_flatten(axes, backend, rng):
    """Its leading axes have no one stride: what clears the padding must not clear a copy."""
    w, lengths = draw(rng), [7, 2, 0, 5]
    x = rng.standard_normal((4, 2, 7, 12), np.float32)
    mha, options = MultiHeadAttention(**w, **HEADS), {"q_lengths": lengths, "backend": backend}
    expected = mha(x, **options)
    laid_out = np.full([expected.shape[n] for n in axes], np.nan, "f4")
    out = laid_out.transpose(np.argsort(axes))
    assert mha(x, out=out, **options) is out
    assert_same_bits(out, expected)


def test_padding_of_items_that_share_one_sequence(backend, rng):
    w, lengths = draw(rng), [3, 1, 2]
    mha = MultiHeadAttention(**w, **HEADS)
    x, context = (rng.standard_normal(n, np.float32) for n in ((1, 3, 12), (3, 7, 12)))
    output = mha(x, context, q_lengths=lengths, backend=backend)
    assert output.shape == (3, 3, 9)
    for item, n in zip(output, lengths, strict=True):
        assert not item[n:].any()
        assert item[:n].all()


def of_item(options, item):
    """The options of one item alone, for x (L, d_in)."""
    per_item = ("q_lengths", "kv_lengths", "query_offset")
    alone = {
        name: value[item] if name in per_item and np.ndim(value) else value
        for name, value in options.items()
    }
    if np.ndim(alone.get("alibi_slopes")) == 2:
        alone["alibi_slopes"] = alone["alibi_slopes"][item]
    return alone


@every_option
def test_one_sequence(options, backend, rng):
    """Of x (L, d_in) lengths and query_offset are integers, and the result that of the item."""
    w = draw(rng)
    x = rng.standard_normal((3, 7, 12), np.float32)
    mha = MultiHeadAttention(**w, **HEADS)
    batch = mha(x, **EXTRAS, backend=backend, **options)
    for item in range(3):
        alone = of_item(options, item)
        results = mha(x[item], **EXTRAS, backend=backend, **alone)
        crossed = cross_attention(
            x[item], x[item], **w, **HEADS, **EXTRAS, backend=backend, **alone
        )
        for each, other, whole in zip(results, crossed, batch, strict=True):
            assert_same(each, whole[item], backend)
            assert_same(other, whole[item], backend)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"q_lengths": [5]}, ValueError, r"q_lengths has shape \(1,\); expected an integer"),
        ({"kv_lengths": [5]}, ValueError, r"kv_lengths has shape \(1,\); expected an integer"),
        ({"query_offset": [5]}, ValueError, r"query_offset has shape \(1,\); expected an integer"),
        ({"q_lengths": 6}, ValueError, "q_lengths holds 6; expected 0 to 5"),
        ({"kv_lengths": -1}, ValueError, "kv_lengths holds -1; expected 0 to 5"),
        ({"kv_lengths": 2.0}, TypeError, "kv_lengths has dtype float64"),
        ({"q_lengths": True}, TypeError, "q_lengths has dtype bool"),
        ({"layout": "blhd"}, TypeError, "got an unexpected keyword argument 'layout'"),
    ],
)
def test_one_sequence_rejects(options, error, message, rng):
    mha = MultiHeadAttention(**draw(rng), **HEADS)
    with pytest.raises(error, match=message):
        mha(np.zeros((5, 12), np.float32), **options)


def test_padding_is_not_felt(backend, rng):
    """Right-padded causal self-attention is each item alone, whatever the padding holds."""
    mha = MultiHeadAttention(**draw(rng), **HEADS)
    x = rng.standard_normal((3, 7, 12), np.float32)
    lengths = [7, 3, 1]
    for item, n in enumerate(lengths):
        x[item, n:] = np.nan
    output = mha(x, causal=True, q_lengths=lengths, kv_lengths=lengths, backend=backend)
    for item, n in enumerate(lengths):
        assert_same(output[item, :n], mha(x[item, :n], causal=True, backend=backend), backend)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_types(name, backend, rng):
    """Every step of a layer is rounded to the dtype of its weights."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)
    w = draw(rng, dtype=dtype)
    x = rng.standard_normal((3, 7, 12)).astype(dtype)
    mask = np.float32([0, 0, -1e9, 0, 1e-3, 0, 0])  # a mask has a dtype of its own
    options = {"mask": mask, "causal": True, "rotary": qkv_ext.rotary_tables(7, 8)}
    output, weights, lse = MultiHeadAttention(**w, **HEADS)(x, **EXTRAS, backend=backend, **options)
    assert (output.dtype, weights.dtype, lse.dtype) == (dtype, dtype, np.float32)
    w = {part: each.astype(np.float32) for part, each in w.items()}
    wide = MultiHeadAttention(**w, **HEADS)(x.astype(np.float32), backend=backend, **options)
    unit = 2.0**-10 if name == "float16" else 2.0**-7
    assert np.abs(output.astype(np.float32) - wide).max() < 4 * unit * np.abs(wide).max()


def test_a_layer_owns_its_weights(backend, rng):
    """What the caller does to the arrays later changes nothing, biases included."""
    w = draw(rng)
    x = rng.standard_normal((3, 7, 12), np.float32)
    mha = MultiHeadAttention(**w, **HEADS)
    expected = mha(x, backend=backend)
    for each in w.values():
        each[...] = np.nan
    assert_same(mha(x, backend=backend), expected, backend)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("full", [False, True])
def test_pickling(full, protocol, backend, rng):
    w = draw(rng, biases=full)
    if not full:
        del w["w_o"]
    x = rng.standard_normal((3, 7, 12), np.float32)
    mha = MultiHeadAttention(**w, **HEADS)
    again = pickle.loads(pickle.dumps(mha, protocol))
    assert repr(again) == repr(mha)
    assert_same(again(x, backend=backend), mha(x, backend=backend), backend)
    assert_same(copy.deepcopy(mha)(x, backend=backend), mha(x, backend=backend), backend)


def test_pickling_of_no_inputs(backend):
    """d_in = 0: the weights hold nothing, the biases are all there is."""
    w = np.zeros((0, 8), np.float32)
    mha = MultiHeadAttention(w, w, w, b_v=np.arange(8, dtype="f4"), num_heads=2)
    x = np.zeros((2, 3, 0), np.float32)
    expected = np.broadcast_to(np.arange(8, dtype="f4"), (2, 3, 8))
    for layer in (mha, pickle.loads(pickle.dumps(mha))):
        np.testing.assert_allclose(layer(x, backend=backend), expected)


@pytest.mark.parametrize(
    "shape", [(0, 7, 12), (3, 0, 12), (0, 0, 12), (0, 12), (2, 0, 7, 12)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "rotary": qkv_ext.rotary_tables(7, 8)}])
def test_sizes_of_zero(options, shape, backend, rng):
    w = draw(rng)
    mha = MultiHeadAttention(**w, **HEADS)
    x = np.zeros(shape, np.float32)
    lengths = np.full(shape[: len(shape) > 2], shape[-2])
    for more in ({}, {"q_lengths": lengths, "kv_lengths": lengths}):
        output, weights, lse = mha(x, **EXTRAS, backend=backend, **options, **more)
        assert output.shape == (*shape[:-1], 9)
        assert weights.shape == (*shape[:-2], 4, shape[-2], shape[-2])
        assert lse.shape == weights.shape[:-1]
    context = np.zeros((*shape[:-2], 5, 12), np.float32)
    assert mha(x, context, backend=backend).shape == (*shape[:-1], 9)
    nothing = mha(context, x, backend=backend)
    assert nothing.shape == (*shape[:-2], 5, 9)
    if shape[-2] == 0:
        assert_same_bits(nothing, np.broadcast_to(w["b_o"], nothing.shape))
