"""Weights that are kept in 16 bits: their numbers, and the bits of products with them."""

import pickle

import ml_dtypes
import numpy as np
import pytest
from tolerance import assert_same_bits

import qkv_ext
from qkv_ext import MultiHeadAttention, PackedWeight, linear_projection, pack_weight

KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SHAPES = [(1, 1), (8, 64), (9, 100), (256, 63), (300, 130), (517, 65)]


@pytest.mark.parametrize("shape", [*SHAPES, (5, 0), (0, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind, shape, rng):
    """Rounded once, as NumPy and ml_dtypes do it, whatever the order of the matrix."""
    w = rng.standard_normal(shape, np.float32)
    packed = pack_weight(np.asfortranarray(w), dtype=kind)
    assert (packed.shape, packed.dtype, packed.weight_dtype) == (shape, np.float32, kind)
    assert packed.nbytes == 2 * packed.panels.size
    assert packed.panels.ctypes.data % 64 == 0 or not packed.nbytes
    assert repr(packed) == f"PackedWeight(shape={shape}, dtype=float32, weight_dtype={kind})"
    assert_same_bits(packed.dequantize(), w.astype(KINDS[kind]).astype(np.float32))
    again = pickle.loads(pickle.dumps(packed))
    assert (repr(again), again.panels.dtype) == (repr(packed), packed.panels.dtype)
    assert_same_bits(again.dequantize(), packed.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_special_numbers(kind):
    w = np.float32([[0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38, 65504, 65520, 1 + 2**-8]])
    packed = pack_weight(w, dtype=kind)
    with np.errstate(over="ignore"):
        rounded = w.astype(KINDS[kind])
    np.testing.assert_array_equal(packed.dequantize(), rounded.astype(np.float32))
    assert np.signbit(packed.dequantize()[0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_16_bits_stay_16_bits(kind, backend, rng):
    """A 16-bit matrix takes 16 bits in memory; dtype= may still widen it."""
    x, w = (rng.standard_normal(s, np.float32).astype(KINDS[kind]) for s in ((4, 9), (9, 70)))
    packed, wide = pack_weight(w), pack_weight(w, dtype="float32")
    assert packed.dtype == wide.dtype == KINDS[kind]
    assert (packed.weight_dtype, wide.weight_dtype) == (kind, "float32")
    assert wide.nbytes == 2 * packed.nbytes == 4 * packed.panels.size
    assert_same_bits(packed.dequantize(), w.astype(np.float32))
    exact = linear_projection(x.astype(np.float32), w.astype(np.float32), backend=backend)
    rounded_once = {"float16": 1e-3, "bfloat16": 2.0**-8}[kind]
    for weight in (packed, wide, pickle.loads(pickle.dumps(packed))):
        output = linear_projection(x, weight, backend=backend)
        assert output.dtype == KINDS[kind]
        np.testing.assert_allclose(output.astype(np.float32), exact, rtol=rounded_once, atol=1e-6)
        if backend != "numpy":
            assert_same_bits(output, linear_projection(x, w, backend=backend))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*KINDS, "float32"])
def test_bits(compiled, kind, shape, rng):
    """Those of a product with dequantize(), for every number of rows, threads and what follows."""
    k, n = shape
    w, b = rng.standard_normal(shape, np.float32), rng.standard_normal(n, np.float32)
    x, residual = rng.standard_normal((230, k), np.float32), rng.standard_normal((230, n), "f4")
    packed = pack_weight(w, dtype=kind)
    matrix, run = packed.dequantize(), {"backend": compiled, "threads": 2}
    plain = linear_projection(x, matrix, **run)
    ended = linear_projection(x, matrix, b, activation="gelu", residual=residual, **run)
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 64, 230):
        assert_same_bits(linear_projection(x[:m], packed, **run), plain[:m])
        more = {"activation": "gelu", "residual": residual[:m], **run}
        assert_same_bits(linear_projection(x[:m], packed, b, **more), ended[:m])
        out = np.empty((m, 2 * n), np.float32)[:, ::2]  # the general way
        linear_projection(x[:m], packed, out=out, **run)
        assert_same_bits(np.ascontiguousarray(out), plain[:m])


@pytest.mark.parametrize("kind", KINDS)
def test_the_numpy_backend(kind, rng):
    x, w = rng.standard_normal((6, 300), np.float32), rng.standard_normal((300, 130), np.float32)
    packed = pack_weight(w, dtype=kind)
    exact = x.astype(np.float64) @ packed.dequantize().astype(np.float64)
    output = linear_projection(x, packed, backend="numpy")
    np.testing.assert_allclose(output, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_nonfinite_numbers(kind, backend):
    """As of the plain product with what is kept: columns of their own are not touched."""
    w = np.ones((5, 70), np.float32)
    w[2, 3], w[4, 66] = np.inf, np.nan
    output = linear_projection(np.ones((2, 5), "f4"), pack_weight(w, dtype=kind), backend=backend)
    expected = np.full((2, 70), np.float32(5))
    expected[:, 3], expected[:, 66] = np.inf, np.nan
    np.testing.assert_array_equal(output, expected)


def layers(rng, kind, **more):
    """A layer with weight_dtype, and one of the arrays that it keeps."""
    w = [rng.standard_normal((24, 24), np.float32) / 5 for _ in range(4)]
    kept = [pack_weight(each, dtype=kind).dequantize() for each in w]
    return (
        MultiHeadAttention(*w, num_heads=4, weight_dtype=kind, **more),
        MultiHeadAttention(*kept, num_heads=4, **more),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_layers(compiled, kind, rng):
    """Bits of a layer of the arrays that are kept: whole calls, a context, and decode steps."""
    layer, expected = layers(rng, kind, b_q=np.ones(24, "f4"))
    x, context = rng.standard_normal((2, 7, 24), np.float32), np.ones((2, 3, 24), np.float32)
    again = pickle.loads(pickle.dumps(layer))
    assert repr(again) == repr(layer)
    assert f"weight_dtype={kind}" in repr(layer)
    for one in (layer, again):
        run = {"backend": compiled}
        assert_same_bits(one(x, causal=True, **run), expected(x, causal=True, **run))
        assert_same_bits(one(x, context, **run), expected(x, context, **run))
        caches = [qkv_ext.KVCache(2, 4, 6) for _ in range(2)]
        for at in range(3):
            step = x[:, at : at + 1]
            assert_same_bits(
                one(step, cache=caches[0], **run), expected(step, cache=caches[1], **run)
            )


def test_makers_of_layers_take_weight_dtype(rng):
    w = rng.standard_normal((24, 72), np.float32)
    heads = {"num_heads": 4, "weight_dtype": "bfloat16"}
    q, k, v = np.split(w, 3, axis=1)
    state = {f"{name}_proj.weight": part.T for name, part in zip("qkvo", (q, k, v, q), strict=True)}
    expected = MultiHeadAttention(q, k, v, **heads)(w[:, :24])
    for layer in (
        MultiHeadAttention.from_fused(w, **heads),
        MultiHeadAttention.from_fused_kv(q, w[:, 24:], **heads),
    ):
        assert "weight_dtype=bfloat16" in repr(layer)
        assert_same_bits(layer(w[:, :24]), expected)
    layer = MultiHeadAttention.from_state_dict(state, "", 4, weight_dtype="bfloat16")
    assert_same_bits(layer(w[:, :24]), MultiHeadAttention(q, k, v, q, **heads)(w[:, :24]))


def test_refused():
    w = np.ones((8, 8), np.float32)
    with pytest.raises(ValueError, match="dtype is 'int3'; expected 'float32' or 'float16'"):
        pack_weight(w, dtype="int3")
    with pytest.raises(TypeError, match=r"w is float64, .*such as w\.astype\(np\.float32\)"):
        pack_weight(w.astype(np.float64), dtype="float16")
    with pytest.raises(TypeError, match=r"x float16, w float32\); expected one dtype"):
        linear_projection(w.astype(np.float16), pack_weight(w, dtype="float16"))
    with pytest.raises(ValueError, match="w_k is a PackedWeight of float16 already, and weight_d"):
        MultiHeadAttention(
            w, pack_weight(w, dtype="float16"), w, num_heads=2, weight_dtype="bfloat16"
        )
    with pytest.raises(ValueError, match="weight_dtype is 'int3'; expected"):
        MultiHeadAttention(w, w, w, num_heads=2, weight_dtype="int3")


def test_a_pickle_of_another_machine():
    """Its panels come in the byte order of that machine."""
    packed = pack_weight(np.float32([[1, 2], [3, 4]]), dtype="float16")
    panels = packed.panels.astype(packed.panels.dtype.newbyteorder())
    again = PackedWeight._restored(panels, 2, packed.dtype)
    assert again.panels.dtype is packed.panels.dtype
    assert_same_bits(again.dequantize(), packed.dequantize())


def test_weights_side_by_side_keep_their_type(rng):
    w = rng.standard_normal((8, 8), np.float32)
    layer = MultiHeadAttention(w, w, w, num_heads=2, weight_dtype="float16")
    joined = layer._layer.joined
    assert joined is not None
    assert joined.weight.panels.dtype == np.float16
    assert joined.weight.nbytes == 2 * 8 * 3 * 64
