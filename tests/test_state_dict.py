"""MultiHeadAttention.from_state_dict: the names and shapes that trained models come with."""

import re

import numpy as np
import oracle
import pytest

from qkv_ext import MultiHeadAttention, scaled_dot_product_attention

from_state_dict = MultiHeadAttention.from_state_dict


def draw(rng, **shapes):
    """Numbers of about 1 / √(in) by name; dots in the names are written as __."""
    return {
        name.replace("__", "."): (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def under(prefix, names):
    """The names with a prefix, among those of other layers."""
    others = draw(
        np.random.default_rng(0), other__query__weight=(3, 3), other__in_proj_weight=(9, 3)
    )
    return others | {f"{prefix}{name}": x for name, x in names.items()}


def formula(x, w, b, heads, **options):
    """The layer by its (out, in) weights and its biases, both by part."""
    h, hkv = heads
    q, k, v = (
        (x @ w[p].T + (0 if b.get(p) is None else b[p]))
        .reshape(*x.shape[:-1], n, len(w[p]) // n)
        .swapaxes(-3, -2)
        for p, n in (("q", h), ("k", hkv), ("v", hkv))
    )
    output = scaled_dot_product_attention(q, k, v, **options).swapaxes(-3, -2)
    output = output.reshape(*output.shape[:-2], -1)
    if w.get("o") is not None:
        output = output @ w["o"].T + (0 if b.get("o") is None else b["o"])
    return output


def assert_layer(layer, x, w, b, heads, backend):
    expected = formula(x, w, b, heads, causal=True, backend=backend)
    np.testing.assert_allclose(layer(x, causal=True, backend=backend), expected, atol=2e-6)
    assert layer(x[0], backend=backend).dtype == np.float32


every_prefix = pytest.mark.parametrize("prefix", ["", "a", "encoder.layers.0.self_attn", "ends."])


@every_prefix
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_torch_names(separate, bias, prefix, backend, rng):
    """nn.MultiheadAttention: in_proj_weight, or three weights where kdim or vdim are given."""
    names = draw(rng, out_proj__weight=(12, 12))
    if separate:
        names |= draw(rng, q_proj_weight=(12, 12), k_proj_weight=(12, 12), v_proj_weight=(12, 12))
        w = [names[f"{part}_proj_weight"] for part in "qkv"]
    else:
        names |= draw(rng, in_proj_weight=(36, 12))
        w = np.split(names["in_proj_weight"], 3)
    b = {}
    if bias:
        names |= draw(rng, in_proj_bias=(36,), out_proj__bias=(12,))
        b = dict(zip("qkv", np.split(names["in_proj_bias"], 3), strict=True))
        b["o"] = names["out_proj.bias"]
    at = prefix if prefix in ("", "ends.") else f"{prefix}."
    layer = from_state_dict(under(at, names), prefix, 4)
    w = dict(zip("qkv", w, strict=True)) | {"o": names["out_proj.weight"]}
    assert_layer(layer, rng.standard_normal((3, 5, 12), np.float32), w, b, (4, 4), backend)


def test_torch_names_with_fewer_key_heads(backend, rng):
    """Three weights may differ in height; the one bias is cut accordingly."""
    names = draw(rng, q_proj_weight=(32, 12), k_proj_weight=(16, 12), v_proj_weight=(8, 12),
                 in_proj_bias=(56,), out_proj__weight=(12, 16))  # fmt: skip
    w = {part: names[f"{part}_proj_weight"] for part in "qkv"} | {"o": names["out_proj.weight"]}
    b = dict(zip("qkv", np.split(names["in_proj_bias"], [32, 48]), strict=True))
    x = rng.standard_normal((3, 5, 12), np.float32)
    assert_layer(from_state_dict(names, "", 4, 2), x, w, b, (4, 2), backend)


MODULES = {  # names of the modules of Q, K, V and O
    "Llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "Llama, a layer": tuple(f"self_attn.{part}_proj" for part in "qkvo"),
    "Phi": ("q_proj", "k_proj", "v_proj", "dense"),
    "Whisper, CLIP": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "Whisper, a layer": (*(f"self_attn.{part}_proj" for part in "qkv"), "self_attn.out_proj"),
    "BertSelfAttention": ("query", "key", "value", None),
    "BertAttention": ("self.query", "self.key", "self.value", "output.dense"),
    "BertLayer": (*(f"attention.self.{name}" for name in ("query", "key", "value")),
                  "attention.output.dense"),
    "ViTLayer": (*(f"attention.attention.{name}" for name in ("query", "key", "value")),
                 "attention.output.dense"),
}  # fmt: skip


@pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("biases", ["", "qv", "qkvo"])
@every_prefix
def test_module_names(prefix, biases, modules, backend, rng):
    """A module for each projection; biases may be missing one by one, as Whisper's of K."""
    shapes = {"q": (32, 12), "k": (16, 12), "v": (16, 12), "o": (10, 32)}  # H 4, Hkv 2, D 8
    w, b, names = {}, {}, {}
    for part, module in zip("qkvo", modules, strict=True):
        if module is None:
            continue
        w[part] = names[f"{module}.weight"] = draw(rng, w=shapes[part])["w"]
        if part in biases:
            b[part] = names[f"{module}.bias"] = draw(rng, b=shapes[part][:1])["b"]
    names |= draw(rng, mlp__up_proj__weight=(7, 12), output__LayerNorm__weight=(12,))
    at = prefix if prefix in ("", "ends.") else f"{prefix}."
    layer = from_state_dict(under(at, names), prefix, 4, 2)
    assert_layer(layer, rng.standard_normal((3, 5, 12), np.float32), w, b, (4, 2), backend)


def drawn_layer(rng, modules, **shapes):
    """Weights and biases by part, and by name, of 4 heads of 8; 2 for keys and values."""
    shapes = {"q": (32, 12), "k": (16, 12), "v": (16, 12), "o": (10, 32)} | shapes
    w = {p: draw(rng, w=shapes[p])["w"] for p, name in zip("qkvo", modules, strict=True) if name}
    b = {p: draw(rng, b=shapes[p][:1])["b"] for p in w}
    names = {}
    for p, name in zip("qkvo", modules, strict=True):
        if name:
            names |= {f"{name}.weight": w[p], f"{name}.bias": b[p]}
    return w, b, names


# ---- G1: what else the module of the projections holds ------------------------------------------

UNSERVED = [  # beside the projections, or under one of them
    "attn_sink.weight", "attention_sink_bias", "q_norm.bias", "k_norm.bias",
    "q_layernorm.norms.0.weight", "norm_q.weight",
    "query_layernorm.weight", "qk_norm.scale", "q_ln.weight", "v_norm.weight", "inner_attn_ln.bias",
    "attn_sub_norm.weight", "layernorm1.weight", "groupnorm.weight",
    "gate.weight", "gate_proj.weight", "g_proj.weight", "s_gate",
    "relative_attention_bias.weight", "relative_position_bias.relative_position_bias_table",
    "relative_position_bias_table", "relative_position_index", "distance_embedding.weight",
    "rel_pos_h", "emb_rel_k", "rpb", "attention_biases", "continuous_position_bias_mlp.0.weight",
    "bias_k", "bias_v", "q_bias", "in_proj_bias", "pos_bias_u", "bias", "mask",
    "logit_scale", "per_dim_scale", "layer_scale.lambda1", "lambda_q1", "gamma", "temperature",
    "qkv.weight", "qkv_proj.weight", "c_attn.weight", "in_proj.bias", "key_global.weight",
    "sr.weight", "conv.weight", "k_scale", "kv_cache.k_scale", "_extra_state", "indexer.wq.weight",
    "adapter.down.weight", "foo",
]  # fmt: skip
UNDER = [
    "lora_A.weight", "lora_B.default.weight", "base_layer.weight", "weight_scale", "scales", "SCB",
    "weight_scale_inv", "qweight", "qzeros", "g_idx", "input_scale", "weight.absmax", "weight_g",
    "weight.quant_state.bitsandbytes__nf4", "weight_v", "parametrizations.weight.original0",
    "lora_magnitude_vector.weight", "gain", "weight_format",
]  # fmt: skip


def inner(modules):
    """Where the module starts that holds the projection of Q."""
    return modules[0][: modules[0].rfind(".") + 1]


@pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("prefix", ["", "encoder.layers.0"])
def test_every_tensor_has_a_use(prefix, modules, rng):
    """Anything else is an error that names it, wherever in the module it is, and all of it."""
    at = prefix and f"{prefix}."
    _, _, names = drawn_layer(rng, modules)
    extra = [f"{inner(modules)}{name}" for name in UNSERVED]
    extra += [f"{module}.{name}" for module in modules if module for name in UNDER]
    for name in extra:
        mapping = under(at, names | {name: np.full((2, 2), 3, np.float32)})
        message = f"mapping has {re.escape(at + name)}, for which the layer has no use: .*ignore="
        with pytest.raises(ValueError, match=message):
            from_state_dict(mapping, prefix, 4)
        for pattern in (name, at + name, ["nothing", f"*{name[3:]}"], iter([f"{name[:-1]}?"])):
            from_state_dict(mapping, prefix, 4, ignore=pattern)
    every = {at + name: np.full((2, 2), 3, np.float32) for name in extra}
    with pytest.raises(ValueError, match="no use") as caught:
        from_state_dict(under(at, names) | every, prefix, 4, ignore=list(every)[::2])
    named = str(caught.value).removeprefix("mapping has ").partition(", for which")[0].split(", ")
    assert named == list(every)[1::2]


@pytest.mark.parametrize("name", ["q_proj.weight", "q_proj_weight", "bias_k", "k_proj.bias",
                                  "out_proj.lora_A.weight", "q_norm.weight", "sinks"])  # fmt: skip
def test_torch_layers_hold_nothing_else(name, rng):
    names = draw(rng, in_proj_weight=(36, 12), out_proj__weight=(12, 12))
    with pytest.raises(ValueError, match=f"mapping has a.{name}, for which"):
        from_state_dict(under("a.", names | {name: np.ones((12, 12), np.float32)}), "a", 4)
    other = draw(rng, q_proj_weight=(8, 8), k_proj_weight=(8, 8), v_proj_weight=(8, 8),
                 out_proj__weight=(8, 8), in_proj__weight=(24, 8))  # fmt: skip
    with pytest.raises(ValueError, match=r"mapping has in_proj\.weight, for which"):
        from_state_dict(other, "", 4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("attn_sink", "sinks are an option of the call, sinks="),
        ("q_norm.bias", "its norms of Q and K are RMS norms before rotary"),
        ("query_layernorm.weight", "its norms of Q and K are RMS norms before rotary"),
        ("v_norm.weight", "it has no norms of V or of the heads"),
        ("bias_v", "it joins no key and value of its own"),
        ("gate.weight", "it has no gates"),
        ("v_proj.lora_B.weight", "adapters are to be merged into the weights first"),
        ("v_proj.weight_scale_inv", "quantised weights are to be made floats first"),
        ("v_proj.weight_g", "weights in parts are to be put together first"),
        ("rel_pos_w", "it has no relative positions; a bias of the scores is an option of the"),
        ("logit_scale", "it has no learned factors"),
        ("foo", "nothing is known of their meaning"),
    ],
)  # fmt: skip
def test_what_the_layer_cannot_do(name, reason):
    with pytest.raises(ValueError, match=f"mapping has a.{name}, for which .*: {reason}"):
        from_state_dict(LLAMA | {f"a.{name}": np.ones(8, np.float32)}, "a", 2)


CAUSAL = np.tri(6, dtype=np.uint8)[None, None]


@pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize(
    "extra",
    [
        {"rotary_emb.inv_freq": np.ones(4), "rotary_emb.cos_cached": np.ones((9, 4))},
        {"rotary_embeddings.inv_freq": np.ones(4), "rotary_emb.original_inv_freq": np.ones(4)},
        {"masked_bias": np.float32(-1e9), "bias": CAUSAL},
        {"mask": CAUSAL.astype(bool), "causal_mask": CAUSAL.astype(np.float32), "gate": None},
    ],
)
@every_prefix
def test_what_changes_nothing(prefix, extra, modules, rng):
    """Tables of rotary positions and causal masks: the options of a call stand for them."""
    at = prefix if prefix in ("", "ends.") else f"{prefix}."
    w, b, names = drawn_layer(rng, modules)
    names |= {f"{inner(modules)}{name}": x for name, x in extra.items()}
    layer = from_state_dict(under(at, names), prefix, 4)
    x = rng.standard_normal((2, 5, 12), np.float32)
    np.testing.assert_allclose(layer(x), formula(x, w, b, (4, 2)), atol=2e-6)


LAYER = ("input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight",
         "mlp.router.weight", "self_attn_layer_norm.bias", "fc1.weight", "fc2.bias", "lambda_1",
         "layer_scale1.lambda1", "layernorm_before.weight", "intermediate.dense.weight",
         "output.dense.weight", "output.LayerNorm.weight", "norm1.weight", "ls1.gamma",
         "encoder_attn.q_proj.weight", "encoder_attn.q_norm.weight", "crossattention.self.sinks",
         "crossattention.self.query.weight", "linear1.weight", "gate.weight")  # fmt: skip
BESIDE = {  # what stands before the projections, after W_O, or beside both
    "Llama, a layer": LAYER,
    "Whisper, a layer": LAYER,
    "BertAttention": ("output.LayerNorm.weight", "LayerNorm.weight", "ln.bias",
                      "self_attn_layer_norm.weight"),
    "BertLayer": (*LAYER, "attention.output.LayerNorm.weight", "attention.LayerNorm.bias"),
    "ViTLayer": (*LAYER, "attention.output.LayerNorm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("family", BESIDE)
@every_prefix
def test_what_stands_beside(family, prefix, rng):
    """Norms, MLPs and a second attention are no part of the layer's first."""
    at = prefix if prefix in ("", "ends.") else f"{prefix}."
    w, b, names = drawn_layer(rng, MODULES[family])
    names |= {name: np.ones(3, np.float32) for name in BESIDE[family]}
    layer = from_state_dict(under(at, names), prefix, 4)
    x = rng.standard_normal((2, 5, 12), np.float32)
    np.testing.assert_allclose(layer(x), formula(x, w, b, (4, 2)), atol=2e-6)


@pytest.mark.parametrize("name", ["dense", "out_proj", "proj", "output"])
@every_prefix
def test_albert(name, prefix, backend, rng):
    """query, key, value and all of W_O in one module; its LayerNorm comes after W_O."""
    at = prefix if prefix in ("", "ends.") else f"{prefix}."
    w, b, names = drawn_layer(rng, ("query", "key", "value", name))
    names |= draw(rng, LayerNorm__weight=(12,), LayerNorm__bias=(12,))
    scale = {"scale": (len(w["q"]) // 4) ** -0.5} if name == "output" else {}
    layer = from_state_dict(under(at, names), prefix, 4, **scale)
    x = rng.standard_normal((3, 5, 12), np.float32)
    assert_layer(layer, x, w, b, (4, 2), backend)
    assert "w_o=True, biases=('b_q', 'b_k', 'b_v', 'b_o')" in repr(layer)
    del names[f"{name}.weight"]  # no W_O: its bias and the norm have no meaning
    with pytest.raises(ValueError, match=rf"{name}.bias, {at}LayerNorm.weight, {at}LayerNorm.bias"):
        from_state_dict(under(at, names), prefix, 4)


def test_beit(rng):
    """Its bias of the scores stands beside the module, of which it changes every result."""
    _, _, names = drawn_layer(rng, MODULES["Llama"])
    names = under("layers.0.attention.", names)
    table = {"layers.0.relative_position_bias.relative_position_bias_table": np.ones((9, 4))}
    message = "layers.0.relative_position_bias.relative_position_bias_table, for which"
    with pytest.raises(ValueError, match=message):
        from_state_dict(names | table, "layers.0.attention", 4)
    from_state_dict(names | table, "layers.0.attention", 4, ignore="relative_position_bias*")
    other = {name.replace(".0.", ".1."): x for name, x in table.items()}
    from_state_dict(names | other, "layers.0.attention", 4)


@pytest.mark.parametrize("ignore", [None, 3, ["a", 3], [None], b"sinks"])
def test_rejects_ignore(ignore):
    with pytest.raises(TypeError, match=r"ignore is .*; expected patterns of names, a str"):
        from_state_dict(LLAMA, "a", 2, ignore=ignore)


def test_what_may_be_left_out_is_used_all_the_same(rng):
    w, b, names = drawn_layer(rng, MODULES["Llama"])
    sinks = np.ones(4, np.float32)
    layer = from_state_dict(names | {"sinks": sinks}, "", 4, ignore="*")
    x = rng.standard_normal((2, 5, 12), np.float32)
    np.testing.assert_allclose(layer(x), formula(x, w, b, (4, 2), sinks=sinks), atol=2e-6)


# ---- heads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "hkv", "d"), [(4, 2, 8), (4, 1, 8), (8, 8, 4), (1, 1, 32)])
@pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)
def test_num_kv_heads_by_the_shapes(modules, h, hkv, d, rng):
    shapes = {"q": (h * d, 12), "k": (hkv * d, 12), "v": (hkv * 5, 12), "o": (10, h * 5)}
    w, b, names = drawn_layer(rng, modules, **shapes)
    assert f"num_kv_heads={hkv}, head_dim={d}," in repr(from_state_dict(names, "", h))
    x = rng.standard_normal((2, 5, 12), np.float32)
    expected = formula(x, w, b, (h, hkv))
    for given in ({}, {"num_kv_heads": None}, {"num_kv_heads": hkv}):
        np.testing.assert_allclose(from_state_dict(names, "", h, **given)(x), expected, atol=2e-6)
    with pytest.raises(ValueError, match=r"w_[qkv] has|num_heads is"):
        from_state_dict(names, "", h, 2 * hkv)


def test_num_kv_heads_of_torch_names(rng):
    names = draw(rng, in_proj_weight=(64, 12), out_proj__weight=(12, 32))
    assert "num_kv_heads=2, head_dim=8" in repr(from_state_dict(names, "", 4))
    names = draw(rng, q_proj_weight=(32, 12), k_proj_weight=(8, 12), v_proj_weight=(8, 12),
                 out_proj__weight=(12, 32))  # fmt: skip
    assert "num_kv_heads=1, head_dim=8" in repr(from_state_dict(names, "", 4))


@pytest.mark.parametrize("rows", [12, 24, 64])
def test_num_kv_heads_where_the_shapes_leave_a_doubt(rows, rng):
    """4 heads of 8, and keys for one and a half, three or eight: as with num_kv_heads=None."""
    names = draw(rng, q_proj__weight=(32, 12), k_proj__weight=(rows, 12),
                 v_proj__weight=(rows, 12), o_proj__weight=(12, 32))  # fmt: skip
    message = f"w_q has 8 columns for each of 4 heads and w_k {rows // 4} for each of 4"
    with pytest.raises(ValueError, match=message):
        from_state_dict(names, "", 4)


@pytest.mark.parametrize("prefix", ["", "a"])
def test_keys_and_values_of_different_widths(prefix, backend, rng):
    """G13, nn.MultiheadAttention(kdim=10, vdim=12): values have a context of their own."""
    at = prefix and "a."
    names = draw(rng, q_proj_weight=(8, 8), k_proj_weight=(8, 10), v_proj_weight=(8, 12),
                 in_proj_bias=(24,), out_proj__weight=(8, 8))  # fmt: skip
    layer = from_state_dict(under(at, names), prefix, 2)
    assert "d_in=8, num_heads=2, num_kv_heads=2, head_dim=4, d_out=8" in repr(layer)
    x, keys, values = (rng.standard_normal((2, 5, n), np.float32) for n in (8, 10, 12))
    bias = names["in_proj_bias"].reshape(3, 8)
    q, k, v = (
        (of @ names[f"{part}_proj_weight"].T + b).reshape(2, 5, 2, 4).swapaxes(1, 2)
        for part, of, b in zip("qkv", (x, keys, values), bias, strict=True)
    )
    heads = oracle.attention(q, k, v)[0].swapaxes(1, 2).reshape(2, 5, 8)
    expected = heads @ names["out_proj.weight"].T
    output = layer(x, keys, value_context=values, backend=backend)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"value_context has shape .2, 4, 12.; expected .2, 5."):
        layer(x, keys, value_context=values[:, :4], backend=backend)
    with pytest.raises(
        ValueError, match=r"context has shape .2, 5, 10.; expected .*, 12., the d_in"
    ):
        layer(x, keys, backend=backend)


# ---- arrays -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_dtypes(name, backend, rng):
    """Storage types become float32 once; float64 stays what it is."""
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)
    names = draw(rng, query__weight=(8, 8), key__weight=(8, 8), value__weight=(8, 8),
                 query__bias=(8,))  # fmt: skip
    names = {key: x.astype(dtype) for key, x in names.items()}
    x = rng.standard_normal((2, 5, 8))
    layer = from_state_dict(names, "", 2)
    if name == "float64":
        assert layer(x, backend="numpy").dtype == np.float64
        return
    x = x.astype(np.float32)
    wide = from_state_dict({key: w.astype(np.float32) for key, w in names.items()}, "", 2)
    output = layer(x, backend=backend)
    assert output.dtype == np.float32
    np.testing.assert_array_equal(output, wide(x, backend=backend))


def test_a_mixture_of_float_types(rng):
    """Biases are often float32 beside half weights."""
    names = draw(rng, query__weight=(8, 8), key__weight=(8, 8), value__weight=(8, 8))
    names = {key: x.astype(np.float16) for key, x in names.items()} | draw(rng, query__bias=(8,))
    layer = from_state_dict(names, "", 2)
    assert layer(np.zeros((2, 5, 8), np.float32)).dtype == np.float32


class Tensor:
    """What np.asarray takes, and nothing else."""

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.x, dtype)


class Elsewhere:
    """What a tensor of another device does."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert: copy the tensor to the memory of the host first")


def test_anything_that_asarray_takes(rng):
    names = draw(rng, q_proj__weight=(8, 8), k_proj__weight=(8, 8), v_proj__weight=(8, 8),
                 o_proj__weight=(8, 8))  # fmt: skip
    x = rng.standard_normal((2, 5, 8), np.float32)
    expected = from_state_dict(names, "", 2)(x)
    wrapped = {name: Tensor(w) for name, w in names.items()}
    np.testing.assert_array_equal(from_state_dict(wrapped, "", 2)(x), expected)


def test_it_keeps_its_weights(rng):
    names = draw(rng, query__weight=(8, 8), key__weight=(8, 8), value__weight=(8, 8),
                 query__bias=(8,))  # fmt: skip
    x = rng.standard_normal((2, 5, 8), np.float32)
    layer = from_state_dict(names, "", 2)
    expected = layer(x)
    for array in names.values():
        array[...] = np.nan
    np.testing.assert_array_equal(layer(x), expected)


LLAMA = {f"a.{part}_proj.weight": np.zeros((8, 8), np.float32) for part in "qkvo"}
TORCH = {"a.in_proj_weight": np.zeros((24, 8), np.float32),
         "a.out_proj.weight": np.zeros((8, 8), np.float32)}  # fmt: skip
SEPARATE = {f"a.{part}_proj_weight": np.zeros((8, 8), np.float32) for part in "qkv"}


def without(names, name):
    return {key: x for key, x in names.items() if key != name}


@pytest.mark.parametrize(
    ("mapping", "prefix", "error", "messages"),
    [
        (LLAMA, "b", ValueError,
         ["no attention weights under prefix 'b.'", "in_proj_weight", "q_proj_weight",
          "q_proj.weight, k_proj.weight, v_proj.weight", "self.query.weight",
          "some under .*self_attn",
          "none of its 4 names starts so"]),
        ({"a.attn_in.weight": np.zeros((8, 24)), **dict.fromkeys(map("a.{}".format, range(20)))},
         "a", ValueError, ["there are a.0, a.1", "..."]),
        ({}, "", ValueError, ["none of its 0 names"]),
        ({0: np.zeros(3)}, "a", ValueError, ["none of its 1 names starts so"]),
        (without(LLAMA, "a.k_proj.weight"), "a", ValueError, ["mapping has no a.k_proj.weight"]),
        (without(LLAMA, "a.o_proj.weight"), "a", ValueError,
         ["mapping has no a.o_proj.weight or a.out_proj.weight or a.dense.weight, but"]),
        (without(TORCH, "a.out_proj.weight"), "a", ValueError,
         ["mapping has no a.out_proj.weight"]),
        (without(SEPARATE, "a.v_proj_weight") | {"a.out_proj.weight": np.zeros((8, 8))}, "a",
         ValueError, ["mapping has no a.v_proj_weight"]),
        (TORCH | {"a.bias_k": np.zeros((1, 1, 8))}, "a", ValueError, ["mapping has a.bias_k"]),
        (LLAMA | {"a.q_norm.weight": np.ones(4)}, "a", ValueError, ["has no a.k_norm.weight"]),
        (LLAMA | {"a.q_proj.weight": np.zeros((8, 8), np.int8)}, "a", TypeError,
         ["a.q_proj.weight has dtype int8"]),
        (LLAMA | {"a.q_proj.weight": np.zeros((8, 8, 1), np.float32)}, "a", ValueError,
         [r"a.q_proj.weight has shape \(8, 8, 1\); expected \(out, in\)"]),
        (LLAMA | {"a.q_proj.bias": np.zeros((8, 1), np.float32)}, "a", ValueError,
         [r"a.q_proj.bias has shape \(8, 1\); expected \(out,\)"]),
        (LLAMA | {"a.q_proj.bias": np.zeros(7, np.float32)}, "a", ValueError,
         [r"b_q has shape \(7,\)"]),
        (LLAMA | {"a.q_proj.weight": Elsewhere()}, "a", TypeError,
         ["a.q_proj.weight cannot be read as an array: can't convert"]),
        (list(LLAMA), "a", TypeError, ["mapping is a list"]),
        (LLAMA, None, TypeError, ["prefix is None; expected a str"]),
    ],
)  # fmt: skip
def test_rejects(mapping, prefix, error, messages):
    with pytest.raises(error) as caught:
        from_state_dict(mapping, prefix, 2)
    for message in messages:
        assert caught.match(message)


def test_rejects_heads():
    with pytest.raises(ValueError, match="num_heads is 3"):
        from_state_dict(LLAMA, "a", 3, 2)
    with pytest.raises(ValueError, match="w_q has shape"):
        from_state_dict(LLAMA, "a", 3)
    with pytest.raises(ValueError, match="expected 16, "):  # thirds, and no GQA in them
        from_state_dict(TORCH, "a", 4, 2)


# ---- against torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 6}, {"bias": False}], ids=str)
@pytest.mark.parametrize("prefix", ["", "attn"])
def test_against_torch(prefix, options, backend):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(12, 3, batch_first=True, **options).eval()
    if module.in_proj_bias is not None:  # torch starts them at 0
        torch.nn.init.normal_(module.in_proj_bias)
        torch.nn.init.normal_(module.out_proj.bias)
    at = f"{prefix}." if prefix else ""
    layer = from_state_dict({at + n: x for n, x in module.state_dict().items()}, prefix, 3)
    x = torch.randn(2, 5, 12)
    context = torch.randn(2, 9, 6) if "kdim" in options else x
    expected, weights = module(x, context, context, average_attn_weights=False)
    output, actual = layer(x, context, return_weights=True, backend=backend)
    np.testing.assert_allclose(output, expected.detach(), atol=2e-6)
    np.testing.assert_allclose(actual, weights.detach(), atol=1e-6)
