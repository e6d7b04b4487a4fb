"""Variations of state dicts: each is refused with its cause, and none is loaded wrong silently."""

import re

import numpy as np
import pytest

from qkv_ext import MultiHeadAttention

from_state_dict = MultiHeadAttention.from_state_dict


def f32(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def linear(**shapes):
    return {f"{name}.weight": f32(*shape) for name, shape in shapes.items()}


def less(mapping, name):
    return {key: x for key, x in mapping.items() if key != name}


class NoArray:
    """A tensor that NumPy is refused, as one is that requires a gradient."""

    shape = (1, 1, 4, 4)

    def __array__(self, *args, **kwargs):
        raise RuntimeError("can't be read")


LLAMA = linear(q_proj=(32, 12), k_proj=(16, 12), v_proj=(16, 12), o_proj=(12, 32))  # H 4, Hkv 2
NORMS = linear(q_norm=(8,), k_norm=(8,))
PHI3 = linear(qkv_proj=(64, 12), o_proj=(12, 32))
NEOX = linear(query_key_value=(96, 32), dense=(32, 32))
GPT2 = linear(c_attn=(32, 96), c_proj=(32, 32))
CROSS = linear(q_attn=(32, 32), c_attn=(32, 64), c_proj=(32, 32))
T5 = linear(q=(32, 12), k=(32, 12), v=(32, 12), o=(12, 32))
TORCH = {"in_proj_weight": f32(96, 32)} | linear(out_proj=(32, 32))
EPS = {"norm_eps": 1e-6}
NEO = less(LLAMA, "o_proj.weight") | linear(out_proj=(12, 32)) | {"out_proj.bias": f32(12)}


REFUSED = {  # mapping, options, what is said
    "norms without epsilon": (LLAMA | NORMS, {}, "norm_eps is None, but .*q_norm.weight"),
    "an epsilon without norms": (LLAMA, EPS, "norm_eps is 1e-06, but mapping has no q_norm"),
    "an offset without norms": (LLAMA, {"norm_offset": 1.0}, "norm_offset is 1.0, but mapping"),
    "an offset that is no number": (LLAMA | NORMS, {"norm_offset": np.nan} | EPS, "norm_offset is"),
    "an epsilon below 0": (LLAMA | NORMS, {"norm_eps": -1.0}, "norm_eps is -1.0"),
    "a norm of Q alone": (LLAMA | less(NORMS, "k_norm.weight"), EPS, "has no k_norm.weight"),
    "a norm of K alone": (LLAMA | less(NORMS, "q_norm.weight"), EPS, "has no q_norm.weight"),
    "norms of another width": (LLAMA | linear(q_norm=(9,), k_norm=(8,)), EPS, "q_norm has shape"),
    "K's norm as wide as Q": (LLAMA | linear(q_norm=(32,), k_norm=(32,)), EPS, "k_norm has shape"),
    "norms by head (Cohere)": (LLAMA | linear(q_norm=(4, 8), k_norm=(2, 8)), EPS, "LayerNorm's"),
    "norms with a bias": (LLAMA | NORMS | {"q_norm.bias": f32(8)}, EPS, "no LayerNorms"),
    "StableLM": (LLAMA | {"q_layernorm.norms.0.weight": f32(8)}, {}, "no LayerNorms"),
    "Phi with qk_layernorm": (LLAMA | linear(q_layernorm=(8,)), {}, "no LayerNorms"),
    "HunYuan": (LLAMA | linear(query_layernorm=(8,)), {}, "none after rotary"),
    "a norm of V": (LLAMA | NORMS | linear(v_norm=(8,)), EPS, "no norms of V"),
    "wrong heads with norms": (LLAMA | NORMS, {"num_heads": 8} | EPS, "q_norm has shape"),
    "gates of their own": (LLAMA | linear(g_gate=(32, 12)), {}, "it has no gates"),
    "gates in Q (Qwen3-Next)": (
        LLAMA | linear(q_proj=(64, 12)) | NORMS, EPS, "half of them may be gates"),
    "sinks of other heads": (LLAMA | {"sinks": f32(5)}, {}, "sinks has shape"),
    "sinks where none can be": (GPT2 | {"sinks": f32(4)}, {}, "sinks are an option of the call"),
    "an order of three weights": (LLAMA, {"order": "qkv"}, "order is 'qkv', but .* are not fused"),
    "no order": (NEOX, {}, "order is None, but the name query_key_value"),
    "an unknown order": (NEOX, {"order": "vkq"}, "order is 'vkq'; expected 'qkv' or 'grouped'"),
    "another order than Phi-3's": (PHI3, {"order": "grouped"}, "qkv_proj have the order 'qkv'"),
    "another order than GPT-2's": (GPT2, {"order": "grouped"}, "c_attn have the order 'qkv'"),
    "another order than torch's": (TORCH, {"order": "grouped"}, "in_proj_weight have the order"),
    "CodeGen": (linear(qkv_proj=(96, 32), out_proj=(32, 32)), {}, "CodeGen"),
    "fused, for other heads": (PHI3, {"num_heads": 3}, "w_o has 32 rows"),
    "fused, other key heads": (PHI3, {"num_kv_heads": 4}, "w_qkv has 64 columns; expected 96"),
    "a fused bias without V": (NEOX | {"query_key_value.bias": f32(64)}, {"order": "qkv"}, "b_qkv"),
    "fused with biases beside": (
        linear(qkv=(96, 32), proj=(32, 32)) | {"q_bias": f32(32)}, {"order": "qkv"}, "q_bias"),
    "nanoGPT": (linear(c_attn=(96, 32), c_proj=(32, 32)), {}, "nanoGPT or StarCoder"),
    "StarCoder": (linear(c_attn=(48, 32), c_proj=(32, 32)), {}, "nanoGPT or StarCoder"),
    "StarCoder, cross": (CROSS | linear(c_attn=(64, 32)), {}, "nanoGPT or StarCoder"),
    "GPT-2, cross, no K and V": (less(CROSS, "c_attn.weight"), {}, "has no c_attn.weight"),
    "GPT-2, cross, no Q": (less(CROSS, "q_attn.weight"), {},
                           "c_attn.weight has shape .32, 64.; expected .* with 96 columns"),
    "T5 without scale": (T5, {}, "scale is None, .*T5's is 1"),
    "T5 with positions": (
        T5 | linear(relative_attention_bias=(32, 4)), {"scale": 1.0}, "no relative positions"),
    "GPT-Neo without scale": (
        {f"attn.attention.{name}": x for name, x in
         (less(LLAMA, "o_proj.weight") | linear(out_proj=(12, 32))).items()},
        {}, "scale is None, .*GPT-Neo's is 1"),
    "GPT-Neo's own module, without scale": (NEO, {}, "scale is None, .*GPT-Neo's is 1"),
    "GPT-Neo's attention, without scale": (
        {f"attention.{name}": x for name, x in NEO.items()}, {}, "scale is None, .*GPT-Neo's is 1"),
    "Pix2Struct without scale": (
        linear(query=(32, 12), key=(32, 12), value=(32, 12), output=(12, 32)), {},
        "scale is None, .*Pix2Struct's is 1"),
    "an offset beyond float32": (LLAMA | NORMS, {"norm_offset": 1e39} | EPS, "norm_offset is 1e"),
    "a mask that is not to be read": (GPT2 | {"bias": NoArray()}, {}, "bias"),
    "LoRA": (LLAMA | {"q_proj.lora_A.weight": f32(4, 12)}, {}, "adapters are to be merged"),
    "scales of FP8": (LLAMA | {"q_proj.weight_scale_inv": f32(1)}, {}, "quantised weights"),
    "GPTQ": (NEOX | {"query_key_value.qweight": f32(4, 4)}, {"order": "qkv"}, "quantised weights"),
    "int8": (LLAMA | {"q_proj.weight": np.ones((32, 12), np.int8)}, {}, "q_proj.weight has dtype"),
    "latent keys": (LLAMA | linear(kv_a_proj_with_mqa=(9, 12)), {}, "no latent keys"),
    "bias_k": (TORCH | {"bias_k": f32(1, 1, 32)}, {}, "joins no key and value of its own"),
    "a bias of scores": (LLAMA | {"attention_bias": f32(4, 9, 9)}, {}, "no relative positions"),
    "factors": (LLAMA | {"logit_scale": f32(4)}, {}, "no learned factors"),
    "no W_O": (less(PHI3, "o_proj.weight"), {}, "has no o_proj.weight"),
    "no K": (less(LLAMA, "k_proj.weight"), {}, "has no k_proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("mapping", "options", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("prefix", ["", "layers.0"])
def test_refused(prefix, mapping, options, message):
    at = prefix and f"{prefix}."
    mapping = {at + name: x for name, x in mapping.items()}
    with pytest.raises((ValueError, TypeError)) as caught:
        from_state_dict(mapping, prefix, **({"num_heads": 4} | options))
    assert re.search(message, str(caught.value).replace(at, ""))


def test_blt():
    """Its norms stand before the projections; in a square layer their shapes do not tell."""
    square = {f"{part}_proj.weight": f32(32, 32) for part in "qkvo"} | linear(
        q_norm=(32,), k_norm=(32,)
    )
    prefix = "model.local_decoder.cross_attn_layers.1"
    names = {f"{prefix}.{name}": x for name, x in square.items()}
    with pytest.raises(ValueError, match="BLT, whose names these are"):
        from_state_dict(names, prefix, 4, norm_eps=1e-5)


def test_block_with_two(rng):
    """A block of GPT-2 may have attention to a context too: its prefix means the one to itself."""
    own, cross, x = GPT2, CROSS, rng.standard_normal((5, 32), np.float32)
    block = {f"h.0.attn.{name}": w for name, w in own.items()} | {
        f"h.0.crossattention.{name}": w for name, w in cross.items()
    }
    np.testing.assert_array_equal(
        from_state_dict(block, "h.0", 4)(x), from_state_dict(own, "", 4)(x)
    )
    np.testing.assert_array_equal(
        from_state_dict(block, "h.0.crossattention", 4)(x), from_state_dict(cross, "", 4)(x)
    )


def separate(w, b, order, h, hkv, d):
    """The parts of a fused (out, in) weight, one head after the other."""
    group = h // hkv
    heads = [("q", i) for i in range(h)] + [(p, i) for p in "kv" for i in range(hkv)]
    if order == "grouped":
        heads = [
            head for i in range(hkv)
            for head in (*(("q", i * group + j) for j in range(group)), ("k", i), ("v", i))
        ]  # fmt: skip
    rows = {p: [] for p in "qkv"}
    for at, (part, i) in enumerate(heads):
        rows[part].append((i, slice(at * d, (at + 1) * d)))
    cut = {p: [s for _, s in sorted(each, key=lambda x: x[0])] for p, each in rows.items()}
    return {
        kind: x
        for p, each in cut.items()
        for kind, x in ((f"{p}_proj.weight", np.concatenate([w[s] for s in each])),
                        (f"{p}_proj.bias", np.concatenate([b[s] for s in each])))
    }  # fmt: skip


@pytest.mark.parametrize("order", ["qkv", "grouped"])
@pytest.mark.parametrize("hkv", [1, 2, 4])
def test_orders(hkv, order, backend, rng):
    """Fused rows by either order are those of three weights; the two differ but for Hkv = 1."""
    w, b = f32((4 + 2 * hkv) * 8, 12), f32((4 + 2 * hkv) * 8)
    w_o, x = linear(o_proj=(12, 32)), rng.standard_normal((2, 5, 12), np.float32)
    fused = {"query_key_value.weight": w, "query_key_value.bias": b,
             "dense.weight": w_o["o_proj.weight"]}  # fmt: skip
    expected = from_state_dict(separate(w, b, order, 4, hkv, 8) | w_o, "", 4)(x, backend=backend)
    output = from_state_dict(fused, "", 4, order=order)(x, backend=backend)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    other = from_state_dict(fused, "", 4, order={"qkv": "grouped", "grouped": "qkv"}[order])
    assert np.allclose(other(x, backend=backend), expected, atol=1e-5) is (hkv == 1)


def test_fused_kv(backend, rng):
    w_q, w_kv, b_kv = f32(12, 32), f32(10, 32), f32(32)  # H 4, Hkv 2, D 8
    x, context = (rng.standard_normal((2, n, d), np.float32) for n, d in ((5, 12), (7, 10)))
    heads = {"num_heads": 4, "num_kv_heads": 2}
    halves = {"kv": ([0, 8], [16, 24]), "grouped": ([0, 16], [8, 24])}
    for order, starts in halves.items():
        columns = [np.concatenate([np.arange(s, s + 8) for s in each]) for each in starts]
        w_k, w_v = (w_kv[:, each] for each in columns)
        b_k, b_v = (b_kv[each] for each in columns)
        expected = MultiHeadAttention(w_q, w_k, w_v, b_k=b_k, b_v=b_v, **heads)
        layer = MultiHeadAttention.from_fused_kv(w_q, w_kv, b_kv=b_kv, order=order, **heads)
        np.testing.assert_array_equal(
            layer(x, context, backend=backend), expected(x, context, backend=backend)
        )
    with pytest.raises(ValueError, match="w_kv has 31 columns; expected 32, 2 Hkv·D with the D"):
        MultiHeadAttention.from_fused_kv(w_q, w_kv[:, :31], **heads)
