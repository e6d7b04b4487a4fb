"""Options that a call does not have: what other libraries call them, and what they are here."""

from __future__ import annotations

from collections.abc import Collection

_NOT_HERE = "inference has none, leave it out"
_IMPLIED = "the shapes imply it, leave it out"
#: Names of torch, flash-attention, transformers and JAX: our option, or None, and what to write.
_OTHERS: dict[str, tuple[str | None, str]] = {
    "attn_mask": ("mask", "mask=, where True keeps a key as in torch's function"),
    "attn_bias": ("mask", "mask=, of floats"),
    "bias": ("mask", "mask=, of floats"),
    "attention_mask": ("mask", "mask=attention_mask[:, None, None, :].astype(bool)"),
    "key_padding_mask": (
        "mask",
        "mask=~key_padding_mask[:, None, None, :], since True keeps a key",
    ),
    "is_causal": ("causal", "causal=, and align='top-left' for the order that torch has"),
    "use_causal_mask": ("causal", "causal=, and align='top-left' for its order"),
    "softmax_scale": ("scale", "scale="),
    "sm_scale": ("scale", "scale="),
    "scaling": ("scale", "scale="),
    "logits_soft_cap": ("softcap", "softcap="),
    "logit_cap": ("softcap", "softcap="),
    "window_size": ("window", "window=(left, right), where None is open"),
    "local_window_size": ("window", "window=(left, right), where None is open"),
    "sliding_window": ("window", "window=(sliding_window - 1, 0)"),
    "s_aux": ("sinks", "sinks="),
    "query_seq_lengths": ("q_lengths", "q_lengths="),
    "key_value_seq_lengths": ("kv_lengths", "kv_lengths="),
    "segment_ids": ("kv_segments", "kv_segments=, and q_segments= for queries of another length"),
    "q_segment_ids": ("q_segments", "q_segments="),
    "kv_segment_ids": ("kv_segments", "kv_segments="),
    "seqused_k": ("kv_lengths", "kv_lengths="),
    "cache_seqlens": ("kv_lengths", "kv_lengths="),
    "need_weights": ("return_weights", "return_weights="),
    "return_attention_scores": ("return_weights", "return_weights="),
    "output_attentions": ("return_weights", "return_weights="),
    "return_softmax_lse": ("return_lse", "return_lse="),
    "past_key_value": ("cache", "cache=, a KVCache"),
    "past_key_values": ("cache", "cache=, a KVCache"),
    "average_attn_weights": (None, "weights are per head, leave it out"),
    "enable_gqa": (None, _IMPLIED),
    "max_seqlen_q": (None, _IMPLIED),
    "max_seqlen_k": (None, _IMPLIED),
    "dropout_p": (None, _NOT_HERE),
    "dropout": (None, _NOT_HERE),
    "training": (None, _NOT_HERE),
    "deterministic": (None, _NOT_HERE),
}


def refuse(
    given: Collection[str], call: str, options: Collection[str], more: Collection[str] = ()
) -> TypeError:
    """The error for options that a call does not have; it has those, and more to be hinted at."""
    name = min(given)
    message = f"{call}() got an unexpected keyword argument {name!r}"
    ours, hint = _OTHERS.get(name, ("", ""))
    if hint and (ours is None or ours in options or ours in more):
        return TypeError(f"{message}; {hint if ours is None else f'here it is {hint}'}")
    return TypeError(f"{message}; expected {', '.join(options)}")
