"""Rotary embedding inside a layer: which position each query and each key is turned by."""

import numpy as np
import pytest
from tolerance import assert_same

from qkv_ext import (
    MultiHeadAttention,
    apply_rotary,
    rotary_tables,
    scaled_dot_product_attention,
)

COS = np.zeros((6, 4), np.float32)
D, HEADS = 8, {"num_heads": 4, "num_kv_heads": 2}


def draw(rng):
    w_q, w_k, w_v, w_o = (
        rng.standard_normal(shape, np.float32) / 4
        for shape in ((12, 32), (12, 16), (12, 16), (32, 9))
    )
    return w_q, w_k, w_v, w_o


def by_hand(w, x, context, at_q, at_k, how, **options):
    """The layer of its parts: projections, heads, rotary at these positions, attention, W_O."""
    q, k, v = (
        (y @ each).reshape(*y.shape[:-1], each.shape[1] // D, D).swapaxes(-3, -2)
        for y, each in zip((x, context, context), w[:3], strict=True)
    )
    tables, rest = how["rotary"], {n: how[n] for n in ("interleaved", "rotary_dim") if n in how}
    q = apply_rotary(q, *tables, positions=at_q, backend="numpy", **rest)
    k = apply_rotary(k, *tables, positions=at_k, backend="numpy", **rest)
    output = scaled_dot_product_attention(q, k, v, **options).swapaxes(-3, -2)
    return output.reshape(*output.shape[:-2], 32) @ w[3]


HOW = {
    "half": {"rotary": rotary_tables(30, D)},
    "interleaved": {"rotary": rotary_tables(30, D), "interleaved": True},
    "partial": {"rotary": rotary_tables(30, 4), "rotary_dim": 4},
    "a list": {"rotary": list(rotary_tables(30, D, base=100.0))},
}
every_how = pytest.mark.parametrize("how", HOW.values(), ids=HOW)


@every_how
@pytest.mark.parametrize("lead", [(1,), (3,), (3, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_layer(causal, lead, how, backend, rng):
    w = draw(rng)
    x = rng.standard_normal((*lead, 7, 12), np.float32)
    mha = MultiHeadAttention(*w, **HEADS)
    options = {"causal": causal, "backend": backend}
    i = np.arange(7)
    expected = by_hand(w, x, x, i, i, how, **options)
    np.testing.assert_allclose(mha(x, **how, **options), expected, atol=1e-5)
    plain = mha(x, **options)
    assert np.abs(plain - expected).max() > 1e-2
    if lead == (1,):  # and x (L, d_in)
        np.testing.assert_allclose(mha(x[0], **how, **options), expected[0], atol=1e-5)
    kv = mha.project_kv(x, backend=backend)
    assert_same(mha(x, kv=kv, **how, **options), mha(x, **how, **options), backend)


@every_how
def test_layer_positions(how, backend, rng):
    """Queries start at query_offset or where align puts them, keys at key_offset."""
    w = draw(rng)
    x, context = rng.standard_normal((3, 4, 12), np.float32), rng.standard_normal((3, 9, 12), "f4")
    mha = MultiHeadAttention(*w, **HEADS)
    i, j = np.arange(4), np.arange(9)
    cases = [
        ({}, i + 5, j),
        ({"align": "top-left"}, i, j),
        ({"key_offset": 3}, i + 5, j + 3),
        ({"query_offset": 20}, i + 20, j),
        ({"query_offset": 20, "key_offset": 11}, i + 20, j + 11),
        ({"query_offset": [3, 0, 26]}, np.array([[3], [0], [26]]) + i, j),
        ({"query_offset": [3, 0, 26], "key_offset": 4}, np.array([[3], [0], [26]]) + i, j + 4),
        ({"kv_lengths": [9, 4, 6], "key_offset": 1}, np.array([[5], [0], [2]]) + i, j + 1),
    ]
    for options, at_q, at_k in cases:
        options |= {"causal": True, "backend": backend}
        expected = by_hand(w, x, context, at_q, at_k, how, **options)
        np.testing.assert_allclose(mha(x, context, **how, **options), expected, atol=1e-5)
    # one x for several items: each has its own positions
    options = {"query_offset": [3, 0, 26], "backend": backend}
    at_q = np.array([[3], [0], [26]]) + i
    expected = by_hand(w, np.repeat(x[:1], 3, 0), context, at_q, j, how, **options)
    np.testing.assert_allclose(mha(x[:1], context, **how, **options), expected, atol=1e-5)
    options = {"query_offset": 11, "q_lengths": 3, "kv_lengths": 8, "backend": backend}
    expected = by_hand(w, x[:1, :3], context[:1, :8], i[:3] + 11, j[:8], how, query_offset=11)
    single = mha(x[0], context[0], **how, **options)
    np.testing.assert_allclose(single[:3], expected[0], atol=1e-5)
    assert not single[3].any()


def test_padding_asks_for_no_position(backend, rng):
    """Rows and keys that are not there need no row of the tables, and change nothing."""
    w = draw(rng)
    mha = MultiHeadAttention(*w, **HEADS)
    x = rng.standard_normal((3, 7, 12), np.float32)
    lengths = np.array([2, 5, 0])
    how = {"rotary": rotary_tables(5, D)}  # 5, not 7
    options = {"causal": True, "backend": backend}
    padded = mha(x, q_lengths=lengths, kv_lengths=lengths, **how, **options)
    for item, n in enumerate(lengths):
        assert_same(padded[item, :n], mha(x[item : item + 1, :n], **how, **options)[0], backend)
        assert not padded[item, n:].any()
    # a step of two rows at most, over keys that are there already
    step = {"q_lengths": [1, 2, 0], "kv_lengths": lengths} | how | options
    output = mha(x[:, 5:], x, **step)
    for item, rows in ((0, 1), (1, 2)):
        n = lengths[item]
        expected = mha(x[item : item + 1, 5 : 5 + rows], x[item : item + 1, :n], **how, **options)
        assert_same(output[item, :rows], expected[0], backend)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rotary": (COS,)}, TypeError, r"rotary is a tuple; expected a pair \(cos, sin\)"),
        ({"rotary": COS}, TypeError, "rotary is a ndarray"),
        ({"rotary": (COS[:, :2], COS)}, ValueError, r"cos has shape \(6, 2\); expected \(n, 4\)"),
        ({"rotary": (COS, COS), "rotary_dim": 4}, ValueError, r"expected \(n, 2\)"),
        ({"rotary": (COS, COS), "query_offset": 2}, ValueError,
         "rotary has 6 rows, but queries stand at positions up to 6"),
        ({"rotary": (COS, COS), "key_offset": 2}, ValueError,
         "rotary has 6 rows, but keys stand at positions up to 6"),
        ({"rotary": (COS, COS), "query_offset": -1}, ValueError,
         "rotary has rows from 0 on, but queries stand at positions from -1 on"),
        ({"interleaved": True}, ValueError, "interleaved is given without rotary"),
        ({"rotary_dim": 4}, ValueError, "rotary_dim is given without rotary"),
        ({"rotary": (COS, COS), "align": "left"}, ValueError, "align is 'left'"),
    ],
)  # fmt: skip
def test_layer_rejects(options, error, message, rng):
    mha = MultiHeadAttention(*draw(rng), **HEADS)
    with pytest.raises(error, match=message):
        mha(np.zeros((2, 5, 12), np.float32), **options)
