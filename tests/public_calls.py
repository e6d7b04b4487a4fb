"""Every public call with small arguments, for tests of what arguments may be, and for the fuzzer.

CALLS has the function of each, its arguments, and the kinds of those that a test may change.
"""

import numpy as np

import qkv_ext
from qkv_ext import onnx

from_state_dict = qkv_ext.MultiHeadAttention.from_state_dict


def f32(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


Q, PACK, X, W = f32(1, 2, 3, 4), f32(3, 2, 4), f32(1, 3, 8), f32(8, 8)
COS, SIN = qkv_ext.rotary_tables(64, 4)
ATTENTION = {
    "mask": "array", "causal": "switch", "align": "choice", "scale": "real", "window": "pair",
    "softcap": "real", "alibi_slopes": "array", "sinks": "array", "kv_lengths": "integers",
    "q_lengths": "integers", "block_mask": "choice", "q_segments": "segments",
    "kv_segments": "segments", "query_offset": "integers", "key_offset": "integer", "out": "array",
    "threads": "integer", "backend": "choice",
}  # fmt: skip
EXTRAS = {"return_weights": "switch", "return_lse": "switch"}
WEIGHTS = dict.fromkeys(("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o"), "array")
HEADS = {"num_heads": "integer", "num_kv_heads": "integer"}
OWN = {"q_norm": "array", "k_norm": "array", "norm_eps": "real", "scale": "real", "sinks": "array"}
COMPUTED = {"threads": "integer", "backend": "choice"}
PRODUCT = {"out": "array", **COMPUTED}
PACKED = {name: ATTENTION[name] for name in ATTENTION
          if name not in ("mask", "q_lengths", "block_mask", "q_segments", "kv_segments",
                          "query_offset", "key_offset")}  # fmt: skip
SEGMENTS = {"q_segments": np.array([[0, 0, 1]]), "kv_segments": np.array([[0, 1, 1]])}
OF_SEGMENTS = dict.fromkeys(SEGMENTS, "integers")
LAYER = dict(zip(WEIGHTS, (*(W,) * 4, *(W[0],) * 4), strict=True)) | {"num_heads": 2}


def cache(batch=1):
    made = qkv_ext.KVCache(batch, 2, 4)
    made.append(*(np.repeat(x, batch, 0) for x in (Q, Q)))
    return made


def layer(**options):
    return qkv_ext.MultiHeadAttention(**(LAYER | options))


def layer_with_cache(**options):
    """What is appended is part of the answer."""
    own = cache()
    output = layer()(X, cache=own, **options)
    return output, own.keys(0)


def changed(method):
    """The cache after a call of one of its methods."""

    def call(**options):
        own = cache(2)
        getattr(own, method)(**options)
        return own.lengths, own.dropped, *map(own.keys, range(own.batch))

    return call


NORMED = {"q_proj": W, "k_proj": W, "v_proj": W, "o_proj": W, "q_norm": f32(4), "k_norm": f32(8)}
CALLS = {  # the call, its arguments, and the kinds of those that are to be odd
    "scaled_dot_product_attention": (
        qkv_ext.scaled_dot_product_attention, {"q": Q, "k": Q, "v": Q},
        dict.fromkeys("qkv", "array") | ATTENTION | EXTRAS | {"layout": "choice"}),
    "scaled_dot_product_attention with segments": (
        lambda **given: qkv_ext.scaled_dot_product_attention(**given),
        {"q": Q, "k": Q, "v": Q} | SEGMENTS, OF_SEGMENTS),
    "attend with segments": (lambda **given: cache().attend(**given), {"q": Q} | SEGMENTS,
                             OF_SEGMENTS),
    "trace with segments": (lambda **given: qkv_ext.trace(**given),
                            {"q": Q, "k": Q, "v": Q} | SEGMENTS, OF_SEGMENTS),
    "layer with segments": (lambda **given: layer()(**given), {"x": X} | SEGMENTS, OF_SEGMENTS),
    "BlockMask": (lambda **given: qkv_ext.BlockMask(**given).keep,
                  {"keep": np.ones((2, 3), bool), "block_size": (2, 1)},
                  {"keep": "array", "block_size": "pair"}),
    "varlen_attention": (
        qkv_ext.varlen_attention,
        {"q": PACK, "k": PACK, "v": PACK, "cu_seqlens_q": [0, 3], "cu_seqlens_k": [0, 3]},
        dict.fromkeys("qkv", "array") | PACKED
        | {"cu_seqlens_q": "integers", "cu_seqlens_k": "integers", "return_lse": "switch"}),
    "trace": (qkv_ext.trace, {"q": Q, "k": Q, "v": Q},
              dict.fromkeys("qkv", "array") | ATTENTION | {"layout": "choice"}),
    "attend": (lambda **given: cache().attend(**given), {"q": Q},
               {"q": "array"} | ATTENTION | EXTRAS | {"layout": "choice"}),
    "append": (changed("append"), {"k": f32(2, 2, 3, 4), "v": f32(2, 2, 3, 4)},
               {"k": "array", "v": "array", "lengths": "integers"}),
    "truncate": (changed("truncate"), {}, {"lengths": "integers"}),
    "drop": (changed("drop"), {}, {"before": "integers"}),
    "reorder": (changed("reorder"), {}, {"indices": "integers"}),
    "keys": (lambda **given: cache().keys(**given), {}, {"b": "integer"}),
    "values": (lambda **given: cache().values(**given), {}, {"b": "integer"}),
    "KVCache": (lambda **given: repr(qkv_ext.KVCache(**given)),
                {"batch": 1, "num_kv_heads": 2, "head_dim": 4},
                {"batch": "integer", "num_kv_heads": "integer", "head_dim": "integer",
                 "v_dim": "integer", "dtype": "choice"}),
    "MultiHeadAttention": (lambda **given: layer(**given)(X), LAYER, WEIGHTS | HEADS | OWN),
    "from_fused": (lambda **given: qkv_ext.MultiHeadAttention.from_fused(**given)(X),
                   {"w_qkv": f32(8, 24), "w_o": W, "num_heads": 2},
                   {"w_qkv": "array", "w_o": "array", "b_qkv": "array", "b_o": "array",
                    "order": "choice"}
                   | HEADS | OWN),
    "from_fused_kv": (lambda **given: qkv_ext.MultiHeadAttention.from_fused_kv(**given)(X),
                      {"w_q": W, "w_kv": f32(8, 16), "w_o": W, "num_heads": 2},
                      dict.fromkeys(("w_q", "w_kv", "w_o", "b_q", "b_kv", "b_o"), "array")
                      | {"order": "choice"} | HEADS | OWN),
    "from_state_dict": (lambda **given: from_state_dict(**given)(X),
                        {"mapping": {"in_proj_weight": f32(24, 8), "out_proj.weight": W},
                         "prefix": "", "num_heads": 2},
                        {"mapping": "array", "prefix": "choice", "scale": "real"} | HEADS),
    "from_state_dict with norms": (
        lambda **given: from_state_dict(**given)(X),
        {"mapping": {f"{name}.weight": w for name, w in NORMED.items()}, "prefix": "",
         "num_heads": 2, "norm_eps": 1e-6},
        {"norm_eps": "real", "norm_offset": "real", "scale": "real"} | HEADS),
    "from_state_dict of a fused weight": (
        lambda **given: from_state_dict(**given)(X),
        {"mapping": {"qkv.weight": f32(24, 8), "proj.weight": W}, "prefix": "", "num_heads": 2,
         "order": "grouped"},
        {"order": "choice", "scale": "real"} | HEADS),
    "layer": (lambda **given: layer()(**given), {"x": X, "rotary": (COS, SIN)},
              {"x": "array", "context": "array", "value_context": "array", "kv": "array",
               "cache": "array", "rotary": "array", "interleaved": "switch",
               "rotary_dim": "integer", "positions": "integers"} | ATTENTION | EXTRAS),
    "packed layer": (
        lambda **given: layer()(**given),
        {"x": X[0], "context": X[0], "rotary": (COS, SIN), "cu_seqlens": [0, 3],
         "cu_seqlens_context": [0, 3], "positions": [[0, 1, 2]] * 2, "rotary_sections": [1, 1]},
        {"x": "array", "context": "array", "cu_seqlens": "integers",
         "cu_seqlens_context": "integers", "positions": "integers",
         "rotary_sections": "integers"} | PACKED),
    "layer with cache": (layer_with_cache, {"rotary": (COS, SIN)}, ATTENTION | EXTRAS),
    "project_kv": (lambda **given: tuple(layer().project_kv(**given)), {"context": X},
                   {"context": "array", "value_context": "array"} | COMPUTED),
    "self_attention": (qkv_ext.self_attention, {"x": X} | LAYER,
                       {"x": "array"} | WEIGHTS | HEADS | ATTENTION | EXTRAS),
    "cross_attention": (qkv_ext.cross_attention, {"x_dec": X, "x_enc": X} | LAYER,
                        {"x_dec": "array", "x_enc": "array", "x_enc_v": "array"} | WEIGHTS | HEADS
                        | ATTENTION | EXTRAS),
    "trace_self": (qkv_ext.trace_self, {"x": X} | LAYER,
                   {"x": "array"} | WEIGHTS | HEADS | ATTENTION),
    "trace_cross": (qkv_ext.trace_cross, {"x_dec": X, "x_enc": X} | LAYER,
                    {"x_dec": "array", "x_enc": "array"} | WEIGHTS | HEADS | ATTENTION),
    "merge_attention": (qkv_ext.merge_attention, {"outputs": [Q], "lses": [Q[..., 0]]},
                        {"outputs": "array", "lses": "array", "layout": "choice"} | COMPUTED),
    "matmul": (qkv_ext.matmul, {"a": W, "b": W}, {"a": "array", "b": "array"} | PRODUCT),
    "linear_projection": (qkv_ext.linear_projection, {"x": X, "w": W},
                          dict.fromkeys(("x", "w", "b", "residual"), "array")
                          | {"activation": "choice"} | PRODUCT),
    "pack_weight": (lambda **given: qkv_ext.pack_weight(**given).panels, {"w": W},
                    {"w": "array", "dtype": "choice"}),
    "softmax": (qkv_ext.softmax, {"x": f32(2, 2, 3)}, {"x": "array", "axis": "integer"} | PRODUCT),
    "layer_norm": (qkv_ext.layer_norm, {"x": X, "weight": W[0]},
                   {"x": "array", "weight": "array", "bias": "array", "eps": "real"} | PRODUCT),
    "rms_norm": (qkv_ext.rms_norm, {"x": X, "weight": W[0]},
                 {"x": "array", "weight": "array", "eps": "real"} | PRODUCT),
    "alibi_slopes": (qkv_ext.alibi_slopes, {}, {"num_heads": "integer"}),
    "rotary_tables": (qkv_ext.rotary_tables, {"n": 3, "dim": 4},
                      {"n": "integer", "dim": "integer", "base": "real", "scale": "real",
                       "inv_freq": "array", "attention_factor": "real"}),
    "rotary_inv_freq": (
        qkv_ext.rotary_inv_freq, {"dim": 4},
        {"dim": "integer", "base": "real", "scaling": "mapping"}
        | dict.fromkeys(("length", "max_position_embeddings", "original_max_position_embeddings"),
                        "integer")),
    "apply_rotary": (qkv_ext.apply_rotary, {"x": Q, "cos": COS, "sin": SIN},
                     {"x": "array", "cos": "array", "sin": "array", "positions": "integers",
                      "interleaved": "switch", "rotary_dim": "integer", "layout": "choice"}
                     | PRODUCT),
    "onnx.attention": (onnx.attention, {"Q": Q, "K": Q, "V": Q, "opset": 25},
                       dict.fromkeys(("Q", "K", "V", "attn_mask", "past_key", "past_value"),
                                     "array")
                       | {"nonpad_kv_seqlen": "integers", "scale": "real", "softcap": "cap",
                          "return_qk_matmul_output": "switch"}
                       | dict.fromkeys(("is_causal", "q_num_heads", "kv_num_heads",
                                        "qk_matmul_output_mode", "softmax_precision",
                                        "left_window_size", "right_window_size", "opset"),
                                       "attribute") | COMPUTED),
    "onnx.rotary_embedding": (onnx.rotary_embedding, {"X": Q, "cos_cache": COS, "sin_cache": SIN,
                                                      "position_ids": [[0, 1, 2]]},
                              dict.fromkeys(("X", "cos_cache", "sin_cache"), "array")
                              | dict.fromkeys(("interleaved", "rotary_embedding_dim", "num_heads"),
                                              "attribute")
                              | {"position_ids": "integers"} | COMPUTED),
}  # fmt: skip

#: By what other name an error may call an argument.
ALIASES = {"attn_mask": "mask", "nonpad_kv_seqlen": "kv_lengths", "position_ids": "positions",
           "cos_cache": "cos", "sin_cache": "sin", "left_window_size": "window",
           "right_window_size": "window", "rotary_embedding_dim": "rotary_dim",
           "cu_seqlens_k": "cu_seqlens_q", "Q": "q", "K": "k", "V": "v", "X": "x",
           "past_key": "past_value", "past_value": "past_key", "w_qkv": "w_k",
           "rotary": "cos"}  # fmt: skip
#: Arrays for the arguments that CALLS gives none, by the call or for all of them.
VALID = {
    "mask": np.float32([[0], [-np.inf], [1]]), "attn_mask": np.float32([[0, 1, 2]]),
    "alibi_slopes": f32(2), "sinks": f32(2), "kv_lengths": np.array([3]),
    "query_offset": np.array([1]), "q_lengths": np.array([2]), "key_offset": np.array(1),
    "nonpad_kv_seqlen": np.array([2]), "residual": X,
    "positions": np.array([2, 0, 1]), "lengths": np.array([1, 2]), "before": np.array([1, 2]),
    "indices": np.array([1, 1, 0]), "context": X, "value_context": X, "x_enc_v": X, "w_o": W,
    "b": f32(8), "b_q": f32(8), "b_kv": f32(16), "b_qkv": f32(24), "b_o": f32(8), "bias": f32(8),
    "w": W, "q_norm": f32(4), "k_norm": f32(8), "inv_freq": np.float32([1, 0.5]),
}  # fmt: skip


def flat(x):
    """The arrays of an answer."""
    if isinstance(x, dict):
        x = tuple(x.values())
    return [each for part in x for each in flat(part)] if isinstance(x, tuple) else [x]


def assert_equal(ours, theirs, message=""):
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=message)


def named(name):
    """A pattern for an error that names the argument."""
    return rf"\b({name}|{ALIASES.get(name, name)})\b"


def arrays(kinds=("array", "integers")):
    """(call, argument, function, the other arguments, its value) for each that takes an array."""
    for call, (function, given, named) in CALLS.items():
        for name, kind in named.items():
            value = given.get(name, VALID.get(name))
            if kind in kinds and not (value is None or isinstance(value, (dict, tuple))):
                yield call, name, function, given, np.asarray(value)
