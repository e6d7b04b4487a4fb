"""What errors say to do: other libraries' names, the other layout, tables of full width, casts."""

import inspect
import re

import numpy as np
import pytest

import qkv_ext.onnx
from qkv_ext import KVCache, MultiHeadAttention, apply_rotary

sdpa, varlen = qkv_ext.scaled_dot_product_attention, qkv_ext.varlen_attention


def f32(*shape):
    return np.ones(shape, np.float32)


X, W = f32(1, 3, 8), f32(8, 8)
LAYER = MultiHeadAttention(W, W, W, W, num_heads=2)


def cache(dtype="float32"):
    own = KVCache(2, 4, 8, dtype=dtype)
    own.append(f32(2, 4, 7, 8), f32(2, 4, 7, 8))
    return own


CALLS = {
    "scaled_dot_product_attention": lambda **o: sdpa(f32(1, 2, 3, 4), *[f32(1, 2, 3, 4)] * 2, **o),
    "varlen_attention": lambda **o: varlen(*[f32(3, 2, 4)] * 3, *[[0, 3]] * 2, **o),
    "KVCache.attend": lambda **o: cache().attend(f32(2, 4, 3, 8), **o),
    "trace": lambda **o: qkv_ext.trace(*[f32(1, 2, 3, 4)] * 3, **o),
    "a layer": lambda **o: LAYER(X, **o),
    "a layer with a cache": lambda **o: LAYER(X, cache=KVCache(1, 2, 4), **o),
    "self_attention": lambda **o: qkv_ext.self_attention(X, W, W, W, **o),
    "cross_attention": lambda **o: qkv_ext.cross_attention(X, X, W, W, W, **o),
    "trace_self": lambda **o: qkv_ext.trace_self(X, W, W, W, **o),
    "trace_cross": lambda **o: qkv_ext.trace_cross(X, X, W, W, W, **o),
}  # fmt: skip
NAMES = {  # what others call it, and what the error says that it is here
    "attn_mask": "here it is mask=, ",
    "key_padding_mask": "here it is mask=~key_padding_mask",
    "attention_mask": "here it is mask=",
    "is_causal": "here it is causal=, and align='top-left'",
    "need_weights": "here it is return_weights=",
    "softmax_scale": "here it is scale=",
    "window_size": r"here it is window=\(left, right\)",
    "segment_ids": "here it is kv_segments=",
    "dropout_p": "leave it out",
    "enable_gqa": "leave it out",
    "average_attn_weights": "leave it out",
}
LACKING = {  # what a call does not have by any name
    "varlen_attention": {
        "attn_mask",
        "key_padding_mask",
        "attention_mask",
        "need_weights",
        "segment_ids",
    },
    "trace": {"need_weights"},
}


@pytest.mark.parametrize("call", CALLS)
def test_names_of_other_libraries(call):
    """torch's attn_mask, is_causal, dropout_p and their like: the error has our name for it."""
    for name, hint in NAMES.items():
        with pytest.raises(TypeError, match=f"'{name}'") as caught:
            CALLS[call](**{name: None})
        if name in LACKING.get(call, ()):
            assert caught.match("; expected .*causal, align, ")
        else:
            assert caught.match(hint)


@pytest.mark.parametrize("call", CALLS)
def test_unknown_names(call):
    """One that nobody has: the error has all that the call takes."""
    with pytest.raises(TypeError, match=r"'casual'.*; expected .*causal, .*threads, backend"):
        CALLS[call](casual=True)
    assert not isinstance(CALLS[call](causal=True), Exception)


@pytest.mark.parametrize(
    "function",
    [sdpa, varlen, KVCache.attend, qkv_ext.trace],
    ids=["attention", "varlen", "attend", "trace"],
)
def test_signatures_show_what_there_is(function):
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds


# ---- layouts ------------------------------------------------------------------------------------

BY_MISTAKE = {  # calls with arrays (B, L, H, D) that do not say so
    "H no multiple": lambda **o: sdpa(f32(2, 5, 4, 8), f32(2, 7, 2, 8), f32(2, 7, 2, 8), **o),
    "fewer queries": lambda **o: sdpa(f32(2, 3, 4, 8), f32(2, 6, 4, 8), f32(2, 6, 4, 6), **o),
    "five axes": lambda **o: sdpa(f32(3, 1, 5, 4, 8), f32(1, 2, 7, 2, 8), f32(3, 2, 7, 2, 8), **o),
    "trace": lambda **o: qkv_ext.trace(f32(2, 5, 4, 8), f32(2, 7, 2, 8), f32(2, 7, 2, 8), **o),
    "a cache": lambda **o: cache().attend(f32(2, 3, 4, 8), **o),
    "merge": lambda **o: qkv_ext.merge_attention([f32(2, 5, 4, 8)], [f32(2, 4, 5)], **o),
    "rotary": lambda **o: apply_rotary(f32(2, 4, 9, 8), f32(4, 4), f32(4, 4), **o),
    "positions": lambda **o: apply_rotary(f32(2, 9, 4, 8), f32(9, 4), f32(9, 4),
                                          positions=np.arange(9), **o),
    "positions of items": lambda **o: apply_rotary(f32(2, 9, 4, 8), f32(9, 4), f32(9, 4),
                                                   positions=[range(9)] * 2, **o),
}  # fmt: skip


