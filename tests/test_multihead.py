"""self_attention, cross_attention and MultiHeadAttention against the formula written out."""

import pickle

import numpy as np
import oracle
import pytest
from tolerance import WAYS, allowed_error, assert_same, assert_within, plain_attention

import qkv_ext
from qkv_ext import MultiHeadAttention, PackedWeight, cross_attention, self_attention

F64 = np.float64
PARTS = ("q", "k", "v", "o")


def heads_first(x, heads):
    """(..., L, H·D) -> (..., H, L, D); an x of two axes gets a batch axis of 1 for the oracle."""
    x = x if x.ndim > 2 else x[None]
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).swapaxes(-3, -2)


def formula(x, context, w, b, heads, attend, product, **options):
    """(output, weights, lse) of a layer, with the given attention and product."""
    projected = [
        heads_first(product(source, w[part]) + b.get(part, 0), n)
        for source, part, n in (
            (x, "q", heads[0]),
            (context, "k", heads[1]),
            (context, "v", heads[1]),
        )
    ]
    output, weights, lse = attend(*projected, **options)
    output = output.swapaxes(-3, -2)
    output = output.reshape(*output.shape[:-2], -1)
    if "o" in w:
        output = product(output, w["o"]) + b.get("o", 0)
    return [y[0] if x.ndim == 2 else y for y in (output, weights, lse)]


def assert_layer(results, x, context, w, b, heads, **options):
    """The error rule for the output, the weights and the lse of a layer."""
    wide = {part: each.astype(F64) for part, each in w.items()}
    truth = formula(x.astype(F64), context.astype(F64), wide, b, heads, oracle.attention,
                    np.matmul, **options)  # fmt: skip
    plain = [
        formula(x, context, w, b, heads, lambda *a, way=way, **o: plain_attention(*a, way, **o),
                way[0], **options)
        for way in WAYS
    ]  # fmt: skip
    names = ("output", "weights", "lse")
    for actual, expected, *others, what in zip(results, truth, *plain, names, strict=True):
        assert_within(actual, expected, allowed_error(expected, *others), what)


def draw(rng, d_in, d_ctx, heads, d, dv, d_out=None, biases=False):
    """Weights and biases by part."""
    h, hkv = heads
    shapes = {"q": (d_in, h * d), "k": (d_ctx, hkv * d), "v": (d_ctx, hkv * dv)}
    if d_out is not None:
        shapes["o"] = (h * dv, d_out)
    w = {p: rng.standard_normal(s, np.float32) / np.float32(s[0] ** 0.5) for p, s in shapes.items()}
    b = {p: rng.standard_normal(s[1], np.float32) for p, s in shapes.items()} if biases else {}
    return w, b


def by_name(w, b):
    return {f"w_{p}": x for p, x in w.items()} | {f"b_{p}": x for p, x in b.items()}


LAYERS = {  # d_in, d_ctx, (H, Hkv), D, Dv, d_out, biases
    "one head": (8, 8, (1, 1), 8, 8, None, False),
    "heads": (24, 24, (4, 4), 6, 6, 24, False),
    "biases": (24, 24, (4, 4), 6, 6, 24, True),
    "no w_o, biases": (24, 24, (4, 4), 6, 6, None, True),
    "GQA": (24, 24, (6, 2), 8, 8, 40, True),
    "MQA, Dv": (24, 24, (6, 1), 8, 3, 5, True),
    "many heads": (96, 96, (12, 12), 8, 8, 96, True),
}
LEADS = [(), (1,), (3,), (2, 2)]
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
every_lead = pytest.mark.parametrize("lead", LEADS, ids=str)


@every_layer
@every_lead
@pytest.mark.parametrize("options", [{}, {"causal": True, "scale": 0.2}], ids=["", "causal"])
def test_self_attention(options, lead, layer, backend, rng):
    w, b = draw(rng, *layer)
    heads = layer[2]
    x = rng.standard_normal((*lead, 7, layer[0]), np.float32)
    call = by_name(w, b) | {"num_heads": heads[0], "num_kv_heads": heads[1]}
    extras = {"return_weights": True, "return_lse": True, "backend": backend}
    results = self_attention(x, **call, **extras, **options)
    assert results[1].shape == (*lead, heads[0], 7, 7)
    assert_layer(results, x, x, w, b, heads, **options)
    mha = MultiHeadAttention(**call)
    assert_layer(mha(x, **extras, **options), x, x, w, b, heads, **options)
    output, lse = mha(x, return_lse=True, backend=backend, **options)
    assert_same(output, mha(x, backend=backend, **options), backend)
    np.testing.assert_allclose(lse, results[2], rtol=1e-5, atol=1e-5)


