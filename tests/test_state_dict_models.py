"""from_state_dict against the attention of transformers: small random models, from their own state.

A hook gives what goes into the projections of Q and of K, and what comes out of W_O, in a run of
the whole model; so masks, positions and scales are the model's own.
"""

import numpy as np
import pytest

import qkv_ext

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BASE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48}  # fmt: skip
LLAMA = BASE | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {"vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "pad_token_id": 0}  # fmt: skip
IMAGES = {"image_size": 12, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 4, "intermediate_size": 48}  # fmt: skip
DETR = {name: size for name, size in BART.items() if name not in ("vocab_size", "pad_token_id")} | {
    "num_queries": 5, "use_timm_backbone": False,
    "backbone_config": transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        out_features=["stage2"]),
}  # fmt: skip
FALCON = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CAUSAL = {"causal": True}
ALIBI = CAUSAL | {"alibi_slopes": qkv_ext.alibi_slopes(4)}
GROUPED = {"order": "grouped"}


def rotary(d=8, base=10000.0, **more):
    return CAUSAL | {"rotary": qkv_ext.rotary_tables(16, d, base=base), **more}


MODELS = {  # model, its config, module, (Q, K, O) in it, options of from_state_dict, of the call
    "Llama": ("Llama", LLAMA, "layers.1.self_attn", ("q_proj", "k_proj", "o_proj"), {}, rotary()),
    "GPT-2": ("GPT2", GPT2, "h.1.attn", ("c_attn", "c_attn", "c_proj"), {}, CAUSAL),
    "GPT-2, scaled by layers": (
        "GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "h.1.attn",
        ("c_attn", "c_attn", "c_proj"), {"scale": 8**-0.5 / 2}, CAUSAL),
    "GPT-NeoX": (
        "GPTNeoX", BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                               "partial_rotary_factor": 0.5}},
        "layers.1.attention", ("query_key_value", "query_key_value", "dense"), GROUPED,
        rotary(4, rotary_dim=4)),
    "GPT-J": (
        "GPTJ", GPT2 | {"rotary_dim": 4}, "h.1.attn", ("q_proj", "k_proj", "out_proj"), {},
        rotary(4, rotary_dim=4, interleaved=True)),
    "BLOOM": ("Bloom", {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4},
              "h.1.self_attention", ("query_key_value", "query_key_value", "dense"), GROUPED,
              ALIBI),
    "Falcon-7B": ("Falcon", FALCON | {"multi_query": True}, "h.1.self_attention",
                  ("query_key_value", "query_key_value", "dense"), GROUPED, rotary()),
    "Falcon-40B": (
        "Falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
        "h.1.self_attention", ("query_key_value", "query_key_value", "dense"), GROUPED, rotary()),
    "Falcon-RW": (
        "Falcon", FALCON | {"multi_query": False, "alibi": True, "bias": True},
        "h.1.self_attention", ("query_key_value", "query_key_value", "dense"), GROUPED,
        CAUSAL | {"alibi_slopes": qkv_ext.alibi_slopes(4) / np.float32(8**0.5)}),
    "MPT": ("Mpt", {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4},
            "blocks.1.attn", ("Wqkv", "Wqkv", "out_proj"), {}, ALIBI),
    "Phi-3": ("Phi3", BASE | {"num_key_value_heads": 2, "pad_token_id": 0}, "layers.1.self_attn",
              ("qkv_proj", "qkv_proj", "o_proj"), {}, rotary()),
    "Gemma 2": (
        "Gemma2", LLAMA | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
        "layers.1.self_attn", ("q_proj", "k_proj", "o_proj"), {"scale": 20**-0.5},
        rotary(softcap=3.0)),
    "T5": ("T5Encoder", T5, "encoder.block.1.layer.0.SelfAttention", ("q", "k", "o"),
           {"scale": 1.0}, {"mask": "bias"}),
    "BART": ("Bart", BART, "decoder.layers.1.self_attn", ("q_proj", "k_proj", "out_proj"), {},
             CAUSAL),
    "BART, cross": ("Bart", BART, "decoder.layers.1.encoder_attn",
                    ("q_proj", "k_proj", "out_proj"), {}, {}),
    "ALBERT": ("Albert", BASE | {"embedding_size": 16},
               "encoder.albert_layer_groups.0.albert_layers.0.attention",
               ("query", "key", "dense"), {}, {}),
    "BERT": ("Bert", BASE, "encoder.layer.1.attention", ("self.query", "self.key", "output.dense"),
             {}, {}),
    "DistilBERT": ("DistilBert", {"vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4,
                                  "hidden_dim": 48}, "transformer.layer.1.attention",
                   ("q_lin", "k_lin", "out_lin"), {}, {}),
    "Whisper, cross": (
        "Whisper", BART | {"num_mel_bins": 8, "max_source_positions": 6},
        "decoder.layers.1.encoder_attn", ("q_proj", "k_proj", "out_proj"), {}, {}),
    "ViT": ("ViT", IMAGES, "layers.1.attention", ("q_proj", "k_proj", "o_proj"), {}, {}),
    "CLIP": ("CLIPText", BASE, "encoder.layers.1.self_attn", ("q_proj", "k_proj", "out_proj"), {},
             CAUSAL),
    "GPT-2, cross": (
        "GPT2", GPT2 | {"add_cross_attention": True}, "h.1.crossattention",
        ("q_attn", "c_attn", "c_proj"), {}, {}),
    "GPT-Neo": (
        "GPTNeo", {"vocab_size": 50, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                   "attention_types": [[["global", "local"], 1]], "window_size": 3},
        "h.1.attn.attention", ("q_proj", "k_proj", "out_proj"), {"scale": 1.0},
        CAUSAL | {"window": (2, 0)}),
    "ModernBERT": ("ModernBert", BASE | {"pad_token_id": 0}, "layers.1.attn",
                   ("Wqkv", "Wqkv", "Wo"), {}, rotary(causal=False)),
    "Whisper": (
        "Whisper", BART | {"num_mel_bins": 8, "max_source_positions": 6},
        "decoder.layers.1.self_attn", ("q_proj", "k_proj", "out_proj"), {}, CAUSAL),
    "BLIP": ("BlipVision", IMAGES, "encoder.layers.1.self_attn", ("qkv", "qkv", "projection"),
             {"order": "qkv"}, {}),
    "DETR": ("Detr", DETR, "encoder.layers.1.self_attn", ("q_proj", "k_proj", "o_proj"), {},
             {"value_context": "values"}),
    "DETR, cross": ("Detr", DETR, "decoder.layers.1.encoder_attn",
                    ("q_proj", "k_proj", "o_proj"), {}, {"value_context": "values"}),
    "Qwen 2-VL": (
        "Qwen2VLText", LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                    "mrope_section": [1, 2, 1]}},
        "layers.1.self_attn", ("q_proj", "k_proj", "o_proj"), {},
        rotary(positions="positions", rotary_sections=[1, 2, 1])),
}  # fmt: skip
NORMED = {  # norms of Q and K, or sinks
    "GPT-OSS": ("GptOss", LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 1,
                                   "rope_parameters": {"rope_type": "default",
                                                       "rope_theta": 10000.0}},
                "layers.1.self_attn", ("q_proj", "k_proj", "o_proj"), {}, rotary()),
    "Qwen 3": ("Qwen3", LLAMA, "layers.1.self_attn", ("q_proj", "k_proj", "o_proj"),
               {"norm_eps": 1e-6}, rotary()),
    "OLMo 2": ("Olmo2", LLAMA, "layers.1.self_attn", ("q_proj", "k_proj", "o_proj"),
               {"norm_eps": 1e-5}, rotary()),
    "Gemma 3": ("Gemma3Text", LLAMA | {"query_pre_attn_scalar": 20}, "layers.1.self_attn",
                ("q_proj", "k_proj", "o_proj"),
                {"norm_eps": 1e-6, "norm_offset": 1.0, "scale": 20**-0.5}, rotary()),
}  # fmt: skip


