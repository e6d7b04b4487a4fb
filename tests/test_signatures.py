"""The parameters of every public name, as they were when the list below was written.

A new option is a change of this list, too; nothing is lost from it by accident.
"""

import inspect

import public_calls

import qkv_ext

#: The options of every attention call, and those that a padded one has beside them.
VARLEN = (
    "causal=False!, align='bottom-right'!, scale=None!, window=None!, softcap=None!, "
    "alibi_slopes=None!, sinks=None!, kv_lengths=None!, "
)
OPTIONS = (
    f"mask=None!, {VARLEN}q_lengths=None!, block_mask=None!, q_segments=None!, kv_segments=None!, "
    "query_offset=None!, key_offset=0!, "
)
NORMS = "q_norm=None!, k_norm=None!, norm_eps=1e-06!, scale=None!, sinks=None!, weight_dtype=None!"
LAST = "out=None!, threads=None!, backend=None!"
SIGNATURES = {
    "BlockMask": "keep, block_size",
    "BlockMask.expand": "self, length, s",
    "KVCache": "batch, num_kv_heads, head_dim, v_dim=None, dtype='float32'!, _page=256!",
    "KVCache.append": "self, k, v, lengths=None",
    "KVCache.attend": (
        f"self, q, {OPTIONS}layout='bhld'!, return_weights=False!, return_lse=False!, {LAST}"
    ),
    "KVCache.keys": "self, b",
    "KVCache.values": "self, b",
    "KVCache.truncate": "self, lengths",
    "KVCache.drop": "self, before",
    "KVCache.reorder": "self, indices",
    "KVCache.fork": "self",
    "KVCache.concatenate": "caches",
    "MultiHeadAttention": (
        "w_q, w_k, w_v, w_o=None, b_q=None!, b_k=None!, b_v=None!, b_o=None!, num_heads!, "
        f"num_kv_heads=None!, {NORMS}"
    ),
    "MultiHeadAttention.from_fused": (
        "w_qkv, w_o=None, b_qkv=None!, b_o=None!, num_heads!, num_kv_heads=None!, order='qkv'!, "
        f"{NORMS}"
    ),
    "MultiHeadAttention.from_fused_kv": (
        "w_q, w_kv, w_o=None, b_q=None!, b_kv=None!, b_o=None!, num_heads!, num_kv_heads=None!, "
        f"order='kv'!, {NORMS}"
    ),
    "MultiHeadAttention.from_state_dict": (
        "mapping, prefix, num_heads, num_kv_heads=None, order=None!, norm_eps=None!, "
        "norm_offset=0.0!, scale=None!, weight_dtype=None!, ignore=()!"
    ),
    "MultiHeadAttention.project_kv": (
        "self, context, value_context=None!, threads=None!, backend=None!"
    ),
    "MultiHeadAttention.__call__": (
        "self, x, context=None, value_context=None!, kv=None!, cache=None!, cu_seqlens=None!, "
        "cu_seqlens_context=None!, rotary=None!, interleaved=False!, rotary_dim=None!, "
        "positions=None!, rotary_sections=None!, return_weights=False!, return_lse=False!, "
        "**options"
    ),
    "PackedWeight": "*arguments, **keywords",
    "PackedWeight.dequantize": "self",
    "PackedWeight.from_matrix": "w, weight_dtype=None",
    "ProjectedKV": "k, v",
    "RotaryFrequencies": "inv_freq, attention_factor",
    "alibi_slopes": "num_heads",
    "apply_rotary": (
        "x, cos, sin, positions=None!, interleaved=False!, rotary_dim=None!, layout='bhld'!, "
        "out=None!, threads=None!, backend=None!"
    ),
    "backends": "",
    "cross_attention": (
        "x_dec, x_enc, w_q, w_k, w_v, w_o=None, num_heads=1!, num_kv_heads=None!, b_q=None!, "
        "b_k=None!, b_v=None!, b_o=None!, x_enc_v=None!, return_weights=False!, return_lse=False!, "
        "**options"
    ),
    "layer_norm": "x, weight, bias=None, eps=1e-05!, out=None!, threads=None!, backend=None!",
    "linear_projection": f"x, w, b=None, activation=None!, residual=None!, {LAST}",
    "matmul": "a, b, out=None!, threads=None!, backend=None!",
    "merge_attention": "outputs, lses, layout='bhld'!, threads=None!, backend=None!",
    "pack_weight": "w, dtype=None!",
    "rms_norm": "x, weight, eps=1e-06!, out=None!, threads=None!, backend=None!",
    "rotary_inv_freq": (
        "dim, base=None, scaling=None, length=None!, max_position_embeddings=None!, "
        "original_max_position_embeddings=None!"
    ),
    "rotary_tables": "n, dim, base=10000.0!, scale=1.0!, inv_freq=None!, attention_factor=1.0!",
    "scaled_dot_product_attention": (
        f"q, k, v, {OPTIONS}layout='bhld'!, return_weights=False!, return_lse=False!, {LAST}"
    ),
    "self_attention": (
        "x, w_q, w_k, w_v, w_o=None, num_heads=1!, num_kv_heads=None!, b_q=None!, b_k=None!, "
        "b_v=None!, b_o=None!, return_weights=False!, return_lse=False!, **options"
    ),
    "show_config": "file=None",
    "softmax": "x, axis=-1, out=None!, threads=None!, backend=None!",
    "trace": f"q, k, v, {OPTIONS}layout='bhld'!, {LAST}",
    "trace_cross": (
        "x_dec, x_enc, w_q, w_k, w_v, w_o=None, num_heads=1!, num_kv_heads=None!, b_q=None!, "
        "b_k=None!, b_v=None!, b_o=None!, **options"
    ),
    "trace_self": (
        "x, w_q, w_k, w_v, w_o=None, num_heads=1!, num_kv_heads=None!, b_q=None!, b_k=None!, "
        "b_v=None!, b_o=None!, **options"
    ),
    "varlen_attention": f"q, k, v, cu_seqlens_q, cu_seqlens_k, {VARLEN}return_lse=False!, {LAST}",
}
#: What the calls of a layer showed as **options is shown in full since.
PROJECTION = ("**options", OPTIONS + LAST)


