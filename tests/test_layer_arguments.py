"""A layer's norms of Q and K, its own scale and sinks, values of another sequence, packed batches,
and positions: each against the layer made of its parts by hand, in float64 where NumPy computes."""

import copy
import pickle
from itertools import pairwise

import numpy as np
import oracle
import pytest
from tolerance import assert_same, assert_same_bits

import qkv_ext
from qkv_ext import KVCache, MultiHeadAttention, cross_attention, rotary_tables

H, HKV, D, DV, D_IN = 4, 2, 8, 5, 12
HEADS = {"num_heads": H, "num_kv_heads": HKV}
TABLES = rotary_tables(40, D)


def weights(rng, d_v=D_IN):
    shapes = {"w_q": (D_IN, H * D), "w_k": (D_IN, HKV * D), "w_v": (d_v, HKV * DV),
              "w_o": (H * DV, 9), "b_q": (H * D,), "b_o": (9,)}  # fmt: skip
    return {n: (rng.standard_normal(s) / s[0] ** 0.5).astype("f4") for n, s in shapes.items()}


def norm(x, w, eps, heads):
    """RMS norm of (..., heads, L, D): of each head, or of all heads side by side."""
    if w is None:
        return x
    if w.shape != x.shape[-1:]:
        flat = x.swapaxes(-3, -2).reshape(*x.shape[:-3], x.shape[-2], -1)
        flat = norm(flat, w, eps, heads)
        return flat.reshape(*flat.shape[:-1], heads, -1).swapaxes(-3, -2)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * w