def run(name):
    """The state of a model, and what one of its attentions is given and gives."""
    model, config, module, (q, k, o), *_ = (MODELS | NORMED)[name]
    torch.manual_seed(0)
    base = model.removesuffix("Encoder").removesuffix("Text")
    text = f"{model}Config" if model.endswith("Text") else f"{base}Config"
    config = getattr(transformers, text)(**config)
    config._attn_implementation = "sdpa" if base == "Falcon" else "eager"  # eager adds ALiBi twice
    model = getattr(transformers, f"{model}Model")(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * (0.3 if x.ndim == 1 else x.shape[-1] ** -0.5))
    seen = {}
    at = model.get_submodule(module)
    parts = [("x", q, 0), ("context", k, 0), ("output", o, 1)]
    if base == "Detr":
        parts.append(("values", "v_proj", 0))
    for key, part, which in parts:
        at.get_submodule(part).register_forward_hook(
            lambda _, given, result, key=key, which=which: seen.update(
                {key: (given[0], result)[which].detach().numpy()}
            )
        )
    with torch.no_grad():
        tokens = torch.randint(3, 50, (2, 7))
        if "image_size" in config.to_dict():
            model(torch.randn(2, 3, 12, 12))
        elif base == "Detr":
            model(torch.randn(2, 3, 64, 48))
        elif name == "GPT-2, cross":
            model(input_ids=tokens, encoder_hidden_states=torch.randn(2, 6, 32))
        elif name == "Qwen 2-VL":
            positions = torch.tensor([[[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4],
                                       [0, 1, 2, 3, 2, 3, 4]]] * 2).transpose(0, 1)  # fmt: skip
            model(input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens))
            seen["positions"] = positions.numpy()
        elif name.startswith("Whisper"):
            model(torch.randn(2, 8, 12), decoder_input_ids=tokens)
        else:
            model(input_ids=tokens)
        if name == "T5":
            first = model.encoder.block[0].layer[0].SelfAttention
            seen["bias"] = first.compute_bias(7, 7).numpy()
    return {name: x.numpy() for name, x in model.state_dict().items()}, seen


def check(name, backend):
    _, _, module, _, options, call = (MODELS | NORMED)[name]
    state, seen = run(name)
    layer = qkv_ext.MultiHeadAttention.from_state_dict(state, module, 4, **options)
    call = {key: seen.get(x, x) if isinstance(x, str) else x for key, x in call.items()}
    x, context = seen["x"], seen["context"]
    context = () if x.shape == context.shape and (x == context).all() else (context,)
    output = layer(x, *context, backend=backend, **call)
    np.testing.assert_allclose(output, seen["output"], atol=1e-5)
    if call.get("causal") and "positions" not in call:
        cache = qkv_ext.KVCache(2, layer._layer.num_kv_heads, 8)
        steps = [layer(x[:, a:b], cache=cache, backend=backend, **call)
                 for a, b in ((0, 4), (4, 5), (5, 7))]  # fmt: skip
        np.testing.assert_allclose(np.concatenate(steps, 1), seen["output"], atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_model(name, backend):
    check(name, backend)


@pytest.mark.parametrize("name", NORMED)
def test_model_with_norms(name, backend):
    check(name, backend)