def public():
    """Every public function, and every method of every public class, by its name."""
    for name in qkv_ext.__all__:
        value = getattr(qkv_ext, name)
        if not callable(value) or (isinstance(value, type) and issubclass(value, Warning)):
            continue
        yield name, value
        for inner, method in vars(value).items() if isinstance(value, type) else ():
            if not inner.startswith("_") or inner == "__call__":
                method = getattr(value, inner)
                if callable(method):
                    yield f"{name}.{inner}", method


def shown(function):
    """The parameters without their types."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return "none"
    return ", ".join(
        ("*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else "")
        + p.name
        + ("" if p.default is p.empty else f"={p.default!r}")
        + ("/" if p.kind is p.POSITIONAL_ONLY else "!" if p.kind is p.KEYWORD_ONLY else "")
        for p in parameters
    )


def test_every_signature():
    """! stands behind a parameter that is passed by its name, / behind one that is not."""
    listed = {name: text.replace(*PROJECTION) for name, text in SIGNATURES.items()}
    assert {name: shown(function) for name, function in public()} == listed


def test_annotations_have_a_meaning():
    """Those of the options are written in a module of their own."""
    for name, function in public():
        inspect.signature(function, eval_str=name != "KVCache")


def test_every_function_is_called():
    """By the tests of what arguments may be, and by the fuzzer."""
    functions = {name for name in qkv_ext.__all__ if inspect.isfunction(getattr(qkv_ext, name))}
    assert functions - set(public_calls.CALLS) == {"backends", "show_config"}