@pytest.mark.parametrize("call", BY_MISTAKE.values(), ids=BY_MISTAKE)
def test_the_other_layout(call):
    """Arrays that would fit as (B, L, H, D) name layout="blhd", and then they do."""
    with pytest.raises(ValueError, match=r"; (they fit|it fits) with layout=\"blhd\"$"):
        call()
    call(layout="blhd")


NOT_BLHD = {  # and the other way round
    "attention": lambda **o: sdpa(f32(2, 4, 5, 8), f32(2, 2, 7, 8), f32(2, 2, 7, 8), **o),
    "a cache": lambda **o: cache().attend(f32(2, 4, 3, 8), **o),
    "merge": lambda **o: qkv_ext.merge_attention([f32(2, 4, 5, 8)], [f32(2, 4, 5)], **o),
    "rotary": lambda **o: apply_rotary(f32(2, 9, 4, 8), f32(4, 4), f32(4, 4), **o),
}


@pytest.mark.parametrize("call", NOT_BLHD.values(), ids=NOT_BLHD)
def test_the_default_layout(call):
    with pytest.raises(ValueError, match=r"; (they fit|it fits) with layout=\"bhld\"$"):
        call(layout="blhd")
    call()


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_no_layout_fits(layout):
    """Then none is named."""
    for shapes in (
        ((2, 5, 4, 8), (2, 7, 3, 8), (2, 7, 3, 8)),
        ((2, 5, 4, 8), (2, 7, 2, 6), (2, 7, 2, 8)),
        ((3, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)),
    ):
        with pytest.raises(ValueError, match=r"^q, k and v have shapes") as caught:
            sdpa(*map(np.ones, shapes, [np.float32] * 3), layout=layout)
        assert "layout" not in str(caught.value)


def test_what_is_appended_has_no_layout():
    """KVCache.append takes (B, Hkv, n, D) only: the error says how to make it that."""
    k = f32(2, 3, 4, 8)
    own = cache()
    with pytest.raises(ValueError, match=r"^k has shape .*: pass k\.swapaxes\(1, 2\)$"):
        own.append(k, k)
    own.append(k.swapaxes(1, 2), k.swapaxes(1, 2))


# ---- rotary tables ------------------------------------------------------------------------------

COS, SIN = qkv_ext.rotary_tables(9, 8)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(("halves", "hint"), [(True, ":8 // 2"), (False, "::2")])
def test_tables_of_full_width(halves, hint, batch):
    """As transformers has them, (n, D) or (1, n, D), by halves or by neighbours."""
    full = [np.concatenate([x, x], -1) if halves else x.repeat(2, -1) for x in (COS, SIN)]
    given = [x[None] for x in full] if batch else full
    index = f"[0, :, {hint}]" if batch else f"[:, {hint}]"
    x = np.random.default_rng(0).standard_normal((2, 3, 9, 8), np.float32)
    with pytest.raises(ValueError, match=re.escape(f"pass cos{index} and sin{index}")):
        apply_rotary(x, *given)
    cos, sin = given
    passed = eval(f"cos{index}, sin{index}", {"cos": cos, "sin": sin})
    np.testing.assert_array_equal(apply_rotary(x, *passed), apply_rotary(x, COS, SIN))
    with pytest.raises(ValueError, match=r"^cos has shape .*: pass cos\["):  # of a layer, too
        MultiHeadAttention(*[f32(16, 16)] * 3, num_heads=2)(f32(1, 3, 16), rotary=given)


def test_tables_of_another_width():
    with pytest.raises(ValueError, match=r"^cos has shape \(9, 6\); .* rotary_dim = 8$"):
        apply_rotary(f32(2, 9, 8), f32(9, 6), f32(9, 6))
    with pytest.raises(ValueError, match=r"^cos has shape \(2, 9, 8\); .* rotary_dim = 8$"):
        apply_rotary(f32(2, 9, 8), f32(2, 9, 8), f32(2, 9, 8))


# ---- dtypes -------------------------------------------------------------------------------------


