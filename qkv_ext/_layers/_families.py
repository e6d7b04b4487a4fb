"""The names that families of models give the weights of an attention layer: a line for each.

Adding a family is adding a line of FAMILIES.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """The modules of the projections, and what their names do not tell."""

    weights: tuple[str, ...]  # of Q, K and V; of Q, and K and V in one; or of all three in one
    o: tuple[str, ...]  # of W_O: the first that is there
    at: tuple[str, ...] = ("",)  # where in a layer the attention may stand
    order: str = ""  # of the rows of a fused weight; "?" where order= has to say it
    conv1d: bool = False  # weights are (in, out)
    rms: bool = False  # q_norm and k_norm may be there: RMS norms before rotary, norm_eps=
    sinks: bool = False  # sinks may be there
    scale: str = ""  # scale= has to be given: what it is
    scale_if_o_biased: str = ""  # the same where W_O alone has a bias
    bias: str = ""  # the one bias of separate weights, or of a fused one that is no module
    beside: tuple[str, ...] = ()  # norms before the projections or after W_O
    needs_o: bool = True  # if not, the module may end before W_O
    path: str = "*"  # a pattern of the whole name of the module
    refused: str = ""  # why it cannot be read


def tensor(module: str) -> str:
    """The name of a module's weight; torch's own attention has weights that are no modules."""
    return module if module.endswith("_weight") else f"{module}.weight"


_PROJ = ("q_proj", "k_proj", "v_proj")
#: Norms after W_O in BERT, before the projections in ESM, Megatron-BERT and XLM-RoBERTa-XL.
_NORMS = ("output.LayerNorm", "LayerNorm", "ln", "self_attn_layer_norm")

FAMILIES = (
    # torch.nn.MultiheadAttention; the same with kdim or vdim
    Family(("in_proj_weight",), ("out_proj",), order="qkv", bias="in_proj_bias"),
    Family(("q_proj_weight", "k_proj_weight", "v_proj_weight"), ("out_proj",), bias="in_proj_bias"),
    # BLT; GPT-Neo, EXAONE; then Llama, Qwen, Gemma, OLMo 2, GPT-OSS, BART, Whisper, CLIP, DETR,
    # ViT, Phi, GPT-J
    Family(_PROJ, ("o_proj",), path="*cross_attn_layers.*",
           refused="BLT, whose names these are, norms what goes into its projections"),
    Family(_PROJ, ("out_proj",), ("", "attention.", "attn.attention."), path="*attn.attention.",
           scale="GPT-Neo's is 1, EXAONE's 1/√D"),
    Family(_PROJ, ("o_proj", "out_proj", "dense"), ("", "self_attn.", "attention.", "attn."),
           rms=True, sinks=True, scale_if_o_biased="GPT-Neo's is 1, others' 1/√D"),
    # Phi-3; CodeGen and others
    Family(("qkv_proj",), ("o_proj",), ("", "self_attn."), order="qkv"),
    Family(("qkv_proj",), ("out_proj",), ("", "attn."),
           refused="CodeGen, whose names these are, has the rows of Q, V and K in blocks; of other "
           "models with these names from_fused takes the weights"),
    # GPT-2: attention to a context; of a sequence to itself, which a block has too
    Family(("q_attn", "c_attn"), ("c_proj",), order="kv", conv1d=True),
    Family(("c_attn",), ("c_proj",), ("", "attn."), order="qkv", conv1d=True),
    Family(("q_attn", "c_attn"), ("c_proj",), ("crossattention.",), order="kv", conv1d=True),
    # GPT-NeoX, BLOOM, Falcon, ChatGLM; MPT, ModernBERT; timm, BLIP
    Family(("query_key_value",), ("dense",), ("", "attention.", "self_attention."), order="?"),
    Family(("Wqkv",), ("out_proj", "Wo"), ("", "attn."), order="qkv"),
    Family(("qkv",), ("proj", "projection"), ("", "attn.", "self_attn."), order="?"),
    # T5, MPNet; DistilBERT, XLM
    Family(("q", "k", "v"), ("o",),
           ("", "SelfAttention.", "EncDecAttention.", "layer.0.SelfAttention.", "attn."),
           scale="T5's is 1, MPNet's 1/√D"),
    Family(("q_lin", "k_lin", "v_lin"), ("out_lin",), ("", "attention.")),
    # Pix2Struct; BertSelfAttention, AlbertAttention; BertAttention, BertLayer; ViTLayer of older
    # files, BLIP-2
    Family(("query", "key", "value"), ("output",), beside=("LayerNorm",),
           scale="Pix2Struct's is 1, Kosmos-2.5's 1/√D"),
    Family(("query", "key", "value"), ("dense", "out_proj", "proj"),
           beside=("LayerNorm",), needs_o=False),
    Family(("self.query", "self.key", "self.value"), ("output.dense",), ("", "attention."),
           beside=_NORMS),
    Family(("attention.query", "attention.key", "attention.value"), ("output.dense",),
           ("", "attention."), beside=_NORMS),
)  # fmt: skip

#: Tensors of an attention module that change nothing: what the options of a call stand for.
HARMLESS = ("*inv_freq", "*.cos_cached", "*.sin_cached", "*masked_bias")
CAUSAL = ("bias", "mask", "causal_mask")  # if they are masks (1, 1, n, n) of zeros and ones
#: What is not of the attention, where a layer has its projections at its top.
BESIDE = ("mlp.*", "output.LayerNorm.*")
#: What is of the attention, where a layer has it beside the module: BEiT.
OF_SCORES = ("relative_position_bias*", "relative_attention_bias*", "rel_pos_bias*")
#: What the layer cannot do, by what is in the names, in lower case.
REASONS = (
    ("*sink*", "sinks are an option of the call, sinks="),
    ("*bias_[kv]", "it joins no key and value of its own to those of the sequence"),
    ("*lora_*|*base_layer*|*adapter*", "adapters are to be merged into the weights first"),
    ("*weight_scale*|*input_scale*|*.scales|*qweight|*zeros|*zero_point|*quant*|*absmax|*scb|"
     "*g_idx", "quantised weights are to be made floats first"),
    ("*weight_[gv]|*parametriz*", "weights in parts are to be put together first"),
    ("*kv_a_*|*kv_b_*|*q_a_*|*q_b_*", "it has no latent keys and values"),
    ("*[qk]_norm.bias|*[qk]_layernorm*|*[qk]_layer_norm*|*query_layernorm*|*key_layernorm*|"
     "*[qk]_ln.*", "its norms of Q and K are RMS norms before rotary, read as q_norm.weight and "
     "k_norm.weight: no LayerNorms (StableLM, Phi), and none after rotary (HunYuan); of norms that "
     "are such by other names (LFM2) the class takes the weights"),
    ("*norm*|*ln.*", "it has no norms of V or of the heads, and RMS norms of Q and K beside "
     "q_proj, k_proj, v_proj alone"),
    ("*gate*", "it has no gates"),
    ("*relative*|*rel_*|*rpb*|*distance*|*position*|*attention_bias*",
     "it has no relative positions; a bias of the scores is an option of the call, mask="),
    ("*scale*|*lambda*|*gamma*", "it has no learned factors"),
)  # fmt: skip