@every_layer
@every_lead
def test_cross_attention(lead, layer, backend, rng):
    d_in, _, heads, *rest = layer
    d_enc = d_in + 3
    w, b = draw(rng, d_in, d_enc, heads, *rest)
    x, context = (rng.standard_normal((*lead, *s), np.float32) for s in ((5, d_in), (9, d_enc)))
    call = by_name(w, b) | {"num_heads": heads[0], "num_kv_heads": heads[1]}
    extras = {"return_weights": True, "return_lse": True, "backend": backend}
    results = cross_attention(x, context, **call, **extras)
    assert results[1].shape == (*lead, heads[0], 5, 9)
    assert_layer(results, x, context, w, b, heads)
    mha = MultiHeadAttention(**call)
    assert_layer(mha(x, context, **extras), x, context, w, b, heads)
    kv = mha.project_kv(context, backend=backend)
    assert isinstance(kv, qkv_ext.ProjectedKV)
    assert kv.k.shape == (*lead, heads[1], 9, rest[0])
    assert kv.v.shape == (*lead, heads[1], 9, rest[1])
    for _ in range(2):  # it is kept over steps
        assert_layer(mha(x, kv=kv, **extras), x, context, w, b, heads)


def test_one_context_for_a_batch(backend, rng):
    """Leading axes of x and the context broadcast, as everywhere."""
    w, b = draw(rng, 16, 16, (4, 2), 8, 8, 16)
    x, context = rng.standard_normal((3, 5, 16), np.float32), rng.standard_normal((1, 9, 16), "f4")
    mha = MultiHeadAttention(**by_name(w, b), num_heads=4, num_kv_heads=2)
    expected = mha(x, np.repeat(context, 3, axis=0), backend=backend)
    assert_same(mha(x, context, backend=backend), expected, backend)
    out = np.empty((3, 5, 16), np.float32)
    assert mha(x, context, out=out, backend=backend) is out
    assert_same(out, expected, backend)
    expected = mha(np.repeat(x[:1], 3, axis=0), np.repeat(context, 3, axis=0), backend=backend)
    assert_same(mha(x[:1], np.repeat(context, 3, axis=0), backend=backend), expected, backend)


MASKS = {  # shape of the mask -> shape of x
    (): (3, 7, 24),
    (7,): (3, 7, 24),
    (7, 7): (7, 24),
    (4, 1, 7): (7, 24),
    (4, 7, 7): (3, 7, 24),
    (3, 1, 1, 7): (3, 7, 24),
    (3, 4, 7, 1): (3, 7, 24),
    (2, 3, 1, 7, 7): (2, 3, 7, 24),
    (3, 4, 1, 7): (2, 3, 7, 24),
}


@pytest.mark.parametrize(("mask_shape", "x_shape"), MASKS.items(), ids=str)
@pytest.mark.parametrize("dtype", [bool, np.float32, np.float64])
def test_masks(dtype, mask_shape, x_shape, backend, rng):
    """A mask broadcasts to (..., H, L, S), also where x is (L, d_in)."""
    w, b = draw(rng, 24, 24, (4, 2), 6, 6, 24)
    x = rng.standard_normal(x_shape, np.float32)
    mask = rng.standard_normal(mask_shape)
    mask = np.asarray(mask < 0.7 if dtype is bool else np.where(mask < 0.7, mask, -np.inf), dtype)
    call = by_name(w, b) | {"num_heads": 4, "num_kv_heads": 2, "mask": mask}
    extras = {"return_weights": True, "return_lse": True, "backend": backend}
    assert_layer(self_attention(x, **call, **extras), x, x, w, b, (4, 2), mask=mask)


@pytest.mark.parametrize("d_out", [None, 40])
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_out(lead, d_out, backend, rng):
    """out is the final (..., L, d_out), strided or an input."""
    w, b = draw(rng, 24, 24, (4, 4), 6, 6, d_out, True)
    x = rng.standard_normal((*lead, 7, 24), np.float32)
    mha = MultiHeadAttention(**by_name(w, b), num_heads=4)
    expected = mha(x, causal=True, backend=backend)
    shape = expected.shape
    for out in (np.full(shape, np.nan, np.float32), np.full(shape[::-1], np.nan, np.float32).T,
                np.full((*shape[:-1], 2 * shape[-1]), np.nan, np.float32)[..., ::-2],
                np.full(shape, np.nan, ">f4")):  # fmt: skip
        assert mha(x, causal=True, out=out, backend=backend) is out
        assert_same(np.ascontiguousarray(out, np.float32), expected, backend)
        result = self_attention(x, **by_name(w, b), num_heads=4, causal=True, out=out,
                                return_lse=True, backend=backend)  # fmt: skip
        assert result[0] is out
    if d_out is None:
        assert mha(x, causal=True, out=x, backend=backend) is x
        assert_same(x, expected, backend)