def test_casts_name_the_arguments():
    """Which argument, and what to call; what is packed stays what it is."""
    q, k = f32(1, 2, 3, 4), np.ones((1, 2, 3, 4))
    half, packed = q.astype(np.float16), qkv_ext.pack_weight(np.ones((8, 8), np.float16))
    for call, cast in (
        (lambda: sdpa(q, k, k), "k.astype(np.float32), v.astype(np.float32)"),
        (lambda: sdpa(k, half, half), "q.astype(np.float32), k.astype(np.float32), v.astype"),
        (lambda: LAYER(X.astype(float)), "x.astype(np.float32)"),
        (lambda: LAYER(X, kv=(q, k)), "kv.v.astype(np.float32)"),
        (lambda: qkv_ext.linear_projection(X, packed), "x.astype(np.float16)"),
        (lambda: MultiHeadAttention(W, packed, W, num_heads=2),
         "w_q.astype(np.float16), w_v.astype(np.float16)"),
        (lambda: cache().append(f32(2, 4, 1, 8), np.ones((2, 4, 1, 8))), "v.astype(np.float32)"),
        (lambda: cache().attend(np.ones((2, 4, 1, 8))), "q.astype(np.float32)"),
        (lambda: LAYER(X.astype(float), cache=KVCache(1, 2, 4)), "x.astype(np.float32)"),
        (lambda: qkv_ext.merge_attention([q, k], [q[..., 0]] * 2), "outputs[1].astype(np.float32)"),
        (lambda: qkv_ext.merge_attention([q], [k[..., 0]]), "lses[0].astype(np.float32)"),
        (lambda: qkv_ext.matmul(W, W.astype(float)), "b.astype(np.float32)"),
        (lambda: qkv_ext.onnx.attention(q, q, q, None, k, k), "past_key.astype(np.float32)"),
    ):  # fmt: skip
        with pytest.raises(TypeError) as caught:
            call()
        assert cast in str(caught.value)


# ---- numbers of other kinds ---------------------------------------------------------------------


def test_numbers_of_ml_dtypes(backend):
    """scale=ml_dtypes.bfloat16(0.5) is 0.5: its scalars are no np.floating."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = np.random.default_rng(0).standard_normal((1, 2, 3, 4), np.float32)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        half = getattr(ml_dtypes, name)(0.5)
        for given in (half, np.array(half)):
            for option in ("scale", "softcap"):
                actual = sdpa(q, q, q, backend=backend, **{option: given})
                expected = sdpa(q, q, q, backend=backend, **{option: 0.5})
                np.testing.assert_array_equal(actual, expected)
        assert qkv_ext.rotary_tables(3, 4, scale=half)[0][1, 0] == np.float32(np.cos(2.0))


@pytest.mark.parametrize("dtype", [np.uint64, np.int8, np.uint8])
def test_offsets_of_any_integer_dtype_with_rotary(dtype, backend, rng):
    """key_offset=np.uint64(1) with rotary; NumPy makes floats of uint64 and int64."""
    x = rng.standard_normal((2, 3, 8), np.float32)
    rotary = qkv_ext.rotary_tables(9, 4)
    for option in ("key_offset", "query_offset"):
        expected = LAYER(x, rotary=rotary, causal=True, backend=backend, **{option: 2})
        for given in (dtype(2), np.array(2, dtype)):
            actual = LAYER(x, rotary=rotary, causal=True, backend=backend, **{option: given})
            np.testing.assert_array_equal(actual, expected)
            caches = KVCache(2, 2, 4), KVCache(2, 2, 4)
            for own, offset in zip(caches, (given, 2), strict=True):
                LAYER(x, cache=own, rotary=rotary, backend=backend, **{option: offset})
            np.testing.assert_array_equal(caches[0].keys(0), caches[1].keys(0))


@pytest.mark.parametrize("empty", [[], (), np.array([], int), range(0)], ids=repr)
def test_lists_of_nothing(empty, backend):
    """An empty batch has no lengths, no indices and no offsets."""
    own = KVCache(0, 1, 4)
    own.reorder(empty)
    own.truncate(empty)
    own.drop(empty)
    own.append(f32(0, 1, 2, 4), f32(0, 1, 2, 4), lengths=empty)
    options = {"kv_lengths": empty, "q_lengths": empty, "query_offset": empty, "backend": backend}
    assert own.attend(f32(0, 1, 2, 4), **options).shape == (0, 1, 2, 4)
    assert sdpa(*[f32(0, 1, 2, 4)] * 3, **options).shape == (0, 1, 2, 4)
    own = KVCache(2, 1, 4)
    own.reorder(empty)
    assert own.batch == 0
    with pytest.raises(ValueError, match=r"^indices holds 0; but there are none$"):
        own.reorder([0])