def turn(x, cos, sin):
    """Half-split rotary of (..., L, D) by tables (..., L, D / 2)."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def by_hand(w, x, context=None, values=None, q_norm=None, k_norm=None, eps=1e-6, turned=None,
            **options):  # fmt: skip
    """The layer of its parts, in float64; turned are the tables of Q and those of K."""
    context = x if context is None else context
    values = context if values is None else values
    q, k, v = (
        (y.astype("f8") @ w[f"w_{p}"] + w.get(f"b_{p}", 0))
        .reshape(*y.shape[:-1], n, -1)
        .swapaxes(-3, -2)
        for y, p, n in ((x, "q", H), (context, "k", HKV), (values, "v", HKV))
    )
    q, k = norm(q, q_norm, eps, H), norm(k, k_norm, eps, HKV)
    if turned is not None:
        q, k = turn(q, *turned[0]), turn(k, *turned[1])
    output = oracle.attention(q, k, v, **options)[0].swapaxes(-3, -2)
    return output.reshape(*output.shape[:-2], H * DV) @ w["w_o"] + w["b_o"]


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=5e-6, rtol=1e-5)


NORMS = {
    "per head": {"q_norm": (D,), "k_norm": (D,)},
    "whole width": {"q_norm": (H * D,), "k_norm": (HKV * D,)},
    "queries": {"q_norm": (D,)},
    "keys, whole width": {"k_norm": (HKV * D,)},
}


@pytest.fixture(params=NORMS, ids=NORMS)
def norms(request, rng):
    return {n: rng.uniform(0.5, 2, s).astype("f4") for n, s in NORMS[request.param].items()}


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_norms(norms, lead, backend, rng):
    w, x = weights(rng), rng.standard_normal((*lead, 7, D_IN), np.float32)
    cos, sin = (x[:7] for x in TABLES)
    mha = MultiHeadAttention(**w, **HEADS, **norms, norm_eps=0.25)
    options = {"causal": True, "backend": backend}
    full = (x if lead else x[None],)
    expected = by_hand(w, *full, **norms, eps=0.25, turned=[(cos, sin)] * 2, causal=True)
    expected = expected if lead else expected[0]
    actual = mha(x, rotary=TABLES, **options)
    close(actual, expected)
    assert np.abs(mha(x, **options) - expected).max() > 1e-2  # rotary comes after the norms
    other = MultiHeadAttention(**w, **HEADS, **norms, norm_eps=1e-6)
    assert np.abs(other(x, rotary=TABLES, **options) - expected).max() > 1e-2
    kv = mha.project_kv(x, backend=backend)
    assert_same(mha(x, kv=kv, rotary=TABLES, **options), actual, backend)
    for twin in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha))):
        assert_same_bits(twin(x, rotary=TABLES, **options), actual)
        assert repr(twin) == repr(mha)


def test_norms_with_a_cache(norms, backend, rng):
    """Whole, in pieces, and one by one: decode steps have the bits of the whole."""
    w, x = weights(rng), rng.standard_normal((2, 9, D_IN), np.float32)
    mha = MultiHeadAttention(**w, **HEADS, **norms)
    whole = mha(x, rotary=TABLES, causal=True, backend=backend)
    for pieces in ([9], [4, 5], [1] * 9, [3, 1, 1, 4]):
        cache, made = KVCache(2, HKV, D, DV), []
        for start, n in zip(np.cumsum([0, *pieces]), pieces, strict=False):
            part = x[:, start : start + n]
            made.append(mha(part, cache=cache, rotary=TABLES, causal=True, backend=backend))
        close(np.concatenate(made, axis=1), whole)
    cache = KVCache(2, HKV, D, DV)
    mha(x[:, :8], cache=cache, rotary=TABLES, causal=True, backend=backend)
    twin = cache.fork()
    quick = mha(x[:, 8:], cache=cache, rotary=TABLES, backend=backend)
    general = mha(x[:, 8:], cache=twin, rotary=TABLES, mask=np.ones((1, 9), bool), backend=backend)
    close(quick, general)
    assert_same(cache.keys(0), twin.keys(0), backend)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_norms_in_other_dtypes(dtype, norms, rng):
    w, x = weights(rng), rng.standard_normal((2, 5, D_IN))
    cast = {name: array.astype(dtype) for name, array in (w | norms).items()}
    mha = MultiHeadAttention(**cast, **HEADS)
    actual = mha(x.astype(dtype), backend="numpy" if dtype == "float64" else None)
    assert actual.dtype == dtype
    w = {name: cast[name].astype("f8") for name in w}
    own = {name: cast[name].astype("f8") for name in norms}
    expected = by_hand(w, x.astype(dtype).astype("f8"), **own)
    np.testing.assert_allclose(actual, expected, atol=1e-2 if dtype == "float16" else 1e-12)
    assert_same_bits(pickle.loads(pickle.dumps(mha))(x.astype(dtype), backend="numpy"),
                     mha(x.astype(dtype), backend="numpy"))  # fmt: skip


def test_own_scale_and_sinks(backend, rng):
    w, x = weights(rng), rng.standard_normal((2, 5, D_IN), np.float32)
    sinks, plain = rng.standard_normal(H).astype("f4"), MultiHeadAttention(**w, **HEADS)
    own = MultiHeadAttention(**w, **HEADS, scale=0.3, sinks=sinks)
    of_call = {"scale": 0.3, "sinks": sinks}
    assert_same_bits(own(x, backend=backend), plain(x, **of_call, backend=backend))
    other = {"scale": np.float32(-0.5), "sinks": sinks + 1}  # which a call's options replace
    assert_same_bits(own(x, **other, backend=backend), plain(x, **other, backend=backend))
    assert np.abs(own(x, backend=backend) - plain(x, backend=backend)).max() > 1e-3
    caches = [KVCache(2, HKV, D, DV) for _ in range(2)]
    for part in (x[:, :3], x[:, 3:4], x[:, 4:]):
        assert_same_bits(
            own(part, cache=caches[0], causal=True, backend=backend),
            plain(part, cache=caches[1], causal=True, **of_call, backend=backend),
        )
    before = own(x, backend=backend)
    close(before, by_hand(w, x, **of_call))
    sinks[:] = 7  # the layer has its own
    assert_same_bits(own(x, backend=backend), before)
    only = MultiHeadAttention(**w, **HEADS, scale=0.0)
    assert_same_bits(only(x, backend=backend), plain(x, scale=0.0, backend=backend))
    assert "scale=0.3, sinks=True" in repr(own)
    assert "scale=0.0)" in repr(only)
    assert "scale" not in repr(plain)


def test_values_of_their_own(backend, rng):
    """nn.MultiheadAttention with vdim, and DETR, whose values have no positions in them."""
    w, wide = weights(rng), weights(rng, d_v=7)
    x, context = rng.standard_normal((2, 4, D_IN), "f4"), rng.standard_normal((2, 6, D_IN), "f4")
    values, other = rng.standard_normal((2, 6, D_IN), "f4"), rng.standard_normal((2, 6, 7), "f4")
    for own, given in ((w, values), (wide, other)):
        mha = MultiHeadAttention(**own, **HEADS)
        expected = by_hand(own, x, context, given)
        actual = mha(x, context, value_context=given, backend=backend)
        close(actual, expected)
        kv = mha.project_kv(context, value_context=given, backend=backend)
        assert_same(mha(x, kv=kv, backend=backend), actual, backend)
        actual = cross_attention(x, context, **own, **HEADS, x_enc_v=given, backend=backend)
        close(actual, expected)
        own_length = given[:, :4]
        expected = by_hand(own, x, x, own_length, causal=True)
        close(mha(x, value_context=own_length, causal=True, backend=backend), expected)
        cache, made = KVCache(2, HKV, D, DV), []
        for i in range(4):
            rows = slice(i, i + 1)
            made.append(mha(x[:, rows], value_context=own_length[:, rows], cache=cache,
                            backend=backend))  # fmt: skip
        close(np.concatenate(made, axis=1), expected)
        assert pickle.loads(pickle.dumps(mha))._layer.weights["v"].shape == own["w_v"].shape


CU = {"three": [0, 3, 3, 8, 9], "one": [0, 9], "none": [0]}


@pytest.mark.parametrize("rotary", [None, TABLES], ids=["", "rotary"])
@pytest.mark.parametrize("cu", CU.values(), ids=CU)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 0), "softcap": 3.0}],
                         ids=str)  # fmt: skip
def test_packed_batch(options, cu, rotary, backend, rng):
    w, total = weights(rng), cu[-1]
    x = rng.standard_normal((total, D_IN), np.float32)
    norms = {"q_norm": np.full(D, 0.5, "f4"), "k_norm": np.full(HKV * D, 2, "f4")}
    mha = MultiHeadAttention(**w, **HEADS, **norms)
    how = options | {"rotary": rotary, "backend": backend}
    actual, lse = mha(x, cu_seqlens=cu, return_lse=True, **how)
    assert actual.shape == (total, 9)
    assert lse.shape == (total, H)
    out = np.empty_like(actual)
    assert mha(x, cu_seqlens=np.array(cu, "i4"), out=out, **how) is out
    assert_same_bits(out, actual)
    kv = mha.project_kv(x, backend=backend)
    again = mha(x, kv=kv, cu_seqlens=cu, cu_seqlens_context=cu, **how)
    assert_same(again, actual, backend)
    for first, last in pairwise(cu):
        alone, own = mha(x[first:last], return_lse=True, **how)
        assert_same(actual[first:last], alone, backend)
        assert_same(lse[first:last], own.T, backend)


def test_packed_context(backend, rng):
    w, cu_q, cu_k = weights(rng, d_v=7), [0, 2, 2, 7], [0, 4, 6, 15]
    x, context = rng.standard_normal((7, D_IN), "f4"), rng.standard_normal((15, D_IN), "f4")
    values = rng.standard_normal((15, 7), "f4")
    mha = MultiHeadAttention(**w, **HEADS)
    how = {"rotary": TABLES, "causal": True, "backend": backend}
    actual = mha(x, context, value_context=values, cu_seqlens=cu_q, cu_seqlens_context=cu_k, **how)
    shorter = mha(x, context, value_context=values, cu_seqlens=cu_q, cu_seqlens_context=cu_k,
                  kv_lengths=[3, 0, 9], **how)  # fmt: skip
    for n, lengths in enumerate([(4, 3), (2, 0), (9, 9)]):
        rows, keys = slice(*cu_q[n : n + 2]), slice(*cu_k[n : n + 2])
        own = {"value_context": values[keys]}
        assert_same(actual[rows], mha(x[rows], context[keys], **own, **how), backend)
        alone = mha(x[rows], context[keys], **own, kv_lengths=lengths[1], **how)
        assert_same(shorter[rows], alone, backend)


@pytest.mark.parametrize("interleaved", [False, True])
def test_positions(interleaved, backend, rng):
    """Left padding, packed prompts: rows stand where the caller says, and causal goes by index."""
    w, x = weights(rng), rng.standard_normal((2, 5, D_IN), np.float32)
    mha = MultiHeadAttention(**w, **HEADS, q_norm=np.ones(D, "f4"))
    how = {"rotary": TABLES, "causal": True, "interleaved": interleaved, "backend": backend}
    plain = mha(x, **how)
    for same in (np.arange(5), np.arange(5)[None].repeat(2, 0), list(range(5))):
        assert_same(mha(x, positions=same, **how), plain, backend)
    close(mha(x, positions=np.arange(5) + 30, **how), plain)  # distances alone matter
    at = np.array([[0, 0, 1, 2, 3], [7, 5, 39, 0, 1]], np.int32)
    actual = mha(x, positions=at, **how)
    if not interleaved:
        own = [tuple(x[at][:, None] for x in TABLES)] * 2
        close(actual, by_hand(w, x, q_norm=np.ones(D), turned=own, causal=True))
    for n in range(2):
        assert_same(mha(x[n], positions=at[n], **how), actual[n], backend)
        packed = mha(x.reshape(10, D_IN), positions=at.ravel(), cu_seqlens=[0, 5, 10], **how)
        assert_same(packed.reshape(actual.shape), actual, backend)
    cache = KVCache(2, HKV, D, DV)
    made = [mha(x[:, i : i + 1], positions=at[:, i : i + 1], cache=cache, **how) for i in range(5)]
    close(np.concatenate(made, axis=1), actual)
    padded = np.where(np.arange(5) < [[5], [2]], at, 1 << 40)  # padding stands nowhere
    lengths = {"q_lengths": [5, 2], "kv_lengths": [5, 2]}
    assert_same(
        mha(x, positions=padded, **lengths, **how), mha(x, positions=at, **lengths, **how), backend
    )
    of_context = mha(x, x, positions=np.arange(5), **how)  # keys stand at 0 to S - 1
    assert_same(of_context, plain, backend)
    moved = mha(x, x, positions=np.arange(5) + 2, **how)
    assert np.abs(moved - plain).max() > 1e-3


def test_positions_on_several_axes(backend, rng):
    """Qwen 2-VL: pairs are parted among time, height and width."""
    w, x = weights(rng), rng.standard_normal((2, 5, D_IN), np.float32)
    mha, sections = MultiHeadAttention(**w, **HEADS), [1, 2, 1]
    how = {"rotary": TABLES, "backend": backend, "rotary_sections": sections}
    at = rng.integers(0, 40, (3, 2, 5))
    tables = [np.stack([t[at[axis], pair] for pair, axis in enumerate([0, 1, 1, 2])], -1)[:, None]
              for t in TABLES]  # fmt: skip
    actual = mha(x, positions=at, **how)
    close(actual, by_hand(w, x, turned=[tables] * 2))
    assert_same(mha(x[1], positions=at[:, 1], **how), actual[1], backend)
    same = np.broadcast_to(np.arange(5), (3, 2, 5))  # text
    assert_same(mha(x, positions=same, **how), mha(x, rotary=TABLES, backend=backend), backend)
    one = mha(x, positions=at[:, 0], **how)
    assert_same(one, mha(x, positions=at[:, [0, 0]], **how), backend)
    cache = KVCache(2, HKV, D, DV)
    made = [mha(x[:, i : i + 1], positions=at[..., i : i + 1], cache=cache, **how)
            for i in range(5)]  # fmt: skip
    close(np.concatenate(made, axis=1), mha(x, positions=at, causal=True, **how))


def test_a_failed_step_leaves_the_cache(backend, rng):
    w, x = weights(rng), rng.standard_normal((2, 5, D_IN), np.float32)
    mha, cache = MultiHeadAttention(**w, **HEADS), KVCache(2, HKV, D, DV)
    for wrong in ({"positions": [40] * 5}, {"positions": [0] * 4}, {"value_context": x[:, :4]}):
        with pytest.raises(ValueError, match=r"positions|value_context"):
            mha(x, cache=cache, rotary=TABLES, backend=backend, **wrong)
        assert cache.lengths.tolist() == [0, 0]


def test_bits_do_not_depend_on_the_batch(backend, rng):
    w, x = weights(rng), rng.standard_normal((6, 7, D_IN), np.float32)
    mha = MultiHeadAttention(**w, **HEADS, q_norm=np.ones(D, "f4"), k_norm=np.ones(D, "f4"))
    options = {"rotary": TABLES, "causal": True, "backend": backend}
    whole = mha(x, threads=2, **options)
    for n in range(6):
        assert_same(mha(x[n], threads=1, **options), whole[n], backend)
    assert qkv_ext.backends()