def test_from_fused(backend, rng):
    """C2: H·D, Hkv·D and Hkv·D columns, no equal thirds (wanshuiyin/ARIS-in-AI-Offer#45)."""
    w, b = draw(rng, 24, 24, (4, 2), 16, 16, 64, True)
    fused = np.concatenate([w[p] for p in "qkv"], axis=1)
    assert fused.shape == (24, 128)
    bias = np.concatenate([b[p] for p in "qkv"])
    x = rng.standard_normal((3, 7, 24), np.float32)
    expected = MultiHeadAttention(**by_name(w, b), num_heads=4, num_kv_heads=2)
    heads = {"num_heads": 4, "num_kv_heads": 2}
    mha = MultiHeadAttention.from_fused(fused, w["o"], b_qkv=bias, b_o=b["o"], **heads)
    assert_same(mha(x, backend=backend), expected(x, backend=backend), backend)
    mha = MultiHeadAttention.from_fused(fused, **heads)
    expected = MultiHeadAttention(w["q"], w["k"], w["v"], **heads)
    assert_same(mha(x, backend=backend), expected(x, backend=backend), backend)
    thirds = np.concatenate([w["q"]] * 3, axis=1)
    with pytest.raises(ValueError, match="128"):  # the total that was expected
        MultiHeadAttention.from_fused(thirds, w["o"], **heads)
    with pytest.raises(ValueError, match="multiple of 8"):
        MultiHeadAttention.from_fused(thirds[:, :127], **heads)


def test_packed_weights_are_taken_as_they_are(backend, rng):
    w, _ = draw(rng, 24, 24, (4, 4), 6, 6, 24)
    x = rng.standard_normal((3, 7, 24), np.float32)
    packed = {f"w_{p}": qkv_ext.pack_weight(each) for p, each in w.items()}
    expected = self_attention(x, **by_name(w, {}), num_heads=4, backend=backend)
    assert_same(self_attention(x, **packed, num_heads=4, backend=backend), expected, backend)
    mha = MultiHeadAttention(**packed, num_heads=4)
    assert_same(mha(x, backend=backend), expected, backend)


def test_a_layer_keeps_its_weights(backend, rng):
    """It does not follow the caller's arrays, and it can be pickled."""
    w, b = draw(rng, 24, 24, (4, 4), 6, 6, 24, True)
    x = rng.standard_normal((3, 7, 24), np.float32)
    mha = MultiHeadAttention(**by_name(w, b), num_heads=4)
    expected = mha(x, backend=backend)
    for each in (*w.values(), *b.values()):
        each[...] = 0
    assert_same(mha(x, backend=backend), expected, backend)
    assert_same(pickle.loads(pickle.dumps(mha))(x, backend=backend), expected, backend)


@pytest.mark.parametrize("zero", ["batch", "length", "context"])
def test_sizes_of_zero(zero, backend, rng):
    w, b = draw(rng, 24, 24, (4, 2), 6, 6, 40, True)
    mha = MultiHeadAttention(**by_name(w, b), num_heads=4, num_kv_heads=2)
    sizes = {"batch": 2, "length": 5, "context": 9} | {zero: 0}
    x = rng.standard_normal((sizes["batch"], sizes["length"], 24), np.float32)
    context = rng.standard_normal((sizes["batch"], sizes["context"], 24), np.float32)
    output, weights, lse = mha(
        x, context, return_weights=True, return_lse=True, backend=backend, causal=True
    )
    assert output.shape == (*x.shape[:2], 40)
    assert weights.shape == (sizes["batch"], 4, sizes["length"], sizes["context"])
    assert lse.shape == weights.shape[:-1]
    if zero == "context":  # nothing to attend to: what is left is the bias of W_O
        np.testing.assert_array_equal(output, np.broadcast_to(b["o"], output.shape))


def test_repr():
    w = np.zeros((8, 16), np.float32)
    mha = MultiHeadAttention(w, w[:, :8], w[:, :4], num_heads=4, num_kv_heads=2)
    assert repr(mha) == (
        "MultiHeadAttention(d_in=8, num_heads=4, num_kv_heads=2, head_dim=4, d_out=8, "
        "w_o=False, biases=())"
    )
    assert isinstance(qkv_ext.pack_weight(w), PackedWeight)


def test_float64_is_computed_by_numpy(rng):
    w, b = draw(rng, 24, 24, (4, 2), 6, 6, 40, True)
    x = rng.standard_normal((3, 7, 24))
    w, b = ({p: each.astype(F64) for p, each in group.items()} for group in (w, b))
    mha = MultiHeadAttention(**by_name(w, b), num_heads=4, num_kv_heads=2)
    output = mha(x, causal=True, backend="numpy")
    expected = formula(x, x, w, b, (4, 2), oracle.attention, np.matmul, causal=True)[0]
    assert output.dtype == F64
    np.testing.assert_allclose(output, expected, rtol=1e-11, atol=1e-12)
